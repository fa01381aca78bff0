"""The rungs of the parity ladder: what both halves are asked, and how their answers compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from convert.parity.compare import (
    MULTIPLE_LIMIT,
    Row,
    compare,
    difference,
    obstacle,
)
from convert.parity.subject import Subject, identical
from convert.reader import sha256
from convert.rules import Leaf, leaves
from convert.tables import TABLES
from convert.transform import torch_arrays
from jaxslm.models import Config, model_name

# Mean and spread of what the norm rung is given: a mean far above the spread shows a variance that
# cancels; a tiny spread shows epsilon.
NORM_INPUTS = ((0.0, 1.0), (0.0, 1e-3), (1e4, 1.0), (-3e4, 1e2))
# A gradient this far below the model's largest is rounding noise (a key bias has none at all).
NOISE = 1e-4
TOKENS, MOST_SEQUENCES = 256, 16  # in a forward pass; one sequence may have more tokens
HEATMAP_ROWS, HEATMAP_COLUMNS, HEATMAPS = 32, 64, 4

Gradients = Mapping[str, np.ndarray | None]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What both halves are given.

    Attributes:
        tokens_BT: int64 tokens, one more than the longest length; shorter sequences are cut of it.
        lengths: of the forward passes.
        gradient_lengths: of the backward passes.
        gradient_samples: backward passes over other tokens at each length, at most.
        norm_input: float64 [NORM_INPUTS, rows, D] for the norm rung.
        prompt: number of tokens that greedy decoding starts from.
        decoded: number of greedy tokens.
    """

    tokens_BT: np.ndarray
    lengths: tuple[int, ...]
    gradient_lengths: tuple[int, ...]
    gradient_samples: int
    norm_input: np.ndarray
    prompt: int
    decoded: int

    def lengths_in(self, dtype: str) -> tuple[int, ...]:
        """All in float64; the two ends elsewhere, where only precision is in doubt."""
        every = self.lengths
        return every if dtype == "float64" else tuple(sorted({every[0], every[-1]}))

    def tokens(self, length: int) -> np.ndarray:
        """Sequences [B, length]; a long one comes alone."""
        return self.samples(length)[0][0]

    def samples(self, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens and targets [B, length] of the backward passes, each over other tokens."""
        flat = self.tokens_BT.reshape(-1)
        batch = min(batch_size(length), flat.size // (length + 1))
        size = batch * (length + 1)
        cut = [flat[i * size : (i + 1) * size] for i in range(self.gradient_samples)]
        whole = [part.reshape(batch, length + 1) for part in cut if part.size == size]
        # Contiguous, because originals take views of their targets.
        contiguous = np.ascontiguousarray
        return [(contiguous(part[:, :-1]), contiguous(part[:, 1:])) for part in whole]


def batch_size(length: int) -> int:
    """How many sequences make enough numbers that no error hangs on few."""
    return min(max(1, TOKENS // length), MOST_SEQUENCES)


class Side(Protocol):
    """Either half: `convert.parity.torch_side.TorchSide` or `convert.parity.jax_side.JaxSide`."""

    dtype: str

    def activations(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Embedding, attention [L, ...], block [L, ...], final_norm and logits."""
        ...

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [B, T, V]."""
        ...

    def final_norm(self, x: np.ndarray) -> np.ndarray:
        """The last norm applied to x [..., D]."""
        ...

    def loss_and_gradients(
        self, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, Gradients]:
        """Mean cross-entropy, and the gradient of every torch key."""
        ...

    def parameters(self) -> dict[str, np.ndarray]:
        """Every parameter by torch key, tied ones once."""
        ...

    def adamw_update(
        self, settings: Mapping[str, Any], length: int, group: Sequence[Leaf]
    ) -> dict[str, np.ndarray]:
        """What one AdamW step from the last gradients adds, in float64, by torch key."""
        ...


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One half's answers in one dtype; keys are lengths where there are several."""

    norm: np.ndarray
    activations: dict[int, dict[str, np.ndarray]]
    loss: dict[int, np.ndarray]
    gradients: dict[int, Gradients]
    more_gradients: dict[int, list[Gradients]]  # over the other samples
    greedy: np.ndarray  # [decoded] tokens
    greedy_logits: np.ndarray  # [decoded, V]

    def all_gradients(self, length: int) -> list[Gradients]:
        """Of every sample, the first first."""
        return [self.gradients[length], *self.more_gradients[length]]


def measure(side: Side, inputs: Inputs) -> Measured:
    """Asks one half everything."""
    loss, gradients, more = {}, {}, {}
    for length in inputs.gradient_lengths:
        first, *others = inputs.samples(length)
        more[length] = [side.loss_and_gradients(*sample)[1] for sample in others]
        loss[length], gradients[length] = side.loss_and_gradients(*first)
    greedy, greedy_logits = _decode(side, inputs)
    return Measured(
        norm=side.final_norm(inputs.norm_input),
        activations={n: side.activations(inputs.tokens(n)) for n in inputs.lengths_in(side.dtype)},
        loss=loss,
        gradients=gradients,
        more_gradients=more,
        greedy=greedy,
        greedy_logits=greedy_logits,
    )


def _decode(side: Side, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens by full forward passes over one padded length, so that JAX compiles once."""
    sequence = np.zeros((1, inputs.prompt + inputs.decoded - 1), np.int64)
    sequence[0, : inputs.prompt] = inputs.tokens_BT[0, : inputs.prompt]
    tokens, rows = [], []
    for step in range(inputs.decoded):
        at = inputs.prompt + step
        rows.append(side.logits(sequence)[0, at - 1])
        tokens.append(int(np.argmax(rows[-1])))
        if at < sequence.shape[1]:
            sequence[0, at] = tokens[-1]
    return np.array(tokens), np.stack(rows)


def weight_rows(subject: Subject) -> list[Row]:
    """Whether the way back gives every byte of the checkpoint's tensors.

    Of a model folder the checkpoint is known by the digests in its parity.json; without those
    there is nothing to compare with, and no row.
    """
    back = torch_arrays(subject.config, subject.arrays)
    if subject.digests is None:
        digests = {key: sha256(array) for key, array in subject.torch_state.items()}
    else:
        digests = subject.digests
    same = identical(back, digests)
    return [
        Row(rung="weights", tensor=key, dtype="bits", error=wrong, measure=wrong, limit=0.0,
            passed=not wrong, note="bytes differ after torch -> JAX -> torch" if wrong else "")
        for key in (sorted(back.keys() | digests.keys()) if digests else ())
        for wrong in [float(key not in same)]
    ]  # fmt: skip


def rope_rows(
    ours: tuple[np.ndarray, np.ndarray], torchs: tuple[np.ndarray, np.ndarray]
) -> list[Row]:
    """Our tables against torch's, in float32 units in the last place of angle and cosine."""
    rows = []
    for name, mine, theirs in zip(("cosine", "sine"), ours, torchs, strict=True):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        error = difference(mine, theirs, 1.0)
        if mine.shape == theirs.shape:
            # One unit of the frequency moves the angle by position x frequency units.
            angles = np.arange(len(mine))[:, None] * np.ones_like(mine)
            measure = float(np.max(np.abs(mine - theirs) / (2.0**-23 * (1 + angles))))
        else:
            measure = np.inf
        rows.append(
            Row(rung="rope table", tensor=name, dtype="float32", error=error, measure=measure,
                limit=2.0, passed=measure <= 2.0, note="in units in the last place")
        )  # fmt: skip
    return rows


def compare_sides(
    config: Config, dtype: str, ours: Measured, truth: Measured, same: Measured | None
) -> list[Row]:
    """All rows of one dtype; `same` is torch in that dtype, None for float64."""
    pick = (lambda get: None) if same is None else (lambda get: get(same))
    rows = [
        compare("norm", dtype, ours.norm[kind], truth.norm[kind],
                pick(lambda m, k=kind: m.norm[k]),
                note=f"inputs of mean {mean:g} and spread {spread:g}")
        for kind, (mean, spread) in enumerate(NORM_INPUTS)
    ]  # fmt: skip
    for length in ours.activations:
        rows += _activation_rows(
            dtype, length, ours.activations[length], truth.activations[length],
            pick(lambda m, n=length: m.activations[n]),
        )  # fmt: skip
    for length in truth.loss:
        rows.append(
            compare("loss", dtype, ours.loss[length], truth.loss[length],
                    pick(lambda m, n=length: m.loss[n]), length=length)
        )  # fmt: skip
        rows += _gradient_rows(
            config, dtype, length, ours.all_gradients(length), truth.all_gradients(length),
            pick(lambda m, n=length: m.all_gradients(n)),
        )  # fmt: skip
    return [*rows, _greedy_row(dtype, ours, truth, same)]


def _activation_rows(
    dtype: str,
    length: int,
    ours: Mapping[str, np.ndarray],
    truth: Mapping[str, np.ndarray],
    same: Mapping[str, np.ndarray] | None,
) -> list[Row]:
    rows = []
    for name, rung in (
        ("embedding", "embedding"),
        ("final_norm", "final norm"),
        ("logits", "logits"),
    ):
        if name in truth:
            rows.append(
                compare(rung, dtype, ours[name], truth[name], None if same is None else same[name],
                        time_axis=1, length=length)
            )  # fmt: skip
    for name, rung in (("attention", "attention"), ("block", "mlp")):
        for layer in range(len(truth.get(name, ()))):
            rows.append(
                compare(rung, dtype, ours[name][layer], truth[name][layer],
                        None if same is None else same[name][layer],
                        time_axis=1, layer=layer, length=length)
            )  # fmt: skip
    return rows


def largest_number(gradient: np.ndarray | None) -> float:
    """The largest magnitude in a gradient, without a copy; 0 where there is none."""
    return 0.0 if gradient is None else max(float(gradient.max()), -float(gradient.min()))


def _gradient_rows(
    config: Config,
    dtype: str,
    length: int,
    ours: Sequence[Gradients],
    truth: Sequence[Gradients],
    same: Sequence[Gradients] | None,
) -> list[Row]:
    """Float64 per torch tensor of the first sample, other dtypes per parameter of ours, over all.

    A parameter gathers a tensor's likes over layers and heads, and samples over tokens, so that
    the error of a few numbers, such as the heads' decays, is not held against luck. A tensor that
    torch gives no gradient must have none of ours.
    """
    rows = []
    known = {key: gradient for key, gradient in truth[0].items() if gradient is not None}
    largest = max(largest_number(gradient) for gradient in known.values())
    for key in sorted(truth[0].keys() - known.keys()):
        leaked = float(np.abs(_present(ours[0], key)).max())
        rows.append(
            Row(rung="gradient", tensor=key, dtype=dtype, length=length, error=leaked,
                measure=leaked, limit=0.0, passed=leaked == 0.0,
                note="torch gives this tensor no gradient")
        )  # fmt: skip
    if same is None:
        for key, theirs in known.items():
            scale = max(float(np.abs(theirs).max()), NOISE * largest)
            rows.append(
                compare("gradient", dtype, _present(ours[0], key), theirs,
                        scale=scale, tensor=key, length=length)
            )  # fmt: skip
        return rows
    for leaf in leaves(TABLES[model_name(config)], config):
        keys = [part.key for part in leaf.parts if part.key in known]
        if not keys:
            continue
        mine, theirs, torchs = (
            np.concatenate([_present(one, key).reshape(-1) for one in half for key in keys])
            for half in (ours, truth, same)
        )
        scale = max(float(np.linalg.norm(theirs)) / theirs.size**0.5, NOISE * largest)
        rows.append(
            compare("gradient", dtype, mine, theirs, torchs,
                    scale=scale, tensor=leaf.path, length=length)
        )  # fmt: skip
    return rows


def _present(gradients: Gradients, key: str) -> np.ndarray:
    gradient = gradients[key]
    if gradient is None:
        raise TypeError(f"a side that must gives no gradient for {key}")
    return gradient


def _greedy_row(dtype: str, ours: Measured, truth: Measured, same: Measured | None) -> Row:
    """Greedy tokens against torch's in float64; where they part, whether by more than noise."""
    if ours.greedy.shape != truth.greedy.shape or ours.greedy.size == 0:
        raise TypeError("the halves decoded different numbers of tokens")
    wrong = np.flatnonzero(ours.greedy != truth.greedy)
    row = Row(rung="greedy tokens", dtype=dtype, error=0.0, measure=0.0, limit=0.0, passed=True,
              note=f"{ours.greedy.size} of {ours.greedy.size} equal")  # fmt: skip
    reason = obstacle(ours.greedy_logits, truth.greedy_logits)
    if reason:
        return replace(row, error=np.inf, measure=np.inf, passed=False, note=reason)
    if wrong.size == 0:
        return row
    step = int(wrong[0])
    logits = truth.greedy_logits[step].astype(np.float64)
    margin = float(logits[truth.greedy[step]] - logits[ours.greedy[step]])
    noise = 0.0
    if same is not None and (same.greedy[:step] == truth.greedy[:step]).all():
        noise = MULTIPLE_LIMIT * float(np.abs(same.greedy_logits[step] - logits).max())
    note = (
        f"parts at token {step + 1}: torch in float64 prefers {truth.greedy[step]} to "
        f"{ours.greedy[step]} by {margin:.2e}; noise reaches {noise:.2e}"
    )
    passed = margin <= noise < np.inf
    return Row(rung="greedy tokens", dtype=dtype, error=margin, measure=margin, limit=noise,
               passed=passed, first_position=step, note=note)  # fmt: skip


def heatmaps(ours: Measured, truth: Measured) -> dict[str, dict[str, list[list[float]]]]:
    """The tensors whose gradients are furthest from torch's, difference and truth, reduced."""
    length = max(truth.gradients)
    pairs = {
        key: (ours.gradients[length][key], theirs)
        for key, theirs in truth.gradients[length].items()
        if theirs is not None and theirs.ndim == 2
    }
    far = sorted(pairs, key=lambda key: -difference(*pairs[key]))[:HEATMAPS]  # type: ignore[arg-type]
    return {
        key: {
            "difference": _reduce(np.abs(pairs[key][0] - pairs[key][1])),  # type: ignore[operator]
            "reference": _reduce(np.abs(pairs[key][1])),
        }
        for key in far
    }


def _reduce(matrix: np.ndarray) -> list[list[float]]:
    """The largest number of each block, at most HEATMAP_ROWS x HEATMAP_COLUMNS blocks."""
    rows = np.array_split(matrix, min(HEATMAP_ROWS, len(matrix)))
    columns = min(HEATMAP_COLUMNS, matrix.shape[1])
    return [[float(b.max()) for b in np.array_split(row, columns, axis=1)] for row in rows]
