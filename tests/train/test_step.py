"""One update: the same however the batch is cut, skipped whole, and a function of its inputs."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslm.weights import from_arrays
from tests.convert.subjects import config_of
from tests.jaxslm.support import random_arrays
from train.config import DataConfig, OptimConfig, TrainConfig
from train.optimizer import build_optimizer
from train.step import (
    TrainState,
    checksum,
    initial_state,
    make_evaluation,
    make_step,
    partition,
)

MODELS = ("lumen", "gpt", "ripple")
B, T, V = 4, 12, 31
RNG = np.random.default_rng(0)
TOKENS_BT = RNG.integers(0, V, (B, T + 1)).astype(np.int32)
INPUTS_BT, TARGETS_BT = TOKENS_BT[:, :-1], TOKENS_BT[:, 1:].copy()
TARGETS_BT[0, 2:] = TARGETS_BT[1, :5] = -1  # microbatches of unlike numbers of targets
# Little is to be gained here by optimising, and compiling is nearly all the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def run_of(model: str, *, optim: dict[str, Any] | None = None, accumulation=1, **fields):
    """A short run of a small model; Ripple without dropout unless it is asked for."""
    fields = ({"dropout": 0.0} if model == "ripple" else {}) | fields
    settings: dict[str, Any] = {"lr": 1e-2, "schedule": "constant", "clip": 0.1} | (optim or {})
    return TrainConfig(
        out=Path(),
        model=config_of(model, **fields),
        data=DataConfig(batch_size=B, sequence_length=T),
        optim=OptimConfig(**settings),
        accumulation=accumulation,
        loss_chunk=5,
        steps=100,
        seed=7,
    )


def state_of(config: TrainConfig) -> TrainState:
    """A first state of random parameters, whose buffers are its own."""
    params = {path: jnp.array(value) for path, value in random_arrays(config.model).items()}
    trained, _ = partition(params, config.trained_without)
    optimizer = build_optimizer(config.optim, config.steps, trained)
    return initial_state(params, optimizer, config.trained_without)


@functools.cache
def jitted(config: TrainConfig):
    """The compiled step, which does not donate here."""
    return jax.jit(make_step(config), compiler_options=QUICK)


def step(config: TrainConfig, state: TrainState, inputs_BT=INPUTS_BT, targets_BT=TARGETS_BT):
    """One update by a batch that is cut into the config's microbatches."""
    shape = (config.accumulation, -1, inputs_BT.shape[1])
    return jitted(config)(state, inputs_BT.reshape(shape), targets_BT.reshape(shape))


def same(state: Any, other: Any) -> bool:
    """Whether two trees are equal bit for bit."""
    return jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), state, other)
    )


def assert_same_update(found, expected, tolerance=2e-6) -> None:
    """Losses equal to rounding; gradients too, as Adam's moments show them before its division."""
    (state, metrics), (state_, metrics_) = found, expected
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], metrics_[name], rtol=tolerance)
    assert_near(state.optimizer[0].mu, state_.optimizer[0].mu, tolerance)
    assert_near(state.optimizer[0].nu, state_.optimizer[0].nu, tolerance)


def assert_near(found, expected, tolerance) -> None:
    """Each array by its size; one of rounding only, as the keys' bias has, by that of all."""
    assert found.keys() == expected.keys()
    sizes = {path: np.linalg.norm(np.float64(value)) for path, value in expected.items()}
    whole = np.linalg.norm(list(sizes.values()))
    for path, size in sizes.items():
        error = np.linalg.norm(np.float64(found[path]) - np.float64(expected[path]))
        assert error <= tolerance * size + 1e-7 * whole, path


@pytest.mark.parametrize("model", MODELS)
def test_accumulation_changes_the_update_by_rounding_only(model):
    whole = run_of(model)
    expected = step(whole, state_of(whole))
    assert expected[1]["tokens"] == (TARGETS_BT != -1).sum()
    for accumulation in (2, 4):
        config = replace(whole, accumulation=accumulation)
        found = step(config, state_of(config))
        assert_same_update(found, expected)
        assert found[1]["tokens"] == expected[1]["tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_update_is_that_of_the_pooled_batch(model):
    """The gradient from the whole logits, clipped and handed to the optimizer by hand."""
    config = run_of(model, accumulation=4)
    state = state_of(config)
    trained, fixed = partition(state.params, config.trained_without)

    def pooled(trained):
        logits_BTV = from_arrays(config.model, trained | fixed)(jnp.asarray(INPUTS_BT))
        kept_BT = TARGETS_BT != -1
        index_BT1 = np.where(kept_BT, TARGETS_BT, 0)[..., None]
        logp_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), index_BT1, -1)[..., 0]
        return -(logp_BT * kept_BT).sum() / kept_BT.sum()

    loss, gradient = jax.jit(jax.value_and_grad(pooled), compiler_options=QUICK)(trained)
    new, metrics = step(config, state)
    norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in gradient.values()))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm > 0.5  # the clip is active, and comes after the mean
    scale = 0.1 * 0.1 / (norm + 1e-6)
    clipped = {path: scale * np.float64(g) for path, g in gradient.items()}
    assert_near(new.optimizer[0].mu, clipped, 1e-5)
    assert metrics["learning_rate"] == np.float32(1e-2)
    assert (new.step, new.skipped, new.streak) == (1, 0, 0)
    for path, value in fixed.items():
        np.testing.assert_array_equal(new.params[path], value)


def test_mean_is_over_tokens_not_microbatches():
    """10 tokens of mean 2 and 100 of mean 4 give 3.8182 (and 3 if microbatches weighed alike)."""
    config = run_of("ripple", accumulation=2, use_absolute_pos_emb=False, attention_window=None)
    config = replace(config, data=DataConfig(batch_size=2, sequence_length=100))
    arrays = {path: np.zeros_like(w) for path, w in random_arrays(config.model).items()}
    # A constant norm output of (1, 0, 0, ...), so that the head's first row is the logits.
    arrays["final_norm.bias"][0] = 1.0
    p = np.full(V, (1 - np.exp(-2) - np.exp(-4)) / (V - 2))
    p[:2] = np.exp(-2), np.exp(-4)
    arrays["head"][0] = np.log(p)
    state = replace(state_of(config), params={n: jnp.asarray(w) for n, w in arrays.items()})
    targets_BT = np.full((2, 100), 1, np.int32)
    targets_BT[0] = -1
    targets_BT[0, 30:40] = 0
    _, metrics = step(config, state, np.zeros((2, 100), np.int32), targets_BT)
    assert metrics["tokens"] == 110
    assert float(metrics["loss"]) == pytest.approx(420 / 110, rel=1e-6)
    assert f"{float(metrics['loss']):.4f}" == "3.8182"


@pytest.mark.parametrize("model", MODELS)
def test_update_of_no_targets_has_zero_loss_and_gradient(model):
    config = run_of(model, optim={"weight_decay": 0.0}, accumulation=2)
    state = state_of(config)
    new, metrics = step(config, state, targets_BT=np.full_like(TARGETS_BT, -1))
    assert (metrics["loss"], metrics["grad_norm"], metrics["tokens"]) == (0, 0, 0)
    assert metrics["skipped"] == 0
    assert same(new.params, state.params)


def test_update_that_is_not_finite_changes_counters_only():
    config = run_of("gpt", optim={"schedule": "cosine", "warmup_steps": 10})
    state, first = step(config, state_of(config))
    bad_BT = INPUTS_BT.copy()
    bad_BT[1, 3] = V
    for count in (1, 2):
        after, metrics = step(config, state, inputs_BT=bad_BT)
        assert not np.isfinite(metrics["loss"])
        assert same((after.params, after.optimizer), (state.params, state.optimizer))
        assert (after.step, after.skipped, after.streak) == (1 + count, count, count)
        assert (metrics["skipped"], metrics["streak"]) == (count, count)
        np.testing.assert_allclose(metrics["learning_rate"], 1e-2 * 2 / 11, rtol=1e-6)
        state = after
    good, metrics = step(config, state)
    unskipped, expected = step(config, replace(state, step=jnp.int32(1), skipped=jnp.int32(0)))
    assert same((good.params, good.optimizer), (unskipped.params, unskipped.optimizer))
    assert not same(good.params, state.params)
    assert (good.step, good.skipped, good.streak) == (4, 2, 0)
    assert metrics["learning_rate"] == expected["learning_rate"]  # the schedule did not move
    np.testing.assert_allclose(first["learning_rate"], 1e-2 / 11, rtol=1e-6)


def test_gradient_that_is_not_finite_under_a_finite_loss_is_skipped():
    """Ripple's bias of 2e38 on an ignored target: the loss is finite and the square is not."""
    config = run_of("ripple")
    state = state_of(config)
    big = state.params["final_norm.scale"].at[0].set(1e30)
    state = replace(state, params=state.params | {"final_norm.scale": big})
    new, metrics = step(config, state)
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert (new.skipped, new.streak) == (1, 1)
    assert same((new.params, new.optimizer), (state.params, state.optimizer))


def test_dropout_is_a_function_of_seed_step_microbatch_and_layer():
    config = run_of("ripple", dropout=0.5, optim={"lr": 1e-30, "weight_decay": 0.0})
    state = state_of(config)

    def loss(config=config, state=state, **batch):
        return float(step(config, state, **batch)[1]["loss"])

    base = loss()
    assert loss() == base
    assert loss(state=state_of(config)) == base  # a restart
    others = {
        "step": loss(state=replace(state, step=jnp.int32(1))),
        "seed": loss(config=replace(config, seed=8)),
        "evaluation": loss(config=run_of("ripple", optim={"lr": 1e-30, "weight_decay": 0.0})),
    }
    assert len({base, *others.values()}) == 4
    # Both microbatches are the same rows: under one mask their mean would be one's own loss.
    twice = {"inputs_BT": INPUTS_BT[[2, 3, 2, 3]], "targets_BT": TARGETS_BT[[2, 3, 2, 3]]}
    one = {name: rows_BT[:2] for name, rows_BT in twice.items()}
    cut = replace(config, accumulation=2)
    assert loss(config=cut, **twice) != pytest.approx(loss(**one), rel=1e-4)


def test_dropout_of_each_layer_is_its_own():
    """With both layers alike, their masks are seen in what each adds to a constant stream."""
    config = run_of("ripple", dropout=0.5, use_absolute_pos_emb=False, bias=False).model
    arrays = {path: np.zeros_like(w) for path, w in random_arrays(config).items()}
    arrays["blocks.mlp.b_out"][:] = 1.0
    model = from_arrays(config, arrays)
    run = jax.jit(
        lambda key: model.activations(jnp.asarray(INPUTS_BT), key=key, every_layer=True)["block"],
        compiler_options=QUICK,
    )
    masks = []
    for key in (jax.random.key(0), jax.random.key(0), jax.random.key(1)):
        stream_LBTD = run(key)
        masks.append((stream_LBTD[0] > 0, (stream_LBTD[1] - stream_LBTD[0]) > 0))
    assert 0.4 < np.mean(masks[0][0]) < 0.6
    assert same(masks[0], masks[1])
    for one, other in ((masks[0][0], masks[0][1]), (masks[0][0], masks[2][0])):
        assert 0.4 < np.mean(one == other) < 0.6


def test_model_without_dropout_draws_no_numbers():
    for config in (run_of("gpt"), run_of("ripple")):
        tokens = jax.ShapeDtypeStruct((1, B, T), jnp.int32)
        text = str(jax.make_jaxpr(make_step(config))(jax.eval_shape(lambda c=config: state_of(c)),
                                                     tokens, tokens))  # fmt: skip
        assert "random_bits" not in text


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_leaf_of_a_donated_state_is_written_in_place(name):
    for config in (run_of("ripple", attention_window=None, optim={"name": name}), run_of("gpt")):
        state = state_of(config)
        lowered = jax.jit(make_step(config), donate_argnums=0, compiler_options=QUICK).lower(
            state, INPUTS_BT[None], TARGETS_BT[None]
        )
        header = lowered.compile().as_text().split("\n", 1)[0]
        assert header.count("may-alias") + header.count("must-alias") == len(jax.tree.leaves(state))


def test_step_takes_and_gives_states_of_one_structure():
    config = run_of("ripple", attention_window=None)
    state = state_of(config)
    new, _ = step(config, state)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(buffers)) == len(buffers)  # or donating the state would fail


def test_ripples_decay_is_frozen_exactly_where_torchs_is():
    """All parameters are decayed; at T <= window the decay is not, for torch never touches it."""
    decay = "blocks.attention.decay"
    optim = {"decay": "all", "weight_decay": 0.1}
    for window, mode, frozen in (
        (T, "as_torch", True), (T - 1, "as_torch", False),
        (T, "always", False),
    ):  # fmt: skip
        config = run_of("ripple", attention_window=window, decay_gradient=mode, optim=optim)
        state = state_of(config)
        new, _ = step(config, state)
        assert (decay in new.optimizer[0].mu) == (not frozen)
        moved = np.asarray(new.params[decay] != state.params[decay])
        assert not moved.any() if frozen else moved.all()
        # with no gradient at all, weight decay alone moves what is trained
        new, _ = step(config, state, targets_BT=np.full_like(TARGETS_BT, -1))
        factor = 1.0 if frozen else 1 - 1e-2 * 0.1
        np.testing.assert_allclose(new.params[decay], factor * state.params[decay], rtol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_remat_and_unroll_change_the_update_by_rounding_only(model):
    config = run_of(model, accumulation=2, **({"dropout": 0.3} if model == "ripple" else {}))
    expected = step(config, state_of(config))
    for fields in ({"remat": "dots"}, {"remat": "full", "unroll": 2}):
        variant = replace(config, model=replace(config.model, **fields))
        assert_same_update(step(variant, state_of(variant)), expected)


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_computes_with_float32_parameters_and_moments(model):
    config = run_of(model, dtype="bfloat16", accumulation=2, optim={"lr": 1e-6})
    state = state_of(config)
    new, metrics = step(config, state)
    for leaf in jax.tree.leaves((new.params, new.optimizer)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32
    wide = run_of(model, accumulation=2)
    _, expected = step(wide, state)
    assert metrics["loss"] != expected["loss"]
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=0.05)
    # a step of 1e-6 would be lost in bfloat16
    for path in ("embedding", "blocks.attention.wq"):
        assert (np.asarray(new.params[path]) != np.asarray(state.params[path])).mean() > 0.5


@pytest.mark.parametrize("model", MODELS)
def test_evaluation_is_the_sum_without_dropout(model):
    config = run_of(model, **({"dropout": 0.5} if model == "ripple" else {}))
    params = state_of(config).params
    evaluate = jax.jit(make_evaluation(config), compiler_options=QUICK)
    without = run_of(model)
    _, metrics = step(without, state_of(without))
    for microbatches in (1, 2):
        shape = (microbatches, -1, INPUTS_BT.shape[1])
        total, count = evaluate(params, INPUTS_BT.reshape(shape), TARGETS_BT.reshape(shape))
        assert count == (TARGETS_BT != -1).sum()
        np.testing.assert_allclose(total / count, metrics["loss"], rtol=1e-6)


def test_evaluation_holds_one_microbatch_at_a_time():
    config = run_of("gpt")
    params = state_of(config).params
    scores = jax.ShapeDtypeStruct((4, 1, 12), np.int32)
    text = str(jax.make_jaxpr(make_evaluation(config))(params, scores, scores))
    heads = config.model.n_head
    kv = config.model.n_kv_head
    assert f"[1,{kv},{heads // kv},12,12]" in text
    assert f"[4,{kv},{heads // kv},12,12]" not in text


def test_checksum_depends_on_every_value_and_its_place():
    base = int(checksum(INPUTS_BT, TARGETS_BT))
    assert int(jax.jit(checksum)(INPUTS_BT, TARGETS_BT)) == base
    seen = {base, int(checksum(TARGETS_BT, INPUTS_BT)), int(checksum(INPUTS_BT))}
    assert len(seen) == 3
    for place in range(INPUTS_BT.size):
        for array in (0, 1):
            arrays = [INPUTS_BT.copy(), TARGETS_BT.copy()]
            arrays[array].reshape(-1)[place] += 1
            seen.add(int(checksum(*arrays)))
    assert len(seen) == 3 + 2 * INPUTS_BT.size
    swapped = 0
    for place in range(INPUTS_BT.size - 1):
        arrays = [INPUTS_BT.copy(), TARGETS_BT]
        flat = arrays[0].reshape(-1)
        flat[[place, place + 1]] = flat[[place + 1, place]]
        if flat[place] != flat[place + 1]:
            seen.add(int(checksum(*arrays)))
            swapped += 1
    assert swapped > 30
    assert len(seen) == 3 + 2 * INPUTS_BT.size + swapped


def test_checksum_sees_all_bits(x64):
    for array in (np.zeros(3, np.uint8), np.zeros(3, np.uint16), np.zeros(3, np.int32),
                  np.zeros(3, np.float32), np.zeros(3, np.int64)):  # fmt: skip
        bits = 8 * array.itemsize
        view = array.view(f"u{array.itemsize}")
        seen = {int(checksum(jnp.asarray(array)))}
        for bit in range(bits):
            view[1] = 1 << bit
            seen.add(int(checksum(jnp.asarray(array))))
        assert len(seen) == bits + 1, array.dtype


def test_step_reports_its_batch():
    config = run_of("gpt", accumulation=2)
    _, metrics = step(config, state_of(config))
    assert metrics["batch"] == checksum(INPUTS_BT, TARGETS_BT)
    assert metrics["batch"].dtype == jnp.uint32
