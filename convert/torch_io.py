"""Numpy arrays as torch tensors and back, and torch files written. Needs the torch extra."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from convert.transpose import copy_into


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A contiguous tensor with a copy of the array's bytes; bfloat16 included."""
    copy = np.empty(array.shape, array.dtype)
    copy_into(copy, array)
    if copy.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copy)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes as an array; bfloat16 as ml_dtypes.bfloat16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def save_state_dict(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a state dict, or a checkpoint around one, that `torch.load(weights_only=True)` reads.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("xb") as file:
        try:
            torch.save(dict(content), file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # a full disk, which torch gives no name
                raise error.__context__ from None
            raise
