"""Conversion on disk: torch checkpoint -> model folder -> torch files, streamed."""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from convert.casting import cast, float_dtype
from convert.checkpoint.layout import OPTIMIZER_KEYS
from convert.optimizer import (
    STEP_KEYS,
    TorchOptimizer,
    moment_arrays,
    open_optimizer,
    torch_optimizer_state,
    training_checkpoint,
)
from convert.parity.subject import recorded_digests
from convert.reader import Reader, sha256
from convert.resolve import CHOICES
from convert.source import TorchSource, open_torch
from convert.transform import torch_arrays, with_aliases
from convert.transpose import contiguous
from jaxslm.files import atomic_output, check_destination
from jaxslm.models import Config
from jaxslm.optimizer_file import OPTIMIZER_FILE, map_optimizer, write_optimizer
from jaxslm.safetensors_io import TensorSpec, write_tensors
from jaxslm.tokenizer import FILE as TOKENIZER_FILE
from jaxslm.tokenizer import Tokenizer, load_tokenizer
from jaxslm.weights import OWNED_FILES, map_folder, write_folder

PARITY_FILE = "parity.json"
INDEX_FILE = "model.safetensors.index.json"
TORCH_FOLDER_FILES = ("config.json", INDEX_FILE, "model.safetensors", "model-*-of-*.safetensors")
DEFAULT_SHARD_SIZE = 5 * 10**9
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion did.

    Attributes:
        destination: what was written.
        config: the model's.
        tensors: number of torch tensors, tied ones once.
        parameters: number of numbers in them.
        nbytes: size of the weights written.
        identical: tensors whose bytes are those of the checkpoint that the model folder was
            converted from; None where that is not known.
        moments: number of the optimizer's tensors in torch.
        identical_moments: the same for these.
        notes: what the user should know.
    """

    destination: Path
    config: Config
    tensors: int
    parameters: int
    nbytes: int
    identical: int | None
    moments: int = 0
    identical_moments: int | None = None
    notes: tuple[str, ...]


def torch_to_folder(
    source: Path,
    destination: Path,
    *,
    overrides: tuple[str, ...] = (),
    preset: str | None = None,
    dtype: str | None = None,
    with_optimizer: bool = False,
    allow_nonfinite: bool = False,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    check: Callable[[TorchSource], Mapping[str, Any]] | None = None,
) -> Converted:
    """Converts a torch checkpoint to a model folder, with a parity.json beside the weights.

    Args:
        source: checkpoint in any supported container.
        destination: folder to create.
        overrides: "field=value" for config fields that the file does not give.
        preset: name of a config of the original.
        dtype: cast every parameter to this; None keeps each tensor's own. Moments keep theirs.
        with_optimizer: convert the state of torch's AdamW too, to optimizer.safetensors.
        allow_nonfinite: accept NaN and infinities in the weights and moments.
        tokenizer: tokenizer.json or meta.pkl, to travel with the model; None takes the
            tokenizer.json of a source that is a folder, or else keeps an earlier destination's.
        overwrite: replace an earlier model folder.
        check: called before anything is written; its result is recorded.

    Raises:
        ValueError: as `convert.to_jax` and `convert.optimizer.open_optimizer`.
        OSError: a file cannot be read or written, or the destination exists.
    """
    _keep_source(source, destination)
    check_destination(destination, overwrite=overwrite, owns=OWNED_FILES)
    opened = open_torch(source, overrides=overrides, preset=preset, cast=dtype is not None)
    optimizer = open_optimizer(opened) if with_optimizer else None
    vocabulary, tokenizer_notes = _tokenizer(
        source, destination, tokenizer, opened.config.vocab_size
    )
    figures = None if check is None else check(opened)
    with (
        atomic_output(destination, overwrite=overwrite, owns=OWNED_FILES) as folder,
        Reader(opened, dtype) as reader,
        ThreadPoolExecutor(1) as hasher,
        ThreadPoolExecutor(1) as assembler,
    ):
        files = {path: hasher.submit(_file_sha256, path) for path in opened.checkpoint.files}
        specs = reader.specs()
        write_folder(folder, opened.config, specs, reader.read_ahead(assembler))
        digests = reader.finish(allow_nonfinite=allow_nonfinite)
        moments = {}
        if optimizer is not None:
            path = folder / OPTIMIZER_FILE
            moments = _write_moments(path, optimizer, assembler, allow_nonfinite=allow_nonfinite)
        record = {
            "jaxslm": _version("jaxslm"),
            "versions": {
                "python": platform.python_version(),
                **{name: _version(name) for name in ("jax", "flax", "numpy", "torch")},
            },
            "table": {"model": opened.table.model, "version": opened.table.version},
            "source": {
                "container": opened.checkpoint.container,
                "layout": opened.checkpoint.layout,
                "sha256": {path.name: digest.result() for path, digest in files.items()},
            },
            "config_origins": opened.resolved.origins,
            "cast": dtype,
            "tensors": _tensor_records(opened, digests),
            "check": figures,
        }
        if optimizer is not None:
            record["moments"] = _tensor_records(optimizer.moments, moments)
        (folder / PARITY_FILE).write_text(json.dumps(record, indent=1) + "\n")
        if vocabulary is not None:
            vocabulary.save(folder)
    notes = [*_notes(opened, optimizer), *tokenizer_notes] + [
        f"not used: {', '.join(names)} in {source_name}"
        for source_name, names in opened.resolved.unused.items()
    ]
    return Converted(
        destination=destination,
        config=opened.config,
        tensors=len(digests),
        parameters=sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in specs.values()),
        nbytes=sum(spec.nbytes for spec in specs.values()),
        identical=None,
        moments=len(moments),
        notes=tuple(notes),
    )


def _tokenizer(
    source: Path, destination: Path, named: Path | None, vocab_size: int
) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer that goes with the weights, and notes on those that were found and not named.

    Raises:
        ValueError: the one that was named is none, or has ids that the model does not know.
    """
    if named is not None:
        return _fitting(named, vocab_size), []
    beside, earlier = source / TOKENIZER_FILE, destination / TOKENIZER_FILE
    notes = []
    for path, taken, other in (
        (beside, f"{beside}", "beside the weights"),
        (earlier, f"kept from the earlier {destination}", f"of the earlier {destination}"),
    ):
        if path.is_file():
            try:
                return _fitting(path, vocab_size), [*notes, f"tokenizer: {taken}"]
            except ValueError as error:
                notes.append(f"the tokenizer {other} is left out: {error}")
    return None, notes


def _fitting(path: Path, vocab_size: int) -> Tokenizer:
    """A tokenizer that has no ids but the model's."""
    found = load_tokenizer(path)
    if found.vocab_size > vocab_size:
        raise ValueError(
            f"{path} has {found.vocab_size:,} ids, the model knows {vocab_size:,}: "
            "it is another model's tokenizer"
        )
    return found


def folder_to_torch(
    source: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    shard_size: int | None = None,
    with_optimizer: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Converts a model folder to torch files that the original loads with strict=True.

    Args:
        source: model folder.
        destination: a .pt, .pth or .bin file (needs torch), a .safetensors file, or, without a
            suffix, a folder of safetensors shards with index and config.json.
        dtype: cast every tensor to this; None keeps each parameter's own. Moments keep theirs.
        shard_size: largest size of a shard in bytes, for a folder; None for 5 GB.
        with_optimizer: write a training checkpoint with the state of AdamW, which the original's
            optimizer loads; for a .pt, .pth or .bin file.
        overwrite: replace an earlier output.

    Raises:
        ValueError: the folder is damaged or has no optimizer state, or a cast overflows, or the
            destination makes no sense.
        ImportError: a .pt file was asked for and torch is not installed.
        OSError: a file cannot be read or written, or the destination exists.
    """
    suffix = destination.suffix.lower()
    if suffix not in ("", ".safetensors", *TORCH_SUFFIXES):
        raise ValueError(
            f"{destination}: name a .pt, .pth, .bin or .safetensors file, or a folder without a "
            "suffix for sharded safetensors"
        )
    if shard_size is not None and suffix:
        raise ValueError("--shard-size is for a folder: name the output without a suffix")
    if with_optimizer and suffix not in TORCH_SUFFIXES:
        raise ValueError(f"--with-optimizer needs a .pt, .pth or .bin file; {destination} is none")
    _keep_source(source, destination)
    check_destination(destination, overwrite=overwrite, owns=TORCH_FOLDER_FILES)
    config, arrays = map_folder(source)
    optimizer = map_optimizer(source) if with_optimizer else None
    if with_optimizer and optimizer is None:
        raise ValueError(
            f"{source} has no {OPTIMIZER_FILE}: leave --with-optimizer out, or convert the torch "
            "checkpoint with it again"
        )
    state = torch_arrays(config, arrays)
    moments = {} if optimizer is None else moment_arrays(config, optimizer)
    target = None if dtype is None else float_dtype(dtype)
    before = recorded_digests(source)
    before_moments = _recorded_moments(source)
    after: dict[str, str] = {}

    def tensor(key: str) -> np.ndarray:
        stored = (
            moments[key] if key in moments else cast(state[key], target or state[key].dtype, key)
        )
        array = contiguous(stored)
        after[key] = sha256(array)
        return array

    with atomic_output(destination, overwrite=overwrite, owns=TORCH_FOLDER_FILES) as path:
        if suffix in TORCH_SUFFIXES:
            from convert.torch_io import from_numpy, save_state_dict

            content: dict[str, Any] = with_aliases(
                config, {key: from_numpy(tensor(key)) for key in state}
            )
            if optimizer is not None:
                tensors = {name: from_numpy(tensor(name)) for name in moments}
                built = torch_optimizer_state(config, optimizer, tensors)
                content = training_checkpoint(config, content, built, optimizer.step)
            save_state_dict(path, content)
        else:
            owners = with_aliases(config, {key: key for key in state})
            specs = {
                key: TensorSpec(state[owner].shape, target or state[owner].dtype)
                for key, owner in owners.items()
            }
            said = {name: value for name, value in asdict(config).items() if name not in CHOICES}
            if suffix:
                metadata = {"format": "pt", "config": json.dumps(said)}
                write_tensors(path, specs, lambda key: tensor(owners[key]), metadata)
            else:
                _write_shards(path, specs, lambda key: tensor(owners[key]), said, shard_size)
    same_moments, notes = None, ()
    if before_moments and optimizer is not None:
        same_moments = _equal(before_moments, after)
        notes = (f"{same_moments} of {len(moments)} moments of the optimizer have its bytes too",)
    elif optimizer is None and (source / OPTIMIZER_FILE).exists():
        notes = (f"not converted: {OPTIMIZER_FILE}; pass --with-optimizer to convert it too",)
    return Converted(
        destination=destination,
        config=config,
        tensors=len(state),
        parameters=sum(array.size for array in state.values()),
        nbytes=sum(array.size * (target or array.dtype).itemsize for array in state.values()),
        identical=None if before is None else _equal(before, after),
        moments=len(moments),
        identical_moments=same_moments,
        notes=notes,
    )


def _keep_source(source: Path, destination: Path) -> None:
    """Refuses an output that would replace what it is made from."""
    where, to = source.resolve(), destination.resolve()
    if where == to or to in where.parents:
        raise ValueError(f"{destination} holds the source {source}: name another output")


def _write_moments(
    path: Path, optimizer: TorchOptimizer, assembler: Executor, *, allow_nonfinite: bool
) -> dict[str, str]:
    """Writes optimizer.safetensors; the SHA-256 of each of torch's tensors."""
    with Reader(optimizer.moments, None) as reader:
        write_optimizer(
            path, reader.specs(), reader.read_ahead(assembler),
            count=optimizer.count, groups=optimizer.groups, step=optimizer.step,
        )  # fmt: skip
        return reader.finish(allow_nonfinite=allow_nonfinite)


def _notes(source: TorchSource, optimizer: TorchOptimizer | None) -> list[str]:
    """What of a checkpoint was converted beside the weights, and what was not."""
    extras = dict(source.checkpoint.extras)
    notes = []
    label = next((name for name in extras if name in OPTIMIZER_KEYS), None)
    if optimizer is not None:
        done = {label, *(STEP_KEYS if optimizer.step is not None else ())}
        extras = {name: what for name, what in extras.items() if name not in done}
        notes.append(
            f"optimizer: AdamW after {optimizer.count:,} updates, "
            f"{len(optimizer.moments.checkpoint.tensors)} moments"
        )
        notes += [f"{path} has no moments: torch never updated it" for path in optimizer.without]
    elif label is not None:
        extras[label] += "; pass --with-optimizer to convert it too"
    return notes + [f"not converted: {name} ({what})" for name, what in extras.items()]


def _write_shards(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], np.ndarray],
    config: Mapping[str, Any],
    shard_size: int | None,
) -> None:
    """Safetensors shards of at most `shard_size` bytes (a larger tensor has one of its own)."""
    shards: list[dict[str, TensorSpec]] = [{}]
    for key, spec in specs.items():
        held = sum(other.nbytes for other in shards[-1].values())
        if shards[-1] and held + spec.nbytes > (shard_size or DEFAULT_SHARD_SIZE):
            shards.append({})
        shards[-1][key] = spec
    folder.mkdir()
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard, read, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(spec.nbytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensor_records(source: TorchSource, digests: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What parity.json says of each torch tensor."""
    return {
        part.key: {
            "sha256": digests[part.key],
            "dtype": source.tensor(part.key).torch_dtype,
            "shape": list(part.shape),
            "parameter": leaf.path,
        }
        for leaf in source.leaves
        for part in leaf.parts
    }


def _equal(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """How many digests are as they were."""
    return sum(before.get(name) == digest for name, digest in after.items())


def _recorded_moments(folder: Path) -> dict[str, str] | None:
    """SHA-256 of the moments that a folder was converted from, where parity.json says so."""
    try:
        record = json.loads((folder / PARITY_FILE).read_text())
        return {name: tensor["sha256"] for name, tensor in record["moments"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str | None:
    """An installed package's version, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parse_size(text: str) -> int:
    """Bytes of a size such as "500MB", "5GB" or "1000000" (decimal units).

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text.strip(), re.IGNORECASE)
    size = (
        0 if found is None else int(float(found[1]) * 1000 ** " kmg".index(found[2].lower() or " "))
    )
    if size < 1:
        raise ValueError(
            f"a size is a number of bytes with kB, MB or GB, such as 500MB; got {text!r}"
        )
    return size
