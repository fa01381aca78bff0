"""A run's config: written and read strictly, checked when built, compared when resumed."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from tests.conftest import REPOSITORY
from train.command import load_config
from train.config import (
    RECIPES,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
    changed,
    from_json,
    read_config,
    to_json,
)

CONFIGS = sorted(REPOSITORY.joinpath("configs").glob("*.py"))
# Every field away from its default, with a tuple, a None and a Path among them.
FULL = TrainConfig(
    out=Path("runs/full"),
    model=RippleConfig(n_layer=2, attention_window=8, dropout=0.1),
    data=DataConfig(
        train=Path("a"), val=None, batch_size=12, sequence_length=32, order="sequential"
    ),
    optim=OptimConfig(
        name="muon", lr=2e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2, decay="all", clip=None,
        schedule="wsd", warmup_steps=3, warmup="build-nanogpt", final_lr=1e-5, decay_steps=20,
        muon_lr=0.01,
    ),
    mesh=MeshConfig(data=2, fsdp=3, tensor=4),
    checkpoint=CheckpointConfig(every=7, keep_last=3, keep_best=2, keep_every=5),
    eval=EvalConfig(every=9, batches=None, sample_tokens=7, sample_prompt="Once"),
    log=LogConfig(every=2, tensorboard=False, profile=(3, 5), compilation_cache=False),
    cluster=ClusterConfig(distributed=True, coordinator="a:1", processes=2, process=1),
    steps=100, accumulation=3, loss_chunk=None, seed=2**32 - 1, max_skipped=2,
    init_from=Path("out"),
)  # fmt: skip


@pytest.fixture
def content():
    """What a run's config.json holds, to damage."""
    return json.loads(json.dumps(to_json(FULL)))


def read(content):
    return from_json(content, Path("run/config.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_file_survives_its_json(path):
    config = load_config(path)
    found = read(json.loads(json.dumps(to_json(config))))
    assert found == config
    assert changed(config, found) == []


def test_five_configs_stand_in_the_folder():
    names = {path.stem for path in CONFIGS}
    assert names == {"debug", "gpt_250m", "lumen_3m", "ripple_char", "ripple_long"}


@pytest.mark.parametrize("model", [LumenConfig(), GPTConfig(), FULL.model])
def test_every_field_survives_the_run_folder(tmp_path, model):
    config = replace(FULL, model=model)
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    found = read_config(tmp_path)
    assert found == config
    assert type(found.model) is type(model)
    assert type(found.out) is type(found.init_from) is type(Path())
    assert (type(found.optim.betas), type(found.log.profile)) == (tuple, tuple)


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run: it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"format": "jaxslm"}))
    with pytest.raises(ValueError, match="is not the config of a training run"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format",), "jaxslm"), (("format_version",), 4), (("format_version",), None),
        (("model",), "llama"), (("model",), ["gpt"]), (("model",), None), (("config",), None),
        (("config",), []), (("config",), "x"), (("config", "data"), None),
        (("config", "data"), []), (("config", "model"), 3), (("config", "model"), []),
        (("config", "out"), None), (("config", "out"), 5), (("config", "out"), ["a"]),
        (("config", "init_from"), 5), (("config", "data", "train"), None),
        (("config", "data", "val"), False), (("config", "data", "order"), "sorted"),
        (("config", "data", "order"), None), (("config", "data", "order"), ["shuffled"]),
        (("config", "data", "batch_size"), 8.0), (("config", "data", "batch_size"), "8"),
        (("config", "data", "batch_size"), [12]), (("config", "data", "batch_size"), None),
        (("config", "steps"), True), (("config", "steps"), {}), (("config", "seed"), 1.5),
        (("config", "seed"), -1), (("config", "seed"), 2**32),
        (("config", "optim", "name"), "sgd"), (("config", "optim", "lr"), "abc"),
        (("config", "optim", "lr"), None), (("config", "optim", "lr"), True),
        (("config", "optim", "lr"), [1e-3]), (("config", "optim", "lr"), float("nan")),
        (("config", "optim", "lr"), 10**400), (("config", "optim", "eps"), 0),
        (("config", "optim", "betas"), 0.9), (("config", "optim", "betas"), [0.9]),
        (("config", "optim", "betas"), [0.9, 0.9, 0.9]), (("config", "optim", "betas"), "0.9"),
        (("config", "optim", "betas"), [0.9, "0.9"]), (("config", "optim", "betas"), [[0.9], 0.9]),
        (("config", "optim", "betas"), [0.9, 1.0]), (("config", "optim", "betas"), None),
        (("config", "optim", "clip"), 0), (("config", "optim", "clip"), "1"),
        (("config", "optim", "weight_decay"), -0.1),
        (("config", "optim", "weight_decay"), float("inf")),
        (("config", "optim", "warmup_steps"), 1.0), (("config", "optim", "decay_steps"), 0),
        (("config", "mesh", "fsdp"), "2"), (("config", "mesh", "data"), 1.0),
        (("config", "checkpoint", "keep_every"), 0), (("config", "checkpoint", "keep_best"), -1),
        (("config", "checkpoint", "every"), 0), (("config", "checkpoint", "keep_last"), None),
        (("config", "eval", "sample_tokens"), -1), (("config", "eval", "sample_prompt"), None),
        (("config", "eval", "batches"), 0), (("config", "eval", "batches"), 1.5),
        (("config", "log", "tensorboard"), 1), (("config", "log", "profile"), [3]),
        (("config", "log", "profile"), [3.0, 5]), (("config", "log", "profile"), [5, 5]),
        (("config", "log", "profile"), [-1, 5]), (("config", "cluster", "process"), "1"),
        (("config", "cluster", "processes"), None), (("config", "cluster", "coordinator"), 1),
        (("config", "accumulation"), 5), (("config", "loss_chunk"), 0),
        (("config", "loss_chunk"), "512"), (("config", "max_skipped"), 0),
        (("config", "model", "n_layer"), "2"), (("config", "model", "n_head"), 5),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_json_of_a_wrong_value_is_refused_in_words(content, place, value):
    at = content
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    with pytest.raises(ValueError, match=r"^run/config\.json") as caught:
        read(content)
    assert "NoneType" not in str(caught.value)
    assert "not supported" not in str(caught.value)
    if len(place) > 1 and value != 10**400:
        assert place[-1] in str(caught.value)


def test_a_run_of_before_there_were_samples_gets_their_defaults(content):
    for name in ("sample_tokens", "sample_prompt"):
        del content["config"]["eval"][name]
    with pytest.raises(ValueError, match="EvalConfig fields are missing"):
        read(content)
    content["format_version"] = 1
    assert read(content) == replace(FULL, eval=EvalConfig(every=9, batches=None))


def test_a_run_of_before_there_was_a_choice_of_attention_has_auto(content):
    del content["config"]["model"]["attention"]
    with pytest.raises(ValueError, match="fields are missing or unknown: attention"):
        read(content)
    content["format_version"] = 2
    assert read(content) == FULL


def test_every_field_must_be_there_and_none_else(content):
    config = content["config"]
    sections = [name for name, value in config.items() if isinstance(value, dict)]
    assert len(sections) == 8
    for place in [(), *((name,) for name in sections)]:
        for damage in ("lacks", "adds"):
            damaged = copy.deepcopy(content)
            at = damaged["config"]
            for name in place:
                at = at[name]
            name = sorted(at)[0] if damage == "lacks" else "learning_rate"
            if damage == "lacks":
                del at[name]
            else:
                at[name] = 1.0
            with pytest.raises(ValueError, match=rf"fields are missing or unknown: {name}$"):
                read(damaged)


def test_message_names_field_expectation_and_value():
    with pytest.raises(TypeError, match=r"^lr must be float, got 'abc'$"):
        OptimConfig(lr="abc")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^name must be 'adamw' or 'muon', got 'sgd'$"):
        OptimConfig(name="sgd")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^betas must be a tuple of float, float, got \[0.9, 1\]$"):
        OptimConfig(betas=[0.9, 1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^val must be Path or None, got 'data'$"):
        DataConfig(val="data")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^model must be LumenConfig or GPTConfig or RippleConfig"):
        TrainConfig(out=Path(), model=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^clip must be above zero, or None .* got 0.0$"):
        OptimConfig(clip=0)


def test_whole_number_is_kept_as_float_where_one_is_meant():
    optim = OptimConfig(lr=1, clip=1)
    assert (type(optim.lr), type(optim.clip)) == (float, float)


def test_batch_must_divide_into_its_microbatches():
    with pytest.raises(ValueError, match=r"batch_size 12 is not divisible by accumulation 5"):
        replace(FULL, accumulation=5)


def test_sequence_must_fit_the_context():
    data = replace(FULL.data, sequence_length=300)
    assert replace(FULL, data=data).data.sequence_length == 300  # Ripple has no limit
    with pytest.raises(ValueError, match=r"sequence_length 300 is above .* context of 256"):
        replace(FULL, data=data, model=RippleConfig(use_absolute_pos_emb=True))
    with pytest.raises(ValueError, match=r"sequence_length 300 is above .* context of 299"):
        replace(FULL, data=data, model=LumenConfig(max_seq_len=299))


def test_ripple_trains_without_its_decay_where_torch_does():
    model = RippleConfig(attention_window=32)
    decay = ("blocks.attention.decay",)
    for length, window, mode, frozen in (
        (32, 32, "as_torch", decay), (33, 32, "as_torch", ()), (32, None, "as_torch", decay),
        (32, 32, "always", ()), (32, None, "always", ()),
    ):  # fmt: skip
        config = TrainConfig(
            out=Path(),
            model=replace(model, attention_window=window, decay_gradient=mode),
            data=DataConfig(sequence_length=length),
        )
        assert config.trained_without == frozen
    assert TrainConfig(out=Path(), model=GPTConfig()).trained_without == ()


FREE = {
    "out": Path("b"), "mesh": MeshConfig(data=1), "checkpoint": CheckpointConfig(),
    "eval": replace(FULL.eval, every=3), "log": LogConfig(), "cluster": ClusterConfig(),
    "accumulation": 4, "loss_chunk": 3, "max_skipped": 1, "steps": 200, "init_from": None,
    "data": replace(FULL.data, train=Path("b"), val=Path("c")),
    "model": replace(FULL.model, unroll=2, remat="full", attention="blockwise"),
}  # fmt: skip


@pytest.mark.parametrize("name", FREE)
def test_resumed_run_may_change_where_and_how_it_runs(name):
    assert changed(FULL, replace(FULL, **{name: FREE[name]})) == []


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("", {"seed": 1}),
        ("eval", {"batches": 7}),
        ("data", {"batch_size": 6}),
        ("data", {"sequence_length": 16}),
        ("data", {"order": "random"}),
        ("model", {"n_layer": 3}),
        ("model", {"dtype": "bfloat16"}),
        ("model", {"dropout": 0.0}),
        ("model", {"window_mode": "exact"}),
        ("model", {"decay_gradient": "always"}),
        *(
            ("optim", {name: value})
            for name, value in {
                "name": "adamw", "lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-8,
                "weight_decay": 0.1, "decay": "matrices", "clip": 1.0, "schedule": "cosine",
                "warmup_steps": 4, "warmup": "nanogpt", "final_lr": 0.0, "decay_steps": 21,
                "muon_lr": 0.02,
            }.items()
        ),
    ],
)  # fmt: skip
def test_resumed_run_may_not_change_what_it_is(section, fields):
    ((name, value),) = fields.items()
    part = getattr(FULL, section) if section else FULL
    after = replace(FULL, **({section: replace(part, **fields)} if section else fields))
    dotted = f"{section}.{name}" if section else name
    assert changed(FULL, after) == [f"{dotted}: {getattr(part, name)!r} -> {value!r}"]


def test_other_model_is_named():
    found = changed(FULL, replace(FULL, model=GPTConfig()))
    assert "model: 'RippleConfig' -> 'GPTConfig'" in found


def test_steps_may_change_only_where_the_schedule_does_not_follow_from_them():
    def run(steps, **optim):
        return replace(FULL, steps=steps, optim=OptimConfig(**optim))

    constant = {"schedule": "constant"}
    assert changed(run(100, **constant), run(200, **constant)) == []
    for schedule, length in (("cosine", 100), ("wsd", 10)):
        before = run(100, schedule=schedule)
        (found,) = changed(before, run(200, schedule=schedule))
        assert found == (
            f"optim.decay_steps: {length} -> {2 * length} (it follows from steps: set "
            f"optim.decay_steps {length} to keep it)"
        )
        kept = run(200, schedule=schedule, decay_steps=length)  # the advice holds
        assert changed(before, kept) == []
        assert changed(kept, run(300, schedule=schedule, decay_steps=length)) == []


def test_recipes_are_the_originals():
    gpt = RECIPES["gpt"]
    assert RECIPES["lumen"] == gpt
    assert (gpt.lr, gpt.final_lr, gpt.warmup_steps) == (6e-4, 6e-5, 715)
    assert (gpt.betas, gpt.eps, gpt.clip) == ((0.9, 0.95), 1e-8, 1.0)
    assert (gpt.weight_decay, gpt.decay, gpt.warmup) == (0.1, "matrices", "build-nanogpt")
    ripple = RECIPES["ripple"]
    assert (ripple.betas, ripple.eps, ripple.clip) == ((0.9, 0.99), 1e-8, None)
    assert (ripple.weight_decay, ripple.decay, ripple.schedule) == (0.01, "all", "constant")
