"""From the first rung that fails to its likely cause, in words."""

from convert.parity.compare import UNUSABLE, ParityReport, Row, Training

# Where the first departure is at position 0, a query sees one key: its weight is 1 whatever the
# scores are, so scores, positions, mask and decay cannot be at fault.
_VALUE_PATH = (
    "the first position is wrong, where attention has one key and any scores give weight 1: look "
    "at the norm before attention (eps, scale), the value projection, its bias, the order of the "
    "key-value heads, the output projection or the residual"
)
_SCORES = {
    "lumen": "the query or key projections, RoPE (layout, base, position), the 1/sqrt(H) scale, "
    "the softmax or the causal mask",
    "gpt": "the query or key projections, RoPE (layout, base, position), the order of the "
    "key-value heads, the 1/sqrt(H) scale, the softmax or the causal mask",
    "ripple": "the query or key projections and biases, the decay (sign, absolute value, head "
    "order), the 1/sqrt(H) scale, the softmax, the window or the causal mask",
}
_MLP = {
    "lumen": "the second norm, SwiGLU (gate and up exchanged) or the MLP's weights",
    "gpt": "the second norm, the GELU (tanh, not exact) or the MLP's weights",
    "ripple": "the second norm, the gated MLP (first half value, second half gate), its biases or "
    "weights",
}

# Ends of torch keys of norms, biases and decays.
_VECTORS = (
    ".bias", ".decay_factor", "ln_1.weight", "ln_2.weight", "ln_f.weight", "ln1.weight",
    "ln2.weight", "norm.weight",
)  # fmt: skip

_CAUSES = {
    "weights": "the conversion table or a cast changes bytes: dtype, reshape or transpose",
    "rope table": "the RoPE base, the frequencies or the first position",
    "norm": "the norm's formula: epsilon, scale, bias, the mean, or a statistic's precision",
    "final norm": "where the final norm is applied (to another stream, twice, not at all), for the "
    "norm itself agrees",
    "logits": "the output head: tied or not, another matrix, transposed, or a scale",
    "loss": "the loss: targets shifted, another mean, or a mask",
    "trajectory": "an update's formula",
    "adamw step": "the optimizer: epsilon, bias correction, or where weight decay goes",
    "greedy tokens": "decoding itself, for all rungs above agree: the position whose logits are "
    "read, or a length that they do not reach",
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
    if row.note.endswith(UNUSABLE):
        return f"{row.note}: a weight, an overflow or a division by zero just before this rung"
    match row.rung:
        case "norm" if not row.note.startswith("inputs of mean 0 "):
            return "the norm's variance, which cancels (E[x^2] - E[x]^2), or its precision"
        case "norm" if _layers_agree(report):
            return "the final norm alone, for the layers agree: another norm's weights or epsilon"
        case "attention" | "mlp":
            return _layer_cause(row, report)
        case "embedding":
            positions = report.config.get("use_absolute_pos_emb")
            return "the embedding table (rows shifted, another tensor), its scale" + (
                " or the position embedding" if positions else ""
            )
        case "gradient" if row.note.startswith("torch gives"):
            return (
                f"a gradient reaches {row.tensor}, which torch reads without one (.item()): "
                "decay_gradient must be as_torch"
            )
        case "gradient":
            return f"the backward pass of {row.tensor}: a stopped or doubled gradient"
        case "adamw step" if row.note.startswith("torch freezes"):
            return f"the optimizer moves {row.tensor}, which torch freezes: weight decay"
        case "adamw step" if row.note.startswith("no gradient"):
            return f"the parameter {row.tensor} itself, which the output does not depend on"
        case "trajectory" if report.training is not None:
            return _training_cause(row, report.training)
    return _CAUSES[row.rung]


def _training_cause(row: Row, training: Training) -> str:
    """By the first step whose loss is off: every loss shows the updates before it."""
    step = row.first_position
    vector = training.furthest.endswith(_VECTORS)
    decay = f"weight decay's groups ({training.furthest} is furthest off, which is no matrix)"
    if row.note.startswith("torch freezes"):
        return f"the optimizer moves {row.tensor}, which torch freezes: its gradient, weight decay"
    if row.tensor in ("torch, then JAX", "JAX, then torch"):
        return (
            "the conversion of the optimizer's state, for each side by itself trains alike: "
            "moments (exchanged, transposed), the count of updates, the groups and their order"
        )
    if step == 0:
        return "the loss itself, for no update comes before it: accumulation, targets left out"
    if step in training.uneven:
        return (
            f"accumulation: step {step} is the first whose microbatches have unequal numbers of "
            "targets that count, and each must weigh by its own (a mean of means does not)"
        )
    causes = [decay] if vector else []
    if step is None or training.start or step > 1:  # a first update is the same for any betas
        causes.append("the betas")
    if training.clipped and (step is None or training.clipped[0] < step):
        causes.append("clipping (the norm over all parameters, after the mean, with torch's 1e-6)")
    first = "its first step" if step == 1 else "off by one"
    causes.append(f"the schedule ({first})")
    causes += ["epsilon (outside the root)", "bias correction"]
    causes += [] if vector else ["weight decay's groups"]
    seen = "it is too small for the losses" if step is None else f"seen in the loss of step {step}"
    return (
        f"an update's formula, {seen}: {', or '.join(causes)}; furthest from torch's is "
        f"{training.furthest}"
    )


def _layers_agree(report: ParityReport) -> bool:
    passed = [row.passed for row in report.rows if row.rung in ("attention", "mlp")]
    return bool(passed) and all(passed)


def _layer_cause(row: Row, report: ParityReport) -> str:
    cause = _attention_cause(row, report) if row.rung == "attention" else _MLP[report.model]
    if not row.layer:
        return cause
    return (
        f"the weights of layer {row.layer} (another layer's, exchanged, transposed, rounded or "
        f"zeroed), for layer 0 agrees and runs the same code: {cause}"
    )


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
