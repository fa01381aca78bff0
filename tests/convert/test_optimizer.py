"""AdamW's state both ways: every byte to the right parameter, or a refusal; torch steps on."""

import copy
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from convert.checkpoint.containers import open_checkpoint
from convert.counterparts import build
from convert.files import folder_to_torch, torch_to_folder
from convert.optimizer import open_optimizer, torch_optimizer_state
from convert.source import open_torch
from convert.torch_io import to_numpy
from jaxslm import GPTConfig
from jaxslm.optimizer_file import OPTIMIZER_FILE, OptimizerState, map_optimizer, write_optimizer
from jaxslm.safetensors_io import TensorSpec
from jaxslm.weights import map_folder
from tests.convert.checkpoints import config_of, raw, said, save, state_of, tree
from tests.golden.make_golden import build_original, load_originals, randomize

MODELS = ["lumen", "gpt", "ripple"]
AS_TORCH = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def groups_of(module, recipe):
    """What the recipe hands to the optimizer."""
    named = list(module.named_parameters())
    if recipe == "one group":
        return module.parameters()
    if recipe == "with names":
        return named
    matrices = [p for _, p in named if p.dim() >= 2]
    vectors = {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0}
    if recipe == "nanoGPT":
        return [{"params": matrices, "weight_decay": 0.1}, vectors]
    return [vectors, {"params": matrices[:1], "lr": 3e-4, "initial_lr": 6e-4},
            {"params": matrices[1:], "weight_decay": 0.1}]  # fmt: skip


RECIPES = ["one group", "with names", "nanoGPT", "table apart"]


def take_step(module, optimizer, seed) -> None:
    """An update from random gradients; none for decays under full attention, as in torch."""
    rng = np.random.default_rng(seed)
    full = getattr(getattr(module, "config", None), "attention_window", 0) is None
    for name, parameter in module.named_parameters():
        drawn = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)))
        frozen = full and name.endswith("decay_factor")
        parameter.grad = None if frozen else drawn.to(parameter.dtype)
    optimizer.step()


def trained(module, recipe, steps=3):
    randomize(module, 0)
    optimizer = torch.optim.AdamW(groups_of(module, recipe), **AS_TORCH)
    for seed in range(steps):
        take_step(module, optimizer, seed)
    return optimizer


def checkpoint_of(model, module, optimizer, **entries):
    """A training checkpoint of nanoGPT."""
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict(),
            "model_args": said(model), "iter_num": 11} | entries  # fmt: skip


@pytest.fixture(scope="module")
def gpt():
    """A trained small GPT: its checkpoint, to be copied before it is changed."""
    module = build(config_of("gpt"))
    optimizer = trained(module, "nanoGPT")
    return checkpoint_of("gpt", module, optimizer)


@pytest.fixture
def changed(gpt, tmp_path):
    """Saves that checkpoint with its optimizer's state dict changed."""

    def save_changed(change) -> Path:
        tree = copy.deepcopy(gpt["optimizer"])
        tree = change(tree) or tree
        return save(gpt | {"optimizer": tree}, tmp_path / "a.pt")

    return save_changed


def read(folder) -> OptimizerState:
    state = map_optimizer(folder)
    assert state is not None
    return state


def moment_bytes(checkpoint) -> dict:
    """Each moment of a torch state dict by index."""
    return {
        (index, name): raw(slots[name])
        for index, slots in checkpoint["optimizer"]["state"].items()
        for name in ("exp_avg", "exp_avg_sq")
    }


def same_state(found, expected) -> None:
    """Two optimizers' state dicts are the same but for names and fields of other versions."""
    assert found["state"].keys() == expected["state"].keys()
    for index, slots in expected["state"].items():
        assert found["state"][index].keys() == slots.keys()
        for name, tensor in slots.items():
            assert raw(found["state"][index][name]) == raw(tensor), (index, name)
    for one, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert one == {k: v for k, v in other.items() if k != "param_names"}


# Round trips


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("side", ["counterpart", "original"])
def test_torch_steps_on_as_if_nothing_had_happened(side, model, recipe, tmp_path, request):
    def fresh():
        if side == "counterpart":
            return build(config_of(model))
        originals = load_originals(request.getfixturevalue("shared")("originals"))
        return build_original(originals, model, said(model))

    module = fresh()
    optimizer = trained(module, recipe)
    checkpoint = checkpoint_of(model, module, optimizer)
    path = save(checkpoint, tmp_path / "a.pt")
    done = torch_to_folder(path, tmp_path / "out", with_optimizer=True)
    back = folder_to_torch(tmp_path / "out", tmp_path / "b.pt", with_optimizer=True)
    assert done.moments == back.moments == back.identical_moments == 2 * len(list(
        module.parameters()))  # fmt: skip

    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert list(loaded) == ["model", "optimizer", "model_args", "step"]
    assert (loaded["model_args"], loaded["step"]) == (said(model), 11)
    same_state(loaded["optimizer"], checkpoint["optimizer"])
    other = fresh()
    other.load_state_dict(loaded["model"], strict=True)
    again = torch.optim.AdamW(groups_of(other, recipe))
    again.load_state_dict(loaded["optimizer"])
    for one, rival in ((module, optimizer), (other, again)):
        take_step(one, rival, 3)
        take_step(one, rival, 4)
    for (name, a), b in zip(module.named_parameters(), other.parameters(), strict=True):
        assert raw(a) == raw(b), name

    torch_to_folder(tmp_path / "b.pt", tmp_path / "again", with_optimizer=True)
    for file in ("config.json", "model.safetensors", OPTIMIZER_FILE):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_moments_lie_where_their_parameters_do(model, tmp_path):
    """Moments that equal the weights come out as the weights do."""
    module = build(config_of(model))
    optimizer = trained(module, "nanoGPT", steps=1)
    for parameter, slots in optimizer.state.items():
        slots["exp_avg"] = parameter.detach().clone()
        slots["exp_avg_sq"] = parameter.detach().clone().square()
    path = save(checkpoint_of(model, module, optimizer), tmp_path / "a.pt")
    torch_to_folder(path, tmp_path / "out", with_optimizer=True)
    state, (_, weights) = read(tmp_path / "out"), map_folder(tmp_path / "out")
    assert state.first_moment.keys() == state.second_moment.keys() == weights.keys()
    for name, array in weights.items():
        assert np.array_equal(state.first_moment[name], array), name
        assert np.array_equal(state.second_moment[name], array**2), name
    decayed = {name for name in weights if "norm" not in name}
    if model != "ripple":
        assert set(state.groups[0]["parameters"]) == decayed
        assert set(state.groups[1]["parameters"]) == weights.keys() - decayed
    assert (state.count, state.step) == (1, 11)
    assert state.groups[0] == {
        "parameters": state.groups[0]["parameters"], "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8,
        "weight_decay": 0.1, "amsgrad": False, "maximize": False, "foreach": None,
        "capturable": False, "differentiable": False, "fused": None,
        "decoupled_weight_decay": True,
    }  # fmt: skip


REAL = {"gpt_small.pt": (43, 600, 600), "ripple_char.pt": (84, 1678, 1678),
        "ripple_window.pt": (100, 747, 747)}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoint_loads_back_into_the_originals_optimizer(name, tmp_path, shared):
    source = shared("checkpoints", name)
    with_moments, count, step = REAL[name]
    done = torch_to_folder(source, tmp_path / "out", with_optimizer=True)
    state = read(tmp_path / "out")
    assert (state.count, state.step) == (count, step)
    assert ("blocks.attention.decay" in state.first_moment) == (name == "ripple_window.pt")
    back = folder_to_torch(tmp_path / "out", tmp_path / "b.pt", with_optimizer=True)
    assert back.identical_moments == back.moments == done.moments == 2 * with_moments

    before, loaded = open_checkpoint(source), torch.load(tmp_path / "b.pt", weights_only=True)
    assert isinstance(before.optimizer, dict)
    same_state(loaded["optimizer"], before.optimizer)
    model = "gpt" if name.startswith("gpt") else "ripple"
    module = build_original(load_originals(shared("originals")), model, loaded["model_args"])
    module.load_state_dict(loaded["model"], strict=True)
    recipe = "nanoGPT" if model == "gpt" else "one group"
    optimizer = torch.optim.AdamW(groups_of(module, recipe))
    optimizer.load_state_dict(loaded["optimizer"])
    keys = {id(parameter): key for key, parameter in module.named_parameters()}
    for parameter, slots in optimizer.state.items():
        assert slots["exp_avg"].shape == parameter.shape, keys[id(parameter)]
        assert slots["step"] == count
    take_step(module, optimizer, 0)
    frozen = [key for key, p in module.named_parameters() if p not in optimizer.state]
    assert all(key.endswith("decay_factor") for key in frozen)
    assert len(frozen) == (16 if name == "ripple_char.pt" else 0)
    torch_to_folder(tmp_path / "b.pt", tmp_path / "again", with_optimizer=True)
    assert raw_file(tmp_path / "again") == raw_file(tmp_path / "out")


def raw_file(folder) -> bytes:
    return (folder / OPTIMIZER_FILE).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zipped", [True, False])
def test_moments_keep_their_dtype_whatever_becomes_of_the_weights(zipped, dtype, gpt, tmp_path):
    checkpoint = copy.deepcopy(gpt)
    for slots in checkpoint["optimizer"]["state"].values():
        slots |= {name: slots[name].to(dtype) for name in ("exp_avg", "exp_avg_sq")}
    path = save(checkpoint, tmp_path / "a.pt", zipped=zipped)
    torch_to_folder(path, tmp_path / "out", with_optimizer=True, dtype="bfloat16")
    assert {str(a.dtype) for a in read(tmp_path / "out").first_moment.values()} == {str(dtype)[6:]}
    folder_to_torch(tmp_path / "out", tmp_path / "b.pt", with_optimizer=True, dtype="float32")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert moment_bytes(loaded) == moment_bytes(checkpoint)
    assert {tensor.dtype for tensor in loaded["model"].values()} == {torch.float32}


def test_full_attention_has_no_moments_of_decays(tmp_path):
    module = build(config_of("ripple", attention_window=None))
    optimizer = trained(module, "nanoGPT")
    checkpoint = checkpoint_of("ripple", module, optimizer, model_args=said(
        "ripple", attention_window=None))  # fmt: skip
    done = torch_to_folder(save(checkpoint, tmp_path / "a.pt"), tmp_path / "o", with_optimizer=True)
    assert "blocks.attention.decay has no moments: torch never updated it" in done.notes
    state = read(tmp_path / "o")
    assert "blocks.attention.decay" in state.groups[1]["parameters"]
    assert "blocks.attention.decay" not in state.second_moment
    folder_to_torch(tmp_path / "o", tmp_path / "b.pt", with_optimizer=True)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    same_state(loaded["optimizer"], checkpoint["optimizer"])


@pytest.mark.parametrize("kind", ["python number", "tensor", "float64"])
def test_step_and_rate_may_be_tensors_or_numbers(kind, changed, tmp_path):
    def change(tree):
        for slots in tree["state"].values():
            slots["step"] = {"python number": 3, "tensor": torch.tensor(3.0),
                             "float64": torch.tensor(3.0, dtype=torch.float64)}[kind]  # fmt: skip
        tree["param_groups"][0]["lr"] = torch.tensor(0.25) if kind == "tensor" else 0.25

    torch_to_folder(changed(change), tmp_path / "out", with_optimizer=True)
    state = read(tmp_path / "out")
    assert (state.count, state.groups[0]["lr"], state.groups[1]["lr"]) == (3, 0.25, 1e-3)


def test_a_compiled_models_checkpoint_of_build_nanogpt_is_read(gpt, tmp_path):
    state = {f"_orig_mod.{key}": tensor for key, tensor in gpt["model"].items()}
    entries = {"model": state, "step": 5, "val_loss": 3.5}
    checkpoint = {k: v for k, v in gpt.items() if k != "iter_num"} | entries
    path = save(checkpoint, tmp_path / "a.pt")
    done = torch_to_folder(path, tmp_path / "out", with_optimizer=True)
    assert read(tmp_path / "out").step == 5
    assert done.notes == (
        "optimizer: AdamW after 3 updates, 46 moments", "not converted: val_loss (3.5)",
    )  # fmt: skip


# Our own trainer's state


def ours(tmp_path, is_first, frozen=()):
    """A model folder with random moments in two groups of paths, as the trainer writes it."""
    path = save({"model": state_of("gpt"), "model_args": said("gpt")}, tmp_path / "w.pt")
    torch_to_folder(path, tmp_path / "out")
    _, weights = map_folder(tmp_path / "out")
    rng = np.random.default_rng(1)
    arrays = {
        f"{moment}.{name}": rng.random(array.shape, np.float32)
        for moment in ("first_moment", "second_moment")
        for name, array in weights.items()
        if name not in frozen
    }
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
    settings = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    groups = [[p for p in sorted(weights) if is_first(p) == first] for first in (True, False)]
    write_optimizer(
        tmp_path / "out" / OPTIMIZER_FILE, specs, arrays.__getitem__,
        count=4, groups=[settings | {"parameters": paths} for paths in groups], step=None,
    )  # fmt: skip
    return tmp_path / "out"


def test_groups_of_paths_become_torchs_numbers(tmp_path):
    folder = ours(tmp_path, lambda path: "norm" not in path)
    folder_to_torch(folder, tmp_path / "b.pt", with_optimizer=True)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert "step" not in loaded
    assert "param_names" not in loaded["optimizer"]["param_groups"][0]
    module = build(config_of("gpt"))
    optimizer = torch.optim.AdamW(groups_of(module, "nanoGPT"))
    fields = optimizer.state_dict()["param_groups"][0].keys()
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["optimizer"]["param_groups"][0].keys() == fields
    query = module.get_parameter("transformer.h.1.attn.q_proj.weight")
    expected = read(folder).first_moment["blocks.attention.wq"][1].reshape(16, 16).T
    assert np.array_equal(to_numpy(optimizer.state[query]["exp_avg"]), expected)
    torch_to_folder(tmp_path / "b.pt", tmp_path / "again", with_optimizer=True)
    same_moments(read(tmp_path / "again"), read(folder))


def same_moments(found, expected) -> None:
    """Counts, moments and who is in which group are the same."""
    assert found.count == expected.count
    for one, other in (
        (found.first_moment, expected.first_moment), (found.second_moment, expected.second_moment),
    ):  # fmt: skip
        assert one.keys() == other.keys()
        assert all(raw(one[name]) == raw(other[name]) for name in one)
    members = [[sorted(group["parameters"]) for group in one.groups] for one in (found, expected)]
    assert members[0] == members[1]


def test_ambiguous_groups_are_written_with_names_and_read_again(tmp_path):
    apart = "blocks.attention_norm.scale"
    folder = ours(tmp_path, lambda path: path == apart, frozen=("final_norm.scale",))
    folder_to_torch(folder, tmp_path / "b.pt", with_optimizer=True)
    groups = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["param_groups"]
    assert groups[0]["param_names"] == [f"transformer.h.{layer}.ln_1.weight" for layer in (0, 1)]
    torch_to_folder(tmp_path / "b.pt", tmp_path / "again", with_optimizer=True)
    same_moments(read(tmp_path / "again"), read(folder))


def test_frozen_parameters_whose_shapes_nothing_tells_get_names(tmp_path):
    frozen = ("embedding", "blocks.attention_norm.scale")
    folder = ours(tmp_path, lambda path: "norm" not in path, frozen=frozen)
    folder_to_torch(folder, tmp_path / "b.pt", with_optimizer=True)
    torch_to_folder(tmp_path / "b.pt", tmp_path / "again", with_optimizer=True)
    same_moments(read(tmp_path / "again"), read(folder))


def test_state_in_memory_is_that_of_the_file(gpt, tmp_path):
    torch_to_folder(save(gpt, tmp_path / "a.pt"), tmp_path / "out", with_optimizer=True)
    state = torch_optimizer_state(config_of("gpt"), read(tmp_path / "out"))
    same_state(state, gpt["optimizer"])
    steps = [slots["step"] for slots in state["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)


def test_groups_that_lack_a_parameter_are_refused(gpt, tmp_path):
    torch_to_folder(save(gpt, tmp_path / "a.pt"), tmp_path / "out", with_optimizer=True)
    state = read(tmp_path / "out")
    for groups in (state.groups[:1], (*state.groups, state.groups[1])):
        wrong = OptimizerState(**(vars(state) | {"groups": groups}))
        with pytest.raises(ValueError, match="the groups do not hold every parameter once"):
            torch_optimizer_state(config_of("gpt"), wrong)


# What is recorded


def test_parity_json_holds_each_moments_hash_and_the_way_back_counts_them(gpt, tmp_path):
    torch_to_folder(save(gpt, tmp_path / "a.pt"), tmp_path / "out", with_optimizer=True)
    record = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert len(record["moments"]) == 46
    entry = record["moments"]["exp_avg_sq.transformer.h.1.attn.k_proj.weight"]
    assert entry["shape"] == [8, 16]
    assert entry["dtype"] == "float32"
    assert entry["parameter"] == "second_moment.blocks.attention.wk"
    path = tmp_path / "out" / OPTIMIZER_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = folder_to_torch(tmp_path / "out", tmp_path / "b.pt", with_optimizer=True)
    assert (done.identical, done.identical_moments, done.moments) == (23, 45, 46)
    assert done.notes == ("45 of 46 moments of the optimizer have its bytes too",)


def test_without_the_flag_only_weights_are_converted(gpt, tmp_path):
    done = torch_to_folder(save(gpt, tmp_path / "a.pt"), tmp_path / "out")
    assert done.moments == 0
    assert sorted(tree(tmp_path / "out")) == ["config.json", "model.safetensors", "parity.json"]
    assert "moments" not in json.loads((tmp_path / "out" / "parity.json").read_text())
    note = "46 moment tensors, 0.1 MB; pass --with-optimizer to convert it too)"
    assert note in " ".join(done.notes)
    torch_to_folder(tmp_path / "a.pt", tmp_path / "out", overwrite=True, with_optimizer=True)
    back = folder_to_torch(tmp_path / "out", tmp_path / "b.pt")
    assert back.notes == (
        "not converted: optimizer.safetensors; pass --with-optimizer to convert it too",
    )
    assert back.moments == 0
    assert list(torch.load(tmp_path / "b.pt", weights_only=True)) == list(gpt["model"])
    torch_to_folder(tmp_path / "a.pt", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / OPTIMIZER_FILE).exists()


def test_other_epsilon_is_told_to_the_original_and_comes_back(gpt, tmp_path):
    path = save(gpt, tmp_path / "a.pt")
    torch_to_folder(path, tmp_path / "out", overrides=("layer_norm_eps=1e-3",), with_optimizer=True)
    folder_to_torch(tmp_path / "out", tmp_path / "b.pt", with_optimizer=True)
    fields = torch.load(tmp_path / "b.pt", weights_only=True)["model_args"]
    assert fields == said("gpt") | {"layer_norm_eps": 1e-3}
    done = torch_to_folder(tmp_path / "b.pt", tmp_path / "again")
    assert isinstance(done.config, GPTConfig)
    assert done.config.layer_norm_eps == 1e-3


# Refusals


def refused(words, path, folder, **options) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=words) as caught:
        torch_to_folder(path, folder / "out", with_optimizer=True, **options)
    assert str(caught.value).startswith(str(path))
    assert all(line.isprintable() for line in str(caught.value).splitlines())
    assert sorted(folder.iterdir()) == before


def every(slots, **changes):
    """Changes the slots of every parameter; None takes one out."""

    def change(tree):
        for one in tree["state"].values():
            one.update({name: make(one) for name, make in changes.items()})
            for name in slots:
                del one[name]

    return change


def in_groups(**fields):
    def change(tree):
        for group in tree["param_groups"]:
            group.update(fields)

    return change


def sgd(tree):
    parameter = torch.nn.Parameter(torch.ones(2))
    return torch.optim.SGD([parameter]).state_dict()


def at(*path, value):
    """Sets one place of the tree."""

    def change(tree):
        *way, last = path
        for name in way:
            tree = tree[name]
        tree[last] = value

    return change


def without(*path):
    def change(tree):
        *way, last = path
        for name in way:
            tree = tree[name]
        del tree[last]

    return change


ZEROS = torch.zeros(31, 16)
WRONG = {
    "it is AdamW with amsgrad, and only": every([], max_exp_avg_sq=lambda one: one["exp_avg"]),
    "it is AdamW with amsgrad, and": in_groups(amsgrad=True),
    "it is SGD, Muon or another optimizer without betas": sgd,
    "it is SGD, Muon or": every(["exp_avg"], momentum_buffer=lambda one: one["exp_avg"]),
    "it is an 8-bit or other optimizer of bitsandbytes": every(
        ["exp_avg", "exp_avg_sq"], state1=lambda one: torch.zeros(3, dtype=torch.uint8)
    ),
    "it is an optimizer that keeps exp_avg, step for": every(["exp_avg_sq"]),
    "keeps exp_avg, exp_avg_sq, mu_product, step for": every([], mu_product=lambda one: 1.0),
    "it is RAdam, or AdamW of another library": lambda tree: [
        group.pop("amsgrad") for group in tree["param_groups"]] and None,
    "it is Adam, whose weight decay": in_groups(decoupled_weight_decay=False),
    "it has made no update yet": lambda tree: {**tree, "state": {}},
    "expected what torch's optimizer": lambda tree: {"state": tree["state"]},
    "state by index and param_groups": lambda tree: {**tree, "param_groups": 3},
    "param_groups with params; got dict of 2": lambda tree: {**tree, "state": [1]},
    "expected what torch's": without("param_groups", 0, "params"),
    "None stands where a parameter's index": at("param_groups", 0, "params", 0, value=None),
    "list of 1 stands where a parameter's index": at("param_groups", 0, "params", 0, value=[1]),
    "groups list parameter 1 more than once": at("param_groups", 0, "params", 0, value=1),
    "its state has parameter 99, which no group lists": lambda tree: at(
        "state", 99, value=tree["state"][0])(tree),
    "the state of parameter 4 is not whole: expected exp_avg, exp_avg_sq, step": without(
        "state", 4, "exp_avg_sq"),
    "exp_avg of parameter 0 is a int64 tensor": at("state", 0, "exp_avg", value=ZEROS.long()),
    "exp_avg of parameter 0 is 3.5, expected floats": at("state", 0, "exp_avg", value=3.5),
    r"parameter 0 has an exp_avg \[31, 16\], but an exp_avg_sq \[31\]": at(
        "state", 0, "exp_avg_sq", value=ZEROS[:, 0].clone()),
    r"no group's next moments have the shape \[31, 16\] of transformer.wte.weight": lambda tree: (
        at("state", 0, "exp_avg", value=ZEROS.T.clone())(tree),
        at("state", 0, "exp_avg_sq", value=ZEROS.T.clone())(tree))[0],
    "hold 22 parameters, the model has 23": lambda tree: (
        tree["param_groups"][1]["params"].pop(), tree["state"].pop(22))[2:] or None,
    r"step is 3 for most parameters, but not for transformer.wte.weight \(2\)": at(
        "state", 0, "step", value=torch.tensor(2.0)),
    "step is 2.5, expected a whole number": every([], step=lambda one: 2.5),
    "nan stands where a finite number": at("state", 0, "step", value=torch.tensor(torch.nan)),
    "inf stands where a finite number": every([], step=lambda one: float("inf")),
    "stands where a finite number is exp": every([], step=lambda one: 10**30),
    "True stands where a finite number": every([], step=lambda one: True),
    r"a float32 tensor \[1\] stands": every([], step=lambda one: torch.tensor([3.0])),
    "None stands where a finite": every([], step=lambda one: None),
    r"\(1\+0j\)|complex stands": every([], step=lambda one: torch.tensor(1 + 0j)),
    "count is 0, expected the updates done": every([], step=lambda one: 0),
    "count is 16777217": every([], step=lambda one: 2**24 + 1),
    "transformer.h.0.attn.q_proj.weight has moments, transformer.h.1.attn.q_proj.weight has none, "
    "but they are parts of one parameter, blocks.attention.wq": without("state", 7),
    "q_proj.weight has its exp_avg in float32, transformer.h.1.attn.q_proj.weight has its exp_avg "
    "in bfloat16": lambda tree: at("state", 7, "exp_avg",
                                   value=tree["state"][7]["exp_avg"].bfloat16())(tree),
    "lr of group 0 is None, expected a finite number": in_groups(lr=None),
    "betas of group 1 are": at("param_groups", 1, "betas", value=(0.9, 2.0)),
    "weight_decay of group 0 is None": without("param_groups", 0, "weight_decay"),
    "dict of 1 stands where a finite number": in_groups(extra={"a": 1}),
    "group 0 has a field 3, expected torch's own": at("param_groups", 0, 3, value=1),
    "group 0 has a field parameters": in_groups(parameters=[]),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_wrong_optimizer_is_refused_and_nothing_written(words, changed, tmp_path):
    refused(f"its optimizer cannot be converted: .*{words}", changed(WRONG[words]), tmp_path)


def test_layers_with_rates_of_their_own_are_refused_even_with_names(tmp_path):
    module = build(config_of("gpt"))
    named = list(module.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if ".h.0." in n], "lr": 1e-4},
        {"params": [(n, p) for n, p in named if ".h.0." not in n]},
    ]
    optimizer = torch.optim.AdamW(groups)
    take_step(module, optimizer, 0)
    path = save(checkpoint_of("gpt", module, optimizer), tmp_path / "a.pt")
    words = (
        r"transformer\.h\.0\.ln_1\.weight is in group 0, transformer\.h\.1\.ln_1\.weight is in "
        r"group 1, but they are parts of one parameter, blocks\.attention_norm\.scale"
    )
    refused(words, path, tmp_path)


def test_checkpoint_without_optimizer_is_refused(gpt, tmp_path):
    path = save({"model": gpt["model"], "model_args": said("gpt")}, tmp_path / "a.pt")
    refused("its optimizer cannot be converted: the file holds none", path, tmp_path)
    path = save(gpt | {"optimizer": [1, 2]}, tmp_path / "b.pt")
    refused("the file holds none that can be read; leave --with-optimizer out", path, tmp_path)


def test_two_training_steps_that_differ_are_refused(gpt, tmp_path):
    path = save(gpt | {"step": 12}, tmp_path / "a.pt")
    refused(r"step and iter_num of the checkpoint differ: \[12, 11\]", path, tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_moments_that_are_not_finite_are_refused_unless_allowed(number, changed, tmp_path):
    def change(tree):
        tree["state"][7]["exp_avg_sq"][3, 3] = number

    path = changed(change)
    words = r"infinite numbers in exp_avg_sq\.transformer\.h\.1\.attn\.q_proj\.weight:.*--allow-"
    refused(words, path, tmp_path)
    torch_to_folder(path, tmp_path / "out", with_optimizer=True, allow_nonfinite=True)
    back = folder_to_torch(tmp_path / "out", tmp_path / "b.pt", with_optimizer=True)
    assert back.identical_moments == 46


def test_damaged_moment_is_named(gpt, tmp_path):
    path = save(gpt, tmp_path / "a.pt")
    tensor = open_checkpoint(path).optimizer["state"][2]["exp_avg"]  # type: ignore[index]
    with path.open("r+b") as file:
        file.seek(tensor.record.offset)
        byte = file.read(1)[0]
        file.seek(tensor.record.offset)
        file.write(bytes([byte ^ 1]))
    refused(r"checksum does not match in exp_avg\.transformer\.h\.0\.attn\.k_proj\.weight", path,
            tmp_path)  # fmt: skip


def test_the_way_back_needs_an_optimizer_and_a_pt_file(gpt, tmp_path):
    torch_to_folder(save(gpt, tmp_path / "a.pt"), tmp_path / "out", with_optimizer=True)
    for name in ("b.safetensors", "b"):
        with pytest.raises(ValueError, match=r"--with-optimizer needs a \.pt, \.pth or \.bin file"):
            folder_to_torch(tmp_path / "out", tmp_path / name, with_optimizer=True)
    (tmp_path / "out" / OPTIMIZER_FILE).unlink()
    with pytest.raises(ValueError, match=r"out has no optimizer\.safetensors: leave --with-opt"):
        folder_to_torch(tmp_path / "out", tmp_path / "b.pt", with_optimizer=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "out"]


def test_mutated_optimizers_are_refused_in_words_or_convert_whole(gpt, tmp_path):
    rng = random.Random(5)
    values = [None, True, -1, 7, 2**70, 0.5, float("nan"), "", "exp_avg", [], [3], {}, (0.9, 0.95),
              torch.zeros(()), torch.tensor(3.0), torch.zeros(31, 16), torch.zeros(3).long(),
              torch.zeros(0)]  # fmt: skip
    failed = 0
    for number in range(150):
        content = copy.deepcopy(gpt["optimizer"])
        for _ in range(rng.choice([1, 1, 1, 3])):
            mutate(content, rng, values)
        path = save(gpt | {"optimizer": content}, tmp_path / "a.pt")
        message = ""
        try:
            torch_to_folder(path, tmp_path / "out", with_optimizer=True)
        except ValueError as error:
            message = str(error)
        if message:
            assert message.startswith(str(path)), number
            assert len(message) < 2000, number
            assert [p.name for p in tmp_path.iterdir()] == ["a.pt"], number
            failed += 1
        else:
            done = folder_to_torch(tmp_path / "out", tmp_path / "b.pt", with_optimizer=True)
            assert done.identical_moments == done.moments, number
            torch_to_folder(tmp_path / "b.pt", tmp_path / "again", with_optimizer=True)
            same_moments(read(tmp_path / "again"), read(tmp_path / "out"))
            for folder in ("out", "again"):
                shutil.rmtree(tmp_path / folder)
            (tmp_path / "b.pt").unlink()
        path.unlink()
    assert 100 < failed < 150


def mutate(content, rng, values) -> None:
    """Sets, deletes, doubles or swaps one entry somewhere in the tree."""
    places = []

    def walk(branch, depth) -> None:
        if isinstance(branch, dict | list) and depth < 5:
            for key in list(branch) if isinstance(branch, dict) else range(len(branch)):
                places.append((branch, key))
                walk(branch[key], depth + 1)

    walk(content, 0)
    branch, key = rng.choice(places)
    match rng.choice(["set", "set", "delete", "double", "swap"]):
        case "set":
            branch[key] = rng.choice(values)
        case "delete":
            del branch[key]
        case "double" if isinstance(branch, list):
            branch.append(branch[key])
        case "double":
            branch[rng.choice([99, "99", None, 1.5])] = branch[key]
        case "swap":
            other, name = rng.choice(places)
            branch[key], other[name] = other[name], branch[key]


# The command line


def test_command_line_converts_both_ways_and_tells(run, gpt, tmp_path):
    save(gpt, tmp_path / "a.pt")
    _, out, _ = run("inspect", tmp_path / "a.pt")
    assert "optimizer   AdamW after 3 updates, parameters in its groups: 13 and 10\n" in out
    code, out, err = run("convert", tmp_path / "a.pt", tmp_path / "out", "--with-optimizer")
    assert (code, err) == (0, "")
    assert "optimizer: AdamW after 3 updates, 46 moments\n" in out
    assert "not converted" not in out
    _, out, _ = run("inspect", tmp_path / "out")
    assert "optimizer   AdamW after 3 updates, groups: 2\n" in out
    code, out, err = run("convert", tmp_path / "out", tmp_path / "b.pt", "--with-optimizer")
    assert (code, err) == (0, "")
    assert "46 of 46 moments of the optimizer have its bytes too\n" in out


def test_inspect_says_what_optimizer_it_is_where_it_cannot_be_converted(run, changed, tmp_path):
    path = changed(in_groups(amsgrad=True))
    code, out, _ = run("inspect", path, "--json")
    assert code == 0
    assert json.loads(out)["optimizer"].startswith("cannot be converted: it is AdamW with amsgrad")
    path = save({"model": state_of("gpt"), "model_args": said("gpt")}, tmp_path / "b.pt")
    assert json.loads(run("inspect", path, "--json")[1])["optimizer"] is None


def test_open_optimizer_reads_no_moment(gpt, tmp_path, monkeypatch):
    source = open_torch(save(gpt, tmp_path / "a.pt"))
    reads = []
    kind = type(next(iter(source.checkpoint.tensors.values())))
    whole = kind.read
    monkeypatch.setattr(kind, "read", lambda self: (reads.append(self.shape), whole(self))[1])
    assert open_optimizer(source).count == 3
    assert set(reads) == {()}
