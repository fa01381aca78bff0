"""Checkpoints: what is kept, what damage is seen, what can be read from them."""

import contextlib
import errno
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.runs import small_config
from train.checkpoints import CheckpointError, Checkpoints
from train.config import CheckpointConfig
from train.optimizer import build_optimizer
from train.setup import make_layout, new_state

# A read that fails leaves coroutines of orbax behind, which warn when they are collected.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.usefixtures("collected"),
]


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    return _layout(tmp_path_factory.mktemp("layout"))


def _layout(room, **optim):
    config = small_config(room)
    config = replace(config, optim=replace(config.optim, **optim))
    optimizer = build_optimizer(config.optim, config.steps, trained(config))
    layout = make_layout(config, optimizer)
    state, _ = new_state(config, optimizer, layout)
    return layout, state


def trained(config):
    from jaxslm.weights import abstract_parameters

    return sorted(abstract_parameters(config.model).keys() - set(config.trained_without))


def saved(room, state, steps, config=CheckpointConfig(keep_last=2), losses=()):  # noqa: B008
    room.mkdir(exist_ok=True)
    checkpoints = Checkpoints(room, config)
    for number, step in enumerate(steps):
        loss = losses[number] if losses else None
        checkpoints.save(replace(state, step=jnp.int32(step)), {"of": step}, val_loss=loss)
    checkpoints.wait()
    return checkpoints


@pytest.mark.parametrize(
    ("config", "losses", "kept"),
    [
        (CheckpointConfig(keep_last=2, keep_best=0), [], [6, 5]),
        (CheckpointConfig(keep_last=1, keep_best=0, keep_every=2), [], [6, 4, 2]),
        (CheckpointConfig(keep_last=1, keep_best=2), [5.0, 1.0, 3.0, 2.0, 4.0, 6.0], [6, 4, 2]),
        (CheckpointConfig(keep_last=1, keep_best=1), [None, 2.0, 1.0, None, 3.0, None], [6, 3]),
    ],
)
def test_kept_are_the_last_the_best_and_every_nth(layout, tmp_path, config, losses, kept):
    checkpoints = saved(tmp_path / "run", layout[1], range(1, 7), config, losses)
    assert checkpoints.steps() == kept
    assert Checkpoints(tmp_path / "run").steps() == kept


def test_best_stays_the_best_after_a_restart_and_a_loss_that_is_no_number(layout, tmp_path):
    config = CheckpointConfig(keep_last=1, keep_best=1)
    saved(tmp_path / "run", layout[1], [1, 2], config, [1.0, 3.0]).close()
    checkpoints = saved(tmp_path / "run", layout[1], [3, 4], config, [float("nan"), 2.0])
    assert checkpoints.steps() == [4, 1]


def test_what_says_nothing_of_the_files_is_no_damage(layout, tmp_path, monkeypatch):
    checkpoints = saved(tmp_path / "run", layout[1], [1])
    for error in (MemoryError(), PermissionError(13, "no"), OSError(errno.EIO, "disk"),
                  jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints._manager, "restore", _raising(error))
            with pytest.raises(type(error)):
                checkpoints.restore(1, layout[0].state)


def _raising(error):
    def restore(*args, **kwargs):
        raise error

    return restore


@pytest.mark.parametrize("optim", [{}, {"name": "muon"}], ids=["adamw", "muon"])
def test_state_comes_back_bit_for_bit(tmp_path, optim):
    layout, state = _layout(tmp_path, **optim)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [
        jax.random.normal(key, leaf.shape) if leaf.dtype == jnp.float32 else leaf + 3
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    state = jax.tree.unflatten(tree, drawn)
    checkpoints = saved(tmp_path / "run", state, [3])
    found = checkpoints.restore(3, layout.state)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    assert checkpoints.meta(3)["of"] == 3
    params = checkpoints.restore_params(3, layout.state.params)
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


def test_no_damaged_file_gives_other_numbers(layout, tmp_path):
    saved(tmp_path / "run", layout[1], [1])
    folder = tmp_path / "run" / "checkpoints" / "1"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) > 8
    seen = 0
    for path in files:
        data = path.read_bytes()
        flipped = bytearray(data)
        if data:
            flipped[len(data) // 2] ^= 0x04
        for damaged in (data[: len(data) // 2], b"", bytes(flipped), None):
            if damaged == data:
                continue
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            checkpoints = Checkpoints(tmp_path / "run")
            try:
                with contextlib.suppress(CheckpointError):
                    seen += 1
                    found = checkpoints.restore(1, layout[0].state)
                    seen -= 1
                    jax.tree.map(np.testing.assert_array_equal, found.params, layout[1].params)
            finally:
                checkpoints.close()
            path.write_bytes(data)
    assert seen >= len(files)


def test_checkpoint_of_another_model_or_step_is_damage(layout, tmp_path):
    checkpoints = saved(tmp_path / "run", layout[1], [1])
    like = replace(layout[0].state, params=dict(layout[0].state.params))
    like.params["embedding"] = jax.ShapeDtypeStruct(
        (9, 16), jnp.float32, sharding=like.params["embedding"].sharding
    )
    with pytest.raises(CheckpointError):
        checkpoints.restore(1, like)
    checkpoints.close()
    shutil.move(tmp_path / "run/checkpoints/1", tmp_path / "run/checkpoints/7")
    with pytest.raises(CheckpointError, match="not its own"):
        Checkpoints(tmp_path / "run").restore(7, layout[0].state)


def test_half_written_checkpoint_is_none(layout, tmp_path):
    saved(tmp_path / "run", layout[1], [1, 2]).close()
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    assert Checkpoints(tmp_path / "run").steps() == [2, 1]
    assert Checkpoints(tmp_path / "run", CheckpointConfig()).steps() == [2, 1]


def test_saved_arrays_may_be_donated_at_once(layout, tmp_path):
    state = jax.tree.map(jnp.copy, layout[1])
    expected = jax.device_get(state.params)
    (tmp_path / "run").mkdir()
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig())
    checkpoints.save(state, {})
    jax.tree.map(lambda leaf: leaf.delete(), state)
    checkpoints.wait()
    found = checkpoints.restore_params(0, layout[0].state.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


def test_save_that_cannot_be_written_is_an_os_error(layout, tmp_path):
    checkpoints = saved(tmp_path / "run", layout[1], [1])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").write_text("no folder")
    with pytest.raises(OSError, match="could not be saved"):
        _save_and_wait(checkpoints, replace(layout[1], step=jnp.int32(2)))


def _save_and_wait(checkpoints, state):
    checkpoints.save(state, {})
    checkpoints.wait()
