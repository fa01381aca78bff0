"""What a run takes and how fast it can be, before it runs: its programs compiled for a slice.

Nothing runs and no device is needed: the TPU compiler says what a program holds in memory and
exchanges, and the chip's published peaks how long that takes at least.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxslm.compilation import not_kept
from jaxslm.decoding import lower_decoding, most_slots
from jaxslm.sharding import make_mesh
from jaxslm.weights import abstract_parameters
from train.collectives import Collective, collectives
from train.config import TrainConfig
from train.hardware import GIB, Chip, chip, flops_per_token, forward_flops, head_flops
from train.optimizer import build_optimizer
from train.program import lower
from train.setup import make_layout
from train.step import make_step
from train.topology import devices_of

# The least effort of XLA's: a third of the time or less, memory within a few per cent.
QUICK: Any = {"exec_time_optimization_effort": -1.0}


@dataclass(frozen=True)
class Memory:
    """Bytes that a program takes on each device.

    Attributes:
        arguments: parameters, optimizer state and batch; or weights and cache.
        temporaries: everything between.
        outputs: results that do not take the arguments' place.
        code: the program itself.
        capacity: that a program may use.
    """

    arguments: int
    temporaries: int
    outputs: int
    code: int
    capacity: int

    @property
    def total(self) -> int:
        """Of all four."""
        return self.arguments + self.temporaries + self.outputs + self.code


@dataclass(frozen=True)
class Roofline:
    """Seconds that a step takes at least; a program that overlaps all three takes the longest.

    Attributes:
        compute: FLOPs of the model, and of what it recomputes, at the chips' peak.
        memory: arguments and results through the memory once, and the weights twice a microbatch.
        communication: what a device sends, over all its links at once.
    """

    compute: float
    memory: float
    communication: float

    @property
    def seconds(self) -> float:
        """The longest."""
        return max(self.compute, self.memory, self.communication)

    @property
    def bound_by(self) -> str:
        """Its name."""
        return max(("compute", "memory", "communication"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Plan:
    """A step of training, or of decoding, on a slice.

    Attributes:
        topology: such as "v5e:4x4".
        chip: of its devices.
        mesh: devices on each axis.
        tokens: of a step, on all devices.
        memory: None where the compiler refused the program.
        refusal: its words then.
        collectives: by kind; none where it refused.
        flops: of the model in a step, on all devices, without what is recomputed.
        recomputed: FLOPs beside them.
        roofline: None where it refused.
        compile_seconds: on this machine.
    """

    topology: str
    chip: Chip
    mesh: dict[str, int]
    tokens: int
    memory: Memory | None
    refusal: str | None
    collectives: tuple[Collective, ...]
    flops: float
    recomputed: float
    roofline: Roofline | None
    compile_seconds: float

    @property
    def devices(self) -> int:
        """How many."""
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool:
        """Whether the devices' memory is enough."""
        return self.memory is not None and self.memory.total <= self.memory.capacity

    @property
    def tokens_per_second(self) -> float | None:
        """No program makes more."""
        return None if self.roofline is None else self.tokens / self.roofline.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation at the roofline, of the peak in bfloat16."""
        if self.roofline is None:
            return None
        return self.flops / (self.roofline.seconds * self.devices * self.chip.flops)


def plan_training(config: TrainConfig, topology: str, *, quick: bool = False) -> Plan:
    """Compiles a run's update for a slice.

    Args:
        config: the run's.
        topology: such as "v5e:4x4".
        quick: compile with the least effort.

    Raises:
        ValueError: there is no such slice, or mesh, batch and model do not fit each other.
        ModuleNotFoundError: the TPU compiler is not installed.
    """
    devices = devices_of(topology)
    config = without_cudnn(config, devices[0].platform)
    trained = set(abstract_parameters(config.model)) - set(config.trained_without)
    layout = make_layout(config, build_optimizer(config.optim, config.steps, trained), devices)
    lowered = lower(config, layout, make_step(config), layout.state, donate=True)
    model, length = config.model, config.data.sequence_length
    tokens = config.data.batch_size * length
    flops = flops_per_token(model, length) * tokens
    again = forward_flops(model, 0.0) - head_flops(model) if model.remat == "full" else 0.0
    if config.loss_chunk is not None and config.loss_chunk < length:
        again += head_flops(model)
    weights = sum(math.prod(leaf.shape) for leaf in layout.state.params.values())
    reads = weights / layout.mesh.shape["tensor"] * np.dtype(model.dtype).itemsize

    def traffic(account: Any) -> float:
        through = account.argument_size_in_bytes + account.output_size_in_bytes
        return through + 2 * config.accumulation * reads

    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(layout.state)
    )
    return _compiled(
        lowered, traffic, topology, layout.mesh, tokens=tokens, flops=flops, quick=quick,
        recomputed=again * tokens, dtype=model.dtype, held=held,
    )  # fmt: skip


def plan_decoding(
    config: TrainConfig,
    topology: str,
    *,
    length: int,
    batch_size: int | None = None,
    quick: bool = False,
) -> Plan:
    """Compiles the decoding program of a run's model for a slice; a step is a token of each row.

    Args:
        config: the run's: its model and mesh count.
        topology: such as "v5e:1x1".
        length: positions that the cache holds.
        batch_size: rows, on all devices; None for one a device of data x fsdp.
        quick: compile with the least effort.

    Raises:
        ValueError: there is no such slice, or mesh, batch and model do not fit each other.
        ModuleNotFoundError: the TPU compiler is not installed.
    """
    sizes = config.mesh
    mesh = make_mesh(sizes.data, sizes.fsdp, sizes.tensor, devices_of(topology))
    pieces = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = pieces if batch_size is None else batch_size
    slots = most_slots(config.model, length)
    lowered = lower_decoding(config.model, mesh, batch_size=rows, slots=slots)
    flops = forward_flops(config.model, slots) * rows
    return _compiled(
        lowered, lambda account: account.argument_size_in_bytes, topology, mesh,
        tokens=rows, flops=flops, recomputed=0.0, dtype=config.model.dtype, quick=quick,
    )  # fmt: skip


def without_cudnn(config: TrainConfig, platform: str) -> TrainConfig:
    """The run as it can be compiled: cuDNN's attention only where there is a GPU to ask.

    Raises:
        ValueError: the run asks for it by name.
    """
    if platform != "gpu":
        return config
    if config.model.attention == "cudnn":
        raise ValueError("cuDNN's attention is compiled where the GPU is: plan with "
                         "--model.attention blockwise for a bound")  # fmt: skip
    if config.model.attention != "auto":
        return config
    return replace(config, model=replace(config.model, attention="blockwise"))


def _compiled(
    lowered: jax.stages.Lowered,
    traffic: Callable[[Any], float],
    topology: str,
    mesh: Mesh,
    *,
    tokens: int,
    flops: float,
    recomputed: float,
    dtype: str,
    quick: bool,
    held: int | None = None,
) -> Plan:
    """The plan of a program.

    `traffic` gives, from the compiler's account, the bytes that must pass through a device's
    memory; `held` is what the arguments take.
    """
    found = chip(mesh.devices.flat[0].device_kind)
    if found is None:
        raise AssertionError(f"no figures for the devices of {topology}")
    start = time.perf_counter()
    compiled, refusal = None, None
    try:
        with not_kept():
            compiled = lowered.compile(QUICK if quick else None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refusal = _refusal(str(error), held)
    seconds = time.perf_counter() - start
    memory, roofline, exchanged = None, None, ()
    if compiled is not None:
        account: Any = compiled.memory_analysis()
        memory = Memory(
            arguments=account.argument_size_in_bytes,
            temporaries=account.temp_size_in_bytes,
            outputs=account.output_size_in_bytes - account.alias_size_in_bytes,
            code=account.generated_code_size_in_bytes,
            capacity=found.capacity,
        )
        exchanged = collectives(compiled.as_text() or "", mesh.size)
        roofline = Roofline(
            compute=(flops + recomputed) / (mesh.size * found.flops_in(dtype)),
            memory=traffic(account) / found.bandwidth,
            communication=sum(each.bytes for each in exchanged) / found.links,
        )
    return Plan(
        topology=topology, chip=found, mesh=dict(mesh.shape), tokens=tokens, memory=memory,
        refusal=refusal, collectives=exchanged, flops=flops, recomputed=recomputed,
        roofline=roofline, compile_seconds=seconds,
    )  # fmt: skip


def _refusal(words: str, held: int | None) -> str:
    """Why the compiler gave up, from its message."""
    sentence = words.removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0].rstrip(". ")
    beside = "" if held is None else f", beside {held / GIB:.2f} GiB of parameters and optimizer"
    return f"{sentence}{beside}"
