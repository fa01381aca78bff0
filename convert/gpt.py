"""The torch side of GPT: its keys, and what its tensors tell of the config."""

from collections.abc import Mapping
from typing import Any

from convert.rules import Ignored, Rule, Table, kv_heads, layer_count
from jaxslm.models.gpt import GPTConfig

RULES = (
    Rule("transformer.wte.weight", "embedding", "v d -> v d"),
    Rule("transformer.h.{l}.ln_1.weight", "blocks.attention_norm.scale", "d -> l d"),
    Rule("transformer.h.{l}.ln_1.bias", "blocks.attention_norm.bias", "d -> l d"),
    Rule("transformer.h.{l}.attn.q_proj.weight", "blocks.attention.wq", "(n h) d -> l d n h"),
    Rule("transformer.h.{l}.attn.k_proj.weight", "blocks.attention.wk", "(k h) d -> l d k h"),
    Rule("transformer.h.{l}.attn.v_proj.weight", "blocks.attention.wv", "(k h) d -> l d k h"),
    Rule("transformer.h.{l}.attn.c_proj.weight", "blocks.attention.wo", "d (n h) -> l n h d"),
    Rule("transformer.h.{l}.ln_2.weight", "blocks.mlp_norm.scale", "d -> l d"),
    Rule("transformer.h.{l}.ln_2.bias", "blocks.mlp_norm.bias", "d -> l d"),
    Rule("transformer.h.{l}.mlp.c_fc.weight", "blocks.mlp.w_up", "f d -> l d f"),
    Rule("transformer.h.{l}.mlp.c_proj.weight", "blocks.mlp.w_down", "d f -> l f d"),
    Rule("transformer.ln_f.weight", "final_norm.scale", "d -> d"),
    Rule("transformer.ln_f.bias", "final_norm.bias", "d -> d"),
)


def sizes(config: GPTConfig) -> dict[str, int]:
    """Axis letters of the patterns."""
    return {
        "l": config.n_layer, "d": config.n_embd, "n": config.n_head, "k": config.n_kv_head,
        "h": config.head_width, "f": 4 * config.n_embd, "v": config.vocab_size,
    }  # fmt: skip


def facts(shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, Any]) -> dict[str, Any]:
    """Config fields that the shapes tell; the kv heads only once `n_head` is known."""
    told: dict[str, Any] = {}
    table = shapes.get("transformer.wte.weight") or shapes.get("lm_head.weight")
    if table and len(table) == 2:
        told["vocab_size"], told["n_embd"] = table
    told["n_layer"] = layer_count(shapes, r"transformer\.h\.")
    key = shapes.get("transformer.h.0.attn.k_proj.weight")
    if key and table:
        count = kv_heads(key[0], table[-1], known.get("n_head"), stated="n_kv_head" in known)
        told |= {} if count is None else {"n_kv_head": count}
    return told


TABLE = Table(
    model="gpt",
    version=1,
    rules=RULES,
    ties={"lm_head.weight": "transformer.wte.weight"},
    ignored=(
        Ignored(r"rope_cos|rope_sin", rank=2),
        Ignored(r"transformer\.h\.\d+\.attn\.bias", rank=4),  # GPT-2's causal mask, not a bias
        Ignored(r"transformer\.h\.\d+\.attn\.masked_bias", rank=0),
    ),
    sizes=sizes,
    facts=facts,
    constants=("layer_norm_eps", "rope_base"),
    presets={"gpt-250m": GPTConfig()},
)
