"""A training run from start to end, or to wherever it is stopped."""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from jaxslm.compilation import use_compilation_cache
from jaxslm.files import atomic_output
from jaxslm.generation import generate
from jaxslm.sampling import Sampling
from jaxslm.tokenizer import FILE, load_tokenizer
from jaxslm.weights import abstract_parameters, from_arrays
from train.batches import EvaluationBatches, prefetch
from train.checkpoints import DAMAGED, CheckpointError, Checkpoints
from train.config import (
    CONFIG_FILE,
    TrainConfig,
    changed,
    decay_length,
    read_config,
    to_json,
)
from train.metrics import METRICS_FILE, PLOT_FILE, Metrics, json_number
from train.optimizer import build_optimizer
from train.program import lower
from train.setup import Layout, Placer, join_cluster, make_layout, new_state, open_data
from train.step import TrainState, make_evaluation, make_step
from train.stop import Stop, StopRequested

LOCK_FILE = ".lock"
IN_FLIGHT = 2  # updates that may be queued on the devices


class TrainingFailed(Exception):
    """The run cannot go on; its checkpoints are whole. The cause, if it has one, is an OSError."""


def train(config: TrainConfig, *, resume: bool = False, console: Console | None = None) -> int:
    """Runs a training run to its last update, or until a signal.

    Args:
        config: the run.
        resume: go on from the latest whole checkpoint in `config.out`.
        console: where progress is shown; None for stderr.

    Returns:
        0 at the end of the run; 128 plus the signal's number if it was stopped by one, after its
        state was saved.

    Raises:
        ValueError: the config, the data, the mesh or the folder to start from do not fit.
        OSError: a file cannot be read or written; FileExistsError if a new run's folder is used.
        TrainingFailed: too many updates in a row were not finite, or a checkpoint was not saved.
    """
    join_cluster(config.cluster)
    stop = Stop()
    with stop.listening(), contextlib.ExitStack() as held:
        if config.log.compilation_cache:
            use_compilation_cache()
        try:
            return _Run(config, resume, stop, console or Console(stderr=True), held).go()
        except StopRequested as request:
            if jax.process_index() == 0:
                print(f"jaxslm: {request}", file=sys.stderr)
            return request.status


class _Run:
    """One run: everything it needs, and its loop."""

    def __init__(
        self,
        config: TrainConfig,
        resume: bool,
        stop: Stop,
        console: Console,
        held: contextlib.ExitStack,
    ):
        before = _check_folder(config, resume)
        if before is not None:  # a run that was killed before its first save begins as it began
            if config.init_from not in (None, before.init_from):
                raise ValueError(
                    f"the run in {config.out} has begun, from {before.init_from}: it cannot begin "
                    f"from {config.init_from} any more"
                )
            config = replace(config, init_from=before.init_from)
        self.config, self.stop, self.console = config, stop, console
        paths = abstract_parameters(config.model).keys() - set(config.trained_without)
        optimizer = build_optimizer(config.optim, config.steps, sorted(paths))
        self.layout: Layout = make_layout(config, optimizer)
        self.batches, self.evaluation, self.fingerprints = open_data(config)
        self.placer = Placer(config, self.layout.batch)
        notes: list[str] = []
        if not resume:
            self.state, notes = new_state(config, optimizer, self.layout)
        stop.check()
        self.saved: int | None = None
        _make_folder(config, held)
        self.checkpoints = Checkpoints(config.out, config.checkpoint)
        if resume:
            self.state, notes = self._resume(optimizer)
        self.start = int(self.state.step)
        if before is not None:
            _check_progress(self.start, before, config)
        _write_config(config, config.data.tokenizer or self.batches.tokens.tokenizer)
        self.metrics = Metrics(config, self.start, console)
        for note in (*self._words(before), *self.layout.notes_in_words(), *notes):
            self.metrics.say(note)
        self.evaluate: Any = None  # compiled when first needed
        self.sample_due = self.samples_fail = False
        self.pending: list[tuple[int, dict[str, jax.Array]]] = []

    def go(self) -> int:
        """The loop."""
        config, stop = self.config, self.stop
        try:
            with jax.set_mesh(self.layout.mesh):
                self._evaluate_if_due(self.start)
                if self.start < config.steps and not stop.after(self.start):
                    self._updates()
            done = int(self.state.step)
            if stop.signal is not None:
                self._save(done)
                self.checkpoints.wait()
                name = signal.Signals(stop.signal).name
                self.metrics.say(
                    f"stopped by {name} after update {done}: saved; go on with --resume"
                )
                return 128 + stop.signal
            self.checkpoints.wait()
            self.metrics.say(f"done: {done} updates, {config.out}")
            return 0
        except OSError as error:
            raise TrainingFailed(f"{error}; earlier checkpoints are whole") from error
        finally:
            with contextlib.suppress(OSError):
                self.checkpoints.close()
            self.metrics.close()

    def _updates(self) -> None:
        """Updates from the state's step to the last one, or to a signal."""
        config, stop, log = self.config, self.stop, self.config.log
        step = self._compile(make_step(config), self.state, donate=True)
        ahead: Any = prefetch(self.batches, self.placer.rows, start=self.start, stop=config.steps)
        with contextlib.closing(ahead), contextlib.ExitStack() as profile:
            for number, inputs, targets in ahead:
                lead = jax.process_index() == 0
                if lead and log.profile is not None and number == log.profile[0]:
                    profile.enter_context(jax.profiler.trace(str(config.out / "profile")))
                if number == self.start:
                    self.metrics.start_clock()
                self.state, metrics = step(self.state, self.placer(inputs), self.placer(targets))
                done = number + 1
                self.pending.append((done, metrics))
                if len(self.pending) > IN_FLIGHT:
                    jax.block_until_ready(self.pending[-1 - IN_FLIGHT][1]["loss"])
                if log.profile is not None and done == log.profile[1]:
                    jax.block_until_ready(self.state)
                    profile.close()
                last = done == config.steps
                if (done - IN_FLIGHT) % log.every == 0:
                    self._flush(leave=IN_FLIGHT, report=True)
                self._evaluate_if_due(done)
                stopping = stop.after(done)
                if stopping or last or done % config.checkpoint.every == 0:
                    self._save(done)
                if stopping:
                    return
                self._sample_if_due(done)

    def _flush(self, *, leave: int = 0, report: bool = False) -> None:
        """Records the pending updates but the latest `leave`, and looks at what they say."""
        ready = self.pending[: len(self.pending) - leave]
        self.pending = self.pending[len(ready) :]
        rows = []
        for done, metrics in ready:
            values = {name: value.item() for name, value in jax.device_get(metrics).items()}
            rows.append({"step": done} | {name: json_number(v) for name, v in values.items()})
        self.metrics.updates(rows, report=report)
        for row in rows:
            if row["streak"] >= self.config.max_skipped:
                steps = self.checkpoints.steps()
                raise TrainingFailed(
                    f"loss or gradient were not finite in {row['streak']} updates in a row, up to "
                    f"update {row['step']}: the parameters are those before them; "
                    + (f"the last checkpoint is {steps[0]}" if steps else "nothing was saved yet")
                )

    def _evaluate_if_due(self, done: int) -> None:
        """Evaluates at its interval and at the end, if that was not done before."""
        due = done > 0 and (done % self.config.eval.every == 0 or done == self.config.steps)
        if not due or self.evaluation is None or done in self.metrics.evaluated:
            return
        self._flush(report=True)
        with self.metrics.paused():
            result = self._evaluate(self.evaluation)
        if result is not None:
            self.metrics.evaluation(done, *result)
            self.sample_due = not self.samples_fail

    def _evaluate(self, data: EvaluationBatches) -> tuple[float, int] | None:
        """Mean loss and number of targets over the fixed set; None if a signal came."""
        if self.evaluate is None:
            try:
                self.evaluate = self._compile(
                    make_evaluation(self.config), self.state.params, donate=False
                )
            except StopRequested:
                return None
        sums = []
        for index in range(len(data)):
            if jax.process_count() == 1 and self.stop.signal is not None:
                return None
            inputs, targets = data.rows(index, self.placer.rows)
            sums.append(self.evaluate(self.state.params, self.placer(inputs), self.placer(targets)))
            if len(sums) > IN_FLIGHT:
                jax.block_until_ready(sums[-1 - IN_FLIGHT])
        losses, counts = zip(*jax.device_get(sums), strict=True)
        tokens = int(np.sum(counts))
        return float(np.sum(np.asarray(losses, np.float64)) / max(tokens, 1)), tokens

    def _sample_if_due(self, done: int) -> None:
        """Shows what the model writes after an evaluation; no failure of it ends the run."""
        config = self.config
        path, tokens = config.out / FILE, config.eval.sample_tokens
        if not self.sample_due or not tokens or jax.process_count() > 1 or not path.exists():
            return
        self.sample_due, params = False, self.state.params

        def work() -> str:
            tokenizer, prompt = load_tokenizer(path), config.eval.sample_prompt
            if not prompt and tokenizer.end_of_text is None:
                prompt = "\n"
            _, stats = generate(
                from_arrays(config.model, params), [prompt], max_new_tokens=tokens,
                sampling=Sampling(temperature=0.8, top_k=200), tokenizer=tokenizer,
                key=jax.random.key(config.seed),
            )  # fmt: skip
            return prompt.lstrip("\n") + (stats.rows[0].text or "")

        try:
            with self.metrics.paused():
                self.metrics.sample(done, self.stop.during(work))
        except StopRequested:
            return
        except Exception as error:  # such as a device without room for another copy of the model
            self.samples_fail = True
            self.metrics.say(f"step {done}: no sample, and none from here on: {error}")

    def _save(self, done: int) -> None:
        """Saves a step once."""
        self._flush(report=done == self.config.steps)
        if self.saved == done:
            return
        meta = {"fingerprints": self.fingerprints, "seed": self.config.seed}
        self.checkpoints.save(self.state, meta, val_loss=self.metrics.evaluated.get(done))
        self.saved = done

    def _compile(self, function: Callable[..., Any], first: Any, *, donate: bool) -> Any:
        """A compiled function of a state and a batch."""

        def work() -> Any:
            return lower(self.config, self.layout, function, first, donate=donate).compile()

        with self.metrics.paused():
            return self.stop.during(work)

    def _resume(self, optimizer: Any) -> tuple[TrainState, list[str]]:
        """The state of the latest whole checkpoint; damaged later ones are set aside then."""
        notes: list[str] = []
        damaged: list[int] = []
        out, steps = self.config.out, self.checkpoints.steps()
        for step in steps:
            try:
                meta = self.checkpoints.meta(step)
                _check_data(meta.get("fingerprints", {}), self.fingerprints)
                state = self.checkpoints.restore(step, self.layout.state)
            except CheckpointError as error:
                notes.append(f"warning: {error}; it is set aside in {out / DAMAGED}")
                damaged.append(step)
                continue
            self.checkpoints = self.checkpoints.without(damaged)
            self.saved = step
            return state, [*notes, f"resumed at update {step}"]
        if steps:
            raise ValueError(
                f"none of the checkpoints {', '.join(map(str, steps))} in {out} is whole; they are "
                f"left where they are: {'; '.join(note.partition(';')[0] for note in notes)}"
            )
        if (out / DAMAGED).exists():
            raise ValueError(
                f"{out} has no checkpoint but those set aside in {out / DAMAGED}: start a new run "
                "in another --out"
            )
        state, more = new_state(self.config, optimizer, self.layout)
        return state, [*more, "no checkpoint was saved yet: the run starts from its beginning"]

    def _words(self, before: TrainConfig | None) -> list[str]:
        """What the run is, in a few lines."""
        config, mesh = self.config, self.layout.mesh
        shapes = self.layout.state.params.values()
        count = sum(math.prod(leaf.shape) for leaf in shapes)
        epoch = self.batches.windows / config.data.batch_size
        lines = [
            f"{type(config.model).__name__}: {count:,} parameters on {mesh.size} "
            f"{jax.devices()[0].device_kind} device(s), mesh "
            + " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
            + f"; {config.steps} updates of {config.data.batch_size} x "
            f"{config.data.sequence_length} tokens, {epoch:,.1f} updates an epoch"
        ]
        if self.batches.unused:
            lines.append(f"{self.batches.unused:,} tokens of short files are never read")
        if before is not None and before.mesh != config.mesh:
            lines.append("the mesh is another than before: losses agree to rounding")
        if before is not None and before.accumulation != config.accumulation:
            masks = ", and dropout draws other masks" if getattr(config.model, "dropout", 0) else ""
            lines.append(f"accumulation is another than before: losses agree to rounding{masks}")
        return lines


def _check_folder(config: TrainConfig, resume: bool) -> TrainConfig | None:
    """Refuses a used folder for a new run, and a folder without its run for a resumed one."""
    out = config.out
    if not resume:
        if out.exists() and (
            not out.is_dir()
            or any(p for p in out.iterdir() if p not in _left(out) and p.name != LOCK_FILE)
        ):
            raise FileExistsError(
                f"{out} is not empty: go on with its run by --resume, or name another --out"
            )
        return None
    before = read_config(out)
    if found := changed(before, config):
        raise ValueError(
            f"the run in {out} was started with another config:\n  "
            + "\n  ".join(found)
            + "\nresume it with its own values, or start a new run in another --out"
        )
    return before


def _left(out: Path) -> list[Path]:
    """What a killed process may have left half-written in a run's folder."""
    names = (CONFIG_FILE, FILE, METRICS_FILE, PLOT_FILE)
    return [path for name in names for path in out.glob(f".{name}.*")]


def _check_data(before: dict[str, str], now: dict[str, str]) -> None:
    """Refuses to go on with other data."""
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            raise ValueError(
                f"data.{name} is not the data that the run began with (counts, dtypes or contents "
                f"differ): point --data.{name} to it, or start a new run in another --out"
            )


def _check_progress(done: int, before: TrainConfig, after: TrainConfig) -> None:
    """Refuses a number of steps that the run has passed, or that takes its schedule back."""
    if after.steps < done:
        raise ValueError(f"steps is {after.steps}, but the run stands at update {done}")
    if after.optim.schedule == "wsd" and after.steps != before.steps:
        decay = before.steps - decay_length(before.optim, before.steps)
        if done > decay:
            raise ValueError(
                f"steps: {before.steps} -> {after.steps}, but the learning rate falls since update "
                f"{decay} and would rise again: resume a checkpoint before that, or a new run with "
                "--init-from"
            )


def _make_folder(config: TrainConfig, held: contextlib.ExitStack) -> None:
    """Makes the run's folder its own, and clears what a killed process left half-written in it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("every process has looked at the folder")
    if jax.process_index() == 0:
        config.out.mkdir(parents=True, exist_ok=True)
        held.enter_context(_locked(config.out))
        for path in _left(config.out):
            shutil.rmtree(path, ignore_errors=True)
        if not (config.out / CONFIG_FILE).exists():  # from here on it is a run's folder
            _write_config_file(config)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the run's folder is made")


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Holds a run's folder; on a network file system that knows no locks, only in name."""
    lock = os.open(out / LOCK_FILE, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise OSError(f"{out} is in use: another process trains its run") from None
    finally:
        os.close(lock)


def _write_config(config: TrainConfig, tokenizer: Path | None) -> None:
    """Records what the run goes on with, and the tokenizer of its data."""
    if jax.process_index() > 0:
        return
    _write_config_file(config)
    if tokenizer is None and config.init_from is not None:
        tokenizer = config.init_from / FILE
    known = (config.out / FILE).exists()
    if not known and tokenizer is not None and tokenizer.exists():
        with atomic_output(config.out / FILE, overwrite=False) as path:
            load_tokenizer(tokenizer).save(path.parent)


def _write_config_file(config: TrainConfig) -> None:
    with atomic_output(config.out / CONFIG_FILE, overwrite=True) as path:
        path.write_text(json.dumps(to_json(config), indent=2) + "\n")
