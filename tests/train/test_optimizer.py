"""The optimizers against torch and against the formulas of the originals' recipes."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from convert.counterparts import build
from convert.rules import leaves
from convert.tables import TABLES
from jaxslm.models import MODELS, model_name
from jaxslm.weights import abstract_parameters
from tests.convert.subjects import config_of
from train.config import RECIPES, OptimConfig
from train.optimizer import (
    build_optimizer,
    clip_scale,
    is_decayed,
    learning_rate,
    moments_of,
    muon_numbers,
    scale_by_torch_adam,
    with_moments,
)

VARIANTS = [
    config_of("lumen"),
    config_of("lumen", num_kv_heads=1),
    config_of("gpt"),
    config_of("ripple"),
    config_of("ripple", bias=False, use_absolute_pos_emb=False),
]
STACKED = {
    "embedding": (5, 4),
    "blocks.attention.wq": (2, 4, 2, 2),
    "blocks.attention.decay": (2, 2),
    "blocks.mlp_norm.scale": (2, 4),
    "blocks.mlp.b_in": (2, 2, 3),
}
DECAYED = ("embedding", "blocks.attention.wq")


def torch_and_ours(config: OptimConfig, dtype: str, steps: int):
    """Parameters after each of some steps on the same random gradients of very unlike sizes."""
    rng = np.random.default_rng(0)
    start = {p: rng.standard_normal(s).astype("float32").astype(dtype) for p, s in STACKED.items()}
    tensors = {path: torch.tensor(value, requires_grad=True) for path, value in start.items()}
    groups = [
        {"params": [t for p, t in tensors.items() if is_decayed(p, config)],
         "weight_decay": config.weight_decay},
        {"params": [t for p, t in tensors.items() if not is_decayed(p, config)],
         "weight_decay": 0.0},
    ]  # fmt: skip
    reference = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr, betas=config.betas, eps=config.eps, foreach=False,
    )  # fmt: skip
    schedule = learning_rate(config, steps)
    params = {path: jnp.asarray(value) for path, value in start.items()}
    optimizer = build_optimizer(config, steps, params)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(steps):
        for group in reference.param_groups:
            group["lr"] = float(schedule(step))
        gradient = {}
        for path, tensor in tensors.items():
            size = 10.0 ** rng.uniform(-9, 2, tensor.shape)
            drawn = size * rng.standard_normal(tensor.shape)
            gradient[path] = drawn.astype("float32").astype(dtype)  # the same in both dtypes
            tensor.grad = torch.tensor(gradient[path])
        reference.step()
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        yield (
            {path: tensor.detach().numpy().copy() for path, tensor in tensors.items()},
            {path: np.asarray(value) for path, value in params.items()},
        )
    torch_state = {path: reference.state[tensor] for path, tensor in tensors.items()}
    first, second, count = moments_of(state)
    assert count == steps
    tolerance = {"rtol": 1e-12, "atol": 0} if dtype == "float64" else {"rtol": 2e-6, "atol": 1e-7}
    for path, slots in torch_state.items():
        assert first[path].dtype == second[path].dtype == dtype
        np.testing.assert_allclose(first[path], slots["exp_avg"].numpy(), **tolerance)
        np.testing.assert_allclose(second[path], slots["exp_avg_sq"].numpy(), **tolerance)


RECIPE = OptimConfig(
    lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=10, final_lr=1e-3, clip=None
)


@pytest.mark.parametrize(
    "config",
    [
        RECIPE,
        replace(RECIPE, decay="all", betas=(0.9, 0.99), schedule="constant", warmup_steps=0),
        replace(RECIPE, betas=(0.0, 0.0), eps=1e-3, weight_decay=0.0),
    ],
)
def test_adamw_is_torchs_step_for_step_in_float64(config, x64):
    for expected, found in torch_and_ours(config, "float64", 50):
        for path, value in expected.items():
            assert found[path].dtype == np.float64
            scale = np.abs(value).max()
            np.testing.assert_allclose(found[path], value, rtol=1e-12, atol=1e-12 * scale)


def test_adamw_in_float32_is_as_near_to_float64_as_torchs():
    *_, (torch32, ours32) = torch_and_ours(RECIPE, "float32", 50)
    with jax.enable_x64(True):
        *_, (exact, _) = torch_and_ours(RECIPE, "float64", 50)
    for path, value in exact.items():
        assert ours32[path].dtype == np.float32
        ours, torchs = (np.abs(found[path] - value).max() for found in (ours32, torch32))
        assert ours < 2 * torchs + 2**-23 * np.abs(value).max(), path


@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: type(config).__name__)
def test_matrices_are_the_tensors_of_two_dimensions_in_torch(config):
    shapes = abstract_parameters(config)
    table = TABLES[model_name(config)]
    matrices, everything = OptimConfig(decay="matrices"), OptimConfig(decay="all")
    tensors = build(config).state_dict()
    rules = leaves(table, config)
    assert {leaf.path for leaf in rules} == shapes.keys()
    for leaf in rules:
        (rank,) = {tensors[part.key].ndim for part in leaf.parts}
        assert is_decayed(leaf.path, matrices) == (rank >= 2), leaf.path
        assert is_decayed(leaf.path, everything)


def test_decay_reaches_the_masked_parameters_and_no_other():
    config = OptimConfig(schedule="constant", lr=0.5, weight_decay=0.25)
    params = {path: jnp.ones(shape) for path, shape in STACKED.items()}
    zero = jax.tree.map(jnp.zeros_like, params)
    for decay, expected in (("matrices", DECAYED), ("all", tuple(STACKED))):
        optimizer = build_optimizer(replace(config, decay=decay), 1, params)
        updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), params)
        for path, update in updates.items():
            np.testing.assert_array_equal(update, -0.125 if path in expected else 0.0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 100, 100_000])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)])
def test_bias_correction_is_exact_to_float32(count, betas):
    """With moments (0.25, 0.5) before update `count`, and gradient 0."""
    b1, b2 = betas
    adam = scale_by_torch_adam(b1, b2, 0.0)
    params = {"w": jnp.ones(1)}
    first, second = {"w": jnp.full(1, 0.25)}, {"w": jnp.full(1, 0.5)}
    state = with_moments(adam.init(params), first, second, lambda _: jnp.int32(count - 1))
    update, _ = adam.update({"w": jnp.zeros(1)}, state)
    expected = (b1 * 0.25 / (1 - b1**count)) / math.sqrt(b2 * 0.5 / (1 - b2**count))
    np.testing.assert_allclose(update["w"], expected, rtol=4 * 2**-24)


def test_moments_leave_and_enter_the_state():
    params = {path: jnp.ones(shape) for path, shape in STACKED.items()}
    optimizer = build_optimizer(RECIPE, 50, params)
    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    first, second = (
        {path: jnp.asarray(rng.random(shape), jnp.float32) for path, shape in STACKED.items()}
        for _ in range(2)
    )
    state = with_moments(state, first, second, lambda old: jnp.full_like(old, 7))
    assert moments_of(state) == (first, second, 7)
    counts = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 0]
    assert [int(count) for count in counts] == [7, 7]  # Adam's and the schedule's
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, state, params)
    m, v = 0.9 * first["blocks.mlp_norm.scale"], 0.95 * second["blocks.mlp_norm.scale"]
    adam = (m / (1 - 0.9**8)) / (np.sqrt(v / (1 - 0.95**8)) + 1e-8)
    rate = 1e-2 * 8 / 11
    np.testing.assert_allclose(updates["blocks.mlp_norm.scale"], -rate * adam, rtol=1e-6)


def test_moments_of_another_optimizer_are_refused():
    params = {path: jnp.ones(shape) for path, shape in STACKED.items()}
    optimizer = build_optimizer(replace(RECIPE, name="muon"), 50, params)
    with pytest.raises(ValueError, match="only AdamW's state can leave a run"):
        moments_of(optimizer.init(params))


@pytest.mark.parametrize("size", [0.0, 1e-7, 0.3, 1.0, 40.0])
@pytest.mark.parametrize("clip", [1.0, 1e-6])
def test_clipping_is_torchs(size, clip, x64):
    tensors = [torch.zeros(3, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)]
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(7)
    gradient = size * direction / np.linalg.norm(direction)
    for tensor, g in zip(tensors, (gradient[:3], gradient[3:]), strict=True):
        tensor.grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(tensors, clip)
    scale = clip_scale(jnp.asarray(norm.item()), clip)
    clipped = np.concatenate([tensor.grad.numpy() for tensor in tensors])
    np.testing.assert_allclose(scale * gradient, clipped, rtol=1e-14, atol=0)
    assert clip_scale(jnp.asarray(norm.item()), None) == 1.0


def nanogpt_rate(step, peak, final, warmup, length):
    """train.py of nanoGPT, get_lr."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step > length:
        return final
    ratio = (step - warmup) / (length - warmup)
    return final + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (peak - final)


def build_nanogpt_rate(step, peak, final, warmup, length):
    """train_gpt2.py of build-nanogpt, get_lr."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if step > length:
        return final
    ratio = (step - warmup) / (length - warmup)
    return final + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (peak - final)


def wsd_rate(step, peak, final, warmup, length, steps):
    """Constant after nanoGPT's warm-up, then linear over the last `length` updates."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step < steps - length:
        return peak
    return peak - (peak - final) * (step - (steps - length)) / length


@pytest.mark.parametrize(
    ("warmup", "formula"), [("nanogpt", nanogpt_rate), ("build-nanogpt", build_nanogpt_rate)]
)
@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
@pytest.mark.parametrize("decay_steps", [None, 600])
def test_cosine_is_the_originals_at_every_step(warmup, formula, warmup_steps, decay_steps, x64):
    config = OptimConfig(
        lr=1e-3, final_lr=1e-4, warmup=warmup, warmup_steps=warmup_steps, decay_steps=decay_steps
    )
    found = jax.vmap(learning_rate(config, 1000))(jnp.arange(1003, dtype=jnp.int32))
    length = decay_steps or 1000
    expected = [formula(step, 1e-3, 1e-4, warmup_steps, length) for step in range(1003)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert found[length + 1] == pytest.approx(1e-4, rel=1e-14)


def test_first_rates_are_those_of_the_issue():
    for peak, warmup, kind, first in (
        (1e-3, 100, "nanogpt", "9.90e-06"), (6e-4, 715, "build-nanogpt", "8.39e-07"),
    ):  # fmt: skip
        config = OptimConfig(lr=peak, warmup_steps=warmup, warmup=kind)
        assert f"{float(learning_rate(config, 2000)(0)):.2e}" == first
        assert f"{float(learning_rate(config, 2000)(jnp.int32(0))):.2e}" == first
    gpt = learning_rate(RECIPES["gpt"], 19073)
    assert float(gpt(714)) == pytest.approx(6e-4)
    assert float(gpt(715)) == pytest.approx(6e-4)
    assert float(gpt(19072)) == pytest.approx(6e-5, rel=1e-5)


@pytest.mark.parametrize("decay_steps", [None, 30])
def test_wsd_is_constant_then_linear(decay_steps, x64):
    config = OptimConfig(
        schedule="wsd", lr=1e-3, final_lr=1e-4, warmup_steps=20, decay_steps=decay_steps
    )
    found = jax.vmap(learning_rate(config, 200))(jnp.arange(205))
    expected = [wsd_rate(step, 1e-3, 1e-4, 20, decay_steps or 20, 200) for step in range(200)]
    np.testing.assert_allclose(found[:200], expected, rtol=1e-12)
    np.testing.assert_allclose(found[200:], 1e-4, rtol=1e-12)


def test_constant_stays_and_may_warm_up():
    config = OptimConfig(schedule="constant", lr=1e-3, warmup="build-nanogpt")
    assert [float(learning_rate(config, 5)(step)) for step in (0, 4, 99)] == [
        pytest.approx(1e-3)
    ] * 3
    warm = replace(config, warmup_steps=4)
    rates = [float(learning_rate(warm, 5)(step)) for step in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_schedule_that_does_not_fit_is_refused():
    cosine = OptimConfig(warmup_steps=100)
    with pytest.raises(ValueError, match=r"cosine over 100 steps .* warm-up of 100: set"):
        learning_rate(cosine, 100)
    learning_rate(cosine, 101)
    with pytest.raises(ValueError, match=r"cosine over 50 steps .* warm-up of 100: set"):
        build_optimizer(replace(cosine, decay_steps=50), 1000, STACKED)
    wsd = OptimConfig(schedule="wsd", warmup_steps=60, decay_steps=41)
    with pytest.raises(ValueError, match=r"warm-up of 60 and decay of 41 .* into 100 steps: set"):
        learning_rate(wsd, 100)
    learning_rate(wsd, 101)


def test_peak_in_place_of_lr_scales_the_whole_schedule():
    config = OptimConfig(lr=1e-3, final_lr=1e-4, warmup_steps=3)
    one, other = learning_rate(config, 10), learning_rate(config, 10, peak=2e-2)
    steps = jnp.arange(12)
    np.testing.assert_allclose(jax.vmap(other)(steps), 20 * jax.vmap(one)(steps), rtol=1e-6)


# Muon: the matrix of a layer as torch has it, transposed to [in, out].
UNSTACKED = {
    "blocks.attention.wq": lambda w: w.reshape(4, 6),  # D N H -> D, N H
    "blocks.attention.wk": lambda w: w.reshape(4, 3),
    "blocks.attention.wv": lambda w: w.reshape(4, 3),
    "blocks.attention.wo": lambda w: w.reshape(6, 4),  # N H D -> N H, D
    "blocks.mlp.w_gate": lambda w: w,
    "blocks.mlp.w_up": lambda w: w,
    "blocks.mlp.w_down": lambda w: w,
    "blocks.mlp.w_in": lambda w: w.reshape(4, 10),  # D 2 F -> D, 2 F
    "blocks.mlp.w_out": lambda w: w,
}
MUON_SHAPES = {
    "blocks.attention.wq": (2, 4, 2, 3), "blocks.attention.wk": (2, 4, 1, 3),
    "blocks.attention.wv": (2, 4, 1, 3), "blocks.attention.wo": (2, 2, 3, 4),
    "blocks.mlp.w_gate": (2, 4, 5), "blocks.mlp.w_up": (2, 4, 5), "blocks.mlp.w_down": (2, 5, 4),
    "blocks.mlp.w_in": (2, 4, 2, 5), "blocks.mlp.w_out": (2, 5, 4),
}  # fmt: skip
REST = {"embedding": (7, 4), "head": (4, 7), "final_norm.scale": (4,), "blocks.mlp.b_in": (2, 2, 5)}


def newton_schulz(g: np.ndarray) -> np.ndarray:
    """Keller Jordan's: five steps of the quintic on the matrix of Frobenius norm 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / np.linalg.norm(g)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_muon_orthogonalises_each_layers_matrix_and_leaves_adamw_the_rest(x64):
    config = OptimConfig(
        name="muon", schedule="constant", lr=1e-3, muon_lr=0.02, weight_decay=0.1, eps=1e-8
    )
    rng = np.random.default_rng(0)
    shapes = MUON_SHAPES | REST
    params = {path: jnp.asarray(rng.standard_normal(shape)) for path, shape in shapes.items()}
    optimizer = build_optimizer(config, 10, params)
    rest = {path: params[path] for path in REST}
    adamw = build_optimizer(replace(config, name="adamw"), 10, rest)
    state, rest_state = optimizer.init(params), adamw.init(rest)
    update, rest_update = jax.jit(optimizer.update), jax.jit(adamw.update)
    momentum = {path: np.zeros(shape) for path, shape in MUON_SHAPES.items()}
    for count in (1, 2, 3):
        gradient = {path: rng.standard_normal(shape) for path, shape in shapes.items()}
        updates, state = update(gradient, state, params)
        expected, rest_state = rest_update({p: gradient[p] for p in REST}, rest_state, rest)
        for path, value in expected.items():
            np.testing.assert_allclose(updates[path], value, rtol=1e-12, err_msg=path)
        for path, shape in MUON_SHAPES.items():
            momentum[path] = 0.95 * momentum[path] + 0.05 * gradient[path]
            ahead = 0.95 * momentum[path] / (1 - 0.95 ** (count + 1)) + 0.05 * gradient[path] / (
                1 - 0.95**count
            )
            for layer in range(2):
                matrix = UNSTACKED[path](ahead[layer])
                rows, columns = matrix.shape
                step = newton_schulz(matrix) * math.sqrt(max(1, columns / rows))
                step = step.reshape(shape[1:]) + 0.1 * np.asarray(params[path][layer])
                np.testing.assert_allclose(
                    updates[path][layer], -0.02 * step, rtol=1e-6, atol=1e-9, err_msg=path
                )


def test_muon_takes_every_matrix_of_the_layers_and_nothing_else():
    for config in VARIANTS:
        for path, leaf in abstract_parameters(config).items():
            matrix = path.startswith("blocks.") and is_decayed(path, OptimConfig())
            numbers = muon_numbers(path)
            assert (numbers is not None) == matrix, path
            if numbers is not None:  # all axes but the layers'
                axes = (*numbers.reduction_axis, *numbers.output_axis)
                assert sorted(axes) == list(range(1, len(leaf.shape))), path


@pytest.mark.parametrize("model", MODELS)
def test_muon_builds_for_every_model(model):
    shapes = abstract_parameters(config_of(model))
    optimizer = build_optimizer(OptimConfig(name="muon"), 10, shapes)

    def both(params):
        state = optimizer.init(params)
        return optimizer.update(params, state, params)

    updates, _ = jax.eval_shape(both, shapes)
    assert {p: u.shape for p, u in updates.items()} == {p: s.shape for p, s in shapes.items()}
    assert {u.dtype for u in updates.values()} == {jnp.dtype("float32")}
