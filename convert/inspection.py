"""What `jaxslm inspect` says of a file or folder; its weights are not read."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from convert.adamw import describe_optimizer
from convert.checkpoint.containers import Checkpoint
from convert.checkpoint.lazy_tensor import LazyTensor, printable
from convert.parity.subject import recorded_digests
from convert.resolve import Resolved
from convert.rules import Table, faults, is_ignored
from convert.source import identify
from jaxslm.models import model_name
from jaxslm.optimizer_file import map_optimizer
from jaxslm.weights import is_model_folder, map_folder


def inspect_path(
    path: Path, *, overrides: tuple[str, ...] = (), preset: str | None = None
) -> dict[str, Any]:
    """Everything that can be told, as plain values for JSON.

    Raises:
        ValueError: damaged, or not one of the models (says what it looks like).
        OSError: it cannot be read.
    """
    if is_model_folder(path):
        return _model_folder(path)
    checkpoint, resolved = identify(path, overrides=overrides, preset=preset)
    table = resolved.table
    tensors = {
        key: tensor
        for key, tensor in checkpoint.tensors.items()
        if not is_ignored(table, key, tensor.shape)
    }
    ties = {alias: owner for alias, owner in table.ties.items() if alias in tensors}
    counted = {
        key: tensor for key, tensor in tensors.items() if not (key in ties and ties[key] in tensors)
    }
    return {
        "path": str(path),
        "container": checkpoint.container,
        "layout": checkpoint.layout,
        "model": table.model,
        "parameters": sum(_size(tensor) for tensor in counted.values()),
        "bytes": sum(tensor.nbytes for tensor in counted.values()),
        "tensors": len(counted),
        "dtypes": dict(Counter(tensor.torch_dtype for tensor in counted.values())),
        "config": {
            name: {"value": value, "from": resolved.origins[name]}
            for name, value in resolved.values.items()
        },
        "unknown": list(resolved.unknown),
        "fitting_preset": resolved.fitting_preset,
        "tied": _ties(table, checkpoint),
        "stripped_prefixes": list(checkpoint.stripped),
        "buffers": sorted(checkpoint.tensors.keys() - tensors.keys()),
        "also_holds": dict(checkpoint.extras),
        "optimizer": checkpoint.optimizer and describe_optimizer(checkpoint.optimizer),
        "not_used": {source: list(names) for source, names in resolved.unused.items()},
        "faults": _faults(checkpoint, resolved),
    }


def _model_folder(path: Path) -> dict[str, Any]:
    config, arrays = map_folder(path)
    optimizer = map_optimizer(path)
    return {
        "path": str(path),
        "container": "model folder",
        "model": model_name(config),
        "parameters": sum(array.size for array in arrays.values()),
        "bytes": sum(array.nbytes for array in arrays.values()),
        "tensors": len(arrays),
        "dtypes": dict(Counter(array.dtype.name for array in arrays.values())),
        "config": {
            name: {"value": value, "from": "config.json"} for name, value in asdict(config).items()
        },
        "optimizer": optimizer
        and f"AdamW after {optimizer.count:,} updates, groups: {len(optimizer.groups)}",
        "converted_from_torch": recorded_digests(path) is not None,
        "faults": [],
    }


def _size(tensor: LazyTensor) -> int:
    return tensor.nbytes // tensor.dtype.itemsize


def _ties(table: Table, checkpoint: Checkpoint) -> dict[str, str]:
    """Each tied pair, and how the file stores it."""
    words = {}
    for alias, owner in table.ties.items():
        one, other = checkpoint.tensors.get(alias), checkpoint.tensors.get(owner)
        if one is not None and other is not None:
            how = "one storage" if one.storage == other.storage else "stored twice"
        else:
            how = f"only {owner if one is None else alias} is there"
        words[f"{owner} = {alias}"] = how
    return words


def _faults(checkpoint: Checkpoint, resolved: Resolved) -> list[str]:
    """What would keep the checkpoint from being converted, as far as its header shows."""
    if resolved.conflicts:
        return list(resolved.conflicts)
    if resolved.unknown:
        return []
    try:
        config = resolved.config()
    except ValueError as error:
        return [str(error)]
    shapes = {key: tensor.shape for key, tensor in checkpoint.tensors.items()}
    dtypes = {key: tensor.dtype for key, tensor in checkpoint.tensors.items()}
    return faults(resolved.table, config, shapes, dtypes)


def print_inspection(found: dict[str, Any], console: Console) -> None:
    """The same for people."""
    layout = f", {found['layout']}" if found.get("layout") else ""
    dtypes = ", ".join(f"{name} ({count})" for name, count in found["dtypes"].items())
    lines = {
        "file": f"{found['path']}",
        "container": found["container"] + layout,
        "model": f"{found['model']}, {found['parameters']:,} parameters in {found['tensors']} "
        f"tensors, {found['bytes'] / 1e6:.1f} MB",
        "dtypes": dtypes,
        "tied": "; ".join(f"{pair} ({how})" for pair, how in found.get("tied", {}).items()),
        "prefixes": ", ".join(found.get("stripped_prefixes", ())),
        "buffers": f"{len(found['buffers'])} ignored" if found.get("buffers") else "",
        "also holds": "; ".join(f"{k}: {v}" for k, v in found.get("also_holds", {}).items()),
        "optimizer": found["optimizer"] or "",
        "not used": "; ".join(
            f"{', '.join(names)} in {source}" for source, names in found.get("not_used", {}).items()
        ),
    }
    for name, text in lines.items():
        if text:
            console.print(f"{name:<10}  {text}")
    table = RichTable(box=None, show_header=False, pad_edge=False)
    for name, field in found["config"].items():
        table.add_row("  " + name, printable(str(field["value"])), field["from"])
    for name in found.get("unknown", ()):
        table.add_row("  " + name, "?", "the file does not say and the weights cannot tell")
    console.print("config")
    console.print(table)
    if found.get("unknown"):
        preset = found["fitting_preset"]
        hint = f", or --preset {preset} (its shapes fit)" if preset else ""
        wanted = " ".join(f"{name}=..." for name in found["unknown"])
        console.print(f"to convert, pass --config {wanted}{hint}")
    for fault in found["faults"]:
        console.print(f"fault: {fault}")
