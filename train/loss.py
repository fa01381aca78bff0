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
    T = targets_BT.shape[1]
    if chunk is None or chunk >= T:
        return _sum(unembed(x_BTD), targets_BT)
    padding = -T % chunk
    x_BTD = jnp.pad(x_BTD, ((0, 0), (0, padding), (0, 0)))
    targets_BT = jnp.pad(targets_BT, ((0, 0), (0, padding)), constant_values=IGNORED)

    def chunks(a: jax.Array) -> jax.Array:
        """[B, n C, ...] -> [n, B, C, ...]."""
        return jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0)

    @jax.checkpoint
    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x_BCD, targets_BC = part
        return total + _sum(unembed(constrain(x_BCD, BATCH, None, None)), targets_BC), None

    dtype = jnp.promote_types(x_BTD.dtype, jnp.float32)
    total, _ = jax.lax.scan(add, jnp.zeros((), dtype), (chunks(x_BTD), chunks(targets_BT)))
    return total


def _sum(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Sum of the losses of the positions that count."""
    kept_BT = targets_BT != IGNORED
    # A negative index would be counted from the end of the vocabulary.
    index_BT = jnp.where(targets_BT < 0, logits_BTV.shape[-1], targets_BT)
    index_BT1 = jnp.where(kept_BT, index_BT, 0)[..., None]
    chosen_BT = jnp.take_along_axis(
        logits_BTV, index_BT1, axis=-1, mode="fill", fill_value=jnp.nan
    )[..., 0]
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT
    return jnp.where(kept_BT, losses_BT, 0.0).sum()
