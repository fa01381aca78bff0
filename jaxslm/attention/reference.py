"""Attention written as the formula reads: every score exists. Runs on any platform; parity's path.

Shapes and dtypes are those of `jaxslm.attention.attend`, which has checked them.
"""

import jax
import jax.numpy as jnp

from jaxslm.layers import dropout, wide


def full_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    slope_N: jax.Array | None,
    dropout_rate: float,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """Every query sees every key up to itself."""
    positions_T = jnp.arange(q_BTNH.shape[1])
    distance_TS = positions_T[:, None] - positions_T[None, :]
    return masked_attention(
        q_BTNH, k_BTKH, v_BTKH, distance_TS, distance_TS >= 0, slope_N, dropout_rate, dropout_key
    )


def masked_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    distance_TS: jax.Array,
    visible_TS: jax.Array,
    slope_N: jax.Array | None,
    dropout_rate: float,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """Attention with explicit distances (integers) and visibility (bool); either may lead with B.

    Every query must see at least one key.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    accumulate = wide(q_BTNH.dtype)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=accumulate)
    scores = scores * H**-0.5
    # Shaped [B or 1, 1, 1, T, S], so that one layout serves whole sequences and window chunks.
    shape = (-1, 1, 1, *distance_TS.shape[-2:])
    if slope_N is not None:
        slope = slope_N.astype(accumulate).reshape(1, K, N // K, 1, 1)
        scores = scores - slope * distance_TS.astype(accumulate).reshape(shape)
    scores = jnp.where(visible_TS.reshape(shape), scores, jnp.finfo(accumulate).min)
    weights = dropout(jax.nn.softmax(scores, axis=-1), dropout_rate, dropout_key)
    o_BTKGH = jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(v_BSKH.dtype), v_BSKH, preferred_element_type=accumulate
    )
    return o_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)
