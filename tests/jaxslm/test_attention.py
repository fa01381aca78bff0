from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.attention import BLOCKWISE_FROM, WINDOW_MODES, attend

B, N, H = 2, 4, 3
WINDOWS = [
    (window, T)
    for window in (1, 2, 3, 4, 7)
    for T in sorted({1, window - 1, window, window + 1, 2 * window, 2 * window + 1, 3 * window + 2})
    if T
]


def first_key(i: int, T: int, window: int | None, mode: str) -> int:
    """The earliest key that query i sees."""
    if window is None:
        return 0
    if mode == "exact":
        return max(0, i - window + 1)
    return max(0, i // window * window - window + 1)


def by_hand(q, k, v, slope_N=None, window=None, mode="chunked") -> np.ndarray:
    """The formula one query, head and key at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    G = q.shape[2] // k.shape[2]
    for b, i, n in np.ndindex(q.shape[:3]):
        weights, values = [], []
        for j in range(first_key(i, q.shape[1], window, mode), i + 1):
            score = q[b, i, n] @ k[b, j, n // G] / np.sqrt(q.shape[3])
            score -= 0.0 if slope_N is None else slope_N[n] * (i - j)
            weights.append(np.exp(score))
            values.append(v[b, j, n // G])
        out[b, i, n] = np.average(values, axis=0, weights=weights)
    return out


def masked(q, k, v, slope_N, window, mode) -> jax.Array:
    """The same over whole matrices, to differentiate."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    visible = [[first_key(i, T, window, mode) <= j <= i for j in range(T)] for i in range(T)]
    distance_TS = np.subtract.outer(np.arange(T), np.arange(T))
    k, v = jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3])
    scores = scores - slope_N[None, :, None, None] * distance_TS[None, None]
    scores = jnp.where(np.array(visible)[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def qkv(T: int, K: int = N, dtype: str = "float64", seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((B, T, heads, H)), dtype) for heads in (N, K, K)]


SLOPES = np.array([0.5, 0.125, 0.03, 0.0])


@pytest.mark.parametrize("with_slope", [False, True])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_attend_matches_the_formula_for_any_number_of_kv_heads(K, with_slope, x64):
    q, k, v = qkv(6, K)
    slope_N = SLOPES if with_slope else None
    o_BTNH = jax.jit(partial(attend, slope_N=slope_N))(q, k, v)
    assert o_BTNH.dtype == jnp.float64
    np.testing.assert_allclose(o_BTNH, by_hand(q, k, v, slope_N), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("window", "T"), WINDOWS)
def test_attend_matches_the_formula_under_every_window(window, T, x64):
    q, k, v = qkv(T, K=2)
    both = jax.jit(
        lambda q, k, v: [
            attend(q, k, v, slope_N=SLOPES, window=window, window_mode=mode)
            for mode in WINDOW_MODES
        ]
    )
    for mode, o_BTNH in zip(WINDOW_MODES, both(q, k, v), strict=True):
        expected = by_hand(q, k, v, SLOPES, window, mode)
        np.testing.assert_allclose(o_BTNH, expected, rtol=1e-12, atol=1e-13, err_msg=mode)


@pytest.mark.parametrize("mode", WINDOW_MODES)
@pytest.mark.parametrize(("window", "T"), [(None, 5), (1, 4), (3, 3), (3, 11), (4, 8)])
def test_attend_depends_on_the_values_of_the_window_and_on_no_others(window, T, mode):
    q, k, v = qkv(T, dtype="float32")

    def output_T(v_TH):
        values = jnp.broadcast_to(v_TH[None, :, None], v.shape)
        return attend(q, k, values, window=window, window_mode=mode)[1].sum((1, 2))

    gradient_TSH = np.asarray(jax.jit(jax.jacrev(output_T))(v[1, :, 0]))
    for i in range(T):
        seen = np.flatnonzero((gradient_TSH[i] != 0).any(-1))
        assert seen.tolist() == list(range(first_key(i, T, window, mode), i + 1))


@pytest.mark.parametrize(
    ("window", "T", "mode"),
    [
        (None, 5, "chunked"),
        (1, 4, "exact"),
        (3, 11, "chunked"),
        (3, 11, "exact"),
        (4, 8, "chunked"),
    ],
)
def test_attend_gradients_are_those_of_the_whole_masked_matrix(window, T, mode, x64):
    q, k, v = qkv(T, K=2)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape))
    slope_N = jnp.asarray(SLOPES)

    def ours(q, k, v, slope_N):
        o = attend(q, k, v, slope_N=slope_N, window=window, window_mode=mode)
        return (o * weight).sum()

    def theirs(q, k, v, slope_N):
        return (masked(q, k, v, slope_N, window, mode) * weight).sum()

    every = (0, 1, 2, 3)
    found = jax.jit(jax.grad(ours, every))(q, k, v, slope_N)
    expected = jax.jit(jax.grad(theirs, every))(q, k, v, slope_N)
    for name, a, b in zip(("q", "k", "v", "slope"), found, expected, strict=True):
        assert np.isfinite(a).all(), name
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)
    assert window == 1 or (np.abs(found[3]) > 1e-3).all()  # a window of 1 has no distances


def test_attend_survives_scores_that_would_overflow_exp():
    q, k, v = qkv(5, dtype="float32")
    o_BTNH = jax.jit(partial(attend, slope_N=SLOPES, window=2))(q * 1e3, k * 1e3, v)
    assert np.isfinite(o_BTNH).all()


@pytest.mark.parametrize("window", [None, 3])
def test_attend_in_bfloat16_rounds_products_only(window):
    q, k, v = qkv(9, K=2, dtype="bfloat16")
    o_BTNH = jax.jit(partial(attend, slope_N=SLOPES, window=window))(q, k, v)
    assert o_BTNH.dtype == jnp.bfloat16
    expected = by_hand(q, k, v, SLOPES, window)
    np.testing.assert_allclose(np.asarray(o_BTNH, np.float64), expected, rtol=2**-7, atol=2**-8)


def test_attend_in_bfloat16_computes_scores_and_softmax_in_float32():
    q, k, v = qkv(4, dtype="bfloat16")
    jaxpr = jax.make_jaxpr(partial(attend, slope_N=SLOPES.astype(np.float32)))(q, k, v)
    equations = [
        eqn
        for outer in jaxpr.eqns
        for eqn in (outer.params["jaxpr"].eqns if "jaxpr" in outer.params else [outer])
    ]
    dtypes = {name: set() for name in ("dot_general", "exp", "reduce_sum")}
    for eqn in equations:
        if eqn.primitive.name in dtypes:
            dtypes[eqn.primitive.name].add(eqn.outvars[0].aval.dtype)
    assert dtypes == {name: {jnp.dtype("float32")} for name in dtypes}


def test_attend_in_bfloat16_keeps_whole_distances_beyond_256():
    """The key at distance 300 counts for exp(-slope * 300), not for that of 300 rounded."""
    q, k, v = (jnp.zeros((1, 304, 1, H), jnp.bfloat16) for _ in range(3))
    for distance in (257, 303):
        seen = v.at[0, 303 - distance].set(1.0)
        o_H = attend(q, k, seen, slope_N=np.array([0.1], np.float32))[0, -1, 0]
        expected = np.exp(-0.1 * distance) / np.exp(-0.1 * np.arange(304)).sum()
        np.testing.assert_allclose(np.asarray(o_H, np.float64), expected, rtol=2**-7)


@pytest.mark.parametrize("window", [None, 3])
def test_attend_drops_weights_by_the_key_and_keeps_their_mean(window):
    q, k, v = qkv(11, dtype="float32")
    run = jax.jit(partial(attend, window=window, dropout_rate=0.5))
    ones = jnp.ones_like(v)
    sums = np.asarray(
        jax.vmap(lambda key: run(q, k, ones, dropout_key=key))(
            jax.random.split(jax.random.key(0), 200)
        )
    )
    assert np.ptp(sums[:, 0, -1, 0, 0]) > 0.1  # weights sum to one only on average
    np.testing.assert_allclose(sums.mean(0), 1.0, atol=0.4)
    np.testing.assert_allclose(sums.mean((0, 1, 3, 4)), 1.0, atol=0.1)
    assert np.unique(sums[:, 0, 0, 0, 0]).tolist() == [0.0, 2.0]  # one key: dropped or doubled
    first, again = (run(q, k, v, dropout_key=jax.random.key(3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (first != run(q, k, v, dropout_key=jax.random.key(4))).any()


def test_attend_without_key_or_rate_drops_nothing():
    q, k, v = qkv(5, dtype="float32")
    plain = attend(q, k, v)
    np.testing.assert_array_equal(attend(q, k, v, dropout_rate=0.9), plain)
    np.testing.assert_array_equal(attend(q, k, v, dropout_key=jax.random.key(0)), plain)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 5, 4), (2, 5, 4, 3), (2, 5, 4, 3)), "do not fit"),
        (((2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 2, 3)), "do not fit"),
        (((2, 5, 4, 3), (2, 6, 4, 3), (2, 6, 4, 3)), "do not fit"),
        (((2, 5, 4, 3), (1, 5, 4, 3), (1, 5, 4, 3)), "do not fit"),
        (((2, 5, 4, 3), (2, 5, 4, 2), (2, 5, 4, 2)), "heads of width 3.*of 2"),
        (((2, 5, 4, 3), (2, 5, 3, 3), (2, 5, 3, 3)), "4 heads.*has 3.*divide"),
    ],
)
def test_attend_refuses_shapes_that_do_not_fit(shapes, words):
    with pytest.raises(ValueError, match=words):
        attend(*(jnp.zeros(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("window", "mode", "words"),
    [
        (0, "chunked", "window 0 "),
        (-2, "exact", "window -2 "),
        (3, "sliding", "'sliding'.*'chunked', 'exact'"),
    ],
)
def test_attend_refuses_a_window_it_cannot_use(window, mode, words):
    with pytest.raises(ValueError, match=words):
        attend(*qkv(5, dtype="float32"), window=window, window_mode=mode)


@pytest.mark.parametrize(
    ("backend", "T", "window", "blockwise"),
    [
        ("auto", BLOCKWISE_FROM - 1, None, False),
        ("auto", BLOCKWISE_FROM, None, True),
        ("auto", BLOCKWISE_FROM, BLOCKWISE_FROM, True),  # a window that hides nothing
        ("auto", BLOCKWISE_FROM, 100, True),
        ("blockwise", 5, None, True),
        ("blockwise", 5, 3, True),
        ("reference", BLOCKWISE_FROM, 100, False),
        ("reference", BLOCKWISE_FROM, None, False),
    ],
)
def test_attend_takes_the_backend_it_is_told_to(backend, T, window, blockwise):
    x = qkv(T, K=2, dtype="float32")
    run = partial(attend, slope_N=SLOPES.astype(np.float32), window=window, backend=backend)
    assert ("custom_vjp" in str(jax.make_jaxpr(run)(*x))) == blockwise
    np.testing.assert_allclose(run(*x), run(*x, backend="reference"), rtol=0, atol=1e-6)


def test_attend_refuses_an_unknown_backend():
    with pytest.raises(ValueError, match="'auto', 'reference', 'blockwise'.*'flash'"):
        attend(*qkv(5, dtype="float32"), backend="flash")
