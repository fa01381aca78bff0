"""`jaxslm plan`: a run's config and a slice of TPUs or GPUs, and whether they go together."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxslm.models import model_name
from train.command import load_config
from train.config import TrainConfig
from train.hardware import GIB
from train.plan import Plan, plan_decoding, plan_training
from train.plan_search import Way, largest_batch, ways_to_fit
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
    loaded = load_config(path)

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
            rows: of --decode, on all devices; 1 by default.
            largest_batch: also search the most sequences a device that fit one microbatch.
            quick: compile with the least effort: a third of the time, figures within a few per
                cent.
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
    rows = 1 if chosen["rows"] is None else chosen["rows"]
    if rows < 1:
        raise ValueError(f"--rows must be 1 or more, got {rows}")
    most: int | None = None
    ways: list[Way] = []
    with Console(stderr=True).status("compiling") as status:
        if chosen["decode"]:
            plan = plan_decoding(
                config, topology, batch_size=rows,
                length=config.data.sequence_length, quick=chosen["quick"],
            )  # fmt: skip
        else:
            plan = plan_training(config, topology, quick=chosen["quick"])
            if not plan.fits:
                ways = ways_to_fit(config, topology, status.update)
            if chosen["largest_batch"]:
                most = largest_batch(config, topology, status.update)
    if chosen["json"]:
        print(json.dumps(to_json(config, plan, ways, most), indent=2))
    else:
        print_plan(config, plan, ways, most, console, decode=chosen["decode"])
    return 0 if plan.fits else 1


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
    config: TrainConfig,
    plan: Plan,
    ways: Sequence[Way],
    most: int | None,
    console: Console,
    *,
    decode: bool = False,
) -> None:
    """The same in words."""
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
    console.print(f"\ncompiled in {plan.compile_seconds:.1f} s")
    if ways:
        console.print("\nwhat would make it fit:")
    for way in ways:
        size = "" if way.plan.memory is None else f"{way.plan.memory.total / GIB:.2f} GiB"
        words = way.options or ("nothing that was tried" if way.kind == "all" else "not by itself")
        console.print(f"  {way.kind:14}{words}{f'  ({size})' if size else ''}")
    if most is not None:
        console.print(f"\nmost sequences of {data.sequence_length:,} that fit a device in one "
                      f"microbatch: {most}")  # fmt: skip


def _print_memory(plan: Plan, console: Console) -> None:
    """What a device holds."""
    memory = plan.memory
    if memory is None:
        console.print(f"\ndoes not fit: {plan.refusal}")
        return
    console.print("\nmemory of each device, GiB")
    for name in ("arguments", "temporaries", "outputs", "code", "total"):
        console.print(f"  {name:14}{getattr(memory, name) / GIB:8.2f}")
    fits = "fits" if plan.fits else "DOES NOT FIT"
    console.print(f"  {'capacity':14}{memory.capacity / GIB:8.2f}  {fits}")


def _print_time(config: TrainConfig, plan: Plan, console: Console, *, decode: bool) -> None:
    """What is exchanged, and the bounds with their formulas."""
    roofline, chip, step = plan.roofline, plan.chip, "token" if decode else "update"
    if roofline is None:
        return
    if plan.devices > 1:
        console.print(f"\neach device sends, per {step}")
        for each in plan.collectives:
            console.print(f"  {each.kind:20}{each.count:6}{each.bytes / 1e9:10.3f} GB")
        if not plan.collectives:
            console.print("  nothing")
    through = "weights and cache once" if decode else (
        "arguments and results once, weights twice a microbatch"
    )  # fmt: skip
    rate = chip.flops_in(config.model.dtype) / 1e12
    console.print(f"\nseconds per {step} at the published peaks (no program is faster)")
    console.print(
        f"  compute       {roofline.compute:10.5f}  {plan.flops / 1e12:,.2f} TFLOP of the model, "
        f"and what is recomputed, on {plan.devices} x {rate:g} TFLOP/s"
    )
    console.print(f"  memory        {roofline.memory:10.5f}  {through}, at "
                  f"{chip.bandwidth / 1e9:g} GB/s")  # fmt: skip
    if plan.devices > 1:
        console.print(f"  communication {roofline.communication:10.5f}  what is sent, at "
                      f"{chip.links / 1e9:g} GB/s over all links")  # fmt: skip
    console.print(
        f"  at least      {roofline.seconds:10.5f}  bound by {roofline.bound_by}: at most "
        f"{plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%} of the bfloat16 peak"
    )
