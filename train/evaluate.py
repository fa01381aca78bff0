"""`jaxslm eval`: a model's loss on held-out tokens, by length and by position.

For each length T the data is cut into windows of T tokens in a fixed order; every token but a
file's first is a target once. Losses leave the devices one by one and are summed here in float64,
so that the sums do not depend on the number of devices.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxslm.models import Config, LumenConfig, model_name
from jaxslm.sharding import BATCH, make_mesh
from jaxslm.weights import CONFIG_FILE, from_arrays, map_folder, place
from train.batches import IGNORED, EvaluationBatches
from train.config import is_run
from train.evaluation_report import Evaluation, LengthResult, mean
from train.loss import token_losses
from train.text_bytes import TextBytes, read_text_bytes
from train.tokens import TOKENIZERS, TokenSet, open_tokens

BATCH_TOKENS = 8192  # of a batch, where no size is given
LOGITS = 2**24  # that exist on a device at one time, about: 64 MiB
IN_FLIGHT = 2  # batches that may be queued on the devices


def evaluate(
    model: Path,
    data: Path,
    *,
    lengths: Sequence[int] = (),
    tokenizer: Path | None = None,
    batch_size: int | None = None,
    batches: int | None = None,
    mesh: tuple[int, int, int] = (-1, 1, 1),
    progress: Callable[[str], None] = lambda words: None,
) -> Evaluation:
    """Measures a model's loss on token files.

    Args:
        model: model folder.
        data: token file or folder; of two splits in it, "val".
        lengths: tokens of a window; none for the model's context.
        tokenizer: tokenizer.json or meta.pkl to count bytes by, where neither folder has one.
        batch_size: windows of a batch, over all devices; None for about 8,192 tokens.
        batches: how many of each length at most; None for all of the data.
        mesh: sizes of data (-1: the devices left), fsdp and tensor.
        progress: told in words what is being done.

    Returns:
        The figures. The shortest length is measured first; where a later one fails, they are of the
        lengths before it, and `failure` says why there are no others.

    Raises:
        ValueError: what is given is not what it should be or does not fit, which is found before
            any work; or, at the first length, the devices' memory is not enough or a loss is not
            finite: its place is named, for a mean would say nothing.
        OSError: a file cannot be read.
    """
    _check_model(model)
    config, arrays = map_folder(model)
    trained, _ = _context(config)
    tokens = open_tokens(data, split="val")
    beside = next((model / name for name in TOKENIZERS if (model / name).is_file()), None)
    named = [path for path in (tokenizer, beside, tokens.tokenizer) if path is not None]
    counted = read_text_bytes(named, config.vocab_size)
    devices = make_mesh(*mesh, jax.devices())
    passes = [
        _Pass.over(tokens, length, devices, config.vocab_size, batch_size, batches)
        for length in _check_lengths(config, lengths)
    ]
    params, replicated = place(arrays, devices)
    notes = [f"no bits per byte: {counted.missing}"] if counted.missing else []
    notes += [f"replicated, because it cannot be split: {words}" for words in replicated]
    notes += [
        f"length {each.length:,}: {each.unused:,} tokens of files too short for it are not read"
        for each in passes
        if each.unused
    ]
    if batches is not None and len(passes) > 1:
        notes.append("under a limit of batches each length is measured on another text")
    results, failure = [], None
    for each in passes:
        losses = _losses(config, params, devices, each, progress)
        try:
            results.append(_result(each, losses, counted, trained))
        except ValueError as error:
            if not results:
                raise
            left = ", ".join(f"{other.length:,}" for other in passes[len(results) :])
            failure = f"not measured at length {left}: {error}"
            break
    return Evaluation(
        model=str(model), kind=model_name(config), data=str(data), training_length=trained,
        parameters=sum(array.size for array in arrays.values()),
        tokenizer=None if counted.tokenizer is None else str(counted.tokenizer),
        lengths=tuple(results), notes=tuple(notes), failure=failure,
    )  # fmt: skip


@dataclass(frozen=True)
class _Pass:
    """One pass over the data: windows of `length` tokens, `rows` a batch, `unused` tokens never."""

    length: int
    rows: int
    unused: int
    batches: EvaluationBatches

    @classmethod
    def over(
        cls,
        tokens: TokenSet,
        length: int,
        devices: Mesh,
        vocab_size: int,
        batch_size: int | None,
        limit: int | None,
    ) -> "_Pass":
        parts = int(devices.shape["data"] * devices.shape["fsdp"])
        usual = max(1, BATCH_TOKENS // length // parts) * parts
        rows = usual if batch_size is None else batch_size
        if rows < 1 or rows % parts:
            raise ValueError(
                f"a batch of {rows} windows cannot be split over data x fsdp = {parts} devices: "
                f"it must be a multiple of {parts}"
            )
        batches = EvaluationBatches(
            tokens, batch_size=rows, sequence_length=length, vocab_size=vocab_size, limit=limit
        )
        unused = sum(file.count for file in tokens.files if file.count <= length)
        return cls(length, rows, unused, batches)


def _losses(
    config: Config,
    params: Mapping[str, jax.Array],
    devices: Mesh,
    each: _Pass,
    progress: Callable[[str], None],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Targets and their losses, batch by batch, [B, T], all by one program.

    Raises:
        ValueError: a loss is not finite, or the memory is not enough.
    """
    T, last = each.length, len(each.batches)
    sharding = NamedSharding(devices, PartitionSpec(BATCH, None))
    queue: deque[tuple[int, np.ndarray, jax.Array]] = deque()
    try:
        progress(f"length {T:,}: compiling")
        program = _compile(config, params, devices, each.rows, T)
        for index in range(last):
            progress(f"length {T:,}: batch {index + 1:,} of {last:,}")
            inputs_BT, targets_BT = each.batches.rows(index, np.arange(each.rows))
            placed = jax.device_put((inputs_BT, targets_BT), sharding)
            queue.append((index, targets_BT, program(params, *placed)))
            while len(queue) > (IN_FLIGHT if index + 1 < last else 0):
                number, targets_BT, losses = queue.popleft()
                yield targets_BT, _finite(np.asarray(losses), number, config.dtype)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"the devices' memory is not enough for {each.rows} windows of {T:,} tokens: lower "
            "the batch size, or leave this length out"
        ) from error


def _compile(
    config: Config, params: Mapping[str, jax.Array], devices: Mesh, rows: int, T: int
) -> Callable[..., jax.Array]:
    """The program for one shape: (parameters, inputs, targets [B, T]) -> losses [B, T]."""
    sharding = NamedSharding(devices, PartitionSpec(BATCH, None))
    here = rows // (devices.shape["data"] * devices.shape["fsdp"])
    chunk = max(1, LOGITS // (here * config.vocab_size))

    def losses(params: Any, inputs_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        model = from_arrays(config, params)
        norm_BTD = model.activations(inputs_BT, logits=False)["final_norm"]
        return token_losses(model.unembed, norm_BTD, targets_BT, chunk=chunk)

    batch = jax.ShapeDtypeStruct((rows, T), np.int32, sharding=sharding)
    exact = "float32" if config.dtype == "float32" else None  # as training computes
    with jax.set_mesh(devices), jax.default_matmul_precision(exact):
        return jax.jit(losses).lower(params, batch, batch).compile()


def _result(
    each: _Pass,
    losses: Iterable[tuple[np.ndarray, np.ndarray]],
    counted: TextBytes,
    trained: int,
) -> LengthResult:
    """Sums up a pass; `trained` is the training length."""
    sums_T, counts_T = np.zeros(each.length), np.zeros(each.length, np.int64)
    size = 0
    for targets_BT, losses_BT in losses:
        kept_BT = targets_BT != IGNORED
        sums_T += losses_BT.sum(0, dtype=np.float64)
        counts_T += kept_BT.sum(0)
        size += counted.of(targets_BT[kept_BT])
    tokens, bits = int(counts_T.sum()), float(sums_T.sum()) / math.log(2)
    loss = float(sums_T.sum()) / tokens
    return LengthResult(
        length=each.length, batch_size=each.rows, tokens=tokens, unused=each.unused, loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf, bits_per_token=bits / tokens,
        text_bytes=None if counted.missing else size, bits_per_byte=bits / size if size else None,
        beyond_tokens=int(counts_T[trained:].sum()),
        beyond_loss=mean(sums_T[trained:], counts_T[trained:]),
        position_loss=tuple(mean(*pair) for pair in zip(sums_T, counts_T, strict=True)),
        position_tokens=tuple(counts_T.tolist()),
    )  # fmt: skip


def _finite(losses_BT: np.ndarray, batch: int, dtype: str) -> np.ndarray:
    """The losses, if every one is a number."""
    bad = np.argwhere(~np.isfinite(losses_BT))
    if bad.size:
        row, place = bad[0].tolist()
        raise ValueError(
            f"the loss is {losses_BT[row, place]} at position {place + 1:,} of row {row} of batch "
            f"{batch} at length {losses_BT.shape[1]:,}: the weights are not finite, or their "
            f"products overflow in {dtype}"
        )
    return losses_BT


def _check_model(path: Path) -> None:
    """Refuses what is no folder of ours, with the command that makes one of it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name a model folder")
    if is_run(path):
        raise ValueError(f"{path} is a training run: make a model folder of it first, by "
                         f"`jaxslm export {path} out/`")  # fmt: skip
    if not (path / CONFIG_FILE).is_file():
        raise ValueError(f"{path} is no model folder: make one of a torch checkpoint first, by "
                         f"`jaxslm convert {path} out/`")  # fmt: skip


def _context(config: Config) -> tuple[int, str]:
    """The sequence length of training, and the field that says it."""
    name = "max_seq_len" if isinstance(config, LumenConfig) else "block_size"
    return getattr(config, name), name


def _check_lengths(config: Config, lengths: Sequence[int]) -> list[int]:
    """The lengths in order, each once; the context for none."""
    trained, name = _context(config)
    found = sorted(set(lengths or [trained]))
    if found[0] < 1:
        raise ValueError(f"length {found[0]}: expected 1 or more")
    if config.context is not None and found[-1] > config.context:
        raise ValueError(
            f"length {found[-1]:,} is more than the model's {name} of {config.context:,}: only "
            "Ripple without absolute positions goes beyond its context"
        )
    return found
