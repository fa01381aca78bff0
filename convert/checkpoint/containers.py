"""Open any checkpoint: find its container by content, its layout by structure, and describe it.

    checkpoint = open_checkpoint(Path("ckpt.pt"))
    weights = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}

Opening reads the directory and the pickle (or the safetensors header), never a weight; nothing in
a file is run, and neither torch nor jax is imported.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from convert.checkpoint.layout import contents_of_pickle, describe, strip_prefixes, tensors_in
from convert.checkpoint.lazy_tensor import (
    CheckpointError,
    LazyTensor,
    Record,
    SourceFile,
    printable,
)
from convert.checkpoint.safetensors_files import (
    INDEX_SUFFIX,
    SafetensorsFiles,
    parse_json,
    read_json,
    read_safetensors,
    read_sharded_safetensors,
)
from convert.checkpoint.torch_legacy import read_torch_legacy
from convert.checkpoint.torch_zip import TorchFile, read_torch_zip
from convert.checkpoint.unpickle import UnsafePickleError

__all__ = ["Checkpoint", "CheckpointError", "LazyTensor", "UnsafePickleError", "open_checkpoint"]

MODEL_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
MAX_LISTED = 5
EXPECTED = (
    "expected a torch file (.pt, .pth, .bin), a .safetensors file, "
    "or a folder with model.safetensors or model.safetensors.index.json"
)
_OTHER_FORMATS = {
    b"\x89HDF\r\n\x1a\n": "an HDF5 file (Keras?)",
    b"GGUF": "a GGUF file (llama.cpp)",
    b"\x93NUMPY": "a numpy file (.npy)",
    b"\x1f\x8b": "a gzip file; decompress it first",
    b"\x28\xb5\x2f\xfd": "a zstd file; decompress it first",
    b"BZh": "a bzip2 file; decompress it first",
    b"\xfd7zXZ\x00": "an xz file; decompress it first",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it first",
    b"PK\x05\x06": "an empty zip",
    b"version https://git-lfs": "a git-lfs pointer; fetch the file itself with `git lfs pull`",
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds. Weights and optimizer state stay on disk until `read()`.

    Attributes:
        path: What was opened.
        files: Every file that was read, for hashing.
        container: "torch zip", "torch legacy (non-zip)", "safetensors" or "sharded safetensors".
        layout: "raw state dict", 'state dict under "model"', ...
        tensors: The state dict in the file's order, keys without wrapper prefixes.
        stripped: Which of "_orig_mod." and "module." were taken off.
        config_sources: Where a config was found -> its fields, as plain values.
        extras: What else the file holds, in words.
        optimizer: The optimizer's state dict as plain containers of numbers and `LazyTensor`.
        other: Further entries that are plain values: step, iter_num, val_loss, ...
    """

    path: Path
    files: tuple[Path, ...]
    container: str
    layout: str
    tensors: dict[str, LazyTensor]
    stripped: tuple[str, ...]
    config_sources: dict[str, dict[str, object]]
    extras: dict[str, str]
    optimizer: object | None
    other: dict[str, object]

    def verify(self, names: Iterable[str] | None = None, *, optimizer: bool = False) -> None:
        """Compare the CRC-32 of the zip records behind these tensors (all, if None).

        With `optimizer`, also those behind the optimizer's tensors. Safetensors, old torch files
        and zips written without checksums have nothing to compare with: they pass.

        Raises:
            CheckpointError: naming every tensor whose bytes are damaged.
        """
        chosen = self.tensors if names is None else {name: self.tensors[name] for name in names}
        named = list(chosen.items())
        if optimizer:
            named += [("the optimizer", tensor) for tensor in tensors_in(self.optimizer)]
        intact: dict[Record, bool] = {}
        for _, tensor in named:
            if tensor.record not in intact:
                intact[tensor.record] = tensor.record.is_intact()
        bad = dict.fromkeys(printable(name) for name, tensor in named if not intact[tensor.record])
        if bad:
            raise CheckpointError(
                f"{_shown(self.path)}: damaged: the checksum does not match in "
                f"{', '.join(bad)}; copy the file again"
            )


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint file, a sharded checkpoint's index, or a folder that holds either.

    Raises:
        UnsafePickleError: the file asks to run something; nothing was run.
        CheckpointError: anything else that keeps it from being read; says what it looks like.
    """
    path = Path(path)
    try:
        return _open(path)
    except CheckpointError as error:
        raise type(error)(f"{_shown(path)}: {error}") from None


def _open(path: Path) -> Checkpoint:
    try:
        is_folder = path.is_dir()
    except OSError:
        is_folder = False  # SourceFile.at says what is wrong
    source = SourceFile.at(_file_in_folder(path) if is_folder else path)
    start = source.read(0, 512)
    if start.startswith(b"PK\x03\x04"):
        return _from_torch(path, source, "torch zip", read_torch_zip(source))
    if start[8:9] == b"{" and b"\0" in start[:8]:  # a header size of under 2**56 bytes, then JSON
        return _from_safetensors(path, source, "safetensors", read_safetensors(source))
    if start.startswith(b"\x80"):  # the first instruction of every pickle since protocol 2
        return _from_torch(path, source, "torch legacy (non-zip)", read_torch_legacy(source))
    if start.lstrip().startswith(b"{"):
        found = read_sharded_safetensors(source)
        return _from_safetensors(path, source, "sharded safetensors", found)
    raise CheckpointError(f"{_looks_like(source, start)}; {EXPECTED}")


def _from_torch(path: Path, source: SourceFile, container: str, file: TorchFile) -> Checkpoint:
    contents = contents_of_pickle(file)
    tensors, stripped = strip_prefixes(contents.tensors)
    return Checkpoint(
        path=path,
        files=(source.path,),
        container=container,
        layout=contents.layout,
        tensors=tensors,
        stripped=stripped,
        config_sources=contents.config_sources,
        extras=contents.extras,
        optimizer=contents.optimizer,
        other=contents.other,
    )


def _from_safetensors(
    path: Path, source: SourceFile, container: str, found: SafetensorsFiles
) -> Checkpoint:
    config_sources: dict[str, dict[str, object]] = {}
    extras: dict[str, str] = {}
    files = found.files
    config = source.path.parent / CONFIG_NAME
    for key, value in found.metadata.items():
        label = f'safetensors metadata "{printable(key)}"'
        if key == "config":
            try:
                config_sources[label] = parse_json(value)
            except CheckpointError as error:
                raise CheckpointError(f"{label} {error}") from None
        elif (key, value) != ("format", "pt"):
            extras[label] = describe(value)
    if config.exists():
        try:
            config_sources[CONFIG_NAME] = read_json(SourceFile.at(config))
        except CheckpointError as error:
            raise CheckpointError(f"{CONFIG_NAME} beside it {error}") from None
        files += (config,)
    if not found.tensors:
        raise CheckpointError("holds no tensors; expected a state dict")
    tensors, stripped = strip_prefixes(found.tensors)
    return Checkpoint(
        path=path,
        files=files,
        container=container,
        layout="raw state dict",
        tensors=tensors,
        stripped=stripped,
        config_sources=config_sources,
        extras=extras,
        optimizer=None,
        other={},
    )


def _file_in_folder(folder: Path) -> Path:
    """Return the weights of a folder: the index if there is one, else the only file."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    for name in (f"{MODEL_NAME}{INDEX_SUFFIX}", MODEL_NAME):
        if name in names:
            return folder / name
    weights = [name for name in names if Path(name).suffix in WEIGHT_SUFFIXES]
    if any(name.endswith(f".bin{INDEX_SUFFIX}") for name in names):
        found = "holds a sharded .bin checkpoint; save it as safetensors"
    elif weights:
        listed = ", ".join(printable(name) for name in weights[:MAX_LISTED])
        found = f"is a folder without {MODEL_NAME}; pass the file itself ({listed})"
    elif {"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"} & set(names):
        found = "looks like an Orbax checkpoint"
    elif "data.pkl" in names:
        found = "looks like an unpacked torch zip; pass the .pt file itself"
    else:
        found = "is a folder without weights"
    raise CheckpointError(f"{found}; {EXPECTED}")


def _looks_like(source: SourceFile, start: bytes) -> str:
    if not start:
        return "is empty"
    for magic, name in _OTHER_FORMATS.items():
        if start.startswith(magic):
            return f"looks like {name}"
    if start[257:262] == b"ustar":
        return "looks like a tar archive (or a torch file from before version 0.1.10)"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # may cut a character in two
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text:
        is_page = text.lstrip()[:9].lower().startswith(("<!doctype", "<html"))
        return f"looks like {'an HTML page (a failed download?)' if is_page else 'a text file'}"
    if source.path.suffix == ".safetensors":
        return "is damaged: its safetensors header does not begin as one; copy the file again"
    return "looks like an unknown binary file"


def _shown(path: Path) -> str:
    return printable(str(path), 300)
