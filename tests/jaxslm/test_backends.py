"""The accelerators' kernels are the reference: interpreted, compiled for a TPU, and rebuilt in JAX.

A device mesh and the TPU's compiler want a process of their own.
"""

import importlib.util
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import jaxslm.attention.splash
from jaxslm.attention import attend
from jaxslm.attention.cudnn import cudnn_attention
from jaxslm.attention.kernels import decay_width, with_decay
from jaxslm.attention.splash import _Visible, block_size, splash_attention
from jaxslm.attention.windowed import first_key
from jaxslm.models import GPTConfig, LumenConfig, RippleConfig, model_name
from jaxslm.sharding import AXES, BATCH, make_mesh
from tests.children import on_eight_devices, pass_on_eight_devices, run_child
from tests.jaxslm.support import forward, random_model
from tests.jaxslm.test_blockwise import (
    NAMES,
    assert_close,
    equations,
    inputs,
    output_and_gradients,
)

# T, (N, K), H, slope, window, exact; blocks are of 128
CASES = [
    (130, (4, 1), 64, None, None, True),  # Lumen
    (257, (8, 2), 64, None, None, True),  # GPT
    (300, (6, 6), 64, "ripple", None, True),
    (300, (4, 4), 64, "ripple", 50, False),
    (300, (4, 4), 64, "ripple", 50, True),
    (257, (2, 2), 64, None, 150, False),
    (128, (2, 1), 32, 0.5, None, True),
    (1, (2, 1), 128, 0.5, None, True),
    (129, (2, 1), 256, 1e-4, None, True),
]


@pytest.fixture
def blocks_of_128(monkeypatch):
    monkeypatch.setattr(jaxslm.attention.splash, "block_size", lambda T, window: 128)


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def backend_of(name, window, exact):
    """A backend as `output_and_gradients` calls it, on this platform."""

    def attention(q, k, v, slope_N, rate, key):
        if name == "splash":
            return splash_attention(q, k, v, slope_N, window, exact, interpret=True)
        if name == "cudnn":
            return cudnn_attention(q, k, v, slope_N, window, implementation="xla")
        mode = "exact" if exact else "chunked"
        return attend(
            q, k, v, slope_N=slope_N, window=window, window_mode=mode, backend="reference"
        )

    return attention


def truth(T, heads, H, slope, window, exact, **more):
    """The reference in float64."""
    with jax.enable_x64(True):
        x = inputs(T, heads, H, slope, "float64", **more)
        found = output_and_gradients(backend_of("reference", window, exact), *x)
        return [None if a is None else np.asarray(a) for a in found]


@pytest.mark.parametrize(
    ("name", "case"),
    [("splash", case) for case in CASES] + [("cudnn", CASES[n]) for n in (1, 2, 4, 7)],
    ids=str,
)
def test_kernel_is_the_reference(name, case, blocks_of_128):
    T, heads, H, slope, window, exact = case
    x = inputs(T, heads, H, slope, "float32")
    found = output_and_gradients(backend_of(name, window, exact), *x)
    assert_close(found, truth(*case), 1e-5)
    for a, b in zip(found, (x[0], *x[:4]), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype, a.shape) == (b.dtype, b.shape)


def errors_in_bfloat16(name, case, **more):
    """Of a kernel and of the reference, from the reference in float64, with that."""
    T, heads, H, slope, window, exact = case
    x = inputs(T, heads, H, slope, "bfloat16", **more)
    expected = truth(*case, **more)
    for a, b, c in zip(
        output_and_gradients(backend_of(name, window, exact), *x),
        output_and_gradients(backend_of("reference", window, exact), *x),
        expected,
        strict=True,
    ):
        yield None if c is None else [np.asarray(y, np.float64) - c for y in (a, b)]


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[6]], ids=str)
def test_splash_in_bfloat16_errs_at_most_twice_as_much_as_the_reference(case, blocks_of_128):
    for name, errors in zip(NAMES[:4], errors_in_bfloat16("splash", case), strict=False):
        ours, theirs = errors
        for size in (lambda y: np.abs(y).max(), np.linalg.norm):
            assert size(ours) <= 2 * size(theirs), name


@pytest.mark.parametrize("name", ["splash", "cudnn"])
def test_gradient_of_the_slope_in_bfloat16_is_right_to_a_percent(name):
    case = (500, (8, 8), 64, "ripple", None, True)
    ours, theirs = list(errors_in_bfloat16(name, case))[4]
    slope_N = 0.5 ** np.arange(1, 9)  # distances are long where it is small
    assert np.linalg.norm(ours * slope_N) <= 5 * np.linalg.norm(theirs * slope_N)
    assert np.linalg.norm(ours * slope_N) <= 0.01 * np.linalg.norm(truth(*case)[4] * slope_N)


def test_decay_adds_the_slope_times_the_position_exactly_to_bfloat16_products():
    T, slope_N = 3000, jnp.array([0.3, 1 / 3, 0.0, 1e-3], jnp.float32)
    q = jnp.zeros((1, T, 4, 2), jnp.bfloat16)
    q, k = with_decay(q, q[:, :, :1], slope_N)
    assert q.dtype == k.dtype == jnp.bfloat16
    assert q.shape[3] == k.shape[3] == 2 + decay_width(T)
    scores = np.einsum("nf,jf->nj", *(np.asarray(x, np.float64) for x in (q[0, -1], k[0, :, 0])))
    expected = np.outer(np.asarray(slope_N, np.float64), np.arange(T))
    np.testing.assert_allclose(scores, expected, rtol=2**-23)


def test_decay_of_float32_takes_no_more_than_the_digits_of_slope_times_length():
    case = (1500, (1, 1), 64, 2.0, 64, True)
    x = inputs(*case[:4], "float32")
    found = output_and_gradients(backend_of("splash", *case[4:]), *x)
    assert_close(found, truth(*case), 2**-23 * 2.0 * 1500)


def test_mask_is_the_window_s_and_its_blocks_are_classed_right():
    for T, window, exact in (
        (512, None, True),
        (512, 100, False),
        (512, 66, True),  # the first key of a block of queries is the last of one of keys
        (512, 100, True),
        (384, 1, False),
    ):
        mask = _Visible(T, window, exact)
        query, key = np.arange(T)[:, None], np.arange(T)[None, :]
        first = 0 if window is None else first_key(query, window, exact)
        expected = (key <= query) & (key >= first)
        np.testing.assert_array_equal(mask(query, key), expected)
        np.testing.assert_array_equal(mask(jnp.asarray(query), jnp.asarray(key)), expected)
        for i in range(0, T, 128):
            for j in range(0, T, 64):
                part = slice(i, i + 128), slice(j, j + 64)
                found, block = mask[part], expected[part]
                assert (found.any(), found.all()) == (block.any(), block.all())


def test_blocks_are_multiples_of_128_that_waste_little():
    sizes = {(T, w): block_size(T, w) for T in (1, 300, 512, 513, 1025, 16384) for w in (None, 300)}
    assert [sizes[T, None] for T in (1, 300, 512, 513, 1025, 16384)] == [
        128,
        384,
        512,
        384,
        384,
        512,
    ]
    assert [sizes[T, 300] for T in (1, 300, 512, 513, 1025, 16384)] == [
        128,
        384,
        256,
        384,
        384,
        384,
    ]


def test_cudnn_gets_what_it_takes(monkeypatch):
    calls = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *x, **options: calls.append((x, options)) or x[0]
    )
    q, k, v, slope_N, _ = inputs(300, (6, 2), 64, 0.5, "bfloat16")
    assert cudnn_attention(q, k, v, slope_N, 100).shape == q.shape
    ((found, options),) = calls
    assert [x.shape for x in found] == [(1, 300, 6, 80), (1, 300, 2, 80), (1, 300, 2, 80)]
    assert {x.dtype for x in found} == {jnp.dtype("bfloat16")}
    assert options == {
        "scale": 0.125, "is_causal": True, "local_window_size": (99, 0), "implementation": "cudnn",
    }  # fmt: skip


@pytest.mark.skipif(
    jax.local_devices()[0].platform != "gpu", reason="cuDNN's kernel needs an NVIDIA GPU"
)
@pytest.mark.parametrize("case", CASES[:3] + CASES[4:5], ids=str)
def test_cudnn_on_a_gpu_errs_at_most_twice_as_much_as_the_reference(case):
    T, heads, H, slope, window, exact = case
    x = inputs(T, heads, H, slope, "bfloat16")
    run = partial(attend, window=window, window_mode="exact", backend="cudnn")
    found = output_and_gradients(lambda q, k, v, s, *_: run(q, k, v, slope_N=s), *x)
    plain = output_and_gradients(backend_of("reference", window, exact), *x)
    for name, a, b, c in zip(NAMES[:4], found, plain, truth(*case), strict=False):
        ours, theirs = (np.asarray(y, np.float64) - c for y in (a, b))
        assert np.linalg.norm(ours) <= 2 * np.linalg.norm(theirs), name


KINDS = {
    "tpu": AbstractDevice("TPU v5 lite", 1, "tpu"),
    "gpu": AbstractDevice("NVIDIA H100", None, "gpu"),
    "amd": AbstractDevice("AMD Instinct MI300X", None, "gpu"),
    "cpu": AbstractDevice("cpu", None, "cpu"),
}


@pytest.fixture
def served(monkeypatch):
    """Which backend serves a call of `attend`; the backends themselves do nothing."""
    names = {
        "full_attention": "reference", "chunked_attention": "reference",
        "blockwise_attention": "blockwise", "cudnn_attention": "cudnn",
    }  # fmt: skip
    called = []
    for function, name in names.items():
        monkeypatch.setattr(jaxslm.attention, function, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(
        jaxslm.attention.splash, "splash_attention", lambda *_: called.append("splash")
    )

    def call(T=512, dtype="bfloat16", H=64, slope=None, **options):
        slope_N = None if slope is None else jnp.full(2, slope)
        attend(*(jnp.zeros((1, T, n, H), dtype) for n in (2, 1, 1)), slope_N=slope_N, **options)
        return called.pop()

    return call


def on(kind, axes=AXES):
    """A mesh of one device of a kind."""
    mesh = AbstractMesh((1,) * len(axes), axes, (AxisType.Auto,) * len(axes), abstract_device=kind)
    return jax.sharding.use_abstract_mesh(mesh)


DROPOUT = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}


@pytest.mark.parametrize(
    ("call", "tpu", "gpu"),
    [
        ({}, "splash", "cudnn"),
        ({"T": 255}, "reference", "reference"),
        ({"T": 256}, "splash", "cudnn"),
        ({"slope": 0.5}, "splash", "cudnn"),
        ({"slope": 0.5, "T": 2**16}, "splash", "blockwise"),
        ({"slope": 0.5, "T": 2**16 + 1}, "blockwise", "blockwise"),
        ({"dtype": "float32"}, "blockwise", "blockwise"),
        ({"dtype": "float32", "T": 4}, "reference", "reference"),
        (DROPOUT, "blockwise", "blockwise"),
        (DROPOUT | {"dropout_key": None}, "splash", "cudnn"),
        ({"window": 100}, "splash", "blockwise"),
        ({"window": 512}, "splash", "cudnn"),
        ({"window": 100, "window_mode": "exact"}, "splash", "cudnn"),
        ({"H": 128}, "splash", "cudnn"),
        ({"H": 128, "slope": 0.5}, "splash", "blockwise"),
        ({"H": 136}, "splash", "blockwise"),
    ],
)
def test_auto_takes_the_platform_s_kernel_where_it_can_serve(call, tpu, gpu, served, monkeypatch):
    other = "reference" if call.get("T", 512) < 256 else "blockwise"
    for kind, expected in (("tpu", tpu), ("gpu", gpu), ("amd", other), ("cpu", other)):
        with on(KINDS[kind]):
            assert served(**call) == expected, kind
        with monkeypatch.context() as patch:
            patch.setattr(jax, "local_devices", lambda kind=kind, **_: [KINDS[kind]])
            assert served(**call) == expected, kind
            with on(KINDS["cpu"]):
                assert served(**call) == other
    with on(KINDS["tpu"], axes=("x",)):
        assert served(**call) == other


@pytest.mark.parametrize(
    ("backend", "kind", "call", "words"),
    [
        ("splash", "cpu", {}, "'splash' cannot serve here: it needs a TPU, .* cpu; use 'auto'"),
        ("splash", "gpu", {}, "needs a TPU, and the program is for NVIDIA H100"),
        ("splash", "tpu", {"dtype": "float16"}, "takes bfloat16 and float32, not float16"),
        ("splash", "tpu", DROPOUT, "has no dropout"),
        ("splash", "tpu", {"slope": 0.1, "T": 70_000}, "at most 65,536 positions .* not 70,000"),
        ("cudnn", "cpu", {}, "needs an NVIDIA GPU"),
        ("cudnn", "amd", {}, "needs an NVIDIA GPU, and the program is for AMD"),
        ("cudnn", "gpu", {"dtype": "float32"}, "takes bfloat16, not float32"),
        ("cudnn", "gpu", DROPOUT, "has no dropout"),
        ("cudnn", "gpu", {"window": 9}, "has no chunked window"),
        ("cudnn", "gpu", {"H": 128, "slope": 0.1}, "up to a width of 128, not 1"),
        ("flash", "cpu", {}, "backend must be one of"),
    ],
)
def test_backend_that_cannot_serve_is_refused(backend, kind, call, words, served):
    with on(KINDS[kind]), pytest.raises(ValueError, match=words):
        served(backend=backend, **call)


def test_backend_that_is_asked_for_serves(served):
    with on(KINDS["tpu"]):
        assert served(backend="splash", dtype="float32", T=2) == "splash"
        assert served(backend="reference") == "reference"
        assert served(backend="blockwise", T=2) == "blockwise"
    with on(KINDS["gpu"]):
        assert served(backend="cudnn", T=2) == "cudnn"


def test_auto_looks_at_the_default_device_where_there_is_no_mesh(served, monkeypatch):
    (device,) = jax.local_devices()
    monkeypatch.setattr(
        jax, "local_devices", lambda backend="tpu": [device if backend == "cpu" else KINDS["tpu"]]
    )
    assert served() == "splash"
    for default in (device, "cpu"):
        with jax.default_device(default):
            assert served() == "blockwise"


def test_auto_takes_splash_among_several_tpus_under_a_mesh_only(served, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda **_: [KINDS["tpu"]] * 4)
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert served() == "blockwise"
    assert served(backend="splash") == "splash"
    with on(KINDS["tpu"]):
        assert served() == "splash"
    monkeypatch.setattr(jax, "local_devices", lambda **_: [KINDS["gpu"]] * 4)
    assert served() == "cudnn"


@pytest.mark.parametrize(
    "config",
    [
        LumenConfig(vocab_size=7, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=4),
        GPTConfig(vocab_size=7, n_layer=1, n_head=2, n_kv_head=1, n_embd=8),
        RippleConfig(vocab_size=7, n_layer=1, n_head=2, n_embd=8),
    ],
    ids=model_name,
)
def test_models_pass_on_what_their_config_says(config):
    tokens_BT = np.zeros((1, 3), np.int32)
    forward(random_model(replace(config, attention="blockwise")), tokens_BT)
    with pytest.raises(ValueError, match="'splash' cannot serve here: it needs a TPU"):
        forward(random_model(replace(config, attention="splash")), tokens_BT)


def test_a_mesh_of_eight_devices():
    pass_on_eight_devices(__file__, "on_a_mesh", 4)


@on_eight_devices
@pytest.mark.parametrize(
    ("sizes", "heads", "B"),
    [
        ((2, 2, 2), (4, 2), 4),
        ((2, 2, 2), (4, 1), 4),  # its key is repeated
        ((4, 1, 2), (2, 2), 3),  # the rows do not divide
        ((1, 2, 4), (2, 1), 2),  # nor here the heads
    ],
)
def test_splash_on_a_mesh_is_the_reference(sizes, heads, B):
    x = inputs(130, heads, 16, "ripple", "float32", B=B)
    splash = backend_of("splash", None, True)
    expected = output_and_gradients(backend_of("reference", None, True), *x)
    with jax.set_mesh(make_mesh(*sizes, jax.devices())):
        assert_close(output_and_gradients(splash, *x), expected, 1e-5)
        program = jax.make_jaxpr(lambda *x: splash(*x, 0.0, None))(*x[:4])
    (split,) = (e for e in equations(program.jaxpr) if e.primitive.name == "shard_map")
    rows, _, parts, _ = split.params["in_specs"][-1]
    assert rows == (BATCH if B != 3 else None)
    assert parts == ("tensor" if sizes[2] == 2 else None)


COMPILE = """
import json
import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from jaxslm.attention import attend
from jaxslm.libtpu import compile_only
from jaxslm.sharding import BATCH, make_mesh

compile_only()
devices = topologies.get_topology_desc("v5e:2x2", "tpu").devices

def compiled(mesh, B, T, heads, slope, **window):
    def place(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    def gradients(q, k, v, slope_N, do):
        attention = lambda q, k, v, slope_N: attend(q, k, v, slope_N=slope_N, **window)
        return jax.vjp(attention, q, k, v, slope_N)[1](do)

    N, K = heads
    rows = place(BATCH, None, "tensor", None)
    q, k = (jax.ShapeDtypeStruct((B, T, n, 64), "bfloat16", sharding=rows) for n in (N, K))
    slope_N = jax.ShapeDtypeStruct((N,), "float32", sharding=place("tensor")) if slope else None
    with jax.set_mesh(mesh):
        program = jax.jit(gradients).lower(q, k, k, slope_N, q).compile()
    text = program.as_text()
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "gathers": text.count(" all-gather") + text.count(" all-to-all"),
        "temporaries": program.memory_analysis().temp_size_in_bytes,
    }

one, four = make_mesh(1, 1, 1, devices[:1]), make_mesh(1, 2, 2, devices)
gpt, ripple = (16, 4), (6, 6)
print(json.dumps({
    "gpt": [compiled(one, 2, 16384, gpt, False)],
    "ripple": [compiled(one, B, 2**17 // B, ripple, True) for B in (64, 8)],
    "window": [compiled(one, 2, 16384, ripple, True, window=300, window_mode="chunked")],
    "mesh": [compiled(four, 2, 1024, (4, 2), True)],
}))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which compiles for TPUs, is absent"
)
def test_splash_compiles_for_a_tpu_in_memory_linear_in_T():
    found = json.loads(run_child("-c", COMPILE).splitlines()[-1])
    assert {program["kernels"] for group in found.values() for program in group} == {3}
    assert [program["gathers"] for program in found["mesh"]] == [0]
    temporaries = {name: [program["temporaries"] for program in found[name]] for name in found}
    short, long = temporaries["ripple"]  # the same positions in all, 2,048 or 16,384 a row
    assert long < 1.1 * short
    scores = 16384**2 * 2  # bytes of a head's in bfloat16
    assert temporaries["gpt"][0] < 2 * 16 * scores / 10
    assert temporaries["window"][0] < scores
