"""Between torch and JAX: exact conversion both ways, and the parity check.

`to_jax` needs no torch; `to_torch` and `check` import it when they are called.
"""

from convert.transform import to_jax, to_torch

__all__ = ["to_jax", "to_torch"]
