"""Conversion in memory: to_jax and to_torch undo each other to the byte."""

import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import convert
import jaxslm
from convert.counterparts import build
from jaxslm.weights import abstract_parameters, to_arrays
from tests.convert.checkpoints import (
    CONTAINERS,
    TIES,
    config_of,
    raw,
    said,
    save,
    save_shards,
    state_of,
)

MODELS = ["lumen", "gpt", "ripple"]


def file_of(tmp_path, model, state=None):
    state = state_of(model) if state is None else state
    return save({"model": state, "model_args": said(model)}, tmp_path / "a.pt")


def cast_state(model, dtype):
    """Random weights in another dtype, the tie kept."""
    state = {key: tensor.to(dtype) for key, tensor in state_of(model).items()}
    for owner, alias in filter(None, [TIES.get(model)]):
        state[alias] = state[owner]
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("model", MODELS)
def test_there_and_back_gives_the_same_state_dict(model, dtype, tmp_path, x64):
    state = cast_state(model, dtype)
    ours = convert.to_jax(file_of(tmp_path, model, state))
    assert ours.config == config_of(model)
    arrays = to_arrays(ours)
    expected = {name: leaf.shape for name, leaf in abstract_parameters(ours.config).items()}
    assert {name: array.shape for name, array in arrays.items()} == expected
    assert {array.dtype.name for array in arrays.values()} == {str(dtype)[6:]}
    back = convert.to_torch(ours)
    assert list(back) == list(state)
    for key, tensor in back.items():
        assert raw(tensor) == raw(state[key]), key
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    for owner, alias in filter(None, [TIES.get(model)]):
        assert back[owner].data_ptr() == back[alias].data_ptr()
    module = build(ours.config).to(dtype)
    assert module.load_state_dict(back, strict=True).missing_keys == []


@pytest.mark.parametrize("model", MODELS)
def test_original_takes_the_state_dict(model, tmp_path, shared):
    from tests.golden.make_golden import build_original, load_originals

    originals = load_originals(shared("originals"))
    fields = said(model) | ({"num_kv_heads": 4} if model == "lumen" else {})
    original = build_original(originals, model, fields)
    state = {key: tensor.detach().clone() for key, tensor in original.state_dict().items()}
    path = save({"model": original.state_dict(), "model_args": fields}, tmp_path / "a.pt")
    back = convert.to_torch(convert.to_jax(str(path)))
    assert list(back) == list(state)
    original.load_state_dict({key: torch.zeros_like(t) for key, t in back.items()}, strict=True)
    original.load_state_dict(back, strict=True)
    for key, tensor in original.state_dict().items():
        assert raw(tensor) == raw(state[key]), key


def test_torch_tensors_are_ours_to_change(tmp_path):
    ours = convert.to_jax(file_of(tmp_path, "lumen"))
    before = np.asarray(ours.embedding[...]).copy()
    state = convert.to_torch(ours)
    state["embed_tokens.weight"].zero_()
    np.testing.assert_array_equal(ours.embedding[...], before)


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_becomes_the_same_model(container, tmp_path):
    state = state_of("ripple")
    back = convert.to_torch(convert.to_jax(CONTAINERS[container](tmp_path / "it", "ripple", state)))
    assert {key: raw(tensor) for key, tensor in back.items()} == {
        key: raw(tensor) for key, tensor in state.items()
    }


def test_config_and_preset_are_taken_as_values(tmp_path):
    path = save(state_of("ripple"), tmp_path / "a.pt")
    config = {"attention_window": None, "dropout": 0.25, "window_mode": "exact", "remat": "dots"}
    found = convert.to_jax(path, config=config).config
    assert found == config_of("ripple", **config)
    with pytest.raises(ValueError, match="does not say dropout, attention_window"):
        convert.to_jax(path)
    with pytest.raises(ValueError, match="n_embd is 384 by preset ripple, but 18 by the tensors'"):
        convert.to_jax(path, preset="ripple")
    with pytest.raises(ValueError, match="--config heads: no such field"):
        convert.to_jax(path, config={"heads": 3})


# Casts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cast_rounds_each_number_once(dtype, tmp_path):
    state = cast_state("gpt", torch.float64)
    ours = convert.to_jax(file_of(tmp_path, "gpt", state), dtype=dtype)
    assert {array.dtype.name for array in to_arrays(ours).values()} == {dtype}
    for key, tensor in convert.to_torch(ours).items():
        assert raw(tensor) == raw(state[key].to(getattr(torch, dtype))), key


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_cast_to_torch_rounds_each_number_once(dtype, tmp_path):
    state = state_of("gpt")
    back = convert.to_torch(convert.to_jax(file_of(tmp_path, "gpt", state)), dtype=dtype)
    for key, tensor in back.items():
        assert raw(tensor) == raw(state[key].to(getattr(torch, dtype))), key


def test_overflow_names_tensor_number_and_limit(tmp_path):
    state = cast_state("gpt", torch.bfloat16)
    key = "transformer.h.1.mlp.c_fc.weight"
    state[key][2, 3] = -1e5
    path = file_of(tmp_path, "gpt", state)
    words = rf"{key}: 1 numbers overflow in float16, such as -99840 \(the largest is 65504\)"
    with pytest.raises(ValueError, match=words):
        convert.to_jax(path, dtype="float16")
    ours = convert.to_jax(path)
    with pytest.raises(ValueError, match=words):
        convert.to_torch(ours, dtype="float16")
    assert convert.to_torch(ours, dtype="float32")[key][2, 3] == -99840.0


def test_largest_number_does_not_overflow_and_the_next_does(tmp_path):
    state = state_of("lumen")
    for number, fits in ((65504.0, True), (65519.0, True), (65520.0, False)):
        state["norm.weight"][0] = number
        path = file_of(tmp_path, "lumen", state)
        if fits:
            assert convert.to_torch(convert.to_jax(path, dtype="float16"))["norm.weight"][0] == (
                65504.0
            )
        else:
            with pytest.raises(ValueError, match=r"norm\.weight: 1 numbers overflow in float16"):
                convert.to_jax(path, dtype="float16")


def test_unknown_dtype_is_refused(tmp_path):
    path = file_of(tmp_path, "lumen")
    with pytest.raises(ValueError, match="dtype must be one of float64, float32.*got 'int8'"):
        convert.to_jax(path, dtype="int8")
    with pytest.raises(ValueError, match="dtype must be one of float64, float32.*got 'half'"):
        convert.to_torch(convert.to_jax(path), dtype="half")


def test_mixed_dtypes_of_a_stack_are_cast_together(tmp_path):
    state = state_of("gpt")
    state["transformer.h.1.ln_1.bias"] = state["transformer.h.1.ln_1.bias"].bfloat16()
    path = file_of(tmp_path, "gpt", state)
    with pytest.raises(ValueError, match="mixed dtypes bfloat16 and float32"):
        convert.to_jax(path)
    back = convert.to_torch(convert.to_jax(path, dtype="float32"))
    for key, tensor in state.items():
        assert raw(back[key]) == raw(tensor.float()), key


def test_each_parameter_keeps_its_own_dtype(tmp_path):
    state = state_of("gpt")
    for key in [key for key in state if ".mlp." in key]:
        state[key] = state[key].bfloat16()
    ours = convert.to_jax(file_of(tmp_path, "gpt", state))
    kinds = {name: array.dtype.name for name, array in to_arrays(ours).items()}
    assert {name for name, kind in kinds.items() if kind == "bfloat16"} == {
        "blocks.mlp.w_up", "blocks.mlp.w_down",
    }  # fmt: skip
    assert {key: raw(t) for key, t in convert.to_torch(ours).items()} == {
        key: raw(t) for key, t in state.items()
    }


def test_float64_without_x64_mode_says_what_to_do(tmp_path):
    path = file_of(tmp_path, "lumen", cast_state("lumen", torch.float64))
    with pytest.raises(ValueError, match=r"is float64, which JAX holds only in its x64 mode"):
        convert.to_jax(path)
    assert to_arrays(convert.to_jax(path, dtype="float32"))["embedding"].dtype == np.float32


# Numbers that are not finite


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_every_tensor_with_nan_or_infinity_is_listed(dtype, tmp_path):
    state = state_of("gpt")
    bad = [
        f"transformer.{name}" for name in ("h.0.attn.k_proj.weight", "h.1.ln_2.bias", "ln_f.bias")
    ]
    for key, number in zip(bad, (torch.nan, torch.inf, -torch.inf), strict=True):
        state[key].view(-1)[3] = number
    path = file_of(tmp_path, "gpt", state)
    with pytest.raises(ValueError, match=r"a\.pt: NaN or infinite numbers in ") as caught:
        convert.to_jax(path, dtype=dtype)
    assert f"in {', '.join(bad)}: the run" in str(caught.value)
    assert "pass --allow-nonfinite" in str(caught.value)
    back = convert.to_torch(convert.to_jax(path, dtype=dtype, allow_nonfinite=True))
    for key, tensor in back.items():
        expected = state[key] if dtype is None else state[key].to(torch.bfloat16)
        if dtype is None:
            assert raw(tensor) == raw(expected), key
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


def test_damaged_weight_is_not_returned(tmp_path):
    path = file_of(tmp_path, "gpt")
    data = bytearray(path.read_bytes())
    tensor = state_of("gpt")["transformer.h.0.mlp.c_fc.weight"]
    data[data.index(raw(tensor)[2]) + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"the checksum does not match in transformer\.h\.0\.mlp"):
        convert.to_jax(path)


# Without torch

WITHOUT_TORCH = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Finder())
import jax.numpy as jnp
import convert
from jaxslm.weights import to_arrays

for path in sys.argv[1:]:
    model = convert.to_jax(path)
    print(type(model).__name__, sum(array.size for array in to_arrays(model).values()))
assert "torch" not in sys.modules
try:
    convert.to_torch(model)
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_to_jax_needs_no_torch(tmp_path):
    state = state_of("gpt")
    paths = [
        save({"model": state, "model_args": said("gpt")}, tmp_path / "zip.pt"),
        save({"model": state, "model_args": said("gpt")}, tmp_path / "legacy.pt", zipped=False),
        save_shards(tmp_path / "shards", state, said("gpt")),
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, paths)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["GPT 6288"] * 3 + ["torch"], done.stderr


def test_model_computes_after_conversion_of_bfloat16(tmp_path):
    ours = convert.to_jax(file_of(tmp_path, "lumen", cast_state("lumen", torch.bfloat16)))
    assert ours.embedding[...].dtype == ml_dtypes.bfloat16
    shape = jax.eval_shape(ours, jax.ShapeDtypeStruct((2, 5), np.int32))
    assert (shape.shape, shape.dtype) == ((2, 5, 31), np.float32)


def test_to_jax_of_a_model_folder_says_what_reads_it(tmp_path):
    jaxslm.save(convert.to_jax(file_of(tmp_path, "gpt")), tmp_path / "out")
    with pytest.raises(ValueError, match=r"is a model folder already: jaxslm\.load reads it"):
        convert.to_jax(tmp_path / "out")
