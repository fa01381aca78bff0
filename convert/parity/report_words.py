"""The summary of a check that every report stands on, and how its parts are put in words."""

import math
from dataclasses import dataclass

from convert.parity.compare import RUNGS, TRAJECTORY_LIMIT, ParityReport, Row


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One rung of the ladder and the comparisons that stand behind it."""

    name: str
    rows: tuple[Row, ...]

    @property
    def failed(self) -> int:
        """How many comparisons fail."""
        return sum(not row.passed for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row that comes closest to its limit; one that fails before one that passes."""
        return max(self.rows, key=lambda row: (not row.passed, _share(row)))

    def of(self, *dtypes: str) -> "Rung | None":
        """The same rung with the rows of these dtypes alone; None where it has none."""
        rows = tuple(row for row in self.rows if row.dtype in dtypes)
        return Rung(name=self.name, rows=rows) if rows else None


def rungs(report: ParityReport) -> list[Rung]:
    """The rungs that were compared, in the order of the ladder."""
    by_name: dict[str, list[Row]] = {}
    for row in report.rows:
        by_name.setdefault(row.rung, []).append(row)
    return [Rung(name=name, rows=tuple(by_name[name])) for name in RUNGS if name in by_name]


def low_dtypes(report: ParityReport) -> list[str]:
    """The dtypes compared besides float64."""
    return [
        dtype for dtype in ("float32", "bfloat16") if any(r.dtype == dtype for r in report.rows)
    ]


def failure(report: ParityReport) -> list[tuple[str, str]]:
    """What to say of a report that failed: (what it is, the words)."""
    row = report.first_failure
    if row is None:
        return [("why", "nothing was compared, and an empty check does not pass")]
    failed = sum(not row.passed for row in report.rows)
    words = [("first departs", departure(row))]
    words += [("likely cause", plain(report.cause))] if report.cause else []
    return [*words, ("in all", f"{failed} of {len(report.rows)} comparisons fail")]


def departure(row: Row) -> str:
    """Where a row departs, from which position, and by how much."""
    words = plain(row.place)
    words += f", {row.dtype}" if row.dtype != "bits" else ""
    words += f", {tokens(row.length)}" if row.length is not None else ""
    if row.first_position is not None and row.rung != "greedy tokens":
        what = "step" if row.rung == "trajectory" else "position"
        words += f", from {what} {row.first_position} (counted from 0)"
    if row.rung in ("weights", "greedy tokens"):
        return f"{words}: {plain(row.note)}"
    if row.torch_error is None:
        words += f": {number(row.measure)}, limit {row.limit:g}"
    else:
        words += f": {multiple(row.measure)} times torch's own error, limit {row.limit:g}"
    return words + (f" ({plain(row.note)})" if row.note else "")


def where(row: Row, room: int | None = None) -> str:
    """The layer, tensor and length of a row; the tensor's end, if there is little room."""
    length = [tokens(row.length)] if row.length is not None else []
    layer = [f"layer {row.layer}"] if row.layer is not None else []
    if row.tensor is None:
        return ", ".join(layer + length)
    tensor = plain(row.tensor)
    if room is not None:
        left = max(8, room - len(", ".join(["", *layer, *length])))
        tensor = tensor if len(tensor) <= left else ".." + tensor[2 - left :].lstrip(".")
    return ", ".join([*layer, tensor, *length])


def training(report: ParityReport) -> str:
    """What both sides trained, and how closely it is held; empty if they did not."""
    if report.training is None:
        return ""
    return f"{plain(report.training.words)}; in float64 held to {TRAJECTORY_LIMIT:g}"


def number(value: float | None) -> str:
    """An error in two digits; empty for None."""
    if value is None:
        return ""
    return "0" if value == 0.0 else f"{value:.1e}" if math.isfinite(value) else str(value)


def multiple(value: float) -> str:
    """A multiple in at most five characters."""
    if not math.isfinite(value) or value == 0.0:
        return number(value)
    return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 99999.5 else f"{value:.0e}"


def tokens(length: int) -> str:
    """A length in words."""
    return f"{length} token" + "s" * (length != 1)


def plain(text: str) -> str:
    """Text from a file, its control characters, line ends and the like shown as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def weights_words(rung: Rung) -> str:
    """What stands in place of figures on the rung that compares bytes."""
    total = len(rung.rows)
    share = f"{total - rung.failed} of {total}" if rung.failed else f"all {total}"
    return f"{share} tensors byte for byte"


def subject(report: ParityReport) -> str:
    """The model, what it was checked against, and at which lengths."""
    return (
        f"{plain(report.model)}, {report.parameters:,} parameters, against "
        f"{plain(report.against)}, at {', '.join(map(str, report.lengths)) or 'no'} tokens"
    )


def _share(row: Row) -> float:
    """How much of its limit a row uses up; NaN is as bad as can be."""
    if math.isnan(row.measure):
        return math.inf
    return row.measure / row.limit if row.limit > 0.0 else math.inf if row.measure > 0.0 else 0.0
