"""Ripple in torch: what the Flax model is held against.

Where it departs from a plain pre-norm transformer:
- No positions by default: a head lowers a score by |decay| for each step back, one learnt scalar a
  head. Learnt absolute positions can be added.
- With `attention_window` = w and more than w positions, queries go in chunks of w, and the chunk
  that starts at s sees keys from s - w + 1 on: between w and 2w - 1 of them.
- Without a window at work the decay reaches the scores as a plain number: it gets no gradient.
- Heads are separate modules, concatenated straight onto the residual: no output projection.
- The MLP's first half is the value, SiLU of its second half the gate; its matrices always have
  biases, those of the heads only with `bias`. The output head is not tied to the table.

Axes: B batch, T query positions, S key positions, D width, H head width, F mlp width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxslm.models.ripple import RippleConfig


def initial_decay(head: int, n_head: int) -> float:
    """The slope a head starts at: those of the next power of two heads, cut to `n_head`."""
    ratio = 0.5 ** (8 / 2 ** (n_head - 1).bit_length())
    return 0.5 * ratio**head


class Head(nn.Module):
    """Causal attention of one head, its scores falling with distance."""

    def __init__(self, config: RippleConfig, head: int):
        super().__init__()
        self.config = config
        H = config.n_embd // config.n_head
        self.key = nn.Linear(config.n_embd, H, bias=config.bias)
        self.query = nn.Linear(config.n_embd, H, bias=config.bias)
        self.value = nn.Linear(config.n_embd, H, bias=config.bias)
        self.decay_factor = nn.Parameter(torch.tensor([initial_decay(head, config.n_head)]))

    def _bias(self, positions_T: Tensor, positions_S: Tensor, window: int | None) -> Tensor:
        """What is added to the scores, [T, S] in the positions' dtype; `window` if one is at work.

        The positions are in the dtype of the activations, as in the original: in bfloat16 they are
        whole numbers only up to 256.
        """
        steps_TS = positions_S[None, :] - positions_T[:, None]
        decay = self.decay_factor.abs()
        if window is None and self.config.decay_gradient == "as_torch":
            decay = decay.item()
        hidden_TS = steps_TS > 0
        if window is not None and self.config.window_mode == "exact":
            hidden_TS = hidden_TS | (steps_TS <= -window)
        bias_TS = steps_TS.clamp(max=0) * decay
        return bias_TS.masked_fill(hidden_TS, torch.finfo(positions_T.dtype).min)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """One head's share of the residual, [B, T, H]."""
        q_BTH, k_BSH, v_BSH = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        T = x_BTD.shape[1]
        window = self.config.attention_window
        if not window or window >= T:
            window = None
        chunk = window or T
        mixed_BTH = []
        for start in range(0, T, chunk):
            end = min(start + chunk, T)
            first = 0 if window is None else max(0, start - window + 1)
            positions_T = torch.arange(start, end, dtype=q_BTH.dtype, device=q_BTH.device)
            positions_S = torch.arange(first, end, dtype=q_BTH.dtype, device=q_BTH.device)
            mixed_B1TH = F.scaled_dot_product_attention(
                q_BTH[:, None, start:end],
                k_BSH[:, None, first:end],
                v_BSH[:, None, first:end],
                attn_mask=self._bias(positions_T, positions_S, window),
                dropout_p=self.config.dropout if self.training else 0.0,
            )
            mixed_BTH.append(mixed_B1TH.squeeze(1))
        return torch.cat(mixed_BTH, dim=1)


class MLP(nn.Module):
    """fc2(value * silu(gate)), value and gate being the halves of fc1."""

    def __init__(self, config: RippleConfig):
        super().__init__()
        hidden = int(config.n_embd * 8 / 3)
        hidden += hidden % 2
        self.fc1 = nn.Linear(config.n_embd, hidden)
        self.fc2 = nn.Linear(hidden // 2, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each position by itself."""
        value_BTF, gate_BTF = self.fc1(x_BTD).chunk(2, dim=-1)
        return self.dropout(self.fc2(value_BTF * F.silu(gate_BTF)))


class Block(nn.Module):
    """Heads and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: RippleConfig):
        super().__init__()
        self.ln1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.heads = nn.ModuleList([Head(config, head) for head in range(config.n_head)])
        self.ln2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.ffwd = MLP(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """One layer."""
        # Normalised anew for each head, as in the original: its gradients then round the same way.
        x_BTD = x_BTD + torch.cat([head(self.ln1(x_BTD)) for head in self.heads], dim=-1)
        return x_BTD + self.ffwd(self.ln2(x_BTD))


class Ripple(nn.Module):
    """The whole model, with the original's state-dict keys (originals/ripple/model.py)."""

    def __init__(self, config: RippleConfig):
        super().__init__()
        self.config = config
        self.token_embedding_table = nn.Embedding(config.vocab_size, config.n_embd)
        if config.use_absolute_pos_emb:
            self.position_embedding_table = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, T, V], and the mean cross-entropy where targets are given.

        Raises:
            ValueError: more than `block_size` positions with absolute positions; else no limit.
        """
        T, limit = tokens_BT.shape[1], self.config.block_size
        x_BTD = self.token_embedding_table(tokens_BT)
        if self.config.use_absolute_pos_emb:
            if limit < T:
                raise ValueError(
                    f"tokens: at most block_size = {limit} positions with use_absolute_pos_emb, "
                    f"got {T}; cut them"
                )
            positions_T = torch.arange(T, device=tokens_BT.device)
            x_BTD = x_BTD + self.position_embedding_table(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.lm_head(self.ln_f(x_BTD))
        if targets_BT is None:
            return logits_BTV, None
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
