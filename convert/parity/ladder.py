"""The parity check: a ladder of comparisons from the weights' bytes to greedy tokens.

Truth is torch in float64. Ours in float64 must agree to 1e-10 of the largest number; ours in
another dtype may differ from the truth by at most 4 times what torch in that dtype does. JAX runs
at "highest" matmul precision. RoPE tables, float32 in the originals too, are a rung of their own;
the float64 rungs use torch's, so that the last bit of a cosine hides nothing. On request both
halves also train for some steps (`convert.parity.trajectory`).
"""

import gc
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from convert.parity.compare import ParityReport, order
from convert.parity.diagnosis import likely_cause
from convert.parity.jax_side import JaxSide
from convert.parity.rungs import (
    NORM_INPUTS,
    Inputs,
    Side,
    batch_size,
    compare_sides,
    heatmaps,
    measure,
    rope_rows,
    weight_rows,
)
from convert.parity.subject import Subject
from convert.parity.updates import Half, update_rows
from convert.transform import with_aliases
from jaxslm.models import Config, LumenConfig, RippleConfig, model_name

if TYPE_CHECKING:
    from convert.parity.training_plan import Asked

GREEDY_TOKENS = 20
PROMPT_TOKENS = 8
FORWARD_BUDGET = 2e12  # float64 operations that one forward pass may take
GRADIENT_BUDGET = 5e11  # and one backward pass, which also holds every layer's activations
NORM_ROWS = 64
GRADIENT_SAMPLES = 4  # backward passes behind one float32 verdict on a gradient
LARGE = 2e7  # parameters from which one has to do; each of a large model's has many numbers


def check(
    subject: Subject,
    *,
    against: str | None = None,
    tokens: np.ndarray | None = None,
    lengths: Sequence[int] | None = None,
    dtypes: Sequence[str] = ("float32",),
    seed: int = 0,
    training: "Asked | None" = None,
    jax_side: Callable[..., JaxSide] = JaxSide,
    progress: Callable[[str], None] = lambda words: None,
) -> ParityReport:
    """Climbs the ladder.

    Args:
        subject: the model.
        against: "file.py:Class" of a torch class, or None for our own counterpart.
        tokens: integers [n] of real tokens to use in place of random ones.
        lengths: sequence lengths of the forward passes; None chooses them.
        dtypes: compared besides float64: "float32", "bfloat16".
        seed: of the random tokens.
        training: a training trajectory to compare too, in float64 and float32.
        jax_side: builds our half; tests hand in broken ones.
        progress: told what is being done.

    Raises:
        ValueError: the class cannot be used, or tokens, lengths or training do not fit the model.
        ImportError: torch is not installed.
    """
    from convert.parity.torch_side import TorchSide, builder
    from convert.parity.training_plan import make_plan
    from convert.parity.trajectory import trajectory

    start = time.monotonic()
    config = subject.config
    if isinstance(config, RippleConfig):
        config = replace(config, decay_gradient="as_torch")
    name, build = builder(against, config)
    state = with_aliases(config, dict(subject.torch_state))
    inputs = choose_inputs(config, subject.parameters, tokens, lengths, seed)
    plan = None if training is None else make_plan(config, training, tokens, seed)
    longest = max(*inputs.lengths, inputs.prompt + inputs.decoded - 1)
    rows = weight_rows(subject)

    with (
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.default_device(jax.devices("cpu")[0]),  # torch is there too, and a TPU has no float64
    ):
        progress("torch, float64")
        side = TorchSide(build, config, state, "float64", longest)
        truth = _half(side, inputs)
        trained = None
        tables = _torch_tables(side, config)
        drawn: dict[str, dict[str, list[list[float]]]] = {}
        for dtype in ("float64", *dtypes):
            same = None
            if dtype != "float64":
                progress(f"torch, {dtype}")
                same = _half(TorchSide(build, config, state, dtype, longest), inputs)
            progress(f"JAX, {dtype}")
            handed = {"rope": tables} if dtype == "float64" and tables is not None else {}
            mine = jax_side(config, subject.arrays, dtype, **handed)
            own_tables = mine.rope_tables()
            if dtype == "float64" and tables is not None and own_tables is not None:
                rows += rope_rows(own_tables, tables)
            ours = _half(mine, inputs)
            rows += compare_sides(
                config, dtype, ours.measured, truth.measured, same and same.measured
            )
            rows += update_rows(config, dtype, inputs, ours, truth, same)
            if dtype != "float64":
                drawn = drawn or heatmaps(ours.measured, truth.measured)
            del mine, ours, same
            gc.collect()  # compiled functions and their side hold each other, and gigabytes
        if plan is not None:
            del side, truth
            found, trained = trajectory(
                plan, subject.arrays, build, tables=tables, progress=progress,
                dtypes=[dtype for dtype in dtypes if dtype == "float32"],
            )  # fmt: skip
            rows += found
    report = ParityReport(
        source=subject.source,
        against=name,
        model=model_name(config),
        config=asdict(config),
        parameters=subject.parameters,
        lengths=inputs.lengths,
        rows=tuple(sorted(rows, key=order)),
        heatmaps=drawn,
        training=trained,
        versions={"python": platform.python_version()}
        | {package: version(package) for package in ("jax", "flax", "numpy", "torch")},
        seconds=time.monotonic() - start,
    )
    return replace(report, cause=likely_cause(report))


def _half(side: Side, inputs: Inputs) -> Half:
    return Half(side, measure(side, inputs))


def choose_inputs(
    config: Config,
    parameters: int,
    tokens: np.ndarray | None,
    lengths: Sequence[int] | None,
    seed: int,
) -> Inputs:
    """Lengths that reach the edges of the model, and tokens for them.

    Raises:
        ValueError: a length beyond the model's context, or tokens too few or out of the vocabulary.
    """
    context = config.context or config.block_size  # type: ignore[union-attr]
    if tokens is not None and len(tokens) < 2:
        raise ValueError(f"2 tokens are needed at least, the file has {len(tokens)}")
    if lengths is None:
        affordable = max(2, int(FORWARD_BUDGET / (2 * parameters)))
        window = getattr(config, "attention_window", None)
        edges = [window - 1, window, window + 1, 2 * window + 1] if window else []
        chosen = {1, 2, context} | {edge for edge in edges if edge > 0}
        if config.context is not None:
            chosen = {length for length in chosen if length <= config.context}
        if tokens is not None:
            chosen = {min(length, len(tokens) - 1) for length in chosen}
        lengths = sorted({min(length, affordable) for length in chosen})
    longest = max(lengths, default=0)
    if not lengths or min(lengths) < 1 or longest > (config.context or longest):
        end = f"to {config.context}" if config.context else "on"
        raise ValueError(f"lengths must be from 1 {end}, got {list(lengths)}")
    samples = GRADIENT_SAMPLES if parameters < LARGE else 1
    rng = np.random.default_rng(seed)
    if tokens is None:
        rows = max(batch_size(longest), samples)
        tokens_BT = rng.integers(0, config.vocab_size, (rows, longest + 1))
    else:
        if len(tokens) < longest + 1:
            raise ValueError(f"{longest + 1} tokens are needed, the file has {len(tokens)}")
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise ValueError(
                f"tokens reach from {tokens.min()} to {tokens.max()}, but the vocabulary has "
                f"{config.vocab_size}: were they made with another tokenizer?"
            )
        rows = min(max(batch_size(longest), samples), len(tokens) // (longest + 1))
        tokens_BT = tokens[: rows * (longest + 1)].reshape(rows, longest + 1)
    affordable = max(2, int(GRADIENT_BUDGET / (6 * parameters)))
    gradient_lengths = {min(longest, affordable)}
    window = getattr(config, "attention_window", None)
    if window:  # where the decay has a gradient and where it has none
        gradient_lengths |= {min(longest, affordable, window)}
    width = config.head_width * (
        config.num_heads if isinstance(config, LumenConfig) else config.n_head
    )
    mean, spread = np.array(NORM_INPUTS).T[:, :, None, None]
    norm_input = mean + spread * rng.standard_normal((len(NORM_INPUTS), NORM_ROWS, width))
    room = config.context or PROMPT_TOKENS + GREEDY_TOKENS
    prompt = max(1, min(PROMPT_TOKENS, longest, room - GREEDY_TOKENS))
    return Inputs(
        tokens_BT=tokens_BT.astype(np.int64),
        lengths=tuple(lengths),
        gradient_lengths=tuple(sorted(gradient_lengths)),
        gradient_samples=samples,
        norm_input=norm_input.astype(np.float32).astype(np.float64),
        prompt=prompt,
        decoded=min(GREEDY_TOKENS, room - prompt + 1),
    )


def _torch_tables(side: Any, config: Config) -> tuple[np.ndarray, np.ndarray] | None:
    """The RoPE tables that a torch module used: its own buffers', or made as the originals do."""
    if isinstance(config, RippleConfig):
        return None
    from convert.counterparts import rope_tables

    return side.rope_tables() or rope_tables(config)
