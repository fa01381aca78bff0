"""Generation on meshes of eight fake devices gives the tokens of one device.

JAX makes fake devices only when it starts, so the first test runs the others in a process of their
own.
"""

import jax
import numpy as np
import pytest

from jaxslm import Generator, Sampling
from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from jaxslm.sharding import make_mesh
from jaxslm.weights import load, save
from tests.children import on_eight_devices, pass_on_eight_devices
from tests.jaxslm.support import random_model

V = 32
CONFIGS = {
    "lumen": LumenConfig(vocab_size=V, hidden_dim=16, num_layers=2, num_heads=4, num_kv_heads=1,
                         intermediate_dim=32, max_seq_len=64),
    "gpt": GPTConfig(vocab_size=V, n_embd=16, n_layer=2, n_head=4, n_kv_head=4, block_size=64),
    "ripple": RippleConfig(vocab_size=V, n_embd=24, n_layer=2, n_head=4, attention_window=8),
}  # fmt: skip


def test_meshes_of_eight_devices_are_one_device():
    pass_on_eight_devices(__file__, "not test_meshes_of_eight", 6)


@on_eight_devices
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4)], ids=["2x2x2", "1x2x4"])
@pytest.mark.parametrize("model", CONFIGS)
def test_a_mesh_gives_the_same_tokens(model, sizes, tmp_path):
    save(random_model(CONFIGS[model]), tmp_path / "model")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, V, length) for length in (3, 17, 9, 1)]
    one = Generator(load(tmp_path / "model"))
    mesh = make_mesh(*sizes, jax.devices())
    placed = load(tmp_path / "model", mesh=mesh)
    assert not placed.blocks.attention.wq[...].sharding.is_fully_replicated
    many = Generator(placed)
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.9, top_k=9)):
        options = {"max_new_tokens": 24, "sampling": sampling, "key": jax.random.key(1)}
        expected, _ = one(prompts, **options)
        found, _ = many(prompts, **options)
        for row, same in zip(found, expected, strict=True):
            np.testing.assert_array_equal(row, same)
    leaf = max(many._leaves, key=lambda leaf: leaf.size)
    assert not leaf.sharding.is_fully_replicated
