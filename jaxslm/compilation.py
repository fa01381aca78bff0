"""Where compiled programs are kept from one process to the next."""

import os
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
