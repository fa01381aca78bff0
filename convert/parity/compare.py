"""How two tensors are compared, what a comparison says, and what a whole check says."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

RUNGS = (
    "weights",
    "rope table",
    "norm",
    "embedding",
    "attention",
    "mlp",
    "final norm",
    "logits",
    "loss",
    "gradient",
    "adamw step",
    "trajectory",
    "greedy tokens",
)
FLOAT64_LIMIT = 1e-10  # relative error against torch in float64
TRAJECTORY_LIMIT = 1e-9  # the same of the losses of a training trajectory
MULTIPLE_LIMIT = 4.0  # error as a multiple of torch's own in the same dtype
UNUSABLE = "NaN or infinite"
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        rung: one of RUNGS.
        layer: number of the layer, where the rung has one per layer.
        tensor: its torch key where the rung has one per tensor, or the path of the parameter of
            ours that gathers several (gradients in other dtypes than float64); of a trajectory,
            what is compared.
        dtype: "float64", "float32", "bfloat16" or "bits".
        length: sequence length in tokens.
        error: difference to torch in float64: in float64 the largest one relative to the largest
            number, in other dtypes the root mean square relative to that of the numbers.
        torch_error: the same of torch in this dtype; None in float64.
        measure: what is held against the limit: the error, or its multiple of torch's own.
        limit: largest measure that passes.
        passed: whether it does; never with NaN.
        first_position: first position in the sequence that departs; of a trajectory, first step.
        note: what else there is to say.
    """

    rung: str
    layer: int | None = None
    tensor: str | None = None
    dtype: str
    length: int | None = None
    error: float
    torch_error: float | None = None
    measure: float
    limit: float
    passed: bool
    first_position: int | None = None
    note: str = ""

    @property
    def place(self) -> str:
        """The rung with its layer or tensor, in words."""
        parts = [self.rung]
        parts += [f"of layer {self.layer}"] if self.layer is not None else []
        parts += [f"of {self.tensor}"] if self.tensor is not None else []
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The trajectory that both sides trained along.

    Attributes:
        words: the recipe, where it starts, and on what.
        start: updates done before the first of these.
        steps: updates.
        half: the step at which the state changes sides.
        length: tokens in a sequence.
        batch_size: sequences in an update.
        accumulation: microbatches in an update.
        rates: learning rate of each step.
        clipped: steps whose gradient was clipped.
        uneven: steps whose microbatches hold unequal numbers of targets that count.
        furthest: torch key of the tensor that is furthest from torch's in float64, measured by how
            far it has come.
        losses: loss of each step, by "torch float64", "JAX float64" and so on.
        norms: likewise the gradient's norm before clipping.
    """

    words: str
    start: int
    steps: int
    half: int
    length: int
    batch_size: int
    accumulation: int
    rates: list[float]
    clipped: list[int]
    uneven: list[int]
    furthest: str
    losses: dict[str, list[float]]
    norms: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The result of a check.

    Attributes:
        source: what was checked.
        against: the torch class that it was checked against.
        model: "lumen", "gpt" or "ripple".
        config: the model's config fields.
        parameters: number of parameters, tied ones once.
        lengths: sequence lengths of the forward passes.
        rows: every comparison, in the order of the ladder.
        cause: likely cause of the first failure.
        heatmaps: torch key -> difference to torch in float32 and the weights' gradient, reduced
            to at most 32 x 64 blocks: {"difference": [[...]], "reference": [[...]]}.
        training: the training trajectory, where one was compared.
        versions: of python and the libraries.
        seconds: wall time.
    """

    source: str
    against: str
    model: str
    config: dict[str, Any]
    parameters: int
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]
    cause: str | None = None
    heatmaps: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    training: Training | None = None
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def first_failure(self) -> Row | None:
        """The first row of the ladder that fails."""
        return next((row for row in self.rows if not row.passed), None)

    @property
    def passed(self) -> bool:
        """Whether there are rows and all pass."""
        return bool(self.rows) and all(row.passed for row in self.rows)


def obstacle(ours: np.ndarray, truth: np.ndarray) -> str:
    """Why two tensors cannot be compared, in words; empty if they can."""
    if ours.shape != truth.shape:
        return f"ours has shape {list(ours.shape)}, torch's {list(truth.shape)}"
    if ours.size == 0:
        return "there is nothing to compare"
    for whose, array in (("our", ours), ("torch's", truth)):
        count = array.size - np.count_nonzero(np.isfinite(array))
        if count:
            return f"{count} of {whose} {array.size} numbers are {UNUSABLE}"
    return ""


def difference(ours: np.ndarray, truth: np.ndarray, scale: float | None = None) -> float:
    """Largest |ours - truth| over `scale` (the largest |truth| if None); infinite if it cannot be.

    Tensors of unequal shapes are never broadcast against each other, an empty comparison is no
    comparison, and NaN or infinities on either side are as far apart as can be.
    """
    if obstacle(ours, truth):
        return math.inf
    ours, truth = ours.astype(np.float64, copy=False), truth.astype(np.float64, copy=False)
    largest = float(np.abs(ours - truth).max())
    if largest == 0.0:
        return 0.0
    scale = float(np.abs(truth).max()) if scale is None else scale
    return largest / scale if scale > 0.0 else math.inf


def distance(ours: np.ndarray, truth: np.ndarray, scale: float | None = None) -> float:
    """Root mean square of ours - truth over that of truth (or `scale`); infinite as `difference`.

    The measure of rounding: unlike the largest of many errors it does not hang on one element.
    """
    largest = difference(ours, truth, 1.0)
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    ours, truth = ours.astype(np.float64, copy=False), truth.astype(np.float64, copy=False)
    # Over the largest, so that squares of small numbers do not vanish.
    away = largest * float(np.linalg.norm((ours - truth) / largest)) / math.sqrt(ours.size)
    scale = float(np.linalg.norm(truth)) / math.sqrt(truth.size) if scale is None else scale
    return away / scale if scale > 0.0 else math.inf


def compare(
    rung: str,
    dtype: str,
    ours: np.ndarray,
    truth: np.ndarray,
    torch_same: np.ndarray | None = None,
    *,
    scale: float | None = None,
    exact_limit: float = FLOAT64_LIMIT,
    time_axis: int | None = None,
    note: str = "",
    **where: Any,
) -> Row:
    """One row: ours against torch in float64 and, in other dtypes, against torch's own error.

    Args:
        rung: one of RUNGS.
        dtype: of ours.
        ours: our tensor.
        truth: torch's in float64.
        torch_same: torch's in `dtype`; needed unless that is float64.
        scale: see `difference` and `distance`.
        exact_limit: of the error in float64.
        time_axis: axis of positions, to name the first that departs.
        note: what else there is to say; where the two cannot be compared, the row says why.
        **where: layer, tensor and length of the row.
    """
    if dtype == "float64":
        error, torch_error = difference(ours, truth, scale), None
        measure, limit = error, exact_limit
    else:
        if torch_same is None:
            raise TypeError("torch's result in the same dtype is needed")
        error, torch_error = distance(ours, truth, scale), distance(torch_same, truth, scale)
        # Where torch is exact by luck or by nature, one rounding is still no fault of ours.
        floor = EPSILON[dtype] if ours.size == 1 else EPSILON[dtype] / 2
        measure, limit = error / max(torch_error, floor), MULTIPLE_LIMIT
        if not math.isfinite(torch_error):
            measure = math.inf
    first = None
    if measure > limit and time_axis is not None and ours.shape == truth.shape and ours.size:
        reach = np.abs(truth).max() if scale is None else scale
        allowed = limit * reach * (1.0 if torch_error is None else max(torch_error, 1e-7))
        others = tuple(axis for axis in range(ours.ndim) if axis != time_axis)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            wrong = ~(np.abs(ours - truth).max(axis=others) <= allowed)
        first = int(np.argmax(wrong)) if wrong.any() else None
    return Row(
        rung=rung, dtype=dtype, error=error, torch_error=torch_error, measure=measure, limit=limit,
        passed=measure <= limit, first_position=first, note=obstacle(ours, truth) or note, **where,
    )  # fmt: skip


def order(row: Row) -> tuple[int, int, int, int]:
    """Sorts rows as the ladder is climbed: layer by layer, float64 before the other dtypes."""
    inner = RUNGS.index(row.rung)
    first, last = RUNGS.index("attention"), RUNGS.index("mlp")
    outer = first if first <= inner <= last else inner
    layer = -1 if row.layer is None else row.layer
    return outer, layer, inner, ("bits", "float64", "float32", "bfloat16").index(row.dtype)
