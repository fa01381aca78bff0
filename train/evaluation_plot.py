"""An evaluation as a PNG: loss against position, and against length where there are several."""

from pathlib import Path
from typing import Any

from jaxslm.files import atomic_output
from train.evaluation_report import Evaluation

POINTS_PER_OCTAVE = 4  # of a line against position; positions between are averaged


def plot(found: Evaluation, path: Path) -> None:
    """Draws an evaluation, 1,200 x 500 pixels; whole or not at all, in place of an earlier one.

    Args:
        found: the evaluation.
        path: PNG file to write.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    several = len(found.lengths) > 1
    panels = figure.subplots(1, 2 if several else 1, squeeze=False)[0]
    colours = colormaps["viridis"].resampled(len(found.lengths) + 1)
    for number, result in enumerate(found.lengths):
        points = [
            ((first * last) ** 0.5, loss)
            for first, last, loss in result.bins(POINTS_PER_OCTAVE)
            if loss is not None
        ]
        panels[0].plot(
            *zip(*points, strict=True), ".-", color=colours(number), ms=4, lw=1.2,
            label=f"length {result.length:,}",
        )  # fmt: skip
    panels[0].set(xlabel="position, tokens", ylabel="loss, nats per token")
    if several:
        _draw_lengths(panels[1], found)
    for axes in panels:
        if found.kind == "ripple":
            axes.axvline(
                found.training_length, color="black", ls="--", lw=1,
                label=f"training length, {found.training_length:,}",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(alpha=0.25)
        axes.legend()
    with atomic_output(path, overwrite=True) as room:
        figure.savefig(room, dpi=100, format="png")


def _draw_lengths(axes: Any, found: Evaluation) -> None:
    """Mean loss of each length, over all positions and over those beyond the training length."""
    whole = [(r.length, r.loss) for r in found.lengths]
    beyond = [(r.length, r.beyond_loss) for r in found.lengths if r.beyond_loss is not None]
    axes.plot(*zip(*whole, strict=True), "o-", color="tab:blue", ms=4, label="all positions")
    if beyond:
        axes.plot(
            *zip(*beyond, strict=True), "s-", color="tab:orange", ms=4,
            label=f"positions beyond {found.training_length:,}",
        )  # fmt: skip
    axes.set(xlabel="length, tokens", ylabel="mean loss, nats per token")
