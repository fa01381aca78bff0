"""The loss over chunks of positions: the same number, without logits that exist whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.convert.subjects import config_of
from tests.jaxslm.support import random_arrays
from train.loss import cross_entropy
from train.step import make_loss

B, T, D, V = 3, 7, 5, 11
RNG = np.random.default_rng(0)
X_BTD = RNG.standard_normal((B, T, D)).astype(np.float32)
W_DV = RNG.standard_normal((D, V)).astype(np.float32)
TARGETS_BT = RNG.integers(0, V, (B, T)).astype(np.int32)
TARGETS_BT[0, :3] = TARGETS_BT[2, -1] = -1


@functools.partial(jax.jit, static_argnames="chunk")
def loss_and_gradient(x_BTD, w_DV, targets_BT, chunk=None):
    def loss(x_BTD, w_DV):
        def unembed(x_BCD):
            return jnp.einsum("bcd,dv->bcv", x_BCD, w_DV)

        return cross_entropy(unembed, x_BTD, targets_BT, chunk=chunk)

    return jax.value_and_grad(loss, (0, 1))(x_BTD, w_DV)


def reference(x_BTD, w_DV, targets_BT):
    """In numpy, float64: the loss and its gradients."""
    logits_BTV = x_BTD.astype(np.float64) @ w_DV.astype(np.float64)
    p_BTV = np.exp(logits_BTV - logits_BTV.max(-1, keepdims=True))
    p_BTV /= p_BTV.sum(-1, keepdims=True)
    kept_BT = targets_BT != -1
    one_hot_BTV = np.eye(V)[np.where(kept_BT, targets_BT, 0)]
    loss = -(np.log(p_BTV) * one_hot_BTV).sum(-1)[kept_BT].sum()
    dlogits_BTV = (p_BTV - one_hot_BTV) * kept_BT[..., None]
    return loss, dlogits_BTV @ w_DV.T, np.einsum("btd,btv->dv", x_BTD, dlogits_BTV)


@pytest.mark.parametrize("chunk", [None, 1, 3, T - 1, T, T + 5])
def test_loss_and_gradient_are_the_same_in_any_chunks(chunk):
    loss, (dx_BTD, dw_DV) = loss_and_gradient(X_BTD, W_DV, TARGETS_BT, chunk)
    expected, expected_dx_BTD, expected_dw_DV = reference(X_BTD, W_DV, TARGETS_BT)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(dx_BTD, expected_dx_BTD, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dw_DV, expected_dw_DV, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 3])
def test_ignored_positions_count_nothing(chunk):
    changed_BTD = X_BTD.copy()
    changed_BTD[TARGETS_BT == -1] += 100.0
    loss, (dx_BTD, _) = loss_and_gradient(X_BTD, W_DV, TARGETS_BT, chunk)
    other, _ = loss_and_gradient(changed_BTD, W_DV, TARGETS_BT, chunk)
    assert loss == other
    assert not dx_BTD[TARGETS_BT == -1].any()
    assert np.abs(dx_BTD[TARGETS_BT != -1]).max(-1).min() > 0


@pytest.mark.parametrize("chunk", [None, 3])
def test_all_ignored_is_zero_with_zero_gradient(chunk):
    loss, gradients = loss_and_gradient(X_BTD, W_DV, np.full_like(TARGETS_BT, -1), chunk)
    assert loss == 0.0
    assert all((np.asarray(g) == 0.0).all() for g in gradients)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("foreign", [V, V + 1, 2**31 - 1, -2, -V, -V - 1, -100, -(2**31)])
def test_id_outside_the_vocabulary_is_nan(foreign, chunk):
    targets_BT = TARGETS_BT.copy()
    targets_BT[1, 4] = foreign
    loss, _ = loss_and_gradient(X_BTD, W_DV, targets_BT, chunk)
    assert np.isnan(loss)


@pytest.mark.parametrize("model", ["lumen", "gpt", "ripple"])
def test_logits_never_exist_whole(model):
    """Neither in forward nor backward is there an array with an entry a position and id."""
    config = config_of(model, vocab_size=37)
    shape = (2, 14)

    def largest(chunk):
        def loss(params, inputs_BT, targets_BT):
            return make_loss(config, chunk=chunk)(params, inputs_BT, targets_BT, None)

        params = {name: jnp.asarray(w) for name, w in random_arrays(config).items()}
        tokens_BT = jnp.zeros(shape, jnp.int32)
        jaxpr = jax.make_jaxpr(jax.grad(loss))(params, tokens_BT, tokens_BT)
        sizes = [
            var.aval.size
            for inner in every_jaxpr(jaxpr.jaxpr)
            for equation in inner.eqns
            for var in (*equation.invars, *equation.outvars)
            if 37 in getattr(var.aval, "shape", ()) and not set(var.aval.shape) & {18, 16}
        ]
        return max(sizes)

    whole = shape[0] * shape[1] * 37
    assert largest(None) == whole
    assert largest(4) == shape[0] * 4 * 37
    assert largest(5) == shape[0] * 5 * 37


def every_jaxpr(jaxpr):
    """A jaxpr and those inside it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from every_jaxpr(inner)


def test_compiled_program_holds_no_whole_logits():
    """The optimised program of loss and gradient, in which XLA could have undone the chunks."""
    for chunk, expected in ((None, True), (2, False)):
        text = loss_and_gradient.lower(X_BTD, W_DV, TARGETS_BT, chunk).compile().as_text()
        assert any(f"[{shape}]" in text for shape in ("3,7,11", "21,11", "4,3,2,11")) == expected


@pytest.mark.parametrize("chunk", [None, 5])
def test_loss_is_float32_in_a_bfloat16_model(chunk):
    for model in ("lumen", "gpt", "ripple"):
        config = config_of(model, dtype="bfloat16")
        loss_of = make_loss(config, chunk=chunk)
        tokens_BT = jax.ShapeDtypeStruct((2, 12), jnp.int32)
        params = random_arrays(config)
        loss, gradient = jax.eval_shape(
            lambda p, t, loss_of=loss_of: jax.value_and_grad(loss_of)(p, t, t, None),
            params, tokens_BT,
        )  # fmt: skip
        assert loss.dtype == jnp.float32
        assert {g.dtype for g in gradient.values()} == {jnp.dtype("float32")}


def test_loss_in_bfloat16_is_summed_in_float32():
    """4,096 positions: a bfloat16 sum would stop at 256 times one position's loss."""
    x_BTD = np.zeros((1, 4096, D), jnp.bfloat16)

    def loss(chunk):
        def unembed(x_BCD):
            return jnp.zeros((*x_BCD.shape[:2], V), jnp.float32)

        return cross_entropy(unembed, x_BTD, np.zeros((1, 4096), np.int32), chunk=chunk)

    for chunk in (None, 16):
        np.testing.assert_allclose(loss(chunk), 4096 * np.log(V), rtol=1e-5)
        assert loss(chunk).dtype == jnp.float32


def test_loss_in_float64_keeps_its_digits(x64):
    x_BTD, w_DV = X_BTD.astype(np.float64), W_DV.astype(np.float64)
    expected, dx_BTD, _ = reference(x_BTD, w_DV, TARGETS_BT)
    for chunk in (None, 3):
        loss, (found_BTD, _) = loss_and_gradient(x_BTD, w_DV, TARGETS_BT, chunk)
        assert loss.dtype == jnp.float64
        np.testing.assert_allclose(loss, expected, rtol=1e-14)
        np.testing.assert_allclose(found_BTD, dx_BTD, rtol=1e-12, atol=1e-14)
