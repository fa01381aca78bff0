"""The config: from every source, never guessed, and no two sources may disagree."""

import pytest

from convert.resolve import CHOICES, parse_overrides, resolve
from convert.rules import leaves
from convert.source import identify, open_torch
from convert.tables import TABLES
from jaxslm.models import GPTConfig, LumenConfig, RippleConfig
from tests.convert.checkpoints import config_of, overrides, pickled_config, said, save, state_of

MODELS = ["lumen", "gpt", "ripple"]
SHAPES = {
    model: {key: tuple(t.shape) for key, t in state_of(model).items()} for model in MODELS
}  # fmt: skip
UNKNOWN = {
    "lumen": ("num_heads", "num_kv_heads", "max_seq_len", "rms_norm_eps", "rope_theta"),
    "gpt": ("block_size", "n_head", "n_kv_head"),
    "ripple": ("dropout", "attention_window"),  # the position table tells block_size
}


def resolved(model: str, sources=None, **options):
    return resolve(TABLES[model], SHAPES[model], sources or {}, **options)


# Sources


@pytest.mark.parametrize("model", MODELS)
def test_one_source_is_enough_and_is_named(model):
    found = resolved(model, {"model_args": said(model)})
    assert found.config() == config_of(model)
    assert (found.unknown, found.conflicts, found.unused) == ((), (), {})
    for name in said(model):
        assert found.origins[name].startswith("model_args")
    for name in CHOICES:
        assert found.origins.get(name, "default") == "default"
    for name in TABLES[model].constants:
        assert found.origins[name] == "constant of the original"


@pytest.mark.parametrize("model", MODELS)
def test_what_weights_cannot_tell_is_not_guessed(model):
    found = resolved(model)
    assert found.unknown == UNKNOWN[model]
    assert found.fitting_preset is None
    with pytest.raises(ValueError, match="does not say") as caught:
        found.config()
    wanted = " ".join(f"{name}=..." for name in UNKNOWN[model])
    assert str(caught.value) == (
        f"the checkpoint does not say {', '.join(UNKNOWN[model])} and its weights cannot tell: "
        f"pass --config {wanted}"
    )


@pytest.mark.parametrize("model", MODELS)
def test_shapes_tell_the_rest(model):
    wanted = [f"{name}={said(model)[name]}" for name in UNKNOWN[model] if "kv" not in name]
    found = resolved(model, overrides=tuple(wanted))
    assert found.config() == config_of(model)
    for name, value in said(model).items():
        given = any(text.startswith(f"{name}=") for text in wanted)
        assert found.origins[name] == ("--config" if given else "the tensors' shapes"), name
        assert found.values[name] == value


@pytest.mark.parametrize(
    ("preset", "model", "config"),
    [
        ("lumen-3m", "lumen", LumenConfig()),
        ("gpt-250m", "gpt", GPTConfig()),
        ("ripple", "ripple", RippleConfig()),
    ],
)
def test_preset_is_suggested_where_the_shapes_fit_and_gives_all(preset, model, config):
    table = TABLES[model]
    shapes = {part.key: part.shape for leaf in leaves(table, config) for part in leaf.parts}
    without = resolve(table, shapes, {})
    assert without.fitting_preset == preset
    with pytest.raises(ValueError, match=f"the shapes fit --preset {preset}, if that is what"):
        without.config()
    found = resolve(table, shapes, {}, preset=preset)
    assert found.config() == config
    origins = {found.origins[name] for name in said(model)}
    assert origins == {f"preset {preset}", f"preset {preset}, the tensors' shapes"}


def test_preset_of_another_shape_disagrees_with_the_tensors():
    found = resolved("lumen", preset="lumen-3m")
    assert "hidden_dim is 256 by preset lumen-3m, but 16 by the tensors' shapes" in found.conflicts
    with pytest.raises(ValueError, match="the sources disagree:\n  "):
        found.config()


def test_preset_of_another_model_is_refused():
    with pytest.raises(ValueError, match="no preset 'ripple' for gpt: the presets are gpt-250m"):
        resolved("gpt", preset="ripple")


def test_constants_of_the_original_can_be_changed():
    found = resolved("gpt", {"model_args": said("gpt")}, overrides=("layer_norm_eps=1e-3",))
    assert found.config().layer_norm_eps == 1e-3
    assert found.origins["layer_norm_eps"] == "--config"
    assert found.origins["rope_base"] == "constant of the original"
    found = resolved("gpt", {"config.json": said("gpt") | {"rope_base": 500}})
    assert found.config().rope_base == 500.0
    assert isinstance(found.config().rope_base, float)


def test_our_choices_can_be_passed():
    options = (
        "window_mode=exact", "decay_gradient=always", "unroll=2", "remat=full",
        "attention=blockwise",
    )  # fmt: skip
    found = resolved("ripple", {"model_args": said("ripple")}, overrides=options)
    assert found.config() == config_of(
        "ripple", window_mode="exact", decay_gradient="always", unroll=2, remat="full",
        attention="blockwise",
    )  # fmt: skip


def test_pickled_config_object_and_model_args_are_both_read(tmp_path):
    path = save(
        {
            "model": state_of("ripple"),
            "model_args": said("ripple"),
            "config": pickled_config("ripple"),
        },
        tmp_path / "a.pt",
    )
    _, found = identify(path)
    assert found.config() == config_of("ripple")
    assert found.origins["n_head"] == (
        "model_args, pickled gone_ripple.RippleConfig, the tensors' shapes"
    )


def test_pickled_config_object_without_fields_tells_nothing(tmp_path):
    config = pickled_config("lumen")
    config.__dict__.clear()  # the original's fields are attributes of its class
    path = save({"model": state_of("lumen"), "config": config}, tmp_path / "a.pt")
    checkpoint, found = identify(path)
    assert checkpoint.config_sources == {"pickled gone_lumen.LumenConfig": {}}
    assert found.unknown == UNKNOWN["lumen"]
    with pytest.raises(ValueError, match=r"a\.pt: the checkpoint does not say num_heads"):
        open_torch(path)
    assert open_torch(path, overrides=tuple(overrides("lumen"))).config == config_of("lumen")


def test_unused_fields_are_reported_by_source():
    sources = {
        "model_args": said("gpt") | {"learning_rate": 1e-3, "dropout": 0.1},
        "config.json": {"evil\x1b[2J": 1},
    }
    found = resolved("gpt", sources)
    assert found.unused == {
        "model_args": ("learning_rate", "dropout"),
        "config.json": ("evil\\x1b[2J",),
    }
    assert found.config() == config_of("gpt")


# Disagreement


@pytest.mark.parametrize(
    ("sources", "options", "conflict"),
    [
        (
            {"model_args": {"n_head": 4}, "pickled model.GPTConfig": {"n_head": 8}},
            {},
            "n_head is 4 by model_args, but 8 by pickled model.GPTConfig",
        ),
        (
            {"config.json": {"n_head": 4}},
            {"overrides": ("n_head=2",)},
            "n_head is 2 by --config, but 4 by config.json",
        ),
        (
            {"config.json": {"n_layer": 3}},
            {},
            "n_layer is 3 by config.json, but 2 by the tensors' shapes",
        ),
        ({}, {"overrides": ("n_layer=3",)}, "n_layer is 3 by --config, but 2 by the tensors' sh"),
        (
            {},
            {"overrides": ("n_head=4",), "preset": "gpt-250m"},
            "n_head is 4 by --config, but 16 by preset gpt-250m",
        ),
        (
            {"model_args": {"n_head": 4, "n_kv_head": 4}},
            {},
            "n_kv_head is 4 by model_args, but 2 by the tensors' shapes",
        ),
        (
            {"model_args": {"n_head": 4, "vocab_size": 32}},
            {},
            "vocab_size is 32 by model_args, but 31 by the tensors' shapes",
        ),
        (
            {"a": {"n_head": "e\x1b[2J" * 99}, "b": {"n_head": 4}},
            {},
            "n_head is 'e\\x1b[2Je\\x1b",
        ),
    ],
)
def test_sources_that_disagree_are_both_named(sources, options, conflict):
    found = resolved("gpt", sources, **options)
    assert any(text.startswith(conflict) and len(text) < 200 for text in found.conflicts)
    with pytest.raises(ValueError, match="the sources disagree") as caught:
        found.config()
    assert conflict in str(caught.value)


def test_all_disagreements_are_listed():
    sources = {
        "model_args": said("ripple"),
        "config": said("ripple", dropout=0.5, block_size=8, attention_window=None),
    }
    found = resolved("ripple", sources)
    assert [text.partition(" ")[0] for text in found.conflicts] == [
        "block_size", "dropout", "attention_window",
    ]  # fmt: skip
    assert found.conflicts[2] == "attention_window is 4 by model_args, but None by config"


def test_a_bool_is_no_number_and_an_int_may_be_a_float():
    found = resolved("ripple", {"a": {"bias": True}, "b": {"bias": 1}})
    assert found.conflicts == ("bias is True by a, but 1 by b",)
    found = resolved("lumen", {"a": {"rope_theta": 10000}, "b": {"rope_theta": 10000.0}})
    assert found.conflicts == ()


@pytest.mark.parametrize("window", [0, None])
@pytest.mark.parametrize("other", ["0", "none", "None"])
def test_window_zero_is_no_window(window, other):
    sources = {"model_args": said("ripple") | {"attention_window": window}}
    found = resolved("ripple", sources, overrides=(f"attention_window={other}",))
    assert found.conflicts == ()
    assert found.config().attention_window is None
    assert resolved("ripple", sources, overrides=("attention_window=4",)).conflicts == (
        f"attention_window is 4 by --config, but {window} by model_args",
    )


# Values that make no model


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ("gpt", {"n_head": 3}, "n_embd 16 is not divisible by n_head 3"),
        ("gpt", {"n_head": 6}, "n_embd 16 is not divisible by n_head 6"),
        ("gpt", {"n_head": 16, "n_kv_head": 8}, "n_embd / n_head = 1 must be even for RoPE"),
        ("gpt", {"n_head": -4}, "n_head must be above zero, got -4"),
        ("gpt", {"n_head": 0}, "n_head must be above zero, got 0"),
        ("gpt", {"n_head": "4"}, "n_head must be int, got '4'"),
        ("gpt", {"n_head": [4]}, r"n_head must be int, got \[4\]"),
        ("gpt", {"n_head": 4.0}, "n_head must be int, got 4.0"),
        ("gpt", {"n_head": True}, "n_head must be int, got True"),
        ("gpt", {"block_size": None}, "block_size must be int, got None"),
        ("lumen", {"num_heads": 3}, "hidden_dim 16 is not divisible by num_heads 3"),
        ("lumen", {"num_heads": "%d%d"}, "num_heads must be int, got '%d%d'"),
        ("lumen", {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be float, got '1e-6'"),
        ("ripple", {"attention_window": -1}, "attention_window must be 1 or more"),
        ("ripple", {"dropout": 1.5}, "dropout must be between 0 and 1, got 1.5"),
    ],
)
def test_values_that_make_no_model_are_named(model, fields, words):
    found = resolved(model, {"config.json": said(model) | fields})
    with pytest.raises(ValueError, match=f"^the checkpoint's config makes no model: {words}"):
        found.config()


@pytest.mark.parametrize("model", ["gpt", "lumen"])
def test_heads_that_do_not_divide_are_named_and_no_kv_heads_asked_for(model):
    heads, kv, width = (
        ("n_head", "n_kv_head", "n_embd") if model == "gpt"
        else ("num_heads", "num_kv_heads", "hidden_dim")
    )  # fmt: skip
    options = tuple(
        text for text in overrides(model) if not text.startswith((f"{heads}=", f"{kv}="))
    )
    found = resolved(model, overrides=(*options, f"{heads}=3"))
    with pytest.raises(ValueError, match=f"{width} 16 is not divisible by {heads} 3"):
        found.config()


@pytest.mark.parametrize("model", MODELS)
def test_table_without_width_is_no_crash(model):
    shapes = {key: (31, 0) if shape[0] == 31 else shape for key, shape in SHAPES[model].items()}
    found = resolve(TABLES[model], shapes, {"model_args": said(model)})
    with pytest.raises(ValueError, match=r"is 1[68] by model_args, but 0 by the tensors' shapes"):
        found.config()
    shapes = dict.fromkeys(SHAPES[model], ())
    found = resolve(TABLES[model], shapes, {"model_args": said(model)})
    assert isinstance(found.conflicts, tuple)


def test_head_number_of_a_ripple_without_heads_is_not_believed():
    shapes = {"blocks.0.ln1.weight": (4,), "ln_f.weight": (4,)}
    huge = said("ripple") | {"n_layer": 1, "n_head": 10**12, "n_embd": 10**12}
    found = resolve(TABLES["ripple"], shapes, {"model_args": huge})
    assert f"n_head is {10**12} by model_args, but 0 by the tensors' shapes" in found.conflicts


# --config


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (GPTConfig, "n_head=16", 16),
        (GPTConfig, "n_head=1_6", 16),
        (GPTConfig, "rope_base=1e4", 10000.0),
        (GPTConfig, "rope_base=500", 500.0),
        (RippleConfig, "bias=False", False),
        (GPTConfig, "dtype=bfloat16", "bfloat16"),
        (GPTConfig, "dtype=", ""),
        (RippleConfig, "attention_window=None", None),
        (RippleConfig, "attention_window=null", None),
        (RippleConfig, "attention_window=8", 8),
        (RippleConfig, "bias=TRUE", True),
        (RippleConfig, "window_mode=a=b", "a=b"),
    ],
)
def test_override_is_parsed_by_its_fields_type(kind, text, value):
    parsed = parse_overrides(kind, (text,))
    assert parsed == {text.partition("=")[0]: value}
    assert type(next(iter(parsed.values()))) is type(value)


@pytest.mark.parametrize(
    ("kind", "texts", "words"),
    [
        (GPTConfig, ["n_head"], "--config takes FIELD=VALUE, got 'n_head'"),
        (GPTConfig, [""], "--config takes FIELD=VALUE, got ''"),
        (GPTConfig, ["n_heads=4"], "--config n_heads: no such field; did you mean n_head"),
        (GPTConfig, ["zzz=4"], "no such field; did you mean block_size or vocab_size or n_layer"),
        (GPTConfig, ["n_head=4", "n_head=4"], "--config gives n_head twice"),
        (GPTConfig, ["n_head=four"], "--config n_head takes int, got 'four'"),
        (GPTConfig, ["n_head=4.0"], "--config n_head takes int, got '4.0'"),
        (GPTConfig, ["n_head=none"], "--config n_head takes int, got 'none'"),
        (GPTConfig, ["n_head="], "--config n_head takes int, got ''"),
        (GPTConfig, ["rope_base=big"], "--config rope_base takes float, got 'big'"),
        (RippleConfig, ["bias=1"], "--config bias takes bool, got '1'"),
        (RippleConfig, ["attention_window=all"], "takes int or none, got 'all'"),
    ],
)
def test_override_that_cannot_be_understood_is_refused(kind, texts, words):
    with pytest.raises(ValueError, match=words):
        parse_overrides(kind, tuple(texts))
