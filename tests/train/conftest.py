"""Programs compiled by one test are found by the next; a finished run that tests may copy."""

import gc
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.experimental.pallas.ops.tpu.splash_attention  # its programs are jitted when imported
import pytest

from tests.train.runs import quietly, small_config
from train.config import TrainConfig


@pytest.fixture(scope="session", autouse=True)
def quick_programs(tmp_path_factory) -> Iterator[None]:
    """Compiling is nearly all the time of a small run: XLA tries less, and keeps what it made."""
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    settings = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
    }
    before = {name: jax.config.values[name] for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", partial(jax.jit, compiler_options=options))
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)


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
