"""What would make a run fit, and how much of it would: by trying."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxslm.sharding import make_mesh
from jaxslm.weights import abstract_parameters
from train.config import TrainConfig
from train.plan import Memory, Plan, plan_training
from train.topology import devices_of

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """A change of the config that was tried: the mildest of its kind that fits, or the strongest.

    Attributes:
        options: as the command line takes it.
        kind: what is changed: "remat", "accumulation", "mesh", "loss chunks", "batch" or "all".
        plan: with the change.
    """

    options: str
    kind: str
    plan: Plan


def ways_to_fit(config: TrainConfig, topology: str, progress: Progress) -> list[Way]:
    """What would make a run fit that does not, each kind of change by itself, compiled quickly.

    Of each kind the strongest change is tried first, and if that fits, the mildest that does; if
    none does alone, all but a smaller batch together.

    Args:
        config: the run's.
        topology: of the slice.
        progress: told what is tried.

    Returns:
        A `Way` for each kind that the config leaves room for.
    """

    def tried(change: tuple[str, TrainConfig]) -> Plan:
        progress(f"trying {change[0]}")
        return plan_training(change[1], topology, quick=True)

    kinds = changes(config, devices_of(topology))
    found = []
    for kind, steps in kinds.items():
        if not steps:
            continue
        last = tried(steps[-1])
        if not last.fits:
            found.append(Way(steps[-1][0], kind, last))
            continue
        plans = ((step, tried(step)) for step in steps[:-1])
        step, plan = next(((s, p) for s, p in plans if p.fits), (steps[-1], last))
        found.append(Way(step[0], kind, plan))
    if not any(way.plan.fits for way in found):
        options, both = [], config
        for kind in kinds:
            if kind != "batch" and (steps := changes(both, devices_of(topology))[kind]):
                options.append(steps[-1][0])
                both = steps[-1][1]
        words = " ".join(options)
        found.append(Way(words, "all", tried((words, both))))
    return found


def changes(
    config: TrainConfig, devices: Sequence[Any]
) -> dict[str, list[tuple[str, TrainConfig]]]:
    """Changes that save memory, mildest first, by kind: options of the command line and config.

    Those of the first four kinds leave the run what it is, but for rounding.
    """
    model, batch, count = config.model, config.data.batch_size, len(devices)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices).shape
    order = ("none", "dots", "full")
    rematted = [
        (f"--model.remat {remat}", replace(config, model=replace(model, remat=remat)))
        for remat in order[order.index(model.remat) + 1 :]
    ]
    pieces = mesh["data"] * mesh["fsdp"]
    counts = [
        n for n in range(config.accumulation + 1, batch // pieces + 1)
        if batch % n == 0 and batch // n % pieces == 0
    ]  # fmt: skip
    microbatches = [
        (f"--accumulation {n}", replace(config, accumulation=n)) for n in _spread(counts)
    ]
    width = abstract_parameters(model)["embedding"].shape[1]
    data = "" if config.mesh.data == -1 else "--mesh.data -1 "
    pieced = [
        (
            f"{data}--mesh.fsdp {n}",
            replace(config, mesh=replace(config.mesh, data=-1, fsdp=n)),
        )
        for n in range(mesh["fsdp"] + 1, count // mesh["tensor"] + 1)
        if count // mesh["tensor"] % n == 0 and width % n == 0
    ]
    chunk, length = config.loss_chunk, config.data.sequence_length
    chunk = length if chunk is None else min(chunk, length)
    chunks = [
        (f"--loss-chunk {n}", replace(config, loss_chunk=n)) for n in (512, 256, 128) if n < chunk
    ]
    unit = pieces * config.accumulation
    units = batch // unit  # a quarter less, and then half as many, and so on
    smaller = [
        (f"--data.batch-size {n}", replace(config, data=replace(config.data, batch_size=n)))
        for n in sorted({unit * n for n in (3 * units // 4, *_halves(units)) if n}, reverse=True)
    ]
    return {
        "remat": rematted, "accumulation": microbatches, "mesh": pieced, "loss chunks": chunks,
        "batch": smaller,
    }  # fmt: skip


def _halves(count: int) -> list[int]:
    """Half of it, a quarter and so on, down to 1."""
    return [count >> k for k in range(1, count.bit_length())]


def _spread(counts: list[int]) -> list[int]:
    """Some of many: each at least twice the one before, and the last."""
    kept: list[int] = []
    for count in counts:
        if not kept or count >= 2 * kept[-1]:
            kept.append(count)
    return sorted({*kept, *counts[-1:]})


def largest_batch(config: TrainConfig, topology: str, progress: Progress) -> int:
    """The most sequences of a microbatch that fit each device, by quick compilations; 0 for none.

    Args:
        config: the run's; its batch size and accumulation do not count.
        topology: of the slice.
        progress: told what is tried.
    """
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices_of(topology))
    pieces = mesh.shape["data"] * mesh.shape["fsdp"]

    def memory(rows: int) -> Memory | None:
        progress(f"trying {rows} sequences a device")
        data = replace(config.data, batch_size=rows * pieces * config.accumulation)
        return plan_training(replace(config, data=data), topology, quick=True).memory

    return most(memory)


def most(memory: Callable[[int], Memory | None]) -> int:
    """The largest number that fits, to a sixteenth of itself, where every smaller one does.

    Each number tried is where the line through the last two that fit meets the capacity.

    Args:
        memory: that a number takes; None where the compiler refuses it.
    """
    fitting: list[tuple[int, Memory]] = []
    low, high = 0, None
    while high is None or high - low > max(1, low // 16):
        number = max(1, 2 * low)
        if len(fitting) > 1:
            (before, less), (_, last) = fitting[-2:]
            free, each = last.capacity - last.total, (last.total - less.total) / (low - before)
            number = min(8 * low, low + int(free / each) if each > 0 else number)
        number = max(number, low + max(1, low // 16))
        if high is not None and number >= high:
            number = (low + high) // 2
        found = memory(number)
        if found is not None and found.total <= found.capacity:
            low = number
            fitting.append((number, found))
        else:
            high = number
    return low
