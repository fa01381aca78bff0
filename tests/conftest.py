"""What every test runs under, and what several of them share.

Warnings are errors (pyproject.toml), JAX runs on the CPU unless JAX_PLATFORMS says otherwise,
arrays never change rank silently, and hypothesis draws the same examples every time.
"""

import hashlib
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable, Iterator
from pathlib import Path

import flax
import hypothesis
import jax
import pytest

REPOSITORY = Path(__file__).parents[1]
SHARED_SHA256 = {
    "lumen_3m.pt": "0af82b124df1c9fe153836d70ce913997b332599115c15892a58011db4786262",
    "lumen_3m_bf16.pt": "b3806d28e8fd3bf51b33115fefb8a9137fb9e2bc62cf4ba37bcaaa30fe31609d",
    "gpt_small.pt": "103d1b694e8b94894a51b2addc63444bda2c07196510c9f90d705ccdc75c9c89",
    "ripple_char.pt": "baa44b1e6c291ab6da3685a84a375f07a6583b5778111d389c05bb1bc75d30a8",
    "ripple_window.pt": "ee4f5bf716f9411da102b1cf9eea05d56ffaec3e0420fa2b403aa1dadfee5d61",
}

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile(
    "jaxslm", derandomize=True, deadline=None, max_examples=25, database=None
)
hypothesis.settings.load_profile("jaxslm")


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX holds 64-bit numbers while the test runs."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["graph", "tree"])
def nnx_mode(request) -> Iterator[str]:
    """Runs a test in both of flax.nnx's modes; functions must be traced anew inside it."""
    before = flax.config.nnx_graph_mode
    flax.config.update("nnx_graph_mode", request.param == "graph")
    yield request.param
    flax.config.update("nnx_graph_mode", before)


@pytest.fixture(scope="session")
def shared() -> Callable[..., Path]:
    """Paths in the folder ../shared, which is no part of the repository; absent, the test skips."""

    def find(*parts: str) -> Path:
        path = REPOSITORY.parent.joinpath("shared", *parts)
        name = "/".join(("..", "shared", *parts))
        if not path.exists():
            pytest.skip(f"{name} is absent")
        digest = SHARED_SHA256.get(path.name)
        if digest and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            pytest.skip(f"{name} is not the file that these tests know: its SHA-256 is another")
        return path

    return find


@pytest.fixture
def run(capsys):
    """Runs a jaxslm command in this process; (exit status, stdout, stderr)."""
    from jaxslm.cli import main

    def command(*arguments) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return command


@pytest.fixture
def refused(run):
    """Runs a jaxslm command that must fail in these words on stderr, and change nothing."""
    from tests.convert.checkpoints import tree

    def command(folder, words, *arguments, status=2) -> str:
        before = tree(folder)
        code, out, err = run(*arguments)
        assert (code, out) == (status, ""), err
        assert words in " ".join(err.split()), err
        assert err.startswith("jaxslm: ")
        assert "Traceback" not in err
        assert all(line.isprintable() for line in err.replace("\t", "").splitlines())
        assert tree(folder) == before
        return err

    return command
