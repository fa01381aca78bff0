"""The trajectory rung: the same training in torch and in our step, update by update.

Torch trains as the originals' loops do (`convert.parity.torch_training`). Ours is what `trainer`
builds, which is `train.trajectory.Trainer`; nothing of train/ is imported here. Dropout is off on
both sides, for their random numbers differ. At one step the state also changes sides, through the
conversion that users call: torch to JAX by a checkpoint on disk, JAX to torch by load_state_dict.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from torch import nn

from convert.optimizer import moment_arrays
from convert.parity.compare import (
    EPSILON,
    MULTIPLE_LIMIT,
    TRAJECTORY_LIMIT,
    UNUSABLE,
    Row,
    Training,
    compare,
    difference,
)
from convert.parity.torch_training import TorchTrainer, clipped_within
from convert.parity.training_plan import (
    Arrays,
    Plan,
    Trainer,
    in_words,
    learning_rate,
    read_optimizer,
    read_parameters,
)
from convert.rules import leaves
from convert.source import open_torch
from convert.tables import TABLES
from convert.transform import torch_arrays
from jaxslm.models import model_name
from jaxslm.optimizer_file import OptimizerState


def trajectory(
    plan: Plan,
    arrays: Arrays,
    build: Callable[[], nn.Module],
    *,
    tables: tuple[np.ndarray, np.ndarray] | None,
    dtypes: Sequence[str] = ("float32",),
    progress: Callable[[str], None] = lambda words: None,
) -> tuple[list[Row], Training]:
    """Trains both halves in float64 and other dtypes, and with the state changing sides on the way.

    Args:
        plan: what to train.
        arrays: parameters by path that both start from.
        build: makes the torch module.
        tables: torch's RoPE tables, for float64.
        dtypes: besides float64: "float32" or none.
        progress: told what is being done.
    """
    config, asked = plan.config, plan.asked
    optimizer = None if asked.optimizer is None else _without(asked.optimizer, plan.frozen)
    origin = torch_arrays(config, arrays)
    rows: list[Row] = []
    torchs: dict[str, _Run] = {}
    ours: dict[str, _Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("float64", *dtypes):
            progress(f"training in torch, {dtype}")
            side = TorchTrainer(build, plan, dtype, origin, optimizer)
            if dtype == "float64":
                side.plan = plan = replace(plan, recipe=clipped_within(side, plan.recipe))
            saved = Path(folder) / f"{dtype}.pt"
            torchs[dtype] = _run(side, plan, lambda side=side, to=saved: side.save(to))
            del side
            progress(f"training in JAX, {dtype}")
            with jax.enable_x64(dtype == "float64"):
                trainer = asked.trainer(
                    config, plan.recipe, steps=plan.total, batch_size=asked.batch_size,
                    sequence_length=plan.length, accumulation=asked.accumulation, dtype=dtype,
                    rope=tables if dtype == "float64" else None,
                )  # fmt: skip
                mine = _JaxTrainer(plan, trainer)
                mine.start(arrays, optimizer)
                handed: list[tuple[dict[str, np.ndarray], OptimizerState]] = []
                ours[dtype] = _run(mine, plan, lambda h=handed, mine=mine: h.append(mine.state()))
                there = _from_torch(mine, plan, saved)
            saved.unlink()
            parameters, state = handed.pop()
            side = TorchTrainer(build, plan, dtype, torch_arrays(config, parameters), state)
            back = _Losses(_updates(side, plan, plan.half, 2 * plan.half)[:, 0])
            del side, parameters, state
            rows += _rows(plan, dtype, ours[dtype], torchs, origin)
            rows += _transfer_rows(plan, dtype, torchs, there, back)
    return rows, _training(plan, torchs, ours, origin)


class _JaxTrainer:
    """Our half under the names of the torch half."""

    def __init__(self, plan: Plan, trainer: Trainer):
        self.plan, self.trainer = plan, trainer
        self.update = trainer.update

    def start(self, parameters: Arrays, optimizer: OptimizerState | None) -> None:
        """Goes on from a state."""
        if optimizer is None:
            self.trainer.load(parameters)
            return
        moments = (optimizer.first_moment, optimizer.second_moment)
        self.trainer.load(parameters, moments, optimizer.count)

    def state(self) -> tuple[dict[str, np.ndarray], OptimizerState]:
        """Parameters and optimizer at the plan's half."""
        return self.trainer.parameters(), self._optimizer(self.plan.start + self.plan.half)

    def parameters(self) -> dict[str, np.ndarray]:
        """By torch key."""
        return torch_arrays(self.plan.config, self.trainer.parameters())

    def moments(self) -> dict[str, np.ndarray]:
        """By `exp_avg.<torch key>` and so on."""
        return moment_arrays(self.plan.config, self._optimizer(self.plan.total))

    def _optimizer(self, count: int) -> OptimizerState:
        first, second = self.trainer.moments()
        return OptimizerState(
            count=count, first_moment=first, second_moment=second, groups=self.plan.groups,
            step=count,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What one half did in one dtype: losses and norms [steps], parameters and moments after."""

    losses: np.ndarray
    norms: np.ndarray
    parameters: Arrays
    moments: Arrays


def _run(side: "TorchTrainer | _JaxTrainer", plan: Plan, hand_over: Callable[[], None]) -> _Run:
    """All updates; `hand_over` is called where the state changes sides."""
    early = _updates(side, plan, 0, plan.half)
    hand_over()
    losses, norms = np.concatenate([early, _updates(side, plan, plan.half, plan.asked.steps)]).T
    return _Run(
        losses=losses, norms=norms, parameters=side.parameters(), moments=side.moments()
    )  # fmt: skip


def _updates(
    side: "TorchTrainer | _JaxTrainer", plan: Plan, first: int, last: int
) -> np.ndarray:  # fmt: skip
    """Loss and gradient norm of the steps from `first` up to `last`, [n, 2]."""
    return np.array([side.update(*plan.batch(step)) for step in range(first, last)], np.float64)


class _Losses(NamedTuple):
    """Losses after the state changed sides [half], or why it could not."""

    losses: np.ndarray
    why_not: str = ""


def _from_torch(mine: _JaxTrainer, plan: Plan, saved: Path) -> _Losses:
    """Ours from torch's checkpoint on."""
    try:
        source = open_torch(saved)
        mine.start(read_parameters(source), read_optimizer(source))
    except ValueError as error:  # diverged; or parameters in an order that cannot be told
        return _Losses(np.full(plan.half, np.nan), str(error).replace(str(saved), "torch's half"))
    return _Losses(_updates(mine, plan, plan.half, 2 * plan.half)[:, 0])


def _without(optimizer: OptimizerState, frozen: Iterable[str]) -> OptimizerState:
    """The state without moments that nothing will touch: torch would count them apart."""
    left = [
        {path: moment for path, moment in moments.items() if path not in frozen}
        for moments in (optimizer.first_moment, optimizer.second_moment)
    ]
    return replace(optimizer, first_moment=left[0], second_moment=left[1])


def _rows(
    plan: Plan, dtype: str, ours: _Run, torchs: Mapping[str, _Run], origin: Arrays
) -> list[Row]:
    """Losses, and what is left at the end."""
    truth, same, frozen = torchs["float64"], torchs[dtype], _frozen_keys(plan)
    moving = _moving(plan, origin)
    far = _apart(ours.parameters, truth.parameters, moving)[1]
    note = f"{plan.asked.steps} steps; furthest parameter: {far}"
    rows = [_losses("losses", plan, dtype, ours.losses, truth.losses, same.losses, note=note)]
    size = math.hypot(*(float(np.linalg.norm(_double(array))) for array in moving.values()))
    halves = [run.parameters for run in (ours, truth, same)]
    rows.append(_end("parameters", plan, dtype, halves, moving, size))
    kinds = (("exp_avg.", "first moments"), ("exp_avg_sq.", "second moments"))
    for name, title in kinds if dtype == "float64" else ():  # elsewhere the parameters say it
        nothing = {key: np.zeros(()) for key in truth.moments if key.startswith(name)}
        halves = [run.moments for run in (ours, truth, same)]
        rows.append(_end(title, plan, dtype, halves, nothing, None))
    for path, keys in frozen.items():
        moved = max(difference(ours.parameters[k], truth.parameters[k], 1.0) for k in keys)
        rows.append(
            Row(rung="trajectory", tensor=path, dtype=dtype, length=plan.length, error=moved,
                measure=moved, limit=0.0, passed=moved == 0.0,
                note=f"torch freezes this parameter at {plan.length} tokens")
        )  # fmt: skip
    return rows


def _transfer_rows(
    plan: Plan, dtype: str, torchs: Mapping[str, _Run], there: _Losses, back: _Losses
) -> list[Row]:
    """Losses after the state changed sides, against those of torch that went on."""
    half, steps = plan.half, slice(plan.half, 2 * plan.half)
    truth, same = (torchs[name].losses[steps] for name in ("float64", dtype))
    rows = [
        _losses(name, plan, dtype, of.losses, truth, same, first=half,
                note=f"{half} steps, converted, {half} steps")
        for name, of in (("torch, then JAX", there), ("JAX, then torch", back))
    ]  # fmt: skip
    notes = [of.why_not or row.note for row, of in zip(rows, (there, back), strict=True)]
    return [replace(row, note=note) for row, note in zip(rows, notes, strict=True)]


def _losses(
    name: str, plan: Plan, dtype: str, ours: np.ndarray, truth: np.ndarray, same: np.ndarray,
    *, first: int = 0, note: str,
) -> Row:  # fmt: skip
    """Each step's loss relative to torch's in float64: largest difference, or root mean square."""
    with np.errstate(all="ignore"):  # where torch itself diverged
        ratios = [losses / truth for losses in (ours, truth, same)]
    row = compare(
        "trajectory", dtype, *ratios, scale=1.0, exact_limit=TRAJECTORY_LIMIT, time_axis=0,
        tensor=name, length=plan.length, note=note,
    )  # fmt: skip
    at = row.first_position
    return replace(row, first_position=None if at is None else at + first)


def _end(
    name: str, plan: Plan, dtype: str, halves: list[Arrays], origin: Arrays, size: float | None
) -> Row:
    """How far ours is off in the end, as a share of the way from `origin` that torch went.

    `halves` are ours, torch's in float64 and in `dtype`. `size` is the norm of what is rounded at
    every step, None where that is no more than the way itself.
    """
    ours, truth, same = halves
    error, far = _apart(ours, truth, origin)
    note = f"as a share of the way; furthest: {far}" if size else f"furthest: {far}"
    torch_error, measure, limit = None, error, TRAJECTORY_LIMIT
    if dtype != "float64":
        torch_error = _apart(same, truth, origin)[0]
        way = math.hypot(*(_way(truth, origin, key) for key in origin))
        rounding = max(1.0, size / way) if size and way else 1.0
        measure, limit = error / max(torch_error, rounding * EPSILON[dtype] / 2), MULTIPLE_LIMIT
    if not math.isfinite(measure) or not math.isfinite(torch_error or 0.0):
        error = measure = math.inf
        note = UNUSABLE
    return Row(rung="trajectory", tensor=name, dtype=dtype, length=plan.length, error=error,
               torch_error=torch_error, measure=measure, limit=limit, passed=measure <= limit,
               note=note)  # fmt: skip


def _apart(ours: Arrays, truth: Arrays, origin: Arrays) -> tuple[float, str]:
    """Norm of the difference over that of the way from `origin`, and the key that is worst."""
    none = np.zeros(())  # a moment that only torch has
    away = {k: float(np.linalg.norm(_double(ours.get(k, none)) - _double(truth[k])))
            for k in origin}  # fmt: skip
    way = {k: _way(truth, origin, k) for k in origin}
    share = {k: a / way[k] if way[k] else math.inf if a else 0.0 for k, a in away.items()}
    total = math.hypot(*way.values())
    error = math.hypot(*away.values()) / total if total else math.inf
    return error, max(share, key=lambda k: math.inf if math.isnan(share[k]) else share[k])


def _way(truth: Arrays, origin: Arrays, key: str) -> float:
    """How far torch has come with one tensor."""
    return float(np.linalg.norm(_double(truth[key]) - _double(origin[key])))


def _double(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64, copy=False)


def _frozen_keys(plan: Plan) -> dict[str, list[str]]:
    """Torch keys of each frozen parameter."""
    rules = leaves(TABLES[model_name(plan.config)], plan.config)
    return {leaf.path: [p.key for p in leaf.parts] for leaf in rules if leaf.path in plan.frozen}


def _moving(plan: Plan, tensors: Arrays) -> Arrays:
    """Those that are trained."""
    frozen = {key for keys in _frozen_keys(plan).values() for key in keys}
    return {key: array for key, array in tensors.items() if key not in frozen}


def _training(
    plan: Plan, torchs: Mapping[str, _Run], ours: Mapping[str, _Run], origin: Arrays
) -> Training:
    """What the report says of the training itself."""
    recipe, asked, steps = plan.recipe, plan.asked, range(plan.asked.steps)
    norms = torchs["float64"].norms
    named = {f"torch {dtype}": run for dtype, run in torchs.items()}
    named |= {f"JAX {dtype}": run for dtype, run in ours.items()}
    clipped = [s for s in steps if recipe.clip is not None and norms[s] + 1e-6 > recipe.clip]
    mine, theirs = ours["float64"].parameters, torchs["float64"].parameters
    return Training(
        words=in_words(plan, len(clipped)),
        start=plan.start,
        steps=asked.steps,
        half=plan.half,
        length=plan.length,
        batch_size=asked.batch_size,
        accumulation=asked.accumulation,
        rates=[learning_rate(recipe, plan.total, plan.start + step) for step in steps],
        clipped=clipped,
        uneven=[step for step in steps if plan.is_uneven(step)],
        furthest=_apart(mine, theirs, _moving(plan, origin))[1],
        losses={name: run.losses.tolist() for name, run in named.items()},
        norms={name: run.norms.tolist() for name, run in named.items()},
    )
