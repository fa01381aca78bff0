"""Optimizers and schedules, equal to torch's AdamW and the originals' recipes step for step."""

import math
import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from train.config import OptimConfig, decay_length

# Parameters that are matrices for Muon: reduced axes, output axes of the stacked array.
MATRICES: tuple[tuple[str, MuonDimensionNumbers], ...] = (
    (r"blocks\.attention\.w[qkv]", MuonDimensionNumbers((1,), (2, 3))),  # L D N|K H
    (r"blocks\.attention\.wo", MuonDimensionNumbers((1, 2), (3,))),  # L N H D
    (r"blocks\.mlp\.w_(gate|up)", MuonDimensionNumbers((1,), (2,))),  # L D F
    (r"blocks\.mlp\.w_(down|out)", MuonDimensionNumbers((1,), (2,))),  # L F D
    (r"blocks\.mlp\.w_in", MuonDimensionNumbers((1,), (2, 3))),  # L D 2 F
)
VECTOR = re.compile(r".*\.(scale|bias|decay|b[qkv]|b_in|b_out)")


def learning_rate(config: OptimConfig, steps: int, peak: float | None = None) -> optax.Schedule:
    """The schedule: update count -> learning rate, in JAX's default float dtype.

    Args:
        config: names it.
        steps: updates in the run.
        peak: in place of `config.lr`; `final_lr` is scaled alike.

    Sources: nanoGPT's `get_lr` and build-nanogpt's, which differ in the warm-up's first step;
    warmup-stable-decay of Hu et al. 2024.

    Raises:
        ValueError: warm-up and decay do not fit into the run.
    """
    peak = config.lr if peak is None else peak
    final = config.final_lr * peak / config.lr
    warmup = config.warmup_steps
    length = decay_length(config, steps)
    if config.schedule == "cosine" and length <= warmup:
        raise ValueError(
            f"a cosine over {length} steps must be longer than its warm-up of {warmup}: set "
            "optim.decay_steps, optim.warmup_steps or steps"
        )
    if config.schedule == "wsd" and length + warmup > steps:
        raise ValueError(
            f"warm-up of {warmup} and decay of {length} steps do not fit into {steps} steps: set "
            "optim.decay_steps, optim.warmup_steps or steps"
        )

    def schedule(count: Any) -> jax.Array:
        count = jnp.asarray(count, float)  # float64 in x64 mode, where int32 / int is float32
        rise = peak * (count + 1) / (warmup + (config.warmup == "nanogpt"))
        if config.schedule == "cosine":
            done = jnp.clip((count - warmup) / (length - warmup), 0.0, 1.0)
            rate = final + 0.5 * (1.0 + jnp.cos(jnp.pi * done)) * (peak - final)
        elif config.schedule == "wsd":
            done = jnp.clip((count - (steps - length)) / length, 0.0, 1.0)
            rate = peak + done * (final - peak)
        else:
            rate = jnp.full_like(rise, peak)
        return jnp.where(count < warmup, rise, rate) if warmup else rate

    return schedule


def build_optimizer(
    config: OptimConfig, steps: int, trained: Collection[str]
) -> optax.GradientTransformation:
    """The optimizer for a dict of parameters by path; clipping is the step's.

    Args:
        config: names it.
        steps: updates in the run.
        trained: paths of the parameters that it updates.

    Raises:
        ValueError: the schedule does not fit into the run.
    """
    mask = {path: is_decayed(path, config) for path in trained}
    b1, b2 = config.betas
    adamw = optax.chain(
        scale_by_torch_adam(b1, b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )
    if config.name == "adamw":
        return adamw
    # optax's muon would give the rest Nesterov's momentum and decay all of it, so it gets no rest.
    numbers: Any = {path: muon_numbers(path) or optax.MaskedNode() for path in trained}
    muon = optax.contrib.muon(
        learning_rate(config, steps, config.muon_lr),
        weight_decay=config.weight_decay,
        weight_decay_mask=mask,
        muon_weight_dimension_numbers=numbers,
    )
    return optax.partition(
        {"muon": muon, "adamw": adamw},
        {path: "muon" if muon_numbers(path) else "adamw" for path in trained},
    )


def is_decayed(path: str, config: OptimConfig) -> bool:
    """Whether weight decay applies to a parameter.

    By name, not by rank: stacked norms have two dimensions here and one in torch.
    """
    return config.decay == "all" or not VECTOR.fullmatch(path)


def muon_numbers(path: str) -> MuonDimensionNumbers | None:
    """The axes by which Muon sees a parameter as matrices; None for AdamW's share."""
    return next((numbers for rule, numbers in MATRICES if re.fullmatch(rule, path)), None)


def scale_by_torch_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam's scaling in the order of operations of `torch.optim.AdamW`.

    optax's own takes 1 - b**count from a float32 power, off by 1e-5 of itself at the first steps;
    torch takes it in float64. Here it is exact to float32's rounding. The state is optax's.
    """

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(
            jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros)
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        first = jax.tree.map(lambda g, m: _lerp(m, g, 1 - b1), updates, state.mu)
        second = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, updates, state.nu)
        correction1, correction2 = _correction(b1, count), _correction(b2, count)

        def scaled(m: jax.Array, v: jax.Array) -> jax.Array:
            denominator = jnp.sqrt(v) / jnp.sqrt(correction2).astype(v.dtype) + eps
            return m / correction1.astype(m.dtype) / denominator

        return jax.tree.map(scaled, first, second), optax.ScaleByAdamState(count, first, second)

    return optax.GradientTransformation(init, update)


def moments_of(state: Any) -> tuple[Any, Any, int]:
    """First moments, second moments by path, and the update count of AdamW's state.

    Raises:
        ValueError: it is another optimizer's state.
    """
    found = [part for part in _parts(state) if isinstance(part, optax.ScaleByAdamState)]
    if len(found) != 1 or not isinstance(found[0].mu, dict):
        raise ValueError("only AdamW's state can leave a run, and this run has another optimizer")
    return found[0].mu, found[0].nu, int(np.asarray(found[0].count))


def with_moments(state: Any, first: Any, second: Any, count: Callable[[Any], Any]) -> Any:
    """AdamW's state with other moments; `count` gives each of its counters from its present one."""

    def replaced(part: Any) -> Any:
        if isinstance(part, optax.ScaleByAdamState):
            return optax.ScaleByAdamState(count(part.count), first, second)
        if isinstance(part, optax.ScaleByScheduleState):
            return optax.ScaleByScheduleState(count(part.count))
        return part

    return jax.tree.map(replaced, state, is_leaf=_is_part)


def _parts(state: Any) -> list[Any]:
    return jax.tree.leaves(state, is_leaf=_is_part)


def _is_part(value: Any) -> bool:
    return isinstance(value, optax.ScaleByAdamState | optax.ScaleByScheduleState)


def _lerp(start: jax.Array, end: jax.Array, weight: float) -> jax.Array:
    """From the nearer end, as `torch.lerp`."""
    if weight < 0.5:
        return start + weight * (end - start)
    return end - (1 - weight) * (end - start)


def _correction(beta: float, count: jax.Array) -> jax.Array:
    """1 - beta**count, without cancellation."""
    if beta == 0.0:
        return jnp.ones(())
    return -jnp.expm1(count * jnp.asarray(math.log(beta)))


def clip_scale(norm: jax.Array, clip: float | None) -> jax.Array:
    """What a gradient of this global norm is multiplied by, as `torch.nn.utils.clip_grad_norm_`."""
    if clip is None:
        return jnp.ones_like(norm)
    return jnp.minimum(1.0, clip / (norm + 1e-6))
