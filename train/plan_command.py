"""`jaxslm plan`: a run's config and a slice of TPUs or GPUs, and whether they go together."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxslm.models import model_name
from train.command import load_config
from train.config import TrainConfig
from train.plan import Plan, plan_decoding, plan_training
from train.plan_search import Progress, Way, largest_batch, ways_to_fit
from train.topology import SIZES

USAGE = "usage: jaxslm plan CONFIG.py --topology v5e:4x4 [--FIELD VALUE ...]   (or a run's folder)"


def command(arguments: Sequence[str], console: Console) -> int:
    """Parses and runs `jaxslm plan`.

    Args:
        arguments: what stands after `plan`.
        console: where the plan is printed.

    Returns:
        0 if the program fits the devices' memory, 1 if not.

    Raises:
        ValueError: there is no config or no such slice, or they do not go together.
        FileNotFoundError: there is no such config.
        ModuleNotFoundError: the TPU compiler is not installed.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        sizes = "\n".join(f"  {name}: {', '.join(each)}" for name, each in SIZES.items())
        print(f"{USAGE}\n\nCompile a run's update for devices that need not be there: memory, what "
              "is exchanged, the least time.\nExit status 1 if it does not fit. Needs the "
              "compiler: pip install 'jaxslm[plan]', for GPUs 'jaxslm[plan-cuda]'.\n"
              "jaxslm plan CONFIG.py --help lists the options and fields.\n\n"
              f"slices:\n{sizes}")  # fmt: skip
        return 0
    if arguments[0].startswith("-"):
        raise ValueError(f"the config comes first: {USAGE}")
    path = Path(arguments[0])
    loaded = load_config(path, USAGE)

    def options(
        topology: str,
        config: Annotated[TrainConfig, tyro.conf.arg(name="", prefix_name=False)] = loaded,
        decode: bool = False,
        rows: int | None = None,
        largest_batch: bool = False,
        quick: bool = False,
        json: bool = False,
    ) -> dict[str, Any]:
        """Compile a run's update for devices that need not be there.

        Args:
            topology: slice, such as v5e:4x4; `jaxslm plan --help` lists them.
            config: the run.
            decode: plan greedy decoding of `rows` sequences of data.sequence-length instead.
            rows: of --decode, on all devices; by default one for each of data x fsdp.
            largest_batch: also search the most sequences a device that fit one microbatch.
            quick: compile with the least effort: a third of the time; less exact.
            json: print JSON.
        """
        return locals()

    chosen = tyro.cli(
        options, args=list(arguments[1:]), prog=f"jaxslm plan {path}",
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
    )  # fmt: skip
    config, topology = chosen["config"], chosen["topology"]
    if chosen["decode"] and chosen["largest_batch"]:
        raise ValueError("--largest-batch is of training: leave --decode out")
    if chosen["rows"] is not None and not chosen["decode"]:
        raise ValueError("--rows is of --decode: give it, or set --data.batch-size")
    if chosen["rows"] is not None and chosen["rows"] < 1:
        raise ValueError(f"--rows must be 1 or more, got {chosen['rows']}")
    quick: bool = chosen["quick"]
    with _progress() as progress:
        progress("compiling")
        if chosen["decode"]:
            plan = plan_decoding(
                config, topology, batch_size=chosen["rows"],
                length=config.data.sequence_length, quick=quick,
            )  # fmt: skip
        else:
            plan = plan_training(config, topology, quick=quick)
    if not chosen["json"]:
        print_plan(config, plan, console, decode=chosen["decode"], quick=quick)
    ways, most = [], None
    with _progress() as progress:
        if not plan.fits and not chosen["decode"]:
            ways = ways_to_fit(config, topology, progress)
        if chosen["largest_batch"]:
            most = largest_batch(config, topology, progress)
    if chosen["json"]:
        print(json.dumps(to_json(config, plan, ways, most), indent=2))
    else:
        print_searches(config, ways, most, console)
    return 0 if plan.fits else 1


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Tells what is being done: in place on a terminal, else a line each to stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda words: print(f"jaxslm: {words}", file=sys.stderr)
        return
    with console.status("") as status:
        yield status.update


def to_json(
    config: TrainConfig, plan: Plan, ways: Sequence[Way], most: int | None
) -> dict[str, Any]:
    """All figures as JSON values; bytes, seconds, FLOPs."""
    return {
        "model": model_name(config.model),
        **asdict(plan),
        "fits": plan.fits,
        "memory": plan.memory and {**asdict(plan.memory), "total": plan.memory.total},
        "roofline": plan.roofline
        and {
            **asdict(plan.roofline),
            "seconds": plan.roofline.seconds,
            "bound_by": plan.roofline.bound_by,
        },
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "ways_to_fit": [
            {
                "kind": way.kind,
                "options": way.options,
                "fits": way.plan.fits,
                "total": way.plan.memory and way.plan.memory.total,
            }
            for way in ways
        ],
        "largest_microbatch_per_device": most,
    }


def print_plan(
    config: TrainConfig, plan: Plan, console: Console, *, decode: bool, quick: bool
) -> None:
    """A plan in words."""
    model, data = config.model, config.data
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    console.print(f"{plan.topology}: {plan.devices} x {plan.chip.kind}, mesh {mesh}")
    if decode:
        console.print(f"{type(model).__name__} in {model.dtype} decodes {plan.tokens} row(s), "
                      f"{data.sequence_length:,} positions in the cache")  # fmt: skip
    else:
        console.print(
            f"{type(model).__name__} in {model.dtype}, updates of {data.batch_size} x "
            f"{data.sequence_length:,} tokens in {config.accumulation} microbatch(es); remat "
            f"{model.remat}, loss chunks of {config.loss_chunk}"
        )
    if plan.chip.kind.startswith("NVIDIA") and model.attention == "auto":
        console.print("attention is planned as blockwise: cuDNN's, which auto may take on the "
                      "GPU, is compiled there only; it holds less and is faster")  # fmt: skip
    _print_memory(plan, console)
    _print_time(config, plan, console, decode=decode)
    how = ", with the least effort (--quick)" if quick else ""
    console.print(f"\ncompiled in {plan.compile_seconds:.1f} s{how}")


def print_searches(
    config: TrainConfig, ways: Sequence[Way], most: int | None, console: Console
) -> None:
    """What was found by trying, in words."""
    if ways:
        console.print("\nwhat would make it fit, by itself, compiled with the least effort:")
    for way in ways:
        memory = way.plan.memory
        size = "the compiler refuses it" if memory is None else f"{memory.total / 2**20:,.0f} MiB"
        fits = "  " if way.plan.fits else "no"
        kind = "all together" if way.kind == "all" else way.kind
        console.print(f"  {kind:14}{fits} {way.options}  ({size})")
    if most is not None:
        length = config.data.sequence_length
        console.print(f"\nmost sequences of {length:,} that fit a device in one microbatch, "
                      f"compiled with the least effort: {most}")  # fmt: skip


def _print_memory(plan: Plan, console: Console) -> None:
    """What a device holds."""
    memory = plan.memory
    if memory is None:
        console.print(f"\ndoes not fit: {plan.refusal}")
        return
    console.print("\nmemory of each device, MiB")
    for name in ("arguments", "temporaries", "outputs", "code", "total", "capacity"):
        console.print(f"  {name:14}{getattr(memory, name) / 2**20:11,.1f}")
    console.print("  it fits" if plan.fits else "  it DOES NOT FIT")


def _print_time(config: TrainConfig, plan: Plan, console: Console, *, decode: bool) -> None:
    """What is exchanged, and the bounds with their formulas."""
    roofline, chip = plan.roofline, plan.chip
    step = "token of each row" if decode else "update"
    if roofline is None:
        return
    if plan.devices > 1:
        console.print(f"\neach device sends, per {step}")
        for each in plan.collectives:
            console.print(f"  {each.kind:20}{each.count:6}{scaled(each.bytes, 'B'):>12}")
        if not plan.collectives:
            console.print("  nothing")
    rate = scaled(chip.flops_in(config.model.dtype), "FLOP/s")
    flops = f"{scaled(plan.flops, 'FLOP')} of the model"
    if plan.recomputed:
        flops += f" and {scaled(plan.recomputed, 'FLOP')} recomputed"
    through = "weights and cache once" if decode else (
        "arguments and results once, weights twice a microbatch"
    )  # fmt: skip
    rows = [
        ("compute", f"{flops}, on {plan.devices} x {rate}"),
        ("memory", f"{through}, at {scaled(chip.bandwidth, 'B/s')}"),
        ("communication", f"what is sent, at {scaled(chip.links, 'B/s')} over all links"),
    ]
    console.print(f"\ntime per {step} at the published peaks (no program is faster)")
    for name, words in rows if plan.devices > 1 else rows[:2]:
        console.print(f"  {name:14}{scaled(getattr(roofline, name), 's'):>10}  {words}")
    console.print(
        f"  {'at least':14}{scaled(roofline.seconds, 's'):>10}  bound by {roofline.bound_by}: at "
        f"most {plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%} of the bfloat16 peak"
    )


def scaled(value: float, unit: str) -> str:
    """A number that is not negative, to three digits, with the unit's prefix."""
    for power, prefix in zip(range(18, -12, -3), (*"EPTGMk", "", *"mun"), strict=True):
        if value >= 0.9995 * 10.0**power:
            return f"{value / 10.0**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
