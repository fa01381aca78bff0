"""Hundreds of damaged files through the command line: no code runs, no traceback, nothing is left.

The files are tiny GPTs that would convert, so that damage beyond what the container can see goes
all the way.
"""

import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from convert.checkpoint.containers import open_checkpoint
from jaxslm import GPTConfig
from jaxslm.cli import main
from jaxslm.weights import map_folder
from tests.convert import damage
from tests.convert.checkpoints import raw, save, state_of, tree

FIELDS = {"vocab_size": 6, "n_embd": 4, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "block_size": 8}
PASSED = ["--config", "n_head=2", "n_kv_head=1", "block_size=8"]
SECONDS = 8.0  # of processor time for one file; most take some milliseconds


def whole_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """A model in the shapes and names that `damage` works on."""
    state = state_of("gpt", seed, **FIELDS)
    for key in ("transformer.ln_f.weight", "transformer.ln_f.bias"):
        state[key] = state[key].bfloat16()
    for layer in range(2):
        key = f"transformer.h.{layer}.attn.q_proj.weight"
        state[key] = state[key].t().contiguous().t()
    return state


def run(capsys, *arguments) -> tuple[int, str, str]:
    start = time.process_time()
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert time.process_time() - start < SECONDS
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert all(line.isprintable() for line in (out + err).splitlines())
    return caught.value.code, out, err


def test_damaged_checkpoints_fail_in_words_or_convert_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(damage, "state_dict", whole_state)
    folder = tmp_path / "files"
    folder.mkdir()
    sentinel, out = folder / "sentinel", tmp_path / "out"
    expected = {key: raw(tensor) for key, tensor in whole_state().items()}
    failed = converted = unsafe = 0
    for description, path in damage.damaged_files(folder, seed=2, count=600):
        code, text, err = run(capsys, "convert", path, out, *PASSED)
        assert code in (0, 2), (description, err)
        assert not sentinel.exists(), description
        if code == 2:
            assert text == "", description
            assert err.startswith("jaxslm: "), description
            assert len(err) < 5000, description
            assert [p.name for p in tmp_path.iterdir()] == ["files"], description
            failed += 1
            unsafe += "refused" in err
        else:
            config, arrays = map_folder(out)
            assert config == GPTConfig(**FIELDS), description
            assert sum(array.size for array in arrays.values()) == 416, description
            assert sorted(tree(out)) == ["config.json", "model.safetensors", "parity.json"]
            if open_checkpoint(path).container == "torch zip" and " swap" not in description:
                code, text, _ = run(capsys, "convert", out, tmp_path / "back.safetensors")
                assert "23 of 23 tensors" in text, description
                found = open_checkpoint(tmp_path / "back.safetensors").tensors
                assert {key: raw(value) for key, value in found.items()} == expected, description
                (tmp_path / "back.safetensors").unlink()
            shutil.rmtree(out)
            converted += 1
        shutil.rmtree(path if path.is_dir() else path.parent)
    assert failed + converted == 600
    assert failed > 450
    assert converted > 15
    assert unsafe > 25


def test_damaged_model_folders_fail_in_words_or_convert_whole(tmp_path, capsys):
    save({"model": whole_state()}, tmp_path / "a.pt")
    model, work = tmp_path / "model", tmp_path / "work"
    work.mkdir()
    assert run(capsys, "convert", tmp_path / "a.pt", model, *PASSED)[0] == 0
    rng = random.Random(3)
    converted = 0
    for number in range(150):
        name = rng.choice(["config.json", "model.safetensors", "model.safetensors", "parity.json"])
        shutil.copytree(model, work / "model")
        data = bytearray((work / "model" / name).read_bytes())
        at = rng.randrange(min(len(data), 900))  # headers more than numbers
        kind = rng.choice(["flip", "cut", "insert", "delete", "extreme"])
        if kind == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = rng.randbytes(9)
        elif kind == "delete":
            del data[at : at + rng.randrange(1, 20)]
        else:
            data[at : at + 4] = b"\xff\xff\xff\x7f"
        (work / "model" / name).write_bytes(data)
        before = tree(work)
        code, text, err = run(capsys, "convert", work / "model", work / "b.safetensors")
        described = (number, name, kind, at, err)
        assert code in (0, 2), described
        if code == 2:
            assert text == "", described
            assert err.startswith("jaxslm: "), described
            assert tree(work) == before, described
        else:
            assert len(open_checkpoint(work / "b.safetensors").tensors) == 24, described
            converted += 1
        for path in list(work.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert 30 < converted < 120


def test_the_whole_file_converts(tmp_path, capsys):
    path: Path = save({"model": whole_state()}, tmp_path / "a.pt")
    code, out, err = run(capsys, "convert", path, tmp_path / "out", *PASSED)
    assert (code, err) == (0, "")
    assert "23 tensors, 416 parameters" in out
