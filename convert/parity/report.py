"""What a check found, in the terminal and as JSON; the page is `convert.parity.report_html`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from convert.parity.compare import FLOAT64_LIMIT, MULTIPLE_LIMIT, ParityReport, Training
from convert.parity.report_words import (
    Rung,
    failure,
    low_dtypes,
    multiple,
    number,
    plain,
    rungs,
    subject,
    training,
    weights_words,
    where,
)
from jaxslm.files import atomic_output

SCHEMA = 1  # of `to_json` and `figures`
NARROWEST = 24  # characters that the last column of the table needs


def print_report(report: ParityReport, console: Console) -> None:
    """Prints one line a rung, the verdict and, on failure, where it departs and why.

    Made for 80 columns and more, with or without colour. float32 stands beside float64; bfloat16
    has a table of its own.

    Args:
        report: of the check.
        console: to print to.
    """
    console.print(Text(f"{plain(report.source)}: {subject(report)}"))
    dtypes = low_dtypes(report)
    for index in range(max(1, len(dtypes))):
        low = dtypes[index : index + 1]
        first = ["bits", "float64"] if index == 0 else []
        parts = [part for rung in rungs(report) if (part := rung.of(*first, *low))]
        if parts:
            console.print()
            console.print(_table(parts, low, "float64" in first, console.width))
    if report.training is not None:
        console.print(Text(f"\ntrajectory: {training(report)}"))
    style = "bold green" if report.passed else "bold red"
    console.print(Text(f"\nparity: {'passed' if report.passed else 'FAILED'}", style=style))
    if report.passed:
        return
    details = Table.grid(padding=(0, 2, 0, 0))
    details.add_column(no_wrap=True)
    details.add_column(overflow="fold")
    for name, words in failure(report):
        details.add_row(Text(f"  {name}"), Text(words))
    console.print(details)


def to_json(report: ParityReport) -> dict[str, Any]:
    """The whole report but its drawings, as plain JSON; numbers that JSON lacks are strings."""
    first = report.first_failure
    return {
        "schema": SCHEMA,
        "verdict": "passed" if report.passed else "failed",
        "source": report.source,
        "against": report.against,
        "model": report.model,
        "config": _plain(report.config),
        "parameters": report.parameters,
        "lengths": list(report.lengths),
        "first_failure": None if first is None else {"place": first.place, **_plain(asdict(first))},
        "cause": report.cause,
        "rows": [_plain(asdict(row)) for row in report.rows],
        "training": None if report.training is None else _curves(report.training),
        "versions": report.versions,
        "seconds": round(report.seconds, 3),
    }


def figures(report: ParityReport) -> dict[str, Any]:
    """The short form that stands in parity.json: the verdict and the worst row of each rung."""
    worst: dict[str, dict[str, Any]] = {}
    for rung in rungs(report):
        for dtype in ("bits", "float64", *low_dtypes(report)):
            if part := rung.of(dtype):
                row = {"comparisons": len(part.rows), **_plain(asdict(part.worst))}
                worst.setdefault(rung.name, {})[dtype] = row
    return {
        "schema": SCHEMA,
        "verdict": "passed" if report.passed else "failed",
        "against": report.against,
        "lengths": list(report.lengths),
        "worst": worst,
        "versions": report.versions,
    }


def write_json(report: ParityReport, path: Path) -> None:
    """Writes `to_json`, replacing an earlier report.

    Raises:
        OSError: the file cannot be written, or the path is a folder that is in use.
    """
    text = json.dumps(to_json(report), indent=1, allow_nan=False) + "\n"
    with atomic_output(path, overwrite=True) as output:
        output.write_text(text)


def _table(parts: Sequence[Rung], low: list[str], float64: bool, width: int) -> Table:
    """One line a rung; the last column takes what the others leave."""
    columns = [("rung\nlimit", 13), ("", 4)]
    columns += [(f"float64\n{FLOAT64_LIMIT:g}", 7)] if float64 else []
    if low:
        columns += [(f"{low[0]}\n", len(low[0])), ("torch's\n", 7)]
        columns += [(f"times\n{MULTIPLE_LIMIT:g}", 5)]
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for index, (heading, size) in enumerate(columns):
        justify = "left" if index < 2 else "right"
        table.add_column(heading, justify=justify, width=size, no_wrap=True)
    room = max(NARROWEST, width - sum(size + 1 for _, size in columns))
    table.add_column("worst of\n", width=room, overflow="fold")
    for rung in parts:
        table.add_row(*_cells(rung, low, float64, room))
    return table


def _cells(rung: Rung, low: list[str], float64: bool, room: int) -> list[Text]:
    """A line of the table."""
    verdict = Text("FAIL", "bold red") if rung.failed else Text("ok", "green")
    high, small = rung.of("float64"), rung.of(*low)
    shown = [number(high.worst.measure) if high else ""] if float64 else []
    if low:
        row = small.worst if small else None
        shown += [number(row.error), number(row.torch_error)] if row else ["", ""]
        shown += [multiple(row.measure) if row and row.torch_error is not None else ""]
    if rung.name == "weights":
        last = weights_words(rung)
    elif rung.name == "greedy tokens":
        shown, last = [""] * len(shown), plain(rung.worst.note)
    else:
        count = f"{len(rung.rows)}"
        place = where(rung.worst, room - len(count) - 2)
        last = f"{count}: {place}" if place else count
    return [Text(rung.name), verdict, *map(Text, shown), Text(last)]


def _curves(training: Training) -> dict[str, Any]:
    """The training with its losses and norms by step."""
    fields = asdict(training)
    for name in ("losses", "norms"):
        fields[name] = {
            run: list(_plain(dict(enumerate(values))).values())
            for run, values in fields[name].items()
        }
    return fields


def _plain(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields, with strings for the numbers that JSON lacks."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
