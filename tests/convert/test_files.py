"""Conversion on disk: every byte both ways, recorded, in little memory, whole or not at all."""

import gc
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tracemalloc
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from convert import files as files_module
from convert.checkpoint.containers import open_checkpoint
from convert.checkpoint.layout import tensors_in
from convert.counterparts import build
from convert.files import folder_to_torch, parse_size, torch_to_folder
from convert.tables import TABLES
from jaxslm import GPTConfig
from jaxslm.tokenizer import ByteTokenizer, CharTokenizer
from jaxslm.weights import map_folder
from tests.convert.checkpoints import (
    CONTAINERS,
    TIES,
    config_of,
    gpt_file,
    raw,
    said,
    save,
    state_of,
    training_checkpoint,
    tree,
)
from tests.golden.make_golden import build_original, load_originals

MODELS = ["lumen", "gpt", "ripple"]
LETTERS = "".join(map(chr, range(0x100, 0x400)))
BACK = ["back.pt", "back.pth", "back.bin", "back.safetensors", "back"]


def load_torch(path: Path) -> dict[str, torch.Tensor]:
    """A torch file or folder as other people's libraries read it."""
    if path.is_dir():
        weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        shards = {name: load_file(path / name) for name in set(weight_map.values())}
        assert sum(map(len, shards.values())) == len(weight_map)
        return {key: shards[name][key] for key, name in weight_map.items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True)


def assert_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert raw(tensor) == raw(expected[key]), key


# Round trips


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_comes_back_byte_for_byte(container, model, tmp_path):
    state = state_of(model)
    source = CONTAINERS[container](tmp_path / "it", model, state)
    done = torch_to_folder(source, tmp_path / "out")
    assert (done.destination, done.config) == (tmp_path / "out", config_of(model))
    single = {key: tensor for key, tensor in state.items() if key not in TABLES[model].ties}
    assert done.tensors == len(single)
    assert done.parameters == sum(tensor.numel() for tensor in single.values())
    assert done.nbytes == 4 * done.parameters
    assert sorted(tree(tmp_path / "out")) == ["config.json", "model.safetensors", "parity.json"]
    name = BACK[list(CONTAINERS).index(container) % len(BACK)]
    back = folder_to_torch(tmp_path / "out", tmp_path / name)
    assert (back.tensors, back.identical, back.parameters) == (
        done.tensors, done.tensors, done.parameters,
    )  # fmt: skip
    loaded = load_torch(tmp_path / name)
    assert_equal(loaded, state)
    build(done.config).load_state_dict(loaded, strict=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BACK)
def test_every_dtype_comes_back_in_every_container(name, dtype, tmp_path):
    state = {key: tensor.to(dtype) for key, tensor in state_of("gpt").items()}
    torch_to_folder(gpt_file(tmp_path / "a.pt", state), tmp_path / "out")
    assert {a.dtype.name for a in map_folder(tmp_path / "out")[1].values()} == {str(dtype)[6:]}
    folder_to_torch(tmp_path / "out", tmp_path / name)
    loaded = load_torch(tmp_path / name)
    assert_equal(loaded, state)
    if name == "back.pt":
        assert list(loaded) == list(state)
        assert loaded["lm_head.weight"].data_ptr() == loaded[TIES["gpt"][0]].data_ptr()
    torch_to_folder(tmp_path / name, tmp_path / "again", overrides=_missing(name))
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


def _missing(name: str) -> tuple[str, ...]:
    """A raw state dict holds no config; the safetensors that we write do."""
    return ("n_head=4", "block_size=16") if Path(name).suffix in (".pt", ".pth", ".bin") else ()


def test_twelve_layers_keep_their_order(tmp_path):
    state = state_of("lumen", num_layers=12)
    path = save({"model": state, "model_args": said("lumen", num_layers=12)}, tmp_path / "a.pt")
    torch_to_folder(path, tmp_path / "out")
    folder_to_torch(tmp_path / "out", tmp_path / "back.pt")
    assert list(load_torch(tmp_path / "back.pt")) == list(state)
    assert_equal(load_torch(tmp_path / "back.pt"), state)


REAL = {
    "gpt_small.pt": "gpt",
    "gpt_small_safetensors": "gpt",
    "lumen_3m.pt": "lumen",
    "lumen_3m_bf16.pt": "lumen",
    "ripple_char.pt": "ripple",
    "ripple_window.pt": "ripple",
}


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoint_comes_back_byte_for_byte_and_loads_into_the_original(
    name, tmp_path, shared
):
    source = shared("checkpoints", name)
    preset = "lumen-3m" if name.startswith("lumen") else None
    done = torch_to_folder(source, tmp_path / "out", preset=preset)
    expected = open_checkpoint(source).tensors
    back = folder_to_torch(tmp_path / "out", tmp_path / BACK[list(REAL).index(name) % len(BACK)])
    assert back.identical == back.tensors == done.tensors
    loaded = load_torch(back.destination)
    assert expected.keys() <= loaded.keys()
    for key, tensor in expected.items():
        assert raw(loaded[key]) == raw(tensor), key
    fields = {key: getattr(done.config, key) for key in said(REAL[name])}
    original = build_original(load_originals(shared("originals")), REAL[name], fields)
    original.to(next(iter(loaded.values())).dtype).load_state_dict(loaded, strict=True)
    record = json.loads((tmp_path / "out" / "parity.json").read_text())
    if source.is_file():
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        assert record["source"]["sha256"] == {name: digest}


# Casts


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_cast_to_a_folder_and_back_rounds_each_number_once(dtype, tmp_path):
    state = state_of("gpt")
    kind = getattr(torch, dtype)
    torch_to_folder(gpt_file(tmp_path / "a.pt", state), tmp_path / "out", dtype=dtype)
    assert {array.dtype.name for array in map_folder(tmp_path / "out")[1].values()} == {dtype}
    for name in ("back.pt", "back.safetensors"):
        done = folder_to_torch(tmp_path / "out", tmp_path / name)
        assert done.identical == 0
        assert_equal(load_torch(tmp_path / name), {k: t.to(kind) for k, t in state.items()})
        done = folder_to_torch(tmp_path / "out", tmp_path / f"wide-{name}", dtype="float32")
        assert done.nbytes == 4 * done.parameters
        assert dtype != "float64" or done.identical == done.tensors
        expected = {key: tensor.to(kind).float() for key, tensor in state.items()}
        assert_equal(load_torch(tmp_path / f"wide-{name}"), expected)


@pytest.mark.parametrize("name", ["back.pt", "back.safetensors", "back"])
def test_overflow_is_an_error_naming_the_tensor_and_leaves_nothing(name, tmp_path):
    state = {key: tensor.bfloat16() for key, tensor in state_of("gpt").items()}
    key = "transformer.h.1.attn.c_proj.weight"
    state[key][1, 2] = 1e5
    path = gpt_file(tmp_path / "a.pt", state)
    words = rf"{key}: 1 numbers overflow in float16, such as 99840 .*choose a wider --dtype"
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=words):
        torch_to_folder(path, tmp_path / "out", dtype="float16")
    assert tree(tmp_path) == before
    torch_to_folder(path, tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=words):
        folder_to_torch(tmp_path / "out", tmp_path / name, dtype="float16")
    assert tree(tmp_path) == before


def test_nonfinite_weights_need_the_flag_and_then_keep_their_bits(tmp_path):
    state = state_of("gpt")
    state["transformer.ln_f.bias"].view(torch.int32)[2] = 0x7FC01234  # a NaN with a payload
    state["transformer.h.0.mlp.c_fc.weight"][0, 0] = torch.inf
    path = gpt_file(tmp_path / "a.pt", state)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"NaN or infinite numbers in transformer\.h\.0\.mlp\.c_fc"
                       r"\.weight, transformer\.ln_f\.bias: .*--allow-nonfinite"):  # fmt: skip
        torch_to_folder(path, tmp_path / "out")
    assert tree(tmp_path) == before
    torch_to_folder(path, tmp_path / "out", allow_nonfinite=True)
    folder_to_torch(tmp_path / "out", tmp_path / "back.pt")
    assert_equal(load_torch(tmp_path / "back.pt"), state)


# parity.json


def test_parity_json_records_what_was_done(tmp_path):
    state = state_of("gpt")
    state["transformer.ln_f.bias"] = state["transformer.ln_f.bias"].bfloat16()
    path = save(
        {"model": state, "config": {n: v for n, v in said("gpt").items() if n != "n_head"}},
        tmp_path / "a.pt",
    )
    torch_to_folder(path, tmp_path / "out", overrides=("n_head=4",))
    record = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert record["jaxslm"] == version("jaxslm")
    assert record["versions"] == {"python": platform.python_version()} | {
        name: version(name) for name in ("jax", "flax", "numpy", "torch")
    }
    assert record["table"] == {"model": "gpt", "version": TABLES["gpt"].version}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert record["source"] == {
        "container": "torch zip",
        "layout": 'state dict under "model"',
        "sha256": {"a.pt": digest},
    }
    assert record["config_origins"]["n_head"] == "--config"
    assert record["config_origins"]["n_layer"] == "config, the tensors' shapes"
    assert record["config_origins"]["rope_base"] == "constant of the original"
    assert record["cast"] is None
    assert record["check"] is None
    assert record["tensors"].keys() == state.keys() - {"lm_head.weight"}
    paths = set()
    for key, tensor in record["tensors"].items():
        dtype, shape, data = raw(state[key])
        paths.add(tensor.pop("parameter"))
        assert tensor == {
            "sha256": hashlib.sha256(data).hexdigest(), "dtype": dtype, "shape": list(shape),
        }, key  # fmt: skip
    assert paths == map_folder(tmp_path / "out")[1].keys()


def test_parity_json_hashes_the_checkpoint_and_not_the_cast(tmp_path):
    path = gpt_file(tmp_path / "a.pt")
    torch_to_folder(path, tmp_path / "plain")
    torch_to_folder(path, tmp_path / "cast", dtype="bfloat16")
    plain, cast = (
        json.loads((tmp_path / name / "parity.json").read_text()) for name in ("plain", "cast")
    )
    assert cast["tensors"] == plain["tensors"]
    assert (plain["cast"], cast["cast"]) == (None, "bfloat16")


def test_parity_json_hashes_every_shard_and_the_config(tmp_path):
    source = CONTAINERS["sharded safetensors"](tmp_path / "it", "ripple", state_of("ripple"))
    torch_to_folder(source, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "parity.json").read_text())["source"]["sha256"]
    assert found == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.iterdir()
    }
    assert len(found) == 4


def test_check_runs_before_anything_is_written_and_is_recorded(tmp_path):
    path = gpt_file(tmp_path / "a.pt")
    seen = []

    def check(source):
        seen.append((source.config, tree(tmp_path).keys()))
        return {"verdict": "passed", "figures": [1.5]}

    torch_to_folder(path, tmp_path / "out", check=check)
    assert seen == [(config_of("gpt"), {"a.pt"})]
    record = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert record["check"] == {"verdict": "passed", "figures": [1.5]}

    def fail(source):
        raise RuntimeError("failed")

    before = tree(tmp_path)
    with pytest.raises(RuntimeError, match="failed"):
        torch_to_folder(path, tmp_path / "other", check=fail)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "identical"),
    [(None, None), ("{", None), ("[" * 100_000, None), ("[]", None), ('{"tensors": {}}', 0)],
)
def test_damaged_parity_json_is_no_obstacle(text, identical, tmp_path):
    torch_to_folder(gpt_file(tmp_path / "a.pt"), tmp_path / "out")
    (tmp_path / "out" / "parity.json").unlink()
    if text is not None:
        (tmp_path / "out" / "parity.json").write_text(text)
    assert folder_to_torch(tmp_path / "out", tmp_path / "b.safetensors").identical == identical


def test_changed_weights_are_counted_as_not_identical(tmp_path):
    torch_to_folder(gpt_file(tmp_path / "a.pt"), tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # in one tensor of a stack
    weights.write_bytes(data)
    done = folder_to_torch(tmp_path / "out", tmp_path / "b.safetensors")
    assert done.identical == done.tensors - 1


def test_notes_say_what_was_not_converted(tmp_path):
    path = save(training_checkpoint("gpt", state_of("gpt")) | {"model_args": {"lr": 1}},
                tmp_path / "a.pt")  # fmt: skip
    notes = torch_to_folder(path, tmp_path / "out").notes
    assert notes == (
        "not converted: optimizer (24 parameters, 48 moment tensors, 0.1 MB; "
        "pass --with-optimizer to convert it too)",
        "not converted: iter_num (3)",
        "not converted: best_val_loss (1.5)",
        "not used: lr in model_args",
    )


# Shards


def test_shards_are_no_larger_than_asked_for(tmp_path):
    state = state_of("gpt")
    torch_to_folder(gpt_file(tmp_path / "a.pt", state), tmp_path / "out")
    folder_to_torch(tmp_path / "out", tmp_path / "one")
    assert "model-00001-of-00001.safetensors" in tree(tmp_path / "one")
    folder_to_torch(tmp_path / "out", tmp_path / "back", shard_size=5000)
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 4
    for number, shard in enumerate(shards, 1):
        assert shard.name == f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with safe_open(shard, framework="pt") as file:
            sizes = [file.get_tensor(key).numel() * 4 for key in file.keys()]  # noqa: SIM118
            assert file.metadata() == {"format": "pt"}
        assert sum(sizes) <= 5000 or len(sizes) == 1
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in state.values())
    assert list(index["weight_map"]) == list(state)
    assert_equal(load_torch(tmp_path / "back"), state)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == said("gpt") | {"layer_norm_eps": 1e-5, "rope_base": 10000.0}


def test_safetensors_file_carries_its_config(tmp_path):
    torch_to_folder(gpt_file(tmp_path / "a.pt"), tmp_path / "out")
    folder_to_torch(tmp_path / "out", tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["config"])["n_head"] == 4
        assert list(file.keys()) == sorted(state_of("gpt"))
    source = torch_to_folder(tmp_path / "b.safetensors", tmp_path / "again")
    assert source.config == config_of("gpt")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("500MB", 500 * 10**6), ("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("1.5k", 1500),
     (" 2kB ", 2000), ("10M", 10**7), ("7B", 7)],
)  # fmt: skip
def test_size_is_parsed(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.9", "-1", "5TB", "GB", "5 G B", "1e9", "5GiB"])
def test_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a size is a number of bytes with kB, MB or GB, such as"):
        parse_size(text)


# Destinations


@pytest.fixture
def made(tmp_path):
    """A checkpoint, and a model folder of another one."""
    gpt_file(tmp_path / "a.pt")
    path = save({"model": state_of("ripple"), "model_args": said("ripple")}, tmp_path / "b.pt")
    torch_to_folder(path, tmp_path / "out")
    return tmp_path


def refused(made, words, convert, *args, error=OSError, **options) -> None:
    """A conversion fails in these words, and everything is as it was."""
    before = tree(made)
    with pytest.raises(error, match=words):
        convert(*args, **options)
    assert tree(made) == before


def test_existing_output_is_kept_without_overwrite(made):
    refused(made, "out exists: pass --overwrite", torch_to_folder, made / "a.pt", made / "out")
    folder_to_torch(made / "out", made / "back.pt")
    folder_to_torch(made / "out", made / "back")
    for name in ("back.pt", "back", "a.pt"):
        refused(made, f"{name} exists: pass --overwr", folder_to_torch, made / "out", made / name)


def test_overwrite_replaces_the_whole_output(made):
    torch_to_folder(made / "a.pt", made / "out", overwrite=True)
    assert map_folder(made / "out")[0] == config_of("gpt")
    folder_to_torch(made / "out", made / "back", shard_size=4000)
    folder_to_torch(made / "out", made / "back", overwrite=True)
    assert len(tree(made / "back")) == 3
    (made / "back.pt").write_text("old")
    folder_to_torch(made / "out", made / "back.pt", overwrite=True)
    assert_equal(load_torch(made / "back.pt"), state_of("gpt"))
    names = ["a.pt", "b.pt", "back", "back.pt", "out"]
    assert sorted(path.name for path in made.iterdir()) == names


def test_overwrite_keeps_an_earlier_tokenizer_that_fits(made):
    """Where none is named and the source brings none."""
    size, out = config_of("gpt").vocab_size, made / "out"
    saved = CharTokenizer(LETTERS[:size]).save(out).read_bytes()
    done = torch_to_folder(made / "a.pt", out, overwrite=True)
    assert done.notes == (f"tokenizer: kept from the earlier {out}",)
    assert (out / "tokenizer.json").read_bytes() == saved
    ByteTokenizer().save(made)
    refused(made, "257 ids, the model knows", torch_to_folder, made / "a.pt", out, overwrite=True,
            tokenizer=made / "tokenizer.json", error=ValueError)  # fmt: skip
    (made / "named").mkdir()
    named = CharTokenizer("abc").save(made / "named")
    done = torch_to_folder(made / "a.pt", out, overwrite=True, tokenizer=named)
    assert (done.notes, (out / "tokenizer.json").read_bytes()) == ((), named.read_bytes())


@pytest.mark.parametrize("content", ["too many ids", "{"])
def test_overwrite_leaves_out_an_earlier_tokenizer_that_does_not_fit(made, content):
    size, out = config_of("gpt").vocab_size, made / "out"
    if content == "{":
        (out / "tokenizer.json").write_text(content)
        words = "is no tokenizer that can be read"
    else:
        CharTokenizer(LETTERS[: size + 1]).save(out)
        words = f"has {size + 1} ids, the model knows {size}: it is another model's tokenizer"
    [note] = torch_to_folder(made / "a.pt", out, overwrite=True).notes
    assert note.startswith(f"the tokenizer of the earlier {out} is left out: ")
    assert words in note
    assert sorted(tree(out)) == ["config.json", "model.safetensors", "parity.json"]


def test_tokenizer_beside_the_weights_comes_before_an_earlier_one(tmp_path):
    source = CONTAINERS["sharded safetensors"](tmp_path / "it", "gpt", state_of("gpt"))
    source = source if source.is_dir() else source.parent
    torch_to_folder(source, tmp_path / "out")
    earlier = CharTokenizer("abc").save(tmp_path / "out").read_bytes()
    ByteTokenizer().save(source)
    left, kept = torch_to_folder(source, tmp_path / "out", overwrite=True).notes
    assert left.startswith("the tokenizer beside the weights is left out: ")
    assert kept == f"tokenizer: kept from the earlier {tmp_path / 'out'}"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == earlier
    (source / "tokenizer.json").unlink()
    beside = CharTokenizer("ab").save(source)
    done = torch_to_folder(source, tmp_path / "out", overwrite=True)
    assert done.notes == (f"tokenizer: {beside}",)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == beside.read_bytes()


def test_output_never_replaces_its_own_source(tmp_path):
    folder = tmp_path / "weights"
    CONTAINERS["safetensors"](folder, "gpt", state_of("gpt"))
    torch_to_folder(folder, tmp_path / "out")
    (tmp_path / "link").symlink_to(folder)
    before = tree(tmp_path)
    inside = next(path for path in folder.rglob("*.safetensors"))
    for source in (folder, tmp_path / "link", inside):
        with pytest.raises(ValueError, match="holds the source"):
            torch_to_folder(source, folder, overwrite=True)
    with pytest.raises(ValueError, match="holds the source"):
        folder_to_torch(tmp_path / "out", tmp_path / "out", overwrite=True)
    assert tree(tmp_path) == before


def test_failed_overwrite_keeps_the_earlier_output(made):
    state = state_of("gpt")
    state["transformer.ln_f.bias"][0] = torch.nan
    path = gpt_file(made / "nan.pt", state)
    refused(made, "NaN", torch_to_folder, path, made / "out", overwrite=True, error=ValueError)


def test_folder_with_other_files_is_never_replaced(made):
    (made / "out" / "notes.txt").write_text("precious")
    words = r"out holds notes\.txt, which is not output of this command"
    refused(made, words, torch_to_folder, made / "a.pt", made / "out", overwrite=True)
    shutil.copytree(made / "out", made / "model")
    (made / "model" / "notes.txt").unlink()
    refused(made, words, folder_to_torch, made / "model", made / "out", overwrite=True)


def test_parent_must_exist(made):
    words = "nowhere does not exist: create it first"
    refused(made, words, torch_to_folder, made / "a.pt", made / "nowhere" / "out")
    refused(made, words, folder_to_torch, made / "out", made / "nowhere" / "back.pt")


def test_destinations_that_make_no_sense_are_refused(made):
    refused(made, "name a .pt, .pth, .bin or .safetensors file, or a folder without",
            folder_to_torch, made / "out", made / "back.onnx", error=ValueError)  # fmt: skip
    refused(made, "--shard-size is for a folder", folder_to_torch, made / "out", made / "b.pt",
            shard_size=10, error=ValueError)  # fmt: skip


def test_the_current_folder_can_be_filled(made, monkeypatch):
    (made / "empty").mkdir()
    monkeypatch.chdir(made / "empty")
    torch_to_folder(made / "a.pt", Path(), overwrite=True)
    assert sorted(tree(made / "empty")) == ["config.json", "model.safetensors", "parity.json"]
    assert sorted(path.name for path in made.iterdir()) == ["a.pt", "b.pt", "empty", "out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_write_permission_is_named(made):
    (made / "closed").mkdir(mode=0o555)
    words = "Permission denied.*closed"
    refused(made, words, torch_to_folder, made / "a.pt", made / "closed" / "out")
    refused(made, words, folder_to_torch, made / "out", made / "closed" / "back.pt")


@pytest.mark.parametrize("destination", ["new", "out"])
def test_interrupted_conversion_leaves_nothing(destination, made, monkeypatch):
    def interrupted(folder, *args):
        (folder / "parity.json").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(files_module, "write_folder", interrupted)
    refused(made, None, torch_to_folder, made / "a.pt", made / destination, overwrite=True,
            error=KeyboardInterrupt)  # fmt: skip


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 kB, where this machine lets us make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield disk
    gc.collect()
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("name", ["out", "back.pt", "back.safetensors", "back"])
def test_full_disk_is_named_and_left_empty(name, small_disk, tmp_path):
    convert, source = torch_to_folder, gpt_file(tmp_path / "a.pt")
    if name != "out":
        torch_to_folder(source, tmp_path / "model")
        convert, source = folder_to_torch, tmp_path / "model"
    with pytest.raises(OSError, match=f"No space left on device.*{name}") as caught:
        convert(source, small_disk / name)
    assert caught.value.filename == str(small_disk / name)
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("name", ["back.pt", "back.safetensors"])
def test_write_that_fails_is_reported_where_no_disk_can_be_filled(name, made, monkeypatch):
    opens = Path.open

    class FullDisk:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            if len(data) > 500:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def flush(self):
            self.file.flush()

    def full(path, mode="r", *args, **options):
        file = opens(path, mode, *args, **options)
        return FullDisk(file) if "x" in mode else file

    monkeypatch.setattr(Path, "open", full)
    before = sorted(made.rglob("*"))
    with pytest.raises(OSError, match="No space left on device"):
        folder_to_torch(made / "out", made / name)
    assert sorted(made.rglob("*")) == before


# Memory, and what is never read


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A GPT of 54 MB in a training checkpoint of three times that."""
    folder = tmp_path_factory.mktemp("large")
    fields = {"vocab_size": 2048, "n_embd": 512, "n_layer": 4, "n_head": 8}
    state = build(GPTConfig(n_kv_head=2, block_size=8, **fields)).state_dict()
    moments = {
        number: {"step": torch.tensor(1.0), "exp_avg": tensor, "exp_avg_sq": tensor.clone()}
        for number, tensor in enumerate(t.clone() for t in list(state.values())[:-1])
    }
    save(
        {
            "model": state,
            "model_args": said("gpt", **fields, n_kv_head=2, block_size=8),
            "optimizer": {"state": moments, "param_groups": [{"params": list(moments)}]},
        },
        folder / "large.pt",
    )
    weights = sum(tensor.nbytes for key, tensor in state.items() if key != "lm_head.weight")
    assert weights > 45e6
    assert (folder / "large.pt").stat().st_size > 2.9 * weights
    yield folder / "large.pt", weights
    shutil.rmtree(folder)


def test_conversion_holds_a_fraction_of_the_weights(large, tmp_path):
    source, weights = large
    largest = 4 * 512 * 2048 * 4  # bytes of blocks.mlp.w_up

    def peak(convert, *args) -> int:
        gc.collect()
        tracemalloc.start()
        try:
            convert(*args)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert largest < 0.35 * weights
    # Numpy's arrays are traced, mapped files are not. One parameter is written while the next is
    # assembled, and copies of a few tensors.
    assert peak(torch_to_folder, source, tmp_path / "out") < 2.5 * largest < 0.9 * weights
    assert peak(folder_to_torch, tmp_path / "out", tmp_path / "b.safetensors") < largest
    assert peak(folder_to_torch, tmp_path / "out", tmp_path / "b.pt") < 1.3 * weights


def test_optimizer_moments_are_never_read(large, tmp_path, monkeypatch):
    source, _ = large
    damaged = tmp_path / "damaged.pt"
    shutil.copy(source, damaged)
    optimizer = list(tensors_in(open_checkpoint(source).optimizer))
    assert len(optimizer) > 60
    with damaged.open("r+b") as file:
        for tensor in optimizer:
            file.seek(tensor.record.offset)
            byte = file.read(1)[0]
            file.seek(tensor.record.offset)
            file.write(bytes([byte ^ 0xFF]))
    with pytest.raises(ValueError, match="checksum does not match in the optimizer"):
        open_checkpoint(damaged).verify([], optimizer=True)
    moments = {tensor.record.offset for tensor in optimizer if tensor.shape}
    kind, maps = type(optimizer[0].record.file), type(optimizer[0].record.file).map
    mapped = set()

    def watched(self, offset, nbytes):
        mapped.add(offset)
        return maps(self, offset, nbytes)

    monkeypatch.setattr(kind, "map", watched)
    assert torch_to_folder(damaged, tmp_path / "out").tensors == 43
    assert len(mapped) >= 43
    assert not mapped & moments
    done = folder_to_torch(tmp_path / "out", tmp_path / "b.safetensors")
    assert done.identical == 43
    assert np.array_equal(
        load_torch(tmp_path / "b.safetensors")["transformer.wte.weight"].numpy(),
        torch.load(source, weights_only=True, mmap=True)["model"]["transformer.wte.weight"].numpy(),
    )
