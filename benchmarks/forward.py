"""Forward pass in float32: ours, compiled, against the torch model in eager mode."""

from typing import Any

import jax
import numpy as np
import torch

from benchmarks.measure import alternate
from convert.counterparts import build
from jaxslm.models import GPT, Config, GPTConfig, Lumen, LumenConfig, Model, Ripple, RippleConfig

CASES: dict[str, tuple[Config, type[Model], int, int]] = {
    "Lumen 8x1024": (LumenConfig(), Lumen, 8, 1024),
    "Ripple 16x256": (RippleConfig(), Ripple, 16, 256),
    "GPT-298M 1x512": (GPTConfig(), GPT, 1, 512),
}


def forward(rounds: int = 7) -> list[dict[str, Any]]:
    """One row a model: seconds of both, and torch's over ours."""
    rows = []
    for name, (config, kind, batch, length) in CASES.items():
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length))
        model = kind(config, key=jax.random.key(0))  # type: ignore[arg-type]
        compiled = jax.jit(lambda model, tokens: model(tokens))
        on_device, in_torch = jax.numpy.asarray(tokens), torch.from_numpy(tokens)
        module = build(config).eval()

        def theirs(module=module, tokens=in_torch):
            with torch.no_grad():
                module(tokens)

        def ours(compiled=compiled, model=model, tokens=on_device):
            compiled(model, tokens).block_until_ready()

        torch_time, our_time = alternate([theirs, ours], rounds)
        rows.append(
            {
                "what": f"forward {name}",
                "torch": str(torch_time),
                "jaxslm": str(our_time),
                "ratio": round(torch_time.median / our_time.median, 2),
                "target": "torch / jaxslm at least 1.0",
                "met": torch_time.median >= our_time.median,
            }
        )
    return rows
