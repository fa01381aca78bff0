"""From the first rung that fails to its likely cause, in words."""

from convert.compare import ParityReport, Row

# Where the first departure is at position 0, a query sees one key: its weight is 1 whatever the
# scores are, so scores, positions, mask and decay cannot be at fault.
_VALUE_PATH = (
    "the first position is wrong, where attention has one key and any scores give weight 1: look at "
    "the norm before attention (eps, scale), the value projection, its bias, the order of the "
    "key-value heads, the output projection or the residual"
)
_SCORES = {
    "lumen": "the query or key projections, RoPE (layout, base, position), the 1/sqrt(H) scale, the "
    "softmax or the causal mask",
    "gpt": "the query or key projections, RoPE (layout, base, position), the order of the key-value "
    "heads, the 1/sqrt(H) scale, the softmax or the causal mask",
    "ripple": "the query or key projections and biases, the decay (sign, absolute value, head order), "
    "the 1/sqrt(H) scale, the softmax, the window or the causal mask",
}
_MLP = {
    "lumen": "the second norm, SwiGLU (gate and up exchanged) or the MLP's weights",
    "gpt": "the second norm, the GELU (tanh, not exact) or the MLP's weights",
    "ripple": "the second norm, the gated MLP (first half value, second half gate), its biases or "
    "weights",
}


def likely_cause(report: ParityReport) -> str | None:
    """What most probably makes the first failing rung fail; None where all pass."""
    row = report.first_failure
    if row is None:
        return None
    cause = _cause(row, report)
    if row.dtype in ("float32", "bfloat16") and row.rung not in ("weights", "rope table"):
        cause = (
            f"float64 agrees, so the formula is right; precision is lost in {row.dtype}: an "
            f"accumulation, a cast or a fast variance, or {cause}"
        )
    return cause


def _cause(row: Row, report: ParityReport) -> str:
    model = report.model
    if row.rung == "attention":
        return _attention_cause(row, report)
    if row.rung == "loss":
        return "the loss: targets shifted, another mean, or a mask"
    if row.rung == "gradient":
        if row.note.startswith("torch gives"):
            return (
                f"a gradient reaches {row.tensor}, which torch reads without one (.item()): "
                "decay_gradient must be as_torch"
            )
        return f"the backward pass of {row.tensor}: a stopped or doubled gradient"
    return {
        "weights": "the conversion table or a cast changes bytes: dtype, reshape or transpose",
        "rope table": "the RoPE base, the frequencies or the first position",
        "norm": "the norm's formula: epsilon, a variance that cancels, or a statistic's precision",
        "embedding": "the embedding table or the position embedding",
        "mlp": _MLP[model],
        "final norm": "the final norm: another norm's weights, or its epsilon",
        "logits": "the output head: tied or not, or transposed",
        "adamw step": "the optimizer: epsilon, betas, bias correction, or decay on a frozen tensor",
        "greedy tokens": "the tokens part by more than noise: see the rungs above",
    }[row.rung]


def _attention_cause(row: Row, report: ParityReport) -> str:
    same = [
        other for other in report.rows
        if (other.rung, other.layer, other.dtype) == ("attention", row.layer, row.dtype)
        and not other.passed
    ]  # fmt: skip
    firsts = [other.first_position for other in same if other.first_position is not None]
    window = report.config.get("attention_window")
    shortest = min((other.length or 0 for other in same), default=0)
    if firsts and min(firsts) == 0 and shortest <= 1:
        return _VALUE_PATH
    if firsts and min(firsts) == 0:
        return "the first position sees later ones: the causal mask"
    if window and firsts and min(firsts) >= min(window, report.config["block_size"]) - 1:
        return f"the window: the first wrong position is {min(firsts)} and the window {window}"
    return f"only positions that see several keys are wrong: {_SCORES[report.model]}"
