"""What an evaluation found, on the terminal and as JSON."""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxslm.files import atomic_output, check_destination
from train.metrics import json_number

FORMAT = "jaxslm-evaluation"
MARKS = {"json": f'"format": "{FORMAT}"'.encode(), "plot": b"\x89PNG\r\n"}


@dataclass(frozen=True, kw_only=True)
class LengthResult:
    """What was measured at one length.

    Attributes:
        length: T, tokens of a window.
        batch_size: windows of a batch.
        tokens: targets counted.
        unused: tokens of files too short for a window, not read.
        loss: mean over the targets, nats a token.
        perplexity: its exponential; infinite above 700 nats.
        bits_per_token: the loss in bits.
        text_bytes: of UTF-8 that the targets stand for; None where no tokenizer says it.
        bits_per_byte: the sum of the losses in bits over `text_bytes`.
        beyond_tokens: targets at positions beyond the training length.
        beyond_loss: mean over these, nats a token; None where there are none.
        position_loss: mean at each position, nats a token, [T]; None where none was counted.
        position_tokens: targets counted at each position, [T].
    """

    length: int
    batch_size: int
    tokens: int
    unused: int
    loss: float
    perplexity: float
    bits_per_token: float
    text_bytes: int | None
    bits_per_byte: float | None
    beyond_tokens: int
    beyond_loss: float | None
    position_loss: tuple[float | None, ...]
    position_tokens: tuple[int, ...]

    def bins(self, per_octave: int = 1) -> list[tuple[int, int, float | None]]:
        """Mean losses of the positions 1, 2, 3-4, 5-8, ... up to the length, or of finer steps.

        Returns:
            First and last position, and the mean over all targets there, None where none is.
        """
        counts_T = np.array(self.position_tokens)
        sums_T = counts_T * [loss or 0.0 for loss in self.position_loss]
        steps = range(self.length.bit_length() * per_octave)
        within = {round(2 ** (step / per_octave)) for step in steps}
        edges = [0, *sorted(edge for edge in within if edge < self.length), self.length]
        return [
            (first + 1, last, mean(sums_T[first:last], counts_T[first:last]))
            for first, last in pairwise(edges)
        ]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model's figures on token files.

    Attributes:
        model: its folder.
        kind: "lumen", "gpt" or "ripple".
        parameters: how many numbers.
        data: the token files.
        training_length: the config's context, tokens.
        tokenizer: the file that bytes were counted by.
        lengths: the results, shortest first.
        notes: what the user should know.
        failure: which lengths could not be measured and why; None where all were.
    """

    model: str
    kind: str
    parameters: int
    data: str
    training_length: int
    tokenizer: str | None
    lengths: tuple[LengthResult, ...]
    notes: tuple[str, ...]
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; an infinite perplexity is null."""
        values = json.loads(json.dumps(asdict(self)))
        for result in values["lengths"]:
            result["perplexity"] = json_number(result["perplexity"])
        return {"format": FORMAT, "format_version": 1} | values


def mean(sums: Any, counts: Any) -> float | None:
    """Mean over what was counted, one number or several; None where nothing was."""
    count = int(np.sum(counts))
    return float(np.sum(sums)) / count if count else None


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuses, before any work, outputs that could not be written or would replace something else.

    Args:
        json: of `write_json`.
        plot: of `train.evaluation_plot.plot`.

    Raises:
        ValueError: both name one file.
        OSError: there is no such folder, or something stands there that is no earlier output.
    """
    if json is not None and plot is not None and json.resolve() == plot.resolve():
        raise ValueError(f"--json and --plot both name {json}: name two files")
    for path, mark in ((json, MARKS["json"]), (plot, MARKS["plot"])):
        if path is None:
            continue
        check_destination(path, overwrite=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: name a file")
        if path.exists():
            with path.open("rb") as file:
                if mark not in file.read(200):
                    raise FileExistsError(
                        f"{path} exists and is no earlier output of this command: name another file"
                    )


def print_evaluation(found: Evaluation, console: Console) -> None:
    """The figures in two tables: by length, and by length and position.

    A failure is left to the caller, whose exit status says it too.
    """
    console.print(
        f"{found.model}: {found.kind}, {found.parameters:,} parameters, context "
        f"{found.training_length:,}; on {found.data}\n"
    )
    beyond = any(result.beyond_tokens for result in found.lengths)
    table = _table(
        "length", "tokens", "loss", "perplexity", "bits/token", "bits/byte",
        *([f"beyond {found.training_length:,}"] if beyond else []),
    )  # fmt: skip
    for r in found.lengths:
        row = [f"{r.length:,}", f"{r.tokens:,}", _number(r.loss), f"{r.perplexity:,.2f}",
               _number(r.bits_per_token), _number(r.bits_per_byte)]  # fmt: skip
        table.add_row(*row, *([_number(r.beyond_loss)] if beyond else []))
    console.print(table)
    console.print()
    columns = [{(first, last): loss for first, last, loss in r.bins()} for r in found.lengths]
    console.print("loss by position, at each length\n")
    table = _table("position", *(f"{r.length:,}" for r in found.lengths))
    for first, last in sorted({span for column in columns for span in column}):
        span = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        table.add_row(span, *(_number(column.get((first, last))) for column in columns))
    console.print(table)
    if found.notes:
        console.print()
    for note in found.notes:
        console.print(note)


def write_json(found: Evaluation, path: Path) -> None:
    """Writes all figures; the file appears whole or not at all, in place of an earlier one.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_output(path, overwrite=True) as room:
        room.write_text(json.dumps(found.to_json(), indent=1) + "\n", "utf-8")


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
