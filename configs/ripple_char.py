"""Ripple (6.3M) on characters or bytes, by the recipe it was written with.

    jaxslm data prepare --input book.txt --tokenizer char --out data/
    jaxslm train configs/ripple_char.py --model.vocab-size 82

The decay is trained here, which the original does not do under full attention.
"""

from pathlib import Path

from jaxslm import RippleConfig
from train.config import RECIPES, DataConfig, TrainConfig

config = TrainConfig(
    out=Path("runs/ripple_char"),
    model=RippleConfig(vocab_size=257, decay_gradient="always"),
    data=DataConfig(batch_size=64, sequence_length=256),
    optim=RECIPES["ripple"],
    steps=5000,
)
