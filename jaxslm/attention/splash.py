"""Attention by the splash kernel that comes with JAX, for TPUs: memory linear in T.

The kernel computes blocks of scores with a visible key and no others, forward and backward, and
saves the output and the logarithm of the sum of exponentials. Its mask is a function of positions.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from jaxslm.attention.kernels import on_each_device, with_decay
from jaxslm.attention.windowed import first_key

LANES = 128  # the kernel's blocks are multiples of it


def splash_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    slope_N: jax.Array | None,
    window: int | None,
    exact: bool,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Every query sees every key up to itself, or those of its window.

    Shapes and windows (`exact` or chunked) are those of `jaxslm.attention.attend`, which has
    checked them; bfloat16 or float32. Differentiable in reverse only: in q, k, v and the slope.
    Queries are scaled before the kernel, in their dtype: exact if H is a power of 4. For the
    rounding that a slope brings see `jaxslm.attention.kernels.with_decay`.

    The kernel's fused backward pass is not used: it writes a gradient of q for every block of keys.
    `interpret` runs the kernel's program in plain JAX, on any platform, slowly.
    """
    (_, T, _, H), size = q_BTNH.shape, block_size(q_BTNH.shape[1], window)
    q_BTNH = (q_BTNH.astype(jnp.float32) * H**-0.5).astype(q_BTNH.dtype)
    if slope_N is not None:
        q_BTNH, k_BTKH = with_decay(q_BTNH, k_BTKH, slope_N)
    mask = _Visible(-(-T // size) * size, window, exact)
    padding = ((0, 0), (0, mask.length - T), (0, 0), (0, 0))  # no query sees what comes after it

    def kernel(*qkv: jax.Array) -> jax.Array:
        attention: Any = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * qkv[0].shape[2]),
            block_sizes=splash.BlockSizes(
                block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size,
                block_q_dq=size, block_kv_dq=size,
            ),
            interpret=interpret,
        )  # fmt: skip
        return jax.vmap(attention)(*(x.swapaxes(1, 2) for x in qkv)).swapaxes(1, 2)

    padded = (jnp.pad(x, padding) for x in (q_BTNH, k_BTKH, v_BTKH))
    return on_each_device(kernel, *padded)[:, :T]


def block_size(T: int, window: int | None) -> int:
    """Positions in a block: at most 512 and about a window, and as many in each as T allows."""
    limit = 512 if window is None else min(512, max(256, LANES * -(-window // LANES)))
    return LANES * -(-T // (LANES * -(-T // limit)))


@dataclass(frozen=True)
class _Visible(splash.Mask):
    """Which key a query sees, for the kernel to compute where it needs it."""

    length: int
    window: int | None
    exact: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.length, dtype=np.int32)

    @property
    def mask_function(self) -> "_Visible":
        return self

    def __call__(self, query: Any, key: Any) -> Any:
        return (key >= self._first(query)) & (key <= query)

    def _first(self, query: Any) -> Any:
        """The first key that a query sees; what lies before the sequence may count as one."""
        if self.window is None:
            return 0
        if not self.exact:  # unsigned, because the division with a sign asks for a present TPU
            query = (query.astype("uint32") // self.window * self.window).astype("int32")
        return first_key(query, self.window, exact=True)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """Whether each query sees some and whether every key of the block; no more is asked."""
        (queries, keys), last = block, block[1].stop - 1
        query = np.arange(queries.start, queries.stop, dtype=np.int32)
        first = self._first(query)
        some = (query >= keys.start) & (first <= last)
        every = (query >= last) & (first <= keys.start)
        return np.stack([some, every], axis=1)
