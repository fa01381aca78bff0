"""A training run from start to end, or to wherever it is stopped."""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from jaxslm.files import atomic_output
from jaxslm.tokenizer import FILE, load_tokenizer
from jaxslm.weights import abstract_parameters
from train.batches import EvaluationBatches, prefetch
from train.checkpoints import CheckpointError, Checkpoints
from train.config import CONFIG_FILE, TrainConfig, changed, read_config, to_json
from train.metrics import METRICS_FILE, PLOT_FILE, Metrics
from train.optimizer import build_optimizer
from train.setup import Layout, Placer, join_cluster, make_layout, new_state, open_data
from train.step import TrainState, make_evaluation, make_step
from train.stop import Stop, StopRequested

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
    with stop.listening():
        if config.log.compilation_cache:
            _use_compilation_cache()
        try:
            return _Run(config, resume, stop, console or Console(stderr=True)).go()
        except StopRequested as request:
            if jax.process_index() == 0:
                print(f"jaxslm: {request}", file=sys.stderr)
            return request.status


class _Run:
    """One run: everything it needs, and its loop."""

    def __init__(self, config: TrainConfig, resume: bool, stop: Stop, console: Console):
        before = _check_folder(config, resume)
        if before is not None:  # a run that was killed before its first save begins as it began
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
        _write_folder(config, config.data.tokenizer or self.batches.tokens.tokenizer)
        self.checkpoints = Checkpoints(config.out, config.checkpoint)
        if resume:
            self.state, notes = self._resume(optimizer)
        self.start = int(self.state.step)
        self.metrics = Metrics(config, self.start, console)
        for note in (*self._words(before), *self.layout.notes_in_words(), *notes):
            self.metrics.say(note)
        self.saved: int | None = self.start if resume else None
        self.evaluate: Any = None  # compiled when first needed
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
                if log.profile is not None and number == log.profile[0]:
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

    def _flush(self, *, leave: int = 0, report: bool = False) -> None:
        """Records the pending updates but the latest `leave`, and looks at what they say."""
        ready = self.pending[: len(self.pending) - leave]
        self.pending = self.pending[len(ready) :]
        rows = []
        for done, metrics in ready:
            values = {name: value.item() for name, value in jax.device_get(metrics).items()}
            rows.append({"step": done} | {name: _json_number(v) for name, v in values.items()})
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

    def _evaluate(self, data: EvaluationBatches) -> tuple[float, int] | None:
        """Mean loss and number of targets over the fixed set; None if a signal came."""
        if self.evaluate is None:
            loss = make_evaluation(self.config)
            try:
                self.evaluate = self._compile(
                    lambda params, inputs_ABT, targets_ABT: loss(
                        params, _merged(inputs_ABT), _merged(targets_ABT)
                    ),
                    self.state.params,
                    donate=False,
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

    def _save(self, done: int) -> None:
        """Saves a step once."""
        self._flush()
        if self.saved == done:
            return
        meta = {"fingerprints": self.fingerprints, "seed": self.config.seed}
        self.checkpoints.save(self.state, meta, val_loss=self.metrics.evaluated.get(done))
        self.saved = done

    def _compile(self, function: Callable[..., Any], first: Any, *, donate: bool) -> Any:
        """A compiled function of a state and a batch."""
        a, b = self.config.accumulation, self.config.data.batch_size // self.config.accumulation
        batch = jax.ShapeDtypeStruct(
            (a, b, self.config.data.sequence_length), np.int32, sharding=self.layout.batch
        )
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first
        )
        shardings = (jax.tree.map(lambda x: x.sharding, first), None) if donate else None
        jitted = jax.jit(function, donate_argnums=(0,) if donate else (), out_shardings=shardings)
        mesh = self.layout.mesh

        def work() -> Any:
            with jax.set_mesh(mesh):
                return jitted.lower(like, batch, batch).compile()

        with self.metrics.paused():
            return self.stop.during(work)

    def _resume(self, optimizer: Any) -> tuple[TrainState, list[str]]:
        """The state of the latest whole checkpoint; damaged later ones are set aside."""
        notes = []
        steps = self.checkpoints.steps()
        for step in steps:
            try:
                meta = self.checkpoints.meta(step)
                _check_data(meta.get("fingerprints", {}), self.fingerprints)
                state = self.checkpoints.restore(step, self.layout.state)
                return state, [*notes, f"resumed at update {step}"]
            except CheckpointError as error:
                notes.append(f"warning: {error}; it is set aside in {self.config.out}/damaged")
                self.checkpoints = self.checkpoints.without(step)
        if steps:
            raise ValueError(
                f"none of the checkpoints {', '.join(map(str, steps))} in {self.config.out} is "
                "whole: " + "; ".join(notes)
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
            not out.is_dir() or any(p for p in out.iterdir() if p not in _left(out))
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
    """Refuses to go on with other training data."""
    if before.get("train") != now["train"]:
        raise ValueError(
            "data.train is not the data that the run was trained on (counts, dtypes or contents "
            "differ): point --data.train to it, or start a new run in another --out"
        )


def _write_folder(config: TrainConfig, tokenizer: Path | None) -> None:
    """Makes the run's folder: its config, and the tokenizer of its data."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("every process has looked at the folder")
    if jax.process_index() == 0:
        config.out.mkdir(parents=True, exist_ok=True)
        for path in _left(config.out):
            shutil.rmtree(path, ignore_errors=True)
        with atomic_output(config.out / CONFIG_FILE, overwrite=True) as path:
            path.write_text(json.dumps(to_json(config), indent=2) + "\n")
        if tokenizer is None and config.init_from is not None:
            tokenizer = config.init_from / FILE
        known = (config.out / FILE).exists()
        if not known and tokenizer is not None and tokenizer.exists():
            load_tokenizer(tokenizer).save(config.out)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the run's folder")


def _use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX was told where."""
    if not jax.config.values.get("jax_compilation_cache_dir"):
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "jaxslm" / "xla"))


def _merged(x_ABT: jax.Array) -> jax.Array:
    """[A, B / A, T] -> [B, T]."""
    return x_ABT.reshape(-1, x_ABT.shape[-1])


def _json_number(value: float) -> float | None:
    """JSON has no NaN and no infinity: they become null."""
    return value if math.isfinite(value) else None
