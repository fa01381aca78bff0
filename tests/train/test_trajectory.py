"""The trainer that the parity check holds against torch: a run's own step, from any state."""

from dataclasses import replace

import numpy as np
import pytest

from tests.convert.subjects import quick_checks, subject_of
from train.config import RECIPES, OptimConfig
from train.trajectory import Trainer

T, B = 8, 4
PLAIN = OptimConfig(schedule="constant")


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick_checks():
        yield


def made(model: str, optim: OptimConfig = PLAIN, **options):
    """A trainer of a one-layer model, not yet loaded, and parameters for it."""
    settings = {"steps": 10, "batch_size": B, "sequence_length": T, "accumulation": 2,
                "dtype": "float32"}  # fmt: skip
    fields = {name: options.pop(name) for name in list(options) if name not in settings}
    subject = subject_of(model, **{"num_layers" if model == "lumen" else "n_layer": 1} | fields)
    return Trainer(subject.config, optim, **settings | options), dict(subject.arrays)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(step).integers(0, 31, (B, T + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def test_a_state_taken_out_and_put_back_goes_on_bit_for_bit():
    trainer, parameters = made("gpt", replace(RECIPES["gpt"], warmup_steps=3))
    before = {path: array.copy() for path, array in parameters.items()}
    trainer.load(parameters)
    whole = [trainer.update(*batch(step)) for step in range(4)]
    trainer.load(parameters)
    first = [trainer.update(*batch(step)) for step in range(2)]
    middle, moments = trainer.parameters(), trainer.moments()
    trainer.update(*batch(9))  # what was taken out is not what goes on
    trainer.load(middle, moments, count=2)
    assert first + [trainer.update(*batch(step)) for step in (2, 3)] == whole
    assert all((parameters[path] == before[path]).all() for path in before)
    assert any((middle[path] != before[path]).any() for path in before)


def test_the_count_moves_the_schedule_and_the_bias_correction():
    trainer, parameters = made("gpt", replace(RECIPES["gpt"], warmup_steps=3))
    ends = []
    for count in (2, 3):
        trainer.load(parameters)
        trainer.update(*batch(0))
        trainer.load(parameters, trainer.moments(), count=count)
        trainer.update(*batch(1))
        ends.append(trainer.parameters()["embedding"])
    assert (ends[0] != ends[1]).any()


def test_loss_and_norm_are_of_the_whole_batch_before_clipping():
    seen = []
    for accumulation in (1, 2, 4):
        trainer, parameters = made("lumen", replace(PLAIN, clip=1e-3), accumulation=accumulation)
        trainer.load(parameters)
        inputs, targets = batch(0)
        targets[-1, 2:] = -1
        seen.append(trainer.update(inputs, targets))
    assert np.allclose(seen, seen[0], rtol=1e-5)
    assert seen[0][1] > 0.1


def test_dropout_is_off():
    updates = []
    for rate in (0.0, 0.5):
        trainer, parameters = made("ripple", dropout=rate)
        trainer.load(parameters)
        updates.append([trainer.update(*batch(step)) for step in range(2)])
    assert updates[0] == updates[1]


@pytest.mark.parametrize(("length", "frozen"), [(4, True), (8, False)])
def test_a_frozen_decay_stays_and_has_no_moments(length, frozen):
    optim = RECIPES["ripple"]
    trainer, parameters = made("ripple", optim, sequence_length=length, attention_window=4)
    trainer.load(parameters)
    for step in range(2):
        trainer.update(*(array[:, :length] for array in batch(step)))
    decay = "blocks.attention.decay"
    assert (trainer.parameters()[decay] == parameters[decay]).all() == frozen
    assert [decay in moments for moments in trainer.moments()] == [not frozen] * 2
    assert {"embedding", "head"} <= trainer.moments()[0].keys()


def test_float64_is_float64_throughout(x64):
    trainer, parameters = made("lumen", dtype="float64")
    trainer.load(parameters)
    loss, _ = trainer.update(*batch(0))
    assert loss != float(np.float32(loss))
    first, second = trainer.moments()
    arrays = [*trainer.parameters().values(), *first.values(), *second.values()]
    assert {array.dtype for array in arrays} == {np.dtype(np.float64)}


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="torch's AdamW, got 'muon'"):
        made("gpt", replace(PLAIN, name="muon"))
    with pytest.raises(ValueError, match="not divisible by accumulation"):
        made("gpt", accumulation=3)
    trainer, parameters = made("gpt")
    with pytest.raises(RuntimeError, match="load"):
        trainer.parameters()
    one = {path: array for path, array in parameters.items() if path != "embedding"}
    with pytest.raises(ValueError, match="no moments of embedding"):
        trainer.load(parameters, (parameters, one), count=1)
