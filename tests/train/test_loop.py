"""The loop: records, resuming, refusals. Kills are in test_kill.py, meshes in test_sharding.py."""

import json
import shutil
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import jaxslm
from jaxslm.tokenizer import CharTokenizer
from jaxslm.weights import to_arrays
from tests.train.runs import VOCABULARY, quietly, small_config, write_tokens
from train import loop
from train.checkpoints import Checkpoints
from train.config import read_config
from train.export import export
from train.loop import TrainingFailed
from train.metrics import read_metrics

# A read that fails leaves coroutines of orbax behind, which warn when they are collected.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.usefixtures("collected"),
]


def test_run_records_every_update_and_evaluation(finished):
    config, text = finished
    rows = read_metrics(config.out)
    updates = [row for row in rows if "loss" in row]
    assert [row["step"] for row in updates] == list(range(1, 9))
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8]
    assert all(row["tokens"] == 64 and row["skipped"] == 0 for row in updates)
    assert len({row["batch"] for row in updates}) == 8
    assert "validation loss" in text
    assert "done: 8 updates" in text
    assert (config.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert read_config(config.out) == config
    assert Checkpoints(config.out).steps() == [8, 4]


def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(finished, copied):
    shutil.rmtree(copied.out / "checkpoints" / "8")
    status, text = quietly(copied, resume=True)
    assert status == 0
    assert "resumed at update 4" in text
    assert read_metrics(copied.out) == read_metrics(finished[0].out)
    _assert_same_state(copied, finished[0], 8)


def test_run_can_be_made_longer(copied):
    status, text = quietly(replace(copied, steps=10), resume=True)
    assert (status, "resumed at update 8" in text) == (0, True)
    assert Checkpoints(copied.out).steps()[0] == 10
    assert [row["step"] for row in read_metrics(copied.out) if "val_loss" in row] == [4, 8, 10]


def test_finished_run_resumed_does_nothing(copied):
    before = (copied.out / "metrics.jsonl").read_bytes()
    status, text = quietly(copied, resume=True)
    assert (status, "done: 8 updates" in text) == (0, True)
    assert (copied.out / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "flipped", "meta", "missing"])
def test_damaged_latest_checkpoint_is_set_aside_for_the_last_whole_one(finished, copied, damage):
    folder = copied.out / "checkpoints" / "8"
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    if damage == "cut":
        largest.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 0x10
        largest.write_bytes(data)
    elif damage == "meta":
        shutil.rmtree(folder / "meta")
    else:
        shutil.rmtree(folder / "params")
    status, text = quietly(copied, resume=True)
    assert status == 0
    assert "warning: checkpoint 8" in text
    assert "resumed at update 4" in text
    assert [path.name for path in (copied.out / "damaged").iterdir()] == ["8.0"]
    assert read_metrics(copied.out) == read_metrics(finished[0].out)


def test_no_whole_checkpoint_is_an_error_again_and_again(copied):
    for step in (4, 8):
        shutil.rmtree(copied.out / "checkpoints" / str(step) / "params")
    before = (copied.out / "metrics.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(ValueError, match="none of the checkpoints 8, 4 .* is whole"):
            quietly(copied, resume=True)
    assert Checkpoints(copied.out).steps() == [8, 4]
    shutil.rmtree(copied.out / "checkpoints")
    (copied.out / "damaged" / "8.0").mkdir(parents=True)
    with pytest.raises(ValueError, match="no checkpoint but those set aside"):
        quietly(copied, resume=True)
    assert (copied.out / "metrics.jsonl").read_bytes() == before


def test_folder_in_use_is_refused(finished):
    with loop._locked(finished[0].out), pytest.raises(OSError, match="is in use"):
        quietly(finished[0], resume=True)
    with loop._locked(finished[0].out):
        pass


def test_fewer_steps_than_done_are_refused(copied):
    with pytest.raises(ValueError, match="steps is 6, but the run stands at update 8"):
        quietly(replace(copied, steps=6), resume=True)
    assert read_config(copied.out).steps == 8


def test_falling_learning_rate_does_not_rise_again(tmp_path):
    config = small_config(tmp_path)
    config = replace(config, optim=replace(config.optim, schedule="wsd", decay_steps=4))
    assert quietly(config)[0] == 0
    with pytest.raises(ValueError, match="falls since update 4 and would rise again"):
        quietly(replace(config, steps=20), resume=True)


def test_resume_with_another_start_is_refused(copied, tmp_path):
    with pytest.raises(ValueError, match="it cannot begin from"):
        quietly(replace(copied, init_from=tmp_path), resume=True)


def test_cut_record_is_mended(finished, copied):
    shutil.rmtree(copied.out / "checkpoints" / "8")
    path = copied.out / "metrics.jsonl"
    path.write_text(path.read_text()[:-7])
    assert quietly(copied, resume=True)[0] == 0
    assert read_metrics(copied.out) == read_metrics(finished[0].out)


def test_run_killed_before_its_first_save_starts_from_its_beginning(finished, copied):
    shutil.rmtree(copied.out / "checkpoints")
    status, text = quietly(copied, resume=True)
    assert (status, "starts from its beginning" in text) == (0, True)
    assert read_metrics(copied.out) == read_metrics(finished[0].out)


def test_used_folder_is_refused_for_a_new_run(finished, tmp_path):
    with pytest.raises(FileExistsError, match="--resume"):
        quietly(finished[0])
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        quietly(replace(finished[0], out=tmp_path))


def test_left_over_of_a_killed_start_is_no_used_folder(tmp_path):
    config = small_config(tmp_path, steps=1)
    (config.out / ".config.json.abc").mkdir(parents=True)
    assert quietly(config)[0] == 0
    assert not (config.out / ".config.json.abc").exists()


def test_resume_needs_a_run(tmp_path):
    config = small_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        quietly(config, resume=True)
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: replace(c, seed=1), "seed: 1337 -> 1"),
        (lambda c: replace(c, model=replace(c.model, n_layer=3)), "model.n_layer: 2 -> 3"),
        (lambda c: replace(c, optim=replace(c.optim, lr=1.0)), "optim.lr: 0.003 -> 1.0"),
        (lambda c: replace(c, data=replace(c.data, order="random")), "data.order"),
    ],
)
def test_resume_with_another_config_is_refused_by_field(copied, change, words):
    before = (copied.out / "config.json").read_bytes()
    with pytest.raises(ValueError, match=words):
        quietly(change(copied), resume=True)
    assert (copied.out / "config.json").read_bytes() == before


def test_resume_with_other_data_is_refused_and_moved_data_is_not(copied, tmp_path):
    other = write_tokens(tmp_path / "other.bin", 3000, seed=5)
    before = (copied.out / "config.json").read_bytes()
    for name in ("train", "val"):
        data = replace(copied.data, **{name: other})
        with pytest.raises(ValueError, match=rf"data.{name} is not the data that the run began"):
            quietly(replace(copied, data=data), resume=True)
    assert (copied.out / "config.json").read_bytes() == before
    moved = shutil.copy(copied.data.train, tmp_path / "moved.bin")
    data = replace(copied.data, train=moved)
    assert quietly(replace(copied, data=data), resume=True)[0] == 0


def test_accumulation_and_mesh_may_change_on_resuming(finished, copied):
    shutil.rmtree(copied.out / "checkpoints" / "8")
    model = replace(copied.model, dropout=copied.model.dropout)
    assert quietly(replace(copied, model=model, loss_chunk=5), resume=True)[0] == 0
    found, expected = read_metrics(copied.out), read_metrics(finished[0].out)
    assert [row.get("batch") for row in found] == [row.get("batch") for row in expected]
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (found, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_signal_saves_and_says_how_to_go_on(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    _signal_after(monkeypatch, 3)
    status, text = quietly(config)
    assert status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after update 3: saved; go on with --resume" in text
    assert Checkpoints(config.out).steps() == [3]
    monkeypatch.undo()
    assert quietly(config, resume=True)[0] == 0
    assert [row["step"] for row in read_metrics(config.out) if "val_loss" in row] == [4, 8]


def test_signal_during_evaluation_saves_and_the_evaluation_is_made_up_for(
    finished, tmp_path, monkeypatch
):
    config = small_config(tmp_path)
    evaluate = loop._Run._evaluate

    def signalled(self, data):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(self, data)

    monkeypatch.setattr(loop._Run, "_evaluate", signalled)
    status, text = quietly(config)
    assert (status, "after update 4" in text) == (128 + signal.SIGTERM, True)
    monkeypatch.undo()
    assert quietly(config, resume=True)[0] == 0
    assert read_metrics(config.out) == read_metrics(finished[0].out)


def test_signal_during_the_first_compilation_ends_without_waiting(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    ends = threading.Event()

    def compiling(self, *args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return self.stop.during(lambda: ends.wait(60))

    monkeypatch.setattr(loop._Run, "_compile", compiling)
    start = time.monotonic()
    status, _ = quietly(config)
    assert (status, time.monotonic() - start < 40) == (128 + signal.SIGTERM, True)
    ends.set()
    monkeypatch.undo()
    assert quietly(replace(config, steps=1), resume=True)[0] == 0


def test_second_interrupt_does_not_wait(tmp_path):
    with loop.Stop().listening():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_events_and_profile_are_written_on_request(tmp_path):
    config = small_config(tmp_path, steps=6)
    log = replace(config.log, tensorboard=True, profile=(2, 4))
    assert quietly(replace(config, log=log))[0] == 0
    assert list((config.out / "tensorboard").glob("events.out.tfevents.*"))
    assert list((config.out / "profile").rglob("*.xplane.pb"))


def test_handlers_are_put_back(finished, copied):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    quietly(copied, resume=True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_updates_that_are_not_finite_stop_the_run_on_its_last_good_state(tmp_path):
    config = small_config(tmp_path, max_skipped=3)
    config = replace(config, optim=replace(config.optim, lr=1e30), steps=40)
    with pytest.raises(TrainingFailed, match=r"not finite in 3 updates in a row, up to update"):
        quietly(config)
    rows = [row for row in read_metrics(config.out) if "loss" in row]
    assert rows[-1]["streak"] >= 3
    assert all(
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
        for line in (config.out / "metrics.jsonl").read_text().splitlines()
    )


def test_save_that_fails_ends_the_run_and_keeps_earlier_checkpoints(copied, monkeypatch):
    def full(*args, **kwargs):
        raise ValueError("No space left on device")

    longer = replace(copied, steps=12)
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", full)
    with pytest.raises(TrainingFailed, match="No space left on device; earlier checkpoints"):
        quietly(longer, resume=True)
    monkeypatch.undo()
    assert Checkpoints(copied.out).steps() == [8, 4]


def test_bad_token_stops_the_run_with_its_place(tmp_path):
    config = small_config(tmp_path)
    tokens = np.fromfile(config.data.train, "<u2")
    tokens[17] = 999
    tokens.tofile(config.data.train)
    with pytest.raises(ValueError, match=r"train.bin: token 17 is 999"):
        quietly(replace(config, steps=60))


def test_run_starts_from_a_model_folder(finished, tmp_path):
    export(finished[0].out, tmp_path / "model")
    config = small_config(tmp_path, init_from=tmp_path / "model", steps=1)
    config = replace(config, optim=replace(config.optim, lr=1e-30, weight_decay=0.0))
    status, text = quietly(config)
    assert (status, "the optimizer starts anew" in text) == (0, True)
    export(config.out, tmp_path / "after")
    before, after = (to_arrays(jaxslm.load(tmp_path / name)) for name in ("model", "after"))
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])


def test_run_goes_on_from_a_model_folder_with_its_optimizer(finished, tmp_path):
    export(finished[0].out, tmp_path / "model", step=4, with_optimizer=True)
    config = small_config(tmp_path, init_from=tmp_path / "model")
    status, text = quietly(config)
    assert (status, "goes on at update 4 with AdamW's state" in text) == (0, True)
    start = [row for row in read_metrics(finished[0].out) if row["step"] > 4 or "val_loss" in row]
    assert read_metrics(config.out) == start
    _assert_same_state(config, finished[0], 8)


def test_model_folder_of_another_model_is_refused(finished, tmp_path):
    export(finished[0].out, tmp_path / "model")
    config = small_config(tmp_path, init_from=tmp_path / "model")
    config = replace(config, model=replace(config.model, n_head=4))
    with pytest.raises(ValueError, match=r"model.n_head is 4, there 2"):
        quietly(config)
    assert not config.out.exists()


def test_state_that_is_further_than_the_run_is_refused(finished, tmp_path):
    export(finished[0].out, tmp_path / "model", with_optimizer=True)
    config = small_config(tmp_path, init_from=tmp_path / "model")
    with pytest.raises(ValueError, match="stands at update 8, and steps is 8"):
        quietly(config)


def _assert_same_state(one, other, step):
    """The same parameters and moments, bit for bit."""
    from train.export import _reader

    arrays = [_reader(config, True)(Checkpoints(config.out), step)[0] for config in (one, other)]
    assert arrays[0].keys() == arrays[1].keys()
    for name, value in arrays[0].items():
        np.testing.assert_array_equal(value, arrays[1][name], err_msg=name)


def _signal_after(monkeypatch, step):
    """A SIGTERM right after an update."""
    after = loop.Stop.after

    def signalled(self, done):
        if done == step:
            signal.raise_signal(signal.SIGTERM)
        return after(self, done)

    monkeypatch.setattr(loop.Stop, "after", signalled)


def test_the_model_writes_text_after_each_evaluation(tmp_path):
    letters = "".join(chr(ord("0") + n) for n in range(VOCABULARY - 1)) + "\n"
    tokenizer = CharTokenizer(letters).save(tmp_path)
    config = small_config(tmp_path)
    config = replace(
        config,
        data=replace(config.data, tokenizer=tokenizer),
        eval=replace(config.eval, sample_tokens=30, sample_prompt="0123"),
    )
    status, text = quietly(config)
    assert status == 0
    for step in (4, 8):
        sample = text.split(f"step {step}: 0123")[1]
        assert len(sample) >= 30
    shown = text.split("step 4: 0123")[1][:30]
    assert set(shown) <= set(letters)


@pytest.mark.parametrize("error", [ValueError("odd"), RuntimeError("RESOURCE_EXHAUSTED")])
def test_a_sample_that_fails_does_not_end_the_run(error, tmp_path, monkeypatch):
    tried = []

    def fail(*arguments, **options):
        tried.append(sorted(path.name for path in (config.out / "checkpoints").iterdir()))
        raise error

    tokenizer = CharTokenizer("ab\n").save(tmp_path)
    config = small_config(tmp_path)
    config = replace(config, data=replace(config.data, tokenizer=tokenizer))
    monkeypatch.setattr(loop, "generate", fail)
    status, text = quietly(config)
    assert status == 0
    assert f"step 4: no sample, and none from here on: {error}" in text
    assert len(tried) == 1
    assert any(name.startswith("4") for name in tried[0])  # the checkpoint comes first
    assert Checkpoints(config.out).steps() == [8, 4]
