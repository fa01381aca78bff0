from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.models.gpt import GPT, GPTConfig
from jaxslm.weights import abstract_parameters, from_arrays, to_arrays
from tests.jaxslm.support import assert_normal, forward, random_arrays, random_model

TINY = GPTConfig(vocab_size=29, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
TOKENS_BT = np.random.default_rng(0).integers(0, 29, (2, 11))


def test_initial_parameters_follow_the_laws_of_the_original():
    config = GPTConfig(vocab_size=512, n_layer=3, n_head=4, n_kv_head=2, n_embd=128)
    arrays = to_arrays(GPT(config, key=jax.random.key(0)))
    other = to_arrays(GPT(config, key=jax.random.key(1)))
    assert (arrays["embedding"] != other["embedding"]).any()
    assert (arrays["blocks.mlp.w_up"] != other["blocks.mlp.w_up"]).any()
    assert (arrays["blocks.attention.wk"] != arrays["blocks.attention.wv"]).all()
    residual = 0.02 / np.sqrt(2 * 3)
    assert_normal(arrays.pop("embedding"), 0.02)
    for name in ("wq", "wk", "wv"):
        assert_normal(arrays.pop(f"blocks.attention.{name}"), 0.02)
    assert_normal(arrays.pop("blocks.attention.wo"), residual)
    assert_normal(arrays.pop("blocks.mlp.w_up"), 0.02)
    assert_normal(arrays.pop("blocks.mlp.w_down"), residual)
    for name in ("blocks.attention_norm", "blocks.mlp_norm", "final_norm"):
        assert (arrays.pop(f"{name}.scale") == 1.0).all()
        assert (arrays.pop(f"{name}.bias") == 0.0).all()
    assert not arrays


def test_model_builds_in_both_nnx_modes(nnx_mode):
    arrays = to_arrays(GPT(TINY, key=jax.random.key(0)))
    expected = abstract_parameters(TINY)
    assert {name: array.shape for name, array in arrays.items()} == {
        name: leaf.shape for name, leaf in expected.items()
    }
    assert expected["blocks.attention.wq"].shape == (2, 24, 4, 6)
    assert expected["blocks.attention.wk"].shape == (2, 24, 2, 6)
    assert expected["blocks.attention.wo"].shape == (2, 4, 6, 24)
    assert expected["blocks.mlp.w_up"].shape == (2, 24, 96)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_kv_heads_serve_neighbouring_query_heads(kv_heads):
    """As many kv heads as query heads, each repeated (0, 0, 1, 1), are the same model."""
    config = replace(TINY, n_kv_head=kv_heads)
    arrays = dict(random_arrays(config))
    logits_BTV = forward(random_model(config), TOKENS_BT)
    for name in ("blocks.attention.wk", "blocks.attention.wv"):
        arrays[name] = np.repeat(arrays[name], 4 // kv_heads, axis=2)
    whole = forward(from_arrays(replace(TINY, n_kv_head=4), arrays), TOKENS_BT)
    np.testing.assert_allclose(logits_BTV, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(24, 12, 3), (30, 3, 1), (24, 1, 1)])
def test_any_even_head_width_works(width, heads, kv_heads):
    config = replace(TINY, n_embd=width, n_head=heads, n_kv_head=kv_heads)
    assert config.head_width == width // heads
    logits_BTV = forward(random_model(config), TOKENS_BT)
    assert logits_BTV.shape == (2, 11, 29)
    assert np.isfinite(logits_BTV).all()


def test_config_fields_reach_the_computation():
    expected = forward(random_model(TINY), TOKENS_BT)
    for change in ({"layer_norm_eps": 0.1}, {"rope_base": 100.0}):
        model = from_arrays(replace(TINY, **change), random_arrays(TINY))
        assert np.abs(forward(model, TOKENS_BT) - expected).max() > 1e-3, change


def test_head_is_the_embedding():
    model = random_model(TINY)
    found = model.activations(jnp.asarray(TOKENS_BT))
    expected = np.asarray(found["final_norm"]) @ np.asarray(model.embedding[...]).T
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-4, atol=1e-4)


def test_given_rope_tables_replace_our_own():
    model = random_model(TINY)
    cos, sin = model.rope_tables()
    assert cos.shape == sin.shape == (16, 3)
    run = jax.jit(lambda model, rope: model.activations(TOKENS_BT, rope=rope)["logits"])
    expected = np.asarray(forward(model, TOKENS_BT))
    np.testing.assert_allclose(run(model, (cos, sin)), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(run(model, (cos, -sin)) - expected).max() > 0.01


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("vocab_size", 0, ValueError, "vocab_size must be above zero, got 0"),
        ("block_size", -1, ValueError, "block_size must be above zero, got -1"),
        ("n_layer", 0, ValueError, "n_layer must be above zero, got 0"),
        ("n_embd", 0, ValueError, "n_embd must be above zero, got 0"),
        ("n_head", 0, ValueError, "n_head must be above zero, got 0"),
        ("n_head", 10, ValueError, "n_embd 24 is not divisible by n_head 10"),
        ("n_head", 8, ValueError, "n_embd / n_head = 3 must be even"),
        ("n_kv_head", 0, ValueError, "n_kv_head must be above zero, got 0"),
        ("n_kv_head", 3, ValueError, "n_head 4 is not divisible by n_kv_head 3"),
        ("layer_norm_eps", -1e-5, ValueError, "layer_norm_eps must be above zero, got -1e-05"),
        ("rope_base", 0.0, ValueError, "rope_base must be above zero, got 0.0"),
        ("unroll", -1, ValueError, "unroll must be above zero, got -1"),
        ("dtype", "f32", ValueError, "dtype must be one of .*bfloat16.*, got 'f32'"),
        ("n_head", True, TypeError, "n_head must be int, got True"),
        ("n_layer", 2.0, TypeError, "n_layer must be int, got 2.0"),
        ("n_kv_head", None, TypeError, "n_kv_head must be int, got None"),
        ("layer_norm_eps", False, TypeError, "layer_norm_eps must be float, got False"),
        ("remat", True, TypeError, "remat must be str, got True"),
        ("attention", "flash", ValueError, "attention must be one of .*auto.*, got 'flash'"),
    ],
)
def test_config_refuses_naming_field_and_value(field, value, error, words):
    with pytest.raises(error, match=words):
        replace(TINY, **{field: value})
