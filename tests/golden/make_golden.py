"""Makes the golden files with the original models, in float64.

    python tests/golden/make_golden.py ../shared/originals

The same machine and versions give the same bytes. README.md says what the files hold.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LUMEN = {"vocab_size": 31, "max_seq_len": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
GPT = {"vocab_size": 31, "block_size": 32, "layer_norm_eps": 1e-5, "rope_base": 10000.0}
RIPPLE = {"vocab_size": 31, "block_size": 32, "n_layer": 2, "dropout": 0.2, "layer_norm_eps": 1e-5}
RIPPLE |= {"window_mode": "chunked", "decay_gradient": "as_torch"}
CASES: dict[str, dict[str, Any]] = {
    "lumen": LUMEN
    | {"hidden_dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1}
    | {"intermediate_dim": 24},
    "lumen_mha": LUMEN
    | {"hidden_dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    | {"intermediate_dim": 20},
    "gpt": GPT | {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 16},
    "ripple_full": RIPPLE
    | {"n_head": 3, "n_embd": 18, "bias": True}
    | {"use_absolute_pos_emb": False, "attention_window": None},
    "ripple_window": RIPPLE
    | {"n_head": 2, "n_embd": 16, "bias": False}
    | {"use_absolute_pos_emb": True, "attention_window": 4},
    # An odd mlp width to be rounded up, and a window as long as the tokens: not yet at work.
    "ripple_pow2": RIPPLE
    | {"n_head": 2, "n_embd": 14, "bias": False}
    | {"use_absolute_pos_emb": False, "attention_window": 11},
}
# Found by trying: the first under which every greedy token leads by 0.01 and seven differ.
SEEDS = {"lumen": 49, "lumen_mha": 22, "gpt": 113}
SEEDS |= {"ripple_full": 3, "ripple_window": 1, "ripple_pow2": 4}
BATCH, POSITIONS, PROMPT, GREEDY = 2, 11, 5, 20
FIRST_SECOND_NORM = {
    "lumen": ("layers", "post_attention_layernorm", "norm"),
    "gpt": ("transformer.h", "ln_2", "transformer.ln_f"),
    "ripple": ("blocks", "ln2", "ln_f"),
}


def load_originals(folder: Path) -> SimpleNamespace:
    """The modules `lumen`, `gpt` and `ripple`; sys.path and the folder stay untouched."""

    def load(name: str, path: Path) -> ModuleType:
        package = [str(path.parent)] if path.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(
            name, path, submodule_search_locations=package
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        lumen = load("original_lumen", folder / "lumen.py")
        gpt = load("original_gpt", folder / "gpt.py")
        load("original_ripple", folder / "ripple" / "__init__.py")
        ripple = importlib.import_module("original_ripple.model")
    finally:
        sys.dont_write_bytecode = writes_bytecode
    return SimpleNamespace(lumen=lumen, gpt=gpt, ripple=ripple)


def build_original(originals: SimpleNamespace, model: str, config: dict[str, Any]) -> nn.Module:
    """An original in evaluation mode; fields that only our configs have are left out."""
    if model == "lumen":
        fields = originals.lumen.LumenConfig()
        for name, value in config.items():
            setattr(fields, name, value)
        return originals.lumen.SAGE_Lumen_3M(fields).eval()
    if model == "gpt":
        kept = {k: v for k, v in config.items() if k not in ("layer_norm_eps", "rope_base")}
        return originals.gpt.GPT(originals.gpt.GPTConfig(**kept)).eval()
    ours = ("layer_norm_eps", "window_mode", "decay_gradient")
    kept = {k: v for k, v in config.items() if k not in ours}
    return originals.ripple.RippleGPT(originals.ripple.RippleConfig(**kept)).eval()


def randomize(model: nn.Module, seed: int) -> None:
    """Draws every parameter anew, none left at a one or a zero behind which a fault could hide."""
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name.endswith("decay_factor"):  # heads.1 below zero, for only the size counts
            drawn = rng.uniform(0.1, 0.6, shape) * (-1.0) ** int(name.split(".")[-2])
        elif name.endswith("bias"):
            drawn = 0.3 * rng.standard_normal(shape)
        elif parameter.ndim == 1:
            drawn = 1.0 + 0.3 * rng.standard_normal(shape)
        elif "embed" in name or "wte" in name:
            drawn = 0.4 * rng.standard_normal(shape)
        else:
            drawn = rng.standard_normal(shape) / np.sqrt(shape[1])
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(drawn.astype(np.float32)))


def adamw_step(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter after the step that all our checks take; those without gradient stay."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trace(family: str, model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> dict[str, Any]:
    """One forward and backward pass, with what stands between the blocks."""
    blocks_path, second_norm, final_norm = FIRST_SECOND_NORM[family]
    blocks = list(model.get_submodule(blocks_path).children())
    seen: dict[str, list[Tensor]] = {"in": [], "middle": [], "out": [], "norm": []}
    handles = [
        model.get_submodule(final_norm).register_forward_hook(
            lambda _module, _args, out: seen["norm"].append(out.detach())
        )
    ]
    for block in blocks:
        handles += [
            block.register_forward_pre_hook(lambda _module, args: seen["in"].append(args[0])),
            block.register_forward_hook(
                lambda _module, _args, out: seen["out"].append(out.detach())
            ),
            block.get_submodule(second_norm).register_forward_pre_hook(
                lambda _module, args: seen["middle"].append(args[0].detach())
            ),
        ]
    logits_BTV, loss = model(tokens_BT, targets_BT)
    for handle in handles:
        handle.remove()
    model.zero_grad()
    loss.backward()
    return {
        "embedding_BTD": seen["in"][0].detach(),
        "after_attention_LBTD": torch.stack(seen["middle"]),
        "block_LBTD": torch.stack(seen["out"]),
        "final_norm_BTD": seen["norm"][0],
        "logits_BTV": logits_BTV.detach(),
        "loss": loss.detach(),
        "gradients": {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    }


@torch.no_grad()
def greedy(model: nn.Module, prompt_P: Tensor, count: int) -> tuple[Tensor, float]:
    """The `count` likeliest next tokens one after another, and the smallest lead of any."""
    tokens_T, smallest = prompt_P, float("inf")
    for _ in range(count):
        logits_V = model(tokens_T[None])[0][0, -1]
        best, second = logits_V.topk(2).values
        smallest = min(smallest, (best - second).item())
        tokens_T = torch.cat([tokens_T, logits_V.argmax()[None]])
    return tokens_T[len(prompt_P) :], smallest


def make(originals: SimpleNamespace, name: str, seed: int) -> dict[str, np.ndarray]:
    """All arrays of one file."""
    family, config = name.partition("_")[0], CASES[name]
    model = build_original(originals, family, config)
    randomize(model, seed)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model.double()
    rng = np.random.default_rng(seed + 1)
    tokens_BT = torch.from_numpy(rng.integers(0, config["vocab_size"], (BATCH, POSITIONS)))
    targets_BT = torch.from_numpy(rng.integers(0, config["vocab_size"], (BATCH, POSITIONS)))
    prompt_P = tokens_BT[0, :PROMPT]
    greedy_G, lead = greedy(model, prompt_P, GREEDY)
    if lead < 0.01 or len(greedy_G.unique()) < 7:
        raise ValueError(f"{name}: seed {seed} leads by {lead} at least, saying {greedy_G}")
    values = trace(family, model, tokens_BT, targets_BT)
    values |= {"weights": weights, "tokens_BT": tokens_BT, "targets_BT": targets_BT}
    values |= {"stepped": adamw_step(model), "prompt_P": prompt_P, "greedy_G": greedy_G}
    arrays = {"model": np.array(family), "config": np.array(json.dumps(config))}
    for key, value in values.items():
        if isinstance(value, dict):
            arrays |= {f"{key}/{tensor}": array.numpy() for tensor, array in value.items()}
        else:
            arrays[key] = value.numpy()
    return arrays


def main() -> None:
    """Writes every file beside this one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("originals", type=Path, help="the folder with lumen.py, gpt.py and ripple/")
    originals = load_originals(parser.parse_args().originals)
    for name in CASES:
        path = Path(__file__).parent / f"{name}.npz"
        np.savez_compressed(path, allow_pickle=False, **make(originals, name, SEEDS[name]))
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
