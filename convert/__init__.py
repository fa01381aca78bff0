"""Between torch and JAX: exact conversion both ways, and the parity check.

`to_jax` needs no torch; `to_torch` imports it when called.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.transform import to_jax, to_torch

__all__ = ["to_jax", "to_torch"]


def __getattr__(name: str) -> Any:
    """Imports JAX only when a function is asked for, so that readers of files start fast."""
    if name in __all__:
        from convert import transform

        return getattr(transform, name)
    raise AttributeError(f"module 'convert' has no attribute {name!r}")
