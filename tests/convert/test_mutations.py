"""Faults planted one by one in our half: the check must catch each and say where.

    python -m tests.convert.test_mutations docs/mutations.md     # writes the table

Each row of FAULTS names the first rung that fails and, where the fault is one layer's, the layer.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest

from convert.parity import jax_side
from convert.parity.compare import RUNGS, ParityReport, Row
from convert.parity.ladder import check
from jaxslm import layers
from jaxslm.attention import reference, windowed
from jaxslm.models import gpt, lumen, ripple
from tests.convert import faults, test_trajectory
from tests.convert.faults import code, exchange, half, setting, stead, weights
from tests.convert.subjects import quick_checks, subject_of


@dataclass(frozen=True)
class Fault:
    """One planted fault, and where the check must first see it."""

    words: str
    model: str
    rung: str
    plant: faults.Plant
    cause: str  # in the cause that the report names
    layer: int | None = None
    tensor: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the model's config
    dtypes: tuple[str, ...] = ()  # besides float64, which most need alone


FULL = {"attention_window": None}

FAULTS = (
    # norms
    Fault("LayerNorm epsilon 1e-6 for 1e-5", "gpt", "norm",
          setting(layer_norm_eps=1e-6), "epsilon"),
    Fault("RMSNorm epsilon 1e-5 for 1e-6", "lumen", "norm",
          setting(rms_norm_eps=1e-5), "epsilon"),
    Fault("LayerNorm variance as E[x^2] - E[x]^2", "gpt", "norm",
          code(layers.LayerNorm, "__call__", faults.fast_variance), "variance, which cancels"),
    Fault("LayerNorm without its bias", "ripple", "norm",
          code(layers.LayerNorm, "__call__", faults.without_bias), "formula"),
    Fault("two norms of layer 1 exchanged", "gpt", "attention",
          weights(exchange("blocks.attention_norm", "blocks.mlp_norm", 1)), "norm", layer=1),
    Fault("final norm with the weights of the last block's", "gpt", "norm",
          weights(faults.final_norm_of_the_last_block), "another norm's weights"),
    Fault("final norm applied twice", "gpt", "final norm",
          code(gpt.GPT, "activations", faults.norm_twice), "applied"),
    # rotary positions
    Fault("RoPE layout interleaved", "lumen", "attention",
          code(lumen, "rotate", faults.interleaved), "layout", layer=0),
    Fault("RoPE base 500000 for 10000", "gpt", "rope table",
          setting(rope_base=500000.0), "base"),
    Fault("RoPE positions from 1 on", "lumen", "rope table",
          code(lumen, "rope_tables", faults.from_position_one), "first position"),
    Fault("RoPE of the queries one position behind", "gpt", "attention",
          code(gpt, "rotate", faults.queries_one_behind), "position", layer=0),
    # attention
    Fault("key-value heads tiled 0, 1, 0, 1 for 0, 0, 1, 1", "gpt", "attention",
          code(gpt, "attend", faults.tiled_heads), "order of the key-value heads", layer=0),
    Fault("query heads read as [H, N] for [N, H]", "gpt", "attention",
          faults.interleaved_heads, "query or key projections", layer=0),
    Fault("no 1/sqrt(H)", "lumen", "attention",
          code(lumen, "attend", faults.unscaled), "1/sqrt(H)", layer=0),
    Fault("no causal mask", "gpt", "attention",
          code(reference, "masked_attention", faults.seeing(faults.everything)), "causal mask",
          layer=0),
    Fault("causal mask shows one later key", "ripple", "attention",
          code(reference, "masked_attention", faults.seeing(faults.one_later)), "causal mask",
          layer=0, fields=FULL),
    Fault("softmax in bfloat16", "lumen", "attention",
          stead(reference, "jax", nn=faults.Stead(jax.nn, softmax=faults.bfloat16_softmax)),
          "softmax", layer=0),
    Fault("bfloat16 factors in float32 products", "gpt", "attention",
          code(gpt, "contract", faults.bfloat16_in_float32), "precision is lost in float32",
          layer=0, dtypes=("float32",)),
    Fault("q and k exchanged in layer 1", "ripple", "attention",
          weights(exchange("blocks.attention.wq", "blocks.attention.wk", 1)),
          "query or key projections", layer=1),
    Fault("q matrix of layer 1 not transposed", "gpt", "attention",
          weights(faults.transposed("blocks.attention.wq", 1)), "query or key projections",
          layer=1),
    Fault("output projection of layer 1 not transposed", "gpt", "attention",
          weights(faults.transposed("blocks.attention.wo", 1)), "output projection", layer=1),
    Fault("value bias of layer 1 dropped", "ripple", "attention",
          weights(faults.zeroed("blocks.attention.bv", 1)), "bias", layer=1),
    Fault("query bias of layer 1 dropped", "ripple", "attention",
          weights(faults.zeroed("blocks.attention.bq", 1)), "biases", layer=1),
    Fault("key bias of layer 1 dropped, which softmax ignores", "ripple", "adamw step",
          weights(faults.zeroed("blocks.attention.bk", 1)), "parameter",
          tensor="blocks.1.heads.0.key.bias"),
    Fault("value matrix of layer 1 rounded to bfloat16", "lumen", "attention",
          weights(faults.rounded("blocks.attention.wv", 1)), "value projection", layer=1),
    # decay and window
    Fault("decay raises scores", "ripple", "attention",
          code(ripple, "attend", faults.rising), "decay", layer=0),
    Fault("decay without its absolute value", "ripple", "attention",
          stead(ripple, "jnp", abs=lambda x: x), "absolute value", layer=0),
    Fault("decays of layer 1 in reverse order of heads", "ripple", "attention",
          weights(faults.heads_reversed("blocks.attention.decay", 1)), "head order", layer=1),
    Fault("initial decays of 3 heads not cut from those of 4", "ripple", "attention",
          faults.slopes_of_no_power_of_two, "decay", layer=0),
    Fault("window ignored", "ripple", "attention",
          setting(attention_window=None), "window", layer=0),
    Fault("window one longer", "ripple", "attention",
          setting(attention_window=5), "window", layer=0),
    Fault("chunk sees one key too far back", "ripple", "attention",
          code(windowed, "masked_attention", faults.seeing(faults.one_key_further)), "window",
          layer=0),
    Fault("exact window for the chunked one", "ripple", "attention",
          setting(window_mode="exact"), "window", layer=0),
    Fault("second chunk does not see the first", "ripple", "attention",
          code(windowed, "masked_attention", faults.seeing(faults.not_over_the_first_edge)),
          "window", layer=0),
    # MLP and block
    Fault("GELU exact for tanh", "gpt", "mlp",
          stead(gpt, "jax", nn=faults.Stead(jax.nn, gelu=faults.exact_gelu)), "GELU", layer=0),
    Fault("relu for silu", "lumen", "mlp",
          stead(lumen, "jax", nn=faults.Stead(jax.nn, silu=jax.nn.relu)), "SwiGLU", layer=0),
    Fault("gate and up exchanged", "lumen", "mlp",
          weights(exchange("blocks.mlp.w_gate", "blocks.mlp.w_up")), "gate and up", layer=0),
    Fault("value and gate halves exchanged", "ripple", "mlp",
          weights(faults.halves_exchanged("blocks.mlp.w_in", "blocks.mlp.b_in")), "gate", layer=0),
    Fault("output bias of the MLP of layer 1 dropped", "ripple", "mlp",
          weights(faults.zeroed("blocks.mlp.b_out", 1)), "biases", layer=1),
    Fault("a NaN in the MLP of layer 1", "gpt", "mlp",
          weights(faults.not_a_number("blocks.mlp.w_up", 1)), "NaN", layer=1),
    Fault("residual taken after the norm", "gpt", "attention",
          code(gpt.Block, "__call__", faults.normed_residual), "residual", layer=0),
    Fault("12 layers stacked by name: 0, 1, 10, 11, 2", "gpt", "attention",
          weights(faults.by_name), "another layer's", layer=2,
          fields={"n_layer": 12, "n_embd": 8, "n_head": 2}),
    Fault("layer 1 has the weights of layer 0", "lumen", "attention",
          weights(faults.first_layer_again), "another layer's", layer=1),
    # embedding and head
    Fault("embedding rows shifted by one", "lumen", "embedding",
          weights(faults.shifted("embedding")), "embedding table"),
    Fault("absolute positions shifted by one", "ripple", "embedding",
          weights(faults.shifted("position_embedding")), "position embedding"),
    Fault("embedding times sqrt(D)", "lumen", "embedding",
          code(lumen, "embed", faults.scaled_rows), "scale"),
    Fault("tie broken: the head is another matrix", "gpt", "logits",
          code(gpt.GPT, "activations", faults.another_head), "tied"),
    Fault("head tied that is not", "ripple", "logits", weights(faults.tied_head), "tied"),
    Fault("logits over sqrt(D)", "lumen", "logits",
          code(lumen.Lumen, "activations", faults.scaled_logits), "scale"),
    # conversion, loss, gradients, optimizer, decoding
    Fault("one bit changed on the way", "gpt", "weights", faults.one_bit, "bytes",
          tensor="transformer.h.1.mlp.c_fc.weight"),
    Fault("targets shifted by one", "gpt", "loss",
          code(jax_side, "cross_entropy", faults.targets_late), "targets"),
    Fault("loss summed over positions", "ripple", "loss",
          code(jax_side, "cross_entropy", faults.summed), "another mean"),
    Fault("decay has a gradient where torch's has none", "ripple", "gradient",
          setting(decay_gradient="always"), "as_torch", tensor="blocks.0.heads.0.decay_factor",
          fields=FULL),
    Fault("no gradient through the values", "lumen", "gradient",
          code(lumen, "attend", faults.constant_values), "backward pass"),
    Fault("tied table learns from the head alone", "gpt", "gradient",
          code(gpt, "embed", faults.constant_rows), "backward pass",
          tensor="transformer.wte.weight"),
    Fault("AdamW epsilon 1e-6 for 1e-8", "lumen", "adamw step",
          half(faults.LargeEpsilon), "epsilon"),
    Fault("AdamW without bias correction", "gpt", "adamw step",
          stead(jax_side, "optax", adamw=faults.uncorrected_adamw), "bias correction"),
    Fault("weight decay inside the gradient", "lumen", "adamw step",
          stead(jax_side, "optax", adamw=faults.adam_with_l2), "weight decay"),
    Fault("weight decay on decays that torch freezes", "ripple", "adamw step",
          half(faults.FrozenDecays), "freezes", tensor="blocks.0.heads.0.decay_factor",
          fields=FULL),
    Fault("decoding reads the position before", "ripple", "greedy tokens",
          half(faults.EarlyDecoding), "logits are read"),
)  # fmt: skip


def climb(fault: Fault) -> ParityReport:
    """The check with the fault planted."""
    with pytest.MonkeyPatch.context() as patch:
        subject, side = fault.plant(patch, subject_of(fault.model, **fault.fields))
        return check(subject, lengths=(1, 9), dtypes=fault.dtypes, jax_side=side)


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick_checks():
        yield


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.words)
def test_check_catches_the_fault_and_says_where(fault):
    report = climb(fault)
    assert not report.passed
    first = report.first_failure
    assert first is not None
    assert (first.rung, first.layer) == (fault.rung, fault.layer)
    assert fault.tensor in (None, first.tensor)
    assert fault.cause in (report.cause or "")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["lumen", "gpt", "ripple"])
def test_check_passes_where_nothing_is_planted(model, seed):
    report = check(subject_of(model, seed), lengths=(1, 9), seed=seed)
    assert report.passed, report.first_failure
    assert report.cause is None


def test_every_rung_is_the_first_to_catch_some_fault():
    # Faults of training stand in test_trajectory.py.
    assert {fault.rung for fault in FAULTS} | {"trajectory"} == set(RUNGS)


def measured(row: Row) -> str:
    """The measure of a failed row, as the table gives it."""
    unit = "×" if row.dtype not in ("bits", "float64") and row.rung != "rope table" else ""
    return f"{row.measure:.1e}{unit}"


def table() -> str:
    """Every fault and the rung that caught it, as Markdown."""
    lines = [
        "# Planted faults",
        "",
        "Each was planted by itself in the JAX half of a small model; the check names the first",
        "rung of its ladder that departs. `tests/convert/test_mutations.py` (`test_trajectory.py`",
        "for those that training shows) plants them anew and wrote this table:",
        "`python -m tests.convert.test_mutations docs/mutations.md`.",
        "",
        "| fault | model | caught by | layer or tensor | measure | limit |",
        "|---|---|---|---|---|---|",
    ]
    climbed = [(fault, climb(fault)) for fault in FAULTS]
    climbed += [(fault, test_trajectory.climb(fault)) for fault in test_trajectory.FAULTS]
    for fault, report in climbed:
        row = report.first_failure
        assert row is not None, fault.words
        place = row.tensor or ("" if row.layer is None else str(row.layer))
        cells = (fault.words, fault.model, row.rung, place, measured(row), f"{row.limit:g}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    with quick_checks():
        parser.parse_args().output.write_text(table())
