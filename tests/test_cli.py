"""The command line: what it prints, its exit status, and how it behaves as a process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from convert import counterparts
from convert.checkpoint.containers import open_checkpoint
from jaxslm import LumenConfig
from jaxslm.weights import map_folder
from tests.convert.checkpoints import (
    CONTAINERS,
    config_of,
    gpt_file,
    raw,
    said,
    save,
    state_of,
    training_checkpoint,
)

CONSOLE_SCRIPT = Path(sys.executable).parent / "jaxslm"


@pytest.fixture
def gpt(tmp_path):
    """A good checkpoint."""
    return gpt_file(tmp_path / "gpt.pt")


# inspect


@pytest.mark.parametrize("model", ["lumen", "gpt", "ripple"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_inspect_tells_the_same_of_every_container(container, model, run, tmp_path):
    path = CONTAINERS[container](tmp_path / "it", model, state_of(model))
    code, out, err = run("inspect", path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    numbers = {"lumen": (4416, 20), "gpt": (6288, 23), "ripple": (6366, 63)}[model]
    assert (found["model"], found["parameters"], found["tensors"]) == (model, *numbers)
    assert found["bytes"] == 4 * found["parameters"]
    assert found["dtypes"] == {"float32": found["tensors"]}
    assert {name: found["config"][name]["value"] for name in said(model)} == said(model)
    assert (found["unknown"], found["faults"], found["buffers"]) == ([], [], [])
    prefixes = {"compiled": ["_orig_mod."], "DDP": ["module."],
                "mid-key": ["_orig_mod.", "module."]}  # fmt: skip
    expected = next((value for words, value in prefixes.items() if words in container), [])
    assert found["stripped_prefixes"] == expected
    assert ("optimizer" in found["also_holds"]) == ("training" in container)
    stored = "stored twice" if "safetensors" in container else "one storage"
    assert set(found["tied"].values()) == (set() if model == "ripple" else {stored})


def test_inspect_prints_for_people(run, tmp_path):
    state = {f"_orig_mod.{key}": value for key, value in state_of("gpt").items()}
    state["rope_cos"] = torch.zeros(16, 4)
    path = save(training_checkpoint("gpt", state) | {"model_args": {"lr": 0.1}}, tmp_path / "a.pt")
    code, out, err = run("inspect", path)
    assert (code, err) == (0, "")
    for words in (
        f"file        {path}\n",
        'container   torch zip, state dict under "model"',
        "model       gpt, 6,288 parameters in 23 tensors, 0.0 MB",
        "dtypes      float32 (23)",
        "tied        transformer.wte.weight = lm_head.weight (one storage)",
        "prefixes    _orig_mod.",
        "buffers     1 ignored",
        "also holds  optimizer: 25 parameters, 50 moment tensors, 0.1 MB; iter_num: 3;",
        "not used    lr in model_args",
    ):
        assert words in out
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert ["n_head", "4", "pickled gone_gpt.GPTConfig"] in [[w.strip() for w in x] for x in lines]


def test_inspect_says_what_to_pass(run, tmp_path):
    path = save(state_of("lumen"), tmp_path / "a.pt")
    code, out, _ = run("inspect", path)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "num_heads ? the file does not say and the weights cannot tell" in lines
    assert "to convert, pass --config num_heads=... num_kv_heads=... max_seq_len=..." in out
    code, out, _ = run("inspect", path, "--json", "--config", "num_heads=4")
    assert json.loads(out)["unknown"] == ["max_seq_len", "rms_norm_eps", "rope_theta"]
    assert json.loads(out)["config"]["num_kv_heads"] == {"value": 2, "from": "the tensors' shapes"}


def test_inspect_lists_faults_and_does_not_read_weights(run, tmp_path):
    state = state_of("gpt")
    state["transformer.h.1.evil\x1b[2J"] = torch.zeros(2)
    del state["transformer.ln_f.bias"]
    state["transformer.wte.weight"][0, 0] = torch.nan
    code, out, _ = run("inspect", gpt_file(tmp_path / "a.pt", state))
    assert code == 0
    assert "fault: missing     transformer.ln_f.bias  [16]" in out
    assert r"fault: unexpected  transformer.h.1.evil\x1b[2J  [2]" in out
    assert "\x1b" not in out
    path = save({"model": state_of("gpt"), "model_args": {"n_head": "e\x1b[2J", "e\x1b[2J": 1}},
                tmp_path / "c.pt")  # fmt: skip
    code, out, _ = run("inspect", path)
    assert code == 0
    assert "\x1b" not in out
    assert r"not used    e\x1b[2J in model_args" in out
    code, out, _ = run("inspect", gpt_file(tmp_path / "b.pt", n_layer=3))
    assert "fault: n_layer is 3 by model_args, but 2 by the tensors' shapes" in out


def test_inspect_suggests_a_preset(run, tmp_path):
    state = counterparts.build(LumenConfig()).state_dict()
    code, out, _ = run("inspect", save(state, tmp_path / "a.pt"))
    assert code == 0
    assert "or --preset lumen-3m (its shapes fit)" in out


def test_inspect_reads_a_model_folder(run, gpt, tmp_path):
    run("convert", gpt, tmp_path / "out", "--dtype", "bfloat16")
    code, out, err = run("inspect", tmp_path / "out", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["container"], found["model"], found["parameters"]) == (
        "model folder",
        "gpt",
        6288,
    )
    assert (found["tensors"], found["dtypes"]) == (13, {"bfloat16": 13})
    assert found["converted_from_torch"] is True
    code, out, _ = run("inspect", tmp_path / "out")
    assert "container   model folder" in out


# convert


@pytest.mark.parametrize("back", ["back.pt", "back.safetensors", "back"])
def test_convert_there_and_back_says_what_it_did(back, run, gpt, tmp_path):
    code, out, err = run("convert", gpt, tmp_path / "out")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'out'}: GPTConfig, 23 tensors, 6,288 parameters, 0.0 MB\n"
    code, out, err = run("convert", tmp_path / "out", tmp_path / back)
    assert (code, err) == (0, "")
    assert out == (
        f"{tmp_path / back}: GPTConfig, 23 tensors, 6,288 parameters, 0.0 MB\n"
        "23 of 23 tensors have the bytes of the checkpoint that "
        f"{tmp_path / 'out'} came from\n"
    )
    found = open_checkpoint(tmp_path / back).tensors
    assert {key: raw(tensor) for key, tensor in found.items()} == {
        key: raw(tensor) for key, tensor in state_of("gpt").items()
    }


def test_convert_takes_its_options(run, tmp_path):
    state = state_of("ripple")
    state["ln_f.bias"][0] = torch.inf
    path = save(state, tmp_path / "a.pt")
    given = ["attention_window=none", "dropout=0.1", "window_mode=exact"]
    code, _, err = run(
        "convert", path, tmp_path / "out", "--config", *given, "--dtype", "float16",
        "--allow-nonfinite",
    )  # fmt: skip
    assert (code, err) == (0, "")
    config, arrays = map_folder(tmp_path / "out")
    assert config == config_of("ripple", attention_window=None, dropout=0.1, window_mode="exact")
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float16)}
    code, _, err = run("convert", tmp_path / "out", tmp_path / "back", "--shard-size", "9kB",
                       "--dtype", "float32")  # fmt: skip
    assert (code, err) == (0, "")
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 2
    code, _, _ = run("convert", path, tmp_path / "out", "--config", *given, "--allow-nonfinite",
                     "--overwrite")  # fmt: skip
    assert code == 0
    assert map_folder(tmp_path / "out")[1]["embedding"].dtype == np.float32


def test_convert_takes_a_preset(run, tmp_path):
    path = save(counterparts.build(LumenConfig()).state_dict(), tmp_path / "a.pt")
    code, _, err = run("convert", path, tmp_path / "out", "--preset", "lumen-3m")
    assert (code, err) == (0, "")
    assert map_folder(tmp_path / "out")[0] == LumenConfig()


def test_convert_notes_what_stays_behind(run, tmp_path):
    path = save(training_checkpoint("gpt", state_of("gpt")), tmp_path / "a.pt")
    _, out, _ = run("convert", path, tmp_path / "out")
    assert "optimizer (24 parameters, 48 moment tensors, 0.1 MB; pass --with-optimizer to" in out
    assert "not converted: iter_num (3)\n" in out


# The command line itself


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing subcommand"),
        (["frobnicate"], "frobnicate"),
        (["inspect"], "Missing from jaxslm inspect"),
        (["convert", "a.pt"], "Missing from jaxslm convert"),
        (["inspect", "a.pt", "b.pt"], "b.pt"),
        (["inspect", "a.pt", "--frob"], "--frob"),
        (["convert", "a.pt", "out", "--dtype", "int8"], "invalid choice 'int8'"),
        (["convert", "a.pt", "out", "--preset", "gpt2"], "invalid choice 'gpt2'"),
        (["check", "a.pt", "--seed", "x"], "--seed"),
    ],
)
def test_usage_errors_go_to_stderr(arguments, words, run):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "--help" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_heads=4", "--config n_heads: no such field; did you mean n_head"),
        ("n_head", "--config takes FIELD=VALUE, got 'n_head'"),
        ("n_head=four", "--config n_head takes int, got 'four'"),
        ("n_head=8", "n_head is 8 by --config, but 4 by model_args"),
    ],
)
def test_config_option_is_refused_in_words(text, words, refused, gpt, tmp_path):
    refused(tmp_path, words, "convert", gpt, tmp_path / "out", "--config", text)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("inspect", ["jaxslm inspect ckpt.pt", "--config FIELD=VALUE", "--json", "--preset"]),
        ("convert", ["jaxslm convert out/ back.pt", "--shard-size", "--allow-nonfinite", "--check",
                     "--overwrite", "--dtype"]),
        ("check", ["jaxslm check ckpt.pt --report parity.html", "--against", "FILE.py:CLASS",
                   "--tokens", "--lengths", "--bfloat16", "--json", "--report"]),
    ],
)  # fmt: skip
def test_help_is_a_manual_page_with_an_example(command, words, run):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    for word in [f"usage: jaxslm {command}", "Example: ", *words]:
        assert word in out
    code, out, _ = run("--help")
    assert code == 0
    assert command in out


# Processes


def process(*arguments, **options):
    return subprocess.run(
        [CONSOLE_SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip


def test_console_script_runs(gpt, tmp_path):
    done = process("convert", gpt, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'out'}: GPTConfig, 23 tensors")
    done = process("inspect", tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"jaxslm: {tmp_path / 'nothing'}: cannot be read: no such file or directory\n"
    )


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_closed_pipe_is_quiet(options, gpt):
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([CONSOLE_SCRIPT, "inspect", gpt, *options], stdout=write,
                              stderr=subprocess.PIPE, timeout=120, check=False)  # fmt: skip
    finally:
        os.close(write)
    assert done.stderr == b""
    assert done.returncode == 2  # 1 would be failed parity


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_that_cannot_be_written_is_no_traceback(gpt):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([CONSOLE_SCRIPT, "inspect", gpt], stdout=full,
                              stderr=subprocess.PIPE, timeout=120, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (2, b"jaxslm: No space left on device\n")
    done = subprocess.run(["sh", "-c", '"$0" inspect "$1" >&-', CONSOLE_SCRIPT, gpt],
                          stderr=subprocess.PIPE, timeout=120, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


# A shell's background job, as CI may be, ignores Ctrl-C; a user's command does not.
HEEDING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_control_c_is_one_word(gpt, tmp_path):
    slow = "import pathlib, time\npathlib.Path(r'{}').touch()\ntime.sleep(60)\n"
    (tmp_path / "slow.py").write_text(slow.format(tmp_path / "started"))
    running = subprocess.Popen(
        [sys.executable, "-c", HEEDING, CONSOLE_SCRIPT, "check", gpt, "--against",
         tmp_path / "slow.py:GPT"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    finally:
        running.kill()
    assert (running.returncode, out) == (130, "")
    assert err.strip().splitlines()[-1] == "jaxslm: interrupted"
    assert "Traceback" not in err


WITHOUT_TORCH = """
import json, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Finder())
from jaxslm.cli import main

for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as error:
        print("status", error.code, *command[:1])
assert "torch" not in sys.modules
"""


def test_torch_is_needed_for_check_and_pt_alone(gpt, tmp_path):
    before = {"gpt.pt": gpt.read_bytes()}
    out = str(tmp_path / "out")
    commands = [
        ["inspect", str(gpt)],
        ["convert", str(gpt), out],
        ["inspect", out],
        ["convert", out, str(tmp_path / "b.safetensors")],
        ["convert", out, str(tmp_path / "shards")],
        ["convert", out, str(tmp_path / "b.pt")],
        ["check", str(gpt)],
        ["check", out],
        ["convert", str(gpt), str(tmp_path / "checked"), "--check"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    statuses = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("status")]
    assert statuses == ["0"] * 5 + ["2"] * 4, done.stderr
    assert done.returncode == 0
    assert done.stderr.splitlines().count(
        "jaxslm: this needs torch: pip install 'jaxslm[torch]'"
    ) == 4  # fmt: skip
    assert "Traceback" not in done.stderr
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", "b.safetensors", "shards", *before}
    found = open_checkpoint(tmp_path / "b.safetensors").tensors
    assert {key: raw(tensor) for key, tensor in found.items()} == {
        key: raw(tensor) for key, tensor in state_of("gpt").items()
    }
    shutil.rmtree(out)
