"""Attention by cuDNN's fused kernel, for NVIDIA GPUs: memory linear in T."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxslm.attention.kernels import on_each_device, with_decay


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    slope_N: jax.Array | None,
    window: int | None,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Every query sees every key up to itself, or the last `window` of them.

    Shapes are those of `jaxslm.attention.attend`, which has checked them; bfloat16, and a width of
    at most 128 with the decay's features. Differentiable in reverse only: in q, k, v and the slope.
    For the rounding that a slope brings see `jaxslm.attention.kernels.with_decay`. The
    implementation "xla" computes the same in plain JAX, on any platform.
    """
    H = q_BTNH.shape[3]
    if slope_N is not None:
        q_BTNH, k_BTKH = with_decay(q_BTNH, k_BTKH, slope_N * math.sqrt(H))
    width = 8 * -(-q_BTNH.shape[3] // 8)  # equal widths, multiples of 8

    def kernel(*qkv: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            *qkv, scale=H**-0.5, is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation,
        )  # fmt: skip

    padded = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[3])))
        for x in (q_BTNH, k_BTKH, v_BTKH)
    )
    return on_each_device(kernel, *padded)[..., :H]
