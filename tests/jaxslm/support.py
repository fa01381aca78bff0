"""What the tests of the three models share."""

import functools

import jax
import numpy as np

from jaxslm.models import Config, Model
from jaxslm.weights import abstract_parameters, from_arrays


@functools.cache
def random_arrays(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters without a one or a zero among them, behind which a fault could hide."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, leaf in abstract_parameters(config).items():
        drawn = 0.3 * rng.standard_normal(leaf.shape)
        if name.endswith("scale"):
            drawn += 1.0
        elif name.endswith("decay"):  # both signs: only the size counts
            drawn = rng.uniform(0.1, 0.6, leaf.shape) * (-1.0) ** np.arange(leaf.shape[-1])
        arrays[name] = drawn.astype(np.float32)
    return arrays


@functools.cache
def random_model(config: Config, seed: int = 0) -> Model:
    """A model with `random_arrays`: nothing is compiled, while our own laws take seconds."""
    return from_arrays(config, random_arrays(config, seed))


@jax.jit
def forward(model: Model, tokens_BT: jax.Array) -> jax.Array:
    """The logits in evaluation."""
    return model(tokens_BT)


def assert_normal(w: jax.Array, std: float) -> None:
    """Float32 draws from N(0, std^2), no two layers or entries alike."""
    w = _independent(w)
    n = w.size
    assert abs(w.mean()) < 5 * std / n**0.5
    assert abs(w.std() / std - 1) < 5 / (2 * n) ** 0.5
    assert abs(np.mean(abs(w) < std) - 0.6827) < 5 * (0.6827 * 0.3173 / n) ** 0.5


def assert_uniform(w: jax.Array, bound: float) -> None:
    """Float32 draws from U(-bound, bound), no two layers or entries alike."""
    w = _independent(w)
    n = w.size
    assert -bound <= w.min() < -bound * (1 - 30 / n)
    assert bound >= w.max() > bound * (1 - 30 / n)
    assert abs(w.mean()) < 5 * bound / 3**0.5 / n**0.5
    assert abs(w.std() / (bound / 3**0.5) - 1) < 5 * 0.45 / n**0.5


def _independent(w: jax.Array) -> np.ndarray:
    """The draws, in float64 for their statistics."""
    assert w.dtype == np.float32
    rows = np.asarray(w).reshape(w.shape[0], -1)
    assert len(np.unique(rows, axis=0)) == len(rows)
    return rows.astype(np.float64)
