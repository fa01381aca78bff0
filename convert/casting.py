"""Explicit casts and the search for numbers that are not finite."""

import ml_dtypes
import numpy as np

FLOATS = {
    name: np.dtype(kind)
    for name, kind in (
        ("float64", np.float64),
        ("float32", np.float32),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float16", np.float16),
    )
}
_BLOCK = 2**18  # elements looked at together, so that temporaries stay in the cache


def float_dtype(name: str) -> np.dtype:
    """The numpy dtype of a float's name.

    Raises:
        ValueError: it is none of ours.
    """
    if name not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(FLOATS)}, got {name!r}")
    return FLOATS[name]


def cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The array rounded to `dtype`; the array itself where that is its dtype already.

    Raises:
        ValueError: a finite number becomes infinite; names the tensor and the number.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
    if not all_finite(result):
        lost = ~np.isfinite(result) & np.isfinite(array)
        if lost.any():
            worst = array[lost].astype(np.float64)
            raise ValueError(
                f"{name}: {worst.size} numbers overflow in {dtype.name}, such as {worst[0]:g} "
                f"(the largest is {float(ml_dtypes.finfo(dtype).max):g}): choose a wider --dtype"
            )
    return result


def all_finite(array: np.ndarray) -> bool:
    """Whether no number is NaN or infinite, without a temporary as large as the array."""
    flat = array.reshape(-1)
    return all(
        bool(np.isfinite(flat[start : start + _BLOCK]).all())
        for start in range(0, flat.size, _BLOCK)
    )
