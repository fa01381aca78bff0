"""The AdamW rung: one step of both halves, compared some parameters at a time."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from convert.parity.compare import EPSILON, FLOAT64_LIMIT, MULTIPLE_LIMIT, Row, distance
from convert.parity.rungs import Inputs, Measured, Side, largest_number
from convert.rules import Leaf, leaves
from convert.tables import TABLES
from jaxslm.models import Config, model_name

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GROUP = 2**23  # numbers in the parameters that take a step together


class Half(NamedTuple):
    """A side and what it measured."""

    side: Side
    measured: Measured


def update_rows(
    config: Config, dtype: str, inputs: Inputs, ours: Half, truth: Half, same: Half | None
) -> list[Row]:
    """Direction and size of one AdamW step, which is near the gradient's sign times the rate.

    Some parameters at a time: whole sets of updates would not fit beside the sides.
    """
    rows = []
    halves = [half for half in (ours, truth, same) if half is not None]
    parameters = [half.side.parameters() for half in halves]
    for length in inputs.gradient_lengths:
        if len(inputs.gradient_lengths) > 1:  # else the sides hold the gradients of just this one
            for half in halves:
                half.side.loss_and_gradients(*inputs.samples(length)[0])
        gradients = [half.measured.gradients[length] for half in halves]
        noise = FLOAT64_LIMIT * max(map(largest_number, gradients[1].values()))
        for group in _groups(leaves(TABLES[model_name(config)], config)):
            updates = [half.side.adamw_update(ADAMW, length, group) for half in halves]
            for key in updates[1]:
                steps = [
                    _Step(update[key], gradient[key], parameter[key])
                    for update, gradient, parameter in zip(
                        updates, gradients, parameters, strict=True
                    )
                ]
                rows.append(_update_row(key, dtype, length, noise, steps))
    return rows


def _groups(every: list[Leaf]) -> Iterator[list[Leaf]]:
    """Parameters in groups of up to GROUP numbers, so that small models take one step."""
    group: list[Leaf] = []
    for leaf in every:
        size = sum(math.prod(other.shape) for other in [*group, leaf])
        if group and size > GROUP:
            yield group
            group = []
        group.append(leaf)
    yield group


class _Step(NamedTuple):
    """One half's update of a tensor, and what it was made of."""

    update: np.ndarray
    gradient: np.ndarray | None
    parameter: np.ndarray

    @property
    def size(self) -> float:
        """Root mean square of the parameter."""
        return _rms(self.parameter)

    @property
    def error(self) -> float:
        """Distance to the formula on this half's own gradient."""
        return distance(self.update, _first_step(self.gradient, self.parameter))


def _update_row(key: str, dtype: str, length: int, noise: float, steps: list[_Step]) -> Row:
    """One tensor; `steps` are ours, torch's in float64 and, in other dtypes, torch's in that."""
    mine, theirs, gradient = steps[0].update, steps[1].update, steps[1].gradient
    direction, size = _direction_and_size(mine, theirs)
    if len(steps) == 2:
        error, torch_error = distance(mine, theirs), None
    else:
        # Each against the formula on its own gradients: where those are near zero the step
        # turns their last bits into full size, and they have a rung of their own.
        error, torch_error = steps[0].error, steps[2].error
    if gradient is None:
        error = measure = float(np.abs(mine).max())
        limit, note = 0.0, "torch freezes this tensor"
    elif torch_error is None and largest_number(gradient) < noise:
        # A gradient of rounding noise: the step from it may have any direction. Nothing that
        # comes out depends on such a parameter, so that it must be compared itself.
        size = abs(steps[0].size - steps[1].size) / max(steps[1].size, 1e-300)
        measure, limit = max(size, steps[0].error), FLOAT64_LIMIT
        note = f"no gradient but rounding noise: held against the formula, size off by {size:.1e}"
    elif torch_error is None:
        measure, limit = max(direction, size), FLOAT64_LIMIT
        note = f"1 - cosine {direction:.1e}, size off by {size:.1e}"
    else:
        # The step is seen as a difference of parameters, which are rounded after it.
        rounding = max(1.0, steps[1].size / max(_rms(theirs), 1e-300))
        measure = error / max(torch_error, EPSILON[dtype] * rounding)
        measure = measure if np.isfinite(torch_error) else np.inf
        limit, note = MULTIPLE_LIMIT, f"1 - cosine {direction:.1e}, size off by {size:.1e}"
    return Row(rung="adamw step", tensor=key, dtype=dtype, length=length, error=error,
               torch_error=torch_error, measure=measure, limit=limit, passed=measure <= limit,
               note=note)  # fmt: skip


def _rms(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64, copy=False).reshape(-1))) / x.size**0.5


def _first_step(gradient: np.ndarray | None, parameter: np.ndarray) -> np.ndarray:
    """The first AdamW update by its formula (Loshchilov & Hutter 2019), in float64."""
    parameter = parameter.astype(np.float64)
    if gradient is None:
        return np.zeros_like(parameter)
    g = gradient.astype(np.float64)
    return -ADAMW["lr"] * (g / (np.abs(g) + ADAMW["eps"]) + ADAMW["weight_decay"] * parameter)


def _direction_and_size(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """1 - cosine of the angle between two updates, and how far their ratio of lengths is off 1."""
    a, b = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    if ours.shape != theirs.shape or not a > 0.0 or not b > 0.0:
        return (0.0, 0.0) if a == b == 0.0 and ours.shape == theirs.shape else (np.inf, np.inf)
    cosine = float(np.vdot(ours, theirs)) / (a * b)
    return abs(1.0 - cosine), abs(a / b - 1.0)
