"""The torch side of Ripple: its keys, and what its tensors tell of the config."""

from collections.abc import Mapping
from typing import Any

from convert.rules import Ignored, Rule, Table, layer_count
from jaxslm.models.ripple import RippleConfig

RULES = (
    Rule("token_embedding_table.weight", "embedding", "v d -> v d"),
    Rule(
        "position_embedding_table.weight", "position_embedding", "t d -> t d",
        when="use_absolute_pos_emb",
    ),
    Rule("blocks.{l}.ln1.weight", "blocks.attention_norm.scale", "d -> l d"),
    Rule("blocks.{l}.ln1.bias", "blocks.attention_norm.bias", "d -> l d"),
    Rule("blocks.{l}.heads.{n}.decay_factor", "blocks.attention.decay", "1 -> l n"),
    Rule("blocks.{l}.heads.{n}.key.weight", "blocks.attention.wk", "h d -> l d n h"),
    Rule("blocks.{l}.heads.{n}.key.bias", "blocks.attention.bk", "h -> l n h", when="bias"),
    Rule("blocks.{l}.heads.{n}.query.weight", "blocks.attention.wq", "h d -> l d n h"),
    Rule("blocks.{l}.heads.{n}.query.bias", "blocks.attention.bq", "h -> l n h", when="bias"),
    Rule("blocks.{l}.heads.{n}.value.weight", "blocks.attention.wv", "h d -> l d n h"),
    Rule("blocks.{l}.heads.{n}.value.bias", "blocks.attention.bv", "h -> l n h", when="bias"),
    Rule("blocks.{l}.ln2.weight", "blocks.mlp_norm.scale", "d -> l d"),
    Rule("blocks.{l}.ln2.bias", "blocks.mlp_norm.bias", "d -> l d"),
    # c: the value half, then the gate half
    Rule("blocks.{l}.ffwd.fc1.weight", "blocks.mlp.w_in", "(c f) d -> l d c f"),
    Rule("blocks.{l}.ffwd.fc1.bias", "blocks.mlp.b_in", "(c f) -> l c f"),
    Rule("blocks.{l}.ffwd.fc2.weight", "blocks.mlp.w_out", "d f -> l f d"),
    Rule("blocks.{l}.ffwd.fc2.bias", "blocks.mlp.b_out", "d -> l d"),
    Rule("ln_f.weight", "final_norm.scale", "d -> d"),
    Rule("ln_f.bias", "final_norm.bias", "d -> d"),
    Rule("lm_head.weight", "head", "v d -> d v"),
)  # fmt: skip


def sizes(config: RippleConfig) -> dict[str, int]:
    """Axis letters of the patterns; t is the length of the position table."""
    return {
        "l": config.n_layer, "d": config.n_embd, "n": config.n_head, "h": config.head_width,
        "c": 2, "f": config.mlp_width, "v": config.vocab_size, "t": config.block_size,
    }  # fmt: skip


def facts(shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, Any]) -> dict[str, Any]:
    """Config fields that the shapes tell: all but the window, the dropout and the block size."""
    del known
    told: dict[str, Any] = {}
    table = shapes.get("token_embedding_table.weight") or shapes.get("lm_head.weight")
    if table and len(table) == 2:
        told["vocab_size"], told["n_embd"] = table
    told["n_layer"] = layer_count(shapes, r"blocks\.")
    told["n_head"] = layer_count(shapes, r"blocks\.\d+\.heads\.")
    told["bias"] = "blocks.0.heads.0.query.bias" in shapes
    positions = shapes.get("position_embedding_table.weight")
    told["use_absolute_pos_emb"] = positions is not None
    if positions:
        told["block_size"] = positions[0]
    return told


TABLE = Table(
    model="ripple",
    version=1,
    rules=RULES,
    ties={},
    ignored=(Ignored(r"blocks\.\d+\.heads\.\d+\._cached_bias", rank=2),),
    sizes=sizes,
    facts=facts,
    constants=("layer_norm_eps",),
    presets={"ripple": RippleConfig()},
)
