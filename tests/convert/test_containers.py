"""Every container and layout opens to the same tensors; everything else says what it is."""

import gzip
import io
import json
import os
import pickle
import socket
import struct
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from convert.checkpoint import torch_zip as torch_zip_module
from convert.checkpoint.containers import Checkpoint, CheckpointError, LazyTensor, open_checkpoint
from convert.checkpoint.layout import tensors_in
from convert.checkpoint.lazy_tensor import DTYPES, Record, SourceFile
from tests.convert.damage import (
    legacy_file,
    sharded,
    state_dict,
    torch_legacy,
    torch_zip,
    training_checkpoint,
    zip_file,
    zip_records,
)

WRITERS: dict[str, Callable[[object], bytes]] = {
    "torch zip": torch_zip,
    "torch legacy (non-zip)": torch_legacy,
}


def open_bytes(tmp_path: Path, data: bytes, name: str = "file.pt") -> Checkpoint:
    (tmp_path / name).write_bytes(data)
    return open_checkpoint(tmp_path / name)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, LazyTensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        array = found[key].read()
        assert found[key].shape == array.shape == tuple(tensor.shape)
        assert found[key].torch_dtype == str(tensor.dtype).removeprefix("torch.")
        assert found[key].dtype == array.dtype
        assert found[key].nbytes == array.nbytes
        assert array.tobytes() == raw(tensor), key


@dataclass
class GPTConfig:
    n_layer: int = 2
    dropout: float = 0.1


class LumenConfig:
    num_heads = 4


# Containers


@pytest.mark.parametrize("container", WRITERS)
def test_torch_file_gives_back_every_byte(container: str, tmp_path: Path) -> None:
    checkpoint = open_bytes(tmp_path, WRITERS[container](state_dict()))
    checkpoint.verify()
    assert (checkpoint.container, checkpoint.layout) == (container, "raw state dict")
    assert (checkpoint.files, checkpoint.stripped) == ((tmp_path / "file.pt",), ())
    assert_same(checkpoint.tensors, state_dict())


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_file_of_any_protocol_opens(is_zip: bool, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    weights = state_dict()
    torch.save(weights, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    assert_same(open_checkpoint(path).tensors, weights)


@pytest.mark.parametrize(
    "dtype",
    [name for name in DTYPES if name != "float8_e8m0fnu" or hasattr(torch, name)],
)
def test_every_dtype_keeps_its_bits(dtype: str, tmp_path: Path) -> None:
    bits = torch.arange(64, dtype=torch.uint8) * 3 % 128
    tensor = (bits % 2 if dtype == "bool" else bits).view(getattr(torch, dtype)).reshape(2, -1)
    weights = {"a": tensor, "b": tensor[:, 1:], "c": tensor[0, 0]}
    assert_same(open_bytes(tmp_path, torch_zip(weights)).tensors, weights)
    torch.save(weights, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert_same(open_checkpoint(tmp_path / "legacy.pt").tensors, weights)
    if dtype not in ("complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        weights = {key: value.clone().contiguous() for key, value in weights.items()}
        assert_same(open_bytes(tmp_path, save(weights), "a.safetensors").tensors, weights)


@pytest.mark.parametrize("container", WRITERS)
def test_strided_tensors_read_as_torch_shows_them(container: str, tmp_path: Path) -> None:
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    weights = {
        "transposed": base.permute(3, 1, 0, 2),
        "slice": base[1, ::2, 1:3, ::3],
        "row": base[1, 2, 3],
        "expanded": base[:1, :1, :1].expand(2, 3, 4, 5),
        "diagonal": torch.arange(9.0).reshape(3, 3).diagonal(),
        "scalar": base[1, 2, 3, 4],
        "empty": base[:0],
        "no elements": torch.zeros(3, 0, 2),
    }
    assert_same(open_bytes(tmp_path, WRITERS[container](weights)).tensors, weights)


def test_unaligned_bfloat16_can_be_computed_with(tmp_path: Path) -> None:
    weights = {"x": torch.zeros(1, dtype=torch.uint8), "w": torch.arange(8.0).bfloat16()}
    array = open_bytes(tmp_path, torch_legacy(weights)).tensors["w"].read()
    assert array.astype(np.float32).tolist() == list(range(8))


def test_arrays_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    tensor = open_bytes(tmp_path, torch_zip(state_dict())).tensors["lm_head.weight"]
    array = tensor.read()
    assert not array.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    with pytest.raises(ValueError, match=r"writeable|WRITEABLE"):
        array.flags.writeable = True


@pytest.mark.parametrize("container", WRITERS)
def test_shared_storage_is_seen_as_tied(container: str, tmp_path: Path) -> None:
    table = torch.arange(6.0).reshape(2, 3)
    weights = {"a": table, "b": table, "t": table.t(), "row": table[0], "copy": table.clone()}
    weights |= {"empty": torch.zeros(0), "other empty": torch.zeros(0)}
    tensors = open_bytes(tmp_path, WRITERS[container](weights)).tensors
    assert tensors["a"].storage == tensors["b"].storage
    assert len({tensor.storage for tensor in tensors.values()}) == 6


def test_empty_safetensors_are_not_tied(tmp_path: Path) -> None:
    data = save({"a": torch.zeros(0), "b": torch.zeros(0)})
    tensors = open_bytes(tmp_path, data, "a.safetensors").tensors
    assert tensors["a"].storage != tensors["b"].storage


def test_cuda_file_opens_without_cuda(tmp_path: Path) -> None:
    assert_same(open_bytes(tmp_path, torch_legacy(state_dict(), "cuda:1")).tensors, state_dict())
    records = zip_records(torch_zip(state_dict()))
    pickled = records["archive/data.pkl"].replace(b"\x03\x00\x00\x00cpu", b"\x06\x00\x00\x00cuda:0")
    assert b"cuda:0" in pickled
    data = zip_file({**records, "archive/data.pkl": pickled})
    assert_same(open_bytes(tmp_path, data).tensors, state_dict())


def test_zip_without_checksums_says_so(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = torch_zip(state_dict())
    finally:
        torch.serialization.set_crc32_options(True)
    checkpoint = open_bytes(tmp_path, data)
    checkpoint.verify()
    assert_same(checkpoint.tensors, state_dict())
    assert "none in the file" in checkpoint.extras["checksums"]


def test_verify_checks_only_what_is_named(tmp_path: Path) -> None:
    data = bytearray(torch_zip(training_checkpoint()))
    checkpoint = open_bytes(tmp_path, bytes(data))
    checkpoint.verify(optimizer=True)
    moment = list(tensors_in(checkpoint.optimizer))[1]
    data[moment.record.offset] ^= 1
    checkpoint = open_bytes(tmp_path, bytes(data))
    checkpoint.verify()
    with pytest.raises(CheckpointError, match="does not match in the optimizer"):
        checkpoint.verify([], optimizer=True)


def test_file_that_changes_is_noticed(tmp_path: Path) -> None:
    checkpoint = open_bytes(tmp_path, torch_zip(state_dict()))
    os.utime(tmp_path / "file.pt", ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while"):
        checkpoint.tensors["lm_head.weight"].read()
    with pytest.raises(CheckpointError, match="changed while"):
        checkpoint.verify()


def test_safetensors_opens_with_its_config(tmp_path: Path) -> None:
    weights = {key: value.contiguous().clone() for key, value in state_dict().items()}
    metadata = {"format": "pt", "config": '{"n_head": 2}', "note": "hi\x1b"}
    path = tmp_path / "model.safetensors"
    save_file(weights, path, metadata)
    for opened in (path, tmp_path):
        checkpoint = open_checkpoint(opened)
        checkpoint.verify()
        assert (checkpoint.container, checkpoint.path) == ("safetensors", opened)
        assert {key: tensor.read().tobytes() for key, tensor in checkpoint.tensors.items()} == {
            key: raw(value) for key, value in weights.items()
        }
        assert checkpoint.config_sources == {'safetensors metadata "config"': {"n_head": 2}}
        assert checkpoint.extras == {'safetensors metadata "note"': "hi\\x1b"}
    (tmp_path / "config.json").write_text('{"n_layer": 3, "eps": 1e-6}')
    checkpoint = open_checkpoint(path)
    assert checkpoint.config_sources["config.json"] == {"n_layer": 3, "eps": 1e-6}
    assert checkpoint.files == (path, tmp_path / "config.json")


def write_shards(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path / "model.safetensors.index.json"


def test_sharded_safetensors_open_by_folder_or_index(tmp_path: Path) -> None:
    weights = {key: value.contiguous() for key, value in state_dict().items()}
    index = write_shards(tmp_path, sharded(weights))
    for path in (tmp_path, index):
        checkpoint = open_checkpoint(path)
        assert checkpoint.container == "sharded safetensors"
        assert_same(checkpoint.tensors, weights)
        assert len(checkpoint.files) == 4
        assert checkpoint.config_sources == {"config.json": {"n_layer": 2, "n_head": 2}}


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[dict[str, bytes]], None]:
    def edit(files: dict[str, bytes]) -> None:
        index = json.loads(files["model.safetensors.index.json"])
        change(index["weight_map"])
        files["model.safetensors.index.json"] = json.dumps(index).encode()

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda files: files.pop(SECOND), f"shard {SECOND} is missing"),
        (lambda files: files.update({"stray.safetensors": b""}), "stray.safetensors lies beside"),
        (lambda files: files.update({"model.safetensors": b""}), "model.safetensors lies beside"),
        (lambda files: files.update({SECOND: files[FIRST]}), "is in both"),
        (lambda files: files.update({SECOND: b"\xff" * 20}), f"shard {SECOND}: damaged"),
        (edit_index(lambda m: m.pop("lm_head.weight")), "lm_head.weight is in .* indexed in nowhe"),
        (edit_index(lambda m: m.update(x=FIRST)), "x is indexed in .* but not there"),
        (
            edit_index(lambda m: m.update({"lm_head.weight": FIRST})),
            f"{SECOND}, indexed in {FIRST}",
        ),
        (edit_index(lambda m: m.update(x="../x.safetensors")), "names the shard"),
        (edit_index(lambda m: m.update(x="pytorch_model.bin")), "names the shard"),
        (edit_index(lambda m: m.clear()), "without a weight_map"),
    ],
)
def test_faulty_shards_are_named(
    edit: Callable[[dict[str, bytes]], None], words: str, tmp_path: Path
) -> None:
    files = sharded(state_dict())
    edit(files)
    write_shards(tmp_path, files)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_all_faults_of_an_index_are_listed(tmp_path: Path) -> None:
    files = sharded(state_dict())
    edit_index(lambda m: (m.pop("lm_head.weight"), m.update(x=FIRST, y=FIRST)))(files)
    write_shards(tmp_path, files)
    with pytest.raises(CheckpointError, match=r"lm_head.weight.*; x is.*; y is"):
        open_checkpoint(tmp_path)


# Layouts


@pytest.mark.parametrize("container", WRITERS)
@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_state_dict_is_found_under_its_key(key: str, container: str, tmp_path: Path) -> None:
    checkpoint = open_bytes(tmp_path, WRITERS[container]({key: state_dict(), "epoch": 3}))
    assert checkpoint.layout == f'state dict under "{key}"'
    assert_same(checkpoint.tensors, state_dict())
    assert checkpoint.other == {"epoch": 3}


@pytest.mark.parametrize("container", WRITERS)
def test_training_checkpoint_is_sorted(container: str, tmp_path: Path) -> None:
    saved = training_checkpoint()
    checkpoint = open_bytes(tmp_path, WRITERS[container](saved))
    assert_same(checkpoint.tensors, state_dict())
    assert checkpoint.stripped == ("_orig_mod.",)
    assert checkpoint.config_sources == {
        "model_args": {"n_layer": 2, "n_head": 2},
        "pickled tests.convert.damage.GPTConfig": {"n_layer": 2, "n_head": 2, "n_embd": 4},
    }
    assert checkpoint.other == {"iter_num": 3, "best_val_loss": 1.5}
    assert checkpoint.extras["optimizer"] == "5 parameters, 10 moment tensors, 0.0 MB"
    assert checkpoint.extras["best_val_loss"] == "1.5"
    optimizer = checkpoint.optimizer
    assert isinstance(optimizer, dict)
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0, 1, 2, 3, 4]}]
    slots = optimizer["state"][1]
    assert slots["exp_avg"].read().tolist() == [[0.5] * 4] * 4
    assert slots["step"].read().tolist() == 3.0


def test_config_objects_give_their_own_fields_only(tmp_path: Path) -> None:
    config = GPTConfig()
    checkpoint = open_bytes(
        tmp_path,
        torch_zip(
            {
                "model": state_dict(),
                "config": config,
                "lumen": LumenConfig(),
                "again": GPTConfig(n_layer=4),
                "class": GPTConfig,
                "args": {"path": Path("/out"), "dtype": torch.float32, "lr": torch.tensor(0.5)},
            }
        ),
    )
    name = f"pickled {GPTConfig.__module__}"
    assert checkpoint.config_sources == {
        f"{name}.GPTConfig": {"n_layer": 2, "dropout": 0.1},
        f"{name}.LumenConfig": {},
        f'{name}.GPTConfig under "again"': {"n_layer": 4, "dropout": 0.1},
        "args": {"path": "/out", "dtype": "torch.float32", "lr": 0.5},
    }
    assert checkpoint.extras == {"class": f"the class or function {GPTConfig.__module__}.GPTConfig"}


def test_other_entries_are_described(tmp_path: Path) -> None:
    extra = {
        "rng": torch.zeros(3, dtype=torch.uint8),
        "losses": [1.0, 2.0],
        "note": "a\x1b[31m",
        "nothing": None,
        "numpy": np.float64(2.5),
        "generator": np.zeros(4),
    }
    weights: dict[str, object] = {**state_dict(), "_extra_state": None}
    checkpoint = open_bytes(tmp_path, torch_zip({"model": weights, **extra}))
    assert checkpoint.extras == {
        "model._extra_state": "None",
        "rng": "uint8 tensor [3]",
        "losses": "list of 2",
        "note": "a\\x1b[31m",
        "nothing": "None",
        "numpy": "2.5",
        "generator": "object of class numpy._core.multiarray._reconstruct",
    }
    assert checkpoint.other == {"note": "a\x1b[31m", "nothing": None, "numpy": 2.5}


@pytest.mark.parametrize(
    ("key", "stripped"),
    [
        ("wte.weight", ()),
        ("_orig_mod.wte.weight", ("_orig_mod.",)),
        ("module.wte.weight", ("module.",)),
        ("module._orig_mod.wte.weight", ("_orig_mod.", "module.")),
        ("_orig_mod.module.wte.weight", ("_orig_mod.", "module.")),
        ("module.module._orig_mod._orig_mod.wte.weight", ("_orig_mod.", "module.")),
        ("wte._orig_mod.weight", ("_orig_mod.",)),
        ("wte.module.weight._orig_mod", ("_orig_mod.", "module.")),
    ],
)
def test_wrapper_prefixes_are_stripped(key: str, stripped: tuple[str, ...], tmp_path: Path) -> None:
    for data in (torch_zip({key: torch.zeros(2)}), save({key: torch.zeros(2)})):
        checkpoint = open_bytes(tmp_path, data)
        assert list(checkpoint.tensors) == ["wte.weight"]
        assert checkpoint.stripped == stripped


def test_names_that_only_look_like_wrappers_stay(tmp_path: Path) -> None:
    weights = {key: torch.zeros(1) for key in ("modules.w", "my_module.w", "a._orig_mods.w")}
    checkpoint = open_bytes(tmp_path, torch_zip(weights))
    assert list(checkpoint.tensors) == list(weights)


def test_keys_that_become_one_are_both_named(tmp_path: Path) -> None:
    weights = {"module.a.w": torch.zeros(1), "a._orig_mod.w": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"module.a.w and a._orig_mod.w are both a.w"):
        open_bytes(tmp_path, torch_zip(weights))
    with pytest.raises(CheckpointError, match="nothing is left of module"):
        open_bytes(tmp_path, torch_zip({"module": torch.zeros(1)}))


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        ({}, "holds no state dict; at its top are: nothing"),
        ({"step": 3, "args": {}}, "at its top are: step, args"),
        ({"model": {}, "step": 3}, "holds no state dict"),
        ([torch.zeros(1)], "holds one list of 1"),
        (torch.zeros(1), r"holds one float32 tensor \[1\]"),
        ("text", "holds one text"),
        ({3: torch.zeros(1)}, "key 3 of the state dict is not a string"),
        ({"a": torch.zeros(1), "b": {"c": [torch.zeros(1)]}}, "entry b .* with tensors in it"),
        ({"model": state_dict(), "state_dict": state_dict()}, "under 'model' and 'state_dict'"),
        (torch.nn.Linear(2, 2), r"whole pickled module, torch.nn.modules.linear.Linear"),
        ({"model": torch.nn.Linear(2, 2)}, "whole pickled module"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "sparse tensors"),
        ({"w": torch.zeros(2, device="meta")}, "meta device"),
        ({"w": torch.zeros(1).expand(10**9)}, "expanded view"),
    ],
)
def test_other_objects_are_named(obj: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_bytes(tmp_path, torch_zip(obj))


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    quantise = b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_qtensor\n)Rs."
    with pytest.raises(CheckpointError, match="quantised"):
        open_bytes(tmp_path, zip_file({"archive/data.pkl": quantise}))


# What is no checkpoint


def _tar() -> bytes:
    return b"storages".ljust(257, b"\0") + b"ustar\x0000".ljust(300, b"\0")


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    return buffer.getvalue()


def _npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"just some text\n", "a text file"),
        ("größer ".encode() * 200, "a text file"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b'{"n_head": 2}', "JSON without a weight_map"),
        (b"{not json", "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\x89HDF\r\n\x1a\n" + bytes(20), "HDF5"),
        (b"GGUF" + bytes(20), "GGUF"),
        (_npy(), "a numpy file"),
        (_npz(), "a numpy archive"),
        (gzip.compress(b"x", mtime=0), "gzip file; decompress it"),
        (b"\x28\xb5\x2f\xfd" + bytes(9), "zstd"),
        (_tar(), "tar archive"),
        (zip_file({"a.txt": b"hi"}), r"a zip of something else \(a.txt\)"),
        (zip_file({}), "an empty zip"),
        (zip_file({"m/constants.pkl": b"", "m/data.pkl": b""}), "TorchScript"),
        (zip_file({"m/code/a.py": b"", "m/data.pkl": b""}), "TorchScript"),
        (zip_file({"a/data.pkl": b"", "b/data.pkl": b""}), "two data.pkl"),
        (pickle.dumps({"a": 1}), "a plain Python pickle"),
        (bytes(range(256)), "unknown binary"),
        (save({}), "holds no tensors"),
    ],
)
def test_other_files_are_named(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        open_bytes(tmp_path, data)
    assert str(caught.value).startswith(f"{tmp_path / 'file.pt'}: ")


def _patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new)


def test_damaged_zips_are_named(tmp_path: Path) -> None:
    whole = torch_zip(state_dict())
    records = zip_records(whole)
    pickled = records["archive/data.pkl"]
    encrypted = bytearray(zip_file(records))
    encrypted[encrypted.rindex(b"PK\x01\x02") + 8] |= 1
    overlap = bytearray(whole)
    size_at = overlap.index(b"PK\x01\x02") + 20  # of data.pkl, in the directory
    overlap[size_at : size_at + 8] = struct.pack("<II", 10**4, 10**4)
    cases = {
        "cut off": whole[:-30],
        "is compressed": zip_file(records, zipfile.ZIP_DEFLATED),
        "is encrypted": bytes(encrypted),
        "overlaps what follows": bytes(overlap),
        "is in the zip twice": _patched(zip_file(records), b"archive/data/1", b"archive/data/0"),
        "byteorder is 'big'": zip_file({**records, "archive/byteorder": b"big"}),
        "holds 97 bytes": zip_file({**records, "archive/data/0": bytes(97)}),
        "storage 0 is not in the file": zip_file(
            {name: data for name, data in records.items() if name != "archive/data/0"}
        ),
        "data.pkl does not match its checksum": _patched(
            whole, b"transformer.wte", b"transformer.wtx"
        ),
        "header of archive/data/2 disagrees": whole.replace(
            b"archive/data/2", b"archive/data/9", 1
        ),
        "reaches to byte": zip_file(
            {
                **records,
                "archive/data.pkl": _patched(pickled, b"K\x00K\x06K\x04", b"K\x00K\x07K\x04"),
            }
        ),
    }
    for words, data in cases.items():
        with pytest.raises(CheckpointError, match=words):
            open_bytes(tmp_path, data)


def test_zip_directory_beyond_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch_zip(state_dict())
    monkeypatch.setattr(torch_zip_module, "MAX_DIRECTORY", 500)
    with pytest.raises(CheckpointError, match="directory is larger"):
        open_bytes(tmp_path, data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": (3, 2)}, None),
        ({"shape": (3, 2), "offset": 1}, "reaches to byte 28"),
        ({"strides": (-2, 1)}, "negative"),
        ({"offset": -1}, "negative"),
        ({"shape": (-2, 2)}, "negative"),
        ({"strides": (1,)}, "has 1 strides"),
        ({"shape": (1,) * 65, "strides": (1,) * 65}, "65 dimensions"),
        ({"shape": (0, 2**62)}, "spread over"),
        ({"torch_dtype": "float4"}, "float4 is not supported"),
    ],
)
def test_lazy_tensor_stays_inside_its_record(
    changes: dict[str, object], words: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(np.arange(6, dtype=np.float32).tobytes())
    record = Record(file=SourceFile.at(path), name="data", offset=0, nbytes=24)
    fields = {"torch_dtype": "float32", "shape": (2, 2), "strides": (2, 1)} | changes
    if words is None:
        tensor = LazyTensor(record=record, **fields)  # pyright: ignore[reportArgumentType]
        assert tensor.read().tolist() == [[0, 1], [2, 3], [4, 5]]
        return
    with pytest.raises(CheckpointError, match=words):
        LazyTensor(record=record, **fields)  # pyright: ignore[reportArgumentType]


def test_damaged_legacy_files_are_named(tmp_path: Path) -> None:
    whole = torch_legacy(state_dict())
    big = pickle.dumps({"little_endian": False}, protocol=2)
    cases = {
        "cut off: 1 bytes are missing": whole[:-1],
        "1 bytes follow": whole + b"\0",
        "not written on a little-endian": legacy_file(b"\x80\x02}.", system=big),
        "not version 1001": whole.replace(b"\x80\x02M\xe9\x03", b"\x80\x02M\xe8\x03", 1),
        "list of storages makes no sense": legacy_file(b"\x80\x02}.", keys=b"\x80\x02K\x01."),
        "does not match its pickle": legacy_file(b"\x80\x02}.", keys=["a"]),
        "has 25 elements of 4 bytes, its pickle says 24": _patched(
            whole, struct.pack("<q", 24), struct.pack("<q", 25)
        ),
    }
    for words, data in cases.items():
        with pytest.raises(CheckpointError, match=words):
            open_bytes(tmp_path, data)


def test_damaged_safetensors_are_named(tmp_path: Path) -> None:
    whole = save({"a": torch.arange(4.0), "b": torch.zeros(2)})
    cases = {
        "claims .* bytes": b"\xff" + whole[1:4] + b"\x01" + whole[5:],
        "safetensors says": whole[:-1],
        "safetensors says .*JSON": _patched(whole, b'"dtype"', b'"dtype '),
        "safetensors says .*`a`": _patched(whole, b'"b":', b'"a":'),
        "does not begin as one": whole[:8] + b"\xff" + whole[9:],
    }
    for words, data in cases.items():
        with pytest.raises(CheckpointError, match=words):
            open_bytes(tmp_path, data, "a.safetensors")


def test_config_beside_safetensors_must_be_json(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for text in ("{", "[1]", '{"a": 1, "a": 2}', '{"a": "\\ud800"}', "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config.json beside it"):
            open_checkpoint(tmp_path)


# The file system


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "a folder without weights"),
        (["readme.md"], "a folder without weights"),
        (["a.pt", "b.safetensors"], r"pass the file itself \(a.pt, b.safetensors\)"),
        (["pytorch_model.bin.index.json"], "sharded .bin checkpoint"),
        (["_METADATA"], "an Orbax checkpoint"),
        (["data.pkl"], "an unpacked torch zip"),
    ],
)
def test_folders_without_weights_say_what_they_hold(
    names: list[str], words: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_special_files_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "model.safetensors").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        paths = [tmp_path / "fifo", tmp_path / "socket", tmp_path, Path("/dev/zero")]
        for path in paths:
            with pytest.raises(CheckpointError, match="is not a regular file"):
                open_checkpoint(path)


def test_missing_and_impossible_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    cases = {
        tmp_path / "missing.pt": "no such file",
        tmp_path / "loop": "symbolic links",
        tmp_path / "file" / "x.pt": "not a directory",
        tmp_path / ("x" * 300): "too long",
        tmp_path / "a\0b": "null",
    }
    for path, words in cases.items():
        with pytest.raises(CheckpointError, match=f"cannot be read: .*{words}"):
            open_checkpoint(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.pt"
    path.write_bytes(torch_zip(state_dict()))
    path.chmod(0)
    with pytest.raises(CheckpointError, match="permission denied"):
        open_checkpoint(path)


# Real files


REAL = {
    "gpt_small.pt": ('state dict under "model"', 44, 43, ["pickled model.GPTConfig"]),
    "gpt_small_safetensors": ("raw state dict", 43, 43, ["config.json"]),
    "lumen_3m.pt": ("raw state dict", 39, 38, []),
    "lumen_3m_bf16.pt": ("raw state dict", 39, 39, []),
    "ripple_char.pt": (
        'state dict under "model"',
        100,
        100,
        ["model_args", "pickled src.config.RippleConfig"],
    ),
    "ripple_window.pt": (
        'state dict under "model"',
        100,
        100,
        ["model_args", "pickled src.config.RippleConfig"],
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoint_opens_as_torch_loads_it(
    name: str, monkeypatch: pytest.MonkeyPatch, shared
) -> None:
    layout, keys, distinct, sources = REAL[name]
    path = shared("checkpoints", name)
    checkpoint = open_checkpoint(path)
    checkpoint.verify(optimizer=True)
    assert checkpoint.layout == layout
    assert list(checkpoint.config_sources) == sources
    assert len(checkpoint.tensors) == keys
    assert len({tensor.storage for tensor in checkpoint.tensors.values()}) == distinct
    if not name.endswith(".pt"):
        return
    for module, config in (("model", "GPTConfig"), ("src", "x"), ("src.config", "RippleConfig")):
        stub = types.ModuleType(module)
        setattr(stub, config, type(config, (), {"__module__": module}))
        monkeypatch.setitem(sys.modules, module, stub)
    loaded = torch.load(path, weights_only=False, mmap=True)
    state = loaded.get("model", loaded)
    assert_same(
        checkpoint.tensors, {key.removeprefix("_orig_mod."): value for key, value in state.items()}
    )
    if "optimizer" in loaded:
        assert isinstance(checkpoint.optimizer, dict)
        assert checkpoint.optimizer["param_groups"] == loaded["optimizer"]["param_groups"]
        for index, slots in loaded["optimizer"]["state"].items():
            assert_same(checkpoint.optimizer["state"][index], slots)
