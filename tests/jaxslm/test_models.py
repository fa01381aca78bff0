"""What all three models promise."""

import functools
import itertools
from dataclasses import replace

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.models import MODELS, GPTConfig, LumenConfig, RippleConfig, model_name
from jaxslm.weights import abstract_parameters, from_arrays, to_arrays
from tests.jaxslm.support import forward, random_arrays, random_model

L, D, V, CONTEXT = 3, 24, 29, 16
CONFIGS = {
    "lumen": LumenConfig(
        vocab_size=V, hidden_dim=D, num_layers=L, num_heads=4, num_kv_heads=2,
        intermediate_dim=20, max_seq_len=CONTEXT,
    ),
    "gpt": GPTConfig(
        vocab_size=V, n_embd=D, n_layer=L, n_head=4, n_kv_head=2, block_size=CONTEXT
    ),
    "ripple": RippleConfig(
        vocab_size=V, n_embd=D, n_layer=L, n_head=3, block_size=CONTEXT, bias=True,
        use_absolute_pos_emb=True, attention_window=4,
    ),
}  # fmt: skip
# Row 0 has no id twice, so that an id's row of the embedding stands for one position.
TOKENS_BT = np.stack([np.arange(11), np.random.default_rng(0).integers(0, V, 11)])
TARGETS_BT = np.random.default_rng(1).integers(0, V, (2, 11))


@pytest.fixture(scope="module", params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def plain_step(config):
    """Loss, logits and gradients without unroll or remat, in flax's default mode."""
    return step_in("graph")(random_model(config), TOKENS_BT, TARGETS_BT)


def loss_and_logits(model, tokens_BT, targets_BT):
    logits_BTV = model(tokens_BT)
    picked_BT1 = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), targets_BT[..., None], -1)
    return -picked_BT1.mean(), logits_BTV


@functools.cache
def step_in(nnx_mode: str):
    """The compiled step of a mode, which flax reads when a function is traced."""
    assert flax.config.nnx_graph_mode == (nnx_mode == "graph")
    return jax.jit(jax.value_and_grad(lambda *args: loss_and_logits(*args), has_aux=True))


def assert_same_step(found, expected) -> None:
    """Equal loss, logits and gradients, as numbers that were computed in another order are."""
    ((loss, logits), gradient), ((loss_, logits_), gradient_) = found, expected
    np.testing.assert_allclose(loss, loss_, rtol=1e-6)
    np.testing.assert_allclose(logits, logits_, rtol=1e-5, atol=1e-5)
    gradient, gradient_ = to_arrays(gradient), to_arrays(gradient_)
    assert gradient.keys() == gradient_.keys()
    for name, g in gradient.items():
        np.testing.assert_allclose(g, gradient_[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "count"), [("lumen", 2_754_816), ("gpt", 297_895_936), ("ripple", 6_261_540)]
)
def test_preset_has_the_original_number_of_parameters(name, count):
    preset = MODELS[name][0]()
    assert model_name(preset) == name
    parameters = abstract_parameters(preset)
    assert sum(leaf.size for leaf in parameters.values()) == count
    assert {leaf.dtype for leaf in parameters.values()} == {jnp.dtype("float32")}


def test_unroll_and_remat_change_neither_output_nor_gradient(config, plain_step):
    variant = from_arrays(replace(config, unroll=2, remat="full"), random_arrays(config))
    assert_same_step(step_in("graph")(variant, TOKENS_BT, TARGETS_BT), plain_step)
    unrolled = from_arrays(replace(config, unroll=L), random_arrays(config))
    (_, logits_BTV), _ = plain_step
    np.testing.assert_allclose(forward(unrolled, TOKENS_BT), logits_BTV, rtol=1e-5, atol=1e-5)


def test_unroll_and_remat_reach_the_layer_loop(config):
    for unroll, remat in ((1, "none"), (2, "full"), (7, "dots"), (1, "full")):
        model = random_model(replace(config, unroll=unroll, remat=remat))
        jaxpr = jax.make_jaxpr(model)(TOKENS_BT)
        scan = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        assert scan.params["unroll"] == unroll
        inside = [eqn.primitive.name for eqn in scan.params["jaxpr"].eqns]
        assert any("remat" in name or "checkpoint" in name for name in inside) == (remat != "none")


def test_model_works_in_both_nnx_modes(config, plain_step, nnx_mode):
    """Made, called, differentiated and updated; test_lumen.py and its like build it anew."""
    model = from_arrays(config, random_arrays(config))
    assert len(jax.tree.leaves(model)) == len(random_arrays(config))
    step = step_in(nnx_mode)
    found = step(model, TOKENS_BT, TARGETS_BT)
    assert_same_step(found, plain_step)
    (loss, _), gradient = found
    moved = jax.tree.map(lambda p, g: p - 0.01 * g, model, gradient)
    assert type(moved) is type(model)
    (after, _), _ = step(moved, TOKENS_BT, TARGETS_BT)
    assert after < loss


def test_model_can_be_jitted_itself(config):
    model = random_model(config)
    logits_BTV = jax.jit(model)(TOKENS_BT)
    np.testing.assert_allclose(logits_BTV, forward(model, TOKENS_BT), rtol=1e-5, atol=1e-5)


def test_logits_are_float32_and_near_in_bfloat16(config):
    model = random_model(config)
    half = from_arrays(replace(config, dtype="bfloat16"), random_arrays(config))
    found = jax.jit(lambda model, tokens: model.activations(tokens, every_layer=True))(
        half, TOKENS_BT
    )
    logits_BTV = found.pop("logits")
    assert logits_BTV.dtype == jnp.float32
    assert {name: array.dtype for name, array in found.items()} == dict.fromkeys(
        ("embedding", "attention", "block", "final_norm"), jnp.bfloat16
    )
    expected = np.asarray(forward(model, TOKENS_BT))
    assert expected.dtype == np.float32
    assert 0 < np.abs(logits_BTV - expected).max() < 0.1 * np.abs(expected).max()
    assert (np.asarray(logits_BTV) % 2**-10 != 0).any()  # never rounded to bfloat16 on the way


def test_logits_are_float64_in_float64(config, x64):
    model = random_model(config)
    logits_BTV = forward(model, TOKENS_BT)
    assert logits_BTV.dtype == jnp.float32
    arrays = {name: w.astype(np.float64) for name, w in random_arrays(config).items()}
    exact = forward(from_arrays(replace(config, dtype="float64"), arrays), TOKENS_BT)
    assert exact.dtype == jnp.float64
    np.testing.assert_allclose(logits_BTV, exact, rtol=1e-4, atol=1e-4)


def test_float64_is_refused_where_jax_would_compute_in_float32(config):
    model = from_arrays(replace(config, dtype="float64"), random_arrays(config))
    with pytest.raises(ValueError, match=r"dtype float64 needs JAX's x64 mode.*or use float32"):
        model(TOKENS_BT)


def test_activations_are_the_steps_of_the_forward_pass(config):
    model = random_model(config)
    run = jax.jit(lambda model, tokens: model.activations(tokens, every_layer=True))
    found = run(model, TOKENS_BT)
    assert {name: array.shape for name, array in found.items()} == {
        "embedding": (2, 11, D), "attention": (L, 2, 11, D), "block": (L, 2, 11, D),
        "final_norm": (2, 11, D), "logits": (2, 11, V),
    }  # fmt: skip
    np.testing.assert_allclose(found["logits"], forward(model, TOKENS_BT), rtol=1e-5, atol=1e-5)
    norm_BTD = model.final_norm(found["block"][-1])
    np.testing.assert_allclose(found["final_norm"], norm_BTD, rtol=1e-5, atol=1e-5)
    streams = [np.asarray(found["embedding"])]
    for attention, block in zip(found["attention"], found["block"], strict=True):
        streams += [np.asarray(attention), np.asarray(block)]
    for before, after in itertools.pairwise(streams):
        assert np.abs(after - before).max() > 0.01


def test_logits_depend_on_no_later_token(config):
    """By gradient: columns of ids that do not occur see the embedding as input only."""
    arrays = random_arrays(config)

    def scores_T(embedding_VD):
        model = from_arrays(config, arrays | {"embedding": embedding_VD})
        return (model(TOKENS_BT[:1])[0, :, 11:] ** 2).sum(-1)

    jacobian_TVD = np.asarray(jax.jit(jax.jacrev(scores_T))(arrays["embedding"]))
    reached_TS = (np.abs(jacobian_TVD[:, :11]) > 0).any(-1)
    np.testing.assert_array_equal(reached_TS, np.tri(11, dtype=bool))


def test_logits_of_a_row_do_not_depend_on_other_rows(config):
    model = random_model(config)
    logits_BTV = np.asarray(forward(model, TOKENS_BT))
    swapped = np.asarray(forward(model, TOKENS_BT[::-1]))
    np.testing.assert_allclose(swapped[::-1], logits_BTV, rtol=1e-5, atol=1e-5)
    others = np.stack([TOKENS_BT[0], (TOKENS_BT[1] + 5) % V])
    np.testing.assert_array_equal(np.asarray(forward(model, others))[0], logits_BTV[0])


@pytest.mark.parametrize("foreign", [-1, V])
def test_logits_are_nan_in_the_row_of_an_id_outside_the_vocabulary(config, foreign):
    tokens_BT = TOKENS_BT.copy()
    tokens_BT[0, 7] = foreign
    logits_BTV = np.asarray(forward(random_model(config), tokens_BT))
    assert np.isnan(logits_BTV[0, 7]).all()
    assert np.isfinite(logits_BTV[1]).all()


def test_model_accepts_its_whole_context_and_refuses_more(config):
    limit_name = "max_seq_len" if isinstance(config, LumenConfig) else "block_size"
    assert config.context == CONTEXT
    model = random_model(config)
    assert jax.eval_shape(model, jnp.zeros((1, CONTEXT), int)).shape == (1, CONTEXT, V)
    with pytest.raises(ValueError, match=f"17 tokens but {limit_name} is 16: pass at most 16"):
        model(jnp.zeros((1, CONTEXT + 1), int))


def test_model_refuses_tokens_of_the_wrong_kind(config):
    model = random_model(config)
    with pytest.raises(TypeError, match="integers, got float32"):
        model(jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"\[batch, time\], got shape \(4,\)"):
        model(jnp.zeros(4, int))
    with pytest.raises(ValueError, match=r"non-empty.*\(2, 0\)"):
        model(jnp.zeros((2, 0), int))


@pytest.mark.parametrize("name", ["lumen", "gpt"])
def test_model_without_dropout_accepts_a_key_and_ignores_it(name):
    model = random_model(CONFIGS[name])
    with_key = jax.make_jaxpr(lambda key: model(TOKENS_BT, key=key))(jax.random.key(0))
    without = jax.make_jaxpr(lambda key: model(TOKENS_BT))(jax.random.key(0))
    assert str(with_key) == str(without)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_bfloat16_training_multiplies_bfloat16_and_accumulates_in_float32(config, remat):
    """No product of the compiled update has a factor that was widened, forward or backward."""
    fields = {"dtype": "bfloat16", "remat": remat}
    fields |= {name: 256 for name in ("block_size", "max_seq_len") if hasattr(config, name)}
    narrow = replace(config, **fields)
    model = from_arrays(narrow, random_arrays(narrow))
    tokens = jnp.zeros((1, 256), jnp.int32)

    def loss(model):
        return jax.nn.logsumexp(model(tokens), axis=-1).sum()

    text = jax.jit(jax.grad(loss)).lower(model).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 15
    for line in products:
        factors, result = line.rsplit(" : ", 1)[1].split(" -> ")
        assert factors.count("xbf16>") == 2, line
        assert result.endswith("xf32>"), line
    sums = [line for line in text.splitlines() if "applies stablehlo.add" in line]
    assert len(sums) > 5
    assert [line for line in sums if "bf16" in line] == []
