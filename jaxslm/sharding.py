"""How parameters and activations lie on a device mesh with axes data, fsdp and tensor.

The batch is split over data and fsdp; every large parameter is split over fsdp along the model
width (gathered when used, as in ZeRO-3) and over tensor along heads, mlp width or vocabulary (as in
Megatron). One table serves all three models, because their parameters have the same names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, PartitionSpec

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

# pattern of the parameter's path -> mesh axis of each of its dimensions (see the legend of axes)
TABLE: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embedding", ("tensor", "fsdp")),  # V D
    (r"position_embedding", (None, "fsdp")),  # T D
    (r"head", ("fsdp", "tensor")),  # D V
    (r"blocks\.attention\.w[qkv]", (None, "fsdp", "tensor", None)),  # L D N|K H
    (r"blocks\.attention\.wo", (None, "tensor", None, "fsdp")),  # L N H D
    (r"blocks\.attention\.b[qkv]", (None, "tensor", None)),  # L N H
    (r"blocks\.attention\.decay", (None, "tensor")),  # L N
    (r"blocks\.mlp\.w_(gate|up)", (None, "fsdp", "tensor")),  # L D F
    (r"blocks\.mlp\.w_down", (None, "tensor", "fsdp")),  # L F D
    (r"blocks\.mlp\.w_in", (None, "fsdp", None, "tensor")),  # L D 2 F
    (r"blocks\.mlp\.b_in", (None, None, "tensor")),  # L 2 F
    (r"blocks\.mlp\.w_out", (None, "tensor", "fsdp")),  # L F D
    (r"blocks\.mlp\.b_out", (None, None)),  # L D
    (r"blocks\.(attention|mlp)_norm\.(scale|bias)", (None, None)),  # L D
    (r"final_norm\.(scale|bias)", (None,)),  # D
)
# Dimensions that may stay whole on every device where the axis does not divide them; the cost is
# memory, and for the vocabulary the work of the output head. All others are refused.
REPLICABLE = {
    "embedding": 0,
    "head": 1,
    "blocks.attention.wk": 2,
    "blocks.attention.wv": 2,
}


@dataclass(frozen=True)
class Plan:
    """Where each parameter goes.

    Attributes:
        specs: partition by parameter path.
        notes: what could not be split and is therefore replicated, in words.
    """

    specs: dict[str, PartitionSpec]
    notes: tuple[str, ...]


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """A mesh of all the given devices.

    Args:
        data: size of the axis, or -1 for the devices that the others leave.
        fsdp: size of the axis.
        tensor: size of the axis.
        devices: such as `jax.devices()`.

    Raises:
        ValueError: the sizes do not make up the number of devices.
    """
    count = len(devices)
    if fsdp < 1 or tensor < 1 or data < -1 or data == 0:
        raise ValueError(
            f"mesh sizes must be 1 or more (data may be -1, the rest), got data {data}, "
            f"fsdp {fsdp}, tensor {tensor}"
        )
    if data == -1:
        if count % (fsdp * tensor):
            raise ValueError(
                f"mesh fsdp {fsdp} x tensor {tensor} does not divide the {count} devices: "
                f"choose sizes whose product divides {count}"
            )
        data = count // (fsdp * tensor)
    if data * fsdp * tensor != count:
        raise ValueError(
            f"mesh data {data} x fsdp {fsdp} x tensor {tensor} = {data * fsdp * tensor} devices, "
            f"but there are {count}"
        )
    sizes, kinds = (data, fsdp, tensor), (AxisType.Auto,) * 3
    try:
        return jax.make_mesh(sizes, AXES, axis_types=kinds, devices=devices)
    except NotImplementedError:  # the sizes cut a physical axis of the slice in two
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(placed, AXES, axis_types=kinds)


def plan(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> Plan:
    """The partition of every parameter.

    Args:
        shapes: shape by parameter path.
        mesh: from `make_mesh`.

    Raises:
        ValueError: a dimension cannot be split over its axis; all are named with their numbers.
    """
    specs, notes, faults = {}, [], []
    for path, shape in shapes.items():
        axes = axes_of(path)
        if len(axes) != len(shape):
            raise AssertionError(f"{path} has shape {shape}, the table says {axes}")
        spec: list[str | None] = []
        for dimension, (size, axis) in enumerate(zip(shape, axes, strict=True)):
            parts = 1 if axis is None else mesh.shape[axis]
            if size % parts == 0:
                spec.append(axis if parts > 1 else None)
                continue
            spec.append(None)
            words = f"{path} dimension {dimension} of {shape}: {size} over {axis} {parts}"
            (notes if REPLICABLE.get(path) == dimension else faults).append(words)
        specs[path] = PartitionSpec(*spec)
    if faults:
        raise ValueError(
            "the parameters cannot be split over mesh "
            + " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
            + ":\n  "
            + "\n  ".join(faults)
            + "\nchoose mesh sizes that divide these numbers"
        )
    return Plan(specs, tuple(notes))


def axes_of(path: str) -> tuple[str | None, ...]:
    """The mesh axis of each dimension of a parameter, from TABLE.

    Raises:
        KeyError: no row names the parameter.
    """
    for pattern, axes in TABLE:
        if re.fullmatch(pattern, path):
            return axes
    raise KeyError(f"no row of the sharding table names {path}")


def constrain(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
    """Asks the compiler to lay an activation out so, under `jax.set_mesh`; else does nothing.

    A dimension that its axes do not divide is left to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names):
        return x
    known = [
        axes if size % _parts(mesh.shape, axes) == 0 else None
        for size, axes in zip(x.shape, spec, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*known))


def _parts(sizes: Mapping[str, int], axes: str | tuple[str, ...] | None) -> int:
    """Number of pieces that mesh axes cut a dimension into."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return int(np.prod([sizes[name] for name in names], dtype=np.int64))
