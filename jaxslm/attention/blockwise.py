"""Causal attention in blocks: memory linear in T, and blocks that no query sees never computed.

The result is that of `jaxslm.attention.reference`, the order that of FlashAttention (Dao et al.
2022): the forward pass keeps a running maximum and sum for each query and saves the logarithm of
its sum of exponentials, with which the backward pass makes the weights of a block again.

One loop runs over the pairs (block of queries, block of keys) with a visible key, so the program
is as large for 16,384 positions as for 256. The queries of a group's heads are rows of one product
with the keys that they share. Axes beside the usual ones: R = G * S, the rows of a block of queries
(head of the group, position); S, the keys of a block. Matrices [R, S] are never transposed, which
on a CPU costs more than the product itself.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxslm.attention.windowed import first_key
from jaxslm.layers import wide
from jaxslm.sharding import BATCH, constrain


def blockwise_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    slope_N: jax.Array | None,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    window: int | None = None,
    exact: bool = False,
) -> jax.Array:
    """Every query sees every key up to itself, or those of its window.

    Shapes, dtypes and windows (`exact` or chunked) are those of `jaxslm.attention.attend`, which
    has checked them. Scores, softmax and accumulators are float32 at least; the operands of every
    product, forward and backward, are in the inputs' dtype. Differentiable in reverse only: in q,
    k, v and the slope.

    With dropout the weights that fall are `kept_weights` of each block: others than the reference's
    with the same key, from the same distribution.
    """
    key = None if dropout_rate == 0.0 else dropout_key
    if key is not None and _survivors(dropout_rate) == 0:
        return jnp.zeros_like(q_BTNH)
    k_BTKH, v_BTKH = shared_out(k_BTKH, q_BTNH.shape[2]), shared_out(v_BTKH, q_BTNH.shape[2])
    return _attention(dropout_rate, window, exact, q_BTNH, k_BTKH, v_BTKH, slope_N, key)


def block_size(T: int, window: int | None) -> int:
    """Positions in a block: a quarter of T or half a window, rounded up to 64, 128, 192 or 256."""
    return min(256, 64 * -(-T // 256), 64 * -(-(window or T) // 128))


def kept_weights(
    key: jax.Array, i: jax.Array | int, j: jax.Array | int, shape: tuple[int, ...], rate: float
) -> jax.Array:
    """Which weights of queries' block i and keys' block j survive dropout.

    Args:
        key: PRNG key of the whole attention.
        i: number of the block of queries.
        j: number of the block of keys.
        shape: [B, K, R, S].
        rate: probability of being dropped, in steps of 2^-16: two draws from each random word.

    Returns:
        bool [B, K, R, S].
    """
    key = jax.random.fold_in(jax.random.fold_in(key, i), j)
    bits = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), "uint32")
    halves = jnp.concatenate([bits & 0xFFFF, bits >> 16], axis=-1)
    return halves < _survivors(rate)


def shared_out(k_BTKH: jax.Array, N: int) -> jax.Array:
    """Repeats heads until the mesh's tensor axis divides them, so that each device has its own.

    Else a group's gradients would be summed over devices for every pair of blocks.
    """
    K, parts = k_BTKH.shape[2], jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
    heads = math.lcm(K, parts)
    if heads == K or N % heads:
        return k_BTKH
    return constrain(jnp.repeat(k_BTKH, heads // K, axis=2), BATCH, None, "tensor", None)


def _survivors(rate: float) -> int:
    """How many of 2^16 weights dropout keeps on average."""
    return round((1.0 - rate) * 2**16)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    rate: float,
    window: int | None,
    exact: bool,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    slope_N: jax.Array | None,
    key: jax.Array | None,
) -> jax.Array:
    """`blockwise_attention` with a rate below 1, and a key only if the rate is above 0."""
    return _forward(rate, window, exact, q_BTNH, k_BTKH, v_BTKH, slope_N, key)[0]


def _forward(
    rate: float,
    window: int | None,
    exact: bool,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    slope_N: jax.Array | None,
    key: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """The output and what the backward pass needs."""
    T, N, K = q_BTNH.shape[1], q_BTNH.shape[2], k_BTKH.shape[2]
    accumulate, size = wide(q_BTNH.dtype), block_size(T, window)
    q, k, v = _split(q_BTNH, K, size), _split(k_BTKH, K, size), _split(v_BTKH, K, size)
    slope_KR = _rows_of(slope_N, K, size, accumulate)

    def step(state: Any, pair: Any) -> tuple[Any, None]:
        i, j = pair
        o, top, total = (_at(x, i) for x in state)
        scores, _ = _scores(_at(q, i), _at(k, j), i, j, slope_KR, window, exact)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(-1)
        if key is not None:
            kept = kept_weights(key, i, j, weights.shape, rate)
            weights = jnp.where(kept, weights * (2**16 / _survivors(rate)), 0.0)
        values = _product("bkrs,bksh->bkrh", weights.astype(v.dtype), _at(v, j))
        news = (o * shrink[..., None] + values, new_top, total)
        return tuple(_put(x, new, i) for x, new in zip(state, news, strict=True)), None

    least = jnp.full(q.shape[:-1], jnp.finfo(accumulate).min, accumulate)
    state = (jnp.zeros(q.shape, accumulate), least, jnp.zeros_like(least))
    (o, top, total), _ = jax.lax.scan(step, state, _pairs(q, size, window, exact))
    o_BTNH = _join(o / total[..., None], T, N)
    # Kept wide: of the gradients' errors in bfloat16 its rounding would make the largest.
    return o_BTNH.astype(q_BTNH.dtype), (q, k, v, slope_N, key, o_BTNH, top + jnp.log(total))


def _backward(
    rate: float, window: int | None, exact: bool, saved: tuple[Any, ...], do_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None]:
    """Gradients of q, k, v and the slope."""
    q, k, v, slope_N, key, o_BTNH, logsumexp = saved
    (B, T, N, H), (K, size) = o_BTNH.shape, k.shape[2:4]
    accumulate = wide(q.dtype)
    do = _split(do_BTNH, K, size)
    # The sum over keys of weight * gradient of the weight, without making either.
    delta_BTN1 = (do_BTNH.astype(accumulate) * o_BTNH).sum(-1, keepdims=True)
    delta = _split(delta_BTN1, K, size)[..., 0]
    slope_KR = _rows_of(slope_N, K, size, accumulate)

    def step(state: Any, pair: Any) -> tuple[Any, None]:
        dq, dk_HS, dv_HS, sums = state
        i, j = pair
        q_i, k_j, do_i = _at(q, i), _at(k, j), _at(do, i)
        scores, distance = _scores(q_i, k_j, i, j, slope_KR, window, exact)
        softmax = jnp.exp(scores - _at(logsumexp, i)[..., None])
        weights = softmax
        dweights = _product("bkrh,bksh->bkrs", do_i, _at(v, j))
        if key is not None:
            kept, scale = kept_weights(key, i, j, weights.shape, rate), 2**16 / _survivors(rate)
            weights = jnp.where(kept, weights * scale, 0.0)
            dweights = jnp.where(kept, dweights * scale, 0.0)
        dscores = softmax * (dweights - _at(delta, i)[..., None])
        if sums is not None:
            parts = (dscores * distance, dscores, softmax * distance)
            sums = tuple(
                _put(x, _at(x, i) + y.sum(-1), i) for x, y in zip(sums, parts, strict=True)
            )
        dscores, weights = dscores.astype(q.dtype), weights.astype(v.dtype)
        dq = _put(dq, _at(dq, i) + _product("bkrs,bksh->bkrh", dscores, k_j), i)
        dk_HS = _put(dk_HS, _at(dk_HS, j) + _product("bkrh,bkrs->bkhs", q_i, dscores), j)
        dv_HS = _put(dv_HS, _at(dv_HS, j) + _product("bkrh,bkrs->bkhs", do_i, weights), j)
        return (dq, dk_HS, dv_HS, sums), None

    zeros_HS = jnp.zeros(k.swapaxes(-1, -2).shape, accumulate)
    sums = None if slope_N is None else (jnp.zeros(q.shape[:-1], accumulate),) * 3
    state = (jnp.zeros(q.shape, accumulate), zeros_HS, zeros_HS, sums)
    (dq, dk_HS, dv_HS, sums), _ = jax.lax.scan(step, state, _pairs(q, size, window, exact))
    dslope_N = None
    if slope_N is not None:
        by_distance, error, mean_distance = sums
        # A row of dscores sums to zero but for the rounding of delta, which is taken out again.
        dslope_IBKR = error * mean_distance - by_distance
        dslope_N = dslope_IBKR.reshape(len(q), B, N, -1).sum((0, 1, 3)).astype(slope_N.dtype)
    dq_BTNH = _join(dq * H**-0.5, T, N).astype(q.dtype)
    dk_BTKH = _join(dk_HS.swapaxes(-1, -2) * H**-0.5, T, K).astype(k.dtype)
    dv_BTKH = _join(dv_HS.swapaxes(-1, -2), T, K).astype(v.dtype)
    return dq_BTNH, dk_BTKH, dv_BTKH, dslope_N, None


_attention.defvjp(_forward, _backward)


def _scores(
    q_i: jax.Array,
    k_j: jax.Array,
    i: jax.Array,
    j: jax.Array,
    slope_KR: jax.Array | None,
    window: int | None,
    exact: bool,
) -> tuple[jax.Array, jax.Array]:
    """Scores [B, K, R, S] of one pair of blocks and the distances [1, 1, R, S] as floats.

    Every query, of those that pad the last block too, sees itself and so some key; but a block may
    hold none that it sees. The forward pass then forgets it at the next greater maximum.
    """
    R, S = q_i.shape[2], k_j.shape[2]
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (1, 1, R, S), axis) for axis in (2, 3))
    query, key = rows % S + i * S, columns + j * S
    visible = key <= query
    if window is not None:
        visible = visible & (key >= first_key(query, window, exact))
    scores = _product("bkrh,bksh->bkrs", q_i, k_j) * q_i.shape[3] ** -0.5
    distance = (query - key).astype(scores.dtype)
    if slope_KR is not None:
        scores = scores - slope_KR[None, :, :, None] * distance
    return jnp.where(visible, scores, jnp.finfo(scores.dtype).min), distance


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Einsum accumulated, and returned, in float32 at least."""
    return jnp.einsum(spec, x, y, preferred_element_type=wide(x.dtype))


def _pairs(q: jax.Array, size: int, window: int | None, exact: bool) -> tuple[jax.Array, jax.Array]:
    """Numbers of query and key block of every pair with a visible key; i ascends, then j."""
    i, j = np.tril_indices(len(q))
    if window is not None:
        seen = (j + 1) * size > first_key(i * size, window, exact)
        i, j = i[seen], j[seen]
    pairs = jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32)
    # Were they constants, JAX would take the masks of all pairs out of the loop over layers and
    # keep them: memory in T squared.
    return jax.lax.optimization_barrier((pairs, q[0, 0, 0, 0, 0]))[0]


def _split(x_BTNH: jax.Array, K: int, size: int) -> jax.Array:
    """[B, T, heads, width] -> [blocks, B, K, heads / K * size, width], padded with zeros."""
    B, T, N, H = x_BTNH.shape
    blocks = -(-T // size)
    x = jnp.pad(x_BTNH, ((0, 0), (0, blocks * size - T), (0, 0), (0, 0)))
    x = x.reshape(B, blocks, size, K, N // K, H).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(blocks, B, K, N // K * size, H)


def _join(x: jax.Array, T: int, N: int) -> jax.Array:
    """The inverse of `_split`."""
    blocks, B, K, _, H = x.shape
    x = x.reshape(blocks, B, K, N // K, -1, H).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, -1, N, H)[:, :T]


def _rows_of(slope_N: jax.Array | None, K: int, size: int, dtype: jnp.dtype) -> jax.Array | None:
    """The slope of each row of a block, [K, R]."""
    if slope_N is None:
        return None
    return jnp.repeat(slope_N.astype(dtype).reshape(K, -1), size, axis=1)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    """Block i."""
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
    """With block i replaced."""
    return jax.lax.dynamic_update_index_in_dim(x, block, i, 0)
