"""The check passes what is the same, whatever the options, and refuses what it cannot use."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import dedent

import jax
import ml_dtypes
import numpy as np
import pytest

from convert.parity.compare import RUNGS, ParityReport
from convert.parity.jax_side import JaxSide
from convert.parity.ladder import check, choose_inputs
from convert.parity.rungs import weight_rows
from convert.parity.subject import Subject
from tests.convert.subjects import config_of, converted, quick_checks, subject_of

VARIANTS = {
    "lumen, kv heads 2 of 4": ("lumen", {}),
    "lumen, kv heads 4 of 4, base and eps": (
        "lumen", {"num_kv_heads": 4, "rope_theta": 500.0, "rms_norm_eps": 1e-3}
    ),
    "gpt, kv heads 1": ("gpt", {"n_kv_head": 1}),
    "gpt, kv heads 4 of 4, remat, unrolled": (
        "gpt", {"n_kv_head": 4, "remat": "full", "unroll": 2}
    ),
    "ripple, window, bias, positions": ("ripple", {}),
    "ripple, full": ("ripple", {"attention_window": None, "bias": False, "dropout": 0.0}),
    "ripple, exact window": ("ripple", {"window_mode": "exact", "use_absolute_pos_emb": False}),
    "ripple, decay always trained": ("ripple", {"decay_gradient": "always"}),
}  # fmt: skip
ORIGINALS = {
    "lumen": ("lumen.py", "SAGE_Lumen_3M", {"num_kv_heads": 4}),
    "gpt": ("gpt.py", "GPT", {}),
    "ripple": ("ripple/model.py", "RippleGPT", {"bias": False}),
}


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick_checks():
        yield


@pytest.fixture
def user_file(tmp_path):
    """Writes a user's file and names a class in it."""

    def write(text: str, name: str = "Theirs", file: str = "model.py") -> str:
        (tmp_path / file).write_text(dedent(text))
        return f"{tmp_path / file}:{name}"

    return write


def assert_passes(report: ParityReport) -> None:
    assert report.passed, (report.first_failure, report.cause)


def narrowed(subject: Subject, dtype: type) -> Subject:
    state = {key: array.astype(dtype) for key, array in subject.torch_state.items()}
    return converted(subject.config, state)


# ---- What passes


@pytest.mark.parametrize("variant", VARIANTS)
def test_check_passes_every_variant(variant):
    model, fields = VARIANTS[variant]
    lengths = (1, 4, 9) if model == "ripple" else (2, 9)
    report = check(subject_of(model, **fields), lengths=lengths)
    assert_passes(report)
    expected = set(RUNGS) - {"trajectory"} - ({"rope table"} if model == "ripple" else set())
    assert {row.rung for row in report.rows} == expected
    assert {row.dtype for row in report.rows} == {"bits", "float64", "float32"}
    layers = {row.layer for row in report.rows if row.rung == "mlp"}
    assert layers == {0, 1}


@pytest.mark.parametrize("model", ["lumen", "gpt", "ripple"])
def test_check_passes_with_the_lengths_it_chooses(model):
    report = check(subject_of(model), dtypes=())
    assert_passes(report)
    assert report.lengths == ((1, 2, 3, 4, 5, 9, 16) if model == "ripple" else (1, 2, 16))
    seen = {row.length for row in report.rows if row.rung == "gradient"}
    assert seen == ({4, 16} if model == "ripple" else {16})


@pytest.mark.parametrize("model", ["lumen", "gpt", "ripple"])
def test_check_passes_bfloat16_weights(model):
    subject = narrowed(subject_of(model), ml_dtypes.bfloat16)
    assert_passes(check(subject, lengths=(9,)))


@pytest.mark.parametrize("model", ["lumen", "gpt", "ripple"])
def test_check_climbs_in_bfloat16_on_request(model):
    report = check(subject_of(model), lengths=(1, 9), dtypes=("bfloat16",))
    assert_passes(report)
    seen = {row.rung for row in report.rows if row.dtype == "bfloat16"}
    assert seen == set(RUNGS) - {"weights", "rope table", "trajectory"}


def test_check_uses_the_tokens_it_is_given():
    subject, tokens = subject_of("gpt"), np.arange(40, dtype=np.uint16) % 31
    inputs = choose_inputs(subject.config, subject.parameters, tokens, (1, 9), 0)
    np.testing.assert_array_equal(inputs.tokens_BT, tokens.reshape(4, 10))
    np.testing.assert_array_equal(inputs.samples(9)[0][1], inputs.tokens_BT[:, 1:])
    assert inputs.tokens_BT.dtype == np.int64
    report = check(subject, tokens=tokens, lengths=(1, 9), dtypes=())
    assert_passes(report)
    drawn = check(subject, lengths=(1, 9), dtypes=())
    losses = [
        row.error for r in (report, drawn) for row in r.rows
        if row.rung == "logits" and row.length == 9
    ]  # fmt: skip
    assert losses[0] != losses[1]


def test_lengths_chosen_fit_the_tokens():
    subject = subject_of("gpt")
    inputs = choose_inputs(subject.config, subject.parameters, np.arange(6), None, 0)
    assert inputs.lengths == (1, 2, 5)
    assert inputs.tokens_BT.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(("length", "batch"), [(1, 16), (9, 16), (17, 15), (256, 1), (300, 1)])
def test_sequences_are_many_where_they_are_short(length, batch):
    inputs = choose_inputs(config_of("gpt", block_size=300), 1, None, (1, 9, 17, 256, 300), 0)
    tokens, targets = inputs.samples(length)[0]
    assert tokens.shape == targets.shape == (batch, length)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])


def test_lengths_are_what_the_time_allows():
    config = config_of("gpt", block_size=512)
    inputs = choose_inputs(config, 10**10, None, None, 0)
    assert inputs.lengths == (1, 2, 100)
    assert inputs.gradient_lengths == (8,)
    assert choose_inputs(config, 1, None, (1, 5), 0).gradient_lengths == (5,)


def test_report_says_what_was_checked_and_is_plain_data():
    report = check(subject_of("lumen"), lengths=(1, 5))
    assert report.model == "lumen"
    assert report.against == "jaxslm's torch counterpart"
    assert report.parameters == sum(array.size for array in subject_of("lumen").arrays.values())
    assert report.config["num_kv_heads"] == 2
    assert len(report.heatmaps) == 4
    json.dumps(asdict(report), allow_nan=False)


@pytest.mark.parametrize("x64", [False, True])
def test_check_leaves_jax_as_it_was(x64):
    before = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    with jax.enable_x64(x64), jax.default_matmul_precision("bfloat16"):
        check(subject_of("lumen"), lengths=(2,), dtypes=())
        with pytest.raises(ValueError, match="cannot be built|no file"):
            check(subject_of("lumen"), against="absent.py:Lumen")
        assert jax.config.jax_enable_x64 == x64
        assert jax.config.jax_default_matmul_precision == "bfloat16"
    assert (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision) == before


# ---- Ripple's decay


def test_decay_gradient_is_zero_where_torch_has_none_and_right_beyond_the_window():
    report = check(subject_of("ripple"), lengths=(4, 9), dtypes=("float32",))
    assert_passes(report)
    for dtype in ("float64", "float32"):
        rows = [
            row for row in report.rows
            if row.rung == "gradient" and row.dtype == dtype and "decay" in (row.tensor or "")
        ]  # fmt: skip
        short, long = ([row for row in rows if row.length == n] for n in (4, 9))
        assert len(short) == 6
        assert all(row.limit == row.error == 0.0 for row in short)
        assert len(long) == (6 if dtype == "float64" else 1)
        assert all(row.limit > 0.0 and not row.note for row in long)
    still = [
        row for row in report.rows
        if row.rung == "adamw step" and row.tensor == "blocks.1.heads.2.decay_factor"
    ]  # fmt: skip
    assert {row.length: row.limit == 0.0 for row in still} == {4: True, 9: False}


def test_decay_gradient_in_jax_is_nonzero_beyond_the_window_alone():
    subject = subject_of("ripple")
    side = JaxSide(subject.config, subject.arrays, "float32")
    tokens = np.arange(20).reshape(2, 10)
    for length in (4, 9):
        _, gradients = side.loss_and_gradients(tokens[:, :length], tokens[:, 1 : length + 1])
        decays = [g for key, g in gradients.items() if key.endswith("decay_factor")]
        assert len(decays) == 6
        assert all((g != 0.0).all() == (length == 9) for g in decays)


# ---- What never passes


@pytest.mark.parametrize(
    ("key", "value"),
    [("lm_head.weight", np.nan), ("blocks.1.ffwd.fc1.weight", np.inf), ("ln_f.bias", -np.inf)],
)
def test_weights_that_are_not_finite_in_both_halves_never_pass(key, value):
    subject = subject_of("ripple")
    state = {name: array.copy() for name, array in subject.torch_state.items()}
    state[key].flat[3] = value
    report = check(converted(subject.config, state), lengths=(9,))
    assert not report.passed
    assert "NaN or infinite" in (report.cause or "")


def test_report_without_rows_does_not_pass():
    report = check(subject_of("gpt"), lengths=(1,), dtypes=())
    assert report.passed
    assert not replace(report, rows=()).passed


def test_weights_rung_fails_on_one_bit_and_on_a_missing_digest():
    subject = subject_of("gpt")
    assert all(row.passed for row in weight_rows(subject))
    arrays = {name: array.copy() for name, array in subject.arrays.items()}
    arrays["final_norm.bias"].view(np.int32)[3] ^= 1
    wrong = [row.tensor for row in weight_rows(replace(subject, arrays=arrays)) if not row.passed]
    assert wrong == ["transformer.ln_f.bias"]
    fewer = {k: v for k, v in subject.torch_state.items() if k != "transformer.ln_f.weight"}
    wrong = [row.tensor for row in weight_rows(replace(subject, torch_state=fewer))
             if not row.passed]  # fmt: skip
    assert wrong == ["transformer.ln_f.weight"]


def test_negative_zero_is_another_bit_pattern():
    subject = subject_of("gpt")
    state = dict(subject.torch_state) | {"transformer.ln_f.bias": np.zeros(16, np.float32)}
    subject = converted(subject.config, state)
    arrays = dict(subject.arrays) | {"final_norm.bias": -subject.arrays["final_norm.bias"]}
    assert not all(row.passed for row in weight_rows(replace(subject, arrays=arrays)))


# ---- Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": np.array([3] * 20 + [31])}, "reach from 3 to 31, but the vocabulary has 31"),
        ({"tokens": np.array([3] * 20 + [-1])}, "reach from -1 to 3"),
        ({"tokens": np.arange(9), "lengths": (9,)}, "10 tokens are needed, the file has 9"),
        ({"tokens": np.arange(1)}, "2 tokens are needed at least, the file has 1"),
        ({"tokens": np.arange(0)}, "2 tokens are needed at least, the file has 0"),
        ({"lengths": (1, 17)}, r"from 1 to 16, got \[1, 17\]"),
        ({"lengths": (0, 3)}, r"from 1 to 16, got \[0, 3\]"),
        ({"lengths": ()}, r"from 1 to 16, got \[\]"),
    ],
)
def test_tokens_and_lengths_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check(subject_of("gpt"), **options)


def test_ripple_without_positions_has_lengths_beyond_its_block_size():
    config = config_of("ripple", use_absolute_pos_emb=False)
    assert choose_inputs(config, 1, None, (40,), 0).lengths == (40,)
    with pytest.raises(ValueError, match=r"from 1 on, got \[0\]"):
        choose_inputs(config, 1, None, (0,), 0)


# ---- Against a class in a file


@pytest.mark.parametrize("model", ORIGINALS)
@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16",)], ids=lambda dtypes: dtypes[0])
def test_check_passes_against_the_originals(shared, model, dtypes):
    file, name, fields = ORIGINALS[model]
    against = f"{shared('originals', *file.split('/'))}:{name}"
    report = check(subject_of(model, **fields), against=against, lengths=(1, 9), dtypes=dtypes)
    assert_passes(report)
    assert report.against == against


def test_check_passes_against_a_users_class_and_fails_where_it_differs(user_file):
    text = """
        from convert.counterparts import gpt

        class Theirs(gpt.GPT):
            def __init__(self, config):
                super().__init__(config)
                self.transformer.h[1].ln_2.eps = {eps}
    """
    assert_passes(check(subject_of("gpt"), against=user_file(text.format(eps=1e-5)),
                        lengths=(1, 9), dtypes=()))  # fmt: skip
    report = check(subject_of("gpt"), against=user_file(text.format(eps=1e-4)),
                   lengths=(1, 9), dtypes=())  # fmt: skip
    assert not report.passed
    first = report.first_failure
    assert first is not None
    assert (first.rung, first.layer) == ("mlp", 1)


def test_users_config_class_is_filled(user_file):
    against = user_file("""
        from dataclasses import dataclass
        from convert.counterparts import gpt

        @dataclass
        class GPTConfig:
            n_embd: int
            n_layer: int = 99
            n_head: int = 99
            n_kv_head: int = 99
            vocab_size: int = 99
            block_size: int = 99
            layer_norm_eps = 1e-5
            rope_base = 10000.0

        class Theirs(gpt.GPT):
            def __init__(self, config: GPTConfig):
                assert type(config) is GPTConfig
                super().__init__(config)
    """)
    assert_passes(check(subject_of("gpt"), against=against, lengths=(3,), dtypes=()))


def test_users_file_may_import_its_neighbours(user_file):
    user_file("from convert.counterparts.gpt import GPT", file="their_layers.py")
    against = user_file("""
        from their_layers import GPT

        class Theirs(GPT):
            pass
    """)
    assert_passes(check(subject_of("gpt"), against=against, lengths=(3,), dtypes=()))


CLASS = """
    from torch import nn

    class Theirs(nn.Module):
        def __init__(self, config):
            super().__init__()
            {init}
"""
GPT = """
    from convert.counterparts import gpt

    class Theirs(gpt.GPT):
        def forward(self, tokens, targets=None):
            logits, loss = super().forward(tokens, targets)
            return {result}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import absent_module_of_theirs", "fails to import: ModuleNotFoundError"),
        ("def broken(:", "fails to import: SyntaxError"),
        ("raise ValueError('their own words')", "model.py fails to import.*their own words"),
        ("import sys; sys.exit(0)", "fails to import: SystemExit"),
        ("", "no torch module class Theirs; it has none"),
        ("class Theirs: pass", "no torch module class Theirs"),
        ("Theirs = 3", "no torch module class Theirs"),
        ("from torch.nn import Linear as Other", "no torch module class Theirs; it has Other"),
        (CLASS.format(init="raise KeyError('x')"), "cannot be built: KeyError: 'x'"),
        (CLASS.format(init="raise SystemExit(3)"), "cannot be built: SystemExit: 3"),
        (CLASS.format(init="pass"), "Theirs does not take these weights"),
        (GPT.format(result="1 / 0"), "Theirs fails in float64: ZeroDivisionError"),
        (GPT.format(result="logits.argmax(-1)"), "must return .logits, loss."),
        (GPT.format(result="None"), "must return logits"),
        (GPT.format(result="logits"), "must return .logits, loss."),
        (GPT.format(result="(logits, logits)"), "must return .logits, loss."),
    ],
)
def test_users_file_that_cannot_be_used_is_a_value_error(user_file, text, message):
    with pytest.raises(ValueError, match=message):
        check(subject_of("gpt"), against=user_file(text), lengths=(3,))


@pytest.mark.parametrize("against", ["model.py", ":GPT", "model.py:", ""])
def test_against_wants_a_file_and_a_class(against):
    with pytest.raises(ValueError, match="FILE.py:CLASS"):
        check(subject_of("gpt"), against=against)


def test_against_a_file_that_is_absent_or_no_python(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        check(subject_of("gpt"), against=f"{tmp_path / 'absent.py'}:GPT")
    with pytest.raises(ValueError, match="there is no file"):
        check(subject_of("gpt"), against=f"{tmp_path}:GPT")
    Path(tmp_path / "weights.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match="is not a Python file"):
        check(subject_of("gpt"), against=f"{tmp_path / 'weights.bin'}:GPT")
