"""The tables: every torch key used once, every parameter filled once, no byte lost either way."""

from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from convert.counterparts import build
from convert.rules import (
    assemble,
    disassemble,
    faults,
    is_ignored,
    kv_heads,
    layer_count,
    leaves,
    torch_keys,
)
from convert.tables import TABLES, table_for
from jaxslm.models import GPTConfig, LumenConfig, RippleConfig, model_name
from jaxslm.weights import abstract_parameters
from tests.convert.checkpoints import TIES, config_of

MODELS = ["lumen", "gpt", "ripple"]
FLOAT32 = np.dtype(np.float32)
layers = st.integers(1, 12)  # 10 sorts before 2 as text
small = st.integers(1, 9)


@st.composite
def lumens(draw):
    kv, groups, half = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return LumenConfig(
        vocab_size=draw(small), hidden_dim=kv * groups * 2 * half, num_layers=draw(layers),
        num_heads=kv * groups, num_kv_heads=kv, intermediate_dim=draw(small), max_seq_len=4,
    )  # fmt: skip


@st.composite
def gpts(draw):
    kv, groups, half = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return GPTConfig(
        vocab_size=draw(small), n_embd=kv * groups * 2 * half, n_layer=draw(layers),
        n_head=kv * groups, n_kv_head=kv, block_size=4,
    )  # fmt: skip


@st.composite
def ripples(draw):
    heads = draw(st.one_of(st.integers(1, 6), st.just(11)))
    return RippleConfig(
        vocab_size=draw(small), n_embd=heads * draw(st.integers(1, 4)), n_layer=draw(layers),
        n_head=heads, block_size=draw(small), bias=draw(st.booleans()),
        use_absolute_pos_emb=draw(st.booleans()),
    )  # fmt: skip


def state_shapes(config) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in build(config).state_dict().items()}


def shapes_of(model: str, **fields) -> dict[str, tuple[int, ...]]:
    return state_shapes(config_of(model, **fields))


def faults_of(model: str, shapes, dtypes=None, **options) -> list[str]:
    dtypes = dict.fromkeys(shapes, FLOAT32) | (dtypes or {})
    return faults(TABLES[model], config_of(model), shapes, dtypes, **options)


def gathered(leaf, read, dtype) -> np.ndarray:
    with ThreadPoolExecutor(2) as pool:
        return assemble(leaf, read, dtype, pool=pool)


@given(st.one_of(lumens(), gpts(), ripples()))
def test_table_is_the_counterparts_state_dict_and_the_modules_parameters(config):
    table = TABLES[model_name(config)]
    expected = state_shapes(config)
    found = leaves(table, config)
    assert torch_keys(table, config) == list(expected)
    parts = [part for leaf in found for part in leaf.parts]
    consumed = [part.key for part in parts]
    assert sorted(consumed) == sorted(expected.keys() - table.ties.keys())
    assert {part.key: part.shape for part in parts} == {key: expected[key] for key in consumed}
    parameters = {name: leaf.shape for name, leaf in abstract_parameters(config).items()}
    assert len(found) == len(parameters)
    assert {leaf.path: leaf.shape for leaf in found} == parameters
    for leaf in found:
        filled = np.zeros(leaf.shape, int)
        for part in leaf.parts:
            filled[part.index] += 1
        assert (filled == 1).all(), leaf.path
    dtypes = dict.fromkeys(expected, FLOAT32)
    assert faults(table, config, expected, dtypes) == []
    assert table_for(expected) is table


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@given(config=st.one_of(lumens(), gpts(), ripples()), seed=st.integers(0, 99))
def test_round_trip_gives_back_every_byte(dtype, config, seed):
    table = TABLES[model_name(config)]
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    rng = np.random.default_rng(seed)  # any bits: NaNs with payloads, negative zeros, subnormals
    state = {
        key: np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)
        for key, shape in state_shapes(config).items()
        if key not in table.ties
    }
    read: list[str] = []
    back = {}
    for leaf in leaves(table, config):
        array = gathered(leaf, lambda key: read.append(key) or state[key], kind)
        assert (array.shape, array.dtype) == (leaf.shape, kind)
        for key, tensor in disassemble(leaf, array):
            assert key not in back
            back[key] = tensor
    assert sorted(read) == sorted(state)
    assert back.keys() == state.keys()
    for key, tensor in back.items():
        assert (tensor.shape, tensor.dtype) == (state[key].shape, kind), key
        assert tensor.tobytes() == state[key].tobytes(), key


@pytest.mark.parametrize("model", MODELS)
def test_layer_ten_is_slice_ten(model):
    config = config_of(model, **{"num_layers" if model == "lumen" else "n_layer": 12})
    for leaf in leaves(TABLES[model], config):
        if not leaf.path.startswith("blocks."):
            continue
        number = {part.key: next(int(s) for s in part.key.split(".") if s.isdigit())
                  for part in leaf.parts}  # fmt: skip
        shape = {part.key: part.shape for part in leaf.parts}
        array = gathered(leaf, lambda key: np.full(shape[key], number[key], np.int8), np.int8)  # noqa: B023
        assert [np.unique(layer).tolist() for layer in array] == [[n] for n in range(12)]


def test_heads_and_halves_go_where_their_names_say():
    found = {leaf.path: leaf for leaf in leaves(TABLES["gpt"], config_of("gpt"))}
    weight = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)  # [out, in]
    w_LDNH = gathered(found["blocks.attention.wq"], lambda key: weight, FLOAT32)
    assert w_LDNH[0, 5, 3, 2] == weight[3 * 4 + 2, 5]
    w_LNHD = gathered(found["blocks.attention.wo"], lambda key: weight, FLOAT32)
    assert w_LNHD[1, 3, 2, 5] == weight[5, 3 * 4 + 2]
    found = {leaf.path: leaf for leaf in leaves(TABLES["ripple"], config_of("ripple"))}
    weight = np.arange(48 * 18, dtype=np.float32).reshape(48, 18)
    w_LDCF = gathered(found["blocks.mlp.w_in"], lambda key: weight, FLOAT32)
    assert w_LDCF.shape == (2, 18, 2, 24)
    assert w_LDCF[0, 7, 1, 3] == weight[24 + 3, 7]  # the gate is the second half


# Faults


@pytest.mark.parametrize("model", TIES)
def test_either_key_of_a_tied_pair_will_do(model):
    owner, alias = TIES[model]
    shapes = shapes_of(model)
    for absent in (owner, alias):
        one = {key: shape for key, shape in shapes.items() if key != absent}
        assert faults_of(model, one) == []
    neither = {key: shape for key, shape in shapes.items() if key not in (owner, alias)}
    assert faults_of(model, neither) == [f"missing     {owner} or {alias}  [31, 16]"]
    wrong = shapes | {alias: (31, 15)}
    assert faults_of(model, wrong) == [f"mis-shaped  {alias}  [31, 15], expected [31, 16]"]


def test_ripples_head_is_not_tied():
    shapes = shapes_of("ripple")
    for key in ("lm_head.weight", "token_embedding_table.weight"):
        one = {name: shape for name, shape in shapes.items() if name != key}
        assert faults_of("ripple", one) == [f"missing     {key}  [31, 18]"]


def test_all_faults_are_listed_at_once():
    shapes = shapes_of("gpt")
    del shapes["transformer.h.0.ln_1.bias"], shapes["transformer.h.1.mlp.c_fc.weight"]
    shapes["transformer.ln_f.weight"] = (15,)
    shapes["transformer.h.1.attn.q_proj.weight"] = (16, 17)
    shapes["transformer.wpe.weight"] = (16, 16)
    shapes["evil\x1b[2J"] = ()
    dtypes = {"transformer.h.1.attn.k_proj.weight": np.dtype(np.int8)}
    found = faults_of("gpt", shapes, dtypes)
    assert len(found) == 7
    for fault in (
        "missing     transformer.h.0.ln_1.bias  [16]",
        "missing     transformer.h.1.mlp.c_fc.weight  [64, 16]",
        "mis-shaped  transformer.ln_f.weight  [15], expected [16]",
        "mis-shaped  transformer.h.1.attn.q_proj.weight  [16, 17], expected [16, 16]",
        "unexpected  transformer.wpe.weight  [16, 16]",
        "unexpected  evil\\x1b[2J  []",
    ):
        assert fault in found
    assert any("k_proj.weight  is int8: quantised" in fault for fault in found)


def test_a_renamed_key_is_missing_and_unexpected():
    shapes = shapes_of("lumen")
    shapes["layers.1.mlp.gate.weight"] = shapes.pop("layers.1.mlp.gate_proj.weight")
    assert faults_of("lumen", shapes) == [
        "missing     layers.1.mlp.gate_proj.weight  [24, 16]",
        "unexpected  layers.1.mlp.gate.weight  [24, 16]",
    ]


@pytest.mark.parametrize("layer", [2, 10])
def test_a_layer_too_many_is_unexpected(layer):
    shapes = shapes_of("gpt")
    shapes[f"transformer.h.{layer}.ln_1.bias"] = (16,)
    assert faults_of("gpt", shapes) == [f"unexpected  transformer.h.{layer}.ln_1.bias  [16]"]


def test_mixed_dtypes_of_a_stack_are_refused_unless_cast():
    shapes = shapes_of("gpt")
    mixed = {"transformer.h.1.attn.k_proj.weight": np.dtype(np.float16)}
    (fault,) = faults_of("gpt", shapes, mixed)
    assert fault.startswith("mixed dtypes float16 and float32 in blocks.attention.wk, which stacks")
    assert fault.endswith("pass --dtype to cast")
    assert faults_of("gpt", shapes, mixed, mixed=True) == []
    whole = {key: np.dtype(np.float16) for key in shapes if ".k_proj." in key}
    assert faults_of("gpt", shapes, whole) == []


@pytest.mark.parametrize(
    ("model", "key", "shape", "ignored"),
    [
        ("gpt", "rope_cos", (16, 4), True),
        ("gpt", "rope_sin", (16, 4), True),
        ("gpt", "rope_cos", (16,), False),
        ("gpt", "transformer.h.0.attn.bias", (1, 1, 16, 16), True),
        ("gpt", "transformer.h.11.attn.bias", (1, 1, 16, 16), True),
        ("gpt", "transformer.h.0.attn.bias", (16,), False),  # a real bias
        ("gpt", "transformer.h.0.attn.masked_bias", (), True),
        ("gpt", "transformer.h.0.attn.masked_bias", (16,), False),
        ("gpt", "transformer.h.0.attn.q_proj.bias", (16,), False),
        ("gpt", "transformer.h.0.mlp.bias", (1, 1, 16, 16), False),
        ("gpt", "xtransformer.h.0.attn.bias", (1, 1, 16, 16), False),
        ("lumen", "rotary_emb.inv_freq", (2,), True),
        ("lumen", "rotary_emb.cos_cached", (16, 4), True),
        ("lumen", "rotary_emb.sin_cached", (1, 1, 16, 4), True),
        ("lumen", "rotary_emb.weight", (2,), False),
        ("lumen", "causal_mask", (16, 16), True),
        ("lumen", "causal_mask", (16,), False),
        ("ripple", "blocks.0.heads.2._cached_bias", (16, 16), True),
        ("ripple", "blocks.0.heads.2._cached_bias", (16,), False),
        ("ripple", "blocks.0.heads.2.key.bias", (16, 16), False),
    ],
)
def test_buffers_are_ignored_by_name_and_rank(model, key, shape, ignored):
    assert is_ignored(TABLES[model], key, shape) is ignored
    if key not in shapes_of(model):
        shown = [] if ignored else [f"unexpected  {key}  {list(shape)}"]
        assert faults_of(model, shapes_of(model) | {key: shape}) == shown


@pytest.mark.parametrize("model", MODELS)
def test_no_parameter_is_on_an_ignore_list(model):
    for key, shape in shapes_of(model).items():
        assert not is_ignored(TABLES[model], key, shape)


# Numbers read off the keys and shapes


def test_layer_count_counts_to_the_highest_number():
    assert layer_count([], r"h\.") == 0
    assert layer_count(["x.h.3.w", "h.3", "h.x.w", "h.-1.w"], r"h\.") == 0
    assert layer_count(["h.0.w", "h.10.w", "h.2.w", "h.2.v"], r"h\.") == 11
    assert layer_count(["h.0.w", "h.999999999.w"], r"h\.") == 2  # no billion of missing keys


@pytest.mark.parametrize(
    ("rows", "heads", "stated", "count"),
    [
        (8, 4, False, 2), (8, 4, True, 2), (16, 4, False, 4), (4, 4, False, 1), (16, 16, False, 16),
        (6, 4, True, None), (6, 4, False, 1), (8, 3, True, None), (8, 3, False, 1),
        (8, 6, True, None), (2, 16, False, 2), (8, 0, False, None), (8, -4, False, None),
        (8, None, False, None), (8, "4", False, None), (8, 4.0, False, None),
        (8, True, False, None), (8, [4], False, None), (8, 10**30, True, None),
    ],
)  # fmt: skip
def test_kv_heads_are_told_where_the_shapes_can(rows, heads, stated, count):
    assert kv_heads(rows, 16, heads, stated=stated) == count
    assert kv_heads(rows, 0, heads, stated=stated) is None


# Which model it is


def test_table_is_found_among_strange_keys():
    shapes = shapes_of("ripple")
    assert table_for(shapes | {f"strange.{n}": (1,) for n in range(len(shapes) - 1)}).model == (
        "ripple"
    )
    with pytest.raises(ValueError, match="not a Lumen, GPT or Ripple"):
        table_for(shapes | {f"strange.{n}": (1,) for n in range(len(shapes) + 1)})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("transformer.h.0.attn.c_attn.weight", r"GPT-2 \(fused q, k, v: c_attn\)"),
        ("model.layers.0.self_attn.q_proj.weight", "a Llama-style Hugging Face model"),
        ("bert.encoder.layer.0.output.dense.weight", "BERT"),
        ("layer1.0.conv1.weight", "a ResNet"),
        ("features.conv1.weight", "a convolutional network"),
        ("base.lora_A.default.weight", "a LoRA adapter"),
        ("model.layers.0.mlp.qweight", "a quantised checkpoint"),
        ("blocks.attention.wq", "this project's own parameters without their config.json"),
        ("param_groups", "an optimizer's state"),
        ("e\x1b[2J", r"something else \(1 tensors: e\\x1b\[2J, ...\)"),
    ],
)
def test_other_models_are_named(key, words):
    with pytest.raises(ValueError, match=f"it looks like {words}"):
        table_for({key: (4, 4)})


GPT2_BLOCK = [
    "ln_1.weight", "ln_1.bias", "attn.bias", "attn.masked_bias", "attn.c_attn.weight",
    "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias",
    "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias",
]  # fmt: skip
LLAMA_BLOCK = [
    "input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.o_proj.weight", "post_attention_layernorm.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            [f"transformer.{key}" for key in ("wte.weight", "wpe.weight", "ln_f.weight")]
            + [f"transformer.h.{layer}.{key}" for layer in range(12) for key in GPT2_BLOCK],
            "GPT-2",
        ),
        (
            ["embed_tokens.weight", "norm.weight", "lm_head.weight"]
            + [f"layers.{layer}.{key}" for layer in range(12) for key in LLAMA_BLOCK],
            "a Llama-style Hugging Face model",
        ),
    ],
)
def test_models_that_share_most_of_their_names_with_ours_are_told_apart(keys, words):
    with pytest.raises(ValueError, match=f"it looks like {words}"):
        table_for(dict.fromkeys(keys, (4, 4)))


def test_our_own_model_with_strange_keys_besides_stays_ours():
    shapes = shapes_of("gpt") | {"transformer.h.0.attn.c_attn.weight": (48, 16)}
    assert table_for(shapes).model == "gpt"
    assert faults_of("gpt", shapes) == ["unexpected  transformer.h.0.attn.c_attn.weight  [48, 16]"]
    del shapes["transformer.wte.weight"]  # its alias is there
    assert table_for(shapes).model == "gpt"


def test_no_tensors_are_no_model():
    with pytest.raises(ValueError, match=r"it looks like something else \(0 tensors: no tensors"):
        table_for({})
