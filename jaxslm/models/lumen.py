"""Lumen: a 2.75M-parameter decoder. Where it departs from a plain pre-norm transformer:

- multi-query attention: one key-value head by default (the original crashes on any number but 1
  and `num_heads`; here any divisor works), rotary positions, no biases;
- RMSNorm, SwiGLU, output head tied to the embedding;
- embeddings start N(0, 1) while logits have no scale, so the first loss is about 240.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxslm.attention import BACKENDS, attend
from jaxslm.cache import Cache, Past, attend_cached
from jaxslm.layers import (
    REMAT_POLICIES,
    RMSNorm,
    check_tokens,
    compute_dtype,
    contract,
    embed,
    through,
    uniform_fan_in,
    unstacked,
    wide,
)
from jaxslm.models.config import DTYPES, check_choice, check_divides, check_positive, check_types
from jaxslm.rope import RopeTables, rope_tables, rotate
from jaxslm.sharding import BATCH, constrain


@dataclass(frozen=True, kw_only=True)
class LumenConfig:
    """Fields of the original's `LumenConfig`, then how we compute.

    Attributes:
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

    vocab_size: int = 2048
    hidden_dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 1
    intermediate_dim: int = 512
    max_seq_len: int = 1024
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    dtype: str = "float32"
    unroll: int = 1
    remat: str = "none"
    attention: str = "auto"

    def __post_init__(self):
        check_types(self)
        check_positive(
            self, "vocab_size", "hidden_dim", "num_layers", "num_heads", "num_kv_heads",
            "intermediate_dim", "max_seq_len", "rms_norm_eps", "rope_theta", "unroll",
        )  # fmt: skip
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "remat", tuple(REMAT_POLICIES))
        check_choice(self, "attention", BACKENDS)
        check_divides(self, "num_heads", "hidden_dim")
        check_divides(self, "num_kv_heads", "num_heads")
        if self.head_width % 2:
            raise ValueError(f"hidden_dim / num_heads = {self.head_width} must be even for RoPE")

    @property
    def head_width(self) -> int:
        """H."""
        return self.hidden_dim // self.num_heads

    @property
    def context(self) -> int:
        """Longest sequence that the model accepts."""
        return self.max_seq_len

    def frozen_parameters(self, length: int) -> tuple[str, ...]:
        """Paths of parameters that torch does not train at this sequence length: none."""
        del length
        return ()


class Attention(nnx.Module):
    """Rotary multi- or grouped-query attention with an output projection."""

    def __init__(self, config: LumenConfig, key: jax.Array):
        q, k, v, o = jax.random.split(key, 4)
        self.backend = config.attention
        D, N, K, H = config.hidden_dim, config.num_heads, config.num_kv_heads, config.head_width
        self.wq = uniform_fan_in(q, (D, N, H), D)
        self.wk = uniform_fan_in(k, (D, K, H), D)
        self.wv = uniform_fan_in(v, (D, K, H), D)
        self.wo = uniform_fan_in(o, (N, H, D), D)

    def __call__(
        self, x_BTD: jax.Array, rope: RopeTables, past: Past | None = None
    ) -> tuple[jax.Array, Any]:
        """Returns the residual update, [B, T, D] in x's dtype, and the keys and values.

        They are x's own, [B, T, K, H] each, or, where there is a past of which x is the next
        position, its LayerCache with x's.
        """
        q_BTNH = rotate(contract("btd,dnh->btnh", x_BTD, self.wq[...]), rope)
        k_BTKH = rotate(contract("btd,dkh->btkh", x_BTD, self.wk[...]), rope)
        v_BTKH = contract("btd,dkh->btkh", x_BTD, self.wv[...])
        if past is None:
            o_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, backend=self.backend)
            layer = k_BTKH, v_BTKH
        else:
            o_BTNH, layer = attend_cached(q_BTNH, k_BTKH, v_BTKH, *past)
        return contract("btnh,nhd->btd", o_BTNH, self.wo[...]), layer


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LumenConfig, key: jax.Array):
        gate, up, down = jax.random.split(key, 3)
        D, F = config.hidden_dim, config.intermediate_dim
        self.w_gate = uniform_fan_in(gate, (D, F), D)
        self.w_up = uniform_fan_in(up, (D, F), D)
        self.w_down = uniform_fan_in(down, (F, D), F)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the residual update, [B, T, D] in x's dtype."""
        gate_BTF = contract("btd,df->btf", x_BTD, self.w_gate[...])
        up_BTF = contract("btd,df->btf", x_BTD, self.w_up[...])
        return contract("btf,fd->btd", jax.nn.silu(gate_BTF) * up_BTF, self.w_down[...])


class Block(nnx.Module):
    """Pre-norm residual block."""

    def __init__(self, config: LumenConfig, key: jax.Array):
        attention, mlp = jax.random.split(key)
        self.attention_norm = RMSNorm(config.hidden_dim, config.rms_norm_eps)
        self.attention = Attention(config, attention)
        self.mlp_norm = RMSNorm(config.hidden_dim, config.rms_norm_eps)
        self.mlp = MLP(config, mlp)

    def __call__(
        self, x_BTD: jax.Array, rope: RopeTables, past: Past | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Returns the stream after attention and after the MLP, and the keys and values."""
        update_BTD, layer = self.attention(self.attention_norm(x_BTD), rope, past)
        middle_BTD = x_BTD + update_BTD
        return middle_BTD, middle_BTD + self.mlp(self.mlp_norm(middle_BTD)), layer


class Lumen(nnx.Module):
    """The language model. Parameters are float32 [in, out], layers stacked on a leading axis.

    Args:
        config: the architecture.
        key: PRNG key that the initial parameters are drawn with, from the original's laws.
    """

    def __init__(self, config: LumenConfig, *, key: jax.Array):
        embedding, blocks = jax.random.split(key)
        self.config = config
        self.embedding = nnx.Param(
            jax.random.normal(embedding, (config.vocab_size, config.hidden_dim), jnp.float32)
        )
        self.blocks = nnx.vmap(lambda k: Block(config, k))(
            jax.random.split(blocks, config.num_layers)
        )
        self.final_norm = RMSNorm(config.hidden_dim, config.rms_norm_eps)

    def __call__(self, tokens_BT: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Next-token logits.

        Args:
            tokens_BT: integer ids; an id outside the vocabulary gives NaN.
            key: accepted for the models that have dropout; Lumen has none.

        Returns:
            logits_BTV, float32 (float64 when that is the compute dtype).

        Raises:
            ValueError: no tokens, or more than `max_seq_len` of them.
            TypeError: the tokens are not integers.
        """
        return self.activations(tokens_BT, key=key)["logits"]

    def rope_tables(self) -> RopeTables:
        """Cosines and sines for every position, float32 [max_seq_len, H/2]."""
        config = self.config
        return rope_tables(config.max_seq_len, config.head_width, config.rope_theta)

    def activations(
        self,
        tokens_BT: jax.Array,
        *,
        key: jax.Array | None = None,
        rope: RopeTables | None = None,
        every_layer: bool = False,
        keys_values: bool = False,
        logits: bool = True,
    ) -> dict[str, jax.Array]:
        """The forward pass, with what it computes on the way.

        Args:
            tokens_BT: as in `__call__`.
            key: as in `__call__`.
            rope: tables [max_seq_len, H/2] to use in place of our own; the parity check passes
                torch's, whose last bit may differ.
            every_layer: also return the stream after each layer's attention and MLP.
            keys_values: also return what `jaxslm.cache.fill` takes.
            logits: compute the logits; training takes them chunk by chunk from `unembed`.

        Returns:
            embedding [B, T, D], final_norm [B, T, D], and, if asked for, logits [B, T, V],
            attention and block [L, B, T, D], keys and values [L, B, T, K, H].
        """
        del key
        config = self.config
        T = tokens_BT.shape[-1]
        check_tokens(tokens_BT, config.max_seq_len, "max_seq_len")
        cos, sin = rope or self.rope_tables()

        def layer(block: Block, number: Any, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
            del number
            middle_BTD, out_BTD, own = block(x_BTD, (cos[:T], sin[:T]))
            out_BTD = constrain(out_BTD, BATCH, None, None)
            stack = {"attention": middle_BTD, "block": out_BTD} if every_layer else {}
            stack |= {"keys": own[0], "values": own[1]} if keys_values else {}
            return out_BTD, stack

        dtype = compute_dtype(config.dtype)
        x_BTD = constrain(embed(self.embedding[...], tokens_BT, dtype), BATCH, None, None)
        y_BTD, stack = through(self.blocks, layer, x_BTD, unroll=config.unroll, remat=config.remat)
        norm_BTD = self.final_norm(y_BTD)
        found = {"embedding": x_BTD, "final_norm": norm_BTD} | stack
        return found | ({"logits": self.unembed(norm_BTD)} if logits else {})

    def decode(self, tokens_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits of the token after one more a row, by what the cache holds of those before.

        Args:
            tokens_B: integer ids, at the cache's positions.
            cache: of `jaxslm.cache.fill`; a row whose position has no slot there, or is not below
                `max_seq_len`, gets NaN.

        Returns:
            logits_BV, float32 (float64 when that is the compute dtype), and the cache with the
            tokens.
        """
        dtype = compute_dtype(self.config.dtype)
        cos_B1h, sin_B1h = (
            jnp.asarray(table).at[cache.position_B[:, None]].get(mode="fill", fill_value=jnp.nan)
            for table in self.rope_tables()
        )
        x_B1D = constrain(embed(self.embedding[...], tokens_B[:, None], dtype), BATCH, None, None)
        layers = []
        for block, past in zip(unstacked(self.blocks), cache, strict=True):
            _, x_B1D, layer = block(x_B1D, (cos_B1h, sin_B1h), past)
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
        logits_BTV = contract(
            "btd,vd->btv", norm_BTD, self.embedding[...], out=wide(norm_BTD.dtype)
        )
        return constrain(logits_BTV, BATCH, None, "tensor")
