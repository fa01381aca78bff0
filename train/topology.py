"""Slices of TPUs that are not attached: their devices, for which programs can be compiled."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from jaxslm.libtpu import compile_only

# The sizes in which slices are offered (Google Cloud TPU documentation); larger ones of three
# dimensions are multiples of four.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SIZES = {"v4": CUBIC, "v5e": FLAT, "v5p": CUBIC, "v6e": FLAT}


def devices_of(topology: str) -> Sequence[Any]:
    """The devices of a slice, in JAX's order.

    Args:
        topology: generation and size, such as "v5e:4x4".

    Raises:
        ValueError: there is no such slice, or the compiler refuses it.
        ModuleNotFoundError: the TPU compiler (libtpu) is not installed.
    """
    generation, _, size = topology.partition(":")
    if generation not in SIZES or not _offered(size, SIZES[generation]):
        offered = "; ".join(f"{name}: {', '.join(sizes)}" for name, sizes in SIZES.items())
        raise ValueError(f"there is no slice {topology!r}: give a generation and a size, as in "
                         f"v5e:4x4. {offered}; cubes of more by multiples of 4")  # fmt: skip
    if find_spec("libtpu") is None:
        raise ModuleNotFoundError("no module named 'libtpu'", name="libtpu")
    compile_only()
    options: dict[str, Any] = {}
    if generation == "v4":  # as JAX sees one: a chip's two cores are one device
        options["chip_config_name"] = "megacore"
    if set(size) == {"1", "x"}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(topology, "tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the TPU compiler has no slice {topology}: {error}") from None


def _offered(size: str, sizes: tuple[str, ...]) -> bool:
    """Whether a slice has this size."""
    if size in sizes:
        return True
    dimensions = [int(part) for part in size.split("x") if re.fullmatch(r"[1-9]\d{0,2}", part)]
    return (
        sizes is CUBIC
        and size.count("x") == 2
        and len(dimensions) == 3
        and all(dimension % 4 == 0 for dimension in dimensions)
    )
