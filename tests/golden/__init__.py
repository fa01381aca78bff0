"""What the original models compute on tiny configurations; README.md says what each file holds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("lumen", "lumen_mha", "gpt", "ripple_full", "ripple_window", "ripple_pow2")


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One file. Weights are float32, whole numbers int64, all that was computed float64."""

    model: str  # lumen, gpt or ripple
    config: dict[str, Any]  # the fields of LumenConfig, GPTConfig or RippleConfig
    weights: dict[str, np.ndarray]  # the torch state dict, a tied table under both its keys
    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    embedding_BTD: np.ndarray  # what enters the first block, learnt positions included
    after_attention_LBTD: np.ndarray  # what enters each block's second norm
    block_LBTD: np.ndarray  # what leaves each block
    final_norm_BTD: np.ndarray
    logits_BTV: np.ndarray
    loss: np.ndarray
    gradients: dict[str, np.ndarray]  # absent where torch gives None; a tied table once
    stepped: dict[str, np.ndarray]  # every parameter after one AdamW step; a tied table once
    prompt_P: np.ndarray
    greedy_G: np.ndarray  # the tokens that follow the prompt, each the likeliest


def load(name: str) -> Golden:
    """Reads one of `NAMES`."""
    with np.load(Path(__file__).parent / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    fields: dict[str, Any] = {"model": str(arrays.pop("model"))}
    fields["config"] = json.loads(str(arrays.pop("config")))
    for key, array in arrays.items():
        group, slash, tensor = key.partition("/")
        if slash:
            fields.setdefault(group, {})[tensor] = array
        else:
            fields[key] = array
    return Golden(**fields)
