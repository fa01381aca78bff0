"""Copies between memory layouts in blocks; numpy's own walk misses the cache at every element."""

import itertools

import numpy as np

_BLOCK = 128
_PADDING = 16  # keeps a block's rows out of each other's cache sets


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Assigns `source` to `target` (equal shapes and dtypes), several times faster if transposed.

    Args:
        target: writable, its last axis contiguous for speed.
        source: any strides; a transposed view of a contiguous array is what this is for.
    """
    last = source.ndim - 1
    steps = [
        stride if size > 1 else np.inf
        for stride, size in zip(source.strides, source.shape, strict=True)
    ]
    if source.size < _BLOCK * _BLOCK or np.argmin(steps) == last:
        target[...] = source
        return
    fast = int(np.argmin(steps))
    rows, columns = source.shape[last], source.shape[fast]
    buffer = np.empty((_BLOCK, _BLOCK + _PADDING), source.dtype)
    others = [
        [slice(None)] if axis in (fast, last) else range(size)
        for axis, size in enumerate(source.shape)
    ]
    for at in itertools.product(*others):
        # Both as [fast axis, last axis]: the source runs along the first, the target the second.
        into, out_of = target[at], source[at]
        if fast > last:
            into, out_of = into.T, out_of.T
        for row in range(0, rows, _BLOCK):
            for column in range(0, columns, _BLOCK):
                tile = (slice(column, column + _BLOCK), slice(row, row + _BLOCK))
                part = out_of[tile].T
                block = buffer[: part.shape[0], : part.shape[1]]
                block[...] = part
                into[tile] = block.T


def contiguous(source: np.ndarray) -> np.ndarray:
    """The array itself if it is row-major, else a row-major copy."""
    if source.flags.c_contiguous:
        return source
    target = np.empty(source.shape, source.dtype)
    copy_into(target, source)
    return target
