"""The torch side of Lumen: its keys, and what its tensors tell of the config."""

from collections.abc import Mapping
from typing import Any

from convert.rules import Ignored, Rule, Table, kv_heads, layer_count
from jaxslm.models.lumen import LumenConfig

RULES = (
    Rule("embed_tokens.weight", "embedding", "v d -> v d"),
    Rule("layers.{l}.input_layernorm.weight", "blocks.attention_norm.scale", "d -> l d"),
    Rule("layers.{l}.attention.q_proj.weight", "blocks.attention.wq", "(n h) d -> l d n h"),
    Rule("layers.{l}.attention.k_proj.weight", "blocks.attention.wk", "(k h) d -> l d k h"),
    Rule("layers.{l}.attention.v_proj.weight", "blocks.attention.wv", "(k h) d -> l d k h"),
    Rule("layers.{l}.attention.o_proj.weight", "blocks.attention.wo", "d (n h) -> l n h d"),
    Rule("layers.{l}.post_attention_layernorm.weight", "blocks.mlp_norm.scale", "d -> l d"),
    Rule("layers.{l}.mlp.gate_proj.weight", "blocks.mlp.w_gate", "f d -> l d f"),
    Rule("layers.{l}.mlp.up_proj.weight", "blocks.mlp.w_up", "f d -> l d f"),
    Rule("layers.{l}.mlp.down_proj.weight", "blocks.mlp.w_down", "d f -> l f d"),
    Rule("norm.weight", "final_norm.scale", "d -> d"),
)


def sizes(config: LumenConfig) -> dict[str, int]:
    """Axis letters of the patterns."""
    return {
        "l": config.num_layers, "d": config.hidden_dim, "n": config.num_heads,
        "k": config.num_kv_heads, "h": config.head_width, "f": config.intermediate_dim,
        "v": config.vocab_size,
    }  # fmt: skip


def facts(shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, Any]) -> dict[str, Any]:
    """Config fields that the shapes tell; the kv heads only once `num_heads` is known."""
    told: dict[str, Any] = {}
    table = shapes.get("embed_tokens.weight") or shapes.get("lm_head.weight")
    if table and len(table) == 2:
        told["vocab_size"], told["hidden_dim"] = table
    told["num_layers"] = layer_count(shapes, r"layers\.")
    gate = shapes.get("layers.0.mlp.gate_proj.weight")
    if gate:
        told["intermediate_dim"] = gate[0]
    key = shapes.get("layers.0.attention.k_proj.weight")
    if key and table:
        count = kv_heads(key[0], table[-1], known.get("num_heads"), stated="num_kv_heads" in known)
        told |= {} if count is None else {"num_kv_heads": count}
    return told


TABLE = Table(
    model="lumen",
    version=1,
    rules=RULES,
    ties={"lm_head.weight": "embed_tokens.weight"},
    ignored=(
        Ignored(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)"),
        Ignored(r"causal_mask", rank=2),
    ),
    sizes=sizes,
    facts=facts,
    constants=(),
    presets={"lumen-3m": LumenConfig()},
)
