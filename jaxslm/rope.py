"""Rotary position embedding (Su et al. 2021), half-split: pair (i, i + H/2), as the originals."""

import jax
import jax.numpy as jnp
import numpy as np

RopeTables = tuple[np.ndarray, np.ndarray]


def frequencies(head_width: int, base: float) -> np.ndarray:
    """Angular frequencies base^(-2i/H) in radians a position, float32 [H/2].

    Made on the host in the originals' float32 order of operations (the power correctly rounded),
    so that every platform has the same bits.
    """
    exponents = np.arange(0, head_width, 2, dtype=np.float32) / np.float32(head_width)
    power = np.power(np.float64(np.float32(base)), exponents.astype(np.float64))
    return np.float32(1) / power.astype(np.float32)


def rope_tables(length: int, head_width: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of position x frequency, float32 [length, H/2].

    The angle is rounded to float32 as in the originals; its cosine and sine are correctly rounded
    (torch's differ from that by at most one unit in the last place).
    """
    positions = np.arange(length, dtype=np.float32)
    angles = np.outer(positions, frequencies(head_width, base)).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x_BTNH: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotates each pair (i, i + H/2) of a head by its position's angle.

    Args:
        x_BTNH: queries or keys (K heads serve as N), any float dtype.
        tables: cosines and sines [T, H/2] for these T positions, or [B, T, H/2] where rows stand at
            different ones; the product is made in the wider of their dtype and x's, so bfloat16
            keeps float32 tables (the originals round them).

    Returns:
        The rotated heads, in x's dtype.
    """
    cos, sin = (jnp.asarray(table)[..., :, None, :] for table in tables)
    if cos.ndim == 3:
        cos, sin = cos[None], sin[None]
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
