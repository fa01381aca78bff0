"""An opened checkpoint is a whole, consistent model of ours, whatever file it came in."""

import random

import pytest
import torch

from convert.source import open_torch
from tests.convert.checkpoints import (
    CONTAINERS,
    TIES,
    config_of,
    overrides,
    raw,
    said,
    save,
    state_of,
)
from tests.convert.damage import state_dict as other_state_dict

MODELS = ["lumen", "gpt", "ripple"]


def opened(path, model, state):
    """A raw state dict in a file, opened with all of the config passed."""
    return open_torch(save(state, path), overrides=tuple(overrides(model)))


def assert_holds(source, state) -> None:
    for leaf in source.leaves:
        for part in leaf.parts:
            assert raw(source.tensor(part.key)) == raw(state[part.key]), part.key


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_and_layout_opens_to_the_same_tensors(container, model, tmp_path):
    state = state_of(model)
    source = open_torch(CONTAINERS[container](tmp_path / "it", model, state))
    assert source.config == config_of(model)
    assert source.table.model == model
    assert_holds(source, state)


@pytest.mark.parametrize("model", MODELS)
def test_order_and_memory_layout_of_the_tensors_do_not_matter(model, tmp_path):
    state = state_of(model)
    keys = list(state)
    random.Random(0).shuffle(keys)
    turned = {key: state[key].t().contiguous().t() if state[key].ndim == 2 else state[key]
              for key in keys}  # fmt: skip
    assert not turned[keys[0]].is_contiguous() or turned[keys[0]].ndim == 1
    assert_holds(opened(tmp_path / "a.pt", model, turned), state)


def test_buffers_of_gpt2_code_are_passed_over(tmp_path):
    state = state_of("gpt")
    buffers = {
        "rope_cos": torch.zeros(16, 4),
        "rope_sin": torch.zeros(16, 4),
        "transformer.h.0.attn.bias": torch.zeros(1, 1, 16, 16, dtype=torch.bool),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    assert_holds(opened(tmp_path / "a.pt", "gpt", state | buffers), state)
    real = {"transformer.h.0.attn.bias": torch.zeros(16)}
    with pytest.raises(ValueError, match=r"unexpected  transformer\.h\.0\.attn\.bias  \[16\]"):
        opened(tmp_path / "b.pt", "gpt", state | buffers | real)


# Tied tensors


@pytest.mark.parametrize("model", TIES)
@pytest.mark.parametrize("how", ["one storage", "twice", "owner", "alias", "NaN twice"])
def test_tied_table_may_be_there_once_or_twice(how, model, tmp_path):
    owner, alias = TIES[model]
    state = state_of(model)
    assert state[owner].data_ptr() == state[alias].data_ptr()
    if how == "NaN twice":
        state[owner][3, 3] = torch.nan
    if how in ("twice", "NaN twice"):
        state[alias] = state[owner].clone()
    expected = dict(state)
    if how in ("owner", "alias"):
        del state[owner if how == "alias" else alias]
    source = opened(tmp_path / "a.pt", model, state)
    assert_holds(source, expected)
    assert sum(len(leaf.parts) for leaf in source.leaves) == len(expected) - 1


@pytest.mark.parametrize("model", TIES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(7.5),
                                       accumulate=True), r"by up to 7\.5"),
        (lambda table: torch.where(table == 0, -0.0, table), "in the sign of a zero"),
        (lambda table: table.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(torch.nan)),
         "by up to nan"),
        (lambda table: table.double(), r"in dtype \(float32 and float64\)"),
    ],
)  # fmt: skip
def test_tied_tables_that_differ_are_refused_with_the_difference(change, words, model, tmp_path):
    owner, alias = TIES[model]
    state = state_of(model)
    state[owner][0, 0] = 0.0
    state[owner][2, 3] = 0.5
    state[alias] = change(state[owner].clone())
    with pytest.raises(ValueError, match=f"tied tensors {owner} and {alias} differ {words}: one"):
        opened(tmp_path / "a.pt", model, state)


# What does not fit


@pytest.mark.parametrize("model", MODELS)
def test_all_faults_are_listed_with_the_file_named(model, tmp_path):
    state = state_of(model)
    dropped, renamed, wrong, whole = list(state)[4:8]
    del state[dropped]
    state[f"{renamed}s"] = state.pop(renamed)
    state[wrong] = torch.zeros(3, 5)
    state[whole] = state[whole].to(torch.int8)
    with pytest.raises(ValueError, match=r"a\.pt does not fit \w+Config:\n") as caught:
        opened(tmp_path / "a.pt", model, state)
    text = str(caught.value)
    for fault in (
        f"missing     {dropped}  ",
        f"missing     {renamed}  ",
        f"unexpected  {renamed}s  ",
        f"mis-shaped  {wrong}  [3, 5], expected ",
        f"not a float {whole}  is int8: quantised or integer weights cannot be converted",
    ):
        assert fault in text
    assert str(tmp_path) in text


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_tensors_that_are_no_floats_are_refused_also_with_a_cast(dtype, tmp_path):
    state = {key: tensor.to(getattr(torch, dtype)) for key, tensor in state_of("lumen").items()}
    path = save(state, tmp_path / "a.pt")
    for cast in (False, True):
        with pytest.raises(ValueError, match=rf"not a float norm\.weight  is {dtype}: quantised"):
            open_torch(path, overrides=tuple(overrides("lumen")), cast=cast)


def test_mixed_dtypes_in_a_stack_need_a_cast(tmp_path):
    state = state_of("gpt")
    state["transformer.h.1.ln_1.bias"] = state["transformer.h.1.ln_1.bias"].bfloat16()
    path = save({"model": state, "model_args": said("gpt")}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"mixed dtypes bfloat16 and float32 in .*pass --dtype"):
        open_torch(path)
    assert_holds(open_torch(path, cast=True), state)


def test_config_that_contradicts_the_tensors_names_file_and_both_sides(tmp_path):
    path = save({"model": state_of("gpt"), "model_args": said("gpt", n_layer=3)}, tmp_path / "a.pt")
    with pytest.raises(
        ValueError, match=r"a\.pt: .*\n  n_layer is 3 by model_args, but 2 by the tensors' shapes"
    ):
        open_torch(path)


def test_another_architecture_is_named(tmp_path):
    save({"layer1.0.conv1.weight": torch.zeros(2)}, tmp_path / "resnet.pt")
    with pytest.raises(ValueError, match=r"resnet\.pt: this is not .* it looks like a ResNet"):
        open_torch(tmp_path / "resnet.pt")
    # Half of a GPT's keys is a damaged GPT, and is told what is missing.
    with pytest.raises(ValueError, match="missing     transformer"):
        opened(tmp_path / "b.pt", "gpt", dict(list(state_of("gpt").items())[:12]))
    with pytest.raises(ValueError):  # noqa: PT011 - five keys of nowhere
        opened(tmp_path / "c.pt", "gpt", other_state_dict())


def test_prefixes_that_make_two_keys_one_are_refused(tmp_path):
    state = state_of("lumen")
    state["module.norm.weight"] = state["norm.weight"]
    with pytest.raises(ValueError, match=r"norm\.weight and module\.norm\.weight are both norm"):
        opened(tmp_path / "a.pt", "lumen", state)
