"""Token files, mapped into memory: what they hold is read when it is asked for.

Four kinds are read, all little-endian:
- raw `.bin`: uint16 ids and nothing else, as nanoGPT writes them;
- llm.c `.bin`: 256 int32 of header (magic, version, count), then uint16 or uint32 ids;
- `.npy`: one axis of integers, as build-nanogpt writes them;
- our own folders: `tokens-00000.bin`, ... beside a `meta.json` that says dtype, counts, vocabulary
  and tokenizer.

A `.bin` file is llm.c's if its first int32 is one of llm.c's magic numbers. As raw ids these would
be 55960 or 56241 followed by 308; a raw file that begins so is refused, because version and count
then do not fit, and is never read as something it may not be.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from jaxslm.tokenizer import FILE as TOKENIZER_FILE
from jaxslm.tokenizer import tokenizer_sha256

FORMAT = "jaxslm-tokens"
FORMAT_VERSION = 1
META = "meta.json"
SPLITS = ("train", "val")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OWNS = (META, "tokens-*.bin")  # every file of a folder of ours
TOKENIZERS = (TOKENIZER_FILE, "meta.pkl")
MAX_MAPS = 256  # each holds a file descriptor open

LLMC_HEADER = 256 * 4  # bytes
LLMC = {20240520: (1, DTYPES["uint16"]), 20240801: (7, DTYPES["uint32"])}  # magic: version, dtype
LLMC_EVALUATION = 20240522  # multiple-choice questions: no stream of tokens


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of token ids: where in it they lie, as what.

    Attributes:
        path: the file.
        dtype: of an id in the file.
        count: number of ids.
        offset: bytes before the first id.
    """

    path: Path
    dtype: np.dtype
    count: int
    offset: int

    def map(self) -> np.ndarray:
        """All ids, [count] in the file's dtype, read-only; only what is used is read."""
        if self.count == 0:
            return np.empty(0, self.dtype)
        mapped = np.memmap(self.path, self.dtype, "r", offset=self.offset, shape=(self.count,))
        return np.asarray(mapped)  # slices of a memmap are slow to make

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of the ids [start, stop), in the file's dtype, not checked against a vocabulary.

        Raises:
            ValueError: the file does not hold that range.
        """
        if not 0 <= start <= stop <= self.count:
            raise ValueError(
                f"{self.path} holds {self.count:,} tokens: there is no range {start:,} to {stop:,}"
            )
        return self.map()[start:stop].copy()


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """Token files in the order in which they are read.

    Attributes:
        files: the files.
        vocab_size: number of different ids that the writer knew, where the data says it.
        tokenizer: the tokenizer's file, where one lies beside the data.
    """

    files: tuple[TokenFile, ...]
    vocab_size: int | None
    tokenizer: Path | None

    @property
    def count(self) -> int:
        """Number of tokens in all files."""
        return sum(file.count for file in self.files)

    def tokens(self, index: int) -> np.ndarray:
        """The ids of file `index`, mapped, [count] in the file's dtype; cheap to call again."""
        return self._map(index)

    @functools.cached_property
    def _map(self):
        return functools.lru_cache(MAX_MAPS)(lambda index: self.files[index].map())


def open_tokens(
    source: Path | Sequence[Path], split: Literal["train", "val"] | None = None
) -> TokenSet:
    """Opens token files; checks their sizes and headers, reads no ids.

    Args:
        source: a file, a folder, or several files. A folder is one of ours, or all its `.bin` and
            `.npy` files in the order of their names.
        split: "train" or "val": what of a folder is meant, if it holds both: the subfolder of that
            name, or the files whose names hold it.

    Raises:
        ValueError: a file is damaged or no token file, or it is not clear what a folder means.
        OSError: something cannot be read.
    """
    if not isinstance(source, Path | str):
        if not source:
            raise ValueError("no token files are named: name a file, a folder, or several files")
        files = tuple(_open_file(Path(path)) for path in source)
        return TokenSet(files=files, vocab_size=None, tokenizer=None)
    source = Path(source)
    if not source.is_dir():
        return TokenSet(files=(_open_file(source),), vocab_size=None, tokenizer=None)
    if split is not None and (source / split).is_dir():
        source = source / split
    if (source / META).is_file():
        return _open_ours(source)
    return _open_folder(source, split)


def _open_folder(folder: Path, split: str | None) -> TokenSet:
    """A folder that says nothing of itself."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".bin", ".npy"))
    of = {name: [path for path in paths if name in path.stem] for name in SPLITS}
    if split is not None and any(of.values()):
        paths = of[split]
    elif all(of.values()):
        raise ValueError(
            f"{folder} holds training and validation files ({of['train'][0].name}, "
            f"{of['val'][0].name}): name the files, not the folder"
        )
    if not paths:
        inside = [folder / name for name in SPLITS if (folder / name / META).is_file()]
        raise ValueError(
            f"{folder} holds {' and '.join(path.name for path in inside)}: name {inside[0]}"
            if inside and split is None
            else f"{folder} holds no .bin or .npy file{f' for {split}' if split else ''}: write "
            "some with `jaxslm data prepare`, or name another"
        )
    files = tuple(_open_file(path) for path in paths)
    return TokenSet(files=files, vocab_size=None, tokenizer=None)


def _tokenizer(folder: Path) -> Path | None:
    return next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)


def _open_file(path: Path) -> TokenFile:
    """One file of a kind that says itself what it is."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: write it with `jaxslm data prepare`, or name another"
        )
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name it alone, or its files")
    if path.suffix == ".npy":
        return _open_npy(path)
    if path.suffix != ".bin":
        raise ValueError(
            f"{path} is no token file: expected .bin (raw uint16, llm.c) or .npy; text becomes "
            "tokens with `jaxslm data prepare`"
        )
    if (path.parent / META).is_file():
        raise ValueError(f"{path} belongs to {path.parent / META}: name the folder {path.parent}")
    with path.open("rb") as file:
        header = file.read(LLMC_HEADER)
    size = path.stat().st_size
    magic = int.from_bytes(header[:4], "little")
    if size >= 4 and magic in (*LLMC, LLMC_EVALUATION):
        return _open_llmc(path, header, size)
    if size == 0:
        raise ValueError(f"{path} is empty: write it again")
    if size % 2:
        raise ValueError(
            f"{path} has {size:,} bytes, an odd number, which raw uint16 tokens cannot have: it is "
            "cut short, or of another kind; copy or write it again"
        )
    return TokenFile(path=path, dtype=DTYPES["uint16"], count=size // 2, offset=0)


def _open_llmc(path: Path, header: bytes, size: int) -> TokenFile:
    magic, version, count = np.frombuffer(header[:12].ljust(12, b"\0"), "<i4").tolist()
    if magic == LLMC_EVALUATION:
        raise ValueError(
            f"{path} holds llm.c's multiple-choice questions, not a text: name another"
        )
    expected, dtype = LLMC[magic]
    if version != expected:
        raise ValueError(
            f"{path} begins as an llm.c file of magic {magic}, but version {version} (expected "
            f"{expected}): write it again with llm.c's own scripts"
        )
    if size != LLMC_HEADER + count * dtype.itemsize:
        raise ValueError(
            f"{path} has {size:,} bytes, but its llm.c header says {count:,} {dtype.name} tokens, "
            f"which are {LLMC_HEADER + count * dtype.itemsize:,} bytes with it: it is cut short or "
            "damaged; copy or write it again"
        )
    return TokenFile(path=path, dtype=dtype, count=count, offset=LLMC_HEADER)


def _open_npy(path: Path) -> TokenFile:
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is no whole .npy file of numbers ({error}): write it again with numpy.save, "
            "as integers"
        ) from None
    if not isinstance(mapped, np.memmap) or mapped.ndim != 1 or mapped.dtype.kind not in "ui":
        raise ValueError(
            f"{path} holds {getattr(mapped, 'dtype', 'several arrays')} "
            f"{getattr(mapped, 'shape', '')}: tokens are integers along one axis; save them as "
            "uint16 or uint32"
        )
    end, size = mapped.offset + mapped.nbytes, path.stat().st_size
    if size != end:
        raise ValueError(f"{path} has {size:,} bytes, its header says {end:,}: write it again")
    return TokenFile(path=path, dtype=mapped.dtype, count=len(mapped), offset=mapped.offset)


def _open_ours(folder: Path) -> TokenSet:
    meta = _read_meta(folder / META)
    dtype = DTYPES[meta["dtype"]]
    files = []
    for shard in meta["shards"]:
        path = folder / shard["file"]
        if not path.is_file():
            raise ValueError(f"{path} is missing, {folder / META} lists it: copy the folder again")
        if path.stat().st_size != shard["count"] * dtype.itemsize:
            raise ValueError(
                f"{path} has {path.stat().st_size:,} bytes, {folder / META} says "
                f"{shard['count']:,} {dtype.name} tokens, which are "
                f"{shard['count'] * dtype.itemsize:,}: copy or prepare it again"
            )
        files.append(TokenFile(path=path, dtype=dtype, count=shard["count"], offset=0))
    tokenizer = _tokenizer(folder) or _tokenizer(folder.parent)
    if tokenizer and meta["tokenizer"]:
        digest = tokenizer_sha256(tokenizer)
        if digest != meta["tokenizer"]["sha256"]:
            raise ValueError(
                f"{tokenizer} is not the tokenizer of {folder / META} (SHA-256 {digest[:12]}.., "
                f"expected {meta['tokenizer']['sha256'][:12]}..): prepare the data again"
            )
    return TokenSet(files=tuple(files), vocab_size=meta["vocab_size"], tokenizer=tokenizer)


def _read_meta(path: Path) -> dict:
    """A meta.json of ours, every field checked."""

    def check(condition: bool, words: str) -> None:
        if not condition:
            raise ValueError(f"{path}: {words}; prepare the data again")

    try:
        meta = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): prepare the data again") from None
    check(isinstance(meta, dict) and meta.get("format") == FORMAT, f"format is not {FORMAT!r}")
    check(
        _is_count(meta.get("format_version")) and meta["format_version"] == FORMAT_VERSION,
        f"format_version is {meta.get('format_version')!r}, expected {FORMAT_VERSION}",
    )
    expected = {"format", "format_version", "dtype", "vocab_size", "tokenizer", "shards"}
    check(meta.keys() == expected, f"fields {', '.join(sorted(meta.keys() ^ expected))} amiss")
    check(
        isinstance(meta["dtype"], str) and meta["dtype"] in DTYPES,
        f"dtype is {meta['dtype']!r}, expected {' or '.join(DTYPES)}",
    )
    largest = np.iinfo(DTYPES[meta["dtype"]]).max + 1
    check(
        _is_count(meta["vocab_size"]) and 1 <= meta["vocab_size"] <= largest,
        f"vocab_size is {meta['vocab_size']!r}, expected 1 to {largest:,}",
    )
    tokenizer = meta["tokenizer"]
    check(
        tokenizer is None
        or (
            isinstance(tokenizer, dict)
            and tokenizer.keys() == {"kind", "sha256"}
            and all(isinstance(value, str) for value in tokenizer.values())
        ),
        f"tokenizer is {tokenizer!r}, expected its kind and sha256",
    )
    check(isinstance(meta["shards"], list) and bool(meta["shards"]), "shards lists no file")
    for shard in meta["shards"]:
        check(
            isinstance(shard, dict)
            and shard.keys() == {"file", "count"}
            and isinstance(shard["file"], str)
            and Path(shard["file"]).match("tokens-*.bin")
            and Path(shard["file"]).name == shard["file"]
            and _is_count(shard["count"]),
            f"a shard is {shard!r}, expected a file tokens-*.bin and its count",
        )
    return meta


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


class TokenWriter:
    """Writes ids as shards of equal size into a folder, which `finish` completes with meta.json.

    A folder without it is not one of ours: write inside `jaxslm.files.atomic_output`.

    Args:
        folder: created.
        vocab_size: number of different ids; up to 65,536 are stored as uint16, more as uint32.
        tokenizer: kind and sha256 of what made the ids.
        shard_tokens: ids a file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        tokenizer: Mapping[str, str] | None = None,
        shard_tokens: int = 10**8,
    ):
        if not 1 <= vocab_size <= 2**31:
            raise ValueError(f"vocab_size is {vocab_size}, expected 1 to {2**31:,}")
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens is {shard_tokens}, expected 1 or more")
        folder.mkdir()
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        self._counts: list[int] = []
        self._file: BinaryIO | None = None

    @property
    def count(self) -> int:
        """Tokens written so far."""
        return sum(self._counts)

    def write(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends ids.

        Raises:
            ValueError: one of them is no id of the vocabulary; nothing of `ids` is written.
        """
        ids = np.asarray(ids)
        if ids.size == 0:
            return
        if ids.ndim != 1 or ids.dtype.kind not in "ui":
            raise ValueError(f"ids are {ids.dtype} {ids.shape}, expected integers along one axis")
        bad = (ids < 0) | (ids >= self._vocab_size)
        if bad.any():
            first = int(np.argmax(bad))
            raise ValueError(
                f"token {self.count + first:,} is {ids[first]}, which is no id of a vocabulary of "
                f"{self._vocab_size:,}"
            )
        stored = ids.astype(DTYPES[self._dtype])
        while stored.size:
            file = self._open_file()
            part = stored[: self._shard_tokens - self._counts[-1]]
            file.write(part.data)
            self._counts[-1] += part.size
            stored = stored[part.size :]

    def finish(self) -> None:
        """Completes the folder.

        Raises:
            ValueError: nothing was written.
        """
        self.close()
        if not self._counts:
            raise ValueError(f"{self._folder.name}: there are no tokens to write")
        meta = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dtype": self._dtype,
            "vocab_size": self._vocab_size,
            "tokenizer": dict(self._tokenizer) if self._tokenizer else None,
            "shards": [
                {"file": _shard_name(index), "count": count}
                for index, count in enumerate(self._counts)
            ],
        }
        (self._folder / META).write_text(json.dumps(meta, indent=1) + "\n", "utf-8")

    def close(self) -> None:
        """Closes the open file; `finish` does it too."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_file(self) -> BinaryIO:
        """The file that has room."""
        if self._file is None or self._counts[-1] == self._shard_tokens:
            self.close()
            self._file = (self._folder / _shard_name(len(self._counts))).open("xb")
            self._counts.append(0)
        return self._file


def _shard_name(index: int) -> str:
    return f"tokens-{index:05}.bin"
