"""What a parity check is run on: a model's parameters, and the torch tensors they came from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.reader import Reader, sha256
from convert.source import TorchSource, open_torch
from convert.transform import torch_arrays
from jaxslm.models import Config
from jaxslm.weights import is_model_folder, map_folder


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to be checked.

    Attributes:
        source: its name in the report.
        config: its config.
        arrays: parameters by JAX path.
        torch_state: tensors by torch key, tied ones once: the checkpoint's own, not ours.
        digests: SHA-256 of the tensors of the checkpoint that a model folder came from, by torch
            key; None where `torch_state` itself is the checkpoint's.
    """

    source: str
    config: Config
    arrays: Mapping[str, np.ndarray]
    torch_state: Mapping[str, np.ndarray]
    digests: Mapping[str, str] | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(array.size for array in self.arrays.values())


def load_subject(
    path: Path, *, overrides: tuple[str, ...] = (), preset: str | None = None
) -> Subject:
    """A torch checkpoint, or a model folder of ours, ready to be checked.

    Raises:
        ValueError: as `convert.to_jax` and `jaxslm.load`.
        OSError: it cannot be read.
    """
    if not is_model_folder(path):
        return subject_of(open_torch(path, overrides=overrides, preset=preset))
    if overrides or preset:
        raise ValueError(f"{path} is a model folder, its config.json says everything: "
                         "--config and --preset are for torch checkpoints")  # fmt: skip
    config, arrays = map_folder(path)
    return Subject(
        source=str(path),
        config=config,
        arrays=arrays,
        torch_state=torch_arrays(config, arrays),
        digests=recorded_digests(path) or {},
    )


def subject_of(source: TorchSource) -> Subject:
    """An open torch checkpoint as it would be converted.

    Raises:
        ValueError: a checksum is wrong, or numbers are not finite.
    """
    with Reader(source, None) as reader:
        arrays = {leaf.path: reader.parameter(leaf) for leaf in source.leaves}
        reader.finish(allow_nonfinite=False)
    return Subject(
        source=str(source.checkpoint.path),
        config=source.config,
        arrays=arrays,
        torch_state={
            part.key: source.tensor(part.key).read()
            for leaf in source.leaves
            for part in leaf.parts
        },
    )


def recorded_digests(folder: Path) -> dict[str, str] | None:
    """SHA-256 by torch key of the checkpoint that a folder came from, where parity.json says so."""
    try:
        record = json.loads((folder / "parity.json").read_text())
        return {key: tensor["sha256"] for key, tensor in record["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def identical(tensors: Mapping[str, np.ndarray], digests: Mapping[str, str]) -> set[str]:
    """The keys whose tensors have just the bytes of the digests."""
    return {key for key, array in tensors.items() if sha256(array) == digests.get(key)}
