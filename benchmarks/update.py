"""Updates and forward passes: ours against torch, eager and compiled, and the obvious JAX.

The sides come in turn, several times. A visit makes CHECKED updates from the same weights, whose
losses must be those of the other sides, and times all but the first; then forward passes likewise.
An update is forward, loss, backward, clipping and AdamW. No dropout.
"""

import copy
import functools
import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from benchmarks import obvious
from benchmarks.measure import Timing
from convert.counterparts import build
from convert.transform import to_torch
from jaxslm.files import atomic_output
from jaxslm.models import MODELS, Config, GPTConfig, LumenConfig, RippleConfig, model_name
from jaxslm.weights import from_arrays, to_arrays
from train.config import DataConfig, OptimConfig, TrainConfig
from train.optimizer import build_optimizer
from train.program import lower
from train.setup import make_layout
from train.step import initial_state, make_step

OPTIM = OptimConfig(lr=1e-4, schedule="constant")
DTYPES = ("float32", "bfloat16")
OURS, EAGER, COMPILED, OBVIOUS = "jaxslm", "torch", "torch.compile", "obvious JAX"
REFERENCES = (EAGER, COMPILED, OBVIOUS)
CHECKED = 3  # updates of a visit
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}  # of a loss, relative
Weights = dict[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]  # inputs and targets, int32 [B, T]


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        name: in the table.
        config: of the model, without dropout.
        batch: sequences.
        length: positions in each.
        unroll: layers in a turn of the loop over them in our update; forward passes loop.
        targets: least time of a reference over that of ours, by (work, dtype, reference).
        whole: torch.compile takes the model as a whole; else each block, where the whole would take
            minutes.
        donates: the obvious JAX donates its state, without which the process takes 15 GiB, not 11.
        compiles_within: seconds that our update may take to compile; None for no such row.
    """

    name: str
    config: Config
    batch: int
    length: int
    unroll: int
    targets: dict[tuple[str, str, str], float]
    whole: bool = True
    donates: bool = False
    compiles_within: float | None = None


def _targets(eager: float, compiled: float, narrow: float) -> dict[tuple[str, str, str], float]:
    return {
        ("update", "float32", EAGER): eager,
        ("update", "float32", COMPILED): compiled,
        ("update", "bfloat16", EAGER): narrow,
        ("forward", "float32", EAGER): 1.0,
    }


# Updates unroll the layers, as torch does. A loop over them keeps bfloat16 in float32 on a CPU: an
# update of GPT takes 5.6 s with it and 4.6 s without, of Ripple 1.56 and 1.17 s. Forward passes are
# 2 to 7 % faster with the loop.
CASES = (
    Case("Lumen 8x1024", LumenConfig(), 8, 1024, 4, _targets(2.0, 1.2, 1.2)),
    Case("Ripple 16x256", RippleConfig(dropout=0.0), 16, 256, 6, _targets(1.6, 1.6, 1.2)),
    Case(
        "Ripple, window 256, 2x2048", RippleConfig(dropout=0.0, attention_window=256), 2, 2048, 6,
        _targets(3.0, 2.4, 2.0), whole=False,
    ),
    Case(
        "GPT-298M 1x512", GPTConfig(), 1, 512, 24, _targets(1.0, 1.0, 1.0), whole=False,
        donates=True, compiles_within=25.0,
    ),
)  # fmt: skip


def update(
    room: Path, cases: Sequence[Case] = CASES, rounds: int = 2, *, compiled: bool = True
) -> Iterator[dict[str, Any]]:
    """Rows of the table; the ratios are drawn to update.png in `room`.

    Args:
        room: folder for the figure.
        cases: what is measured.
        rounds: visits of each side.
        compiled: with torch.compile in float32, where it works.

    Raises:
        RuntimeError: the sides' losses differ.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA has
    if compiled and (obstacle := _compiler_is_missing()):
        print(f"torch.compile is left out: {obstacle}")
        compiled = False
    rows: list[dict[str, Any]] = []
    for case in cases:
        for dtype in DTYPES:
            found = list(measure(case, dtype, rounds, compiled))
            rows += found
            yield from found
    draw(rows, room / "update.png")


class _Ours:
    """The update as `train.loop` compiles it, and the forward pass."""

    name = OURS

    def __init__(self, case: Case, config: Config, weights: Weights, batch: Batch):
        data = DataConfig(batch_size=case.batch, sequence_length=case.length)
        unrolled: Any = replace(config, unroll=case.unroll)
        run = TrainConfig(out=Path(), model=unrolled, data=data, optim=OPTIM)
        trained, self._frozen = weights.keys() - set(run.trained_without), run.trained_without
        self._weights, self._optimizer = weights, build_optimizer(run.optim, run.steps, trained)
        layout = make_layout(run, self._optimizer)
        start = time.perf_counter()
        self._step = lower(run, layout, make_step(run), layout.state, donate=True).compile()
        self.compile_seconds = time.perf_counter() - start
        self._places = jax.tree.map(lambda leaf: leaf.sharding, layout.state)
        self._batch = [jax.device_put(part[None], layout.batch) for part in batch]
        self._logits = jax.jit(lambda params, tokens: from_arrays(config, params)(tokens))

    def start(self) -> None:
        """The state before the first update."""
        params = {path: jnp.array(w) for path, w in self._weights.items()}  # they are donated
        state = initial_state(params, self._optimizer, self._frozen)
        self._state = jax.device_put(state, self._places)

    def stop(self) -> None:
        """Leaves the memory to the others."""
        del self._state

    def update(self) -> float:
        """One update; its loss."""
        self._state, metrics = self._step(self._state, *self._batch)
        return metrics["loss"].item()

    def forward(self) -> None:
        """One forward pass."""
        self._logits(self._state.params, self._batch[0][0]).block_until_ready()


class _Obvious:
    """`benchmarks.obvious`; methods as those of `_Ours`."""

    name = OBVIOUS

    def __init__(self, case: Case, config: Config, weights: Weights, batch: Batch):
        self._weights, self._batch = weights, jax.device_put(batch)
        self._optimizer = obvious.make_optimizer(OPTIM, weights)
        self._update = obvious.make_update(config, self._optimizer, donate=case.donates)
        self._logits = jax.jit(functools.partial(obvious.logits, config))

    def start(self) -> None:
        self._params = {path: jnp.array(w) for path, w in self._weights.items()}
        self._state = self._optimizer.init(self._params)

    def stop(self) -> None:
        del self._params, self._state

    def update(self) -> float:
        self._params, self._state, loss = self._update(self._params, self._state, *self._batch)
        return loss.item()

    def forward(self) -> None:
        self._logits(self._params, self._batch[0]).block_until_ready()


class _Torch:
    """The torch model in eager mode, bfloat16 by autocast; methods as those of `_Ours`.

    AdamW is the fused one: 5 ms against 17 ms of the default for Ripple's 6.3M parameters here.
    """

    name = EAGER

    def __init__(self, config: Config, weights: Weights, batch: Batch):
        self._module, self._config, self._weights = build(config), config, weights
        self._batch = [torch.from_numpy(part).long() for part in batch]
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bfloat16")
        self._parameters = list(self._module.parameters())
        vectors = [p for p in self._parameters if p.dim() < 2]
        matrices = [p for p in self._parameters if p.dim() >= 2]
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
        self._optimizer = torch.optim.AdamW(
            groups, OPTIM.lr, OPTIM.betas, OPTIM.eps, OPTIM.weight_decay, fused=True
        )

    def compiled(self, *, whole: bool) -> "_Torch":
        """The same parameters and optimizer by torch.compile."""
        twin, shared = copy.copy(self), {id(p): p for p in self._parameters}
        twin.name, twin._module = COMPILED, copy.deepcopy(self._module, shared)
        blocks = next(part for part in twin._module.modules() if isinstance(part, nn.ModuleList))
        for part in [twin._module] if whole else blocks:
            part.compile()
        return twin

    def start(self) -> None:
        self._module.load_state_dict(to_torch(from_arrays(self._config, self._weights)))

    def stop(self) -> None:
        self._optimizer.state.clear()

    def update(self) -> float:
        with self._autocast:
            _, loss = self._module(*self._batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, OPTIM.clip or math.inf)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def forward(self) -> None:
        with torch.no_grad(), self._autocast:
            self._module(self._batch[0])


Side = _Ours | _Obvious | _Torch


def measure(case: Case, dtype: str, rounds: int, compiled: bool) -> Iterator[dict[str, Any]]:
    """Rows of one case in one dtype; arguments and errors are those of `update`."""
    config: Any = replace(case.config, dtype=dtype)
    model = MODELS[model_name(config)][1](config, key=jax.random.key(0))
    weights = {path: np.asarray(w) for path, w in to_arrays(model).items()}
    shape = (2, case.batch, case.length)
    inputs, targets = np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)
    given = (config, weights, (inputs, targets))
    del model

    ours, eager = _Ours(case, *given), _Torch(*given)
    if case.compiles_within and dtype == "float32":
        yield _row(
            f"compile our update, {case.name}",
            "",
            f"{ours.compile_seconds:.3g} s",
            None,
            f"under {case.compiles_within:g} s",
            ours.compile_seconds < case.compiles_within,
        )
    sides: list[Side] = [ours, eager, _Obvious(case, *given)]
    sides += [eager.compiled(whole=case.whole)] if compiled and dtype == "float32" else []
    timings = timed(sides, case, dtype, rounds)
    torch.compiler.reset()
    for work in ("update", "forward"):
        our_time = timings[OURS, work]
        for reference in (name for name in REFERENCES if (name, work) in timings):
            their_time = timings[reference, work]
            least = case.targets.get((work, dtype, reference))
            ratio = their_time.median / our_time.median
            yield _row(
                f"{work} {case.name}, {dtype}", f"{reference}: {their_time}", str(our_time), ratio,
                f"at least {least}" if least else "", least is None or ratio >= least,
            ) | {
                "case": case.name, "work": work, "dtype": dtype, "reference": reference,
                "least": least, "seconds": {reference: their_time.runs, OURS: our_time.runs},
            }  # fmt: skip


def timed(
    sides: Sequence[Side], case: Case, dtype: str, rounds: int
) -> dict[tuple[str, str], Timing]:
    """Times of updates and forward passes by (side, work), from visits of the sides in turn.

    Raises:
        RuntimeError: their losses differ.
    """
    expected: Sequence[float] = ()
    found: dict[tuple[str, str], list[float]] = {}
    for _, side in itertools.product(range(rounds), sides):
        gc.collect()
        side.start()
        losses, seconds = zip(*(_clocked(side.update) for _ in range(CHECKED)), strict=True)
        expected = expected or losses
        if not np.allclose(losses, expected, rtol=TOLERANCE[dtype], atol=0.0):
            raise RuntimeError(
                f"{case.name}, {dtype}: {side.name} has losses {losses} over the first updates, "
                f"{sides[0].name} {expected}: there is nothing to compare"
            )
        found.setdefault((side.name, "update"), []).extend(seconds[1:])
        _, seconds = zip(*(_clocked(side.forward) for _ in range(CHECKED)), strict=True)
        found.setdefault((side.name, "forward"), []).extend(seconds[1:])
        side.stop()
    return {name: Timing(tuple(seconds)) for name, seconds in found.items()}


def _clocked(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the seconds that it takes."""
    start = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start


def _compiler_is_missing() -> str | None:
    """Why torch.compile does not work here, or None."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2))
    except Exception as error:  # of many types: no compiler, no headers, no supported Python
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """How many times as fast as each reference ours is, as a PNG; targets are black lines.

    Args:
        rows: of `update`.
        path: file to write, whole or not at all, in place of an earlier one.
    """
    figure = Figure(figsize=(14, 8), layout="constrained")
    FigureCanvasAgg(figure)
    rows = [row for row in rows if row["ratio"] is not None]
    names = list(dict.fromkeys(row["case"] for row in rows))
    panels = figure.subplots(2, len(DTYPES), squeeze=False, sharex=True)
    for line, work in zip(panels, ("update", "forward"), strict=True):
        for axes, dtype in zip(line, DTYPES, strict=True):
            for number, reference in enumerate(REFERENCES):
                these = [
                    r
                    for r in rows
                    if (r["work"], r["dtype"], r["reference"]) == (work, dtype, reference)
                ]
                places = [names.index(row["case"]) + 0.27 * (number - 1) for row in these]
                bars = axes.bar(places, [row["ratio"] for row in these], 0.25, label=reference)
                axes.bar_label(bars, fmt="%.2f", fontsize=8)
                for place, row in zip(places, these, strict=True):
                    if row["least"]:
                        axes.hlines(row["least"], place - 0.13, place + 0.13, color="black")
            axes.axhline(1.0, color="grey", lw=1, ls="--")
            axes.set_xticks(range(len(names)), names)
            axes.set(title=f"{work}, {dtype}", ylabel=f"time / time of {OURS}")
    panels[0][0].legend()
    with atomic_output(path, overwrite=True) as room:
        figure.savefig(room, dpi=100, format="png")


def _row(what: str, theirs: str, ours: str, ratio: float | None, target: str, met: bool):
    return {"what": what, "torch": theirs, "jaxslm": ours, "target": target, "met": met,
            "ratio": None if ratio is None else round(ratio, 2)}  # fmt: skip
