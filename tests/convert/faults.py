"""Faults to plant in our half of a parity check: what ports get wrong.

Each is a `Plant`: it is handed the model and a monkeypatch, and gives the model and our half to
check. Those in weights are what a wrong conversion table would make of right tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from convert.parity.jax_side import JaxSide
from convert.parity.subject import Subject
from convert.rules import Rule
from convert.tables import TABLES
from jaxslm import layers
from jaxslm.models import ripple
from tests.convert.subjects import converted

Half = Callable[..., JaxSide]
Plant = Callable[[pytest.MonkeyPatch, Subject], tuple[Subject, Half]]
Arrays = dict[str, np.ndarray]


# ---- How a fault is planted


def setting(**fields: Any) -> Plant:
    """Our half reads another config."""

    def plant(patch: pytest.MonkeyPatch, subject: Subject) -> tuple[Subject, Half]:
        def half(config: Any, *args: Any, **options: Any) -> JaxSide:
            return JaxSide(replace(config, **fields), *args, **options)

        return subject, half

    return plant


def weights(change: Callable[[Arrays], None]) -> Plant:
    """Our half has other parameters: `change` edits copies of them in place."""

    def plant(patch: pytest.MonkeyPatch, subject: Subject) -> tuple[Subject, Half]:
        def half(config: Any, arrays: Mapping[str, np.ndarray], *args: Any, **options: Any):
            copies = {name: array.copy() for name, array in arrays.items()}
            change(copies)
            return JaxSide(config, copies, *args, **options)

        return subject, half

    return plant


def code(owner: Any, name: str, change: Callable[[Any], Any]) -> Plant:
    """A function or method of ours is another: `change` makes it of the right one."""

    def plant(patch: pytest.MonkeyPatch, subject: Subject) -> tuple[Subject, Half]:
        right = getattr(owner, name)
        patch.setattr(owner, name, wraps(right)(change(right)))
        return subject, JaxSide

    return plant


def half(kind: Half) -> Plant:
    """Our half is of another class."""
    return lambda patch, subject: (subject, kind)


class Stead:
    """Stands for a module with some of its names replaced, for one importer alone."""

    def __init__(self, module: ModuleType, **names: Any):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def stead(importer: ModuleType, name: str, **names: Any) -> Plant:
    """In one file of ours, functions of a library module are others."""

    def plant(patch: pytest.MonkeyPatch, subject: Subject) -> tuple[Subject, Half]:
        patch.setattr(importer, name, Stead(getattr(importer, name), **names))
        return subject, JaxSide

    return plant


# ---- Norms


def fast_variance(right):
    def call(self, x):
        y = x.astype(layers.wide(x.dtype))
        mean = y.mean(-1, keepdims=True)
        variance = jnp.mean(y * y, -1, keepdims=True) - mean * mean
        y = (y - mean) * jax.lax.rsqrt(variance + self.eps)
        scale, bias = (
            w[...].astype(y.dtype)[(None,) * (y.ndim - 1)] for w in (self.scale, self.bias)
        )
        return (y * scale + bias).astype(x.dtype)

    return call


def without_bias(right):
    return lambda self, x: right(self, x) - self.bias[...].astype(x.dtype)[(None,) * (x.ndim - 1)]


def norm_twice(right):
    """The final norm is applied to its own output."""

    def activations(self, tokens_BT, **options):
        found = right(self, tokens_BT, **options)
        found["final_norm"] = self.final_norm(found["final_norm"])
        table_VD = self.embedding[...].astype(found["final_norm"].dtype)
        found["logits"] = jnp.einsum("btd,vd->btv", found["final_norm"], table_VD)
        return found

    return activations


def exchange(one: str, other: str, layer: int | None = None) -> Callable[[Arrays], None]:
    """Every parameter under one path with its like under the other, in one layer or in all."""

    def change(arrays: Arrays) -> None:
        index = slice(None) if layer is None else layer
        for name in [name for name in arrays if name == one or name.startswith(one + ".")]:
            twin = other + name.removeprefix(one)
            kept = arrays[name][index].copy()
            arrays[name][index] = arrays[twin][index]
            arrays[twin][index] = kept

    return change


def final_norm_of_the_last_block(arrays: Arrays) -> None:
    for part in ("scale", "bias"):
        arrays[f"final_norm.{part}"][:] = arrays[f"blocks.mlp_norm.{part}"][-1]


# ---- Rotary positions


def interleaved(right):
    def rotate(x_BTNH, tables):
        cos, sin = (jnp.asarray(table)[None, :, None, :] for table in tables)
        even, odd = x_BTNH[..., 0::2], x_BTNH[..., 1::2]
        turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        return turned.reshape(x_BTNH.shape).astype(x_BTNH.dtype)

    return rotate


def from_position_one(right):
    return lambda length, *args: tuple(table[1:] for table in right(length + 1, *args))


def queries_one_behind(right):
    """Queries, which have more heads than keys, take their angle from the position before."""

    def rotate(x_BTNH, tables):
        shift = 1 if x_BTNH.shape[2] == 4 else 0
        return right(x_BTNH, tuple(jnp.roll(jnp.asarray(table), shift, 0) for table in tables))

    return rotate


# ---- Attention


def tiled_heads(right):
    def attend(q_BTNH, k_BTKH, v_BTKH, **options):
        repeats = q_BTNH.shape[2] // k_BTKH.shape[2]
        k_BTNH, v_BTNH = (jnp.tile(x, (1, 1, repeats, 1)) for x in (k_BTKH, v_BTKH))
        return right(q_BTNH, k_BTNH, v_BTNH, **options)

    return attend


def unscaled(right):
    return lambda q_BTNH, *args, **options: right(
        q_BTNH * math.sqrt(q_BTNH.shape[-1]), *args, **options
    )


def rising(right):
    return lambda *args, slope_N, **options: right(*args, slope_N=-slope_N, **options)


def seeing(visible: Callable[..., jax.Array]) -> Callable[[Any], Any]:
    """Attention with another mask: visible(distance_TS, visible) -> visible."""

    def change(right):
        def attention(q, k, v, distance, right_visible, *args):
            return right(q, k, v, distance, visible(distance, right_visible), *args)

        return attention

    return change


def everything(distance, visible):
    return jnp.ones_like(visible)


def one_later(distance, visible):
    return distance >= -1


def one_key_further(distance, visible):
    """The previous chunk's first key, which lies just outside, is seen too."""
    return visible.at[:, :, 0].set(visible[:, :, 1])


def not_over_the_first_edge(distance, visible):
    """The second chunk alone does not see the first."""
    first = ~visible[:, 0, 1]
    second = jnp.roll(first, 1) & ~first
    earlier = jnp.arange(visible.shape[2]) < visible.shape[1]
    return visible & ~(second[:, None, None] & earlier[None, None, :])


def constant_values(right):
    """No gradient goes through the values."""
    return lambda q, k, v, **options: right(q, k, jax.lax.stop_gradient(v), **options)


def bfloat16_softmax(scores, axis):
    return jax.nn.softmax(scores.astype(jnp.bfloat16), axis=axis).astype(scores.dtype)


def exact_gelu(x, approximate):
    return jax.nn.gelu(x, approximate=False)


def bfloat16_in_float32(right):
    """float32 matrix products of rounded factors, as an accelerator makes them by default."""

    def contract(spec, x, w, **options):
        if x.dtype == jnp.float32:
            x, w = (y.astype(jnp.bfloat16).astype(jnp.float32) for y in (x, w))
        return right(spec, x, w, **options)

    return contract


# ---- Blocks, embedding, head


def normed_residual(right):
    """Post-norm: the residual is taken after the norm."""

    def call(self, x_BTD, rope, past=None):
        x_BTD = self.attention_norm(x_BTD)
        update_BTD, own = self.attention(x_BTD, rope, past)
        middle_BTD = x_BTD + update_BTD
        return middle_BTD, middle_BTD + self.mlp(self.mlp_norm(middle_BTD)), own

    return call


def constant_rows(right):
    """The tied table learns from the head alone."""
    return lambda table_VD, *args: right(jax.lax.stop_gradient(table_VD), *args)


def scaled_rows(right):
    return lambda table_VD, *args: right(table_VD, *args) * math.sqrt(table_VD.shape[1])


def another_head(right):
    """The head is no longer the embedding table."""

    def activations(self, tokens_BT, **options):
        found = right(self, tokens_BT, **options)
        head_VD = jnp.roll(self.embedding[...], 1, 1).astype(found["final_norm"].dtype)
        return found | {"logits": jnp.einsum("btd,vd->btv", found["final_norm"], head_VD)}

    return activations


def scaled_logits(right):
    def activations(self, tokens_BT, **options):
        found = right(self, tokens_BT, **options)
        return found | {"logits": found["logits"] / math.sqrt(found["final_norm"].shape[-1])}

    return activations


def tied_head(arrays: Arrays) -> None:
    arrays["head"][:] = arrays["embedding"].T


# ---- Weights


def shifted(path: str) -> Callable[[Arrays], None]:
    """Row i of a table holds row i - 1."""

    def change(arrays: Arrays) -> None:
        arrays[path][:] = np.roll(arrays[path], 1, 0)

    return change


def transposed(path: str, layer: int) -> Callable[[Arrays], None]:
    """A layer's square matrix is not transposed on the way."""

    def change(arrays: Arrays) -> None:
        matrix = arrays[path][layer]
        side = math.isqrt(matrix.size)
        matrix[...] = matrix.reshape(side, side).T.reshape(matrix.shape)

    return change


def by_name(arrays: Arrays) -> None:
    """Layers stacked in the order of their names: 0, 1, 10, 2, ..."""
    for name in [name for name in arrays if name.startswith("blocks.")]:
        arrays[name] = arrays[name][sorted(range(len(arrays[name])), key=str)]


def first_layer_again(arrays: Arrays) -> None:
    for name in [name for name in arrays if name.startswith("blocks.")]:
        arrays[name][1] = arrays[name][0]


def zeroed(path: str, layer: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[path][layer] = 0.0

    return change


def rounded(path: str, layer: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        narrow = arrays[path][layer].astype(ml_dtypes.bfloat16)
        arrays[path][layer] = narrow.astype(arrays[path].dtype)

    return change


def not_a_number(path: str, layer: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[path][layer].flat[0] = np.nan

    return change


def halves_exchanged(*paths: str) -> Callable[[Arrays], None]:
    """[L, ..., 2, F]: the gate comes first."""

    def change(arrays: Arrays) -> None:
        for path in paths:
            arrays[path] = arrays[path][..., ::-1, :]

    return change


def heads_reversed(path: str, layer: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[path][layer] = arrays[path][layer][::-1].copy()

    return change


def slopes_of_no_power_of_two(patch: pytest.MonkeyPatch, subject: Subject) -> tuple[Subject, Half]:
    """Initial decays by ALiBi's ratio for 3 heads where the original takes that for 4, cut."""
    heads, path = subject.config.n_head, "blocks.attention.decay"  # type: ignore[union-attr]
    state = dict(subject.torch_state)
    for key in [key for key in state if key.endswith("decay_factor")]:
        head = int(key.split(".")[-2])
        state[key] = np.float32([ripple.initial_decay(heads)[head]])
    wrong = np.float32([0.5 * 0.5 ** (8 / heads * head) for head in range(heads)])

    def change(arrays: Arrays) -> None:
        arrays[path][:] = wrong

    return weights(change)(patch, converted(subject.config, state))


def interleaved_heads(patch: pytest.MonkeyPatch, subject: Subject) -> tuple[Subject, Half]:
    """The table takes a query matrix's rows for [H, N] in place of [N, H], both ways."""
    table = TABLES["gpt"]
    rules = tuple(
        Rule(rule.torch, rule.jax, rule.pattern.replace("(n h) d ->", "(h n) d ->"), rule.when)
        for rule in table.rules
    )
    patch.setitem(TABLES, "gpt", replace(table, rules=rules))
    return converted(subject.config, subject.torch_state), JaxSide


def one_bit(patch: pytest.MonkeyPatch, subject: Subject) -> tuple[Subject, Half]:
    """Conversion changes the last bit of one number."""
    arrays = {name: array.copy() for name, array in subject.arrays.items()}
    arrays["blocks.mlp.w_up"][1].view(np.int32).flat[5] ^= 1
    return replace(subject, arrays=arrays), JaxSide


# ---- Loss, optimizer, decoding


def targets_late(right):
    return lambda logits_BTV, targets_BT: right(logits_BTV[:, :-1], targets_BT[:, 1:])


def summed(right):
    """Summed over the sequence, averaged over the batch alone."""
    return lambda logits_BTV, targets_BT: right(logits_BTV, targets_BT) * targets_BT.shape[1]


class LargeEpsilon(JaxSide):
    def adamw_update(self, settings, length, group):
        return super().adamw_update({**settings, "eps": 1e-6}, length, group)


class FrozenDecays(JaxSide):
    """The optimizer does not know which parameters torch leaves alone."""

    def adamw_update(self, settings, length, group):
        config, self.config = self.config, replace(self.config, decay_gradient="always")
        update = super().adamw_update(settings, length, group)
        self.config = config
        return update


def uncorrected_adamw(rate, one, two, eps, *, weight_decay):
    """AdamW without bias correction, its first step."""

    def update(gradients, state, before):
        def step(g, p):
            mean, square = (1 - one) * g, (1 - two) * g * g
            return -rate * (mean / (jnp.sqrt(square) + eps) + weight_decay * p)

        return jax.tree.map(step, gradients, before), state

    return optax.GradientTransformation(lambda before: (), update)


def adam_with_l2(rate, one, two, eps, *, weight_decay):
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.adam(rate, one, two, eps))


class EarlyDecoding(JaxSide):
    """Decoding reads the logits of the position before the last."""

    def logits(self, tokens):
        return np.roll(super().logits(tokens), 1, axis=1)
