"""A comparison passes only where two like tensors of finite numbers are near each other."""

import math

import numpy as np
import pytest

from convert.parity.compare import (
    EPSILON,
    FLOAT64_LIMIT,
    MULTIPLE_LIMIT,
    RUNGS,
    ParityReport,
    Row,
    compare,
    difference,
    distance,
    order,
)

TRUTH = np.array([1.0, -2.0, 4.0])
UNLIKE = {
    "column": (TRUTH[:, None], TRUTH),
    "row": (TRUTH[None], TRUTH),
    "scalar against vector": (np.array(1.0), np.ones(3)),
    "vector against scalar": (np.ones(3), np.array(1.0)),
    "one against many": (np.ones(1), np.ones(3)),
    "scalar against one": (np.array(1.0), np.ones(1)),
    "longer": (np.ones(4), np.ones(3)),
    "empty": (np.ones(0), np.ones(0)),
    "empty rows": (np.ones((0, 3)), np.ones((0, 3))),
}


def spoilt(value: float) -> np.ndarray:
    array = TRUTH.copy()
    array[1] = value
    return array


def report(*rows: Row) -> ParityReport:
    return ParityReport(
        source="s", against="a", model="gpt", config={}, parameters=1, lengths=(1,), rows=rows
    )


def row(rung: str, **fields) -> Row:
    defaults = {"dtype": "float64", "error": 0.0, "measure": 0.0, "limit": 1.0, "passed": True}
    return Row(rung=rung, **(defaults | fields))


@pytest.mark.parametrize("measure", [difference, distance])
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_never_near(measure, scale, value):
    assert measure(spoilt(value), TRUTH, scale) == math.inf
    assert measure(TRUTH, spoilt(value), scale) == math.inf
    assert measure(spoilt(value), spoilt(value), scale) == math.inf


@pytest.mark.parametrize("measure", [difference, distance])
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("pair", UNLIKE.values(), ids=UNLIKE)
def test_shapes_that_broadcast_and_nothing_at_all_are_never_near(measure, scale, pair):
    assert measure(*pair, scale) == math.inf


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("pair", UNLIKE.values(), ids=UNLIKE)
def test_row_of_unlike_tensors_fails_and_says_why(dtype, pair):
    ours, truth = pair
    made = compare("logits", dtype, ours, truth, truth, time_axis=0)
    assert not made.passed
    assert made.measure == math.inf
    assert "shape" in made.note or "nothing" in made.note


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_row_with_numbers_that_are_not_finite_fails_and_says_whose(dtype, value):
    for ours, truth, whose in (
        (spoilt(value), TRUTH, "our"), (TRUTH, spoilt(value), "torch's"),
        (spoilt(value), spoilt(value), "our"),
    ):  # fmt: skip
        made = compare("logits", dtype, ours, truth, truth, time_axis=0, note="other words")
        assert not made.passed
        assert made.note == f"1 of {whose} 3 numbers are NaN or infinite"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_row_fails_where_torch_in_the_same_dtype_is_not_finite(value):
    """Its error would be infinite, and any multiple of that is small."""
    assert not compare("logits", "float32", TRUTH + 1e-9, TRUTH, spoilt(value)).passed
    assert not compare("logits", "float32", TRUTH, TRUTH, spoilt(value)).passed
    assert not compare("logits", "float32", TRUTH, TRUTH, TRUTH[:2]).passed


def test_difference_is_the_largest_over_the_largest():
    assert difference(TRUTH + np.array([0.0, 0.5, -0.25]), TRUTH) == 0.5 / 4
    assert difference(TRUTH + np.array([0.0, 0.5, -0.25]), TRUTH, 2.0) == 0.5 / 2
    assert difference(TRUTH, TRUTH) == 0.0


def test_distance_is_the_root_mean_square_over_that_of_truth():
    away = np.array([0.3, 0.0, 0.4])
    assert distance(TRUTH + away, TRUTH) == pytest.approx(0.5 / math.sqrt(21))
    assert distance(TRUTH + away, TRUTH, 2.0) == pytest.approx(0.5 / math.sqrt(3) / 2)
    assert distance(TRUTH, TRUTH) == 0.0


@pytest.mark.parametrize("measure", [difference, distance])
def test_zeros_are_near_zeros_alone(measure):
    zeros = np.zeros(3)
    assert measure(zeros, zeros) == 0.0
    assert measure(zeros + np.array([0.0, 1e-300, 0.0]), zeros) == math.inf


def test_distance_of_numbers_whose_squares_vanish():
    tiny = np.array([3e-300, 0.0, 4e-300])
    assert distance(tiny, np.zeros(3), 1e-300) == pytest.approx(5 / math.sqrt(3))


@pytest.mark.parametrize("measure", [difference, distance])
def test_integers_and_narrow_floats_are_compared_in_float64(measure):
    assert measure(np.float32([1.0, 3.0]), np.array([1.0, 3.0])) == 0.0
    assert measure(np.uint8([1, 3]), np.uint8([3, 1])) > 0.1
    huge = np.full(3, 3e38, np.float32)
    assert measure(huge, -huge) == 2.0


def test_float64_passes_up_to_its_limit():
    truth = np.array([1.0, 0.5])
    at = compare("norm", "float64", truth + np.array([0.0, FLOAT64_LIMIT * (1 - 1e-5)]), truth)
    beyond = compare("norm", "float64", truth + np.array([0.0, FLOAT64_LIMIT * (1 + 1e-5)]), truth)
    assert at.passed
    assert not beyond.passed
    assert at.torch_error is None
    assert at.limit == FLOAT64_LIMIT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_pass_up_to_a_multiple_of_torchs_error(dtype):
    theirs = TRUTH * 1.01
    at = compare("norm", dtype, TRUTH * (1 + 0.01 * (MULTIPLE_LIMIT - 1e-6)), TRUTH, theirs)
    beyond = compare("norm", dtype, TRUTH * (1 + 0.01 * (MULTIPLE_LIMIT + 1e-6)), TRUTH, theirs)
    assert at.passed
    assert not beyond.passed
    assert at.measure == pytest.approx(MULTIPLE_LIMIT)
    assert at.torch_error == pytest.approx(0.01)
    truth = np.ones(2)  # powers of two, whose quotient is just the limit
    exactly = compare("norm", dtype, truth + 2.0**-4, truth, truth + 2.0**-6)
    assert exactly.measure == MULTIPLE_LIMIT
    assert exactly.passed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("truth", "roundings"), [(TRUTH, 0.5), (np.array(2.0), 1.0)])
def test_where_torch_is_exact_ours_may_be_off_by_roundings(dtype, truth, roundings):
    """One number may be a whole rounding off, many are half of one on average."""
    allowed = MULTIPLE_LIMIT * roundings * EPSILON[dtype]
    assert compare("norm", dtype, truth * (1 + 0.99 * allowed), truth, truth).passed
    assert not compare("norm", dtype, truth * (1 + 1.01 * allowed), truth, truth).passed


def test_other_dtypes_need_torch_in_the_same():
    with pytest.raises(TypeError, match="same dtype"):
        compare("norm", "float32", TRUTH, TRUTH)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_first_position_is_the_first_that_departs(dtype):
    truth = np.random.default_rng(0).standard_normal((2, 5, 3))
    ours = truth.copy()
    ours[1, 3:, 2] += 1.0
    made = compare("mlp", dtype, ours, truth, truth, time_axis=1, layer=1, length=5)
    assert made.first_position == 3
    assert (made.layer, made.length) == (1, 5)
    ours[0, 2, 0] = math.nan
    assert compare("mlp", dtype, ours, truth, truth, time_axis=1).first_position == 2
    ours[0, 1, 0] = math.inf
    assert compare("mlp", dtype, ours, truth, truth, time_axis=1).first_position == 1
    assert compare("mlp", dtype, truth, truth, truth, time_axis=1).first_position is None
    assert compare("mlp", dtype, ours, truth, truth).first_position is None


def test_order_climbs_layer_by_layer_and_rung_by_rung():
    climbed = [
        row("weights", dtype="bits"),
        row("rope table", dtype="float32"),
        row("norm"),
        row("norm", dtype="float32"),
        row("norm", dtype="bfloat16"),
        row("embedding"),
        *(row(rung, layer=layer, dtype=dtype) for layer in range(12)
          for rung in ("attention", "mlp") for dtype in ("float64", "float32")),
        row("final norm"),
        row("logits"),
        row("loss"),
        row("gradient"),
        row("adamw step"),
        row("trajectory"),
        row("greedy tokens"),
    ]  # fmt: skip
    assert {made.rung for made in climbed} == set(RUNGS)
    shuffled = [climbed[i] for i in np.random.default_rng(0).permutation(len(climbed))]
    assert sorted(shuffled, key=order) == climbed


def test_report_passes_only_with_rows_that_all_pass():
    good, bad = row("norm"), row("mlp", layer=3, passed=False)
    assert not report().passed
    assert report(good).passed
    assert not report(good, bad, good).passed
    assert report(good, bad, row("logits", passed=False)).first_failure is bad
    assert report(good).first_failure is None
    assert bad.place == "mlp of layer 3"
    assert row("gradient", tensor="head").place == "gradient of head"
