"""What a check found as one page that needs nothing but itself: no script, no request."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.parity.compare import FLOAT64_LIMIT, MULTIPLE_LIMIT, ParityReport
from convert.parity.report_figures import drift, heatmap, training_figures
from convert.parity.report_words import (
    Rung,
    failure,
    low_dtypes,
    multiple,
    number,
    plain,
    rungs,
    training,
    weights_words,
    where,
)
from jaxslm.files import atomic_output

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2024; --muted: #60646c;
  --line: #d9d9e0; --ours: #0b62c4; --torch: #b25f00; --pass: #1a7f42;
  --fail: #c62a2f; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #15171a; --ink: #e8eaed;
  --muted: #a0a6ad; --line: #343a40; --ours: #70b1ff; --torch: #f0a451; --pass: #52c47f;
  --fail: #ff8a85; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 3rem 1.5rem 4rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .4rem; font-weight: 600; }
h1::before { content: ""; display: inline-block; width: .7rem; height: .7rem; border-radius: 50%;
  margin-right: .6rem; background: currentColor; vertical-align: .1em; }
h1.passed { color: var(--pass); } h1.failed { color: var(--fail); }
h2 { font-size: 1.15rem; font-weight: 600; margin: 2.6rem 0 .6rem; }
h3 { font-size: .85rem; font-weight: 500; margin: 0; }
p { margin: .4rem 0; max-width: 46rem; } .muted { color: var(--muted); }
code, h3 { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font-size: .9em; overflow-wrap: anywhere; } h3 { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.4rem; margin: .8rem 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
dl.failure { border-left: 3px solid var(--fail); padding: .1rem 0 .1rem 1rem; margin: 1.2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .9rem .34rem 0; text-align: left; vertical-align: top; }
th { font-weight: 500; color: var(--muted); } thead tr:last-child th, td {
  border-bottom: 1px solid var(--line); }
th.group { text-align: center; padding-left: .9rem; background: linear-gradient(var(--line),
  var(--line)) right .9rem bottom / calc(100% - 1.8rem) 1px no-repeat; }
.n { text-align: right; white-space: nowrap; }
td:first-child, .ok, .fail { white-space: nowrap; }
td.place { overflow-wrap: anywhere; min-width: 9rem; }
.ok { color: var(--pass); } .fail { color: var(--fail); font-weight: 600; }
figure { margin: 0; } .panels { display: grid; gap: 1.4rem 2rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); }
.panels figure { max-width: 30rem; } figcaption { font-size: .85rem; margin-bottom: .2rem; }
svg { display: block; width: 100%; height: auto; } svg text { font-family: inherit !important; }
summary { cursor: pointer; font-size: 1.15rem; font-weight: 600; margin: 2.6rem 0 .6rem; }
@media print { :root { color-scheme: light; } body { max-width: none; padding: 0;
  font-size: 10pt; } figure, tr, dl { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .wide { overflow: visible; } }
"""


def write_html(report: ParityReport, path: Path) -> None:
    """Writes `page`, replacing an earlier report.

    Raises:
        OSError: the file cannot be written, or the path is a folder that is in use.
    """
    text = page(report)
    with atomic_output(path, overwrite=True) as output:
        output.write_text(text, encoding="utf-8")


def page(report: ParityReport) -> str:
    """The whole page: verdict, what was compared, the rungs, the drawings and every row."""
    verdict = "passed" if report.passed else "failed"
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Parity {verdict}: {_text(report.source)}</title>",
            f"<style>{STYLE}</style>\n</head>\n<body>",
            _verdict(report, verdict),
            _subject(report),
            _rungs(report),
            _drift(report),
            _trajectory(report),
            _tensors(report),
            _rows(report),
            "</body>\n</html>\n",
        )
    )


def _verdict(report: ParityReport, verdict: str) -> str:
    count = f"{len(report.rows):,} comparisons in {report.seconds:.0f} s"
    opening = f'<header>\n<h1 class="{verdict}">Parity {verdict}</h1>'
    if report.passed:
        words = "The JAX model computes what the torch model computes, within the limits below"
        return f"{opening}\n<p>{words}: {count}, none of which fails.</p>\n</header>"
    pairs = [(name.capitalize(), _text(words)) for name, words in failure(report)]
    return (
        f"{opening}\n<p>The JAX model is not shown to compute what torch computes.</p>\n"
        f"{_list(pairs, 'failure')}\n</header>"
    )


def _subject(report: ParityReport) -> str:
    config = ", ".join(f"{name}={value!r}" for name, value in report.config.items())
    pairs = [
        ("Checkpoint", f"<code>{_text(report.source)}</code>"),
        ("Model", f"{_text(report.model)}, {report.parameters:,} parameters"),
        ("Against", _text(report.against)),
        ("Lengths", _text((", ".join(map(str, report.lengths)) or "no") + " tokens")),
        *([("Training", _text(training(report)))] if report.training else []),
        ("Config", f"<code>{_text(config)}</code>"),
        ("Versions", _text(", ".join(f"{name} {is_}" for name, is_ in report.versions.items()))),
    ]
    return f"<section>\n<h2>What was compared</h2>\n{_list(pairs)}\n</section>"


def _rungs(report: ParityReport) -> str:
    """The limits in words and one line a rung."""
    low = low_dtypes(report)
    words = (
        f"In float64 the two must agree to {FLOAT64_LIMIT:g} of the largest number in a tensor: "
        "rounding alone stays some five decades below that, so whatever reaches the limit is "
        f"another formula or another weight. In {' and '.join(low) or 'float32'} rounding cannot "
        f"be avoided, so our error against torch in float64 may be at most {MULTIPLE_LIMIT:g} "
        "times the error that torch itself makes in the same precision."
    )
    groups = _cell("th", "", span=2) + _cell("th", "float64", "group")
    groups += "".join(_cell("th", dtype, "group", 3) for dtype in low) + _cell("th", "", span=2)
    names = _cell("th", "Rung") + _cell("th", "Compared", "n") + _cell("th", "error", "n")
    names += "".join(_cell("th", name, "n") for name in ("ours", "torch's", "multiple") * len(low))
    names += _cell("th", "Worst of them") + _cell("th", "Verdict")
    lines = "\n".join(f"<tr>{_rung(rung, low)}</tr>" for rung in rungs(report))
    return (
        f"<section>\n<h2>The rungs</h2>\n<p>{words}</p>\n"
        "<p class='muted'>Each line shows the worst of its comparisons, in each precision.</p>\n"
        f'<div class="wide"><table>\n<thead><tr>{groups}</tr>\n<tr>{names}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody>\n</table></div>\n</section>"
    )


def _rung(rung: Rung, low: Sequence[str]) -> str:
    cells = _cell("td", rung.name) + _cell("td", f"{len(rung.rows):,}", "n")
    words = {"weights": weights_words(rung), "greedy tokens": rung.worst.note}.get(rung.name)
    if words is not None:
        cells += _cell("td", "", span=1 + 3 * len(low)) + _cell("td", words, "place")
    else:
        high = rung.of("float64")
        cells += _cell("td", number(high.worst.measure), _kind(high)) if high else _cell("td", "")
        for dtype in low:
            part = rung.of(dtype)
            cells += _low(part) if part else _cell("td", "", span=3)
        cells += _cell("td", where(rung.worst), "place")
    failed = f"{rung.failed:,} of {len(rung.rows):,} fail"
    return cells + (_cell("td", failed, "fail") if rung.failed else _cell("td", "ok", "ok"))


def _low(part: Rung) -> str:
    """Our error, torch's own and the multiple of one row."""
    row = part.worst
    times = "" if row.torch_error is None else multiple(row.measure)
    shown = (number(row.error), number(row.torch_error))
    return "".join(_cell("td", value, "n") for value in shown) + _cell("td", times, _kind(part))


def _kind(part: Rung) -> str:
    return "n fail" if part.failed else "n"


def _drift(report: ParityReport) -> str:
    """The error behind each attention and each MLP."""
    panels = [
        drawn for dtype in ("float64", *low_dtypes(report)) if (drawn := drift(report, dtype))
    ]
    if not panels:
        return ""
    shown = "\n".join(
        f'<figure role="img" aria-label="Drift by layer in {_text(title)}">'
        f"<figcaption>{_text(title)}</figcaption>\n{svg}</figure>"
        for title, svg in panels
    )
    return (
        "<section>\n<h2>Drift by layer</h2>\n<p>The error of the residual stream after each "
        "attention and each MLP, at the length where it is worst. Rounding climbs slowly; a fault "
        "is a step. Red points are over the limit, crosses are not "
        "finite.</p>\n"
        f'<div class="panels">\n{shown}\n</div>\n</section>'
    )


def _trajectory(report: ParityReport) -> str:
    """Losses of both sides and their differences by step."""
    if report.training is None:
        return ""
    shown = "\n".join(
        f'<figure role="img" aria-label="{_text(title)} by step">'
        f"<figcaption>{_text(title)}</figcaption>\n{svg}</figure>"
        for title, svg in training_figures(report.training)
    )
    return (
        "<section>\n<h2>Training</h2>\n<p>Left the loss of each step, right how far it is from "
        "torch's in float64, relative to it. Rounding grows as training goes on, by luck faster "
        "or slower, and alike on both sides; a fault is a step. Differences of nothing are not "
        "drawn.</p>\n"
        f'<div class="panels">\n{shown}\n</div>\n</section>'
    )


def _tensors(report: ParityReport) -> str:
    """The gradients that are furthest from torch's."""
    if not report.heatmaps:
        return ""
    shown = "\n".join(
        f'<figure role="img" aria-label="Difference and reference of {_text(key)}">'
        f"<figcaption><h3>{_text(key)}</h3></figcaption>\n"
        f"{heatmap(maps['difference'], maps['reference'])}</figure>"
        for key, maps in report.heatmaps.items()
    )
    return (
        "<section>\n<h2>The worst tensors</h2>\n<p>The gradients furthest from torch's: left the "
        "size of the difference, right torch's own numbers in float64, each over the four decades "
        "below its largest number. A cell is the largest number of a block of the matrix; red "
        "cells are not finite. Stripes or blocks on the left that the right does not have point "
        "to single rows, columns or heads.</p>\n"
        f'<div class="panels">\n{shown}\n</div>\n</section>'
    )


def _rows(report: ParityReport) -> str:
    """Every comparison, folded away."""
    names = "Rung", "Where", "Type", "Error", "Torch's", "Measure", "Limit", "Verdict", "Note"
    head = "".join(_cell("th", name, "n" if 3 <= i <= 6 else "") for i, name in enumerate(names))
    lines = []
    for row in report.rows:
        what = "step" if row.rung == "trajectory" else "position"
        first = "" if row.first_position is None else f"first at {what} {row.first_position}"
        cells = _cell("td", row.rung) + _cell("td", where(row), "place") + _cell("td", row.dtype)
        for value in (row.error, row.torch_error, row.measure):
            cells += _cell("td", number(value), "n")
        cells += _cell("td", f"{row.limit:.3g}", "n")
        cells += _cell("td", "ok", "ok") if row.passed else _cell("td", "fails", "fail")
        cells += _cell("td", "; ".join(filter(None, (first, row.note))))
        lines.append(f"<tr>{cells}</tr>")
    return (
        f"<details>\n<summary>All {len(report.rows):,} comparisons</summary>\n"
        "<p class='muted'>The measure is what is held against the limit: in float64 the error, "
        "otherwise its multiple of torch's own. Positions count from 0.</p>\n"
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>\n</details>"
    )


def _list(pairs: Sequence[tuple[str, str]], kind: str = "") -> str:
    """A list of names and values that are HTML already."""
    items = "\n".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs)
    return f'<dl class="{kind}">\n{items}\n</dl>'


def _cell(tag: str, text: str, kind: str = "", span: int = 1) -> str:
    """A table cell; the text is escaped."""
    more = (f' class="{kind}"' if kind else "") + (f' colspan="{span}"' if span > 1 else "")
    return f"<{tag}{more}>{_text(text)}</{tag}>"


def _text(text: Any) -> str:
    """Text from anywhere, as HTML that means nothing but itself."""
    return html.escape(plain(str(text)))
