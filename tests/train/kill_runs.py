"""Runs that are killed at random moments and resumed, held to the run that was not.

    python -m tests.train.kill_runs --runs 40

Each run ends up to three times by SIGKILL or SIGTERM after a random time, is resumed, and in the
end must have the uninterrupted run's batches, losses, gradient norms and evaluations, bit for bit.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxslm import RippleConfig
from train.config import (
    CONFIG_FILE,
    RECIPES,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    TrainConfig,
)

VOCABULARY = 67
STEPS = 60
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train.loop", "grain", "tensorboardX", "matplotlib.figure"])


def base_config(room: Path) -> TrainConfig:
    """A run of a few seconds with saves and evaluations all the time, on data with short shards."""
    return TrainConfig(
        out=room / "run",
        model=RippleConfig(
            vocab_size=VOCABULARY, block_size=32, n_layer=2, n_head=4, n_embd=48, dropout=0.1,
            decay_gradient="always",
        ),
        data=DataConfig(
            train=room / "data", val=room / "val.bin", batch_size=8, sequence_length=32
        ),
        optim=replace(RECIPES["ripple"], lr=3e-3),
        checkpoint=CheckpointConfig(every=3, keep_last=2),
        eval=EvalConfig(every=5, batches=2),
        log=LogConfig(every=1, tensorboard=False, compilation_cache=True),
        steps=STEPS,
    )  # fmt: skip


def variants(room: Path) -> dict[str, TrainConfig]:
    """What is run: every order, accumulation, epochs and shards that end within the run."""
    base = base_config(room)
    return {
        "shuffled": base,
        "accumulation": replace(base, accumulation=2),
        "sequential": replace(base, data=replace(base.data, order="sequential")),
        "random": replace(base, data=replace(base.data, order="random")),
    }


def write_data(room: Path) -> None:
    """Three shards that hold two epochs and a half of the run's tokens, and held-out tokens."""
    random_ = np.random.default_rng(0)
    (room / "data").mkdir()
    for number, count in enumerate((997, 33, 1500)):
        tokens = random_.integers(0, VOCABULARY, count).astype("<u2")
        tokens.tofile(room / "data" / f"train-{number}.bin")
    random_.integers(0, VOCABULARY, 600).astype("<u2").tofile(room / "val.bin")


def target(config: TrainConfig, resume: bool, devices: int, cache: str) -> None:
    """One process of a run."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XDG_CACHE_HOME"] = cache
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    from rich.console import Console

    from train.loop import train

    with Path(os.devnull).open("w") as console:
        sys.exit(train(config, resume=resume, console=Console(file=console)))


@dataclass
class Kill:
    """A signal, sent some seconds after the run has recorded an update (0: after its start)."""

    signal: int
    update: int
    seconds: float

    @classmethod
    def at_random(cls, chance: random.Random, seconds: float) -> "Kill":
        """Half of them anywhere in a run of that many seconds, half soon after some update."""
        number = chance.choice((signal.SIGKILL, signal.SIGTERM))
        if chance.random() < 0.5:
            return cls(number, 0, chance.uniform(0.0, seconds))
        return cls(number, chance.randint(1, STEPS - 1), chance.uniform(0.0, 0.1))


def run_once(
    config: TrainConfig, cache: str, *, kill: Kill | None = None, devices: int = 1
) -> int | None:
    """Starts or resumes a run in a process of its own; its exit status."""
    resume = (config.out / CONFIG_FILE).exists()
    process = FORKS.Process(target=target, args=(config, resume, devices, cache))
    process.start()
    limit = time.monotonic() + 120
    if kill is not None and process.pid is not None:
        while process.is_alive() and kill.update > last_update(config):
            time.sleep(0.005)
        process.join(kill.seconds)
        if process.is_alive():
            os.kill(process.pid, kill.signal)
    process.join(limit - time.monotonic())
    if process.is_alive():
        process.kill()
        raise AssertionError("the process did not end in two minutes")
    return process.exitcode


def last_update(config: TrainConfig) -> int:
    """The last update that the run has recorded."""
    return max((row["step"] for row in rows(config)), default=0)


def rows(config: TrainConfig) -> list[dict]:
    """The run's record."""
    from train.metrics import read_metrics

    return read_metrics(config.out)


def killed_run(
    config: TrainConfig, cache: str, seconds: float, seed: int, devices: tuple[int, ...] = (1,)
) -> list[str]:
    """A run that is killed up to three times; in words, how it ended each time.

    Args:
        config: the run.
        cache: folder for compiled programs.
        seconds: that it takes.
        seed: of the moments.
        devices: numbers of devices to choose from at each start.
    """
    chance = random.Random(seed)
    shutil.rmtree(config.out, ignore_errors=True)
    words = []
    for _ in range(chance.randint(1, 3)):
        kill = Kill.at_random(chance, seconds)
        status = run_once(config, cache, kill=kill, devices=chance.choice(devices))
        words.append(f"{signal.Signals(kill.signal).name} after update {last_update(config)}")
        expected = {0, -signal.SIGKILL} if kill.signal == signal.SIGKILL else {0, 143, -15}
        assert status in expected, f"{words[-1]}: exit status {status}"
        if status == 0:
            break
    status = run_once(config, cache, devices=chance.choice(devices))
    assert status == 0, f"resumed after {'; '.join(words)}: exit status {status}"
    return words


def difference(found: list[dict], expected: list[dict]) -> float:
    """Largest relative difference of losses; batches must be equal, records complete."""
    assert [(row["step"], row.get("batch")) for row in found] == [
        (row["step"], row.get("batch")) for row in expected
    ]
    names = ("loss", "val_loss")
    return max(
        abs(a[name] - b[name]) / abs(b[name])
        for a, b in zip(found, expected, strict=True)
        for name in names
        if name in b
    )


def main() -> None:
    """Kills runs of every variant in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", action="store_true", help="every other run on 1, 2 or 4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        write_data(room)
        expected, seconds = {}, {}
        for name, config in variants(room).items():
            config = replace(config, out=room / name)
            assert run_once(config, str(room)) == 0  # fills the compilation cache
            shutil.rmtree(config.out)
            start = time.monotonic()
            assert run_once(config, str(room)) == 0
            expected[name], seconds[name] = rows(config), time.monotonic() - start
            print(f"{name}: {len(expected[name])} records in {seconds[name]:.1f} s", flush=True)
        for number in range(options.runs):
            name = list(expected)[number % len(expected)]
            config = replace(variants(room)[name], out=room / "killed")
            several = options.devices and number % 2
            words = killed_run(
                config, str(room), seconds[name], options.seed * 10**6 + number,
                devices=(1, 2, 4) if several else (1,),
            )  # fmt: skip
            if several:
                found = difference(rows(config), expected[name])
                assert found < 1e-6, f"{name}: losses differ by {found:.1e} after {words}"
                result = f"batches equal, losses to {found:.1e}"
            else:
                assert rows(config) == expected[name], f"{name}: {words}"
                result = "bit-equal"
            print(f"{number + 1} {name}: {result}: {'; '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
