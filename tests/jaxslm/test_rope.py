import hashlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.rope import frequencies, rope_tables, rotate


def complex_rotation(x_BTNH: np.ndarray, base: float, first: int = 0) -> np.ndarray:
    """Each pair (i, i + H/2) as a complex number times exp(i * position * frequency), float64."""
    T, half = x_BTNH.shape[1], x_BTNH.shape[3] // 2
    z = x_BTNH[..., :half] + 1j * x_BTNH[..., half:].astype(np.float64)
    angles = np.outer(np.arange(first, first + T), base ** (-np.arange(half) / half))
    z = z * np.exp(1j * angles)[None, :, None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("base", [10000.0, 500.0, 500000.0])
@pytest.mark.parametrize("head_width", [2, 6, 64])
def test_frequencies_are_negative_powers_of_the_base(head_width, base):
    found = frequencies(head_width, base)
    assert found.dtype == np.float32
    expected = [base ** (-2 * i / head_width) for i in range(head_width // 2)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_tables_are_cosine_and_sine_of_the_float32_angle():
    cos, sin = rope_tables(2048, 64, 10000.0)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (2048, 32)
    angles = np.arange(2048, dtype=np.float32)[:, None] * frequencies(64, 10000.0)[None]
    np.testing.assert_array_equal(cos, np.cos(angles.astype(np.float64)).astype(np.float32))
    np.testing.assert_array_equal(sin, np.sin(angles.astype(np.float64)).astype(np.float32))


def test_tables_do_not_depend_on_the_length():
    long = rope_tables(1024, 10, 10000.0)
    for length in (1, 7, 512):
        for short_table, table in zip(rope_tables(length, 10, 10000.0), long, strict=True):
            np.testing.assert_array_equal(short_table, table[:length])


def test_tables_have_the_same_bits_on_every_platform():
    cos, sin = rope_tables(1024, 64, 10000.0)
    digest = hashlib.sha256(cos.tobytes() + sin.tobytes()).hexdigest()
    assert digest == "74522cf780366160999f63a10905fd8c093ccf7fb54f810d8dc06d5c716a426b"


@pytest.mark.parametrize("head_width", [2, 6, 16])
def test_rotate_multiplies_complex_numbers(head_width, x64):
    x_BTNH = np.random.default_rng(0).standard_normal((2, 9, 3, head_width))
    out = rotate(jnp.asarray(x_BTNH), rope_tables(9, head_width, 100.0))
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, complex_rotation(x_BTNH, 100.0), atol=2e-6)


def test_rotate_pairs_the_halves_not_neighbours():
    cos, sin = rope_tables(2, 6, 10000.0)
    for i in range(3):
        x_BTNH = np.zeros((1, 2, 1, 6), np.float32)
        x_BTNH[0, 1, 0, i] = 1.0
        expected = np.zeros(6, np.float32)
        expected[i], expected[i + 3] = cos[1, i], sin[1, i]
        out = np.asarray(rotate(jnp.asarray(x_BTNH), (cos, sin)))
        np.testing.assert_array_equal(out[0, 1, 0], expected)


def test_rotate_leaves_position_zero_as_it_is():
    x_BTNH = np.random.default_rng(0).standard_normal((2, 4, 3, 8), np.float32)
    out = np.asarray(rotate(jnp.asarray(x_BTNH), rope_tables(4, 8, 10000.0)))
    np.testing.assert_array_equal(out[:, 0], x_BTNH[:, 0])
    assert (out[:, 1:] != x_BTNH[:, 1:]).any(axis=(0, 2, 3)).all()


def test_rotated_products_depend_on_the_distance_alone(x64):
    rng = np.random.default_rng(0)
    q_H, k_H = rng.standard_normal((2, 8))
    tables = rope_tables(40, 8, 100.0)
    q_TH, k_TH = (
        np.asarray(rotate(jnp.asarray(np.tile(x, (1, 40, 1, 1))), tables))[0, :, 0]
        for x in (q_H, k_H)
    )
    products_TS = q_TH @ k_TH.T
    for distance in (-30, -1, 0, 1, 5):
        diagonal = np.diagonal(products_TS, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(products_TS[0]) > 0.1


def test_rotate_keeps_bfloat16_but_rounds_only_the_result():
    x_BTNH = jnp.asarray(np.random.default_rng(0).standard_normal((1, 600, 2, 8)), jnp.bfloat16)
    tables = rope_tables(600, 8, 10000.0)
    out = rotate(x_BTNH, tables)
    assert out.dtype == jnp.bfloat16
    expected = rotate(x_BTNH.astype(jnp.float32), tables).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
