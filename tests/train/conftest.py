"""Programs compiled by one test are found by the next; a finished run that tests may copy."""

import gc
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from tests.train.runs import quietly, small_config
from train.config import TrainConfig


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory) -> Iterator[None]:
    """A compilation cache for the session."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


@pytest.fixture
def collected() -> Iterator[None]:
    """What a test leaves is collected within it."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> tuple[TrainConfig, str]:
    """A run of 8 updates with checkpoints at 4 and 8, and what it printed; not to be changed."""
    config = small_config(tmp_path_factory.mktemp("finished"))
    status, text = quietly(config)
    assert status == 0
    return config, text


@pytest.fixture
def copied(finished, tmp_path) -> TrainConfig:
    """A copy of the finished run."""
    config, _ = finished
    shutil.copytree(config.out, tmp_path / "run")
    return replace(config, out=Path(tmp_path / "run"))
