"""What the accelerators' kernels share: decay as features of the heads, and a call a device."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxslm.attention.blockwise import shared_out
from jaxslm.sharding import BATCH

DECAY_LIMIT = 2**16  # positions that two digits to the base 256 make


def on_each_device(
    kernel: Callable[..., jax.Array], q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array
) -> jax.Array:
    """Calls a kernel that the compiler cannot split: under `jax.set_mesh`, with a device's part.

    Rows go to data and fsdp, heads to tensor, or whole to every device where these do not divide
    them. The mesh has the axes of `jaxslm.sharding.make_mesh`.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    if not sizes:
        return kernel(q_BTNH, k_BTKH, v_BTKH)
    B, _, N, _ = q_BTNH.shape
    k_BTKH, v_BTKH = shared_out(k_BTKH, N), shared_out(v_BTKH, N)
    rows = None if B % math.prod(sizes[axis] for axis in BATCH) else BATCH
    heads = None if k_BTKH.shape[2] % sizes["tensor"] else "tensor"
    spec = PartitionSpec(rows, None, heads, None)
    split = jax.shard_map(kernel, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    return split(q_BTNH, k_BTKH, v_BTKH)


def with_decay(
    q_BTNH: jax.Array, k_BTKH: jax.Array, slope_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys with more features, whose scores decay over the distance.

    q.k gets slope * j beside it, which differs from -slope * (i - j) by a constant of each query
    that softmax ignores; so no bias of T x T is needed. The slope is cut into three bfloat16
    numbers and j into two digits to the base 256: every product is exact in bfloat16 too. Their sum
    is not: a score carries float32's rounding at the size of slope * T (0.0005 for a slope of 0.5
    over 16,384 positions), which the reference has not. It is below the rounding of bfloat16; in
    float32 it costs the digits that slope * T has.

    The slope's gradient is the sum of dscores * (j - i). Kernels return q's gradient rounded to its
    dtype, in which the digits' would drown it. So it comes from features of its own, zeros in q: j
    counted from centres, of which each query takes a near one, so that bfloat16 holds the positions
    around the query; and a one, which takes out that the row of dscores does not sum to zero. In
    bfloat16 it errs up to 5 times as much as the reference's, by less than 1 % in normal draws.

    Args:
        q_BTNH: queries, scaled or not; T at most DECAY_LIMIT.
        k_BTKH: keys.
        slope_N: decay per position in what the kernel makes of q.k; float32.

    Returns:
        q and k, wider by `decay_width`.
    """
    position_T = np.arange(q_BTNH.shape[1])
    centres_M = _centres(len(position_T))
    near_TM = _centre_of(position_T)[:, None] == centres_M
    digits_TF = np.repeat(np.stack([position_T // 256 * 256, position_T % 256], 1), 3, axis=1)
    from_centres_TM = position_T[:, None] - centres_M
    k_TF = np.concatenate([digits_TF, from_centres_TM, np.ones_like(digits_TF[:, :1])], 1)

    fixed_N = jax.lax.stop_gradient(slope_N)
    zero_N = slope_N - fixed_N  # that has the gradient
    first_N = jax.lax.reduce_precision(fixed_N, 8, 7)
    second_N = jax.lax.reduce_precision(fixed_N - first_N, 8, 7)
    terms_NF = jnp.stack([first_N, second_N, fixed_N - first_N - second_N] * 2, 1)
    by_slope_TF = np.concatenate([near_TM, -(from_centres_TM * near_TM).sum(1, keepdims=True)], 1)
    zeros_TNF = zero_N[None, :, None] * by_slope_TF[:, None].astype(slope_N.dtype)
    terms_TNF = jnp.broadcast_to(terms_NF[None], (*zeros_TNF.shape[:2], 6))
    q_TNF = jnp.concatenate([terms_TNF, zeros_TNF], 2)
    return _append(q_BTNH, q_TNF[None]), _append(k_BTKH, jnp.asarray(k_TF)[None, :, None])


def decay_width(T: int) -> int:
    """How many features `with_decay` appends."""
    return 6 + len(_centres(T)) + 1


def _centres(T: int) -> np.ndarray:
    """Every centre that a query below T takes."""
    return np.unique(_centre_of(np.arange(T)))


def _centre_of(position_T: np.ndarray) -> np.ndarray:
    """The centre that a query takes: a key within 128 of the query is within 256 of it."""
    return (position_T + 128) // 384 * 384


def _append(x_BTNH: jax.Array, features: jax.Array) -> jax.Array:
    """Heads with features after their own."""
    features = jnp.broadcast_to(features, (*x_BTNH.shape[:3], features.shape[3]))
    return jnp.concatenate([x_BTNH, features.astype(x_BTNH.dtype)], 3)
