"""Conversion in memory: a torch checkpoint to a model, a model to a torch state dict."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.casting import cast, float_dtype
from convert.reader import Reader
from convert.rules import disassemble, leaves, torch_keys
from convert.source import open_torch
from convert.tables import TABLES
from jaxslm.models import Config, Model, model_name
from jaxslm.weights import from_arrays, to_arrays

if TYPE_CHECKING:
    import torch


def to_jax(
    source: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    preset: str | None = None,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
) -> Model:
    """A torch checkpoint as a Flax model, with the strictness of `jaxslm convert`. Needs no torch.

    Args:
        source: path of a checkpoint in any supported container.
        config: config fields that the file does not give, such as {"n_head": 16}.
        preset: name of a config of the original, such as "lumen-3m".
        dtype: cast every parameter to this; None keeps each tensor's own.
        allow_nonfinite: accept NaN and infinities in the weights.

    Returns:
        The model on JAX's default device.

    Raises:
        ValueError: the file is damaged, is not one of the models or does not fit its config; a
            cast overflows; a weight is not finite; JAX would narrow a dtype.
        OSError: the file cannot be read.
    """
    overrides = tuple(f"{name}={value}" for name, value in (config or {}).items())
    opened = open_torch(Path(source), overrides=overrides, preset=preset, cast=dtype is not None)
    with Reader(opened, dtype) as reader:
        arrays = {leaf.path: reader.parameter(leaf) for leaf in opened.leaves}
        reader.finish(allow_nonfinite=allow_nonfinite)
    return from_arrays(opened.config, arrays)


def to_torch(model: Model, *, dtype: str | None = None) -> "dict[str, torch.Tensor]":
    """A model's parameters as a torch state dict that the original loads with strict=True.

    Args:
        model: the model.
        dtype: cast every tensor to this; None keeps each parameter's own.

    Returns:
        Contiguous tensors in the order of the original's state dict; tied keys share one tensor.

    Raises:
        ValueError: a cast overflows.
        ImportError: torch is not installed.
    """
    from convert.torch_io import from_numpy

    arrays = {name: np.asarray(value) for name, value in to_arrays(model).items()}
    state = torch_arrays(model.config, arrays)
    target = None if dtype is None else float_dtype(dtype)
    tensors = {
        key: from_numpy(cast(array, target or array.dtype, key)) for key, array in state.items()
    }
    return with_aliases(model.config, tensors)


def torch_arrays(config: Config, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by JAX path -> torch tensors by key (views, tied ones once), in torch's order."""
    table = TABLES[model_name(config)]
    found = {
        key: view
        for leaf in leaves(table, config)
        for key, view in disassemble(leaf, arrays[leaf.path])
    }
    return {key: found[key] for key in torch_keys(table, config) if key in found}


def with_aliases(config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
    """The same with each tied tensor under its other key too."""
    ties = TABLES[model_name(config)].ties
    return tensors | {alias: tensors[owner] for alias, owner in ties.items()}
