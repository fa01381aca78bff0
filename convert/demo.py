"""`make demo`: torch checkpoints from file to proof and back, and a model trained here.

    python -m convert.demo demo-out

Builds a seeded torch checkpoint of each model in a container of its own, and runs on each what a
user would type. Real checkpoints in ../shared/checkpoints are taken along where they are present.
Then a small Ripple is trained on the interpreter's own sources, taken to torch with its optimizer,
measured, and made to write.
"""

import contextlib
import json
import pickle
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from convert.counterparts import build
from convert.resolve import CHOICES
from convert.torch_io import to_numpy
from jaxslm.cli import main as jaxslm
from jaxslm.models import Config, GPTConfig, LumenConfig, RippleConfig
from jaxslm.safetensors_io import TensorSpec, write_tensors

REAL = Path(__file__).resolve().parents[2] / "shared" / "checkpoints"
REAL_FILES = {
    "lumen_3m.pt": ["--preset", "lumen-3m"],
    "lumen_3m_bf16.pt": ["--preset", "lumen-3m"],
    "gpt_small.pt": [],
    "gpt_small_safetensors": [],
    "ripple_char.pt": [],
    "ripple_window.pt": [],
}
CONFIG = Path(__file__).resolve().parents[1] / "configs" / "ripple_char.py"
SMALL = {
    "model.n-layer": 4, "model.n-head": 4, "model.n-embd": 128, "model.block-size": 128,
    "model.dropout": 0.1, "data.sequence-length": 128, "data.batch-size": 16, "steps": 600,
    "eval.every": 200, "log.every": 50, "checkpoint.every": 200,
}  # fmt: skip
PROMPT = "def main("
LUMEN = LumenConfig(max_seq_len=256)
GPT = GPTConfig(block_size=128, vocab_size=2048, n_layer=4, n_head=8, n_kv_head=2, n_embd=256)
RIPPLE = RippleConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, attention_window=32)


def main() -> None:
    """Runs the demo in the folder named on the command line."""
    room = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out")
    start = time.monotonic()
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    torch.manual_seed(1337)
    options = {
        write_lumen(room / "lumen_old_format.pt"): [
            "--config", *(f"{k}={v}" for k, v in asdict(LUMEN).items() if k not in CHOICES)
        ],
        write_gpt(room / "gpt_sharded"): [],
        write_ripple(room / "ripple_training.pt"): [],
    }  # fmt: skip
    options |= {REAL / name: given for name, given in REAL_FILES.items() if (REAL / name).exists()}
    failed = [path.name for path, given in options.items() if not round_trip(path, given, room)]
    done = len(options) - len(failed)
    if not train_a_model(room):
        failed.append("training")
    seconds = time.monotonic() - start
    print(f"\n{done} of {len(options)} checkpoints converted, proven and back; a model trained, "
          f"taken to torch, and made to write; {seconds:.0f} s")  # fmt: skip
    print(f"reports: {room}/*.html, losses: {room}/run/loss.png")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def round_trip(path: Path, options: list[str], room: Path) -> bool:
    """Inspects, converts, checks and converts back; whether all of it went well."""
    name = path.name.removesuffix(".pt")
    folder, back = room / f"{name}_jax", room / f"{name}_back.pt"
    report = room / f"{name}.html"
    return (
        _run("inspect", path, *options)
        and _run("convert", path, folder, *options)
        and _run("check", path, *options, "--report", report)
        and _run("convert", folder, back)
    )


def train_a_model(room: Path) -> bool:
    """From text to a trained model, to torch, and to text again; whether all of it went well."""
    data, run, folder, back = (room / name for name in ("data", "run", "trained", "trained.pt"))
    lengths = ["--lengths", "128,512", "--batches", "8", "--plot", room / "loss_by_length.png"]
    options = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    return (
        _run("data", "prepare", "--input", "python-stdlib", "--tokenizer", "byte", "--out", data)
        and _run("train", CONFIG, "--out", run, "--data.train", data, "--data.val", data, *options)
        and _run("inspect", run)
        and _run("export", run, folder, "--with-optimizer")
        and _run("convert", folder, back, "--with-optimizer")
        and _run("check", back, "--report", room / "trained.html")
        and _run("eval", folder, "--data", data, *lengths)
        and _run("generate", folder, "--prompt", PROMPT, "--tokens", 300, "--stream")
    )


def _run(*words: object) -> bool:
    """One command of ours, shown as it would be typed."""
    arguments = [str(word) for word in words]
    print(f"\n$ jaxslm {shlex.join(arguments)}", flush=True)
    try:
        jaxslm(arguments)
    except SystemExit as exit:
        return not exit.code
    return True


def write_lumen(path: Path) -> Path:
    """A raw state dict in torch's old format, from before zip files: its config is not in it."""
    module = _trained_a_little(LUMEN)
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=False)
    return path


def write_gpt(path: Path) -> Path:
    """Sharded safetensors with index and config.json, the tied table once."""
    state = _trained_a_little(GPT).state_dict()
    del state["lm_head.weight"]
    arrays = {key: to_numpy(tensor) for key, tensor in state.items()}
    path.mkdir()
    half = len(arrays) // 2
    weight_map = {}
    for number, keys in enumerate((list(arrays)[:half], list(arrays)[half:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        specs = {key: TensorSpec(arrays[key].shape, arrays[key].dtype) for key in keys}
        write_tensors(path / file, specs, arrays.__getitem__, {"format": "pt"})
        weight_map |= dict.fromkeys(keys, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(_fields(GPT)))
    return path


def write_ripple(path: Path) -> Path:
    """A training checkpoint as RippleGPT writes it: a compiled model, optimizer, pickled config."""
    module = _trained_a_little(RIPPLE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    tokens = torch.randint(RIPPLE.vocab_size, (2, 65))
    module(tokens[:, :-1], tokens[:, 1:])[1].backward()
    optimizer.step()
    values = _fields(RIPPLE)
    with _importable("src.config", "RippleConfig") as kind:
        config = kind()
        vars(config).update(values)
        torch.save(
            {
                "model": {f"_orig_mod.{k}": v for k, v in module.state_dict().items()},
                "optimizer": optimizer.state_dict(),
                "model_args": values,
                "iter_num": 1,
                "best_val_loss": 4.2,
                "config": config,
            },
            path,
            pickle_module=pickle,
        )
    return path


@contextlib.contextmanager
def _importable(module_name: str, class_name: str):
    """A class that pickles under a name that no module here has, as in other people's files."""
    kind = type(class_name, (), {"__module__": module_name})
    names = [module_name.rpartition(".")[0], module_name]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    setattr(sys.modules[module_name], class_name, kind)
    try:
        yield kind
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _trained_a_little(config: Config) -> nn.Module:
    """A module whose every parameter is off its initial value, so that no fault hides."""
    module = build(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return module


def _fields(config: Config) -> dict[str, object]:
    """The fields that the original's config has."""
    ours = {*CHOICES, "layer_norm_eps", "rope_base"}
    return {name: value for name, value in asdict(config).items() if name not in ours}


if __name__ == "__main__":
    main()
