"""The three models in torch, written afresh with the originals' state-dict keys and numerics.

They let the parity check run where the originals are not at hand. Initial values, operations and
their order follow the originals, so that torch's own float32 error is the originals' too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from convert.counterparts import gpt, lumen, ripple

if TYPE_CHECKING:
    from jaxslm.models.gpt import GPTConfig
    from jaxslm.models.lumen import LumenConfig
    from jaxslm.models.ripple import RippleConfig


def build(config: LumenConfig | GPTConfig | RippleConfig) -> nn.Module:
    """The torch model of a config, freshly initialised in float32.

    Its `forward(tokens_BT, targets_BT=None)` returns `(logits_BTV, loss or None)`.

    Raises:
        TypeError: `config` is none of the three.
    """
    # By name, so that nothing here imports JAX.
    match type(config).__name__:
        case "LumenConfig":
            return lumen.Lumen(config)  # pyright: ignore[reportArgumentType]
        case "GPTConfig":
            return gpt.GPT(config)  # pyright: ignore[reportArgumentType]
        case "RippleConfig":
            return ripple.Ripple(config)  # pyright: ignore[reportArgumentType]
    raise TypeError(_unknown(config, "a LumenConfig, GPTConfig or RippleConfig"))


def rope_tables(config: LumenConfig | GPTConfig) -> tuple[np.ndarray, np.ndarray]:
    """The original's cosines and sines, float32 [context, H/2], bit for bit on this machine.

    The originals' tables are H wide, with the same in both halves.

    Raises:
        TypeError: `config` is of a model without RoPE.
    """
    match type(config).__name__:
        case "LumenConfig":
            cos, sin = lumen.rope_tables(config)  # pyright: ignore[reportArgumentType]
        case "GPTConfig":
            cos, sin = gpt.rope_tables(config)  # pyright: ignore[reportArgumentType]
        case _:
            raise TypeError(_unknown(config, "a LumenConfig or GPTConfig (Ripple has no RoPE)"))
    half = cos.shape[1] // 2
    return cos[:, :half].contiguous().numpy(), sin[:, :half].contiguous().numpy()


def _unknown(config: object, expected: str) -> str:
    return f"config: expected {expected}, got {type(config).__name__}"
