"""Reports say what the check found: in 80 columns, in JSON, on a page that loads nothing."""

import io
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from convert.parity.compare import ParityReport, Row
from convert.parity.report import figures, print_report, to_json, write_json
from convert.parity.report_figures import drift, heatmap
from convert.parity.report_html import page, write_html
from convert.parity.report_words import rungs

HOSTILE = "a<script>alert(1)</script>&\"'[red]$x$\x1b[2J\u202e"
CAUSE = "the query or key projections"


def row(rung: str, dtype: str = "float64", measure: float = 3e-16, **fields: Any) -> Row:
    limit = {"bits": 0.0, "float64": 1e-10}.get(dtype, 4.0)
    low = dtype not in ("bits", "float64")
    values: dict[str, Any] = {
        "error": measure * 1e-7 if low else measure,
        "torch_error": 1e-7 if low else None,
        "limit": limit,
        "passed": measure <= limit,
    }
    return Row(rung=rung, dtype=dtype, measure=measure, **(values | fields))


KEY = "transformer.h.11.attn.query_key_value_projection.weight"


def passing_rows(*low: str) -> list[Row]:
    rows = [row("weights", "bits", 0.0, tensor=f"layers.{n}.weight") for n in range(120)]
    for dtype in ("float64", *low):
        unit = 1e-17 if dtype == "float64" else 0.1
        for layer in range(3):
            for rung in ("attention", "mlp"):
                rows += [
                    row(rung, dtype, unit * (2 + layer) * length, layer=layer, length=length)
                    for length in (1, 8)
                ]
        rows.append(row("logits", dtype, unit * 30, length=8))
        rows.append(row("gradient", dtype, unit * 20, length=8, tensor=KEY))
        rows.append(row("greedy tokens", dtype, 0.0, note="20 of 20 equal", torch_error=None))
    return rows


def report(rows: list[Row], **fields: Any) -> ParityReport:
    values: dict[str, Any] = {
        "source": "ripple.pt",
        "against": "our counterpart",
        "model": "ripple",
        "config": {"n_layer": 3, "attention_window": None, "layer_norm_eps": 1e-5},
        "parameters": 12345,
        "lengths": (1, 8),
        "heatmaps": {"h.0.weight": {"difference": [[1e-9, 0.0], [2e-9, 1e-10]],
                                    "reference": [[0.1, 0.2], [0.3, 0.4]]}},
        "versions": {"jax": "0.10.2", "torch": "2.13.0"},
        "seconds": 12.3456,
    }  # fmt: skip
    return ParityReport(rows=tuple(rows), **(values | fields))


PASSING = report(passing_rows("float32"))
WIDE = report(passing_rows("float32", "bfloat16"))
FAILING = report(
    [
        replace(r, measure=2e-5, error=2e-5, passed=False, first_position=5)
        if (r.rung, r.dtype, r.layer, r.length) == ("attention", "float64", 1, 8)
        else replace(r, measure=math.inf, error=math.nan, passed=False)
        if r.layer == 2
        else r
        for r in passing_rows("float32")
    ],
    cause=CAUSE,
)
EMPTY = report([], lengths=(), heatmaps={})
NASTY = report(
    [
        row("weights", "bits", 1.0, tensor=HOSTILE, note=HOSTILE),
        *(row(rung, dtype, math.nan, passed=False, layer=0, error=math.inf, torch_error=math.nan,
              note=HOSTILE) for rung in ("attention", "mlp") for dtype in ("float64", "float32")),
        row("gradient", "float32", 9.0, tensor=HOSTILE * 4, length=8),
        row("greedy tokens", "float64", math.inf, note=f"parts at token 3: {HOSTILE}"),
    ],
    source=HOSTILE, against=HOSTILE, config={HOSTILE: HOSTILE}, cause=HOSTILE,
    versions={HOSTILE: HOSTILE},
    heatmaps={HOSTILE: {"difference": [[math.nan, math.inf]], "reference": [[0.0, 0.0]]}},
)  # fmt: skip
ALL = pytest.mark.parametrize("checked", [PASSING, WIDE, FAILING, EMPTY, NASTY],
                              ids=["passing", "bfloat16", "failing", "empty", "nasty"])  # fmt: skip


def printed(checked: ParityReport, width: int = 80) -> list[str]:
    file = io.StringIO()
    print_report(checked, Console(file=file, width=width))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@ALL
def test_print_fits_80_columns_without_escapes(checked: ParityReport):
    lines = printed(checked)
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() and "…" not in line for line in lines)


def test_print_has_one_line_a_rung_with_the_worst_row():
    lines = printed(PASSING)
    table = lines[lines.index("") + 4 : lines.index("parity: passed") - 1]
    assert [line.split("  ")[0].removesuffix(" ok") for line in table] == [
        "weights", "attention", "mlp", "logits", "gradient", "greedy tokens"
    ]  # fmt: skip
    assert table[0].endswith("all 120 tensors byte for byte")
    assert table[1].split() == [
        "attention", "ok", "3.2e-16", "3.2e-07", "1.0e-07", "3.20",
        "12:", "layer", "2,", "8", "tokens",
    ]  # fmt: skip
    assert table[4].endswith("2: ..rojection.weight, 8 tokens")
    assert table[5].endswith("20 of 20 equal")
    assert lines[-1] == "parity: passed"


def test_print_names_a_tensor_in_full_where_there_is_room():
    assert any(
        "h.11.attn.query_key_value_projection.weight" in line for line in printed(PASSING, 120)
    )


def test_print_gives_bfloat16_its_own_table():
    lines = printed(WIDE)
    head = next(line for line in lines if "bfloat16" in line)
    assert "float64" not in head
    assert sum(line.startswith("attention ") for line in lines) == 2
    assert sum(line.startswith("weights ") for line in lines) == 1


def test_print_of_failure_names_place_position_and_cause():
    words = " ".join(" ".join(printed(FAILING)).split())
    assert "parity: FAILED" in words
    assert (
        "first departs attention of layer 1, float64, 8 tokens, from position 5 (counted from 0): "
        f"2.0e-05, limit 1e-10 likely cause {CAUSE}"
    ) in words
    failing = [line.split()[:2] for line in printed(FAILING) if " FAIL" in line]
    assert failing[:2] == [["attention", "FAIL"], ["mlp", "FAIL"]]


def test_print_of_an_empty_report_fails():
    assert "parity: FAILED" in printed(EMPTY)
    assert any("nothing was compared" in line for line in printed(EMPTY))


def test_worst_row_is_the_one_nearest_its_limit_or_furthest_beyond():
    exact = row("loss", "float64", 0.0, limit=0.0)
    far, near = row("loss", "float64", 1e-12), row("loss", "float32", 3.9)
    over = row("loss", "float32", 5.0)
    leaked = row("loss", "float64", 1e-20, limit=0.0, passed=False)
    broken = row("loss", "float64", math.nan, passed=False)
    better_first = [exact, far, near, over]
    for worst in (leaked, broken):
        for rows in (better_first, [*better_first, worst]):
            assert rungs(report(rows))[0].worst is rows[-1]
            assert rungs(report(rows[::-1]))[0].worst is rows[-1]
    assert rungs(report([far, near, exact]))[0].worst is near
    refused = row("loss", "float64", 0.0, passed=False)
    assert rungs(report([near, refused]))[0].worst is refused


@ALL
def test_json_is_strict_and_complete(checked: ParityReport, tmp_path: Path):
    path = tmp_path / "report.json"
    path.write_text("an earlier report")
    write_json(checked, path)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content == to_json(checked)
    assert content["schema"] == 1
    assert content["verdict"] == ("passed" if checked.passed else "failed")
    assert content["lengths"] == list(checked.lengths)
    assert (content["first_failure"] is None) == (checked.first_failure is None)
    back = []
    for entry in content["rows"]:
        values: dict[str, Any] = {
            k: float(v) if v in ("inf", "nan") else v for k, v in entry.items()
        }
        back.append(Row(**values))
    assert repr(back) == repr(list(checked.rows))


def test_json_names_the_first_failure():
    first = to_json(FAILING)["first_failure"]
    assert (first["place"], first["first_position"]) == ("attention of layer 1", 5)
    assert to_json(FAILING)["cause"] == CAUSE


def test_figures_hold_the_worst_row_of_each_rung_and_dtype():
    short = figures(FAILING)
    json.dumps(short, allow_nan=False)
    assert list(short["worst"]) == [
        "weights", "attention", "mlp", "logits", "gradient", "greedy tokens"
    ]  # fmt: skip
    worst = short["worst"]["attention"]
    assert (worst["float64"]["layer"], worst["float64"]["measure"]) == (2, "inf")
    assert worst["float32"]["comparisons"] == 6
    assert figures(EMPTY)["verdict"] == "failed"


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in turn."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@ALL
def test_page_is_well_formed_and_loads_nothing(checked: ParityReport):
    text = page(checked)
    read = Page(text)
    assert read.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    for name, value in read.attributes:
        assert not name.startswith("on")
        assert name.startswith("xmlns") or "//" not in value
        if name in ("href", "src", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,"))
    assert "@import" not in text
    assert "<?xml" not in text
    assert text.upper().count("<!DOCTYPE") == 1
    assert all(part.startswith("#") for part in text.split("url(")[1:])


@ALL
def test_page_has_the_drawings_and_every_row(checked: ParityReport):
    text = page(checked)
    drawn = {r.dtype for r in checked.rows if r.rung == "attention"}
    assert text.count("<svg") == len(drawn) + len(checked.heatmaps)
    assert text.count("data:image/png") == 4 * len(checked.heatmaps)
    assert text.partition("<details>")[2].count("<tr>") == len(checked.rows) + 1
    assert f"Parity {'passed' if checked.passed else 'failed'}</h1>" in text


def test_page_shows_names_from_files_as_text():
    text = page(NASTY)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"""a<script>alert(1)</script>&"'[red]$x$\x1b[2J\u202e""" in Page(text).text


def test_page_names_what_failed():
    text = Page(page(FAILING)).text
    assert "attention of layer 1, float64, 8 tokens, from position 5" in text
    assert CAUSE in text
    assert "nothing was compared" in Page(page(EMPTY)).text


def test_page_is_the_same_every_time(tmp_path: Path):
    for _ in range(2):
        write_html(FAILING, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page(FAILING)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_drift_is_drawn_at_the_worst_length_in_the_page_s_colours():
    title, svg = drift(PASSING, "float32") or ("", "")
    assert title == "float32, 8 tokens"
    assert "4 times torch's own" in svg.replace("&#x27;", "'")
    assert "#0101" not in svg
    assert "var(--fail)" not in svg
    assert "var(--fail)" in (drift(FAILING, "float64") or ("", ""))[1]
    assert drift(EMPTY, "float64") is None


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e308, math.inf, math.nan])
def test_drawings_take_any_number(value: float):
    assert heatmap([[value, value]], [[value], [1.0]]).count("<image") == 4
    for dtype in ("float64", "float32"):
        rows = [row("mlp", dtype, value, layer=0, error=value, passed=False)]
        assert drift(report(rows), dtype) is not None
