"""Slices of TPUs, and GPUs of a machine, that are not attached: programs are compiled for them."""

import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from jaxslm.libtpu import compile_only
from train.hardware import GPU_SHARE, chip

# One chip, and the sizes in which slices are offered (Google Cloud TPU documentation); larger ones
# of three dimensions are multiples of four, up to so many chips.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
MOST_CHIPS = {"v4": 4096, "v5p": 6144}
GPUS = ("1", "2", "4", "8")
SIZES = {
    "v4": CUBIC, "v5e": FLAT, "v5p": CUBIC, "v6e": FLAT, "a100": GPUS, "h100": GPUS, "h200": GPUS,
}  # fmt: skip

# What XLA must know of a GPU that it does not see, from NVIDIA's data sheets and the CUDA
# programming guide: cores, bytes of shared memory of a core and at most of a block, and of level 2
# cache, GHz, the compute capability and a core's float32 units.
_GPU = {
    "a100": ("NVIDIA A100-SXM4-80GB", 108, 167936, 166912, 41943040, 1.41, 8, 64),
    "h100": ("NVIDIA H100 80GB HBM3", 132, 233472, 232448, 52428800, 1.98, 9, 128),
    "h200": ("NVIDIA H200", 132, 233472, 232448, 52428800, 1.98, 9, 128),
}
_GPU_TARGET = """
gpu_device_info {{
  core_count: {1}
  shared_memory_per_core: {2}
  shared_memory_per_block_optin: {3}
  l2_cache_size: {4}
  device_memory_size: {8:.0f}
  memory_bandwidth: {9:.0f}
  clock_rate_ghz: {5}
  cuda_compute_capability {{ major: {6} }}
  shared_memory_per_block: 49152
  fpus_per_core: {7}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{0}"
"""


def devices_of(topology: str) -> Sequence[Any]:
    """The devices of a slice, in JAX's order.

    Args:
        topology: generation and size, such as "v5e:4x4", or "h100:8".

    Raises:
        ValueError: there is no such slice, or the compiler refuses it.
        ModuleNotFoundError: its compiler (libtpu, or JAX's CUDA plugin) is not installed.
    """
    generation, _, size = topology.partition(":")
    if generation not in SIZES or not _offered(generation, size):
        known = {generation: SIZES[generation]} if generation in SIZES else SIZES
        offered = "; ".join(f"{name}: {', '.join(sizes)}" for name, sizes in known.items())
        more = "; ".join(f"{name}: more by multiples of 4, up to {MOST_CHIPS[name]:,} chips"
                         for name in known if name in MOST_CHIPS)  # fmt: skip
        raise ValueError(f"there is no slice {topology!r}: give a generation and a size, as in "
                         f"v5e:4x4. {offered}{f'; {more}' if more else ''}")  # fmt: skip
    compiler = "jax_cuda12_plugin" if generation in _GPU else "libtpu"
    if find_spec(compiler) is None:
        raise ModuleNotFoundError(f"no module named {compiler!r}", name=compiler)
    try:
        return _gpus(generation, size) if generation in _GPU else _tpus(generation, size)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the compiler has no slice {topology}: {error}") from None


def _gpus(generation: str, count: str) -> Sequence[Any]:
    """GPUs of one machine."""
    jax.devices()  # JAX looks for its plugins then
    name, *numbers = _GPU[generation]
    known = chip(name)
    if known is None:
        raise AssertionError(f"no figures for {name}")
    memory = known.capacity / GPU_SHARE
    target = _GPU_TARGET.format(name, *numbers, memory, known.bandwidth)
    return topologies.get_topology_desc(
        name, "cuda", target_config=target, topology=f"1x1x{count}"
    ).devices


def _tpus(generation: str, size: str) -> Sequence[Any]:
    """TPUs of one slice."""
    compile_only()
    options: dict[str, Any] = {}
    if generation == "v4":  # as JAX sees one: a chip's two cores are one device
        options["chip_config_name"] = "megacore"
    if set(size) == {"1", "x"}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return topologies.get_topology_desc(f"{generation}:{size}", "tpu", **options).devices


def _offered(generation: str, size: str) -> bool:
    """Whether a slice has this size."""
    if size in SIZES[generation]:
        return True
    dimensions = [int(part) for part in size.split("x") if re.fullmatch(r"[1-9]\d{0,2}", part)]
    return (
        len(dimensions) == size.count("x") + 1 == 3
        and all(dimension % 4 == 0 for dimension in dimensions)
        and math.prod(dimensions) <= MOST_CHIPS.get(generation, 0)
    )
