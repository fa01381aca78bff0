"""Sampling: each filter against its definition, the draws against their distribution."""

from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from jaxslm.sampling import Filters, Sampling, choose, filter_logits

V = 23


def logits_of(seed, rows=3, size=V, ties=False):
    drawn = 3 * np.random.default_rng(seed).standard_normal((rows, size))
    return (np.round(drawn) if ties else drawn).astype(np.float32)


def distribution(logits, sampling, seen=None):
    filters = Filters.of(sampling, logits.shape[-1])
    return np.asarray(jax.nn.softmax(filter_logits(jnp.asarray(logits), filters, seen), axis=-1))


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_definition(logits, sampling, seen=None):
    """One row at a time, in float64, token by token."""
    rows = []
    for number, row in enumerate(logits.astype(np.float64)):
        r = sampling.repetition_penalty
        if seen is not None:
            row = np.where(seen[number], np.where(row > 0, row / r, row * r), row)
        row = row / sampling.temperature
        order = sorted(range(len(row)), key=lambda v: -row[v])
        if sampling.top_k is not None and sampling.top_k < len(row):
            least = row[order[sampling.top_k - 1]]
            row = np.where(row < least, -np.inf, row)
        if sampling.top_p < 1.0:
            p, total, kept = softmax(row), 0.0, 0
            while total < sampling.top_p and kept < len(order):
                total += p[order[kept]]
                kept += 1
            row = np.where(row < row[order[kept - 1]], -np.inf, row)
        p = softmax(row)
        row = np.where(p < sampling.min_p * p.max() * (1 - 1e-9), -np.inf, row)
        rows.append(softmax(row))
    return np.array(rows)


@pytest.mark.parametrize("ties", [False, True])
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([None, 1, 3, V, 100]), st.sampled_from([1.0, 0.83, 0.31, 1e-6]),
    st.sampled_from([0.0, 0.043, 0.51, 1.0]), st.sampled_from([1.0, 1.3, 0.7]),
)  # fmt: skip
def test_the_distribution_is_that_of_the_definition(
    ties, seed, temperature, top_k, top_p, min_p, penalty
):
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    logits = logits_of(seed, ties=ties)
    seen = np.random.default_rng(seed).random(logits.shape) < 0.3
    found = distribution(logits, sampling, jnp.asarray(seen))
    np.testing.assert_allclose(found, by_definition(logits, sampling, seen), atol=1e-6)


def test_top_k_keeps_all_that_equal_the_last_as_torch_does():
    torch = pytest.importorskip("torch")
    logits = np.array([[2.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]], np.float32)
    for k in (1, 2, 3, 5, 9):
        scaled = torch.tensor(logits) / 0.8
        least, _ = torch.topk(scaled, min(k, scaled.size(-1)))
        scaled[scaled < least[:, [-1]]] = -float("inf")
        expected = torch.nn.functional.softmax(scaled, dim=-1).numpy()
        found = distribution(logits, Sampling(temperature=0.8, top_k=k))
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_top_k_of_the_whole_vocabulary_or_more_leaves_no_filter():
    assert Filters.of(Sampling(top_k=V), V).top_k is None
    assert Filters.of(Sampling(top_k=V - 1), V).top_k == V - 1


def test_equals_of_the_threshold_of_min_p_are_kept():
    logits = np.log(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32))
    np.testing.assert_allclose(distribution(logits, Sampling(min_p=0.5)), np.exp(logits), rtol=1e-6)


def test_zeros_of_both_signs_are_equals():
    found = distribution(np.array([[0.0, -0.0, -1.0]], np.float32), Sampling(top_k=1))
    np.testing.assert_allclose(found, [[0.5, 0.5, 0.0]])


def test_filters_keep_the_digits_of_float64(x64):
    logits = logits_of(5).astype(np.float64)
    sampling = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
    seen = np.arange(V) % 2 == np.zeros((3, 1))
    found = distribution(logits, sampling, jnp.asarray(seen))
    np.testing.assert_allclose(found, by_definition(logits, sampling, seen), atol=1e-15)


def test_a_distribution_that_is_one_token_stays_it():
    logits = np.array([[0.0, 50.0, 0.0]], np.float32)
    for sampling in (
        Sampling(top_p=1e-9),
        Sampling(top_p=5e-324),
        Sampling(min_p=1.0),
        Sampling(top_k=1),
    ):
        np.testing.assert_array_equal(distribution(logits, sampling), [[0.0, 1.0, 0.0]])


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44, 5e-324])
def test_a_tiny_temperature_is_the_likeliest_token_and_does_not_overflow(temperature):
    logits = logits_of(0)
    found = distribution(logits, Sampling(temperature=temperature))
    np.testing.assert_array_equal(found.argmax(-1), logits.argmax(-1))
    np.testing.assert_array_equal(found.max(-1), 1.0)


def test_a_temperature_of_zero_takes_the_first_of_the_largest():
    logits = jnp.array([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    found = choose(logits, Filters.of(Sampling(temperature=0.0, top_k=2, top_p=0.5), 3), keys)
    np.testing.assert_array_equal(found, [1, 0])


def test_the_penalty_acts_at_temperature_zero_too():
    logits, seen = jnp.array([[2.0, 3.0]]), jnp.array([[False, True]])
    filters = Filters.of(Sampling(temperature=0.0, repetition_penalty=2.0), 2)
    assert choose(logits, filters, jax.random.split(jax.random.key(0), 1), seen).tolist() == [0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"top_k": 0}, "top_k must be a whole number, 1 or more"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"temperature": 1e39}, "temperature must be 0"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"top_k": float("nan")}, "top_k must be a whole number"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"repetition_penalty": 1e39}, "repetition_penalty must be from"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty must be from"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8),
        Sampling(temperature=1.5, top_k=5),
        Sampling(top_p=0.8),
        Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    ],
    ids=lambda s: " ".join(f"{k}={v}" for k, v in asdict(s).items()),
)
def test_frequencies_are_those_of_the_distribution(sampling):
    draws = 100_000
    logits, seen = logits_of(7, rows=1) / 3, jnp.arange(V)[None] % 3 == 0
    p = distribution(logits, sampling, seen)[0].astype(np.float64)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(5), jnp.arange(draws))
    filters = Filters.of(sampling, V)
    one = jax.jit(lambda key: choose(jnp.asarray(logits), filters, key[None], seen)[0])
    counts = np.bincount(np.asarray(jax.vmap(one)(keys)), minlength=V)
    assert not counts[p == 0].any()
    kept = p * draws >= 5
    rest = draws - counts[kept].sum()
    observed, expected = counts[kept], p[kept] * draws
    if (tail := draws - expected.sum()) > 1:
        observed, expected = np.append(observed, rest), np.append(expected, tail)
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_a_row_draws_by_its_own_key_whatever_its_neighbours():
    logits = jnp.asarray(logits_of(1, rows=4))
    keys = jax.random.split(jax.random.key(3), 4)
    filters = Filters.of(Sampling(top_k=7, top_p=0.9), V)
    together = choose(logits, filters, keys)
    alone = [int(choose(logits[n : n + 1], filters, keys[n : n + 1])[0]) for n in range(4)]
    assert together.tolist() == alone
    assert len({int(choose(logits[:1], filters, keys[n : n + 1])[0]) for n in range(4)}) > 1
