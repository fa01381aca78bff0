"""Runs leave as model folders, with or without their optimizer."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxslm
from jaxslm.optimizer_file import map_optimizer
from jaxslm.tokenizer import ByteTokenizer
from jaxslm.weights import map_folder
from tests.conftest import REPOSITORY
from tests.train.runs import quietly, small_config
from train.checkpoints import Checkpoints
from train.export import export
from train.optimizer import build_optimizer
from train.setup import make_layout

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.usefixtures("collected"),
]


def state_of(config, step):
    trained = sorted(set(make_paths(config)) - set(config.trained_without))
    layout = make_layout(config, build_optimizer(config.optim, config.steps, trained))
    return Checkpoints(config.out).restore(step, layout.state)


def make_paths(config):
    from jaxslm.weights import abstract_parameters

    return abstract_parameters(config.model)


def test_latest_checkpoint_is_exported_bit_for_bit(finished, tmp_path):
    config, _ = finished
    done = export(config.out, tmp_path / "out")
    assert (done.step, done.notes, done.config) == (8, (), config.model)
    found, arrays = map_folder(tmp_path / "out")
    assert found == config.model
    expected = jax.device_get(state_of(config, 8).params)
    jax.tree.map(np.testing.assert_array_equal, dict(arrays), expected)
    assert done.parameters == sum(value.size for value in expected.values())
    assert jaxslm.load(tmp_path / "out").config == config.model
    assert not (tmp_path / "out" / "optimizer.safetensors").exists()


def test_a_runs_attention_kernel_does_not_go_along(tmp_path):
    config = small_config(tmp_path, steps=1)
    config = replace(config, model=replace(config.model, attention="blockwise"))
    assert quietly(config)[0] == 0
    export(config.out, tmp_path / "out")
    assert map_folder(tmp_path / "out")[0] == replace(config.model, attention="auto")


def test_optimizer_is_exported_bit_for_bit_with_torchs_groups(finished, tmp_path):
    config, _ = finished
    export(config.out, tmp_path / "out", step=4, with_optimizer=True)
    found = map_optimizer(tmp_path / "out")
    assert (found.count, found.step) == (4, 4)
    adam = state_of(config, 4).optimizer[0]
    for name, value in adam.mu.items():
        np.testing.assert_array_equal(found.first_moment[name], value)
        np.testing.assert_array_equal(found.second_moment[name], adam.nu[name])
    ((group),) = found.groups
    assert set(group["parameters"]) == set(make_paths(config))
    assert group["lr"] == pytest.approx(config.optim.lr)
    assert (group["betas"], group["weight_decay"]) == ([0.9, 0.99], 0.01)


def test_groups_are_split_by_decay(tmp_path):
    config = small_config(tmp_path, steps=1)
    config = replace(config, optim=replace(config.optim, decay="matrices"))
    quietly(config)
    export(config.out, tmp_path / "out", with_optimizer=True)
    groups = map_optimizer(tmp_path / "out").groups
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert "blocks.attention.decay" in groups[1]["parameters"]
    assert "embedding" in groups[0]["parameters"]


def test_tokenizer_of_a_folder_that_is_replaced_is_kept(finished, tmp_path):
    config, _ = finished
    export(config.out, tmp_path / "out")
    ByteTokenizer().save(tmp_path / "out")
    export(config.out, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_tokenizer_goes_along(tmp_path):
    config = small_config(tmp_path, steps=1)
    ByteTokenizer().save(tmp_path)
    data = replace(config.data, tokenizer=tmp_path / "tokenizer.json")
    quietly(replace(config, data=data))
    export(config.out, tmp_path / "out")
    text = (tmp_path / "out" / "tokenizer.json").read_text()
    assert text == (tmp_path / "tokenizer.json").read_text()
    export(config.out, tmp_path / "out", overwrite=True)


def test_damaged_latest_is_passed_over_with_a_warning(copied, tmp_path):
    shutil.rmtree(copied.out / "checkpoints" / "8" / "params")
    done = export(copied.out, tmp_path / "out")
    assert done.step == 4
    assert "warning: checkpoint 8" in done.notes[0]
    assert (copied.out / "checkpoints" / "8").exists()  # an export changes nothing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": 5}, "has not checkpoint 5; there: 4, 8"),
        ({"step": 8}, "no checkpoint of .* is whole"),
    ],
)
def test_checkpoint_that_is_not_there_is_refused(copied, tmp_path, options, words):
    shutil.rmtree(copied.out / "checkpoints" / "8" / "meta")
    with pytest.raises(ValueError, match=words):
        export(copied.out, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_muons_state_does_not_leave(tmp_path):
    config = small_config(tmp_path, steps=1)
    config = replace(config, optim=replace(config.optim, name="muon"))
    quietly(config)
    with pytest.raises(ValueError, match="only AdamW's state leaves a run"):
        export(config.out, tmp_path / "out", with_optimizer=True)
    assert export(config.out, tmp_path / "out").step == 1


def test_command_line_exports_inspects_and_refuses_to_convert_a_run(finished, tmp_path, run):
    out = finished[0].out
    assert run("export", out, tmp_path / "out")[0] == 0
    code, text, _ = run("inspect", out)
    assert code == 0
    assert "update 8 of 8" in text
    assert "checkpoint 4" in text
    code, text, _ = run("inspect", out, "--json")
    assert json.loads(text)["checkpoints"][0]["step"] == 8
    for command in (("convert", out, tmp_path / "x"), ("check", out)):
        code, _, err = run(*command)
        assert (code, "jaxslm export" in err) == (2, True)


def test_configs_name_files_of_their_own(tmp_path):
    from train.command import load_config

    found = [load_config(path) for path in sorted((REPOSITORY / "configs").glob("*.py"))]
    assert len(found) >= 5
    assert len({config.out for config in found}) == len(found)
