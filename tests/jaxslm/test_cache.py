"""The key-value cache: what decoding gives is what the full forward pass gives, at every step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.cache import LayerCache, attend_cached, fill, grow, held_positions, ring_slots
from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from jaxslm.weights import from_arrays
from tests.jaxslm.support import random_arrays

LUMEN = LumenConfig(
    vocab_size=40, hidden_dim=24, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_dim=32,
    max_seq_len=48, dtype="float64",
)  # fmt: skip
GPT = GPTConfig(
    vocab_size=40, n_embd=24, n_layer=2, n_head=4, n_kv_head=2, block_size=48, dtype="float64"
)
RIPPLE = RippleConfig(vocab_size=40, n_embd=24, n_layer=2, n_head=3, block_size=16, dtype="float64")


def windows():
    """Every window and mode, with prompts shorter, equal and longer: (config, lengths, total)."""
    for w in (1, 2, 4, 64):
        lengths = sorted({1, max(w - 1, 1), w, w + 1, 2 * w, 2 * w + 1, 5 * w})
        for mode in ("chunked", "exact"):
            config = RippleConfig(
                vocab_size=40, n_embd=24, n_layer=2, n_head=3, attention_window=w,
                window_mode=mode, dtype="float64",
            )  # fmt: skip
            yield pytest.param(config, lengths, 5 * w + 2 * w + 3, id=f"window {w} {mode}")


@jax.jit
def prefilled(model, tokens):
    return model.activations(tokens, keys_values=True)


@jax.jit
def one_more(model, tokens, cache):
    return model.decode(tokens, cache)


def decoded(config, lengths, total, slots=None):
    """Logits [B, total, V] of a full pass, and by step from each length on (others are NaN)."""
    arrays = {name: array.astype(np.float64) for name, array in random_arrays(config).items()}
    model = from_arrays(config, arrays)
    B = len(lengths)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (B, total))
    full = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    ring = ring_slots(getattr(config, "attention_window", None), getattr(config, "window_mode", ""))
    slots = min(total, ring or total) if slots is None else slots
    found = prefilled(model, tokens[:, : max(lengths)])
    position = np.array(lengths)
    cache = jax.jit(fill, static_argnames=("slots", "dtype"))(
        found["keys"], found["values"], jnp.asarray(position), slots=slots, dtype="float64"
    )
    steps = np.full(full.shape, np.nan)
    while (position < total).any():
        going = np.flatnonzero(position < total)
        logits, cache = one_more(
            model, tokens[np.arange(B), np.minimum(position, total - 1)], cache
        )
        steps[going, position[going]] = np.asarray(logits)[going]
        position += 1
    return np.asarray(full), steps


def assert_equal_from(full, steps, lengths):
    for row, length in enumerate(lengths):
        assert np.isnan(steps[row, :length]).all()
        np.testing.assert_allclose(steps[row, length:], full[row, length:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("config", [LUMEN, GPT, RIPPLE], ids=lambda c: type(c).__name__)
def test_decoding_gives_the_logits_of_the_full_pass_at_every_step(config, x64):
    lengths = [1, 2, 7, 16, 33]
    full, steps = decoded(config, lengths, 48)
    assert np.abs(full).max() > 1
    assert_equal_from(full, steps, lengths)


def test_absolute_positions_are_decoded_up_to_the_last(x64):
    config = RippleConfig(
        vocab_size=40, n_embd=24, n_layer=2, n_head=3, block_size=16, use_absolute_pos_emb=True,
        bias=True, dtype="float64",
    )  # fmt: skip
    full, steps = decoded(config, [1, 5], 16)
    assert_equal_from(full, steps, [1, 5])


@pytest.mark.parametrize(("config", "lengths", "total"), list(windows()))
def test_a_window_is_a_ring_that_gives_the_logits_of_the_full_pass(config, lengths, total, x64):
    full, steps = decoded(config, lengths, total)
    assert_equal_from(full, steps, lengths)


def test_a_window_that_the_sequence_does_not_fill_needs_no_ring(x64):
    config = RippleConfig(
        vocab_size=40, n_embd=24, n_layer=1, n_head=3, attention_window=16, dtype="float64"
    )
    full, steps = decoded(config, [1, 9], 20, slots=20)
    assert_equal_from(full, steps, [1, 9])


def test_a_ring_never_grows_past_what_the_window_sees():
    assert ring_slots(None, "chunked") is None
    assert [ring_slots(w, "chunked") for w in (1, 2, 64)] == [1, 3, 127]
    assert [ring_slots(w, "exact") for w in (1, 2, 64)] == [1, 2, 64]
    for w in (1, 2, 5):
        seen = max(i - max(0, i // w * w - w + 1) + 1 for i in range(10 * w))
        assert seen == ring_slots(w, "chunked")


@pytest.mark.parametrize("slots", [1, 3, 7])
def test_slots_hold_the_latest_positions(slots):
    for last in range(20):
        held = np.asarray(held_positions(jnp.asarray(last), jnp.arange(slots), slots))
        for slot, position in enumerate(held.tolist()):
            latest = [p for p in range(last + 1) if p % slots == slot]
            assert position == latest[-1] if latest else position < 0


def layer(slots, value=0.0):
    return LayerCache(*(jnp.full((2, 1, slots, 4), value, jnp.float32) for _ in range(2)))


def test_a_full_cache_gives_nan_and_is_not_overwritten():
    new = jnp.ones((2, 1, 1, 4))
    out, after = attend_cached(new, new, new, layer(4), jnp.array([3, 4]))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    assert np.asarray(after.k_BKSH[0, :, 3] == 1).all()
    assert not np.asarray(after.k_BKSH[1]).any()


def test_a_ring_takes_the_slot_of_the_position_that_left_the_window():
    new = jnp.ones((2, 1, 1, 4))
    out, after = attend_cached(
        new, new, new, layer(3), jnp.array([3, 7]), window=3, window_mode="exact"
    )
    assert np.isfinite(out).all()
    assert [np.flatnonzero(after.k_BKSH[row, 0, :, 0]).tolist() for row in (0, 1)] == [[0], [1]]


@pytest.mark.parametrize("config", [LUMEN, GPT], ids=lambda c: type(c).__name__)
def test_a_position_beyond_the_context_gives_nan(config, x64):
    model = from_arrays(
        config, {name: array.astype(np.float64) for name, array in random_arrays(config).items()}
    )
    found = prefilled(model, np.ones((2, 48), np.int32))
    cache = fill(found["keys"], found["values"], jnp.array([48, 47]), 60, "float64")
    logits, _ = one_more(model, np.array([1, 1]), cache)
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()


def test_growing_keeps_what_is_there_and_is_refused_backwards():
    k = jnp.arange(2 * 1 * 5 * 1 * 2, dtype=jnp.float32).reshape(2, 1, 5, 1, 2)
    cache = fill(k, -k, jnp.array([5]), 5, jnp.float32)
    grown = grow(cache, 8)
    assert grown.slots == 8
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(grown), strict=True):
        if before.ndim == 4:
            np.testing.assert_array_equal(after[:, :, :5], before)
            assert not np.asarray(after[:, :, 5:]).any()
    with pytest.raises(ValueError, match="8 slots, more than 4"):
        grow(grown, 4)


def test_padding_after_a_prompt_is_not_kept():
    k = jnp.full((1, 2, 6, 1, 2), jnp.nan).at[:, 0, :6].set(1.0).at[:, 1, :2].set(1.0)
    cache = fill(k, k, jnp.array([6, 2]), 8, jnp.float32)
    assert np.isfinite(cache.layers[0].k_BKSH).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_stay(dtype):
    new = jnp.ones((2, 1, 1, 4), dtype)
    old = jax.tree.map(lambda x: x.astype(dtype), layer(4))
    out, after = jax.jit(attend_cached)(new, new, new, old, jnp.array([0, 1]))
    assert out.dtype == dtype
    assert after.k_BKSH.dtype == dtype
