"""Leaf layers that the models share: norms, embedding look-up, dropout, initial distributions.

A dtype called `dtype` is the compute dtype. Statistics and accumulations are made in `wide(dtype)`:
float32, or float64 when that is the compute dtype.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxslm.sharding import constrain

REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names("product"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def wide(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that statistics and contractions accumulate in: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def compute_dtype(name: str) -> jnp.dtype:
    """The dtype that a config names.

    Raises:
        ValueError: JAX would compute in a narrower one.
    """
    dtype = jnp.dtype(name)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype {name} needs JAX's x64 mode: set jax_enable_x64, or use float32")
    return dtype


def contract(
    spec: str,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    out: DTypeLike | None = None,
) -> jax.Array:
    """Einsum of `x` with `w` cast to x's dtype, and a bias, accumulated in at least float32.

    The backward pass multiplies in x's dtype too and accumulates likewise; the gradients of `w` and
    the bias keep their float32. Differentiable in reverse only. Named "product" for
    rematerialisation.

    Args:
        spec: of an einsum in which every letter of a factor stands in the other or the result.
        x: activations, any float dtype.
        w: a parameter, any float dtype.
        bias: a parameter shaped as the last axes of the result.
        out: dtype of the result; None for x's.
    """
    y: jax.Array = _contract(spec, x.dtype if out is None else jnp.dtype(out), x, w, bias)
    # Kept as rows: TPUs would pad a last axis of 64, a head's width, to 128.
    return checkpoint_name(y.reshape(*y.shape[:2], math.prod(y.shape[2:])), "product").reshape(
        y.shape
    )


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Einsum of factors of one dtype, in at least float32."""
    return jnp.einsum(spec, x, y, preferred_element_type=wide(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _contract(
    spec: str, out: jnp.dtype, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """`contract` with a backward pass of its own, for three reasons.

    JAX's would multiply the float32 cotangent of a bfloat16 product's sum with bfloat16, which
    every platform does in float32. It would make the gradient of `w` from the cotangent times `x`,
    in which order XLA transposes the cotangent on a CPU: two to five times slower. And it would sum
    the gradient of the bias in bfloat16.
    """
    y = _product(spec, x, w.astype(x.dtype))
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    return y.astype(out)


def _contract_forward(
    spec: str, out: jnp.dtype, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
    return _contract(spec, out, x, w, bias), (x, w, bias)


def _contract_backward(
    spec: str,
    out: jnp.dtype,
    saved: tuple[jax.Array, jax.Array, jax.Array | None],
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    del out
    x, w, bias = saved
    dy = dy.astype(x.dtype)
    factors, result = spec.split("->")
    of_x, of_w = factors.split(",")
    dx = _product(f"{result},{of_w}->{of_x}", dy, w.astype(x.dtype)).astype(x.dtype)
    dw = _product(f"{of_x},{result}->{of_w}", x, dy).astype(w.dtype)
    if bias is None:
        return dx, dw, None
    axes = tuple(range(dy.ndim - bias.ndim))
    return dx, dw, dy.sum(axes, dtype=wide(dy.dtype)).astype(bias.dtype)


_contract.defvjp(_contract_forward, _contract_backward)


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias (Ba et al. 2016), as `torch.nn.LayerNorm`.

    The variance is the mean of squared deviations, never E[x^2] - E[x]^2, which cancels.
    """

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis; any float dtype in, the same out."""
        y = x.astype(wide(x.dtype))
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        y = y * _last_axis(self.scale[...], y) + _last_axis(self.bias[...], y)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with scale (Zhang & Sennrich 2019).

    The original computes it in the input dtype; here the statistics are float32 at least, which
    in bfloat16 is more exact than the original.
    """

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis; any float dtype in, the same out."""
        y = x.astype(wide(x.dtype))
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * _last_axis(self.scale[...], y)).astype(x.dtype)


def _last_axis(w: jax.Array, like: jax.Array) -> jax.Array:
    """A vector shaped and cast to multiply the last axis of `like` without rank promotion."""
    return w.astype(like.dtype).reshape((1,) * (like.ndim - 1) + w.shape)


def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows of the table; an id outside [0, V) gives a row of NaN, never another token's row.

    Args:
        table_VD: any float dtype.
        tokens_BT: any integer dtype.
        dtype: dtype of the result.

    Returns:
        x_BTD.
    """
    table_VD = constrain(table_VD, "tensor", None)  # fsdp's pieces of D are gathered first
    rows = table_VD.at[tokens_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return rows.astype(dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the rest; no key means evaluation."""
    if key is None or rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros((), x.dtype))


def check_tokens(tokens_BT: jax.Array, limit: int | None, limit_name: str) -> None:
    """Refuses what is not [B, T] integers, or longer than the model's context.

    Raises:
        TypeError: the tokens are not integers.
        ValueError: wrong rank, no tokens, or T above `limit` (named `limit_name`).
    """
    if not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {tokens_BT.dtype}")
    if tokens_BT.ndim != 2 or 0 in tokens_BT.shape:
        raise ValueError(f"tokens must be a non-empty [batch, time], got shape {tokens_BT.shape}")
    if limit is not None and tokens_BT.shape[1] > limit:
        raise ValueError(
            f"the sequence has {tokens_BT.shape[1]} tokens but {limit_name} is {limit}: "
            f"pass at most {limit}"
        )


def normal(key: jax.Array, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A float32 parameter drawn from N(0, std^2)."""
    return nnx.Param(std * jax.random.normal(key, shape, jnp.float32))


def uniform_fan_in(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
    """A float32 parameter drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)): torch.nn.Linear's law."""
    bound = fan_in**-0.5
    return nnx.Param(jax.random.uniform(key, shape, jnp.float32, -bound, bound))


def unstacked(blocks: Any) -> Sequence[Any]:
    """Each layer's block: of a list of them, or of one whose parameters are stacked on axis 0."""
    if isinstance(blocks, nnx.List):
        return blocks
    graphdef, state = nnx.split(blocks)
    count = jax.tree.leaves(state)[0].shape[0]
    return [nnx.merge(graphdef, jax.tree.map(lambda w, n=n: w[n], state)) for n in range(count)]


def through(
    blocks: Any, layer: Callable[..., Any], x: jax.Array, *, unroll: int, remat: str
) -> tuple[jax.Array, Any]:
    """Runs x through every block: as a scan, or, of a list of blocks, one after the other.

    Args:
        blocks: a block whose parameters are stacked on axis 0, or `unstacked` ones.
        layer: (block, its number, x) -> (x, what is kept of the layer).
        x: what the first block takes.
        unroll: layers per step of the scan.
        remat: a key of REMAT_POLICIES; a list is not for training and keeps all.

    Returns:
        What the last block gives, and what is kept, stacked over the layers.
    """
    if isinstance(blocks, nnx.List):
        kept = []
        for number, block in enumerate(blocks):
            x, own = layer(block, number, x)
            kept.append(own)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *kept)
    graphdef, state = nnx.split(blocks)

    def step(x: jax.Array, numbered: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
        params, number = numbered
        return layer(nnx.merge(graphdef, params), number, x)

    numbers = jnp.arange(jax.tree.leaves(state)[0].shape[0])
    return jax.lax.scan(rematerialized(step, remat), x, (state, numbers), unroll=unroll)


def rematerialized(layer: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """A layer for `jax.lax.scan` whose backward pass recomputes what the policy does not keep."""
    if policy == "none":
        return layer
    return jax.checkpoint(layer, prevent_cse=False, policy=REMAT_POLICIES[policy])
