"""Cross-entropy over chunks of positions, so that logits never exist whole."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxslm.sharding import BATCH, constrain

IGNORED = -1


def cross_entropy(
    unembed: Callable[[jax.Array], jax.Array],
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    *,
    chunk: int | None = None,
) -> jax.Array:
    """Sum over positions of the negative log-likelihood of the targets, in nats.

    Args:
        unembed: gives logits [B, C, V], at least float32, for C positions of x.
        x_BTD: the final norm's output.
        targets_BT: integer ids; positions of target -1 count nothing. Any other id outside the
            vocabulary gives NaN.
        chunk: positions whose logits exist at one time, forward and backward; None for all.

    Returns:
        A scalar of the logits' dtype; 0 where every target is -1.
    """
    if chunk is None or chunk >= targets_BT.shape[1]:
        return _losses(unembed(x_BTD), targets_BT).sum()

    @jax.checkpoint
    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x_BCD, targets_BC = part
        losses_BC = _losses(unembed(constrain(x_BCD, BATCH, None, None)), targets_BC)
        return total + losses_BC.sum(), None

    dtype = jnp.promote_types(x_BTD.dtype, jnp.float32)
    total, _ = jax.lax.scan(add, jnp.zeros((), dtype), _chunks(x_BTD, targets_BT, chunk))
    return total


def token_losses(
    unembed: Callable[[jax.Array], jax.Array],
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    *,
    chunk: int | None = None,
) -> jax.Array:
    """The terms of `cross_entropy`: the negative log-likelihood of each target, in nats.

    Args:
        unembed: as in `cross_entropy`.
        x_BTD: as in `cross_entropy`.
        targets_BT: as in `cross_entropy`.
        chunk: positions whose logits exist at one time, forward; None for all.

    Returns:
        losses_BT, of the logits' dtype; 0 where the target is -1.
    """
    B, T = targets_BT.shape
    if chunk is None or chunk >= T:
        return _losses(unembed(x_BTD), targets_BT)

    def part(x_and_targets: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BCD, targets_BC = x_and_targets
        return _losses(unembed(constrain(x_BCD, BATCH, None, None)), targets_BC)

    losses_nBC = jax.lax.map(part, _chunks(x_BTD, targets_BT, chunk))
    return jnp.moveaxis(losses_nBC, 0, 1).reshape(B, -1)[:, :T]


def _chunks(x_BTD: jax.Array, targets_BT: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Both cut into n chunks of C positions, [n, B, C, ...]; the last is filled up, uncounted."""
    padding = -targets_BT.shape[1] % chunk
    x_BTD = jnp.pad(x_BTD, ((0, 0), (0, padding), (0, 0)))
    targets_BT = jnp.pad(targets_BT, ((0, 0), (0, padding)), constant_values=IGNORED)

    def cut(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0)

    return cut(x_BTD), cut(targets_BT)


def _losses(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """The loss of each position, 0 where it does not count."""
    kept_BT = targets_BT != IGNORED
    # A negative index would be counted from the end of the vocabulary.
    index_BT = jnp.where(targets_BT < 0, logits_BTV.shape[-1], targets_BT)
    index_BT1 = jnp.where(kept_BT, index_BT, 0)[..., None]
    chosen_BT = jnp.take_along_axis(
        logits_BTV, index_BT1, axis=-1, mode="fill", fill_value=jnp.nan
    )[..., 0]
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT
    return jnp.where(kept_BT, losses_BT, 0.0)
