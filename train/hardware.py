"""What a model costs and what a chip can do, for model FLOPs utilisation (MFU)."""

import math

from jaxslm.attention.windowed import first_key
from jaxslm.models import Config, RippleConfig
from jaxslm.weights import abstract_parameters

# Published peak FLOP/s of one device in bfloat16, dense, by the start of JAX's device_kind.
# Sources: Google Cloud TPU system architecture pages; NVIDIA data sheets (SXM unless named).
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 836e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s in bfloat16 of one device; None for one that the table does not know."""
    return next((peak for name, peak in PEAK_FLOPS.items() if device_kind.startswith(name)), None)


def flops_per_token(config: Config, length: int) -> float:
    """Model FLOPs that training on one token takes (Kaplan et al. 2020; PaLM, appendix B).

    6 for each parameter that is a factor of a matrix product (norms, biases and embedding look-ups
    are not; a tied table is one, as output head), and 12 * L * N * H for each key that a query sees
    on average: causal, and within the window. Recomputation (remat) is not counted.
    """
    shapes = {name: leaf.shape for name, leaf in abstract_parameters(config).items()}
    head = "head" if "head" in shapes else "embedding"
    factors = sum(
        math.prod(shape) for name, shape in shapes.items() if name == head or ".w" in name
    )
    layers, heads = shapes["blocks.attention.wq"][0], shapes["blocks.attention.wq"][2]
    return 6.0 * factors + 12.0 * layers * heads * config.head_width * mean_keys(config, length)


def mean_keys(config: Config, length: int) -> float:
    """Keys that a query sees, on average over a sequence."""
    window = config.attention_window if isinstance(config, RippleConfig) else None
    if window is None or window >= length:
        return (length + 1) / 2
    exact = isinstance(config, RippleConfig) and config.window_mode == "exact"
    return sum(i + 1 - max(0, first_key(i, window, exact)) for i in range(length)) / length
