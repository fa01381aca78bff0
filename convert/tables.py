"""Which table a set of torch keys belongs to, or what it looks like instead."""

import re
from collections.abc import Mapping

from convert.checkpoint.lazy_tensor import printable
from convert.gpt import TABLE as GPT
from convert.lumen import TABLE as LUMEN
from convert.ripple import TABLE as RIPPLE
from convert.rules import Table

TABLES: dict[str, Table] = {table.model: table for table in (LUMEN, GPT, RIPPLE)}

# What other people's keys look like, the first that fits. Only for messages.
_LOOKS_LIKE = (
    (r"(transformer\.)?h\.\d+\.attn\.c_attn\.weight", "GPT-2 (fused q, k, v: c_attn)"),
    (r".*\.(SCB|qweight|qzeros|quant_state.*|weight_scale)", "a quantised checkpoint"),
    (r".*lora_[AB]\..*", "a LoRA adapter, not a whole model"),
    (r"(model\.)?layers\.\d+\.self_attn\.q_proj\.weight", "a Llama-style Hugging Face model"),
    (r"(bert\.)?encoder\.layer\.\d+\..*", "BERT"),
    (r"layer[1-4]\.\d+\.conv\d\.weight", "a ResNet"),
    (r".*conv\d*\.weight", "a convolutional network"),
    (r"blocks\.attention\.w[qk]", "this project's own parameters without their config.json"),
    (r"(state|param_groups)(\..*)?", "an optimizer's state, not a model's"),
)


def table_for(shapes: Mapping[str, tuple[int, ...]]) -> Table:
    """The table whose rules take most of the keys.

    Raises:
        ValueError: no table takes half of them, or they are clearly another model's and one of
            ours is not whole (GPT-2 shares most names with GPT); says what the keys look like.
    """
    score = {name: _share(table, shapes) for name, table in TABLES.items()}
    best = max(score, key=score.__getitem__)
    likeness = next(
        (what for pattern, what in _LOOKS_LIKE if any(re.fullmatch(pattern, k) for k in shapes)),
        None,
    )
    if score[best] < 0.5 or (likeness and not _has_every_rule(TABLES[best], shapes)):
        some = ", ".join(printable(key) for key in list(shapes)[:4]) or "no tensors"
        raise ValueError(
            f"this is not a Lumen, GPT or Ripple checkpoint: it looks like "
            f"{likeness or 'something else'} ({len(shapes)} tensors: {some}, ...)"
        )
    return TABLES[best]


def _share(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Share of the keys that a table knows, whatever their layer and head numbers."""
    names = [rule.torch for rule in table.rules] + list(table.ties)
    patterns = [_numbered(name) for name in names] + [rule.pattern for rule in table.ignored]
    known = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return sum(bool(known.fullmatch(key)) for key in shapes) / max(len(shapes), 1)


def _has_every_rule(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether each rule that always holds has a key, be it in one layer."""
    owners = {owner: alias for alias, owner in table.ties.items()}
    return all(
        owners.get(rule.torch) in shapes
        or any(re.fullmatch(_numbered(rule.torch), k) for k in shapes)
        for rule in table.rules
        if rule.when is None
    )


def _numbered(name: str) -> str:
    """A rule's key as a regular expression, any numbers in its braces."""
    return re.sub(r"\\{\w+\\}", r"\\d+", re.escape(name))
