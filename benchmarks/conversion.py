"""Conversion, inspection, check and import: time and peak memory, in processes of their own."""

import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Process, run_python
from convert.counterparts import build
from jaxslm.models import GPTConfig, LumenConfig

_TORCH = """
import time, torch
from safetensors.torch import save_file
start = time.perf_counter()
state = torch.load({source!r})
state = dict(state.get("model", state))
state.pop("lm_head.weight")
save_file(state, {target!r})
seconds = time.perf_counter() - start
"""
_OURS = """
import time
from pathlib import Path
from convert.files import torch_to_folder
start = time.perf_counter()
torch_to_folder(Path({source!r}), Path({target!r}), preset="gpt-250m", overwrite=True)
seconds = time.perf_counter() - start
"""
_COMMAND = """
from jaxslm.cli import main
try:
    main({arguments!r})
except SystemExit as exit:
    assert not exit.code
"""


def make_checkpoints(room: Path) -> tuple[Path, Path, Path]:
    """GPT-298M weights (1.19 GB), the same with AdamW moments (3.6 GB), and Lumen-3M, seeded."""
    torch.manual_seed(0)
    weights, training, lumen = room / "gpt.pt", room / "gpt_training.pt", room / "lumen.pt"
    if not lumen.exists():
        module = build(GPTConfig())
        state = module.state_dict()
        torch.save(state, weights)
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": 1}, training)
        torch.save(build(LumenConfig()).state_dict(), lumen)
    return weights, training, lumen


def conversion(room: Path, rounds: int = 5) -> list[dict[str, Any]]:
    """Rows for both checkpoints, inspect, check and import."""
    weights, training, lumen = make_checkpoints(room)
    limit = 1.3 * weights.stat().st_size + 500e6
    rows = []
    for source in (weights, training):
        theirs, ours = [], []
        for turn in range(rounds + 1):
            names = {"source": str(source)}
            one = run_python(_TORCH.format(**names, target=str(room / "torch.safetensors")))
            other = run_python(_OURS.format(**names, target=str(room / "ours")))
            if turn:
                theirs.append(one)
                ours.append(other)
        ratio = _inner(ours) / _inner(theirs)
        peak = max(process.peak for process in ours)
        rows.append(
            _row(f"convert {source.name}", f"{_inner(theirs):.2f} s", f"{_inner(ours):.2f} s",
                 round(ratio, 2), "jaxslm / torch at most 1.5", ratio <= 1.5)
        )  # fmt: skip
        rows.append(
            _row(f"convert {source.name}, peak memory",
                 f"{max(p.peak for p in theirs) / 1e9:.2f} GB", f"{peak / 1e9:.2f} GB", None,
                 f"at most {limit / 1e9:.2f} GB", peak <= limit)
        )  # fmt: skip
    single = {
        "inspect gpt_training.pt": (_command("inspect", training, "gpt-250m"), 3.0, 500e6),
        "import jaxslm": ("import sys, jaxslm; assert 'torch' not in sys.modules", 1.5, None),
        "check Lumen-3M at 1,024": (_command("check", lumen, "lumen-3m"), 60.0, None),
    }
    for name, (code, seconds, memory) in single.items():
        runs = [run_python(code) for _ in range(3)]
        wall, peak = statistics.median(run.wall for run in runs), max(run.peak for run in runs)
        target = f"under {seconds:g} s" + (f", {memory / 1e6:.0f} MB" if memory else "")
        met = wall < seconds and (memory is None or peak < memory)
        rows.append(_row(name, "", f"{wall:.2f} s, {peak / 1e6:.0f} MB", None, target, met))
    return rows


def _command(name: str, path: Path, preset: str) -> str:
    return _COMMAND.format(arguments=[name, str(path), "--preset", preset])


def _inner(processes: list[Process]) -> float:
    return statistics.median(process.inner for process in processes)


def _row(what: str, theirs: str, ours: str, ratio: float | None, target: str, met: bool):
    return {"what": what, "torch": theirs, "jaxslm": ours, "ratio": ratio, "target": target,
            "met": met}  # fmt: skip
