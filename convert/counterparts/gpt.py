"""GPT in torch: what the Flax model is held against.

Where it departs from a plain pre-norm transformer:
- RoPE in place of learned positions: the first half of a head turns against the second.
- Fewer kv heads than query heads, repeated in the order 0, 0, 1, 1.
- LayerNorm with scale and bias, but no bias on any matrix; GELU in its tanh form.
- The embedding table is also the output head. Everything starts at N(0, 0.02), the two projections
  onto the residual at 0.02 / sqrt(2 L).

Axes: B batch, T query positions, S key positions, D width, N query heads, K kv heads, H head width,
V vocabulary, L layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxslm.models.gpt import GPTConfig


def rope_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, float32 [block_size, H] on the CPU.

    Both halves of H hold the same; the original's operations on its shapes give its bits.
    """
    head_width = config.n_embd // config.n_head
    exponents = torch.arange(0, head_width, 2, device="cpu").float() / head_width
    frequencies = 1.0 / (config.rope_base**exponents)
    positions = torch.arange(config.block_size, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Turns each head by its position's angles."""
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH


class Attention(nn.Module):
    """Causal attention by torch's fused kernel."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        D, self.N, self.K = config.n_embd, config.n_head, config.n_kv_head
        self.H = D // self.N
        self.q_proj = nn.Linear(D, self.N * self.H, bias=False)
        self.k_proj = nn.Linear(D, self.K * self.H, bias=False)
        self.v_proj = nn.Linear(D, self.K * self.H, bias=False)
        self.c_proj = nn.Linear(D, D, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """Mixes positions."""
        B, T, D = x_BTD.shape
        q_BNTH = self.q_proj(x_BTD).view(B, T, self.N, self.H).transpose(1, 2)
        k_BKSH = self.k_proj(x_BTD).view(B, T, self.K, self.H).transpose(1, 2)
        v_BKSH = self.v_proj(x_BTD).view(B, T, self.K, self.H).transpose(1, 2)
        q_BNTH, k_BKSH = _rotate(q_BNTH, cos_TH, sin_TH), _rotate(k_BKSH, cos_TH, sin_TH)
        k_BNSH = k_BKSH.repeat_interleave(self.N // self.K, dim=1)
        v_BNSH = v_BKSH.repeat_interleave(self.N // self.K, dim=1)
        mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, is_causal=True)
        return self.c_proj(mixed_BNTH.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Four times as wide inside, tanh GELU."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each position by itself."""
        return self.c_proj(F.gelu(self.c_fc(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """One layer."""
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD), cos_TH, sin_TH)
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class Transformer(nn.Module):
    """All but the head; it stands apart only for the `transformer.` in the state-dict keys."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        # Plain attributes, not buffers: model.bfloat16() must not round them for good.
        self.cos, self.sin = rope_tables(config)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Tokens to normalised states [B, T, D]."""
        T = tokens_BT.shape[1]
        x_BTD = self.wte(tokens_BT)
        cos_TH, sin_TH = self.cos[:T].to(x_BTD), self.sin[:T].to(x_BTD)
        for block in self.h:
            x_BTD = block(x_BTD, cos_TH, sin_TH)
        return self.ln_f(x_BTD)


class GPT(nn.Module):
    """The whole model, with the original's state-dict keys (originals/gpt.py, GPT)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        residual_std = 0.02 * (2 * config.n_layer) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(
                    module.weight, std=residual_std if name.endswith("c_proj") else 0.02
                )

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, T, V], and the mean cross-entropy where targets are given.

        Raises:
            ValueError: more than `block_size` positions.
        """
        T, limit = tokens_BT.shape[1], self.config.block_size
        if limit < T:
            raise ValueError(f"tokens: at most block_size = {limit} positions, got {T}; cut them")
        logits_BTV = self.lm_head(self.transformer(tokens_BT))
        if targets_BT is None:
            return logits_BTV, None
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
