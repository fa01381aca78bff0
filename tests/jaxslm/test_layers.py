import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.layers import (
    LayerNorm,
    RMSNorm,
    check_tokens,
    contract,
    dropout,
    embed,
    normal,
    uniform_fan_in,
    wide,
)

NORMS = {"layer": LayerNorm, "rms": RMSNorm}


def norm_of(name: str, width: int, eps: float, seed: int = 0):
    """The layer with random parameters, and the same in numpy float64."""
    rng = np.random.default_rng(seed)
    scale = (1.0 + 0.3 * rng.standard_normal(width)).astype(np.float32)
    bias = (0.3 * rng.standard_normal(width)).astype(np.float32)
    layer = NORMS[name](width, eps)
    layer.scale.set_value(jnp.asarray(scale))
    if name == "layer":
        layer.bias.set_value(jnp.asarray(bias))

    def expected(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        if name == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale
        return x + bias if name == "layer" else x

    return layer, expected


def test_wide_is_float32_at_least():
    assert wide(jnp.bfloat16) == wide(jnp.float16) == wide(jnp.float32) == jnp.float32
    assert wide("float64") == np.float64


def test_contract_gives_the_product_in_the_dtype_of_x():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 5)), rng.standard_normal((5, 2, 4))
    for dtype, limit in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-6)):
        out = contract("btd,dnh->btnh", jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32))
        assert out.dtype == dtype
        expected = np.einsum("btd,dnh->btnh", x, w)
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=8 * limit)


@pytest.mark.parametrize("out", [None, jnp.float32])
def test_contract_multiplies_bfloat16_forward_and_backward_and_accumulates_in_float32(out):
    x, w = jnp.ones((1, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.float32)

    def loss(x, w):
        return contract("td,df->tf", x, w, out=out).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).as_text()
    products = [line for line in compiled.splitlines() if "dot_general" in line]
    assert len(products) == 2
    for line in [*products, *dots(lambda x, w: contract("td,df->tf", x, w, out=out), x, w)]:
        factors, result = re.search(r": \((.*)\) -> (.*)", line).groups()
        assert factors.count("bf16") == 2, line
        assert "f32" in result, line


def dots(function, *arguments):
    text = jax.jit(function).lower(*arguments).as_text()
    return [line for line in text.splitlines() if "dot_general" in line]


@pytest.mark.parametrize("spec", ["btd,dnh->btnh", "btnh,nhd->btd", "btd,dcf->btcf", "btd,vd->btv"])
def test_contract_has_the_gradients_of_the_einsum(spec):
    sizes = dict(zip("btdnhcfv", (2, 3, 5, 2, 4, 2, 6, 7), strict=True))
    of_x, of_w, result = re.split(",|->", spec)
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.standard_normal([sizes[c] for c in letters]), jnp.bfloat16)
        for letters in (of_x, of_w, result)
    )
    _, pull = jax.vjp(lambda x, w: contract(spec, x, w), x, w.astype(jnp.float32))
    dx, dw = pull(dy)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    exact = [a.astype(jnp.float32) for a in (x, w, dy)]
    _, pull = jax.vjp(lambda x, w: jnp.einsum(spec, x, w), *exact[:2])
    for found, expected, limit in zip((dx, dw), pull(exact[2]), (2**-8, 1e-6), strict=True):
        error = abs(np.asarray(found, np.float32) - expected).max()
        assert error <= limit * abs(expected).max()


def test_contract_adds_the_bias_and_sums_its_gradient_in_float32():
    rng = np.random.default_rng(0)
    x, w = jnp.ones((1, 4096, 1), jnp.bfloat16), jnp.ones((1, 2, 3), jnp.float32)
    bias = jnp.asarray(rng.standard_normal((2, 3)), jnp.float32)
    y, pull = jax.vjp(lambda b: contract("btd,dcf->btcf", x, w, b, out=jnp.float32), bias)
    np.testing.assert_array_equal(y, jnp.broadcast_to(1 + bias, y.shape))
    dy = jnp.asarray(rng.standard_normal(y.shape), jnp.bfloat16).astype(jnp.float32)
    (gradient,) = pull(dy)
    expected = np.asarray(dy, np.float64).sum((0, 1))
    np.testing.assert_allclose(gradient, expected, atol=1e-6 * np.abs(dy).sum(1).max())


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("name", NORMS)
def test_norm_matches_numpy_float64(name, eps):
    layer, expected = norm_of(name, 24, eps)
    x = np.random.default_rng(1).normal(0.5, 2.0, (2, 3, 24)).astype(np.float32)
    out = layer(jnp.asarray(x))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected(x), rtol=1e-5, atol=2e-6)


def test_layer_norm_variance_does_not_cancel():
    layer, expected = norm_of("layer", 64, 1e-5)
    x = np.random.default_rng(1).normal(1e4, 1.0, (4, 64)).astype(np.float32)
    # The mean itself is only good to float32's step at 1e4, a thousandth of the spread.
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected(x), atol=5e-3)


@pytest.mark.parametrize("name", NORMS)
def test_norm_keeps_bfloat16_with_statistics_in_float32(name):
    layer, expected = norm_of(name, 512, 1e-5)
    x = jnp.asarray(np.random.default_rng(1).normal(1.0, 1.0, (4, 512)), jnp.bfloat16)
    out = layer(x)
    assert out.dtype == jnp.bfloat16
    wanted = jnp.asarray(expected(np.asarray(x, np.float64)), jnp.float32).astype(jnp.bfloat16)
    # Rounded once, at the end: all but values that lie between two bfloat16 are the nearest.
    assert np.mean(np.asarray(out) == np.asarray(wanted)) > 0.99


@pytest.mark.parametrize("name", NORMS)
def test_norm_computes_in_float64_where_the_input_is(name, x64):
    layer, expected = norm_of(name, 24, 1e-5)
    x = np.random.default_rng(1).normal(0.5, 2.0, (2, 24))
    out = layer(jnp.asarray(x))
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, expected(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", NORMS)
def test_norm_gradient_is_finite_at_zero(name):
    layer, _ = norm_of(name, 8, 1e-5)
    gradient = jax.jit(jax.grad(lambda x: layer(x).sum()))(np.zeros((1, 8), np.float32))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
def test_embed_gives_the_rows_of_the_ids(dtype):
    table_VD = np.arange(40, dtype=np.float32).reshape(10, 4)
    tokens_BT = np.array([[0, 9, 3], [1, 1, 7]], dtype)
    x_BTD = embed(jnp.asarray(table_VD), jnp.asarray(tokens_BT), jnp.bfloat16)
    assert x_BTD.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(x_BTD, np.float32), table_VD[tokens_BT])


@pytest.mark.parametrize("foreign", [-1, -10, 10, 11, 2**31 - 1, -(2**31)])
def test_embed_gives_nan_for_an_id_outside_the_vocabulary(foreign):
    table_VD = jnp.ones((10, 4))
    x_BTD = np.asarray(embed(table_VD, jnp.array([[2, foreign, 9]], jnp.int32), jnp.float32))
    assert np.isnan(x_BTD[0, 1]).all()
    assert (x_BTD[0, [0, 2]] == 1.0).all()


def test_embed_adds_the_gradients_of_repeated_ids():
    gradient_VD = jax.grad(lambda t: embed(t, jnp.array([[2, 0, 2]]), jnp.float32).sum())(
        jnp.ones((3, 2))
    )
    np.testing.assert_array_equal(gradient_VD, [[1, 1], [0, 0], [2, 2]])


def test_dropout_without_key_or_rate_is_the_identity():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_dropout_zeroes_at_its_rate_and_scales_the_rest(rate):
    n = 40_000
    out = np.asarray(dropout(jnp.full(n, 3.0), rate, jax.random.key(0)))
    kept = out != 0
    np.testing.assert_allclose(np.unique(out[kept]), [3.0 / (1 - rate)], rtol=1e-6)
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / n)


def test_dropout_of_everything_is_zero_and_so_is_its_gradient():
    x = jnp.full(8, 3.0, jnp.bfloat16)
    out, gradient = jax.vjp(lambda x: dropout(x, 1.0, jax.random.key(0)), x)
    assert out.dtype == jnp.bfloat16
    assert (out == 0).all()
    assert (gradient(jnp.ones_like(out))[0] == 0).all()


def test_dropout_keeps_bfloat16_and_depends_on_the_key_alone():
    x = jnp.ones(64, jnp.bfloat16)
    first, again, other = (dropout(x, 0.5, jax.random.key(seed)) for seed in (0, 0, 1))
    assert first.dtype == jnp.bfloat16
    assert (first == again).all()
    assert (first != other).any()


def test_check_tokens_accepts_integers_up_to_the_limit():
    check_tokens(jnp.zeros((2, 5), jnp.int32), 5, "max_seq_len")
    check_tokens(jnp.zeros((2, 5), jnp.uint8), None, "block_size")


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        (np.zeros((1, 5), np.float32), TypeError, "integers.*float32"),
        (np.zeros((1, 5), np.bool_), TypeError, "integers.*bool"),
        (np.zeros(5, np.int32), ValueError, r"\[batch, time\].*\(5,\)"),
        (np.zeros((1, 1, 5), np.int32), ValueError, r"\(1, 1, 5\)"),
        (np.zeros((1, 0), np.int32), ValueError, r"non-empty.*\(1, 0\)"),
        (np.zeros((0, 5), np.int32), ValueError, r"non-empty.*\(0, 5\)"),
        (np.zeros((1, 6), np.int32), ValueError, "6 tokens but block_size is 5: pass at most 5"),
    ],
)
def test_check_tokens_refuses_naming_what_came(tokens, error, words):
    with pytest.raises(error, match=words):
        check_tokens(tokens, 5, "block_size")


def test_normal_has_its_standard_deviation():
    w = np.asarray(normal(jax.random.key(0), (200, 200), 0.02)[...])
    assert w.dtype == np.float32
    assert abs(w.mean()) < 5 * 0.02 / 200
    np.testing.assert_allclose(w.std(), 0.02, rtol=0.02)
    np.testing.assert_allclose(np.mean(abs(w) < 0.02), 0.6827, atol=0.012)  # as a normal has


def test_uniform_fan_in_fills_the_interval_of_torch_linear():
    w = np.asarray(uniform_fan_in(jax.random.key(0), (200, 200), 16)[...])
    assert w.dtype == np.float32
    assert -0.25 <= w.min() < -0.249
    assert 0.249 < w.max() <= 0.25
    assert abs(w.mean()) < 5 * 0.25 / np.sqrt(3) / 200
    np.testing.assert_allclose(w.std(), 0.25 / np.sqrt(3), rtol=0.02)
