"""Greedy generation on the CPU: ours against the original, full forward passes and transformers.

Weights are drawn once and given to all sides; before anything is timed they must give the same
tokens. All of it is float32, unless a row says otherwise.
"""

import functools
import gc
import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import Timing, alternate
from convert.counterparts import build
from convert.transform import to_torch
from jaxslm import MODELS, Generator, GPTConfig, LumenConfig, RippleConfig, Sampling, save
from jaxslm.cache import ring_slots
from jaxslm.generation import LEAST_SLOTS
from jaxslm.models import Config, Model, model_name
from jaxslm.rows import Stats
from jaxslm.weights import to_arrays

ORIGINALS = Path(__file__).parents[2] / "shared" / "originals"
PROMPT = 32
GREEDY = Sampling(temperature=0.0)
Side = Callable[[np.ndarray, int], np.ndarray]  # prompts [B, T], new tokens -> [B, T + new]


def generation(room: Path) -> Iterator[dict[str, Any]]:
    """Rows of the table; `room` is the folder for a model and its compiled programs."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA has
    yield ripple_row()
    for window in (64, None):
        yield from position_rows(window)
    for config, count in ((LumenConfig(), 128), (GPTConfig(), 32)):
        for batch in (1, 8):
            yield from reference_rows(config, batch, count)
            gc.collect()
    yield from memory_rows()
    gc.collect()
    yield first_token_row(room / "generation")


def ripple_row(count: int = 512, rounds: int = 3) -> dict[str, Any]:
    """Ripple's default preset, end to end; the original feeds the whole text for each token."""
    model = _model(RippleConfig())
    name, theirs = _original_ripple(model)
    prompts = _prompts(model.config, 1, PROMPT)
    torch_time, our_time = _compare(
        [theirs, _ours(Generator(model))], prompts, count, rounds, checked=count
    )
    ratio = torch_time.median / our_time.median
    return _row(
        f"Ripple, prompt {PROMPT}, {count} new tokens", f"{name}: {torch_time}", str(our_time),
        ratio, "torch / jaxslm at least 10", ratio >= 10,
    )  # fmt: skip


def position_rows(window: int | None, count: int = 128, rounds: int = 5) -> list[dict[str, Any]]:
    """What a token costs Ripple after prompts of three lengths, the prompt's own cost left out.

    It may grow as the cache does, of which a step reads every slot, filled or not; a window's cache
    does not grow, and 10 % are for noise. At these lengths `count` tokens, at most 128, fit the
    cache that the prompt gets.
    """
    config, lengths = RippleConfig(attention_window=window), (64, 896, 3936)
    model, told = _model(config), [[] for _ in lengths]
    weights, ours = _bytes(model), [_ours(Generator(model), stats) for stats in told]
    prompts = [_prompts(config, 1, length) for length in lengths]
    sides = zip(ours, prompts, strict=True)
    alternate([functools.partial(side, prompt, count) for side, prompt in sides], rounds)
    caches = [2 * _slots(config, n + count) * config.n_layer * config.n_embd * 4 for n in lengths]
    rows = []
    for length, stats, cache in zip(lengths, told, caches, strict=True):
        seconds, growth = 1 / _rate(stats), _rate(told[0]) / _rate(stats)
        read, most = (weights + cache) / (weights + caches[0]), max(1.1, cache / caches[0])
        rows.append(
            _row(f"Ripple, window {window}, tokens {length:,} to {length + count:,}: growth", "",
                 f"{seconds * 1e3:.3g} ms a token; cache {cache / 1e6:.3g} MB, with the weights "
                 f"{(weights + cache) / seconds / 1e9:.3g} GB/s",
                 growth, f"at most {most:.3g} (cache and weights: {read:.3g})", growth <= most)
        )  # fmt: skip
    return rows


def reference_rows(
    config: LumenConfig | GPTConfig, batch: int, count: int, rounds: int = 3
) -> list[dict[str, Any]]:
    """Ours against full forward passes and against `transformers` with its cache."""
    model, prompts = _model(config), _prompts(config, batch, PROMPT)
    ours, state = Generator(model), to_torch(model)
    module, other = build(config).eval(), _in_transformers(config, state)
    module.load_state_dict(state, assign=True)
    logits, tokens_BT = np.asarray(model(jnp.asarray(prompts))), torch.from_numpy(prompts)
    del model, state
    with torch.inference_mode():
        for found in (module(tokens_BT)[0], other(tokens_BT).logits):
            np.testing.assert_allclose(found.numpy(), logits, rtol=1e-3, atol=1e-3)
    sides = [_full_forward(module), _cached(other), _ours(ours)]
    full_time, cached_time, our_time = _compare(sides, prompts, count, rounds, checked=16)
    what = f"{model_name(config)}, batch {batch}, {count} new tokens"
    ratio = cached_time.median / our_time.median
    return [
        _row(what, f"full forward passes: {full_time}", str(our_time),
             full_time.median / our_time.median, "", True),
        _row(what, f"{type(other).__name__}.generate: {cached_time}", str(our_time), ratio,
             "torch / jaxslm at least 1.0", ratio >= 1),
    ]  # fmt: skip


def memory_rows(count: int = 32, rounds: int = 5) -> list[dict[str, Any]]:
    """GPT-298M at batch 1: the weights it reads a second against what the memory gives; bfloat16.

    The memory's bandwidth is that of float32 matrix-vector products with 64 matrices of 17 MB.
    """
    model = _model(GPTConfig())
    weights, prompts = _bytes(model), _prompts(model.config, 1, PROMPT)
    told: tuple[list[Stats], list[Stats]] = ([], [])
    ours = _ours(Generator(model), told[0])
    del model
    rounded = _ours(Generator(_model(GPTConfig(dtype="bfloat16"))), told[1])
    gc.collect()
    matrices = [jnp.full((1024, 4096), 0.5, jnp.float32) for _ in range(64)]
    vector = jnp.ones((1, 1024), jnp.float32)
    multiply = jax.jit(lambda matrices, vector: [vector @ matrix for matrix in matrices])
    add = jax.jit(lambda matrices: [matrix.sum() for matrix in matrices])
    product, total, *_ = alternate(
        [
            lambda: jax.block_until_ready(multiply(matrices, vector)),
            lambda: jax.block_until_ready(add(matrices)),
            lambda: ours(prompts, count),
            lambda: rounded(prompts, count),
        ],
        rounds,
    )
    rate, rounded_rate = _rate(told[0]), _rate(told[1])
    found, size = weights * rate, sum(matrix.nbytes for matrix in matrices)
    bandwidth, sums = size / product.median, size / total.median
    return [
        _row("gpt, batch 1: float32 weights read a second, of the memory's bandwidth",
             f"products in XLA: {bandwidth / 1e9:.3g} GB/s (sums {sums / 1e9:.3g} GB/s)",
             f"{found / 1e9:.3g} GB/s, {rate:.3g} tokens/s", found / bandwidth, "at least 0.6",
             found >= 0.6 * bandwidth),
        _row("gpt, batch 1: bfloat16 against float32", "",
             f"{rounded_rate:.3g} against {rate:.3g} tokens/s", rounded_rate / rate,
             "at least 0.8", rounded_rate >= 0.8 * rate),
    ]  # fmt: skip


def first_token_row(folder: Path, rounds: int = 5) -> dict[str, Any]:
    """Lumen's first token by the command line; a run that is not counted compiles the programs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save(_model(LumenConfig()), folder / "lumen")
    words = f"-m jaxslm.cli generate {folder}/lumen --prompt-ids 1 2 3 --tokens 1".split()
    environment = os.environ | {"XDG_CACHE_HOME": str(folder.resolve() / "cache")}
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True, env=environment)
        seconds.append(time.perf_counter() - start)
    timing = Timing(tuple(seconds[1:]))
    what = "lumen, process start to first token, programs compiled"
    return _row(what, "", str(timing), None, "under 3 s", timing.median < 3)


def _compare(
    sides: Sequence[Side], prompts: np.ndarray, count: int, rounds: int, *, checked: int
) -> list[Timing]:
    """Times sides in turn, once the first `checked` tokens are seen to be the same on all."""
    for side in sides[:-1]:
        np.testing.assert_array_equal(side(prompts, checked), sides[-1](prompts, checked))
    return alternate([functools.partial(side, prompts, count) for side in sides], rounds)


def _ours(generator: Generator, told: list[Stats] | None = None) -> Side:
    """Our side; it adds to `told` how each run went."""

    def generate(prompts: np.ndarray, count: int) -> np.ndarray:
        rows, stats = generator(list(prompts), max_new_tokens=count, sampling=GREEDY)
        if told is not None:
            told.append(stats)
        return np.stack(rows)

    return generate


def _torch_side(generate: Callable[[Tensor, int], Tensor]) -> Side:
    def side(prompts: np.ndarray, count: int) -> np.ndarray:
        with torch.inference_mode():
            return generate(torch.from_numpy(prompts), count).numpy()

    return side


def _original_ripple(model: Any) -> tuple[str, Side]:
    """The original's `generate`, or, where it is not at hand, what it does."""
    if not ORIGINALS.is_dir():
        counterpart = build(model.config).eval()
        counterpart.load_state_dict(to_torch(model))
        return "counterpart, full forward passes", _full_forward(counterpart)
    path, writes_bytecode = sys.path, sys.dont_write_bytecode
    sys.path, sys.dont_write_bytecode = [str(ORIGINALS), *path], True
    ripple = importlib.import_module("ripple.model")
    sys.path, sys.dont_write_bytecode = path, writes_bytecode
    original = ripple.RippleGPT(ripple.RippleConfig()).eval()
    original.load_state_dict(to_torch(model))
    return "RippleGPT.generate", _torch_side(functools.partial(original.generate, top_k=1))


def _full_forward(module: nn.Module) -> Side:
    """The obvious loop: the whole text through the model for each token."""

    def generate(tokens_BT: Tensor, count: int) -> Tensor:
        for _ in range(count):
            next_B = module(tokens_BT)[0][:, -1].argmax(-1)
            tokens_BT = torch.cat((tokens_BT, next_B[:, None]), dim=1)
        return tokens_BT

    return _torch_side(generate)


def _cached(model: Any) -> Side:
    """`generate` of `transformers`, which keeps keys and values."""

    def generate(tokens_BT: Tensor, count: int) -> Tensor:
        seen_BT = torch.ones_like(tokens_BT)
        return model.generate(
            tokens_BT, attention_mask=seen_BT, max_new_tokens=count, do_sample=False
        )

    return _torch_side(generate)


def _in_transformers(config: LumenConfig | GPTConfig, state: dict[str, Tensor]) -> Any:
    """The equivalent architecture of `transformers`, with the weights of our torch model."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Starcoder2Config

    common: dict[str, Any] = {
        "vocab_size": config.vocab_size, "max_position_embeddings": config.context,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if isinstance(config, LumenConfig):
        other = LlamaConfig(
            hidden_size=config.hidden_dim, intermediate_size=config.intermediate_dim,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, **common,
        )  # fmt: skip
        names = {r"^(embed_tokens|layers|norm)\.": r"model.\1.", r"\.attention\.": ".self_attn."}
    else:
        other = Starcoder2Config(
            hidden_size=config.n_embd, intermediate_size=4 * config.n_embd, use_bias=False,
            num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head, norm_epsilon=config.layer_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base}, **common,
        )  # fmt: skip
        names = {
            r"^transformer\.": "model.", r"\.wte\.": ".embed_tokens.", r"\.h\.": ".layers.",
            r"\.ln_f\.": ".norm.", r"\.ln_1\.": ".input_layernorm.",
            r"\.ln_2\.": ".post_attention_layernorm.", r"\.attn\.c_proj\.": ".attn.o_proj.",
            r"\.attn\.": ".self_attn.",
        }  # fmt: skip
    for pattern, name in names.items():
        state = {re.sub(pattern, name, key): tensor for key, tensor in state.items()}
    model: Any = AutoModelForCausalLM.from_config(other, attn_implementation="sdpa")
    model.load_state_dict(state, assign=True)
    return model.eval()


def _model(config: Config) -> Any:
    return MODELS[model_name(config)][1](config, key=jax.random.key(0))  # type: ignore[arg-type]


def _prompts(config: Config, batch: int, length: int) -> np.ndarray:
    """Random tokens, int64 [batch, length]."""
    return np.random.default_rng(0).integers(0, config.vocab_size, (batch, length))


def _rate(told: list[Stats]) -> float:
    """Tokens a second after the first token; the first run is not counted."""
    return median(stats.tokens_per_second for stats in told[1:])


def _bytes(model: Model) -> int:
    return sum(array.nbytes for array in to_arrays(model).values())


def _slots(config: RippleConfig, positions: int) -> int:
    """Slots that the cache has for so many positions."""
    every = max(LEAST_SLOTS, 1 << (positions - 1).bit_length())
    return min(every, ring_slots(config.attention_window, config.window_mode) or every)


def _row(what: str, theirs: str, ours: str, ratio: float | None, target: str, met: bool):
    return {"what": what, "torch": theirs, "jaxslm": ours, "target": target, "met": met,
            "ratio": None if ratio is None else round(ratio, 2)}  # fmt: skip
