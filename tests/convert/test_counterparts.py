"""The torch counterparts are the originals; the originals themselves are compared where present."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from convert.counterparts import build, rope_tables
from jaxslm.models import MODELS
from tests.golden.make_golden import build_original, load_originals, randomize

ORIGINALS = Path(__file__).parents[2].parent / "shared" / "originals"

LUMEN: dict[str, Any] = {
    "vocab_size": 29, "max_seq_len": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1, "intermediate_dim": 20,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocab_size": 29, "block_size": 16, "layer_norm_eps": 1e-5, "rope_base": 10000.0,
    "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 24,
}  # fmt: skip
RIPPLE: dict[str, Any] = {
    "vocab_size": 29, "block_size": 16, "n_layer": 2, "n_head": 3, "n_embd": 24, "dropout": 0.2,
    "bias": False, "use_absolute_pos_emb": False, "attention_window": None,
    "layer_norm_eps": 1e-5, "window_mode": "chunked", "decay_gradient": "as_torch",
}  # fmt: skip
# Model, fields that differ from the above, number of positions.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "lumen-kv1": ("lumen", {}, 11),
    "lumen-kvN": ("lumen", {"num_kv_heads": 4}, 16),
    "lumen-wide-head": ("lumen", {"num_heads": 1, "rope_theta": 500.0, "rms_norm_eps": 1e-3}, 7),
    "lumen-narrow-head": ("lumen", {"num_heads": 12, "num_layers": 1}, 1),
    "gpt-kv1": ("gpt", {"n_kv_head": 1}, 16),
    "gpt-kv2": ("gpt", {}, 11),
    "gpt-kvN": ("gpt", {"n_kv_head": 4, "n_layer": 3}, 2),
    "gpt-wide-head": ("gpt", {"n_head": 1, "n_kv_head": 1}, 1),
    "gpt-narrow-head": ("gpt", {"n_head": 12, "n_kv_head": 3}, 9),
    "ripple-heads1": ("ripple", {"n_head": 1, "n_embd": 20}, 11),
    "ripple-heads3-bias": ("ripple", {"bias": True}, 21),
    "ripple-heads4-positions": ("ripple", {"n_head": 4, "use_absolute_pos_emb": True}, 16),
    "ripple-heads6": ("ripple", {"n_head": 6, "dropout": 0.0, "bias": True}, 1),
    "ripple-window-unreached": ("ripple", {"attention_window": 9}, 8),
    "ripple-window-just-reached": ("ripple", {"attention_window": 9}, 9),
    "ripple-window-one-more": ("ripple", {"attention_window": 9, "bias": True}, 10),
    "ripple-window-twice": ("ripple", {"attention_window": 4}, 8),
    "ripple-window-thrice": ("ripple", {"attention_window": 4, "n_head": 4}, 12),
    "ripple-window-uneven": ("ripple", {"attention_window": 4, "use_absolute_pos_emb": True}, 15),
    "ripple-window1": ("ripple", {"attention_window": 1, "n_head": 6}, 5),
    "ripple-window0": ("ripple", {"attention_window": 0}, 5),
}
DEFAULTS = {"lumen": LUMEN, "gpt": GPT, "ripple": RIPPLE}


def config_of(model: str, **fields: Any) -> Any:
    return MODELS[model][0](**(DEFAULTS[model] | fields))


def counterpart(model: str, seed: int = 0, **fields: Any) -> nn.Module:
    torch.manual_seed(seed)
    module = build(config_of(model, **fields)).eval()
    randomize(module, seed)
    return module


def some_tokens(batch: int, positions: int) -> torch.Tensor:
    return torch.randint(0, 29, (batch, positions), generator=torch.Generator().manual_seed(1))


def run(module: nn.Module, tokens_BT: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Logits, loss and every parameter's gradient."""
    logits_BTV, loss = module(tokens_BT, tokens_BT.flip(1))
    module.zero_grad()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"logits": logits_BTV.detach(), "loss": loss.detach(), **gradients}


@pytest.fixture(scope="module")
def originals():
    if not ORIGINALS.is_dir():
        pytest.skip("the original models are not beside this repository (../shared/originals)")
    path = list(sys.path)
    modules = load_originals(ORIGINALS)
    assert sys.path == path
    return modules


@pytest.fixture(params=CASES)
def pair(request, originals):
    """An original and its counterpart with the same weights, and the number of positions."""
    model, fields, positions = CASES[request.param]
    original = build_original(originals, model, DEFAULTS[model] | fields)
    randomize(original, seed=3)
    ours = build(config_of(model, **fields)).eval()
    ours.load_state_dict(original.state_dict(), strict=True)
    return original, ours, positions


# The operations are the same: where this was written every difference was 0 in all three dtypes.
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)],
)
def test_counterpart_equals_the_original(pair, dtype, limit):
    original, ours, positions = pair
    tokens_BT = some_tokens(2, positions)
    if dtype == torch.bfloat16 and not hasattr(original, "blocks"):
        # Lumen and GPT make their float32 masks and tables in the first call, and in bfloat16
        # run only if they are converted along with the weights.
        original(tokens_BT)
    expected, actual = run(original.to(dtype), tokens_BT), run(ours.to(dtype), tokens_BT)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        other = actual[name]
        if value is None:
            assert other is None, name
            continue
        assert other is not None, name
        assert other.dtype == value.dtype == dtype
        scale = max(value.abs().max().item(), 1e-3)
        torch.testing.assert_close(other, value, rtol=0, atol=limit * scale, msg=name)


def test_counterpart_and_original_load_each_other(pair):
    original, ours, _ = pair
    assert list(ours.state_dict()) == list(original.state_dict())
    original.load_state_dict(ours.state_dict(), strict=True)
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in original.named_parameters()
    ]


@pytest.mark.parametrize("case", CASES)
def test_initial_values_are_the_originals_under_the_same_seed(originals, case):
    model, fields, _ = CASES[case]
    torch.manual_seed(5)
    original = build_original(originals, model, DEFAULTS[model] | fields)
    torch.manual_seed(5)
    ours = build(config_of(model, **fields)).state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("model", ["lumen", "ripple"])
def test_dropout_and_training_mode_are_the_originals(originals, model):
    original = build_original(originals, model, DEFAULTS[model]).train()
    ours = build(config_of(model)).train()
    ours.load_state_dict(original.state_dict())
    for module in (original, ours):
        module.double()
    tokens_BT = some_tokens(2, 9)
    torch.manual_seed(7)
    expected, _ = original(tokens_BT)
    torch.manual_seed(7)
    actual, _ = ours(tokens_BT)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("context", "heads"), [(16, 1), (50, 4), (1024, 2)])
def test_rope_tables_have_the_bits_of_the_originals(originals, context, heads):
    fields = DEFAULTS["lumen"] | {"max_seq_len": context, "num_heads": heads}
    lumen = build_original(originals, "lumen", fields)
    gpt = build_original(
        originals, "gpt", DEFAULTS["gpt"] | {"block_size": context, "n_head": heads, "n_kv_head": 1}
    )
    gpt(some_tokens(1, 3))
    lumen_config = config_of("lumen", max_seq_len=context, num_heads=heads)
    gpt_config = config_of("gpt", block_size=context, n_head=heads, n_kv_head=1)
    for config, theirs, names in (
        (lumen_config, lumen, ("rotary_emb.cos_cached", "rotary_emb.sin_cached")),
        (gpt_config, gpt, ("rope_cos", "rope_sin")),
    ):
        for ours, name in zip(rope_tables(config), names, strict=True):
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(np.tile(ours, 2), theirs.get_buffer(name).numpy())


def test_rope_tables_turn_position_by_frequency():
    angles = np.arange(16)[:, None] * 500.0 ** (-np.arange(3) / 3)
    for config in (config_of("gpt", rope_base=500.0), config_of("lumen", rope_theta=500.0)):
        cos, sin = rope_tables(config)
        np.testing.assert_allclose(cos, np.cos(angles), atol=2e-6)
        np.testing.assert_allclose(sin, np.sin(angles), atol=2e-6)


@pytest.mark.parametrize("model", ["gpt", "ripple"])
def test_layer_norms_take_eps_from_the_config(model):
    module = build(config_of(model, layer_norm_eps=1e-3))
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [1e-3] * 5


def test_rope_tables_and_build_refuse_other_configs():
    with pytest.raises(TypeError, match=r"LumenConfig or GPTConfig.*RippleConfig"):
        rope_tables(config_of("ripple"))
    with pytest.raises(TypeError, match="RippleConfig, got dict"):
        build({})  # pyright: ignore[reportArgumentType]


BLOCK_KEYS = {
    "lumen": """input_layernorm attention.q_proj attention.k_proj attention.v_proj attention.o_proj
        post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj""",
    "gpt": "ln_1 ln_1! attn.q_proj attn.k_proj attn.v_proj attn.c_proj ln_2 ln_2! "
    "mlp.c_fc mlp.c_proj",
    "ripple": """ln1 ln1! heads.0.key heads.0.key! heads.0.query heads.0.query! heads.0.value
        heads.0.value! ln2 ln2! ffwd.fc1 ffwd.fc1! ffwd.fc2 ffwd.fc2!""",
}


@pytest.mark.parametrize(
    ("model", "fields", "before", "block", "after"),
    [
        ("lumen", {"num_layers": 1}, "embed_tokens", "layers.0", "norm lm_head"),
        ("gpt", {"n_layer": 1}, "transformer.wte", "transformer.h.0",
         "transformer.ln_f transformer.ln_f! lm_head"),
        ("ripple", {"n_layer": 1, "n_head": 1, "bias": True, "use_absolute_pos_emb": True},
         "token_embedding_table position_embedding_table", "blocks.0", "ln_f ln_f! lm_head"),
    ],
)  # fmt: skip
def test_state_dict_has_the_originals_keys_and_nothing_else(model, fields, before, block, after):
    modules = [*before.split(), *(f"{block}.{m}" for m in BLOCK_KEYS[model].split())]
    modules += after.split()
    expected = {m[:-1] + ".bias" if m.endswith("!") else m + ".weight" for m in modules}
    if model == "ripple":
        expected.add("blocks.0.heads.0.decay_factor")
    assert set(build(config_of(model, **fields)).state_dict()) == expected


def test_tied_table_is_one_parameter_and_ripples_is_not():
    for model, table, tied in (
        ("lumen", "embed_tokens", True),
        ("gpt", "transformer.wte", True),
        ("ripple", "token_embedding_table", False),
    ):
        module = build(config_of(model))
        one, two = module.get_parameter(f"{table}.weight"), module.get_parameter("lm_head.weight")
        assert (one is two) == tied


def test_initial_values_follow_their_laws():
    torch.manual_seed(0)
    lumen = build(config_of("lumen", vocab_size=512, hidden_dim=64, intermediate_dim=256))
    gpt = build(config_of("gpt", vocab_size=512, n_embd=64, n_layer=8))
    ripple = build(config_of("ripple", n_head=4, n_embd=64, bias=True, use_absolute_pos_emb=True))
    for module in (lumen, gpt, ripple):
        for name, parameter in module.named_parameters():
            values = parameter.detach()
            if name.endswith("decay_factor"):
                head = int(name.split(".")[-2])
                assert values.tolist() == [0.5 * 0.25**head]
            elif values.ndim == 1:
                assert (values == float(name.endswith("weight"))).all(), name
            else:
                std = {gpt: 0.02, ripple: 0.02, lumen: (3 * values.shape[1]) ** -0.5}[module]
                std = 0.02 / 4 if module is gpt and "c_proj" in name else std
                std = 1.0 if name == "embed_tokens.weight" else std
                noise = 4 / math.sqrt(values.numel())
                assert abs(values.mean()) < noise * std, name
                assert abs(values.std() / std - 1) < noise, name
                uniform = module is lumen and name != "embed_tokens.weight"
                assert bool(values.abs().max() < 1.7322 * std) == uniform, name


@pytest.mark.parametrize(
    ("heads", "decays"),
    [(1, [0.5]), (2, [0.5, 0.03125]), (3, [0.5, 0.125, 0.03125]),
     (6, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625])],
)  # fmt: skip
def test_initial_decays_are_those_of_the_next_power_of_two(heads, decays):
    state = build(config_of("ripple", n_head=heads, n_layer=1)).state_dict()
    assert [state[f"blocks.0.heads.{h}.decay_factor"].item() for h in range(heads)] == decays


def positions_seen(module: nn.Module, table: str, positions: int) -> list[list[int]]:
    """For each query position, the positions whose embedding moves its logits."""
    seen = []
    handle = module.get_submodule(table).register_forward_hook(
        lambda _module, _args, out: seen.append(out.detach().requires_grad_()) or seen[-1]
    )
    logits_BTV, _ = module(some_tokens(1, positions))
    handle.remove()
    weights_V = torch.linspace(-1, 2, logits_BTV.shape[-1], dtype=logits_BTV.dtype)
    rows = []
    for query in range(positions):
        (gradient,) = torch.autograd.grad(
            logits_BTV[0, query] @ weights_V, seen[0], retain_graph=True
        )
        rows.append(gradient[0].abs().sum(-1).nonzero().flatten().tolist())
    return rows


@pytest.mark.parametrize(
    ("model", "table"),
    [("lumen", "embed_tokens"), ("gpt", "transformer.wte"), ("ripple", "token_embedding_table")],
)
def test_model_is_causal(model, table):
    module = counterpart(model).double()
    assert positions_seen(module, table, 9) == [list(range(i + 1)) for i in range(9)]


@pytest.mark.parametrize("window", [1, 3, 4])
@pytest.mark.parametrize("mode", ["chunked", "exact"])
def test_window_shows_the_keys_of_its_mode(mode, window):
    fields = {"n_layer": 1, "attention_window": window, "window_mode": mode}
    module = counterpart("ripple", **fields).double()
    expected = []
    for query in range(11):
        start = query // window * window if mode == "chunked" else query
        expected.append(list(range(max(0, start - window + 1), query + 1)))
    assert positions_seen(module, "token_embedding_table", 11) == expected
    # What is seen counts by its distance alone: the same tokens by themselves give the same logits.
    tokens_BT = some_tokens(1, 11)
    logits_BTV, _ = module(tokens_BT)
    whole = counterpart("ripple", n_layer=1).double()
    for query, visible in enumerate(expected):
        alone, _ = whole(tokens_BT[:, visible[0] : query + 1])
        torch.testing.assert_close(logits_BTV[0, query], alone[0, -1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("positions", [4, 9])
def test_decay_gradient_is_missing_only_as_torch_and_without_a_window_at_work(positions):
    fields = {"attention_window": 6, "n_layer": 1}
    constant = counterpart("ripple", **fields).double()
    trained = counterpart("ripple", decay_gradient="always", **fields).double()
    tokens_BT = some_tokens(2, positions)
    expected, actual = run(constant, tokens_BT), run(trained, tokens_BT)
    for name, value in actual.items():
        assert value is not None
        if positions == 4 and name.endswith("decay_factor"):
            assert expected[name] is None
        else:
            torch.testing.assert_close(expected[name], value, rtol=0, atol=1e-12)
    decay = trained.get_parameter("blocks.0.heads.1.decay_factor")
    losses = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            decay += step
            losses.append(trained(tokens_BT, tokens_BT.flip(1))[1].item())
            decay -= step
    slope = (losses[0] - losses[1]) / 2e-5
    assert decay.grad is not None
    assert decay.grad.item() == pytest.approx(slope, rel=1e-5)


def test_lumen_kv_heads_serve_neighbouring_query_heads():
    shared = counterpart("lumen", num_kv_heads=2).double()
    repeated = counterpart("lumen", num_kv_heads=4).double()
    state = shared.state_dict()
    for name, tensor in state.items():
        if "k_proj" in name or "v_proj" in name:
            one, two = tensor.chunk(2)
            state[name] = torch.cat([one, one, two, two])
    repeated.load_state_dict(state)
    tokens_BT = some_tokens(2, 9)
    torch.testing.assert_close(shared(tokens_BT)[0], repeated(tokens_BT)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["lumen", "gpt", "ripple"])
def test_change_of_dtype_leaves_nothing_stale(model):
    tokens_BT = some_tokens(2, 9)
    used, fresh = counterpart(model), counterpart(model)
    used(tokens_BT)
    used.bfloat16()(tokens_BT)
    used.double().load_state_dict(fresh.state_dict())
    assert torch.equal(used(tokens_BT)[0], fresh.double()(tokens_BT)[0])


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("lumen", {}, "max_seq_len = 16 positions, got 17"),
        ("gpt", {}, "block_size = 16 positions, got 17"),
        ("ripple", {"use_absolute_pos_emb": True}, "block_size = 16 positions with use_abs.*17"),
    ],
)
def test_sequence_beyond_the_limit_is_refused_with_the_limit(model, fields, message):
    module = counterpart(model, **fields)
    logits_BTV, loss = module(some_tokens(1, 16))
    assert logits_BTV.shape == (1, 16, 29)
    assert loss is None
    with pytest.raises(ValueError, match=message):
        module(some_tokens(1, 17))


def test_ripple_without_positions_has_no_limit():
    assert counterpart("ripple")(some_tokens(1, 40))[0].shape == (1, 40, 29)
