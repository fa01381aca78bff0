"""The key-value cache of decoding: what attention remembers of the tokens before.

One pair of arrays [B, K, S, H] a layer, K the key-value heads, so that multi-query and grouped-
query attention keep their small cache. Layers are separate arrays and not one [L, ...]: a decoder
that reads its layers from a stacked array copies each before use, which halved its speed on a CPU.
Heads stand before slots because products of one query then read the cache as it lies.

Slot p % S holds position p. A cache of every position has S slots for at most S positions; that of
a window is a ring. Which slots are visible follows from the position alone, so the rows of a batch
may stand at different positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxslm.attention.windowed import first_key
from jaxslm.layers import wide
from jaxslm.sharding import BATCH, constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    Attributes:
        k_BKSH: keys, rotated where the model rotates them.
        v_BKSH: values.
    """

    k_BKSH: jax.Array
    v_BKSH: jax.Array


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
        return self.layers[0].k_BKSH.shape[2]


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
        kept_BSKH = jnp.take_along_axis(x_BTKH, index_BS11, axis=1, mode="clip")
        return _constrained(kept_BSKH.swapaxes(1, 2).astype(dtype))

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

    def pad(x_BKSH: jax.Array) -> jax.Array:
        return _constrained(jnp.pad(x_BKSH, ((0, 0), (0, 0), (0, slots - cache.slots), (0, 0))))

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
    B, _, N, H = q_B1NH.shape
    K, slots = layer.k_BKSH.shape[1:3]
    needed = ring_slots(window, window_mode)
    is_ring = needed is not None and slots >= needed
    slot_B = position_B % slots if is_ring else position_B
    layer = LayerCache(_put(layer.k_BKSH, k_B1KH, slot_B), _put(layer.v_BKSH, v_B1KH, slot_B))

    query_B1 = position_B[:, None]
    held_BS = held_positions(query_B1, jnp.arange(slots)[None, :], slots)
    visible_BS = held_BS >= 0
    if window is not None:
        visible_BS &= held_BS >= first_key(query_B1, window, window_mode == "exact")
    q_BKGH = q_B1NH.reshape(B, K, N // K, H).astype(layer.k_BKSH.dtype)
    accumulate = wide(q_BKGH.dtype)
    scores_BKGS = H**-0.5 * jnp.einsum(
        "bkgh,bksh->bkgs", q_BKGH, layer.k_BKSH, preferred_element_type=accumulate
    )
    if slope_N is not None:
        distance_B11S = (query_B1 - held_BS)[:, None, None, :].astype(accumulate)
        scores_BKGS -= slope_N.astype(accumulate).reshape(1, K, N // K, 1) * distance_B11S
    least = jnp.finfo(accumulate).min
    scores_BKGS = jnp.where(visible_BS[:, None, None, :], scores_BKGS, least)
    weights_BKGS = jax.nn.softmax(scores_BKGS, axis=-1).astype(layer.v_BKSH.dtype)
    o_BKGH = jnp.einsum(
        "bkgs,bksh->bkgh", weights_BKGS, layer.v_BKSH, preferred_element_type=accumulate
    )
    o_B1NH = o_BKGH.reshape(q_B1NH.shape).astype(q_B1NH.dtype)
    if not is_ring:
        fits_B111 = (position_B < slots)[:, None, None, None]
        o_B1NH = jnp.where(fits_B111, o_B1NH, jnp.nan)
    return o_B1NH, layer


def _put(x_BKSH: jax.Array, new_B1KH: jax.Array, slot_B: jax.Array) -> jax.Array:
    """The cache with one new entry a row, in place; a slot that is not there is left out.

    All indices are given, because XLA makes of a single slice what it then copies the cache for.
    """
    B, K, _, H = x_BKSH.shape
    new_BKH = new_B1KH[:, 0].astype(x_BKSH.dtype)
    index: tuple[jax.Array, ...] = (jnp.arange(B)[:, None], jnp.arange(K)[None], slot_B[:, None])
    if B * K == 1:
        index = (*(part[..., None] for part in index), jnp.arange(H)[None, None])
    return _constrained(x_BKSH.at[index].set(new_BKH, mode="drop"))


def _constrained(x_BKSH: jax.Array) -> jax.Array:
    """Rows over data and fsdp, heads over tensor."""
    return constrain(x_BKSH, BATCH, "tensor", None, None)


def held_positions(last: jax.Array, slot: jax.Array, slots: int) -> jax.Array:
    """The position that a slot holds once position `last` is written; negative if it holds none."""
    return last - (last - slot) % slots
