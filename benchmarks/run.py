"""`make bench`: side by side with torch in one session, as a table and bench-out/results.json.

python -m benchmarks.run [update] [conversion] [training] [generation]
"""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxslm.libtpu import quiet_without_tpu

ROOM = Path("bench-out")


def main() -> None:
    """Runs the parts named on the command line, all by default."""
    from benchmarks.conversion import conversion
    from benchmarks.generation import generation
    from benchmarks.training import training
    from benchmarks.update import update

    quiet_without_tpu()
    parts = {
        "update": lambda: update(ROOM),
        "conversion": lambda: conversion(ROOM),
        "training": lambda: training(ROOM),
        "generation": lambda: generation(ROOM),
    }
    chosen = sys.argv[1:] or list(parts)
    if unknown := set(chosen) - parts.keys():
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    ROOM.mkdir(exist_ok=True)
    rows = []
    for row in (row for name in chosen for row in parts[name]()):
        print(f"{row['what']}: {row['torch']}; jaxslm: {row['jaxslm']}", flush=True)
        rows.append(row)
    table = Table(
        title=f"{os.cpu_count()} cores, {platform.machine()}; medians of alternating runs"
    )
    columns = ("what", "torch", "jaxslm", "ratio", "target", "met")
    for column in columns:
        table.add_column(column)
    for row in rows:
        shown = dict(row, met="yes" if row["met"] else "NO", ratio=row["ratio"] or "")
        table.add_row(*(str(shown[column]) for column in columns))
    Console(width=140).print(table)
    versions = {name: version(name) for name in ("jax", "flax", "torch", "numpy", "safetensors")}
    result = {"versions": versions, "cores": os.cpu_count(), "rows": rows}
    (ROOM / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
