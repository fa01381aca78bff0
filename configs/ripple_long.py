"""Ripple (6.3M) with a window of 256 on sequences of 4,096: memory grows with the window.

jaxslm data prepare --input src/ --tokenizer byte --out data/
jaxslm train configs/ripple_long.py
"""

from pathlib import Path

from jaxslm import RippleConfig
from train.config import RECIPES, DataConfig, TrainConfig

config = TrainConfig(
    out=Path("runs/ripple_long"),
    model=RippleConfig(
        vocab_size=257, block_size=4096, attention_window=256, decay_gradient="always"
    ),
    data=DataConfig(batch_size=8, sequence_length=4096),
    optim=RECIPES["ripple"],
    steps=5000,
)
