"""The trajectory rung: torch and our step train alike, and faults planted in ours are caught."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from rich.console import Console

import train.optimizer
import train.step
import train.trajectory
from convert.counterparts import rope_tables
from convert.parity.compare import RUNGS, ParityReport
from convert.parity.diagnosis import likely_cause
from convert.parity.report import print_report, to_json
from convert.parity.report_html import page
from convert.parity.torch_side import builder
from convert.parity.torch_training import TorchTrainer
from convert.parity.training_plan import (
    IGNORED,
    Asked,
    learning_rate,
    make_plan,
    shortened,
    source_optimizer,
)
from convert.parity.trajectory import trajectory
from jaxslm.models import model_name
from tests.convert.checkpoints import said, save, state_of
from tests.convert.subjects import config_of, quick_checks, subject_of
from train.config import RECIPES, OptimConfig
from train.trajectory import Trainer

STEPS = 10
ONE_LAYER = {"gpt": {"n_layer": 1}, "lumen": {"num_layers": 1}, "ripple": {"n_layer": 1}}
LOSSES = {"losses", "torch, then JAX", "JAX, then torch"}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick_checks():
        yield


def compared(model: str, *, dtypes=(), seed=0, tokens=None, fields=(), **asked) -> ParityReport:
    """The trajectory rung alone, as a report."""
    subject = subject_of(model, seed, **ONE_LAYER[model] | dict(fields))
    config = subject.config
    settings = {"trainer": Trainer, "recipe": RECIPES[model], "steps": STEPS} | asked
    plan = make_plan(config, Asked(**settings), tokens, seed)
    build = builder(None, config)[1]
    tables = None if model_name(config) == "ripple" else rope_tables(config)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        rows, training = trajectory(plan, subject.arrays, build, tables=tables, dtypes=dtypes)
    report = ParityReport(
        source="seeded", against="ours", model=model, config={}, parameters=subject.parameters,
        lengths=(plan.length,), rows=tuple(rows), training=training,
    )  # fmt: skip
    return replace(report, cause=likely_cause(report))


# ---- Nothing planted


@pytest.mark.parametrize("model", ["lumen", "gpt", "ripple"])
def test_both_sides_train_alike_by_the_original_recipe(model):
    report = compared(model, dtypes=("float32",), steps=20)
    assert report.passed, report.first_failure
    exact = [row for row in report.rows if row.dtype == "float64"]
    assert LOSSES | {"parameters", "first moments", "second moments"} == {r.tensor for r in exact}
    assert max(row.error for row in exact if row.tensor in LOSSES) < 1e-13
    training = report.training
    assert training is not None
    assert training.half == 10
    assert training.uneven == [3, 8, 13, 18]
    assert bool(training.clipped) == (RECIPES[model].clip is not None)
    assert training.losses["torch float64"] != training.losses["JAX float64"]  # two computations
    assert len(set(training.losses["torch float64"])) == 20
    assert (len(set(training.rates)) > 10) == (RECIPES[model].schedule == "cosine")


def test_a_window_goes_on_with_its_decays_moments(tmp_path):
    optimizer, _ = source_optimizer(trained(tmp_path, "ripple"))
    assert optimizer is not None
    assert "blocks.attention.decay" in optimizer.first_moment
    for length in (4, 16):  # frozen and stale; trained on
        report = compared("ripple", optimizer=optimizer, length=length, steps=4)
        assert report.passed, report.first_failure
        assert report.training is not None
        assert (report.training.start, report.training.half) == (3, 2)


@pytest.mark.parametrize("length", [4, 16])
def test_ripple_freezes_its_decay_just_where_torch_does(length):
    report = compared("ripple", length=length)
    assert report.passed, report.first_failure
    frozen = [row.tensor for row in report.rows if row.note.startswith("torch freezes")]
    assert frozen == (["blocks.attention.decay"] if length == 4 else [])


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "wsd", "warmup": "nanogpt"},
        {"betas": (0.0, 0.9), "decay": "all", "clip": None},
        {"weight_decay": 0.0, "eps": 1e-3, "final_lr": 0.0},
    ],
    ids=str,
)
def test_other_recipes_are_followed_too(changes):
    report = compared("gpt", recipe=replace(RECIPES["gpt"], **changes), accumulation=4)
    assert report.passed, report.first_failure


def test_real_tokens_are_cut_where_the_seed_says():
    tokens = np.arange(100, dtype=np.uint16) % 31
    report = compared("lumen", tokens=tokens, steps=2, batch_size=2)
    assert report.passed
    plan = make_plan(config_of("lumen"), asked(), tokens, 0)
    inputs, targets = plan.batch(0)
    assert ((inputs + 1) % 31 == targets).all()
    assert (plan.batch(0)[0] == inputs).all()
    assert (plan.batch(1)[0] != inputs).any()
    assert plan.batch(3)[1][-1].tolist()[8:] == [IGNORED] * 8
    assert (plan.batch(3)[1][:-1] != IGNORED).all()
    assert (plan.batch(2)[1] != IGNORED).all()


def trained(folder, model: str, steps: int = 3, length: int | None = None, **fields):
    """A checkpoint of torch training, saved as the loop saves."""
    subject = subject_of(model, **ONE_LAYER[model] | fields)
    plan = make_plan(subject.config, asked(model, length=length), None, 0)
    build = builder(None, subject.config)[1]
    side = TorchTrainer(build, plan, "float32", subject.torch_state, None)
    for step in range(steps):
        side.update(*plan.batch(step))
    side.save(folder / "trained.pt")
    return folder / "trained.pt"


def asked(model: str = "lumen", **changes) -> Asked:
    return Asked(**{"trainer": Trainer, "recipe": RECIPES[model], "steps": STEPS} | changes)


def test_check_goes_on_from_the_checkpoints_adamw(run, tmp_path):
    reports = ("--json", tmp_path / "a.json", "--report", tmp_path / "a.html")
    code, out, err = run("check", trained(tmp_path, "gpt"), "--steps", "6", "--lengths", "8",
                         *reports)  # fmt: skip
    assert code == 0, out + err
    assert "from update 3 of the checkpoint's AdamW" in out
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["training"]["start"] == 3
    assert len(report["training"]["losses"]["JAX float32"]) == 6
    assert "trajectory" in {row["rung"] for row in report["rows"]}
    text = (tmp_path / "a.html").read_text()
    assert "<h2>Training</h2>" in text
    assert "relative difference" in text


def test_check_trains_from_a_model_folder_and_its_optimizer(run, tmp_path):
    path = trained(tmp_path, "ripple", length=4)
    optimizer, note = source_optimizer(path)
    assert optimizer is not None
    assert (optimizer.count, note) == (3, "")
    assert "blocks.attention.decay" not in optimizer.first_moment
    run("convert", path, tmp_path / "out", "--with-optimizer")
    again, _ = source_optimizer(tmp_path / "out")
    assert again is not None
    for one, other in ((optimizer.first_moment, again.first_moment),
                       (optimizer.second_moment, again.second_moment)):  # fmt: skip
        assert one.keys() == other.keys()
        assert all((one[name] == other[name]).all() for name in one)
    # Moments of the decay are missing, so that only lengths that freeze it can go on.
    plan = make_plan(config_of("ripple", n_layer=1), asked("ripple", optimizer=again), None, 0)
    assert plan.length == 4
    with pytest.raises(ValueError, match=r"no moments of blocks.attention.decay.*--lengths"):
        make_plan(config_of("ripple", n_layer=1), asked("ripple", optimizer=again, length=8),
                  None, 0)  # fmt: skip


def test_an_optimizer_that_cannot_be_used_is_said(tmp_path):
    path = trained(tmp_path, "gpt")
    content = torch.load(path, weights_only=True)
    content["optimizer"]["param_groups"][0]["amsgrad"] = True
    torch.save(content, path)
    optimizer, note = source_optimizer(path)
    assert optimizer is None
    assert "amsgrad" in note
    report = compared("gpt", steps=2, note=note)
    assert report.training is not None
    assert "amsgrad" in report.training.words


def test_hyperparameters_come_from_the_groups(tmp_path):
    optimizer, _ = source_optimizer(trained(tmp_path, "gpt"))
    assert optimizer is not None
    config = config_of("gpt", n_layer=1)

    def plan(*changes: dict[str, Any], recipe: str = "ripple"):
        groups = tuple({**g, **c} for g, c in zip(optimizer.groups, changes, strict=True))
        given = asked(recipe, optimizer=replace(optimizer, groups=groups))
        return make_plan(config, given, None, 0)

    kept = plan({"eps": 1e-6}, {"eps": 1e-6}).recipe
    assert (kept.betas, kept.eps, kept.weight_decay, kept.decay) == (
        (0.9, 0.95), 1e-6, 0.1, "matrices")  # fmt: skip
    every = plan({"weight_decay": 0.3}, {"weight_decay": 0.3})
    assert (every.recipe.decay, len(every.groups)) == ("all", 1)
    assert plan({"weight_decay": 0.0}, {}).recipe.weight_decay == 0.0
    for words, changes in (
        ("differ in lr", ({"lr": 0.5}, {})),
        ("neither all parameters nor all matrices", ({}, {"weight_decay": 0.3})),
        ("neither all parameters nor all matrices", ({"weight_decay": 0.0}, {"weight_decay": 0.1})),
        ("maximizes", ({"maximize": True}, {})),
    ):
        with pytest.raises(ValueError, match=words):
            plan(*changes)


# ---- The torch side by itself


def test_learning_rates_are_the_originals():
    build_nanogpt = replace(RECIPES["gpt"], decay_steps=19073)
    assert learning_rate(build_nanogpt, 0, 0) == pytest.approx(8.3916e-7, rel=1e-4)
    assert learning_rate(build_nanogpt, 0, 714) == 6e-4
    assert learning_rate(build_nanogpt, 0, 19073) == pytest.approx(6e-5)
    nanogpt = OptimConfig(lr=1e-3, warmup_steps=100, decay_steps=5000, final_lr=1e-4)
    assert learning_rate(nanogpt, 0, 0) == pytest.approx(9.90e-6, rel=1e-3)
    assert learning_rate(nanogpt, 0, 2550) == pytest.approx((1e-3 + 1e-4) / 2)
    wsd = OptimConfig(lr=1.0, schedule="wsd", decay_steps=4)
    assert [learning_rate(wsd, 10, count) for count in (0, 6, 7, 9)] == [1.0, 1.0, 0.75, 0.25]
    assert learning_rate(RECIPES["ripple"], 10, 7) == 1e-3


def test_a_schedule_is_shortened_to_the_steps_after_the_start():
    short = shortened(RECIPES["gpt"], 600, 100)
    assert (short.warmup_steps, short.decay_steps) == (620, 700)
    assert shortened(RECIPES["ripple"], 600, 100) == RECIPES["ripple"]


def test_torch_decays_what_has_two_dimensions_in_torch(tmp_path):
    subject = subject_of("ripple")
    plan = make_plan(subject.config, asked("gpt"), None, 0)
    build = builder(None, subject.config)[1]
    side = TorchTrainer(build, plan, "float64", subject.torch_state, None)
    groups = side.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    ranks = [{parameter.ndim for parameter in group["params"]} for group in groups]
    assert ranks == [{2}, {1}]
    assert sum(len(group["params"]) for group in groups) == len(side.named)
    assert not side.module.training


def test_a_clip_that_would_not_bind_is_lowered():
    report = compared("gpt", recipe=replace(RECIPES["gpt"], clip=1e3), steps=4)
    assert report.passed
    assert report.training is not None
    assert report.training.clipped[:1] == [0]


def test_training_that_diverges_fails_in_words():
    report = compared("gpt", recipe=OptimConfig(lr=1e200, schedule="constant"), steps=4)
    assert not report.passed
    print_report(report, Console(file=None, quiet=True))
    assert json.loads(json.dumps(to_json(report), allow_nan=False))["verdict"] == "failed"
    assert "<h2>Training</h2>" in page(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "1"), "--steps must be 2 or more, got 1"),
        (("--steps", "2", "--accumulation", "3"), "must be a multiple of --accumulation 3"),
        (("--steps", "2", "--batch-size", "0"), "both 1 or more"),
    ],
)
def test_check_refuses_what_cannot_be_trained(options, words, refused, tmp_path):
    fields = {"vocab_size": 5, "hidden_dim": 4, "num_layers": 1, "num_heads": 2,
              "num_kv_heads": 1, "intermediate_dim": 3, "max_seq_len": 2}  # fmt: skip
    content = {"model": state_of("lumen", **fields), "model_args": said("lumen", **fields)}
    path = save(content, tmp_path / "a.pt")
    refused(tmp_path, words, "check", path, *options)


# ---- Faults planted in our half


@dataclass(frozen=True)
class Fault:
    """One planted fault; `plant` may give our half."""

    words: str
    model: str
    tensor: str  # what of the trajectory is first seen to part
    plant: Callable[[pytest.MonkeyPatch], Any]
    cause: str  # in the cause that the report names
    step: int | None = None  # the first whose loss is off
    length: int | None = None


def optim(**fields: Any) -> Callable[[pytest.MonkeyPatch], Any]:
    """Our half follows another recipe."""
    return lambda patch: (
        lambda model, optim, **options: Trainer(model, replace(optim, **fields), **options)
    )


def code(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[..., None]:
    """A function of ours is another, made of the right one."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def without_1e_6(right):
    return lambda norm, clip: jnp.minimum(1.0, clip / norm)


def one_step_late(right):
    return lambda config, steps, peak=None: lambda count: right(config, steps, peak)(count + 1)


def mean_of_means(right):
    """Microbatches are averaged by themselves, then among each other."""

    def make_step(config, *, rope=None):
        kept_in_all: list[jax.Array] = []

        def make_loss(*args, right_loss=train.step.make_loss, **options):
            loss_of = right_loss(*args, **options)

            def loss(params, inputs, targets, key):
                kept = jnp.maximum(jnp.sum(targets != IGNORED), 1)
                share = kept_in_all[-1] / (config.accumulation * kept)
                return loss_of(params, inputs, targets, key) * share

            return loss

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train.step, "make_loss", make_loss)
            step = right(config, rope=rope)

        def noted(state, inputs, targets):
            kept_in_all.append(jnp.sum(targets != IGNORED))
            return step(state, inputs, targets)

        return noted

    return make_step


def decayed_anyway(patch: pytest.MonkeyPatch):
    """The optimizer does not know what torch leaves alone."""
    return lambda model, optim, **options: Trainer(
        replace(model, decay_gradient="always"), optim, **options
    )


class ForgetfulTrainer(Trainer):
    """Bias correction starts anew when a state is taken over."""

    def load(self, parameters, moments=None, count=0):
        super().load(parameters, moments, 0)


class HastyTrainer(Trainer):
    """The first moments that it hands over are the second ones."""

    def moments(self):
        first, second = super().moments()
        return (second, second) if self._loaded.step < STEPS else (first, second)


FAULTS = (
    Fault("AdamW's beta1 0.8 for 0.9", "gpt", "losses", optim(betas=(0.8, 0.95)), "betas", 2),
    Fault("AdamW's beta2 0.999 for 0.95", "gpt", "losses", optim(betas=(0.9, 0.999)), "betas", 2),
    Fault("weight decay on norms and biases too", "gpt", "losses", optim(decay="all"),
          "weight decay's groups", 1),
    Fault("no weight decay", "ripple", "losses", optim(weight_decay=0.0), "weight decay", 1),
    Fault("no clipping", "gpt", "losses", optim(clip=None), "clipping", 1),
    Fault("clipping without the 1e-6 beside the norm", "gpt", "parameters",
          code(train.step, "clip_scale", without_1e_6), "1e-6"),
    Fault("the schedule one step late", "lumen", "losses",
          code(train.optimizer, "learning_rate", one_step_late), "schedule (its first step)", 1),
    Fault("accumulation by the mean of the microbatches' means", "gpt", "losses",
          code(train.trajectory, "make_step", mean_of_means), "mean of means", 3),
    Fault("no bias correction", "ripple", "losses",
          code(train.optimizer, "_correction", lambda right: lambda beta, count: jnp.ones(())),
          "bias correction", 1),
    Fault("bias correction one update late", "lumen", "losses",
          code(train.optimizer, "_correction",
               lambda right: lambda beta, count: right(beta, count + 1)), "bias correction", 1),
    Fault("epsilon inside the root", "lumen", "losses",
          code(train.optimizer, "scale_by_torch_adam",
               lambda right: lambda b1, b2, eps: optax.scale_by_adam(b1, b2, 0.0, eps)),
          "epsilon (outside the root)", 1),
    Fault("training moves decays that torch freezes", "ripple", "losses", decayed_anyway,
          "decay", 1, length=4),
    Fault("the count of updates lost on the way from torch", "gpt", "torch, then JAX",
          lambda patch: ForgetfulTrainer, "conversion of the optimizer's state", 6),
    Fault("first moments lost on the way to torch", "gpt", "JAX, then torch",
          lambda patch: HastyTrainer, "conversion of the optimizer's state", 6),
)  # fmt: skip


def climb(fault: Fault) -> ParityReport:
    """The trajectory with the fault planted."""
    with pytest.MonkeyPatch.context() as patch:
        trainer = fault.plant(patch) or Trainer
        return compared(fault.model, trainer=trainer, length=fault.length)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.words)
def test_a_planted_fault_is_caught_and_named(fault):
    report = climb(fault)
    first = report.first_failure
    assert first is not None
    assert (first.rung, first.tensor, first.dtype) == ("trajectory", fault.tensor, "float64")
    assert fault.cause in (report.cause or "")
    assert fault.step in (None, first.first_position)
    assert RUNGS.index("adamw step") < RUNGS.index("trajectory")
