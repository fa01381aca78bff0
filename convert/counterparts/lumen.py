"""Lumen in torch: what the Flax model is held against.

Where it departs from a plain pre-norm transformer:
- RMSNorm works in the dtype of its input, with no float32 statistics.
- RoPE turns the first half of a head against the second; its float32 tables are cast to the dtype
  of the activations.
- One kv head may serve several query heads, in the order 0, 0, 1, 1.
- The MLP is gated by SiLU, and nothing but the norms has more than a matrix: no biases.
- The embedding table is also the output head. It starts at N(0, 1), the matrices at torch's own
  U(-1/sqrt(in), 1/sqrt(in)), so the first loss is large.

Axes: B batch, T query positions, S key positions, D width, N query heads, K kv heads, H head width,
F mlp width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxslm.models.lumen import LumenConfig


def rope_tables(config: LumenConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, float32 [max_seq_len, H] on the CPU.

    Both halves of H hold the same; the original's operations on its shapes give its bits.
    """
    head_width = config.hidden_dim // config.num_heads
    exponents = torch.arange(0, head_width, 2, device="cpu").float() / head_width
    frequencies = 1.0 / (config.rope_theta**exponents)
    positions = torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Turns each head by its position's angles."""
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH


class RMSNorm(nn.Module):
    """x / rms(x) * weight, all in the dtype of x."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalises the last axis."""
        mean_square = x_BTD.pow(2).mean(dim=-1, keepdim=True)
        return x_BTD * torch.rsqrt(mean_square + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention, softmax in the dtype of the scores."""

    def __init__(self, config: LumenConfig):
        super().__init__()
        D, self.N, self.K = config.hidden_dim, config.num_heads, config.num_kv_heads
        self.H = D // self.N
        self.q_proj = nn.Linear(D, self.N * self.H, bias=False)
        self.k_proj = nn.Linear(D, self.K * self.H, bias=False)
        self.v_proj = nn.Linear(D, self.K * self.H, bias=False)
        self.o_proj = nn.Linear(D, D, bias=False)

    def _each_query_head(self, x_BKSH: Tensor) -> Tensor:
        """Repeats kv heads 0, 0, 1, 1; with one of them, or N, a view as in the original."""
        return x_BKSH[:, :, None].expand(-1, -1, self.N // self.K, -1, -1).flatten(1, 2)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """Mixes positions."""
        B, T, D = x_BTD.shape
        q_BNTH = self.q_proj(x_BTD).view(B, T, self.N, self.H).transpose(1, 2)
        k_BKSH = self.k_proj(x_BTD).view(B, T, self.K, self.H).transpose(1, 2)
        v_BKSH = self.v_proj(x_BTD).view(B, T, self.K, self.H).transpose(1, 2)
        q_BNTH, k_BKSH = _rotate(q_BNTH, cos_TH, sin_TH), _rotate(k_BKSH, cos_TH, sin_TH)
        k_BNSH, v_BNSH = self._each_query_head(k_BKSH), self._each_query_head(v_BKSH)
        scores_BNTS = q_BNTH @ k_BNSH.transpose(-2, -1) / math.sqrt(self.H)
        future_TS = scores_BNTS.new_full((T, T), float("-inf")).triu(diagonal=1)
        weights_BNTS = F.softmax(scores_BNTS + future_TS, dim=-1)
        mixed_BTD = (weights_BNTS @ v_BNSH).transpose(1, 2).reshape(B, T, D)
        return self.o_proj(mixed_BTD)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LumenConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each position by itself."""
        hidden_BTF = F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        return self.down_proj(hidden_BTF)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: LumenConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """One layer."""
        x_BTD = x_BTD + self.attention(self.input_layernorm(x_BTD), cos_TH, sin_TH)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Lumen(nn.Module):
    """The whole model, with the original's state-dict keys (originals/lumen.py, SAGE_Lumen_3M)."""

    def __init__(self, config: LumenConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_dim, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        # Plain attributes, not buffers: model.bfloat16() must not round them for good.
        self.cos, self.sin = rope_tables(config)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, T, V], and the mean cross-entropy where targets are given.

        Raises:
            ValueError: more than `max_seq_len` positions.
        """
        T, limit = tokens_BT.shape[1], self.config.max_seq_len
        if limit < T:
            raise ValueError(f"tokens: at most max_seq_len = {limit} positions, got {T}; cut them")
        x_BTD = self.embed_tokens(tokens_BT)
        cos_TH, sin_TH = self.cos[:T].to(x_BTD), self.sin[:T].to(x_BTD)
        for block in self.layers:
            x_BTD = block(x_BTD, cos_TH, sin_TH)
        logits_BTV = self.lm_head(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV, None
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
