"""A Ripple of 50,000 parameters for a few seconds of training anywhere.

jaxslm data prepare --input python-stdlib --tokenizer byte --out data/
jaxslm train configs/debug.py
"""

from dataclasses import replace
from pathlib import Path

from jaxslm import RippleConfig
from train.config import (
    RECIPES,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    TrainConfig,
)

config = TrainConfig(
    out=Path("runs/debug"),
    model=RippleConfig(
        vocab_size=257, block_size=64, n_layer=2, n_head=4, n_embd=32, decay_gradient="always"
    ),
    data=DataConfig(batch_size=8, sequence_length=64),
    optim=replace(RECIPES["ripple"], lr=3e-3),
    checkpoint=CheckpointConfig(every=20),
    eval=EvalConfig(every=20, batches=4),
    log=LogConfig(every=5),
    steps=60,
)
