"""The drawings of the parity page, as inline SVG that takes its colours from the page.

matplotlib draws in placeholder colours; each is replaced by one of the page's CSS variables, so
that one picture serves light, dark and print.
"""

import io
import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from convert.parity.compare import TRAJECTORY_LIMIT, ParityReport, Row, Training
from convert.parity.report_words import Rung, tokens

COLOURS = {
    "ink": "#010100",
    "muted": "#010200",
    "ours": "#010300",
    "torch": "#010400",
    "fail": "#010500",
}
DECADES = 4  # that a heatmap's colours span below its largest number
SMALLEST, LARGEST = 1e-200, 1e200  # that an axis or a colour bar reaches: matplotlib needs room
MARKERS = {"attention": "o", "mlp": "s"}


def drift(report: ParityReport, dtype: str) -> tuple[str, str] | None:
    """(title, SVG) of the error along the residual stream at the length where it is worst.

    float64 stands against its limit, other dtypes against torch's own error. None where there are
    no such rows.
    """
    rows = [row for row in report.rows if row.rung in MARKERS and row.dtype == dtype]
    if not rows:
        return None
    length = Rung(name="", rows=tuple(rows)).worst.length
    rows = [row for row in rows if row.length == length]
    x = [(row.layer or 0) + 0.5 * (row.rung == "mlp") for row in rows]
    errors = [row.error for row in rows]
    if dtype == "float64":
        limits = {"limit": ("--", [row.limit for row in rows])}
    else:
        own = [math.nan if row.torch_error is None else row.torch_error for row in rows]
        limits = {"torch's own": (":", own)}
        times = [row.limit * error for row, error in zip(rows, own, strict=True)]
        limits[f"{rows[0].limit:g} times torch's own"] = ("--", times)
    figure, axes = _canvas(4.6, 3.1)
    for label, (line, values) in limits.items():
        axes.plot(x, values, line, color=COLOURS["torch"], linewidth=1.1, label=label)
    low, high = _ends([errors, *(values for _, values in limits.values())])
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(_power)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.plot(x, errors, color=COLOURS["ours"], linewidth=0.8)
    for rung, marker in MARKERS.items():
        _points(axes, [(a, row) for a, row in zip(x, rows, strict=True) if row.rung == rung],
                marker, rung, (low, high))  # fmt: skip
    axes.set_xlabel("layer")
    axes.set_ylabel("error")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(min(x) - 0.4, max(x) + 0.4)
    axes.legend(loc="best", frameon=False, fontsize=8, labelcolor=COLOURS["ink"])
    at = "" if length is None else f", {tokens(length)}"
    return f"{dtype}{at}", _svg(figure)


def heatmap(difference: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> str:
    """SVG of the two matrices side by side, each with the bar of its logarithmic colours."""
    figure = Figure(figsize=(5.6, 1.55), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, title, values in zip(
        figure.subplots(1, 2), ("|difference to torch|", "|torch|"), (difference, reference),
        strict=True,
    ):  # fmt: skip
        _style(axes)
        axes.set_title(title, fontsize=8, color=COLOURS["muted"])
        axes.xaxis.set_major_locator(NullLocator())
        axes.yaxis.set_major_locator(NullLocator())
        _matrix(figure, axes, np.array(values, np.float64))
    return _svg(figure)


def training_figures(training: Training) -> list[tuple[str, str]]:
    """(title, SVG) of the losses by step, and of their differences to torch's in float64."""
    truth = np.array(training.losses["torch float64"])
    figure, axes = _canvas(4.6, 3.1)
    for name, colour, line in (("torch float64", "torch", "-"), ("JAX float64", "ours", "--")):
        axes.plot(training.losses[name], line, color=COLOURS[colour], linewidth=1.1, label=name)
    _steps(axes, "loss in nats")
    losses = _svg(figure)
    figure, axes = _canvas(4.6, 3.1)
    axes.axhline(TRAJECTORY_LIMIT, linestyle="--", color=COLOURS["muted"], linewidth=0.8,
                 label="limit in float64")  # fmt: skip
    drawn = [[TRAJECTORY_LIMIT]]
    for name, values in training.losses.items():
        if name != "torch float64":
            with np.errstate(all="ignore"):
                away = np.abs(np.array(values) / truth - 1.0)
            drawn.append(away.tolist())
            line = ":" if name == "JAX float64" else "-"
            colour = "torch" if name.startswith("torch") else "ours"
            shown = np.where(np.isfinite(away) & (away > 0.0), away, np.nan)
            axes.plot(shown, line, marker=".", markersize=2, linewidth=0.9, label=name,
                      color=COLOURS[colour])  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(*_ends(drawn))
    axes.yaxis.set_major_formatter(_power)
    axes.yaxis.set_minor_locator(NullLocator())
    _steps(axes, "relative difference")
    return [("loss", losses), ("difference to torch in float64", _svg(figure))]


def _steps(axes: Axes, label: str) -> None:
    """Axis titles and legend of a curve by step."""
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(loc="best", frameon=False, fontsize=8, labelcolor=COLOURS["ink"])


def _matrix(figure: Figure, axes: Axes, values: np.ndarray) -> None:
    """One matrix; what is not finite stands out, what is below the colours has the lowest."""
    positive = values[np.isfinite(values) & (values > 0.0)]
    largest = float(np.clip(positive.max(), SMALLEST, LARGEST)) if positive.size else 1.0
    smallest = largest * 10.0**-DECADES
    norm = LogNorm(smallest, largest)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#e5484d")
    shown = np.where(np.isfinite(values), np.clip(values, smallest, largest), np.nan)
    axes.imshow(shown, norm=norm, cmap=colours, aspect="auto", interpolation="none")
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, fraction=0.06, pad=0.02)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(colors=COLOURS["muted"], labelcolor=COLOURS["ink"], labelsize=7, width=0.6)
    bar.ax.yaxis.set_major_formatter(_power)
    bar.outline.set_visible(False)


def _points(
    axes: Axes, points: Sequence[tuple[float, Row]], marker: str, label: str,
    ends: tuple[float, float],
) -> None:  # fmt: skip
    """Markers; exact ones lie on the lower edge, those not finite are crosses on the upper."""
    low, high = ends
    first = True
    for kind, chosen, height, colour in (
        (marker, lambda row: row.passed, None, "ours"),
        (marker, lambda row: not row.passed and math.isfinite(row.error), None, "fail"),
        ("X", lambda row: not math.isfinite(row.error), high, "fail"),
    ):
        some = [(x, height or max(row.error, low)) for x, row in points if chosen(row)]
        if some:
            axes.plot(*zip(*some, strict=True), kind, color=COLOURS[colour], markersize=5,
                      clip_on=False, label=label if first else None)  # fmt: skip
            first = False


def _ends(lines: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The ends of a logarithmic axis that all numbers above zero fit in."""
    shown = [value for line in lines for value in line if math.isfinite(value) and value > 0.0]
    if not shown:
        return 1e-17, 1e-9
    return max(min(shown) / 4, SMALLEST), max(min(max(shown) * 4, LARGEST), 4 * SMALLEST)


def _power(value: float, _: float) -> str:
    return f"{value:.0e}"


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    _style(axes)
    return figure, axes


def _style(axes: Axes) -> None:
    """Thin lines in the page's colours on no background."""
    axes.patch.set_visible(False)
    axes.tick_params(colors=COLOURS["muted"], labelcolor=COLOURS["ink"], labelsize=8, width=0.6)
    axes.xaxis.label.set(color=COLOURS["ink"], fontsize=9)
    axes.yaxis.label.set(color=COLOURS["ink"], fontsize=9)
    for side, spine in axes.spines.items():
        spine.set(color=COLOURS["muted"], linewidth=0.6, visible=side in ("left", "bottom"))


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element: text as text, no metadata, the page's colours."""
    figure.patch.set_visible(False)
    output = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "parity"}):
        figure.savefig(output, format="svg", metadata=nothing)
    text = output.getvalue()
    text = text[text.index("<svg") :]
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return text
