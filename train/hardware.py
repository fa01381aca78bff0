"""What a model costs and what a chip can do: model FLOPs utilisation (MFU), roofline, memory."""

import math
from dataclasses import dataclass

from jaxslm.attention.windowed import first_key
from jaxslm.models import Config, RippleConfig
from jaxslm.weights import abstract_parameters

GIB = 2**30
GPU_SHARE = 0.75  # of a GPU's memory, that JAX takes unless told otherwise


@dataclass(frozen=True)
class Chip:
    """Published peaks of one device.

    Attributes:
        kind: how JAX's device_kind begins.
        flops: FLOP/s in bfloat16, dense.
        flops_float32: FLOP/s of exact float32 products: on TPUs six passes in bfloat16.
        bandwidth: bytes a second between memory and the chip.
        links: bytes a second that all its links to other chips carry in one direction (PCIe's, of
            GPUs without NVLink).
        capacity: bytes of memory that a program may use: on TPUs by their compiler's account, on
            GPUs GPU_SHARE of what CUDA reports.
    """

    kind: str
    flops: float
    flops_float32: float
    bandwidth: float
    links: float
    capacity: int

    def flops_in(self, dtype: str) -> float:
        """FLOP/s in a compute dtype."""
        return self.flops if dtype == "bfloat16" else self.flops_float32


def _share(memory: float) -> int:
    """The part of a GPU's memory that JAX takes."""
    return int(GPU_SHARE * memory)


# Sources: Google Cloud TPU system architecture pages (an interconnect's "bidirectional" halved);
# NVIDIA data sheets (SXM unless named). Longer names first.
_TPUS = {
    "v4": (275e12, 275e12 / 6, 1228e9, 300e9, int(30.75 * GIB)),
    "v5e": (197e12, 197e12 / 6, 819e9, 200e9, int(15.75 * GIB)),
    "v5p": (459e12, 459e12 / 6, 2765e9, 600e9, int(95.74 * GIB)),
    "v6e": (918e12, 918e12 / 6, 1638e9, 400e9, int(31.25 * GIB)),
}
CHIPS = (
    Chip("TPU v4", *_TPUS["v4"]),
    Chip("TPU v5 lite", *_TPUS["v5e"]),
    Chip("TPU v5e", *_TPUS["v5e"]),
    Chip("TPU v5p", *_TPUS["v5p"]),
    Chip("TPU v5", *_TPUS["v5p"]),
    Chip("TPU v6 lite", *_TPUS["v6e"]),
    Chip("TPU v6e", *_TPUS["v6e"]),
    Chip("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12, 1555e9, 300e9, _share(42e9)),
    Chip("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12, 1555e9, 32e9, _share(42e9)),
    Chip("NVIDIA A100 80GB PCIe", 312e12, 19.5e12, 1935e9, 32e9, _share(85e9)),
    Chip("NVIDIA A100", 312e12, 19.5e12, 2039e9, 300e9, _share(85e9)),
    Chip("NVIDIA H100 PCIe", 756e12, 51e12, 2000e9, 64e9, _share(85e9)),
    Chip("NVIDIA H100 NVL", 835e12, 60e12, 3900e9, 300e9, _share(100e9)),
    Chip("NVIDIA H100", 989e12, 67e12, 3350e9, 450e9, _share(85e9)),
    Chip("NVIDIA H200 NVL", 836e12, 60e12, 4800e9, 450e9, _share(150e9)),
    Chip("NVIDIA H200", 989e12, 67e12, 4800e9, 450e9, _share(150e9)),
)


def chip(device_kind: str) -> Chip | None:
    """The chip of a JAX device_kind; None for one that the table does not know."""
    return next((chip for chip in CHIPS if device_kind.startswith(chip.kind)), None)


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s in bfloat16 of one device; None for one that the table does not know."""
    found = chip(device_kind)
    return None if found is None else found.flops


def flops_per_token(config: Config, length: int) -> float:
    """Model FLOPs that training on one token takes (Kaplan et al. 2020; PaLM, appendix B).

    Three times the forward pass's, at the keys that a query sees on average: causal, and within
    the window. Recomputation (remat) is not counted.
    """
    return 3.0 * forward_flops(config, mean_keys(config, length))


def forward_flops(config: Config, keys: float) -> float:
    """Model FLOPs of the forward pass of one token that sees so many keys.

    2 for each parameter that is a factor of a matrix product (norms, biases and embedding look-ups
    are not; a tied table is one, as output head), and 4 * L * N * H for each key.
    """
    shapes = {name: leaf.shape for name, leaf in abstract_parameters(config).items()}
    factors = sum(math.prod(shape) for name, shape in shapes.items() if ".w" in name)
    layers, heads = shapes["blocks.attention.wq"][0], shapes["blocks.attention.wq"][2]
    attention = 4.0 * layers * heads * config.head_width * keys
    return 2.0 * factors + head_flops(config) + attention


def head_flops(config: Config) -> float:
    """The part of `forward_flops` that the output head takes."""
    shapes = {name: leaf.shape for name, leaf in abstract_parameters(config).items()}
    return 2.0 * math.prod(shapes["head" if "head" in shapes else "embedding"])


def mean_keys(config: Config, length: int) -> float:
    """Keys that a query sees, on average over a sequence."""
    window = config.attention_window if isinstance(config, RippleConfig) else None
    if window is None or window >= length:
        return (length + 1) / 2
    exact = isinstance(config, RippleConfig) and config.window_mode == "exact"
    return sum(i + 1 - max(0, first_key(i, window, exact)) for i in range(length)) / length
