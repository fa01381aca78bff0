"""The counterparts give what the originals gave when the golden files were made."""

from pathlib import Path

import numpy as np
import pytest
import torch

from convert.counterparts import build
from jaxslm.models import MODELS
from tests.golden import NAMES, Golden, load
from tests.golden.make_golden import CASES, adamw_step, greedy, trace

# Other processors add up in another order; a fault moves far more.
LIMIT = 1e-12


@pytest.fixture(params=NAMES)
def golden(request) -> Golden:
    return load(request.param)


def built(golden: Golden) -> torch.nn.Module:
    config, _ = MODELS[golden.model]
    model = build(config(**golden.config)).eval()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in golden.weights.items()})
    return model.double()


def assert_near(actual: torch.Tensor, expected: np.ndarray) -> None:
    assert actual.dtype == torch.float64
    assert actual.shape == expected.shape
    scale = max(np.abs(expected).max(), 1e-6)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=LIMIT * scale)


def test_counterpart_reproduces_every_recorded_value(golden):
    model = built(golden)
    tokens_BT, targets_BT = torch.from_numpy(golden.tokens_BT), torch.from_numpy(golden.targets_BT)
    values = trace(golden.model, model, tokens_BT, targets_BT)
    for name in (
        "embedding_BTD",
        "after_attention_LBTD",
        "block_LBTD",
        "final_norm_BTD",
        "logits_BTV",
        "loss",
    ):
        assert_near(values[name], getattr(golden, name))
    assert values["gradients"].keys() == golden.gradients.keys()
    for name, gradient in values["gradients"].items():
        assert_near(gradient, golden.gradients[name])


def test_counterpart_reproduces_the_optimizer_step(golden):
    model = built(golden)
    trace(
        golden.model, model, torch.from_numpy(golden.tokens_BT), torch.from_numpy(golden.targets_BT)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = adamw_step(model)
    assert after.keys() == golden.stepped.keys()
    for name, stepped in after.items():
        # A gradient near eps steers its step by its own last digits: 1e-3 * 1e-12 * |g| / eps.
        np.testing.assert_allclose(stepped.numpy(), golden.stepped[name], rtol=0, atol=1e-9)
        moved = not torch.equal(stepped, before[name])
        assert moved == (name in golden.gradients)


def test_counterpart_reproduces_the_greedy_tokens(golden):
    prompt_P = torch.from_numpy(golden.prompt_P)
    tokens_G, _ = greedy(built(golden), prompt_P, len(golden.greedy_G))
    assert tokens_G.tolist() == golden.greedy_G.tolist()


def test_golden_weights_leave_no_parameter_at_a_special_value(golden):
    for name, weight in golden.weights.items():
        assert weight.dtype == np.float32, name
        assert not np.isin(weight, [0.0, 1.0]).any(), name
        assert weight.size == 1 or np.unique(weight).size > 1, name


def test_golden_decays_have_both_signs_and_gradients_only_under_a_window():
    for name in ("ripple_full", "ripple_window", "ripple_pow2"):
        golden = load(name)
        decays = [key for key in golden.weights if key.endswith("decay_factor")]
        assert {bool(golden.weights[key][0] > 0) for key in decays} == {True, False}
        with_gradient = [key for key in decays if key in golden.gradients]
        assert with_gradient == (decays if name == "ripple_window" else [])


def test_golden_files_are_those_the_script_makes_and_small():
    folder = Path(__file__).parent.parent / "golden"
    files = sorted(folder.glob("*.npz"))
    assert [file.stem for file in files] == sorted(NAMES) == sorted(CASES)
    assert sum(file.stat().st_size for file in files) < 1_000_000
    for name in NAMES:
        assert load(name).config == CASES[name]
