"""Training around the update itself: the loader, saving, and going on after a stop."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from benchmarks.measure import Timing

SETTINGS = [
    "configs/lumen_3m.py", "--data.batch-size", "8", "--data.sequence-length", "256",
    "--data.val", "None", "--log.every", "1", "--log.no-tensorboard",
]  # fmt: skip


def training(room: Path) -> Iterator[dict[str, Any]]:
    """Rows of the table: rates in tokens a second, seconds."""
    folder = room / "training"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, 2048, 2_000_000).astype("<u2")
    tokens.tofile(folder / "train.bin")
    rate = update_rate()
    for name, batch, length in (("Lumen 8x1024", 8, 1024), ("Ripple 16x256", 16, 256)):
        yield loader_row(name, folder, batch, length, rate)
    yield saving_row(folder)
    yield restart_row(folder)


def update_rate() -> float:
    """Tokens a second that Lumen trains on here, from batches that are there already."""
    from configs.lumen_3m import config as lumen
    from jaxslm.weights import abstract_parameters
    from train.optimizer import build_optimizer
    from train.setup import make_layout, new_state
    from train.step import make_step

    config = replace(lumen, data=replace(lumen.data, batch_size=8, sequence_length=1024))
    optimizer = build_optimizer(config.optim, config.steps, list(abstract_parameters(config.model)))
    state, _ = new_state(config, optimizer, make_layout(config, optimizer))
    step = jax.jit(make_step(config), donate_argnums=0)
    batch = np.random.default_rng(0).integers(0, 2048, (1, 8, 1024)).astype(np.int32)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        state, metrics = step(state, batch, batch)
        jax.block_until_ready(metrics["loss"])
        seconds.append(time.perf_counter() - start)
    return 8 * 1024 / median(seconds[1:])


def loader_row(name: str, folder: Path, batch: int, length: int, rate: float) -> dict[str, Any]:
    """The loader alone, through its threads, shuffled."""
    from train.batches import Batches, prefetch
    from train.tokens import open_tokens

    batches = Batches(
        open_tokens(folder / "train.bin"), batch_size=batch, sequence_length=length,
        order="shuffled", seed=0, vocab_size=2048,
    )  # fmt: skip
    ahead = prefetch(batches, np.arange(batch), start=0, stop=1500)
    next(ahead)
    start = time.perf_counter()
    count = sum(1 for _ in ahead)
    found = count * batch * length / (time.perf_counter() - start)
    return {
        "what": f"loader {name}", "torch": "", "jaxslm": f"{found:,.0f} tokens/s",
        "ratio": round(found / rate, 1), "target": f"10 x training ({rate:,.0f} tokens/s)",
        "met": found >= 10 * rate,
    }  # fmt: skip


def saving_row(folder: Path) -> dict[str, Any]:
    """What a save each 100 updates adds to Lumen's updates, from the run's own record of time.

    Saves come each 20 updates here; what one adds is spread over 100.
    """
    times: dict[int, list[float]] = {}
    for every in (20, 10_000) * 2:
        run = folder / "saving"
        shutil.rmtree(run, ignore_errors=True)
        times.setdefault(every, []).append(_timed_run(folder, run, every, steps=101))
    extra = (median(times[20]) - median(times[10_000])) / 5
    share = extra / median(times[10_000])
    return {
        "what": "saving each 100 updates, Lumen 8x256", "torch": "",
        "jaxslm": f"{extra:.3f} s a save, {share:.1%}", "ratio": None, "target": "under 5 %",
        "met": share < 0.05,
    }  # fmt: skip


def _timed_run(folder: Path, run: Path, every: int, steps: int) -> float:
    """Seconds of the last 100 updates of a run."""
    code = (
        "import sys, time, train.loop as loop\n"
        "from train.command import command\n"
        "placed = loop.Placer.__call__\n"
        "stamps = []\n"
        "def stamp(self, rows):\n"
        "    stamps.append(time.perf_counter())\n"
        "    return placed(self, rows)\n"
        "loop.Placer.__call__ = stamp\n"
        "command(sys.argv[1:])\n"
        "print(stamps[-1] - stamps[2])\n"
    )
    done = _python(code, folder, run, "--steps", steps, "--checkpoint.every", every)
    return float(done.split()[-1])


def restart_row(folder: Path) -> dict[str, Any]:
    """From the start of the process to the first update of a resumed run, programs compiled."""
    run = folder / "restart"
    command = "import sys; from train.command import command; command(sys.argv[1:])"
    _python(command, folder, run, "--steps", 20, "--checkpoint.every", 10)
    seconds = []
    for number in range(3):
        before = time.time()
        _python(command, folder, run, "--steps", 21 + number, "--resume")
        first = [
            row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            if row["step"] == 21 + number
        ]  # fmt: skip
        assert first
        seconds.append(time.time() - before)
    timing = Timing(tuple(seconds))
    return {
        "what": "restart, warm: process, resume, one update, save, end", "torch": "",
        "jaxslm": str(timing), "ratio": None, "target": "", "met": True,
    }  # fmt: skip


def _python(code: str, folder: Path, run: Path, *options: object) -> str:
    """A run in a process of its own, its compiled programs kept in the folder; its output."""
    schedule = ["--optim.schedule", "constant", "--optim.warmup-steps", "0"]
    words = [*SETTINGS, "--data.train", folder / "train.bin", "--out", run, *schedule, *options]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], check=False, capture_output=True, text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout
