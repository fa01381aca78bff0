"""A run on a mesh of eight fake devices is the run on one device.

JAX makes fake devices only when it starts, so the first test runs the others in a process of their
own.
"""

import functools
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.children import on_eight_devices, pass_on_eight_devices
from tests.convert.subjects import config_of
from tests.jaxslm.support import random_arrays
from train.config import DataConfig, MeshConfig, OptimConfig, TrainConfig
from train.optimizer import build_optimizer
from train.setup import make_layout
from train.step import checksum, initial_state, make_step, partition

A, B, T = 2, 16, 12
MESHES = {"8x1x1": (8, 1, 1), "1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2), "1x2x4": (1, 2, 4)}
MODELS = {
    "lumen": config_of("lumen", vocab_size=32),  # 2 key-value heads over tensor 4 are replicated
    "gpt": config_of("gpt", n_kv_head=4),  # and so is a vocabulary of 31
    "ripple": config_of("ripple", vocab_size=32, n_embd=24, n_head=4, dropout=0.2),
}
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def test_a_mesh_of_eight_devices_is_one_device():
    pass_on_eight_devices(__file__, "not test_a_mesh_of_eight", 35)


def run_of(model: str, sizes: tuple[int, int, int]) -> TrainConfig:
    """Two microbatches an update, dropout where there is one.

    The keys' bias has no gradient but rounding, of which Adam would make a full step at its eps of
    1e-8.
    """
    return TrainConfig(
        out=Path(),
        model=MODELS[model],
        data=DataConfig(batch_size=B, sequence_length=T),
        optim=OptimConfig(lr=1e-2, schedule="constant", eps=1e-3, clip=0.5),
        mesh=MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]),
        accumulation=A,
        loss_chunk=5,
    )


@functools.cache
def batches(vocab_size: int) -> np.ndarray:
    """Inputs and targets of three updates, [3, 2, A, B / A, T]; some targets do not count."""
    rng = np.random.default_rng(0)
    found = rng.integers(0, vocab_size, (3, 2, A, B // A, T)).astype(np.int32)
    found[:, 1][rng.random((3, A, B // A, T)) < 0.3] = -1
    return found


def first_state(config: TrainConfig):
    params = {path: jnp.array(value) for path, value in random_arrays(config.model).items()}
    trained, _ = partition(params, config.trained_without)
    optimizer = build_optimizer(config.optim, config.steps, trained)
    return initial_state(params, optimizer, config.trained_without), optimizer


def three_updates(step, state, vocab_size, sharding=None):
    """The state after three updates, and each one's metrics."""
    found = []
    for inputs, targets in batches(vocab_size):
        if sharding is not None:
            inputs, targets = (jax.device_put(rows, sharding) for rows in (inputs, targets))
        state, metrics = step(state, inputs, targets)
        found.append(jax.device_get(metrics))
    return state, found


@functools.cache
def on_one_device(model: str):
    """The first state, the last, and metrics, without any mesh."""
    config = run_of(model, (1, 1, 1))
    state, _ = first_state(config)
    step = jax.jit(make_step(config), compiler_options=QUICK)
    last, metrics = three_updates(step, state, config.model.vocab_size)
    return jax.device_get(state), jax.device_get(last), metrics


@functools.cache
def on_mesh(model: str, sizes: tuple[int, int, int]):
    """The last state on its devices, metrics, layout and the compiled program's text."""
    config = run_of(model, sizes)
    state, optimizer = first_state(config)
    layout = make_layout(config, optimizer)
    places = jax.tree.map(lambda leaf: leaf.sharding, layout.state)
    batch = jax.ShapeDtypeStruct((A, B // A, T), np.int32, sharding=layout.batch)
    jitted = jax.jit(
        make_step(config), donate_argnums=0, out_shardings=(places, None), compiler_options=QUICK
    )
    with jax.set_mesh(layout.mesh):
        step = jitted.lower(layout.state, batch, batch).compile()
        vocab_size = config.model.vocab_size
        last, metrics = three_updates(step, jax.device_put(state, places), vocab_size, layout.batch)
    return last, metrics, layout, step.as_text()


@on_eight_devices
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_updates_are_those_of_one_device(model, sizes):
    """Losses and parameters to 1e-6; what was added to parameters, and moments, to 1e-5.

    A gradient's sums cancel, so that float32 keeps fewer digits of it than of the loss.
    """
    assert jax.device_count() == 8
    first, expected, expected_metrics = on_one_device(model)
    last, metrics, _, _ = on_mesh(model, sizes)
    for found, wanted in zip(metrics, expected_metrics, strict=True):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6, err_msg=name)
        for name in ("tokens", "batch", "learning_rate", "skipped", "streak"):
            assert found[name] == wanted[name], name
    last = jax.device_get(last)
    for path, value in expected.params.items():
        error = np.linalg.norm(last.params[path] - value)
        assert error <= 1e-6 * np.linalg.norm(value), path
    added, expected_added = (
        {path: np.float64(value) - first.params[path] for path, value in state.params.items()}
        for state in (last, expected)
    )
    for found, wanted in (
        (added, expected_added),
        (last.optimizer[0].mu, expected.optimizer[0].mu),
        (last.optimizer[0].nu, expected.optimizer[0].nu),
    ):
        sizes_of = {path: np.linalg.norm(np.float64(value)) for path, value in wanted.items()}
        whole = np.linalg.norm(list(sizes_of.values()))
        for path, size in sizes_of.items():
            error = np.linalg.norm(np.float64(found[path]) - wanted[path])
            assert error <= 1e-5 * size + 1e-6 * whole, path


@on_eight_devices
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_parameters_and_moments_lie_split(model, sizes):
    last, _, layout, _ = on_mesh(model, sizes)
    _, fsdp, tensor = sizes
    tables = [last.params, last.optimizer[0].mu, last.optimizer[0].nu]
    noted = {note.split()[0] for note in layout.notes}
    for table in tables:
        for path, value in table.items():
            parts = {shard.data.size for shard in value.addressable_shards}
            assert len(value.addressable_shards) == 8
            matrix = ".w" in path or path in ("embedding", "head")
            if matrix and path not in noted:
                assert parts == {value.size // (fsdp * tensor)}, path
            elif path == "position_embedding" or matrix:  # a noted one's vocabulary is whole
                assert parts == {value.size // fsdp}, path
            else:
                biases = ("bq", "bk", "bv", "b_in", "decay")
                cut = tensor if path.rpartition(".")[2] in biases else 1
                assert parts == {value.size // cut}, path
    assert {leaf.dtype for leaf in jax.tree.leaves(tables)} == {jnp.dtype("float32")}


@on_eight_devices
def test_what_cannot_be_split_is_noted():
    assert on_mesh("gpt", (8, 1, 1))[2].notes == ()
    words = on_mesh("gpt", (2, 2, 2))[2].notes_in_words()
    assert words == [
        "replicated, because it cannot be split: embedding dimension 0 of (31, 16): 31 over "
        "tensor 2"
    ]
    notes = on_mesh("lumen", (1, 2, 4))[2].notes
    assert [note.split(": ")[1] for note in notes] == ["2 over tensor 4"] * 2


def gathered(text: str) -> set[tuple[int, ...]]:
    """Shapes of float arrays that the program gathers."""
    shapes = re.findall(r"f32\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
    return {tuple(map(int, shape.split(","))) for shape in shapes}


@on_eight_devices
@pytest.mark.parametrize("model", MODELS)
def test_program_gathers_what_fsdp_splits_and_nothing_under_data(model):
    data, fsdp = (on_mesh(model, sizes)[3] for sizes in ((8, 1, 1), (1, 8, 1)))
    assert gathered(data) == set()
    assert "all-reduce" in data
    assert gathered(fsdp)
    assert "reduce-scatter" in fsdp or "all-reduce" in fsdp
    # The layers' matrices are gathered a layer at a time, inside the loop over layers.
    stacked = {p.shape for p in random_arrays(MODELS[model]).values() if p.ndim > 2}
    assert not gathered(fsdp) & stacked


@on_eight_devices
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_batch_lies_split_and_its_checksum_is_the_same_on_any_mesh(sizes):
    rows = batches(31)[0, 0]
    config = run_of("gpt", sizes)
    layout = make_layout(config, first_state(config)[1])
    split = jax.device_put(rows, layout.batch)
    shape = (A, B // A // (sizes[0] * sizes[1]), T)
    assert {shard.data.shape for shard in split.addressable_shards} == {shape}
    assert jax.jit(checksum)(split) == checksum(rows)


@on_eight_devices
def test_state_is_written_in_place_on_a_mesh():
    last, _, _, text = on_mesh("ripple", (2, 2, 2))
    assert text.split("\n", 1)[0].count("-alias)") == len(jax.tree.leaves(last))


@on_eight_devices
def test_batch_that_does_not_divide_says_which_sizes_would():
    def layout(batch_size, accumulation, sizes):
        config = replace(
            run_of("gpt", sizes),
            accumulation=accumulation,
            data=DataConfig(batch_size=batch_size, sequence_length=T),
        )
        return make_layout(config, first_state(config)[1])

    with pytest.raises(
        ValueError,
        match=r"data.batch_size 20 in 2 microbatches of 10 cannot be split over data 4 x fsdp 2 "
        r"devices: it must be a multiple of 16, such as 16, 32",
    ):
        layout(20, 2, (4, 2, 1))
    with pytest.raises(ValueError, match=r"multiple of 8, such as 8$"):
        layout(4, 1, (1, 8, 1))
    assert layout(4, 1, (1, 2, 4)).mesh.size == 8
    assert layout(16, 2, (-1, 2, 1)).mesh.shape["data"] == 4


@on_eight_devices
def test_muon_runs_on_a_mesh_as_on_one_device():
    """Its matrices are orthogonalised whole: losses after two updates agree."""
    losses = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        config = run_of("gpt", (2, 2, 2))
        config = replace(config, optim=replace(config.optim, name="muon"))
        state, optimizer = first_state(config)
        if sizes == (1, 1, 1):
            step = jax.jit(make_step(config), compiler_options=QUICK)
            _, metrics = three_updates(step, state, 31)
        else:
            layout = make_layout(config, optimizer)
            places = jax.tree.map(lambda leaf: leaf.sharding, layout.state)
            step = jax.jit(
                make_step(config), out_shardings=(places, None), compiler_options=QUICK
            )  # fmt: skip
            with jax.set_mesh(layout.mesh):
                state = jax.device_put(state, places)
                last, metrics = three_updates(step, state, 31, layout.batch)
            momentum = last.optimizer.inner_states["muon"]
            wq = last.params["blocks.attention.wq"]
            assert {s.data.size for s in wq.addressable_shards} == {wq.size // 4}
            sizes_of = {
                shard.data.size
                for leaf in jax.tree.leaves(momentum)
                if leaf.shape == wq.shape
                for shard in leaf.addressable_shards
            }
            assert sizes_of == {wq.size // 4}
        losses.append([m["loss"] for m in metrics])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
