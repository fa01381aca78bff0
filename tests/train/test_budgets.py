"""What runs hold on TPUs, by their compiler: a change that makes them hold more must say so.

The figures are MiB a device in all. After a change that is meant, run this file as a program and
put what it prints here and in docs/performance.md.
"""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from train.command import load_config
from train.config import MeshConfig, TrainConfig
from train.plan import Plan, plan_training

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL_SLICES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
BUDGETS = {
    ("lumen_3m", "v5e:2x2", "as configured"): 1785,
    ("lumen_3m", "v5p:2x2x1", "as configured"): 1786,
    ("lumen_3m", "v6e:2x2", "as configured"): 1922,
    ("gpt_250m", "v5e:2x2", "as configured"): 15389,
    ("gpt_250m", "v5p:2x2x1", "as configured"): 15394,
    ("gpt_250m", "v6e:2x2", "as configured"): 15934,
    ("ripple_char", "v5e:2x2", "as configured"): 1174,
    ("ripple_char", "v5p:2x2x1", "as configured"): 1175,
    ("ripple_char", "v6e:2x2", "as configured"): 1182,
    ("ripple_long", "v5e:2x2", "as configured"): 1786,
    ("ripple_long", "v5p:2x2x1", "as configured"): 1786,
    ("ripple_long", "v6e:2x2", "as configured"): 1812,
    ("gpt_250m", "v5e:16x16", "data 256"): 6400,
    ("gpt_250m", "v5e:16x16", "fsdp 256"): 1191,
}
TOLERANCE = 0.05
assert BUDGETS, "no budgets: the tests below would be none"


def run_of(name: str, mesh: str) -> TrainConfig:
    """A config of configs/ with a mesh in place of its own; one sequence a device on 256."""
    config = load_config(CONFIGS / f"{name}.py")
    if mesh == "fsdp 256":
        config = replace(config, mesh=MeshConfig(fsdp=256), accumulation=1)
    elif mesh == "data 256":
        config = replace(config, accumulation=1)
    return config


def planned(name: str, topology: str, mesh: str) -> Plan:
    return plan_training(run_of(name, mesh), topology, quick=True)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the TPU compiler: jaxslm[plan]")
@pytest.mark.parametrize(("name", "topology", "mesh"), BUDGETS)
def test_a_run_holds_no_more_than_it_did(name, topology, mesh, monkeypatch):
    monkeypatch.setattr(jax, "jit", getattr(jax.jit, "func", jax.jit))
    plan = planned(name, topology, mesh)
    assert plan.fits, plan.refusal
    assert plan.memory is not None
    held, budget = plan.memory.total / 2**20, BUDGETS[name, topology, mesh]
    assert held <= budget * (1 + TOLERANCE), (
        f"{held:.0f} MiB a device, {held / budget - 1:+.1%} of the budget of {budget}"
    )
    assert held >= budget * (1 - TOLERANCE), f"{held:.0f} MiB: lower the budget of {budget}"


def main() -> None:
    """Prints the budgets and the table of docs/performance.md."""
    jax.config.update("jax_platforms", "cpu")
    names = ("lumen_3m", "gpt_250m", "ripple_char", "ripple_long")
    cases = [(name, topology, "as configured") for name in names for topology in SMALL_SLICES]
    cases += [("gpt_250m", "v5e:16x16", mesh) for mesh in ("data 256", "fsdp 256")]
    for case in cases:
        plan = planned(*case)
        total = 0 if plan.memory is None else round(plan.memory.total / 2**20)
        print(f'    ("{case[0]}", "{case[1]}", "{case[2]}"): {total},', flush=True)
        if plan.roofline is not None:
            roofline = plan.roofline
            print(f"| {case[0]} | {case[1]} | {case[2]} | {total:,} | {1e3 * roofline.compute:.1f} "
                  f"/ {1e3 * roofline.memory:.1f} / {1e3 * roofline.communication:.1f} | "
                  f"{roofline.bound_by} | {plan.tokens_per_second:,.0f} | {plan.mfu:.0%} |",
                  file=sys.stderr, flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
