"""Bad input: a message that says what is wrong, exit status 2, nothing printed, nothing left."""

import json
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from convert import files as files_module
from convert import inspection
from tests.convert.checkpoints import gpt_file, raw, said, save, save_shards, state_of
from tests.convert.damage import call, hostile_calls, hostile_files, zip_file


@pytest.fixture
def gpt(tmp_path):
    """A good checkpoint."""
    return gpt_file(tmp_path / "gpt.pt")


def without(key):
    state = state_of("gpt")
    del state[key]
    return state


def renamed(key, new):
    state = state_of("gpt")
    state[new] = state.pop(key)
    return state


def changed(key, change):
    state = state_of("gpt")
    state[key] = change(state[key].clone())
    return state


class Bomb:
    """What a hostile pickle does in the ordinary way."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def written(path, data):
    path.write_bytes(data)
    return path


def cut(path, size):
    return written(path, path.read_bytes()[:size])


def safetensors_file(path):
    save_file({k: t.contiguous().clone() for k, t in state_of("gpt").items()}, path,
              {"config": json.dumps(said("gpt"))})  # fmt: skip
    return path


def damaged_header(path):
    data = bytearray(safetensors_file(path).read_bytes())
    data[20:24] = b"\xff\xff\xff\xff"
    return written(path, data)


def shards(folder):
    return save_shards(folder, state_of("gpt"), said("gpt"))


def without_shard(folder):
    (shards(folder) / "model-00002-of-00002.safetensors").unlink()
    return folder


def with_stray(folder):
    save_file({"a": torch.zeros(1)}, shards(folder) / "stray.safetensors")
    return folder


def folder_with(folder, name):
    folder.mkdir()
    (folder / name).write_text("hello")
    return folder


def quantised(path):
    body = b"\x80\x02}X\x01\x00\x00\x00w" + call("torch._utils", "_rebuild_qtensor") + b"s."
    return written(path, zip_file({"archive/data.pkl": body}))


GPT2 = {"wte.weight": torch.zeros(9, 4), "h.0.attn.c_attn.weight": torch.zeros(4, 12)}
RESNET = {"conv1.weight": torch.zeros(4), "layer1.0.conv1.weight": torch.zeros(4)}
BAD = {
    "missing key": (
        lambda at: gpt_file(at / "a.pt", without("transformer.h.1.ln_2.bias")),
        "a.pt does not fit GPTConfig: missing transformer.h.1.ln_2.bias [16]",
    ),
    "renamed key": (
        lambda at: gpt_file(at / "a.pt", renamed("transformer.ln_f.bias", "transformer.lnf.bias")),
        "missing transformer.ln_f.bias [16] unexpected transformer.lnf.bias [16]",
    ),
    "mis-shaped key": (
        lambda at: gpt_file(at / "a.pt", changed("transformer.ln_f.bias", lambda t: t[:-1])),
        "mis-shaped transformer.ln_f.bias [15], expected [16]",
    ),
    "terminal codes in a key": (
        lambda at: gpt_file(at / "a.pt", renamed("transformer.ln_f.bias", "evil\x1b[2J\n")),
        r"unexpected evil\x1b[2J\n [16]",
    ),
    "truncated pt": (lambda at: cut(gpt_file(at / "a.pt"), 9000), "a.pt: "),
    "truncated old pt": (
        lambda at: cut(save(state_of("gpt"), at / "a.pt", zipped=False), 15000),
        "cut off: ",
    ),
    "truncated safetensors": (
        lambda at: cut(safetensors_file(at / "a.safetensors"), -4),
        "damaged or cut off: safetensors says",
    ),
    "safetensors cut in its header": (
        lambda at: cut(safetensors_file(at / "a.safetensors"), 100),
        "its safetensors header claims",
    ),
    "damaged safetensors header": (
        lambda at: damaged_header(at / "a.safetensors"),
        "damaged or cut off: safetensors says",
    ),
    "missing shard": (
        lambda at: without_shard(at / "shards"),
        "shard model-00002-of-00002.safetensors is missing",
    ),
    "stray shard": (
        lambda at: with_stray(at / "shards"),
        "stray.safetensors lies beside the index but is not in it: remove it or index it",
    ),
    "os.system": (
        lambda at: save({"model": Bomb(os.system, f"touch {at / 'sentinel'}")}, at / "a.pt"),
        "asks to call posix.system; refused, nothing was run",
    ),
    "eval": (
        lambda at: save({"a": Bomb(eval, f"open({str(at / 'sentinel')!r}, 'w')")}, at / "a.pt"),
        "asks to call __builtin__.eval; refused, nothing was run",
    ),
    "bomb in the config of a good file": (
        lambda at: save(
            {"model": state_of("gpt"), "config": Bomb(open, str(at / "sentinel"), "w")}, at / "a.pt"
        ),
        "asks to call io.open; refused, nothing was run",
    ),
    "bare pickle": (
        lambda at: written(at / "a.pt", pickle.dumps(Bomb(os.system, f"touch {at / 'sentinel'}"))),
        "asks to call posix.system; refused, nothing was run",
    ),
    "text file": (
        lambda at: written(at / "a.pt", b"these are no weights\n"),
        "a.pt: looks like a text file; expected a torch file (.pt, .pth, .bin), a .safetensors",
    ),
    "empty file": (lambda at: written(at / "a.pt", b""), "a.pt: is empty; expected a torch file"),
    "folder without weights": (
        lambda at: folder_with(at / "a", "readme.md"),
        "a: is a folder without weights; expected a torch file",
    ),
    "folder with a file in it": (
        lambda at: folder_with(at / "a", "model.pt"),
        "pass the file itself (model.pt)",
    ),
    "no file": (lambda at: at / "nothing.pt", "nothing.pt: cannot be read: no such file"),
    "GPT-2": (lambda at: save(GPT2, at / "a.pt"), "it looks like GPT-2 (fused q, k, v: c_attn)"),
    "GPT-2 of Hugging Face": (
        lambda at: save({f"transformer.{key}": value for key, value in GPT2.items()}, at / "a.pt"),
        "a.pt: this is not a Lumen, GPT or Ripple checkpoint: it looks like GPT-2 (fused q, k, v",
    ),
    "ResNet": (lambda at: save(RESNET, at / "a.pt"), "it looks like a ResNet (2 tensors: conv1"),
    "whole module": (
        lambda at: save(torch.nn.Linear(2, 2), at / "a.pt"),
        "save `model.state_dict()` instead",
    ),
    "NaN": (
        lambda at: gpt_file(at / "a.pt", changed("transformer.ln_f.bias", lambda t: t * torch.nan)),
        "NaN or infinite numbers in transformer.ln_f.bias: the run that made it diverged, or the "
        "file is damaged; pass --allow-nonfinite to convert it all the same",
    ),
    "infinity": (
        lambda at: gpt_file(at / "a.pt", changed("transformer.ln_f.weight", lambda t: t / 0)),
        "NaN or infinite numbers in transformer.ln_f.weight",
    ),
    "int8": (
        lambda at: gpt_file(
            at / "a.pt", changed("transformer.h.0.mlp.c_fc.weight", lambda t: t.to(torch.int8))
        ),
        "c_fc.weight is int8: quantised or integer weights cannot be converted; save the model in",
    ),
    "quantised": (lambda at: quantised(at / "a.pt"), "quantised"),
    "width not divisible by heads": (
        lambda at: gpt_file(at / "a.pt", n_embd=18, n_head=3, n_kv_head=1),
        "n_embd is 18 by model_args, but 16 by the tensors' shapes",
    ),
    "config contradicts the tensors": (
        lambda at: gpt_file(at / "a.pt", n_layer=4),
        "n_layer is 4 by model_args, but 2 by the tensors' shapes",
    ),
    "config says nothing": (
        lambda at: save(state_of("gpt"), at / "a.pt"),
        "does not say block_size, n_head, n_kv_head and its weights cannot tell: pass --config "
        "block_size=... n_head=... n_kv_head=...",
    ),
    "tied tables differ": (
        lambda at: gpt_file(at / "a.pt", changed("lm_head.weight", lambda t: t + 0.5)),
        "tied tensors transformer.wte.weight and lm_head.weight differ by up to 0.5",
    ),
    "mixed dtypes": (
        lambda at: gpt_file(at / "a.pt", changed("transformer.h.0.ln_1.bias", lambda t: t.half())),
        "mixed dtypes float16 and float32 in blocks.attention_norm.bias",
    ),
    "damaged weights": (
        lambda at: written(
            at / "a.pt",
            gpt_file(at / "a.pt")
            .read_bytes()
            .replace(raw(state_of("gpt")["transformer.ln_f.bias"])[2], b"\x01" * 64),
        ),
        "the checksum does not match in transformer.ln_f.bias; copy the file again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoint_is_refused_in_words(case, refused, tmp_path):
    make, words = BAD[case]
    refused(tmp_path, words, "convert", make(tmp_path), tmp_path / "out")
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.parametrize("case", [case for case in BAD if case not in ("NaN", "infinity")])
def test_bad_checkpoint_is_no_traceback_of_inspect_and_check(case, run, refused, tmp_path):
    make, words = BAD[case]
    path = make(tmp_path)
    refused(tmp_path, words, "check", path)
    code, out, err = run("inspect", path)
    assert "Traceback" not in err
    assert (code, bool(out), bool(err)) in ((0, True, False), (2, False, True))
    assert not (tmp_path / "sentinel").exists()


def test_every_hostile_call_is_refused(refused, tmp_path):
    for name, fragment in hostile_calls(tmp_path / "sentinel").items():
        path = written(tmp_path / "a.pt", hostile_files(fragment)["zip, config"])
        refused(tmp_path, "refused, nothing was run", "convert", path, tmp_path / "out")
        assert not (tmp_path / "sentinel").exists(), name


def test_heads_that_do_not_divide_are_named(refused, tmp_path):
    path = save(state_of("gpt"), tmp_path / "a.pt")
    refused(tmp_path, "n_embd 16 is not divisible by n_head 3", "convert", path, tmp_path / "out",
            "--config", "n_head=3", "block_size=16")  # fmt: skip
    path = gpt_file(tmp_path / "b.pt", n_head=8)
    refused(tmp_path, "n_kv_head is 2 by model_args, but 4 by the tensors'", "convert", path,
            tmp_path / "out")  # fmt: skip


def test_overflow_is_named(refused, run, tmp_path):
    state = {key: tensor.bfloat16() for key, tensor in state_of("gpt").items()}
    state["transformer.ln_f.bias"][1] = 1e5
    path = gpt_file(tmp_path / "a.pt", state)
    words = "transformer.ln_f.bias: 1 numbers overflow in float16, such as 99840"
    refused(tmp_path, words, "convert", path, tmp_path / "out", "--dtype", "float16")
    run("convert", path, tmp_path / "out")
    refused(tmp_path, words, "convert", tmp_path / "out", tmp_path / "b.pt", "--dtype", "float16")


def test_damaged_model_folder_is_named(refused, run, gpt, tmp_path):
    run("convert", gpt, tmp_path / "out")
    out, weights = tmp_path / "out", tmp_path / "out" / "model.safetensors"
    config = (out / "config.json").read_text()
    data = weights.read_bytes()
    for command in (["convert", out, tmp_path / "b.pt"], ["inspect", out], ["check", out]):
        cut(weights, len(data) - 4)
        refused(tmp_path, "model.safetensors is not a whole safetensors file", *command)
        weights.unlink()
        refused(tmp_path, "No such file", *command)
        written(weights, data)
        (out / "config.json").write_text(config.replace('"n_head": 4', '"n_head": 3'))
        refused(tmp_path, "n_embd 16 is not divisible by n_head 3", *command)
        (out / "config.json").write_text(config)


# Destinations


def test_destinations_are_refused_before_anything_is_read(refused, run, gpt, tmp_path):
    run("convert", gpt, tmp_path / "out")
    out = tmp_path / "out"
    for words, *arguments in (
        ("out exists: pass --overwrite, or name another output", gpt, out),
        ("nowhere does not exist: create it first", gpt, tmp_path / "nowhere" / "x"),
        ("is no model folder, so it is converted to one: name a folder", gpt, tmp_path / "b.pt"),
        ("so it is converted to one: name a folder", gpt, tmp_path / "b.safetensors"),
        ("--shard-size is for conversion from a model folder", gpt, tmp_path / "b",
         "--shard-size", "1GB"),
        ("gpt.pt exists: pass --overwrite", out, gpt),
        ("nowhere does not exist", out, tmp_path / "nowhere" / "b.pt"),
        ("b.onnx: name a .pt, .pth, .bin or .safetensors file", out, tmp_path / "b.onnx"),
        ("--shard-size is for a folder", out, tmp_path / "b.pt", "--shard-size", "1GB"),
        ("a size is a number of bytes with kB, MB or GB", out, tmp_path / "b",
         "--shard-size", "big"),
        ("is a model folder: --config, --preset, --allow-nonfinite, --tokenizer and --check are",
         out, tmp_path / "b", "--config", "n_head=4"),
        ("are for conversion from torch", out, tmp_path / "b", "--tokenizer", gpt),
        ("are for conversion from torch", out, tmp_path / "b", "--check"),
        ("are for conversion from torch", out, tmp_path / "b", "--allow-nonfinite"),
        ("are for conversion from torch", out, tmp_path / "b", "--preset", "gpt-250m"),
    ):  # fmt: skip
        refused(tmp_path, words, "convert", *arguments)
    (out / "notes.txt").write_text("precious")
    refused(tmp_path, "out holds notes.txt, which is not output of this command", "convert", gpt,
            out, "--overwrite")  # fmt: skip


def test_folder_without_write_permission_is_named(refused, gpt, tmp_path, monkeypatch):
    def denied(**options):
        raise PermissionError(13, "Permission denied", str(options["dir"] / "x1y2"))

    monkeypatch.setattr(tempfile, "mkdtemp", denied)
    refused(tmp_path, f"{tmp_path / 'out'}: Permission denied", "convert", gpt, tmp_path / "out")


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="there is no folder like /sys here")
def test_file_system_without_write_permission_is_named(refused, gpt, tmp_path):
    err = refused(tmp_path, "/sys/kernel/out: ", "convert", gpt, "/sys/kernel/out")
    assert any(words in err for words in ("ermitted", "denied", "Read-only", "No such file"))


@pytest.mark.parametrize("name", ["out", "b.pt", "b.safetensors"])
def test_full_disk_is_named(name, refused, run, gpt, tmp_path, monkeypatch):
    if name != "out":
        run("convert", gpt, tmp_path / "model")
        gpt = tmp_path / "model"

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module, "write_folder", full)
    monkeypatch.setattr(files_module, "write_tensors", full)
    monkeypatch.setattr(torch, "save", full)
    refused(tmp_path, f"{tmp_path / name}: No space left on device", "convert", gpt,
            tmp_path / name)  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "out of memory"),
        (ZeroDivisionError("oh"), 70, "internal error, please report it: ZeroDivisionError: oh"),
        (ModuleNotFoundError("no x", name="x"), 70, "please report it: ModuleNotFoundError: no x"),
        (RecursionError("deep"), 70, "please report it: RecursionError"),
    ],
)
def test_any_error_is_one_line_and_a_status(error, status, words, refused, gpt, tmp_path,
                                            monkeypatch):  # fmt: skip
    def fail(folder, *args):
        folder.mkdir()
        raise error

    monkeypatch.setattr(files_module, "write_folder", fail)
    err = refused(tmp_path, words, "convert", gpt, tmp_path / "out", status=status)
    assert len(err.splitlines()) == 1


def test_traceback_is_shown_when_asked_for(run, gpt, monkeypatch):
    def fail(*args, **options):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(inspection, "inspect_path", fail)
    monkeypatch.setenv("JAXSLM_TRACEBACK", "1")
    code, _, err = run("inspect", gpt)
    assert code == 70
    assert "Traceback" in err
