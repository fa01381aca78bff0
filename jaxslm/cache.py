"""The key-value cache of decoding: what attention remembers of the tokens before.

One pair of arrays [B, S, K, H] a layer, K the key-value heads, so that multi-query and grouped-
query attention keep their small cache. They are separate and not one [L, ...]: a decoder that reads
its layers from a stacked array copies each before use, which halved its speed on a CPU.

Slot p % S holds position p. A cache of every position has S slots for at most S positions; that of
a window is a ring. Which slots are visible follows from the position alone, so the rows of a batch
may stand at different positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxslm.attention.reference import masked_attention
from jaxslm.sharding import BATCH, constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    Attributes:
        k_BSKH: keys, rotated where the model rotates them.
        v_BSKH: values.
    """

    k_BSKH: jax.Array
    v_BSKH: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer.

    Attributes:
        layers: one a layer.
        position_B: int32, positions that are filled, which is the position of the next token.
    """

    layers: tuple[LayerCache, ...]
    position_B: jax.Array

    def __iter__(self) -> Iterator["Past"]:
        """What each layer's attention takes."""
        return ((layer, self.position_B) for layer in self.layers)

    @property
    def slots(self) -> int:
        """S."""
        return self.layers[0].k_BSKH.shape[1]


Past = tuple[LayerCache, jax.Array]  # the cache of a layer, and the new positions [B]


def ring_slots(window: int | None, window_mode: str) -> int | None:
    """Slots that a window needs: 2w - 1 in chunks, w exactly; None for no window.

    Query i of the chunked window sees keys back to floor(i/w) * w - w + 1, at most 2w - 2 before.
    """
    if window is None:
        return None
    return window if window_mode == "exact" else 2 * window - 1


def fill(
    k_LBTKH: jax.Array, v_LBTKH: jax.Array, lengths_B: jax.Array, slots: int, dtype: DTypeLike
) -> Cache:
    """A cache of what a forward pass computed.

    Args:
        k_LBTKH: keys of T positions, of which row b's first `lengths_B[b]` count.
        v_LBTKH: values, likewise.
        lengths_B: int32, 1 to T.
        slots: S; of more positions than that the last S are kept, as a window's ring has them.
        dtype: of the cache.
    """
    slot_S = jnp.arange(slots)[None, :]
    held_BS = held_positions(lengths_B[:, None] - 1, slot_S, slots)
    # Empty slots repeat position 0: no query sees them, and a NaN there would still be one.
    index_BS11 = jnp.clip(held_BS, 0, k_LBTKH.shape[2] - 1)[:, :, None, None]

    def layer(x_BTKH: jax.Array) -> jax.Array:
        kept = jnp.take_along_axis(x_BTKH, index_BS11, axis=1, mode="clip")
        return constrain(kept.astype(dtype), BATCH, None, "tensor", None)

    layers = tuple(
        LayerCache(layer(k_BTKH), layer(v_BTKH))
        for k_BTKH, v_BTKH in zip(k_LBTKH, v_LBTKH, strict=True)
    )
    return Cache(layers, lengths_B)


def grow(cache: Cache, slots: int) -> Cache:
    """The same cache with more slots; not for a ring that has gone round.

    Raises:
        ValueError: it has more already.
    """
    if slots < cache.slots:
        raise ValueError(f"the cache has {cache.slots} slots, more than {slots}")

    def pad(x_BSKH: jax.Array) -> jax.Array:
        padded = jnp.pad(x_BSKH, ((0, 0), (0, slots - cache.slots), (0, 0), (0, 0)))
        return constrain(padded, BATCH, None, "tensor", None)

    return Cache(jax.tree.map(pad, cache.layers), cache.position_B)


def attend_cached(
    q_B1NH: jax.Array,
    k_B1KH: jax.Array,
    v_B1KH: jax.Array,
    layer: LayerCache,
    position_B: jax.Array,
    *,
    slope_N: jax.Array | None = None,
    window: int | None = None,
    window_mode: str = "chunked",
) -> tuple[jax.Array, LayerCache]:
    """Attention of one new position a row to the cached ones and itself.

    Args:
        q_B1NH: query of the new position.
        k_B1KH: its key.
        v_B1KH: its value.
        layer: keys and values of the positions before.
        position_B: int32, the new position.
        slope_N: as in `jaxslm.attention.attend`, and so the next two.
        window: a cache that is no ring for it must have a slot for every position.
        window_mode: "chunked" or "exact".

    Returns:
        o_B1NH in q's dtype, and the layer with the new position. A row whose position has no slot
        gets NaN and changes nothing: a cache is never overwritten at its end.
    """
    slots = layer.k_BSKH.shape[1]
    needed = ring_slots(window, window_mode)
    is_ring = needed is not None and slots >= needed
    rows_B = jnp.arange(q_B1NH.shape[0])
    slot_B = position_B % slots if is_ring else position_B

    def put(old_BSKH: jax.Array, new_B1KH: jax.Array) -> jax.Array:
        new_BKH = new_B1KH[:, 0].astype(old_BSKH.dtype)
        out = old_BSKH.at[rows_B, slot_B].set(new_BKH, mode="drop")
        return constrain(out, BATCH, None, "tensor", None)

    layer = LayerCache(put(layer.k_BSKH, k_B1KH), put(layer.v_BSKH, v_B1KH))
    query_B1 = position_B[:, None]
    held_BS = held_positions(query_B1, jnp.arange(slots)[None, :], slots)
    first_B1 = first_visible(query_B1, window, window_mode)
    visible_BS = (held_BS >= 0) & (held_BS >= first_B1)
    o_B1NH = masked_attention(
        q_B1NH.astype(layer.k_BSKH.dtype), layer.k_BSKH, layer.v_BSKH,
        (query_B1 - held_BS)[:, None, :], visible_BS[:, None, :], slope_N, 0.0, None,
    ).astype(q_B1NH.dtype)  # fmt: skip
    if not is_ring:
        fits_B111 = (position_B < slots)[:, None, None, None]
        o_B1NH = jnp.where(fits_B111, o_B1NH, jnp.nan)
    return o_B1NH, layer


def held_positions(last: jax.Array, slot: jax.Array, slots: int) -> jax.Array:
    """The position that a slot holds once position `last` is written; negative if it holds none."""
    return last - (last - slot) % slots


def first_visible(query: jax.Array, window: int | None, window_mode: str) -> jax.Array:
    """The first position that a query may see."""
    if window is None:
        return jnp.zeros_like(query)
    if window_mode == "exact":
        return query - window + 1
    return query // window * window - window + 1
