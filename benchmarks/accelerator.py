"""A GPU or TPU in eight minutes: is attention right there, how fast are training and generation?

python -m benchmarks.accelerator [--minutes 8] [--json FILE] [--small]

Five parts, a table each: attention's backends against the reference; updates of GPT-298M; attention
alone; decoding; updates of Ripple at 16,384 positions. Tokens and weights are random: it needs no
data and no torch. What does not run says why, and what there is no time for is left out. The
exit status is 1 where a backend does not equal the reference.
"""

import functools
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from json import dumps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from configs.gpt_250m import config as gpt_250m
from configs.ripple_long import config as ripple_long
from jaxslm import Generator, GPTConfig, LumenConfig, RippleConfig, Sampling
from jaxslm.attention import BACKENDS, attend
from jaxslm.decoding import prepared
from jaxslm.files import atomic_output
from jaxslm.layers import REMAT_POLICIES
from jaxslm.models import MODELS, Config, model_name
from jaxslm.models.ripple import initial_decay
from jaxslm.weights import abstract_parameters
from train.config import DataConfig, OptimConfig, TrainConfig
from train.hardware import chip, flops_per_token, mean_keys, peak_flops
from train.optimizer import build_optimizer
from train.program import lower
from train.setup import make_layout, new_state
from train.step import make_step

RUNS, SECONDS = 10, 3.0  # of a measurement, at most
Row = dict[str, Any]
Measurements = Iterator[tuple[str, Callable[[], Row]]]  # what is measured, and its figures


@dataclass(frozen=True)
class Case:
    """A model and a batch, of which its attention may be all that is taken."""

    name: str
    config: Config
    batch: int
    length: int


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        equality: attention's shapes.
        gpt: for updates and decoding, in bfloat16.
        gpt_length: positions in a sequence of its updates.
        batches: sequences on a device, the largest first: what fits is taken.
        remats: rematerialisation policies.
        attention: shapes to time.
        prompt: tokens before those that decoding makes.
        new: tokens that decoding makes.
        ripple: its models with and without windows, in bfloat16.
        ripple_length: positions in a sequence of its updates.
        ripple_batches: as `batches`.
    """

    equality: tuple[Case, ...]
    gpt: GPTConfig
    gpt_length: int
    batches: tuple[int, ...]
    remats: tuple[str, ...]
    attention: tuple[Case, ...]
    prompt: int
    new: int
    ripple: tuple[RippleConfig, ...]
    ripple_length: int
    ripple_batches: tuple[int, ...]


def full_sizes() -> Sizes:
    """Of an accelerator."""
    gpt: Any = gpt_250m.model
    long: Any = replace(ripple_long.model, dtype="bfloat16", dropout=0.0)
    plain, exact = replace(long, attention_window=None), replace(long, window_mode="exact")
    lengths = (2048, 8192, 32768)
    return Sizes(
        equality=(
            Case("Lumen", LumenConfig(), 2, 1024), Case("GPT", gpt, 2, 1024),
            Case("Ripple", plain, 2, 1024), Case("Ripple, chunked window", long, 2, 1024),
            Case("Ripple, exact window", exact, 2, 1024),
        ),
        gpt=gpt, gpt_length=gpt_250m.data.sequence_length, batches=(32, 16, 8),
        remats=tuple(REMAT_POLICIES),
        attention=tuple(
            Case(name, config, max(lengths) // length, length)
            for length in lengths
            for name, config in (("GPT", gpt), ("Ripple", plain), ("Ripple, chunked window", long),
                                 ("Ripple, exact window", exact))
        ),
        prompt=128, new=257, ripple=(long, exact, plain), ripple_length=16384,
        ripple_batches=(4, 1),
    )  # fmt: skip


def small_sizes() -> Sizes:
    """Of a test on a CPU."""
    gpt = GPTConfig(
        block_size=32, vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, dtype="bfloat16"
    )
    lumen = LumenConfig(hidden_dim=32, num_layers=2, max_seq_len=32)
    window = RippleConfig(n_layer=2, n_embd=48, dropout=0.0, attention_window=8, dtype="bfloat16")
    return Sizes(
        equality=(Case("Lumen", lumen, 2, 32), Case("Ripple, chunked window", window, 2, 32)),
        gpt=gpt, gpt_length=32, batches=(2,), remats=("dots",),
        attention=(Case("GPT", gpt, 2, 32),), prompt=8, new=4, ripple=(window,), ripple_length=32,
        ripple_batches=(1,),
    )  # fmt: skip


def main(
    minutes: float = 8.0, json: Path = Path("bench-out/accelerator.json"), small: bool = False
) -> None:
    """Measures, prints, and writes what there is after each part.

    Args:
        minutes: after which nothing new is begun.
        json: file for the figures.
        small: tiny shapes, for any platform.
    """
    sizes, device = small_sizes() if small else full_sizes(), jax.devices()[0]
    console, start = Console(width=140, highlight=False, markup=False), time.monotonic()
    content: Row = {
        "device": device.device_kind, "platform": device.platform, "devices": jax.device_count(),
        "python": platform.python_version(), "small": small,
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
    }  # fmt: skip
    console.print(content)
    parts: dict[str, list[Row]] = {}
    measured = {  # and the share of the time by which nothing more of it is begun
        "equality": (equality, 0.2), "updates": (updates, 0.55), "attention": (attention, 0.75),
        "decoding": (decoding, 0.85), "long updates": (long_updates, 0.95),
    }  # fmt: skip
    json.parent.mkdir(parents=True, exist_ok=True)
    for name, (part, share) in measured.items():
        parts[name] = []
        for what, measure in part(sizes):
            late = time.monotonic() - start > 60 * minutes * share
            figures = {"reason": "there was no time left"} if late else tried(measure)
            parts[name].append({"what": what} | figures)
            content |= {"seconds": round(time.monotonic() - start, 1), "parts": parts}
            with atomic_output(json, overwrite=True) as room:
                room.write_text(dumps(content, indent=1) + "\n")
        show(console, name, parts[name])
    if not all(row.get("met", True) for row in parts["equality"]):
        sys.exit(1)


def show(console: Console, name: str, rows: list[Row]) -> None:
    """A table with a column for every figure, and the reasons of what did not run."""
    ran = [row for row in rows if "reason" not in row]
    columns = list(dict.fromkeys(key for row in ran for key in row))
    table = Table(*(column.replace("_", " ") for column in columns), title=name)
    for row in ran:
        table.add_row(*(in_words(row.get(column, "")) for column in columns))
    console.print(table)
    for row in rows:
        if "reason" in row:
            console.print(f"{row['what']}: {row['reason']}")


def in_words(value: Any) -> str:
    """A figure as the table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


def tried(measure: Callable[[], Row]) -> Row:
    """The figures, or why there are none."""
    try:
        return measure()
    except Exception as error:  # of many types, from JAX and from what lies below it
        return {"reason": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    finally:
        gc.collect()  # a failure's frames hold arrays


def serving() -> list[str]:
    """The backends that this platform may have, its kernel first."""
    kernel = {"gpu": "cudnn", "tpu": "splash"}.get(jax.default_backend())
    return [name for name in (kernel, "blockwise", "reference") if name in BACKENDS]


def equality(sizes: Sizes) -> Measurements:
    """Outputs and gradients of each backend against the reference in float32."""
    for case in sizes.equality:
        for dtype in ("float32", "bfloat16"):
            for backend in (name for name in BACKENDS if name not in ("auto", "reference")):
                what = f"{case.name} {case.batch}x{case.length}, {dtype}, {backend}"
                yield what, functools.partial(_equals, case, dtype, backend)


def _equals(case: Case, dtype: str, backend: str) -> Row:
    """Root mean square of the differences over that of the values.

    In bfloat16 it may be three times what the reference has itself.
    """
    arrays = _arrays(case, dtype)
    with jax.default_matmul_precision("float32" if dtype == "float32" else None):
        found = _outputs_and_gradients(case, backend)(*arrays)
    truth, own = _reference(case, dtype)
    errors, limits = {}, {}
    for name, values, exact, reference in zip(
        ("output", "dq", "dk", "dv", "dslope"), found, truth, own, strict=True
    ):
        if values is not None:
            errors[name] = _error(values, exact)
            limits[name] = 1e-4 if dtype == "float32" else max(0.02, 3 * _error(reference, exact))
    return errors | {"met": all(errors[name] <= limits[name] for name in errors)}


@functools.lru_cache(maxsize=1)
def _reference(case: Case, dtype: str) -> tuple[Any, Any]:
    """Outputs and gradients by the reference: in float32, and in a dtype."""
    arrays, function = _arrays(case, dtype), _outputs_and_gradients(case, "reference")
    own = function(*arrays)
    with jax.default_matmul_precision("float32"):
        truth = function(*(x if x is None else x.astype(jnp.float32) for x in arrays))
    return jax.device_get((truth, own))


def _error(found: Any, exact: Any) -> float:
    difference = np.asarray(found, np.float64) - np.asarray(exact, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(exact, np.float64)))


def _arrays(case: Case, dtype: str) -> tuple[Any, ...]:
    """q, k, v, the slope or None, and the output's gradient."""
    shapes = abstract_parameters(case.config)
    _, _, N, H = shapes["blocks.attention.wq"].shape
    K = shapes["blocks.attention.wk"].shape[2]
    q, k, v, do = (
        jax.random.normal(key, (case.batch, case.length, heads, H), dtype)
        for key, heads in zip(jax.random.split(jax.random.key(0), 4), (N, K, K, N), strict=True)
    )
    slope_N = jnp.array(initial_decay(N)) if isinstance(case.config, RippleConfig) else None
    return q, k, v, slope_N, do


def _outputs_and_gradients(case: Case, backend: str) -> Callable[..., tuple[Any, ...]]:
    """(q, k, v, slope, output's gradient) -> output and gradients of the rest, compiled."""
    options: dict[str, Any] = {"backend": backend}
    if isinstance(case.config, RippleConfig):
        options |= {"window": case.config.attention_window, "window_mode": case.config.window_mode}

    @jax.jit
    def function(q: Any, k: Any, v: Any, slope_N: Any, do: Any) -> tuple[Any, ...]:
        o, backward = jax.vjp(
            lambda q, k, v, slope_N: attend(q, k, v, slope_N=slope_N, **options), q, k, v, slope_N
        )
        return o, *backward(do)

    return function


def updates(sizes: Sizes) -> Measurements:
    """GPT's updates by attention and rematerialisation; what is likely to be used comes first."""
    pairs = [(backend, remat) for backend in serving() for remat in sizes.remats]
    for backend, remat in sorted(pairs, key=lambda p: p[0] != pairs[0][0] and p[1] != "dots"):
        config = replace(sizes.gpt, attention=backend, remat=remat)
        yield (
            f"GPT at {sizes.gpt_length}, remat {remat}, {backend}",
            functools.partial(_largest, config, sizes.gpt_length, sizes.batches),
        )


def long_updates(sizes: Sizes) -> Measurements:
    """Ripple's updates on long sequences."""
    for config in sizes.ripple:
        window = f"{config.window_mode} window" if config.attention_window else "no window"
        for backend in serving():
            yield (
                f"Ripple at {sizes.ripple_length}, {window}, {backend}",
                functools.partial(_largest, replace(config, attention=backend),
                                  sizes.ripple_length, sizes.ripple_batches),
            )  # fmt: skip


def _largest(config: Config, length: int, batches: tuple[int, ...]) -> Row:
    """Updates at the largest batch that fits into memory."""
    for batch in batches:
        try:
            return {"batch": batch} | _rate(config, batch, length)
        except Exception as error:
            if batch == batches[-1] or "RESOURCE_EXHAUSTED" not in str(error):
                raise
        gc.collect()
    raise ValueError("no batches")


def _rate(config: Config, batch: int, length: int) -> Row:
    """Tokens a second of a run's updates, each device with `batch` sequences."""
    data = DataConfig(batch_size=batch * jax.device_count(), sequence_length=length)
    run = TrainConfig(
        out=Path(), model=config, data=data, optim=OptimConfig(lr=1e-4, schedule="constant")
    )
    trained = abstract_parameters(config).keys() - set(run.trained_without)
    optimizer = build_optimizer(run.optim, run.steps, trained)
    layout = make_layout(run, optimizer)
    state, _ = new_state(run, optimizer, layout)
    start = time.perf_counter()
    step = lower(run, layout, make_step(run), state, donate=True).compile()
    compiling = time.perf_counter() - start
    shape = (1, data.batch_size, length)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)
    tokens_ABT = jax.device_put(tokens, layout.batch)

    def update() -> Any:
        nonlocal state
        state, metrics = step(state, tokens_ABT, tokens_ABT)
        return metrics["loss"]

    seconds, runs = timed(update)
    rate, kind = tokens.size / seconds, jax.devices()[0].device_kind
    memory, peak = step.memory_analysis(), peak_flops(kind)
    figures: Row = {"tokens_per_second": rate, "seconds": seconds, "runs": runs}
    if peak is not None:
        figures["MFU"] = rate * flops_per_token(config, length) / (peak * jax.device_count())
    if memory is not None:
        size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        figures["GiB"] = size / 2**30
    return figures | {"compile_seconds": compiling}


def attention(sizes: Sizes) -> Measurements:
    """Attention forward and backward in bfloat16."""
    for case in sizes.attention:
        for backend in serving():
            what = f"{case.name} {case.batch}x{case.length}, {backend}"
            yield what, functools.partial(_attention_time, case, backend)


def _attention_time(case: Case, backend: str) -> Row:
    """Milliseconds, and model FLOP/s: 12 * H a head, query and key that it sees."""
    arrays, function = _arrays(case, "bfloat16"), _outputs_and_gradients(case, backend)
    seconds, runs = timed(lambda: function(*arrays))
    flops = 12 * arrays[0].size * mean_keys(case.config, case.length)
    return {"ms": 1e3 * seconds, "TFLOP_per_second": flops / seconds / 1e12, "runs": runs}


def decoding(sizes: Sizes) -> Measurements:
    """GPT's tokens a second, and the bytes of weights that they read."""
    for batch in (1, 8):
        yield f"GPT, batch {batch}", functools.partial(_decoding_rate, sizes, batch)


def _decoding_rate(sizes: Sizes, batch: int) -> Row:
    """Figures without the prompt's; each step reads every weight once, whatever the batch."""
    build: Any = MODELS[model_name(sizes.gpt)][1]
    model = build(sizes.gpt, key=jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(prepared(model)))
    generator, rates = Generator(model), []
    shape = (batch, sizes.prompt)
    prompts = list(np.random.default_rng(0).integers(0, sizes.gpt.vocab_size, shape))
    timed(lambda: rates.append(
        generator(prompts, max_new_tokens=sizes.new, sampling=Sampling(temperature=0.0))[1]
        .tokens_per_second
    ))  # fmt: skip
    rate = statistics.median(rates[1:])
    figures: Row = {"tokens_per_second": rate, "weights_GB_per_second": size * rate / batch / 1e9}
    known = chip(jax.devices()[0].device_kind)
    if known is not None:
        figures["of_the_bandwidth"] = size * rate / batch / known.bandwidth
    return figures | {"runs": len(rates) - 1}


def timed(function: Callable[[], Any]) -> tuple[float, int]:
    """Median seconds of some runs after one that is not counted, and how many they are."""
    jax.block_until_ready(function())
    seconds: list[float] = []
    while not seconds or (len(seconds) < RUNS and sum(seconds) < SECONDS):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), len(seconds)


if __name__ == "__main__":
    tyro.cli(main)
