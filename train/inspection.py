"""What a run's folder holds, without reading its arrays."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxslm.weights import abstract_parameters
from train.checkpoints import CheckpointError, Checkpoints
from train.config import read_config, to_json
from train.metrics import read_metrics


def inspect_run(run: Path) -> dict[str, Any]:
    """Config, progress and checkpoints of a run.

    Returns:
        JSON values: run, config, parameters, update (the last recorded), loss, evaluations
        (step -> loss), checkpoints (step, bytes, whole).

    Raises:
        ValueError: its config.json is damaged.
        OSError: it cannot be read.
    """
    config = read_config(run)
    rows = read_metrics(run)
    updates = [row for row in rows if "loss" in row]
    checkpoints = Checkpoints(run)
    try:
        found = [_checkpoint(checkpoints, step) for step in checkpoints.steps()]
    finally:
        checkpoints.close()
    shapes = abstract_parameters(config.model).values()
    return {
        "run": str(run),
        **{key: value for key, value in to_json(config).items() if key in ("model", "config")},
        "parameters": sum(math.prod(leaf.shape) for leaf in shapes),
        "update": updates[-1]["step"] if updates else 0,
        "loss": updates[-1]["loss"] if updates else None,
        "skipped": updates[-1].get("skipped", 0) if updates else 0,
        "evaluations": {
            row["step"]: row["val_loss"] for row in rows if row.get("val_loss") is not None
        },
        "checkpoints": found,
    }


def print_run(found: dict[str, Any], console: Console) -> None:
    """The same in words."""
    config = found["config"]
    console.print(f"{found['run']}: a training run of {found['model']}, "
                  f"{found['parameters']:,} parameters")  # fmt: skip
    loss = "" if found["loss"] is None else f", loss {found['loss']:.4f}"
    console.print(f"  update {found['update']} of {config['steps']}{loss}, "
                  f"{found['skipped']} skipped")  # fmt: skip
    data, optim = config["data"], config["optim"]
    console.print(
        f"  {data['batch_size']} x {data['sequence_length']} tokens an update; "
        f"{optim['name']}, rate {optim['lr']:g}, {optim['schedule']}; data {data['train']!r}"
    )
    if found["evaluations"]:
        step, best = min(found["evaluations"].items(), key=lambda item: item[1])
        console.print(f"  best validation loss {best:.4f} at update {step}")
    for checkpoint in found["checkpoints"]:
        state = "" if checkpoint["whole"] else f"  damaged: {checkpoint['fault']}"
        console.print(
            f"  checkpoint {checkpoint['step']}: {checkpoint['bytes'] / 1e6:.1f} MB{state}"
        )
    if not found["checkpoints"]:
        console.print("  no checkpoint yet")


def _checkpoint(checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    """A checkpoint's size, and whether its meta data can be read; arrays are not looked at."""
    size = sum(
        path.stat().st_size for path in checkpoints.folder(step).rglob("*") if path.is_file()
    )
    try:
        checkpoints.meta(step)
    except CheckpointError as error:
        return {"step": step, "bytes": size, "whole": False, "fault": str(error)}
    return {"step": step, "bytes": size, "whole": True}
