"""Generation on meshes of eight fake devices gives the tokens of one device.

JAX makes fake devices only when it starts, so the first test runs the others in a process of their
own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxslm import Generator, Sampling
from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from jaxslm.sharding import make_mesh
from jaxslm.weights import load, save
from tests.conftest import REPOSITORY
from tests.jaxslm.support import random_model

EIGHT = "--xla_force_host_platform_device_count=8"
V = 32
CONFIGS = {
    "lumen": LumenConfig(vocab_size=V, hidden_dim=16, num_layers=2, num_heads=4, num_kv_heads=1,
                         intermediate_dim=32, max_seq_len=64),
    "gpt": GPTConfig(vocab_size=V, n_embd=16, n_layer=2, n_head=4, n_kv_head=4, block_size=64),
    "ripple": RippleConfig(vocab_size=V, n_embd=24, n_layer=2, n_head=4, attention_window=8),
}  # fmt: skip


def test_meshes_of_eight_devices_are_one_device():
    flags = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT}".strip()
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment = {name: v for name, v in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    done = subprocess.run(
        [*command, "-k", "not test_meshes_of_eight", str(Path(__file__))],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\n6 passed", done.stdout), done.stdout


@pytest.mark.skipif(
    EIGHT not in os.environ.get("XLA_FLAGS", ""),
    reason="run with eight devices by test_meshes_of_eight_devices_are_one_device",
)
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
