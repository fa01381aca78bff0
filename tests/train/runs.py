"""Small runs for the tests of the loop, checkpoints, export and command."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxslm import RippleConfig
from train.config import (
    RECIPES,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    TrainConfig,
)
from train.loop import train

VOCABULARY = 67


def write_tokens(path: Path, count: int, seed: int = 0, high: int = VOCABULARY) -> Path:
    """A raw uint16 file of random ids."""
    np.random.default_rng(seed).integers(0, high, count).astype("<u2").tofile(path)
    return path


def small_config(room: Path, **changes) -> TrainConfig:
    """A run of 8 updates in a second or two, its data written beside it."""
    if not (room / "train.bin").exists():
        write_tokens(room / "train.bin", 3000)
        write_tokens(room / "val.bin", 500, seed=1)
    config = TrainConfig(
        out=room / "run",
        model=RippleConfig(
            vocab_size=VOCABULARY, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.1,
            decay_gradient="always",
        ),
        data=DataConfig(
            train=room / "train.bin", val=room / "val.bin", batch_size=4, sequence_length=16
        ),
        optim=replace(RECIPES["ripple"], lr=3e-3),
        checkpoint=CheckpointConfig(every=4),
        eval=EvalConfig(every=4, batches=2),
        log=LogConfig(every=2, tensorboard=False, compilation_cache=False),
        steps=8,
    )  # fmt: skip
    return replace(config, **changes)


def quietly(config: TrainConfig, *, resume: bool = False) -> tuple[int, str]:
    """Trains; the exit status and what was printed."""
    console = Console(record=True, file=io.StringIO(), width=400)
    status = train(config, resume=resume, console=console)
    return status, console.export_text()
