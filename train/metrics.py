"""What a run shows: metrics.jsonl, TensorBoard events, loss.png, the terminal. Process 0 only."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxslm.files import atomic_output
from train.config import TrainConfig
from train.hardware import flops_per_token, peak_flops

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"
EVENTS = "tensorboard"


class Metrics:
    """The record of a run, written as it goes.

    metrics.jsonl has a line an update: step (updates done), loss, grad_norm, learning_rate, tokens,
    skipped, batch, and one an evaluation: step, val_loss, val_tokens.

    Args:
        config: the run's.
        start: updates done before; later lines of the record, of a run that was killed, go.
        console: where progress is shown.
    """

    def __init__(self, config: TrainConfig, start: int, console: Console):
        self._config, self._console = config, console
        self._path = config.out / METRICS_FILE
        rows = [row for row in read_metrics(config.out) if row["step"] <= start]
        self.evaluated: dict[int, float] = {
            row["step"]: math.nan if row["val_loss"] is None else row["val_loss"]
            for row in rows
            if "val_loss" in row
        }
        self._val_loss = self.evaluated[max(self.evaluated)] if self.evaluated else None
        self._then, self._tokens, self._lost = time.monotonic(), 0, 0.0
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        with atomic_output(self._path, overwrite=True) as path:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._file = self._path.open("a")
        self._events = None
        if config.log.tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(config.out / EVENTS), purge_step=start + 1)
        self._flops = flops_per_token(config.model, config.data.sequence_length)
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak = None if peak is None else peak * jax.device_count()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=config.steps, completed=start, words="")
        if console.is_terminal:
            self._progress.start()

    def updates(self, rows: list[dict[str, Any]], *, report: bool) -> None:
        """Records updates; `report` shows the last, and the speed since the last report."""
        if not self._writes:
            return
        for row in rows:
            self._file.write(json.dumps(row) + "\n")
            self._tokens += row["tokens"]
        self._file.flush()
        if not rows or not report:
            return
        now, row = time.monotonic(), rows[-1]
        speed = self._tokens / max(now - self._then - self._lost, 1e-9)
        self._then, self._tokens, self._lost = now, 0, 0.0
        shown = {key: row[key] for key in ("loss", "grad_norm", "learning_rate", "skipped")}
        shown["tokens_per_second"] = speed
        shown = {name: value for name, value in shown.items() if value is not None}
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        words = f"loss {loss}  {speed:,.0f} tokens/s"
        if self._peak is not None:
            shown["mfu"] = speed * self._flops / self._peak
            words += f"  MFU {shown['mfu']:.1%}"
        if self._val_loss is not None:
            words += f"  val {self._val_loss:.4f}"
        if row["skipped"]:
            words += f"  skipped {row['skipped']}"
        self._event(row["step"], shown)
        self._progress.update(self._task, completed=row["step"], words=words)
        if not self._console.is_terminal:
            self._console.print(f"step {row['step']}/{self._config.steps}  {words}")

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Records an evaluation."""
        self.evaluated[step] = self._val_loss = loss
        if not self._writes:
            return
        shown = json_number(loss)
        self._file.write(json.dumps({"step": step, "val_loss": shown, "val_tokens": tokens}) + "\n")
        self._file.flush()
        self._event(step, {"val_loss": loss})
        self._console.print(
            f"step {step}: validation loss {loss:.4f}, perplexity {math.exp(min(loss, 700)):.2f} "
            f"({tokens:,} tokens)"
        )

    def sample(self, step: int, text: str) -> None:
        """Shows what the model wrote."""
        if self._events is not None:
            self._events.add_text("sample", text, step)
        self._console.print(f"step {step}: {text}", markup=False, highlight=False)

    def start_clock(self) -> None:
        """The speed is measured from here on."""
        self._then, self._lost = time.monotonic(), 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside the block is none of training's; blocks may nest."""
        before, start = self._lost, time.monotonic()
        yield
        self._lost = before + time.monotonic() - start

    def say(self, words: str) -> None:
        """Prints a line above the progress bar."""
        if self._writes:
            self._console.print(words)

    def close(self) -> None:
        """Ends the progress bar, writes loss.png, closes the files."""
        if not self._writes:
            return
        if self._progress.live.is_started:
            self._progress.stop()
        try:
            self._file.close()
            if self._events is not None:
                self._events.close()
            plot_losses(self._config.out)
        except OSError as error:  # such as a full disk, which has ended the run by now
            self._console.print(f"the record of the run could not be finished: {error}")

    def _event(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last one that was cut short is left out."""
    path = run / METRICS_FILE
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        numbers = (row.get("loss"), row.get("val_loss"), row.get("skipped"))
        if not all(value is None or type(value) in (int, float) for value in numbers):
            break
        rows.append(row)
    return rows


def plot_losses(run: Path, others: Mapping[str, float] | None = None) -> None:
    """Draws a run's losses by step to loss.png.

    Args:
        run: the run's folder.
        others: losses to draw as horizontal lines, by name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run)
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    val = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]
    if not train and not val:
        return
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.35, lw=0.8, label="training")
        axes.plot(*zip(*_smooth(train), strict=True), color="tab:blue", lw=1.6, label="smoothed")
    if val:
        axes.plot(*zip(*val, strict=True), "o-", color="tab:orange", ms=3.5, label="validation")
    for name, loss in (others or {}).items():
        axes.axhline(loss, color="black", ls="--", lw=1, label=f"{name}: {loss:.4f}")
    axes.set(xlabel="updates", ylabel="loss, nats per token")
    axes.grid(alpha=0.25)
    axes.legend()
    with atomic_output(run / PLOT_FILE, overwrite=True) as path:
        figure.savefig(path, dpi=150, format="png")


def json_number(value: float) -> float | None:
    """JSON has no NaN and no infinity: they become null."""
    return value if math.isfinite(value) else None


def _smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Exponential mean over about 2 % of the points, corrected for its start."""
    decay = 1 - 1 / max(1, len(points) // 50)
    mean, weight, found = 0.0, 0.0, []
    for step, loss in points:
        if math.isfinite(loss):
            mean, weight = decay * mean + (1 - decay) * loss, decay * weight + (1 - decay)
        if weight:
            found.append((step, mean / weight))
    return found or points
