"""The package as a whole: what it imports, and what it offers."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxslm
from tests.conftest import REPOSITORY
from tests.jaxslm.support import random_model

SOURCES = sorted((REPOSITORY / "jaxslm").rglob("*.py"))
# What the models stand on: these import nothing of ours but each other.
LEAVES = {"layers", "rope", "attention", "files", "safetensors_io", "sharding"}


def run_python(code: str, folder: Path) -> str:
    """Runs code in a new process in which torch cannot be imported."""
    blocked = "import sys; sys.modules['torch'] = None\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocked + code],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_jaxslm_imports_and_loads_where_torch_is_absent(tmp_path):
    config = jaxslm.RippleConfig(vocab_size=29, n_layer=1, n_head=2, n_embd=8)
    jaxslm.save(random_model(config), tmp_path / "out")
    said = run_python(
        "import jaxslm, jax, numpy as np\n"
        "model = jaxslm.load('out')\n"
        "print(jax.eval_shape(model, np.zeros((1, 5), np.int32)).shape)\n"
        "print(sorted({'convert', 'train', 'configs', 'matplotlib', 'tyro'} & set(sys.modules)))\n",
        tmp_path,
    )
    assert said.splitlines() == ["(1, 5, 29)", "[]"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_imports_run_one_way(path):
    room = path.relative_to(REPOSITORY / "jaxslm").parts
    named = {name.split(".")[0] for name in imports(path)}
    assert not named & {"torch", "optax", "train", "configs"} or path.name == "cli.py"
    assert "convert" not in named or path.name == "cli.py"
    ours = {tuple(name.split(".")[1:]) for name in imports(path) if name.startswith("jaxslm.")}
    if room[0].removesuffix(".py") in LEAVES:
        assert {name[0] for name in ours} <= LEAVES
    if room[0] == "models" and path.name not in ("__init__.py", "config.py"):
        assert {name[:2] for name in ours if name[0] == "models"} <= {
            ("models",),
            ("models", "config"),
        }


def test_all_names_what_the_package_offers():
    for name in jaxslm.__all__:
        assert hasattr(jaxslm, name), name
    assert set(jaxslm.MODELS) == {"lumen", "gpt", "ripple"}
