"""Where compiled programs are kept from one process to the next."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import jax


def use_compilation_cache(*, least_seconds: float = 1.0) -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX was told where.

    Args:
        least_seconds: programs that compile faster are not kept.
    """
    if not jax.config.values.get("jax_compilation_cache_dir"):
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "jaxslm" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """What is compiled within is not kept: programs for devices that are not attached cannot be.

    JAX would write them and fail to read them the next time.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)
