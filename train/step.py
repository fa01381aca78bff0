"""One update: state and batch in, state and metrics out; a pure function, jitted by the loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxslm.layers import wide
from jaxslm.models import Config
from jaxslm.rope import RopeTables
from jaxslm.weights import from_arrays
from train.config import TrainConfig
from train.loss import IGNORED, cross_entropy
from train.optimizer import build_optimizer, clip_scale, learning_rate

Parameters = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run carries from one step to the next.

    Attributes:
        step: int32, updates done or skipped; it names the next batch.
        skipped: int32, updates skipped so far because loss or gradient were not finite.
        streak: int32, how many of the latest updates were skipped in a row.
        params: float32, by path.
        optimizer: optax state over the trained parameters.
    """

    step: jax.Array
    skipped: jax.Array
    streak: jax.Array
    params: Parameters
    optimizer: Any


def initial_state(
    params: Parameters, optimizer: optax.GradientTransformation, frozen: tuple[str, ...]
) -> TrainState:
    """The state before the first update; three counters of their own, because all are donated."""
    trained, _ = partition(params, frozen)
    step, skipped, streak = (jnp.zeros((), jnp.int32) for _ in range(3))
    return TrainState(step, skipped, streak, params, optimizer.init(trained))


def partition(params: Parameters, frozen: tuple[str, ...]) -> tuple[Parameters, Parameters]:
    """Parameters that are trained, and those that are not."""
    trained = {path: value for path, value in params.items() if path not in frozen}
    return trained, {path: params[path] for path in frozen}


def make_loss(
    config: Config, *, chunk: int | None = None, rope: RopeTables | None = None
) -> Callable[[Parameters, jax.Array, jax.Array, jax.Array | None], jax.Array]:
    """The summed loss: (params, inputs_BT, targets_BT, dropout key or None) -> scalar.

    Args:
        config: the model's.
        chunk: positions whose logits exist at one time.
        rope: tables in place of the model's own, for the parity check.
    """
    options: dict[str, Any] = {} if rope is None else {"rope": rope}

    def loss(
        params: Parameters, inputs_BT: jax.Array, targets_BT: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        model = from_arrays(config, params)
        found = model.activations(inputs_BT, key=key, logits=False, **options)
        return cross_entropy(model.unembed, found["final_norm"], targets_BT, chunk=chunk)

    return loss


def make_step(
    config: TrainConfig, *, rope: RopeTables | None = None
) -> Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """The update function of a run.

    It takes the state and inputs and targets [A, B / A, T] of one global batch, cut into A
    microbatches, and returns the new state and scalars: loss (mean over the targets that count,
    nats), grad_norm (before clipping), learning_rate, tokens (that count), skipped (total),
    streak, and batch, a uint32 checksum of inputs and targets.

    Loss and gradient are means over all targets of the batch that count, whatever the microbatch
    they stand in; the gradient is clipped after that. Where loss or gradient norm are not finite,
    parameters and optimizer stay as they were and the schedule does not move.

    Args:
        config: the run's.
        rope: tables in place of the model's own, for the parity check.
    """
    model = config.model
    frozen = config.trained_without
    loss_of = make_loss(model, chunk=config.loss_chunk, rope=rope)
    schedule = learning_rate(config.optim, config.steps)
    dropout = getattr(model, "dropout", 0.0) > 0.0
    dtype = wide(model.dtype)

    def step(
        state: TrainState, inputs_ABT: jax.Array, targets_ABT: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        trained, fixed = partition(state.params, frozen)
        optimizer = build_optimizer(config.optim, config.steps, trained)
        tokens = jnp.sum(targets_ABT != IGNORED)
        share = 1.0 / jnp.maximum(tokens, 1).astype(dtype)
        step_key = jax.random.fold_in(jax.random.key(config.seed), state.step)

        def microbatch(number: jax.Array, inputs_BT: jax.Array, targets_BT: jax.Array) -> Any:
            key = jax.random.fold_in(step_key, number) if dropout else None
            return jax.value_and_grad(
                lambda params: share * loss_of(params | fixed, inputs_BT, targets_BT, key)
            )(trained)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, microbatch(*part)), None

        numbers = jnp.arange(inputs_ABT.shape[0])
        if inputs_ABT.shape[0] == 1:
            loss, gradient = microbatch(numbers[0], inputs_ABT[0], targets_ABT[0])
        else:
            zero = (jnp.zeros((), dtype), jax.tree.map(jnp.zeros_like, trained))
            (loss, gradient), _ = jax.lax.scan(add, zero, (numbers, inputs_ABT, targets_ABT))

        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        clip = clip_scale(norm, config.optim.clip)

        def apply(carry: Any) -> Any:
            due, params, optimizer_state = carry
            scale = jnp.where(due, clip, 0.0)  # of this turn: else the clipped gradient is stored
            clipped = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradient)
            updates, optimizer_state = optimizer.update(clipped, optimizer_state, params)
            return jnp.zeros_like(due), optax.apply_updates(params, updates), optimizer_state

        # One turn or none. A choice between the new and the old would keep both in memory: it took
        # 4.7 times as long on a CPU for 166M parameters, and 1.3 GB.
        _, new_params, new_optimizer = jax.lax.while_loop(
            lambda carry: carry[0], apply, (finite, trained, state.optimizer)
        )
        skipped = state.skipped + jnp.where(finite, 0, 1)
        streak = jnp.where(finite, 0, state.streak + 1)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": schedule(state.step - state.skipped),
            "tokens": tokens,
            "skipped": skipped,
            "streak": streak,
            "batch": checksum(inputs_ABT, targets_ABT),
        }
        params = dict(new_params) | fixed
        return TrainState(state.step + 1, skipped, streak, params, new_optimizer), metrics

    return step


def make_evaluation(
    config: TrainConfig,
) -> Callable[[Parameters, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Loss without dropout of a batch in microbatches, as training takes it.

    The function takes parameters and inputs and targets [A, B / A, T], and returns the sum of the
    losses in nats and the number of targets that count.
    """
    loss_of = make_loss(config.model, chunk=config.loss_chunk)

    def evaluate(
        params: Parameters, inputs_ABT: jax.Array, targets_ABT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def microbatch(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            return loss_of(params, part[0], part[1], None)

        losses_A = jax.lax.map(microbatch, (inputs_ABT, targets_ABT))
        return losses_A.sum(), jnp.sum(targets_ABT != IGNORED)

    return evaluate


def checksum(*arrays: jax.Array) -> jax.Array:
    """A uint32 that depends on every value and its place, and not on how arrays are sharded.

    Places are counted in the array's own shape: flattened, a sharded array would be gathered.
    """
    total = jnp.zeros((), jnp.uint32)
    for number, array in enumerate(arrays):
        bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize])
        place, stride = jnp.zeros(bits.shape, jnp.uint32), 1
        for axis in reversed(range(bits.ndim)):
            along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            place = place + along * jnp.uint32(stride % 2**32)
            stride *= bits.shape[axis]
        start = jnp.uint32(number * 0x9E3779B9 % 2**32)
        odd = 2 * place + jnp.uint32(1)
        mixed = (bits.astype(jnp.uint32) + start + jnp.uint32(0x7F4A7C15)) * odd
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA6B)
        total = total + jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
    return total


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # 8: two words
