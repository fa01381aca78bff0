"""Lumen (2.75M) on a byte-level BPE of 2,048, by GPT's recipe at a rate for its size.

jaxslm data prepare --input book.txt --tokenizer bpe:2048 --out data/
jaxslm train configs/lumen_3m.py
"""

from dataclasses import replace
from pathlib import Path

from jaxslm import LumenConfig
from train.config import RECIPES, DataConfig, TrainConfig

config = TrainConfig(
    out=Path("runs/lumen_3m"),
    model=LumenConfig(),
    data=DataConfig(batch_size=64, sequence_length=1024),
    optim=replace(RECIPES["lumen"], lr=3e-3, final_lr=3e-4, warmup_steps=100),
    steps=5000,
)
