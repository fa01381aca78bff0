"""`jaxslm train`, as it is typed."""

import shutil

import pytest

from tests.train.runs import small_config
from train.config import read_config

CONFIG = """
from pathlib import Path
from jaxslm import RippleConfig
from train.config import RECIPES, DataConfig, LogConfig, TrainConfig
config = TrainConfig(
    optim=RECIPES["ripple"],
    out=Path("run"),
    model=RippleConfig(vocab_size=67, block_size=16, n_layer=1, n_head=2, n_embd=8),
    data=DataConfig(train=Path("train.bin"), val=None, batch_size=2, sequence_length=8),
    log=LogConfig(tensorboard=False, compilation_cache=False),
    steps=2,
)
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A folder with a config and data, which is the working directory."""
    small_config(tmp_path)
    (tmp_path / "small.py").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_config_file_and_its_fields(room, run):
    code, _, err = run("train", "small.py", "--steps", 3, "--model.n-embd", 12, "--seed", 7)
    assert code == 0, err
    assert "done: 3 updates" in err
    config = read_config(room / "run")
    assert (config.steps, config.model.n_embd, config.seed) == (3, 12, 7)
    code, _, err = run("train", "run", "--resume", "--steps", 4)
    assert (code, "resumed at update 3" in err) == (0, True)
    code, _, err = run("train", "small.py")
    assert (code, "is not empty" in err) == (2, True)


def test_run_is_resumed_where_it_lies(room, run):
    assert run("train", "small.py")[0] == 0
    shutil.copytree("run", "copy")
    before = (room / "run" / "metrics.jsonl").read_bytes()
    code, _, err = run("train", "copy", "--resume", "--steps", 4)
    assert (code, "done: 4 updates, copy" in err) == (0, True)
    assert (room / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smal.py"], "there is no config smal.py"),
        (["--resume"], "the config comes first"),
        (["train.bin"], "is no Python file"),
        (["broken.py"], "broken.py fails: ZeroDivisionError"),
        (["empty.py"], "must set `config`"),
        (["small.py", "--data.batch-size", "3", "--accumulation", "2"], "not divisible"),
        (["small.py", "--data.train", "nothing.bin"], "nothing.bin does not exist"),
        (["small.py", "--mesh.fsdp", "3"], "does not divide the 1 devices"),
        (["small.py", "--model.vocab-size", "10"], "no id of the model's vocabulary of 10"),
        (["small.py", "--cluster.process", "1"], "go together"),
        (["small.py", "--optim.schedule", "cosine", "--optim.warmup-steps", "9"], "longer than"),
        (["small.py", "--init-from", "nowhere"], "nowhere"),
        (["small.py", "--resume"], "holds no run"),
    ],
)
def test_bad_input_is_said_in_a_line(room, run, arguments, words):
    (room / "broken.py").write_text("1 / 0")
    (room / "empty.py").write_text("")
    code, out, err = run("train", *arguments)
    assert (code, out) == (2, ""), err
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_misspelt_field_is_answered_with_its_neighbours(room, run):
    code, _, err = run("train", "small.py", "--optim.lrr", "1")
    assert code == 2
    assert "--optim.lr" in err
    assert not (room / "run").exists()


def test_help_lists_fields_and_configs(room, run):
    code, out, _ = run("train", "--help")
    assert (code, "usage" in out) == (0, True)
    code, out, _ = run("train", "small.py", "--help")
    assert code == 0
    for option in ("--optim.lr", "--mesh.fsdp", "--model.n-layer", "--resume"):
        assert option in out


def test_not_finite_is_a_failure_not_bad_input(room, run):
    code, _, err = run("train", "small.py", "--optim.lr", "1e30", "--steps", 40, "--max-skipped", 2)
    assert code == 1
    assert "not finite in" in err


def test_data_is_prepared_and_trained_on(room, run):
    (room / "book.txt").write_text("To be, or not to be: that is the question. " * 200)
    code, out, err = run(
        "data", "prepare", "--input", "book.txt", "--tokenizer", "byte", "--out", "data"
    )
    assert code == 0, err
    assert "train:" in out
    arguments = ["--data.train", "data", "--data.val", "data", "--model.vocab-size", "257"]
    code, _, err = run("train", "small.py", *arguments)
    assert code == 0, err
    assert "validation loss" in err
    assert run("export", "run", "out")[0] == 0
    assert (room / "out" / "tokenizer.json").exists()
    shutil.rmtree(room / "run")
    code, _, err = run("train", "small.py", *arguments[:4])
    assert (code, "vocabulary of 257" in err) == (2, True)
