"""An update's memory grows with the sequence, not with its square, by the compiler's account."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from jaxslm.weights import abstract_parameters
from train.config import DataConfig, TrainConfig
from train.optimizer import build_optimizer
from train.program import lower
from train.setup import make_layout
from train.step import make_step

LONGEST = 16384
MODELS = {
    "lumen": LumenConfig(
        vocab_size=64, hidden_dim=64, num_layers=2, intermediate_dim=64, max_seq_len=LONGEST
    ),
    "gpt": GPTConfig(
        vocab_size=64, block_size=LONGEST, n_layer=2, n_head=4, n_kv_head=2, n_embd=64
    ),
    "ripple": RippleConfig(
        vocab_size=64, n_layer=2, n_head=2, n_embd=64, dropout=0.1, decay_gradient="always"
    ),
    "ripple with a window": RippleConfig(
        vocab_size=64, n_layer=2, n_head=2, n_embd=64, dropout=0.0, attention_window=256
    ),
}


@pytest.fixture(autouse=True)
def compiled_as_ever(monkeypatch):
    """Without what makes other tests' programs compile quickly."""
    monkeypatch.setattr(jax, "jit", getattr(jax.jit, "func", jax.jit))


def temporaries(run: TrainConfig) -> int:
    trained = set(abstract_parameters(run.model)) - set(run.trained_without)
    layout = make_layout(run, build_optimizer(run.optim, run.steps, trained), jax.devices()[:1])
    compiled = lower(run, layout, make_step(run), layout.state, donate=True).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("name", "remat"), [*((name, "none") for name in MODELS), ("lumen", "full")]
)
def test_memory_is_linear_in_the_sequence(name, remat):
    model = replace(MODELS[name], remat=remat)
    found = {}
    for length in (2048, LONGEST):
        data = DataConfig(batch_size=1, sequence_length=length)
        found[length] = temporaries(TrainConfig(out=Path("run"), model=model, data=data))
    assert found[LONGEST] <= 1.1 * LONGEST / 2048 * found[2048], found


def test_an_update_keeps_no_second_moments():
    sizes = {}
    for width in (256, 512):
        model = GPTConfig(
            vocab_size=64, block_size=16, n_layer=2, n_head=4, n_kv_head=4, n_embd=width
        )
        data = DataConfig(batch_size=1, sequence_length=16)
        weights = sum(4 * math.prod(w.shape) for w in abstract_parameters(model).values())
        sizes[weights] = temporaries(TrainConfig(out=Path("run"), model=model, data=data))
    (small, less), (large, more) = sizes.items()
    assert more - less < 2 * (large - small), sizes  # 3: the gradient and both moments again
