"""GPT (298M, "the 250M model") by build-nanogpt's recipe: 0.5M tokens an update.

jaxslm data prepare --input corpus.jsonl --tokenizer bpe:32768 --out data/
jaxslm train configs/gpt_250m.py --mesh.fsdp 4
"""

from pathlib import Path

from jaxslm import GPTConfig
from train.config import RECIPES, DataConfig, TrainConfig

config = TrainConfig(
    out=Path("runs/gpt_250m"),
    model=GPTConfig(dtype="bfloat16", remat="dots"),
    data=DataConfig(batch_size=256, sequence_length=2048),
    optim=RECIPES["gpt"],
    accumulation=8,  # 8 sequences a device, on four devices: these fit a v5e of 16 GB
    steps=19073,  # 10 billion tokens
)
