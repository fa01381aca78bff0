from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.models.lumen import Lumen, LumenConfig
from jaxslm.weights import abstract_parameters, from_arrays, to_arrays
from tests.jaxslm.support import assert_normal, assert_uniform, forward, random_arrays, random_model

TINY = LumenConfig(
    vocab_size=29, hidden_dim=24, num_layers=2, num_heads=4, intermediate_dim=20, max_seq_len=16
)
TOKENS_BT = np.random.default_rng(0).integers(0, 29, (2, 11))


@pytest.fixture(scope="module")
def preset() -> Lumen:
    return Lumen(LumenConfig(), key=jax.random.key(0))


def test_initial_parameters_follow_the_laws_of_the_original(preset):
    arrays = to_arrays(preset)
    assert_normal(arrays.pop("embedding"), 1.0)
    for name in ("wq", "wk", "wv", "wo"):
        assert_uniform(arrays.pop(f"blocks.attention.{name}"), 256**-0.5)
    for name in ("w_gate", "w_up"):
        assert_uniform(arrays.pop(f"blocks.mlp.{name}"), 256**-0.5)
    assert_uniform(arrays.pop("blocks.mlp.w_down"), 512**-0.5)
    for name in ("blocks.attention_norm", "blocks.mlp_norm", "final_norm"):
        assert (arrays.pop(f"{name}.scale") == 1.0).all()
    assert not arrays


def test_initial_parameters_differ_from_each_other_and_by_key(preset):
    arrays, other = to_arrays(preset), to_arrays(Lumen(LumenConfig(), key=jax.random.key(1)))
    for first, second in (("wk", "wv"), ("wq", "wo")):
        pair = [arrays[f"blocks.attention.{name}"].reshape(-1) for name in (first, second)]
        assert (pair[0] != pair[1]).all()
    assert (arrays["blocks.mlp.w_gate"] != arrays["blocks.mlp.w_up"]).all()
    for name in arrays:
        assert name.endswith("scale") or (arrays[name] != other[name]).any(), name


def test_initial_loss_is_about_240(preset):
    tokens_BT = np.random.default_rng(0).integers(0, 2048, (2, 65))
    logits_BTV = np.asarray(forward(preset, tokens_BT[:, :-1]), np.float64)
    target_BT = np.take_along_axis(logits_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
    top_BT = logits_BTV.max(-1)
    loss = np.mean(top_BT + np.log(np.exp(logits_BTV - top_BT[..., None]).sum(-1)) - target_BT)
    assert 200 < loss < 280


def test_model_builds_in_both_nnx_modes(nnx_mode):
    arrays = to_arrays(Lumen(TINY, key=jax.random.key(0)))
    expected = abstract_parameters(TINY)
    assert {name: array.shape for name, array in arrays.items()} == {
        name: leaf.shape for name, leaf in expected.items()
    }
    assert expected["blocks.attention.wq"].shape == (2, 24, 4, 6)
    assert expected["blocks.attention.wk"].shape == (2, 24, 1, 6)
    assert expected["blocks.attention.wo"].shape == (2, 4, 6, 24)
    assert expected["blocks.mlp.w_gate"].shape == (2, 24, 20)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_kv_heads_serve_neighbouring_query_heads(kv_heads):
    """As many kv heads as query heads, each repeated (0, 0, 1, 1), are the same model."""
    config = replace(TINY, num_kv_heads=kv_heads)
    arrays = dict(random_arrays(config))
    logits_BTV = forward(random_model(config), TOKENS_BT)
    for name in ("blocks.attention.wk", "blocks.attention.wv"):
        arrays[name] = np.repeat(arrays[name], 4 // kv_heads, axis=2)
    whole = forward(from_arrays(replace(TINY, num_kv_heads=4), arrays), TOKENS_BT)
    np.testing.assert_allclose(logits_BTV, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads"), [(24, 12, 3), (30, 3, 1), (24, 1, 1), (28, 2, 2)]
)
def test_any_even_head_width_works(width, heads, kv_heads):
    config = replace(TINY, hidden_dim=width, num_heads=heads, num_kv_heads=kv_heads)
    assert config.head_width == width // heads
    logits_BTV = forward(random_model(config), TOKENS_BT)
    assert logits_BTV.shape == (2, 11, 29)
    assert np.isfinite(logits_BTV).all()


def test_config_fields_reach_the_computation():
    expected = forward(random_model(TINY), TOKENS_BT)
    for change in ({"rms_norm_eps": 0.1}, {"rope_theta": 100.0}):
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
        ("hidden_dim", -24, ValueError, "hidden_dim must be above zero, got -24"),
        ("num_layers", 0, ValueError, "num_layers must be above zero, got 0"),
        ("num_heads", 0, ValueError, "num_heads must be above zero, got 0"),
        ("num_heads", 5, ValueError, "hidden_dim 24 is not divisible by num_heads 5"),
        ("num_heads", 8, ValueError, "hidden_dim / num_heads = 3 must be even"),
        ("num_kv_heads", 0, ValueError, "num_kv_heads must be above zero, got 0"),
        ("num_kv_heads", 3, ValueError, "num_heads 4 is not divisible by num_kv_heads 3"),
        ("num_kv_heads", 8, ValueError, "num_heads 4 is not divisible by num_kv_heads 8"),
        ("intermediate_dim", 0, ValueError, "intermediate_dim must be above zero, got 0"),
        ("max_seq_len", 0, ValueError, "max_seq_len must be above zero, got 0"),
        ("rms_norm_eps", 0.0, ValueError, "rms_norm_eps must be above zero, got 0.0"),
        ("rms_norm_eps", float("nan"), ValueError, "rms_norm_eps must be above zero, got nan"),
        ("rope_theta", float("inf"), ValueError, "rope_theta must be above zero, got inf"),
        ("unroll", 0, ValueError, "unroll must be above zero, got 0"),
        ("dtype", "float16", ValueError, "dtype must be one of .*bfloat16.*, got 'float16'"),
        ("vocab_size", True, TypeError, "vocab_size must be int, got True"),
        ("vocab_size", 29.0, TypeError, "vocab_size must be int, got 29.0"),
        ("vocab_size", "29", TypeError, "vocab_size must be int, got '29'"),
        ("rms_norm_eps", "1e-6", TypeError, "rms_norm_eps must be float, got '1e-6'"),
        ("rope_theta", True, TypeError, "rope_theta must be float, got True"),
        ("remat", "all", ValueError, "remat must be one of"),
        ("attention", "flash", ValueError, "attention must be one of .*auto.*, got 'flash'"),
        ("dtype", np.float32, TypeError, "dtype must be str, got "),
    ],
)
def test_config_refuses_naming_field_and_value(field, value, error, words):
    with pytest.raises(error, match=words):
        replace(TINY, **{field: value})


def test_config_takes_whole_numbers_as_floats():
    config = replace(TINY, rope_theta=500)
    assert type(config.rope_theta) is float
    assert config == replace(TINY, rope_theta=500.0)
