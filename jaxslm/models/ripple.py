"""Ripple: a 6.3M-parameter decoder. Where it departs from a plain pre-norm transformer:

- no positions but a learned decay: each head subtracts |decay| * distance from its scores
  (ALiBi with trained slopes); learned absolute positions are an option;
- heads are concatenated straight onto the residual stream: no output projection;
- an optional window, by the original in chunks (see `jaxslm.attention.attend`);
- gated MLP: one projection whose first half is the value and second half the SiLU gate; its two
  linears keep their biases even with `bias=False`, which speaks of q, k, v only;
- the output head is not tied;
- under full attention the original's decay gets no gradient: see `decay_gradient`.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxslm.attention import BACKENDS, WINDOW_MODES, attend
from jaxslm.cache import Cache, Past, attend_cached
from jaxslm.layers import (
    REMAT_POLICIES,
    LayerNorm,
    check_tokens,
    compute_dtype,
    contract,
    dropout,
    embed,
    normal,
    through,
    unstacked,
    wide,
)
from jaxslm.models.config import DTYPES, check_choice, check_divides, check_positive, check_types
from jaxslm.sharding import BATCH, constrain


@dataclass(frozen=True, kw_only=True)
class RippleConfig:
    """Fields of the original's `RippleConfig`, then its constant, our choices, how we compute.

    Attributes:
        block_size: context in training; a limit only with `use_absolute_pos_emb`.
        attention_window: window in positions, None for full attention (0 becomes None, as the
            original reads it).
        layer_norm_eps: torch's default, which the original uses.
        window_mode: "chunked" as the original, "exact" for the last `attention_window` keys.
        decay_gradient: "as_torch": the decay is constant where the original's is, that is in
            sequences no longer than the window; "always": it is trained.
        dtype: compute dtype; "float64" needs JAX's x64 mode and serves the parity check.
        unroll: layers per step of the layer loop; changes speed, never the output.
        remat: what the backward pass recomputes instead of storing: "none"; "dots", all of a layer
            but its projections' outputs; "full", each layer. Changes memory, never the output.
        attention: a backend of `jaxslm.attention.attend`; changes speed and memory, never the
            output beyond rounding.

    Raises:
        ValueError: a value or combination that the model cannot have, named.
        TypeError: a value of the wrong type.
    """

    vocab_size: int = 65
    block_size: int = 256
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    dropout: float = 0.2
    bias: bool = False
    use_absolute_pos_emb: bool = False
    attention_window: int | None = None
    layer_norm_eps: float = 1e-5
    window_mode: str = "chunked"
    decay_gradient: str = "as_torch"
    dtype: str = "float32"
    unroll: int = 1
    remat: str = "none"
    attention: str = "auto"

    def __post_init__(self):
        check_types(self)
        if self.attention_window == 0:
            object.__setattr__(self, "attention_window", None)
        check_positive(
            self, "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "layer_norm_eps",
            "unroll",
        )  # fmt: skip
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "remat", tuple(REMAT_POLICIES))
        check_choice(self, "attention", BACKENDS)
        check_choice(self, "window_mode", WINDOW_MODES)
        check_choice(self, "decay_gradient", ("as_torch", "always"))
        check_divides(self, "n_head", "n_embd")
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout must be between 0 and 1, got {self.dropout}")
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(
                f"attention_window must be 1 or more, or None for full attention, "
                f"got {self.attention_window}"
            )

    @property
    def head_width(self) -> int:
        """H."""
        return self.n_embd // self.n_head

    @property
    def mlp_width(self) -> int:
        """F: half of int(n_embd * 8 / 3) rounded up to even."""
        both = int(self.n_embd * 8 / 3)
        return (both + both % 2) // 2

    @property
    def context(self) -> int | None:
        """Longest sequence that the model accepts; None for no limit."""
        return self.block_size if self.use_absolute_pos_emb else None

    def frozen_parameters(self, length: int) -> tuple[str, ...]:
        """Paths of parameters that torch does not train at this sequence length.

        The original reads the decay with .item() where a sequence fits its window, a number
        without gradient; torch's AdamW then skips the parameter, weight decay included.
        """
        full = self.attention_window is None or length <= self.attention_window
        return ("blocks.attention.decay",) if full and self.decay_gradient == "as_torch" else ()


def initial_decay(n_head: int) -> list[float]:
    """Slopes 0.5 * (0.5^(8/n))^i, with n the next power of two, cut to n_head (cf. ALiBi)."""
    power = 2 ** math.ceil(math.log2(n_head))
    return [0.5 * (0.5 ** (8 / power)) ** i for i in range(n_head)]


class Attention(nnx.Module):
    """Attention with distance decay; heads concatenated, not projected."""

    def __init__(self, config: RippleConfig, key: jax.Array):
        q, k, v = jax.random.split(key, 3)
        D, N, H = config.n_embd, config.n_head, config.head_width
        self.config = config
        self.wq = normal(q, (D, N, H), 0.02)
        self.wk = normal(k, (D, N, H), 0.02)
        self.wv = normal(v, (D, N, H), 0.02)
        if config.bias:
            self.bq = nnx.Param(jnp.zeros((N, H), jnp.float32))
            self.bk = nnx.Param(jnp.zeros((N, H), jnp.float32))
            self.bv = nnx.Param(jnp.zeros((N, H), jnp.float32))
        self.decay = nnx.Param(jnp.array(initial_decay(N), jnp.float32))

    def __call__(
        self, x_BTD: jax.Array, key: jax.Array | None, past: Past | None = None
    ) -> tuple[jax.Array, Any]:
        """Returns the residual update, [B, T, D] in x's dtype, and the keys and values.

        They are x's own, [B, T, K, H] each, or, where there is a past of which x is the next
        position, its LayerCache with x's.
        """
        config = self.config
        bq, bk, bv = (self.bq[...], self.bk[...], self.bv[...]) if config.bias else (None,) * 3
        q_BTNH = contract("btd,dnh->btnh", x_BTD, self.wq[...], bq)
        k_BTNH = contract("btd,dnh->btnh", x_BTD, self.wk[...], bk)
        v_BTNH = contract("btd,dnh->btnh", x_BTD, self.wv[...], bv)
        decay_N = self.decay[...].astype(wide(x_BTD.dtype))
        if config.frozen_parameters(x_BTD.shape[1]):
            decay_N = jax.lax.stop_gradient(decay_N)
        distance: Any = {
            "slope_N": jnp.abs(decay_N),
            "window": config.attention_window,
            "window_mode": config.window_mode,
        }
        if past is None:
            layer = (k_BTNH, v_BTNH)
            o_BTNH = attend(
                q_BTNH, k_BTNH, v_BTNH, dropout_rate=config.dropout, dropout_key=key,
                backend=config.attention, **distance,
            )  # fmt: skip
        else:
            o_BTNH, layer = attend_cached(q_BTNH, k_BTNH, v_BTNH, *past, **distance)
        # Heads lie on the axis `tensor`, the stream does not. Left to itself, XLA (jax 0.10.2) lays
        # the sum out so that a mesh of 2 x 2 x 2 exchanges rows when it decodes.
        return constrain(o_BTNH.reshape(x_BTD.shape), BATCH, None, None), layer


class MLP(nnx.Module):
    """Gated: out(value(x) * silu(gate(x))), with biases and dropout."""

    def __init__(self, config: RippleConfig, key: jax.Array):
        w_in, w_out = jax.random.split(key)
        D, F = config.n_embd, config.mlp_width
        self.dropout = config.dropout
        self.w_in = normal(w_in, (D, 2, F), 0.02)  # value, gate
        self.b_in = nnx.Param(jnp.zeros((2, F), jnp.float32))
        self.w_out = normal(w_out, (F, D), 0.02)
        self.b_out = nnx.Param(jnp.zeros(D, jnp.float32))

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns the residual update, [B, T, D] in x's dtype."""
        h_BT2F = contract("btd,dcf->btcf", x_BTD, self.w_in[...], self.b_in[...])
        h_BTF = h_BT2F[:, :, 0] * jax.nn.silu(h_BT2F[:, :, 1])
        y_BTD = contract("btf,fd->btd", h_BTF, self.w_out[...], self.b_out[...])
        return dropout(y_BTD, self.dropout, key)


class Block(nnx.Module):
    """Pre-norm residual block."""

    def __init__(self, config: RippleConfig, key: jax.Array):
        attention, mlp = jax.random.split(key)
        self.attention_norm = LayerNorm(config.n_embd, config.layer_norm_eps)
        self.attention = Attention(config, attention)
        self.mlp_norm = LayerNorm(config.n_embd, config.layer_norm_eps)
        self.mlp = MLP(config, mlp)

    def __call__(
        self, x_BTD: jax.Array, key: jax.Array | None, past: Past | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Returns the stream after attention and after the MLP, and the keys and values.

        The key is this layer's.
        """
        attention, mlp = (None, None) if key is None else jax.random.split(key)
        update_BTD, layer = self.attention(self.attention_norm(x_BTD), attention, past)
        middle_BTD = x_BTD + update_BTD
        return middle_BTD, middle_BTD + self.mlp(self.mlp_norm(middle_BTD), mlp), layer


class Ripple(nnx.Module):
    """The language model. Parameters are float32 [in, out], layers stacked on a leading axis.

    Args:
        config: the architecture.
        key: PRNG key that the initial parameters are drawn with, from the original's laws.
    """

    def __init__(self, config: RippleConfig, *, key: jax.Array):
        embedding, positions, blocks, head = jax.random.split(key, 4)
        self.config = config
        self.embedding = normal(embedding, (config.vocab_size, config.n_embd), 0.02)
        if config.use_absolute_pos_emb:
            self.position_embedding = normal(positions, (config.block_size, config.n_embd), 0.02)
        self.blocks = nnx.vmap(lambda k: Block(config, k))(jax.random.split(blocks, config.n_layer))
        self.final_norm = LayerNorm(config.n_embd, config.layer_norm_eps)
        self.head = normal(head, (config.n_embd, config.vocab_size), 0.02)

    def __call__(self, tokens_BT: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Next-token logits.

        Args:
            tokens_BT: integer ids; an id outside the vocabulary gives NaN.
            key: PRNG key for dropout; None for evaluation.

        Returns:
            logits_BTV, float32 (float64 when that is the compute dtype).

        Raises:
            ValueError: no tokens or, with absolute positions, more than `block_size` of them.
            TypeError: the tokens are not integers.
        """
        return self.activations(tokens_BT, key=key)["logits"]

    def activations(
        self,
        tokens_BT: jax.Array,
        *,
        key: jax.Array | None = None,
        every_layer: bool = False,
        keys_values: bool = False,
        logits: bool = True,
    ) -> dict[str, jax.Array]:
        """The forward pass, with what it computes on the way.

        Args:
            tokens_BT: as in `__call__`.
            key: as in `__call__`.
            every_layer: also return the stream after each layer's attention and MLP.
            keys_values: also return what `jaxslm.cache.fill` takes.
            logits: compute the logits; training takes them chunk by chunk from `unembed`.

        Returns:
            embedding [B, T, D] (positions included), final_norm [B, T, D], and, if asked for,
            logits [B, T, V], attention and block [L, B, T, D], keys and values [L, B, T, N, H].
        """
        config = self.config
        check_tokens(tokens_BT, config.context, "block_size")
        dtype = compute_dtype(config.dtype)
        x_BTD = embed(self.embedding[...], tokens_BT, wide(dtype))
        if config.use_absolute_pos_emb:
            x_BTD = x_BTD + self.position_embedding[: x_BTD.shape[1]].astype(x_BTD.dtype)[None]
        x_BTD = constrain(x_BTD.astype(dtype), BATCH, None, None)

        def layer(block: Block, number: Any, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
            layer_key = None if key is None else jax.random.fold_in(key, number)
            middle_BTD, out_BTD, own = block(x_BTD, layer_key)
            out_BTD = constrain(out_BTD, BATCH, None, None)
            stack = {"attention": middle_BTD, "block": out_BTD} if every_layer else {}
            stack |= {"keys": own[0], "values": own[1]} if keys_values else {}
            return out_BTD, stack

        y_BTD, stack = through(self.blocks, layer, x_BTD, unroll=config.unroll, remat=config.remat)
        norm_BTD = self.final_norm(y_BTD)
        found = {"embedding": x_BTD, "final_norm": norm_BTD} | stack
        return found | ({"logits": self.unembed(norm_BTD)} if logits else {})

    def decode(self, tokens_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits of the token after one more a row, by what the cache holds of those before.

        Args:
            tokens_B: integer ids, at the cache's positions.
            cache: of `jaxslm.cache.fill`; a row whose position has no slot there, or, with absolute
                positions, is not below `block_size`, gets NaN.

        Returns:
            logits_BV, float32 (float64 when that is the compute dtype), and the cache with the
            tokens.
        """
        dtype = compute_dtype(self.config.dtype)
        x_B1D = embed(self.embedding[...], tokens_B[:, None], wide(dtype))
        if self.config.use_absolute_pos_emb:
            positions_B1 = cache.position_B[:, None]
            x_B1D = x_B1D + embed(self.position_embedding[...], positions_B1, x_B1D.dtype)
        x_B1D = constrain(x_B1D.astype(dtype), BATCH, None, None)
        layers = []
        for block, past in zip(unstacked(self.blocks), cache, strict=True):
            _, x_B1D, layer = block(x_B1D, None, past)
            x_B1D = constrain(x_B1D, BATCH, None, None)
            layers.append(layer)
        logits_B1V = self.unembed(self.final_norm(x_B1D))
        return logits_B1V[:, 0], Cache(tuple(layers), cache.position_B + 1)

    def unembed(self, norm_BTD: jax.Array) -> jax.Array:
        """Logits of the final norm's output.

        Args:
            norm_BTD: any number of positions, in the compute dtype.

        Returns:
            logits_BTV, float32 (float64 when that is the compute dtype).
        """
        logits_BTV = contract("btd,dv->btv", norm_BTD, self.head[...], out=wide(norm_BTD.dtype))
        return constrain(logits_BTV, BATCH, None, "tensor")
