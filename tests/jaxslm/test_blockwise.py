"""Blockwise attention is the reference in less memory.

JAX makes fake devices only when it starts, so one test runs those of a mesh in a process of their
own.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

from jaxslm.attention import WINDOW_MODES, attend
from jaxslm.attention.blockwise import block_size, blockwise_attention, kept_weights
from jaxslm.attention.reference import full_attention
from jaxslm.sharding import BATCH, make_mesh
from tests.children import on_eight_devices, pass_on_eight_devices

NAMES = ("o", "dq", "dk", "dv", "dslope")
# T, (N, K), H, slope: the largest, a tiny one, zero, or those that Ripple starts with
CASES = [
    (1, (4, 1), 64, None),
    (2, (8, 2), 32, 0.5),
    (127, (4, 1), 64, None),
    (128, (16, 4), 128, 1e-4),
    (129, (6, 6), 64, 0.0),
    (257, (8, 2), 256, 0.5),
    (300, (6, 2), 64, "ripple"),
    (1000, (4, 1), 64, "ripple"),
]


def inputs(T, heads, H, slope, dtype, B=1, seed=None):
    """q, k, v, slope and the gradient of the output, in numbers that bfloat16 holds."""
    rng = np.random.default_rng(T if seed is None else seed)
    (N, K), wide = heads, jnp.promote_types(dtype, jnp.float32)
    shapes = [(B, T, n, H) for n in (N, K, K, N)]
    q, k, v, do = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16).astype(dtype) for shape in shapes
    )
    slope_N = 0.5 ** np.arange(1, N + 1) if slope == "ripple" else np.full(N, slope or 0.0)
    return q, k, v, None if slope is None else jnp.asarray(slope_N, jnp.float32).astype(wide), do


@partial(jax.jit, static_argnums=(0, 6))
def output_and_gradients(attention, q, k, v, slope_N, do, rate=0.0, key=None):
    """Those named in NAMES."""
    o, gradients = jax.vjp(lambda *x: attention(*x, rate, key), q, k, v, slope_N)
    return o, *gradients(do)


def assert_close(found, expected, relative):
    """Equal to a part of the largest entry, or of one where all are near zero."""
    for name, a, b in zip(NAMES, found, expected, strict=True):
        if b is not None:
            b = np.asarray(b, np.float64)
            limit = relative * (np.abs(b).max() if np.abs(b).max() > 1e-3 else 1.0)
            np.testing.assert_allclose(
                np.asarray(a, np.float64), b, rtol=0, atol=limit, err_msg=name
            )


@pytest.mark.parametrize(("T", "heads", "H", "slope"), CASES)
def test_blockwise_is_the_reference(T, heads, H, slope, x64):
    exact = output_and_gradients(full_attention, *inputs(T, heads, H, slope, "float64"))
    for dtype, relative in (("float64", 1e-12), ("float32", 1e-5)):
        x = inputs(T, heads, H, slope, dtype)
        found = output_and_gradients(blockwise_attention, *x)
        assert_close(found, exact, relative)
        for a, b in zip(found, (x[0], *x[:4]), strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype, a.shape) == (b.dtype, b.shape)


# The last three are draws in which a bfloat16 output in the backward pass errs 2.2 to 2.8 times.
@pytest.mark.parametrize(
    ("case", "seed"),
    [
        *((case, None) for case in CASES[2:]),
        ((300, (16, 4), 64, None), 8),
        ((300, (16, 4), 64, None), 10),
        ((300, (6, 6), 64, "ripple"), 2),
    ],
)
def test_blockwise_in_bfloat16_errs_at_most_twice_as_much_as_the_reference(case, seed, x64):
    exact = output_and_gradients(full_attention, *inputs(*case, "float64", seed=seed))
    x = inputs(*case, "bfloat16", seed=seed)
    found = output_and_gradients(blockwise_attention, *x)
    plain = output_and_gradients(full_attention, *x)
    for name, a, b, c in zip(NAMES, found, plain, exact, strict=True):
        if c is not None:
            ours, theirs = (np.asarray(y, np.float64) - np.asarray(c) for y in (a, b))
            least = 1e-5 * np.abs(c).max()  # of the slope's gradient, which is exact to float32
            for size in (lambda y: np.abs(y).max(), np.linalg.norm):
                assert size(ours) <= 2 * size(theirs) + least, name


@pytest.mark.parametrize("mode", WINDOW_MODES)
@pytest.mark.parametrize(
    ("window", "T"), [(1, 70), (3, 130), (63, 200), (64, 300), (65, 300), (100, 517), (256, 1030)]
)
def test_blockwise_under_a_window_is_the_reference(window, T, mode, x64):
    x = inputs(T, (4, 2), 16, "ripple", "float64")

    def windowed(backend):
        def attention(q, k, v, slope_N, rate, key):
            return attend(
                q, k, v, slope_N=slope_N, window=window, window_mode=mode, dropout_rate=rate,
                dropout_key=key, backend=backend,
            )  # fmt: skip

        return output_and_gradients(attention, *x)

    assert_close(windowed("blockwise"), windowed("reference"), 1e-12)


def test_blockwise_computes_the_pairs_of_blocks_with_a_visible_key_and_no_others():
    for T, window, exact in ((1000, None, False), (1000, 100, False), (777, 100, True)):
        size = block_size(T, window)
        blocks = -(-T // size)
        query, key = np.arange(blocks * size)[:, None], np.arange(blocks * size)[None, :]
        first = 0 if window is None else (query if exact else query // window * window) - window + 1
        visible = (key <= query) & (key >= first)
        expected = np.argwhere(visible.reshape(blocks, size, blocks, size).any((1, 3)))
        program = jax.make_jaxpr(
            partial(
                blockwise_attention, dropout_rate=0.0, dropout_key=None, window=window, exact=exact
            )
        )(*(jnp.zeros((1, T, 1, 2)),) * 3, None)
        (loop,) = (e for e in equations(program.jaxpr) if e.primitive.name == "scan")
        assert loop.params["length"] == len(expected)


def equations(jaxpr):
    """Every equation of a program, those of its loops and functions included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_blockwise_in_bfloat16_multiplies_bfloat16_into_float32():
    x = inputs(130, (4, 2), 32, 0.5, "bfloat16")
    program = jax.make_jaxpr(partial(output_and_gradients, blockwise_attention))(*x)
    products = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 7
    for product in products:
        assert [str(v.aval.dtype) for v in product.invars] == ["bfloat16", "bfloat16"]
        assert str(product.outvars[0].aval.dtype) == "float32"
    exponentials = [e for e in equations(program.jaxpr) if e.primitive.name == "exp"]
    assert {str(e.outvars[0].aval.dtype) for e in exponentials} == {"float32"}


def test_blockwise_survives_scores_that_would_overflow_exp():
    q, k, v, slope_N, do = inputs(130, (4, 2), 32, 0.5, "float32")
    found = output_and_gradients(blockwise_attention, 1e3 * q, 1e3 * k, v, slope_N, do)
    assert all(np.isfinite(a).all() for a in found)


def dropped_attention(kept_BNTS, rate, q, k, v, slope_N):
    """The formula with a given choice of weights."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    distance_TS = np.subtract.outer(np.arange(T), np.arange(T))[None, None]
    k, v = jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3])
    scores = scores - slope_N[None, :, None, None] * distance_TS
    weights = jax.nn.softmax(jnp.where(distance_TS >= 0, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights * kept_BNTS / (1 - rate), v)


def test_blockwise_dropout_has_the_gradients_of_the_formula_with_its_masks(x64):
    T, (N, K), rate, key = 150, (4, 2), 0.25, jax.random.key(5)
    x = inputs(T, (N, K), 16, "ripple", "float64")
    size = block_size(T, None)
    blocks = -(-T // size)
    kept = np.zeros((1, N, blocks * size, blocks * size), bool)
    for i, j in zip(*np.tril_indices(blocks), strict=True):
        block = kept_weights(key, i, j, (1, K, N // K * size, size), rate)
        rows, columns = (slice(n * size, (n + 1) * size) for n in (i, j))
        kept[:, :, rows, columns] = block.reshape(1, N, size, size)
    kept = kept[:, :, :T, :T]
    assert blocks == 3
    q, k, v, slope_N, do = x
    o, gradients = jax.vjp(partial(dropped_attention, kept, rate), q, k, v, slope_N)
    found = output_and_gradients(blockwise_attention, *x, rate, key)
    assert_close(found, (o, *gradients(do)), 1e-12)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.999])
def test_kept_weights_are_independent_draws_at_the_rate(rate):
    key, shape = jax.random.key(1), (4, 2, 128, 64)
    masks = [np.asarray(kept_weights(key, i, j, shape, rate)) for i, j in ((2, 1), (1, 2), (2, 2))]
    spread = (rate * (1 - rate)) ** 0.5
    for kept in masks:
        assert abs(kept.mean() - (1 - rate)) < 5 * spread / kept.size**0.5
        assert abs(kept.mean((0, 1, 2)) - (1 - rate)).max() < 5 * spread / 1024**0.5
        first, second = kept[..., :32], kept[..., 32:]  # from the same random words
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 5 / first.size**0.5
    assert all((a != b).any() for a, b in zip(masks, masks[1:] + masks[:1], strict=True))


def test_blockwise_dropout_keeps_the_mean_and_needs_key_and_rate():
    q, k, v, slope_N, _ = inputs(64, (2, 1), 8, 0.5, "float32")
    run = jax.jit(partial(blockwise_attention, q, k, jnp.ones_like(v), slope_N), static_argnums=0)
    sums = jax.vmap(lambda key: run(0.5, key))(jax.random.split(jax.random.key(0), 400))
    assert np.unique(sums[:, 0, 0, 0, 0]).tolist() == [0.0, 2.0]  # one key: dropped or doubled
    assert abs(np.asarray(sums).mean((0, 1, 4)) - 1).max() < 0.25
    assert abs(sums.mean() - 1) < 0.02
    np.testing.assert_array_equal(run(0.5, jax.random.key(3)), run(0.5, jax.random.key(3)))
    assert (run(0.5, jax.random.key(3)) != run(0.5, jax.random.key(4))).any()
    np.testing.assert_allclose(run(0.9, None), 1.0, rtol=1e-6)
    np.testing.assert_allclose(run(0.0, jax.random.key(0)), 1.0, rtol=1e-6)
    assert (run(1.0, jax.random.key(0)) == 0).all()


@pytest.mark.parametrize("slope", [None, 0.5])
def test_blockwise_gradients_take_memory_linear_in_T_and_a_program_of_one_size(slope):
    def compiled(T):
        x = inputs(1, (4, 2), 32, slope, "float32")
        x = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in x]
        x = [
            x[i] if i == 3 else jax.ShapeDtypeStruct((1, T, *x[i].shape[2:]), "float32")
            for i in range(5)
        ]
        return output_and_gradients.lower(blockwise_attention, *x).compile()

    short, long = compiled(2048), compiled(16384)
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (short, long)]
    assert temporary[1] < 8.2 * temporary[0]
    assert len(long.as_text()) < 1.1 * len(short.as_text())


def test_blockwise_in_rematerialised_layers_and_batches_of_batches():
    q, k, v, slope_N, do = inputs(150, (4, 2), 16, 0.5, "float32", B=2)

    def stack(attention, remat, x):
        def layer(x, scale):
            return x + attention(scale * x, k, v, slope_N, 0.0, None), None

        layer = jax.checkpoint(layer) if remat else layer
        return (jax.lax.scan(layer, x, jnp.array([0.5, 2.0, 1.0]))[0] * do).sum()

    found = jax.jit(jax.grad(partial(stack, blockwise_attention, True)))(q)
    expected = jax.jit(jax.grad(partial(stack, full_attention, False)))(q)
    assert_close([found] + [None] * 4, [expected] + [None] * 4, 1e-5)

    pairs = [jnp.stack([x, 2 * x]) for x in (q, k, v)]
    mapped = jax.vmap(
        lambda q, k, v: output_and_gradients(blockwise_attention, q, k, v, slope_N, do)
    )
    for a, b, c in zip(
        mapped(*pairs),
        output_and_gradients(full_attention, q, k, v, slope_N, do),
        output_and_gradients(full_attention, 2 * q, 2 * k, 2 * v, slope_N, do),
        strict=True,
    ):
        assert_close([a] + [None] * 4, [jnp.stack([b, c])] + [None] * 4, 1e-5)


def test_a_mesh_of_eight_devices():
    pass_on_eight_devices(__file__, "moves_no_block", 4)


@on_eight_devices
@pytest.mark.parametrize(
    ("sizes", "heads"),
    [((4, 2, 1), (4, 1)), ((2, 2, 2), (8, 2)), ((2, 2, 2), (4, 1)), ((1, 2, 4), (4, 2))],
)
def test_blockwise_on_a_mesh_moves_no_block_between_devices(sizes, heads):
    """Only sums once over the whole: of slopes over the batch, of shared keys over their group."""
    mesh, key = make_mesh(*sizes, jax.devices()), jax.random.key(0)
    x = inputs(150, heads, 16, "ripple", "float32", B=8)
    expected = output_and_gradients(blockwise_attention, *x, 0.2, key)
    shared = heads[1] % sizes[2] == 0
    queries = NamedSharding(mesh, PartitionSpec(BATCH, None, "tensor", None))
    keys = NamedSharding(mesh, PartitionSpec(BATCH, None, "tensor" if shared else None, None))
    slopes = NamedSharding(mesh, PartitionSpec("tensor"))
    placed = [
        jax.device_put(a, place)
        for a, place in zip(x, (queries, keys, keys, slopes, queries), strict=True)
    ]
    run = jax.jit(
        lambda *x: output_and_gradients(blockwise_attention, *x, 0.2, key),
        out_shardings=(queries, queries, keys, keys, slopes),
    )
    with jax.set_mesh(mesh):
        program = run.lower(*placed).compile()
    assert_close(program(*placed), expected, 1e-5)
    kinds = []
    for computation in program.as_text().split("\n\n"):
        found = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", computation)
        assert not found or "ENTRY" in computation  # none in the loops
        kinds += found
    if shared:
        assert kinds == ["all-reduce"]
    else:
        assert kinds.count("all-reduce") == 2
        assert set(kinds) <= {"all-reduce", "all-gather"}  # the keys' gradients as asked for, whole
