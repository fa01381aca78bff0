import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.models.ripple import Ripple, RippleConfig, initial_decay
from jaxslm.weights import abstract_parameters, from_arrays, to_arrays
from tests.jaxslm.support import assert_normal, forward, random_arrays, random_model

TINY = RippleConfig(vocab_size=29, block_size=16, n_layer=2, n_head=3, n_embd=24)
TOKENS_BT = np.random.default_rng(0).integers(0, 29, (2, 11))
DECAY = "blocks.attention.decay"


def test_initial_parameters_follow_the_laws_of_the_original():
    config = RippleConfig(
        vocab_size=300, n_layer=3, n_head=3, n_embd=96, bias=True, use_absolute_pos_emb=True
    )
    arrays = to_arrays(Ripple(config, key=jax.random.key(0)))
    other = to_arrays(Ripple(config, key=jax.random.key(1)))
    assert (arrays["head"] != other["head"]).any()
    assert (arrays["blocks.mlp.w_out"] != other["blocks.mlp.w_out"]).any()
    assert (arrays["blocks.attention.wq"] != arrays["blocks.attention.wk"]).all()
    assert (arrays["blocks.attention.wk"] != arrays["blocks.attention.wv"]).all()
    assert (arrays["embedding"] != arrays["head"].T).all()
    for name in ("embedding", "position_embedding", "head"):
        assert_normal(arrays.pop(name), 0.02)
    for name in ("attention.wq", "attention.wk", "attention.wv", "mlp.w_in", "mlp.w_out"):
        assert_normal(arrays.pop(f"blocks.{name}"), 0.02)
    for name in ("attention.bq", "attention.bk", "attention.bv", "mlp.b_in", "mlp.b_out"):
        assert (arrays.pop(f"blocks.{name}") == 0.0).all()
    for name in ("blocks.attention_norm", "blocks.mlp_norm", "final_norm"):
        assert (arrays.pop(f"{name}.scale") == 1.0).all()
        assert (arrays.pop(f"{name}.bias") == 0.0).all()
    np.testing.assert_array_equal(arrays.pop(DECAY), [np.float32([0.5, 0.125, 0.03125])] * 3)
    assert not arrays


def test_model_builds_in_both_nnx_modes(nnx_mode):
    arrays = to_arrays(Ripple(TINY, key=jax.random.key(0)))
    expected = abstract_parameters(TINY)
    assert {name: array.shape for name, array in arrays.items()} == {
        name: leaf.shape for name, leaf in expected.items()
    }
    assert expected["blocks.attention.wq"].shape == (2, 24, 3, 8)
    assert expected[DECAY].shape == (2, 3)
    assert expected["blocks.mlp.w_in"].shape == (2, 24, 2, 32)
    assert expected["head"].shape == (24, 29)


@pytest.mark.parametrize(
    ("n_head", "slopes"),
    [
        (1, [2**-1]),
        (2, [2**-1, 2**-5]),
        (3, [2**-1, 2**-3, 2**-5]),
        (5, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5]),
        (6, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (12, [2 ** -(1 + i / 2) for i in range(12)]),
    ],
)
def test_initial_decay_takes_the_slopes_of_the_next_power_of_two(n_head, slopes):
    np.testing.assert_allclose(initial_decay(n_head), slopes, rtol=1e-12)


def test_initial_decay_has_one_slope_a_head_for_every_number_of_heads():
    for n_head in range(1, 130):
        slopes = initial_decay(n_head)
        assert len(slopes) == n_head
        assert math.isclose(slopes[0], 0.5)
        assert all(a > b > 2**-9 for a, b in itertools.pairwise(slopes))


@pytest.mark.parametrize(("width", "heads"), [(20, 1), (25, 5), (24, 6), (24, 8)])
def test_any_number_of_heads_works(width, heads):
    config = replace(TINY, n_embd=width, n_head=heads)
    logits_BTV = forward(random_model(config), TOKENS_BT)
    assert logits_BTV.shape == (2, 11, 29)
    assert np.isfinite(logits_BTV).all()


@pytest.mark.parametrize(("n_embd", "fc1"), [(384, 1024), (14, 38), (18, 48), (25, 66), (1, 2)])
def test_mlp_width_is_half_of_eight_thirds_rounded_up_to_even(n_embd, fc1):
    assert replace(TINY, n_embd=n_embd, n_head=1).mlp_width == fc1 // 2


def test_bias_speaks_of_query_key_and_value_only():
    without, with_bias = abstract_parameters(TINY), abstract_parameters(replace(TINY, bias=True))
    assert with_bias.keys() - without.keys() == {f"blocks.attention.b{name}" for name in "qkv"}
    assert without["blocks.mlp.b_in"].shape == (2, 2, 32)
    assert without["blocks.mlp.b_out"].shape == (2, 24)


def test_every_bias_reaches_the_output():
    config = replace(TINY, bias=True)
    arrays = random_arrays(config)
    expected = forward(random_model(config), TOKENS_BT)
    # The key's bias adds the same to a query's every score, which softmax ignores.
    for name, moves in (("bq", True), ("bk", False), ("bv", True)):
        changed = arrays | {f"blocks.attention.{name}": 2 * arrays[f"blocks.attention.{name}"]}
        found = forward(from_arrays(config, changed), TOKENS_BT)
        assert (np.abs(found - expected).max() > 0.01) == moves, name


def test_positions_are_added_to_the_embedding():
    config = replace(TINY, use_absolute_pos_emb=True)
    arrays = random_arrays(config)
    found = jax.jit(lambda model: model.activations(TOKENS_BT)["embedding"])(random_model(config))
    expected = arrays["embedding"][TOKENS_BT] + arrays["position_embedding"][None, :11]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_without_positions_the_context_is_no_limit():
    assert TINY.context is None
    logits = jax.eval_shape(random_model(TINY), jnp.zeros((1, 5000), int))
    assert logits.shape == (1, 5000, 29)
    assert replace(TINY, use_absolute_pos_emb=True).context == 16


def test_size_of_the_decay_counts_not_its_sign():
    arrays = random_arrays(TINY)
    assert (arrays[DECAY] < 0).any()
    expected = forward(random_model(TINY), TOKENS_BT)
    positive = from_arrays(TINY, arrays | {DECAY: np.abs(arrays[DECAY])})
    np.testing.assert_array_equal(forward(positive, TOKENS_BT), expected)
    doubled = from_arrays(TINY, arrays | {DECAY: 2 * arrays[DECAY]})
    assert np.abs(forward(doubled, TOKENS_BT) - expected).max() > 0.01


def test_window_modes_see_the_keys_they_say():
    """One layer, window 4: query 5 sees key 1 in chunks, query 4 has the same keys in both."""
    config = replace(TINY, n_layer=1, attention_window=4)
    full, chunked, exact = (
        np.asarray(forward(from_arrays(variant, random_arrays(config)), TOKENS_BT))[0]
        for variant in (
            replace(config, attention_window=None),
            config,
            replace(config, window_mode="exact"),
        )
    )

    def differ(a_TV, b_TV):
        return np.flatnonzero(np.abs(a_TV - b_TV).max(-1) > 1e-4).tolist()

    assert differ(chunked, exact) == [5, 6, 7, 9, 10]
    assert differ(full, exact) == [4, 5, 6, 7, 8, 9, 10]


def test_config_fields_reach_the_computation():
    expected = forward(random_model(TINY), TOKENS_BT)
    model = from_arrays(replace(TINY, layer_norm_eps=0.1), random_arrays(TINY))
    assert np.abs(forward(model, TOKENS_BT) - expected).max() > 1e-3


def test_head_is_not_the_embedding():
    model = random_model(TINY)
    found = model.activations(jnp.asarray(TOKENS_BT))
    expected = np.asarray(found["final_norm"]) @ np.asarray(model.head[...])
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("window", "length", "mode", "trained"),
    [
        (None, 9, "as_torch", False),
        (None, 9, "always", True),
        (4, 4, "as_torch", False),
        (4, 4, "always", True),
        (4, 5, "as_torch", True),
    ],
)
def test_decay_gets_its_gradient_where_it_should(window, length, mode, trained):
    config = replace(TINY, n_layer=1, attention_window=window, decay_gradient=mode)
    arrays = random_arrays(config)

    def loss(decay_LN):
        model = from_arrays(config, arrays | {DECAY: decay_LN})
        return (model(TOKENS_BT[:, :length]) ** 2).mean()

    gradient_LN = np.asarray(jax.jit(jax.grad(loss))(arrays[DECAY]))
    assert (gradient_LN != 0).all() if trained else (gradient_LN == 0).all()
    assert config.frozen_parameters(length) == (() if trained else (DECAY,))


def test_dropout_happens_with_a_key_only():
    """A model whose attention and MLP add exactly one, until dropout makes that zero or two."""
    config = replace(TINY, dropout=0.5, bias=True)
    arrays = {name: np.zeros_like(array) for name, array in random_arrays(config).items()}
    for name in ("blocks.attention.bv", "blocks.mlp.b_out", "embedding"):
        arrays[name] += 1.0
    model = from_arrays(config, arrays)

    @jax.jit
    def updates(key):
        found = model.activations(TOKENS_BT, key=key, every_layer=True)
        before = jnp.concatenate([found["embedding"][None], found["block"][:-1]])
        changes = found["attention"] - before, found["block"] - found["attention"]
        return [change.round(4) for change in changes]

    for update in updates(None):
        assert (update == 1.0).all()
    attention, mlp = (np.asarray(update) for update in updates(jax.random.key(0)))
    assert np.unique(mlp).tolist() == [0.0, 2.0]
    assert abs((mlp > 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(mlp.size)
    assert np.unique(attention).size > 5  # sums of dropped weights
    for update in (attention, mlp):
        assert (update[0] != update[1]).any()  # layers
        assert (update[0, 0] != update[0, 1]).any()  # rows
    heads = attention.reshape(2, 2, 11, 3, 8)
    assert (heads[..., 0, :] != heads[..., 1, :]).any()
    for update, again in zip((attention, mlp), updates(jax.random.key(0)), strict=True):
        np.testing.assert_array_equal(update, again)
    for update, other in zip((attention, mlp), updates(jax.random.key(1)), strict=True):
        assert (update != other).any()


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("vocab_size", 0, ValueError, "vocab_size must be above zero, got 0"),
        ("block_size", 0, ValueError, "block_size must be above zero, got 0"),
        ("n_layer", -2, ValueError, "n_layer must be above zero, got -2"),
        ("n_embd", 0, ValueError, "n_embd must be above zero, got 0"),
        ("n_head", 0, ValueError, "n_head must be above zero, got 0"),
        ("n_head", 5, ValueError, "n_embd 24 is not divisible by n_head 5"),
        ("dropout", -0.1, ValueError, "dropout must be between 0 and 1, got -0.1"),
        ("dropout", 1.1, ValueError, "dropout must be between 0 and 1, got 1.1"),
        ("dropout", float("nan"), ValueError, "dropout must be between 0 and 1, got nan"),
        ("attention_window", -3, ValueError, "attention_window must be 1 or more.*got -3"),
        ("layer_norm_eps", 0.0, ValueError, "layer_norm_eps must be above zero, got 0.0"),
        ("window_mode", "sliding", ValueError, "window_mode must be .*'exact'.*, got 'sliding'"),
        ("decay_gradient", "no", ValueError, "decay_gradient must be .*'always'.*, got 'no'"),
        ("dtype", "half", ValueError, "dtype must be one of .*bfloat16.*, got 'half'"),
        ("unroll", 0, ValueError, "unroll must be above zero, got 0"),
        ("attention", "flash", ValueError, "attention must be one of .*auto.*, got 'flash'"),
        ("n_embd", 24.0, TypeError, "n_embd must be int, got 24.0"),
        ("n_head", True, TypeError, "n_head must be int, got True"),
        ("attention_window", 4.0, TypeError, "attention_window must be int or None, got 4.0"),
        ("attention_window", 0.0, TypeError, "attention_window must be int or None, got 0.0"),
        ("attention_window", True, TypeError, "attention_window must be int or None, got True"),
        ("attention_window", False, TypeError, "attention_window must be int or None, got False"),
        ("dropout", True, TypeError, "dropout must be float, got True"),
        ("bias", 0, TypeError, "bias must be bool, got 0"),
        ("use_absolute_pos_emb", None, TypeError, "use_absolute_pos_emb must be bool, got None"),
    ],
)
def test_config_refuses_naming_field_and_value(field, value, error, words):
    with pytest.raises(error, match=words):
        replace(TINY, **{field: value})


def test_window_of_zero_is_none_as_the_original_reads_it():
    assert replace(TINY, attention_window=0).attention_window is None
