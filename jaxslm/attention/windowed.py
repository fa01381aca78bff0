"""Window attention over chunks of one window each: memory O(T * window), all chunks at once."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxslm.attention.reference import masked_attention


def chunked_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    slope_N: jax.Array | None,
    window: int,
    exact: bool,
    dropout_rate: float,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """Each chunk of `window` queries against its own keys and the chunk's before.

    Shapes and the meaning of `exact` are those of `jaxslm.attention.attend`.
    """
    B, T = q_BTNH.shape[:2]
    chunks = -(-T // window)

    def split(x_BTNH: jax.Array) -> jax.Array:
        """[B, T, heads, H] -> [B, chunks, window, heads, H], padded with zeros at the end."""
        padded = jnp.pad(x_BTNH, ((0, 0), (0, chunks * window - T), (0, 0), (0, 0)))
        return padded.reshape(B, chunks, window, *x_BTNH.shape[2:])

    def with_previous(x: jax.Array) -> jax.Array:
        """[B, chunks, window, ...] -> [B * chunks, 2 * window, ...]."""
        previous = jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1]
        both = jnp.concatenate([previous, x], axis=2)
        return both.reshape(B * chunks, 2 * window, *x.shape[3:])

    q = split(q_BTNH).reshape(B * chunks, window, *q_BTNH.shape[2:])
    k, v = with_previous(split(k_BTKH)), with_previous(split(v_BTKH))
    query_W = jnp.arange(window)[:, None]
    key_S = jnp.arange(2 * window)[None, :] - window  # relative to the chunk's first query
    distance_WS = query_W - key_S
    # Both modes hide the key at -window: the previous chunk's first key is never visible.
    nearest = (distance_WS < window) if exact else (key_S > -window)
    visible_WS = (distance_WS >= 0) & nearest
    first_chunk = (jnp.arange(B * chunks) % chunks == 0)[:, None, None]
    visible = visible_WS[None] & ~(first_chunk & (key_S < 0)[None])
    o = masked_attention(q, k, v, distance_WS, visible, slope_N, dropout_rate, dropout_key)
    return o.reshape(B, chunks * window, *q_BTNH.shape[2:])[:, :T]


def first_key(query: Any, window: int, exact: bool) -> Any:
    """The earliest position (or below zero) that a query's position sees through a window."""
    return (query if exact else query // window * window) - window + 1
