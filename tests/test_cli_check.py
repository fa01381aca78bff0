"""`jaxslm check`, and `convert --check`: passed, failed, and refused."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convert import counterparts
from tests.convert.checkpoints import said, save, state_of, tree
from tests.convert.subjects import quick_checks

COUNTERPARTS = Path(counterparts.__file__).parent
TINY = {
    "vocab_size": 5, "hidden_dim": 4, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
    "intermediate_dim": 3, "max_seq_len": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The smallest Lumen, in a checkpoint; all that is compiled in this file is compiled for it."""
    folder = tmp_path_factory.mktemp("tiny")
    state = state_of("lumen", **TINY)
    with quick_checks():
        yield save({"model": state, "model_args": said("lumen", **TINY)}, folder / "tiny.pt")


def against(folder, name, *changes) -> str:
    """Our counterpart as a file of the user's own, changed."""
    source = (COUNTERPARTS / "lumen.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    (folder / f"{name}.py").write_text(source)
    return f"{folder / name}.py:Lumen"


def test_check_passes_prints_its_table_and_writes_its_reports(run, tiny, tmp_path):
    code, out, err = run("check", tiny, "--json", tmp_path / "a.json", "--report",
                         tmp_path / "a.html")  # fmt: skip
    assert code == 0
    assert "Traceback" not in err
    assert "parity: passed" in out
    for rung in ("weights", "embedding", "logits", "loss", "gradient", "adamw", "greedy tokens"):
        assert rung in out
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["verdict"], report["model"]) == ("passed", "lumen")
    assert report["lengths"] == [1, 2]
    assert "<svg" in (tmp_path / "a.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json"]
    again = run("check", tiny, "--json", tmp_path / "a.json", "--report", tmp_path / "a.html")
    assert again[0] == 0


def test_reports_replace_nothing_but_earlier_reports(run, tmp_path):
    source = tmp_path / "a.pt"
    torch.save({"weights": torch.ones(2)}, source)
    page, data = tmp_path / "notes.html", tmp_path / "config.json"
    page.write_text("<!doctype html><title>Mine</title>")
    data.write_text('{"n_head": 4}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for option, path in (
        ("--report", source), ("--json", source), ("--report", page), ("--json", data)
    ):  # fmt: skip
        code, out, err = run("check", source, option, path)
        assert (code, out) == (2, "")
        assert "is no earlier report: name another file" in err
    code, _, err = run("check", source, "--json", tmp_path / "x", "--report", tmp_path / "x")
    assert code == 2
    assert "name two files" in err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_check_against_the_users_file_passes_and_fails(run, tiny, tmp_path):
    same = against(tmp_path, "same")
    code, out, _ = run("check", tiny, "--against", same)
    assert code == 0
    assert f"against {same}" in out
    other = against(tmp_path, "other", ("mean_square + self.eps", "mean_square + 1e-3"))
    code, out, err = run("check", tiny, "--against", other, "--json", tmp_path / "a.json")
    assert code == 1
    assert "parity: FAILED" in out
    assert "first departs  norm" in out
    assert "Traceback" not in out + err
    assert json.loads((tmp_path / "a.json").read_text())["verdict"] == "failed"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("class RMSNorm", "import nowhere_at_all\n\n\nclass RMSNorm")],
         "fails to import: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ([("class RMSNorm", "def (\n\n\nclass RMSNorm")], "fails to import: SyntaxError"),
        ([("class RMSNorm", "raise SystemExit(0)\n\n\nclass RMSNorm")], "to import: SystemExit: 0"),
        ([("class RMSNorm", "class ( RMSNorm")], "fails to import: SyntaxError"),
        ([("class Lumen(nn.Module)", "class Luma(nn.Module)")],
         "has no torch module class Lumen; it has RMSNorm, Attention, MLP, Block, Luma"),
        ([("        self.config = config\n", "        self.config = config.nothing\n")],
         "cannot be built: AttributeError"),
        ([("self.layers = nn", "self.extra = nn.Linear(1, 1)\n        self.layers = nn")],
         "Lumen does not take these weights"),
        ([("T, limit = tokens_BT", "T, limit = nothing")], "NameError"),
        ([("return logits_BTV, None", "return logits_BTV[:, :1], None")],
         "Lumen must return logits [batch, positions, vocabulary]"),
        ([("if targets_BT is None:", "if True:")], "Lumen must return (logits, loss)"),
    ],
)  # fmt: skip
def test_against_a_file_that_cannot_be_used_is_bad_input(changes, words, refused, tiny, tmp_path):
    theirs = against(tmp_path, "theirs", *changes)
    refused(tmp_path, words, "check", tiny, "--against", theirs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing.py:GPT", "--against: there is no file nothing.py"),
        ("model.py", "--against takes FILE.py:CLASS, got 'model.py'"),
        (":GPT", "--against takes FILE.py:CLASS"),
    ],
)
def test_against_needs_a_file_and_a_class(text, words, refused, tiny, tmp_path):
    refused(tmp_path, words, "check", tiny, "--against", text)


def test_check_options_are_refused_in_words(refused, tiny, tmp_path):
    odd, large = tmp_path / "odd", tmp_path / "large"
    odd.write_bytes(b"\0\0\0")
    large.write_bytes(struct.pack("<9H", *range(9)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    for words, *arguments in (
        ("--lengths x: give whole numbers, as in 256,512", "--lengths", "x"),
        ("lengths must be", "--lengths", "0"),
        ("lengths must be", "--lengths", "1", "3"),
        ("has 3 bytes: a raw uint16 token file", "--tokens", odd),
        ("but the vocabulary has 5: were they made with another tokenizer?", "--tokens", large),
        ("nothing: No such file or directory", "--tokens", tmp_path / "nothing"),
        ("folder: Is a directory", "--tokens", tmp_path / "folder"),
        ("nowhere does not exist: create it first", "--json", tmp_path / "nowhere" / "a.json"),
        ("folder holds notes.txt", "--report", tmp_path / "folder"),
    ):
        refused(tmp_path, words, "check", tiny, *arguments)


def test_check_refuses_weights_that_are_not_finite(refused, tmp_path):
    state = state_of("lumen", **TINY)
    state["norm.weight"][0] = torch.nan
    path = save({"model": state, "model_args": said("lumen", **TINY)}, tmp_path / "a.pt")
    refused(tmp_path, "NaN or infinite numbers in norm.weight", "check", path)


def test_convert_with_check_records_its_figures(run, tiny, tmp_path):
    code, out, err = run("convert", tiny, tmp_path / "out", "--check")
    assert code == 0, err
    assert "parity: passed" in out
    assert f"{tmp_path / 'out'}: LumenConfig, 11 tensors" in out
    figures = json.loads((tmp_path / "out" / "parity.json").read_text())["check"]
    assert figures["verdict"] == "passed"
    code, out, _ = run("check", tmp_path / "out")
    assert code == 0
    assert "parity: passed" in out


@pytest.mark.parametrize("earlier", [False, True])
def test_convert_with_a_check_that_fails_writes_nothing(earlier, run, tiny, tmp_path, monkeypatch):
    if earlier:
        run("convert", tiny, tmp_path / "out")
    before = tree(tmp_path)
    build = counterparts.build
    monkeypatch.setattr(
        counterparts, "build", lambda config: build(replace(config, rms_norm_eps=1e-3))
    )
    code, out, err = run("convert", tiny, tmp_path / "out", "--check",
                         *["--overwrite"] * earlier)  # fmt: skip
    assert code == 1
    assert "parity: FAILED" in out
    assert "jaxslm: parity failed: nothing was written" in err
    assert tree(tmp_path) == before
