"""What benchmarks say is about equal computations; how fast they are is no test's matter."""

import json
import os
import subprocess
import sys
from statistics import median

import jax
import pytest
import torch

from benchmarks.update import EAGER, OBVIOUS, OURS, Case, measure, timed, update
from jaxslm import GPTConfig, LumenConfig, RippleConfig
from tests.conftest import REPOSITORY

LUMEN = Case(
    "Lumen", LumenConfig(num_layers=2, hidden_dim=32, intermediate_dim=48, vocab_size=64), 2, 16, 2,
    {("update", "float32", EAGER): 0.0},
)  # fmt: skip
GPT = Case(
    "GPT",
    GPTConfig(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, vocab_size=64, block_size=16),
    2, 16, 1, {("update", "float32", EAGER): 1e9}, compiles_within=1e-9,
)  # fmt: skip
RIPPLE = Case(
    "Ripple", RippleConfig(n_layer=2, n_embd=36, dropout=0.0, attention_window=5), 2, 16, 2, {}
)


@pytest.fixture(autouse=True)
def _lenient(monkeypatch):
    """What one writes first promotes ranks; threads of torch wait long where tests share cores.

    Compiling is most of the time here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("case", "dtype"), [(LUMEN, "bfloat16"), (GPT, "float32")])
def test_measure_finds_the_same_losses_on_all_sides_and_judges_by_targets(case, dtype):
    rows = list(measure(case, dtype, 1, compiled=False))
    compiling = [row for row in rows if row["what"].startswith("compile")]
    assert [row["met"] for row in compiling] == [False] * (case is GPT)
    timed = [row for row in rows if row not in compiling]
    assert [(row["work"], row["reference"]) for row in timed] == [
        (work, reference) for work in ("update", "forward") for reference in (EAGER, OBVIOUS)
    ]
    assert [row["met"] for row in timed] == [case is not GPT, True, True, True]
    for row in timed:
        theirs, ours = row["seconds"][row["reference"]], row["seconds"][OURS]
        assert row["ratio"] == pytest.approx(median(theirs) / median(ours), abs=0.01)


def test_update_draws_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.update.DTYPES", ("float32",))
    rows = list(update(tmp_path, [RIPPLE], 1, compiled=False))
    assert [row["reference"] for row in rows] == [EAGER, OBVIOUS] * 2
    assert (tmp_path / "update.png").read_bytes().startswith(b"\x89PNG")


def test_timed_refuses_a_side_with_other_losses():
    def side(called, loss):
        methods = dict.fromkeys(("start", "update", "forward", "stop"), staticmethod(lambda: loss))
        return type("Side", (), {"name": called} | methods)()

    close, other = side(EAGER, 1.0001), side(OBVIOUS, 1.0002)
    found = timed([side(OURS, 1.0), close], LUMEN, "float32", 2)
    assert {name: len(timing.runs) for name, timing in found.items()} == {
        (name, work): 4 for name in (OURS, EAGER) for work in ("update", "forward")
    }
    with pytest.raises(RuntimeError, match=f"{OBVIOUS} has losses .1.0002"):
        timed([side(OURS, 1.0), close, other], LUMEN, "float32", 1)


def test_accelerator_writes_what_it_measured_and_why_it_did_not(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.accelerator", "--small", "--json", str(file)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["platform"] == "cpu"
    assert found["versions"]["jax"] == jax.__version__
    parts = found["parts"]
    assert list(parts) == ["equality", "updates", "attention", "decoding", "long updates"]
    equal = [row for row in parts["equality"] if "blockwise" in row["what"]]
    assert len(equal) == 4
    assert all(row["met"] and 0 < row["output"] < 0.01 for row in equal)
    others = [row for row in parts["equality"] if row not in equal]
    assert others
    assert all("cannot serve here" in row["reason"] for row in others)
    for name in ("updates", "decoding", "long updates"):
        assert all(row["tokens_per_second"] > 0 for row in parts[name]), name
    assert all(row["ms"] > 0 for row in parts["attention"])
