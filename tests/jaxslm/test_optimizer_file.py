"""optimizer.safetensors: what is written is read, and what does not fit is refused by name."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

import jaxslm
from jaxslm import GPTConfig
from jaxslm.optimizer_file import OPTIMIZER_FILE, OptimizerState, map_optimizer, write_optimizer
from jaxslm.safetensors_io import TensorSpec, map_tensors, write_tensors
from jaxslm.weights import OWNED_FILES, abstract_parameters
from tests.jaxslm.support import random_model

CONFIG = GPTConfig(vocab_size=29, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
SHAPES = {name: leaf.shape for name, leaf in abstract_parameters(CONFIG).items()}
MATRICES = [name for name, shape in SHAPES.items() if "norm" not in name]
SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "amsgrad": False, "foreach": None}
GROUPS = [
    SETTINGS | {"weight_decay": 0.1, "parameters": MATRICES},
    SETTINGS | {"weight_decay": 0, "parameters": [n for n in SHAPES if n not in MATRICES]},
]
FROZEN = "final_norm.bias"


def moments(dtype=np.float32) -> dict[str, np.ndarray]:
    """Random moments of every parameter but one."""
    rng = np.random.default_rng(0)
    return {
        f"{moment}.{name}": rng.standard_normal(shape).astype(dtype)
        for moment in ("first_moment", "second_moment")
        for name, shape in SHAPES.items()
        if name != FROZEN
    }


def write(path, arrays=None, *, count=7, groups=GROUPS, step=9) -> None:
    arrays = moments() if arrays is None else arrays
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
    write_optimizer(path, specs, arrays.__getitem__, count=count, groups=groups, step=step)


@pytest.fixture
def folder(tmp_path):
    """A model folder without optimizer."""
    jaxslm.save(random_model(CONFIG), tmp_path / "out")
    return tmp_path / "out"


def read(folder) -> OptimizerState:
    state = map_optimizer(folder)
    assert state is not None
    return state


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_state_comes_back_byte_for_byte(dtype, folder):
    arrays = moments(dtype)
    write(folder / OPTIMIZER_FILE, arrays)
    state = read(folder)
    assert (state.count, state.step) == (7, 9)
    assert list(state.groups) == GROUPS
    for prefix, found in (
        ("first_moment", state.first_moment), ("second_moment", state.second_moment),
    ):  # fmt: skip
        assert found.keys() == SHAPES.keys() - {FROZEN}
        for name, array in found.items():
            assert array.dtype == dtype
            assert array.tobytes() == arrays[f"{prefix}.{name}"].tobytes()


def test_step_may_be_unknown(folder):
    write(folder / OPTIMIZER_FILE, step=None)
    assert read(folder).step is None


def test_folder_without_the_file_has_no_state(folder):
    assert map_optimizer(folder) is None


def test_model_folder_owns_the_file(folder):
    write(folder / OPTIMIZER_FILE)
    assert OPTIMIZER_FILE in OWNED_FILES
    jaxslm.save(random_model(CONFIG), folder, overwrite=True)
    assert map_optimizer(folder) is None


def test_same_state_is_the_same_file(tmp_path):
    turned = [dict(reversed(group.items())) for group in GROUPS]
    write(tmp_path / "a")
    write(tmp_path / "b", groups=turned)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# Refusals


def first(**changes):
    """The groups with the first one changed; None takes a field out."""
    group = GROUPS[0] | changes
    return [{k: v for k, v in group.items() if v is not None or k == "foreach"}, GROUPS[1]]


WRONG_STATES = {
    "count is 0, expected the updates done": {"count": 0},
    "count is True, expected": {"count": True},
    "count is 16777217, expected the updates done, 1 to 16,777,216": {"count": 2**24 + 1},
    "count is None": {"count": None},
    "step is -1, expected a training step": {"step": -1},
    "step is 1.5": {"step": 1.5},
    "groups are 3, expected a list of objects": {"groups": 3},
    "groups are \\[1\\]": {"groups": [1]},
    "lr of group 0 is None, expected a finite number": {"groups": first(lr=None)},
    "lr of group 0 is nan": {"groups": first(lr=float("nan"))},
    "lr of group 0 is True": {"groups": first(lr=True)},
    "eps of group 0 is inf": {"groups": first(eps=float("inf"))},
    "weight_decay of group 0 is -0.1": {"groups": first(weight_decay=-0.1)},
    "weight_decay of group 0 is '0.1'": {"groups": first(weight_decay="0.1")},
    "betas of group 0 are \\[0.9\\], expected two numbers": {"groups": first(betas=[0.9])},
    "betas of group 0 are \\[0.9, 1.0\\]": {"groups": first(betas=[0.9, 1.0])},
    "betas of group 0 are 0.9": {"groups": first(betas=0.9)},
    "parameters of group 0 are 'embedding', expected": {"groups": first(parameters="embedding")},
    "parameters of group 0 are \\[1\\]": {"groups": first(parameters=[1])},
    "'embedding' is in the groups 2 times": {
        "groups": [GROUPS[0], GROUPS[1] | {"parameters": [*GROUPS[1]["parameters"], "embedding"]}]
    },
}


@pytest.mark.parametrize("words", WRONG_STATES)
def test_wrong_state_is_neither_written_nor_read(words, folder):
    changes = WRONG_STATES[words]
    with pytest.raises(ValueError, match=f"cannot be written:\n  {words}"):
        write(folder / OPTIMIZER_FILE, **changes)
    assert not (folder / OPTIMIZER_FILE).exists()
    write(folder / OPTIMIZER_FILE)
    rewrite(folder, lambda state: state | changes)
    with pytest.raises(ValueError, match=f"does not fit the model beside it:\n  {words}"):
        map_optimizer(folder)


def rewrite(folder, change, **metadata) -> None:
    """Writes the file with another state in its header."""
    path = folder / OPTIMIZER_FILE
    arrays, held = map_tensors(path)
    arrays = {name: array.copy() for name, array in arrays.items()}
    path.unlink()
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
    held = held | {"state": json.dumps(change(json.loads(held["state"])))} | metadata
    write_tensors(path, specs, arrays.__getitem__, held)


def test_moment_of_no_listed_parameter_is_not_written(tmp_path):
    arrays = moments() | {"first_moment.wq": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"first_moment\.wq is the moment of no parameter"):
        write(tmp_path / "a", arrays)


def test_tensors_that_do_not_fit_are_all_named(folder):
    arrays = moments()
    embedding = arrays.pop("second_moment.embedding")
    arrays["first_moment.embedding"] = embedding.T.copy()
    arrays["first_moment.final_norm.scale"] = np.zeros(24, np.int32)
    arrays["third_moment.embedding"] = embedding
    write(folder / OPTIMIZER_FILE, arrays)
    with pytest.raises(ValueError, match="does not fit the model beside it") as caught:
        map_optimizer(folder)
    lines = set(str(caught.value).splitlines()[1:])
    assert lines == {
        "  first_moment.embedding has shape (24, 29), expected (29, 24)",
        "  first_moment.final_norm.scale is int32, expected a float dtype",
        "  unexpected 'third_moment.embedding' (29, 24)",
        "  'embedding' has one moment and not the other",
    }


def test_file_without_moments_is_refused(folder):
    write(folder / OPTIMIZER_FILE, {})
    with pytest.raises(ValueError, match="it holds no moments"):
        map_optimizer(folder)


def test_groups_hold_the_models_parameters(folder):
    groups = first(parameters=[*MATRICES[1:], "head\x1b"])
    arrays = {name: array for name, array in moments().items() if MATRICES[0] not in name}
    write(folder / OPTIMIZER_FILE, arrays, groups=groups)
    with pytest.raises(ValueError, match=f"{MATRICES[0]} is in no group") as caught:
        map_optimizer(folder)
    assert "'head\\x1b' is in a group, but no parameter" in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"format": "pt"}, "has format 'pt'; this jaxslm reads 'jaxslm-optimizer'"),
        ({"format_version": "2"}, "has format_version '2'; this jaxslm reads '1'"),
        ({"state": "{"}, "the state in its header is not JSON"),
        ({"state": "[" * 100_000}, "the state in its header is not JSON"),
        ({"state": "3"}, "holds the state of 3; this jaxslm reads 'adamw'"),
        ({"state": '{"kind": "muon"}'}, "holds the state of 'muon'"),
    ],
)
def test_other_formats_are_refused(metadata, words, folder):
    write(folder / OPTIMIZER_FILE)
    rewrite(folder, lambda state: state, **metadata)
    with pytest.raises(ValueError, match=words):
        map_optimizer(folder)


def test_truncated_file_is_refused(folder):
    write(folder / OPTIMIZER_FILE)
    data = (folder / OPTIMIZER_FILE).read_bytes()
    (folder / OPTIMIZER_FILE).write_bytes(data[:-1])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        map_optimizer(folder)
    (folder / OPTIMIZER_FILE).write_bytes(struct.pack("<Q", 2**40) + data[8:])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        map_optimizer(folder)
