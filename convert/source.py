"""A torch checkpoint that is known to be one of our models, whole and consistent."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.checkpoint.containers import Checkpoint, open_checkpoint
from convert.checkpoint.lazy_tensor import LazyTensor
from convert.resolve import Resolved, resolve
from convert.rules import Leaf, Table, faults, leaves
from convert.tables import table_for
from jaxslm.models import Config
from jaxslm.weights import is_model_folder


@dataclass(frozen=True, kw_only=True)
class TorchSource:
    """An open checkpoint with its config; every parameter of `leaves` can be read."""

    checkpoint: Checkpoint
    resolved: Resolved
    config: Config
    leaves: list[Leaf]

    @property
    def table(self) -> Table:
        """The model's conversion table."""
        return self.resolved.table

    def tensor(self, key: str) -> LazyTensor:
        """A tensor by the key of its rule; a tied one is found under its alias too."""
        tensors = self.checkpoint.tensors
        if key in tensors:
            return tensors[key]
        return tensors[next(alias for alias, owner in self.table.ties.items() if owner == key)]


def identify(
    path: Path, *, overrides: tuple[str, ...] = (), preset: str | None = None
) -> tuple[Checkpoint, Resolved]:
    """Opens a checkpoint and finds its model and what is known of its config.

    Raises:
        ValueError: damaged, not one of the models, or an override that cannot be understood.
        OSError: it cannot be read.
    """
    if is_model_folder(path):
        raise ValueError(f"{path} is a model folder already: jaxslm.load reads it")
    checkpoint = open_checkpoint(path)
    shapes = {key: tensor.shape for key, tensor in checkpoint.tensors.items()}
    try:
        table = table_for(shapes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    sources = checkpoint.config_sources
    return checkpoint, resolve(table, shapes, sources, overrides=overrides, preset=preset)


def open_torch(
    path: Path,
    *,
    overrides: tuple[str, ...] = (),
    preset: str | None = None,
    cast: bool = False,
) -> TorchSource:
    """Opens a torch checkpoint and checks all that can be checked before its numbers are used.

    Args:
        path: any container that `convert.checkpoint.containers` reads.
        overrides: "field=value" for config fields that the file does not give.
        preset: name of a config of the original.
        cast: the caller casts, so that dtypes may be mixed within a stacked parameter.

    Raises:
        ValueError: not one of the models; config unknown or contradictory; keys missing,
            unexpected or mis-shaped (all listed); tied tensors that differ.
        OSError: it cannot be read.
    """
    checkpoint, resolved = identify(path, overrides=overrides, preset=preset)
    try:
        config = resolved.config()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    shapes = {key: tensor.shape for key, tensor in checkpoint.tensors.items()}
    dtypes = {key: tensor.dtype for key, tensor in checkpoint.tensors.items()}
    found = faults(resolved.table, config, shapes, dtypes, mixed=cast)
    found = found or [
        f"tied tensors {owner} and {alias} differ {difference}: one of them is not "
        "what the model used; save the file again without the wrong one"
        for alias, owner in resolved.table.ties.items()
        if (difference := _difference(checkpoint, alias, owner))
    ]
    if found:
        lines = "\n  ".join(found)
        raise ValueError(f"{path} does not fit {type(config).__name__}:\n  {lines}")
    return TorchSource(
        checkpoint=checkpoint,
        resolved=resolved,
        config=config,
        leaves=leaves(resolved.table, config),
    )


def _difference(checkpoint: Checkpoint, alias: str, owner: str) -> str:
    """How two tied tensors differ, in words; none where one is absent or their bytes are equal."""
    if alias not in checkpoint.tensors or owner not in checkpoint.tensors:
        return ""
    one, other = checkpoint.tensors[alias], checkpoint.tensors[owner]
    if one.storage == other.storage:
        return ""
    a, b = one.read(), other.read()
    if a.dtype != b.dtype:
        return f"in dtype ({b.dtype} and {a.dtype})"
    if np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes():
        return ""
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))
    return f"by up to {largest:g}" if largest else "in the sign of a zero"
