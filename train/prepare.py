"""From texts to token files: `prepare` makes the folder that `train.tokens` reads.

The texts are streamed, never held whole: once to measure them, once more where the tokenizer is
made from them, once to write. What is validation is decided in between:
- of several documents, whole ones, chosen by a hash of their text, so that equal documents are on
  the same side;
- of a single one, its last part.
"""

import codecs
import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from jaxslm.files import atomic_output, check_destination
from jaxslm.tokenizer import (
    FILE,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_sha256,
)
from train.tokens import OWNS as SHARDS
from train.tokens import SPLITS, TokenWriter

STDLIB = "python-stdlib"
PART = 2**20  # characters; a longer text file is tokenised in parts of about this
BATCH = 2**22  # characters tokenised side by side
OWNS = (FILE, *(f"{split}/{pattern}" for split in SPLITS for pattern in SHARDS))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` wrote.

    Attributes:
        out: the folder.
        tokenizer: kind of tokenizer.
        vocab_size: its.
        characters: in all documents.
        documents: number in each split; a single document that was cut is in both.
        tokens: number in each split.
        skipped: what was passed over, and how often.
        changed: documents that the tokenizer does not give back as they were.
    """

    out: Path
    tokenizer: str
    vocab_size: int
    characters: int
    documents: dict[str, int]
    tokens: dict[str, int]
    skipped: dict[str, int]
    changed: int

    def __str__(self) -> str:
        lines = [
            f"{self.out}: {self.characters:,} characters, {self.tokenizer} tokenizer, vocabulary "
            f"of {self.vocab_size:,}"
        ]
        for split, count in self.tokens.items():
            lines.append(f"  {split}: {count:,} tokens, documents: {self.documents[split]:,}")
        if self.skipped:
            skipped = ", ".join(f"{what} {count:,}" for what, count in self.skipped.items())
            lines.append(f"  skipped: {skipped}")
        if self.changed:
            lines.append(
                f"  this tokenizer does not keep every character: {self.changed:,} documents do "
                "not decode to what was read"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Measure:
    """What is remembered of a document between the passes."""

    characters: int
    digest: bytes  # of the text


@dataclass(frozen=True)
class _Piece:
    """A part of a document that belongs to one split."""

    document: int
    name: str
    start: int  # characters of the document before it
    split: str
    text: str
    last: bool  # of its document


def prepare(
    inputs: Sequence[str],
    *,
    tokenizer: str,
    out: Path,
    val_fraction: float = 0.1,
    field: str = "text",
    special_tokens: bool = False,
    shard_tokens: int = 10**8,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Prepared:
    """Writes `out/train/`, `out/val/` and `out/tokenizer.json`: all of it or nothing.

    Every document ends with end-of-text, where the tokenizer has it.

    Args:
        inputs: text files, `.jsonl` files (a document a line), folders (a document a file), or
            "python-stdlib": the top-level modules of the running Python.
        tokenizer: "byte", "char" (the characters that occur), "bpe:2048" (trained on the inputs),
            or a file: tokenizer.json or meta.pkl.
        out: folder to create; its parent must exist.
        val_fraction: of the characters, for validation: 0 (no val/) to less than 1.
        field: that holds the text in a line of .jsonl.
        special_tokens: names of special tokens in the texts become their ids.
        shard_tokens: tokens a file.
        overwrite: replace an earlier output.
        progress: is told what goes on.

    Raises:
        ValueError: an argument is out of range; an input is empty, no text, or malformed (with its
            line); the tokenizer does not have a character.
        OSError: something cannot be read or written.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, expected 0 to less than 1")
    check_destination(out, overwrite=overwrite, owns=OWNS)
    make_tokenizer = _tokenizer_maker(tokenizer)
    skipped: Counter[str] = Counter()
    sources = [source for name in inputs for source in _sources(name, out, skipped)]
    progress("reading")
    measures = [_measure(name, parts) for name, parts in _documents(sources, field)]
    skipped["empty documents"] += sum(measure.characters == 0 for measure in measures)
    cuts = _cuts(measures, val_fraction)
    splits = SPLITS if val_fraction else SPLITS[:1]
    documents = {
        "train": sum(cut > 0 for cut in cuts),
        "val": sum(cut < measure.characters for cut, measure in zip(cuts, measures, strict=True)),
    }
    for split in splits:
        if not documents[split]:
            raise ValueError(
                f"{', '.join(inputs) or 'no input'}: there is no text for {split}; name files or "
                "folders that hold more text, or pass a val_fraction of 0"
            )
    progress("making the tokenizer")
    made = make_tokenizer(part for _, parts in _documents(sources, field) for part in parts)
    pieces = _pieces(_documents(sources, field), measures, cuts, progress)
    with atomic_output(out, overwrite=overwrite, owns=OWNS) as folder:
        folder.mkdir()
        sha256 = tokenizer_sha256(made.save(folder))
        tokens, changed = _write(folder, splits, pieces, made, sha256, special_tokens, shard_tokens)
    return Prepared(
        out=out,
        tokenizer=made.kind,
        vocab_size=made.vocab_size,
        characters=sum(measure.characters for measure in measures),
        documents={split: documents[split] for split in splits},
        tokens=tokens,
        skipped={what: count for what, count in skipped.items() if count},
        changed=changed,
    )


def _write(
    folder: Path,
    splits: Sequence[str],
    pieces: Iterable[_Piece],
    tokenizer: Tokenizer,
    sha256: str,
    special: bool,
    shard_tokens: int,
) -> tuple[dict[str, int], int]:
    """Writes each split; tokens in each, and documents that do not decode to what they were."""
    writers = {
        split: TokenWriter(
            folder / split,
            vocab_size=tokenizer.vocab_size,
            tokenizer={"kind": tokenizer.kind, "sha256": sha256},
            shard_tokens=shard_tokens,
        )
        for split in splits
    }
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    changed: set[int] = set()
    try:
        for piece, ids in _encoded(pieces, tokenizer, special):
            if tokenizer.decode(ids) != piece.text:
                changed.add(piece.document)
            writers[piece.split].write(ids)
            if piece.last:
                writers[piece.split].write(end)
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.close()
    return {split: writer.count for split, writer in writers.items()}, len(changed)


def _encoded(
    pieces: Iterable[_Piece], tokenizer: Tokenizer, special: bool
) -> Iterator[tuple[_Piece, np.ndarray]]:
    """Each piece with its ids, a batch of pieces at a time."""

    def encode(batch: list[_Piece]) -> list[np.ndarray]:
        try:
            return tokenizer.encode_batch([piece.text for piece in batch], special=special)
        except ValueError as error:
            if len(batch) == 1:
                piece = batch[0]
                place = (
                    f", in what follows its first {piece.start:,} characters" if piece.start else ""
                )
                raise ValueError(f"{piece.name}{place}: {error}") from None
            return [encode([piece])[0] for piece in batch]  # says which

    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH:
            yield from zip(batch, encode(batch), strict=True)
            batch, characters = [], 0
    yield from zip(batch, encode(batch), strict=True)


def _pieces(
    documents: Iterable[tuple[str, Iterator[str]]],
    measures: Sequence[_Measure],
    cuts: Sequence[int],
    progress: Callable[[str], None],
) -> Iterator[_Piece]:
    """Documents in pieces that belong to one split each: to train up to the cut, to val after."""
    total = sum(measure.characters for measure in measures)
    done = 0
    for document, ((name, parts), measure, cut) in enumerate(
        zip(documents, measures, cuts, strict=True)
    ):
        position = 0
        for text in parts:
            here = max(cut - position, 0)
            for split, piece in (("train", text[:here]), ("val", text[here:])):
                if piece:
                    start, position = position, position + len(piece)
                    last = position == measure.characters
                    yield _Piece(document, name, start, split, piece, last)
        if position != measure.characters:
            raise ValueError(f"{name} changed while it was being read: prepare it again")
        done += position
        progress(f"writing: {done / total:.0%}")


def _cuts(measures: Sequence[_Measure], val_fraction: float) -> list[int]:
    """The characters of each document that go to train; the rest go to val."""
    full = [measure.characters for measure in measures]
    if val_fraction == 0:
        return full
    if sum(size > 0 for size in full) == 1:
        return [int(size * (1 - val_fraction)) for size in full]
    groups: Counter[bytes] = Counter()  # characters of equal documents
    for measure in measures:
        if measure.characters:
            groups[measure.digest] += measure.characters
    room = val_fraction * sum(full)
    chosen = set()
    for digest in sorted(groups):
        if groups[digest] <= room:
            chosen.add(digest)
            room -= groups[digest]
    if not chosen and len(groups) > 1:
        chosen = {min(groups, key=lambda digest: (groups[digest], digest))}
    return [0 if measure.digest in chosen else measure.characters for measure in measures]


def _measure(name: str, parts: Iterable[str]) -> _Measure:
    characters, digest = 0, hashlib.blake2b(digest_size=16)
    for text in parts:
        try:
            digest.update(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}: character {characters + error.start:,} is half of a surrogate pair, "
                "which is no text: remove it"
            ) from None
        characters += len(text)
    return _Measure(characters, digest.digest())


def _documents(
    sources: Iterable[tuple[Path, bool]], field: str
) -> Iterator[tuple[str, Iterator[str]]]:
    """Every document's name and text; the text comes in parts."""
    for path, is_jsonl in sources:
        if is_jsonl:
            yield from _json_lines(path, field)
        else:
            yield str(path), _parts(path)


def _parts(path: Path) -> Iterator[str]:
    """A text file's characters, all of them, line ends as they are."""
    waiting = ""
    with path.open(encoding="utf-8", newline="") as file:
        while block := file.read(PART):
            waiting += block
            if len(waiting) > PART:
                cut = _boundary(waiting) or (PART if len(waiting) > 4 * PART else 0)
                if cut:
                    yield waiting[:cut]
                    waiting = waiting[cut:]
    if waiting:
        yield waiting


def _boundary(text: str) -> int:
    """The last place between a letter or digit and a line end, where no BPE in use joins; or 0."""
    at = text.rfind("\n")
    while at > 0 and not text[at - 1].isalnum():
        at = text.rfind("\n", 0, at)
    return max(at, 0)


def _json_lines(path: Path, field: str) -> Iterator[tuple[str, Iterator[str]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            name = f"{path}, line {number:,}"
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name} is no JSON in UTF-8: {error}") from None
            if not isinstance(value, dict) or not isinstance(value.get(field), str):
                fields = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise ValueError(
                    f"{name} has no text in the field {field!r} (it holds: {fields}): name the "
                    "field that has it"
                )
            yield name, iter([value[field]])


def _sources(name: str, out: Path, skipped: Counter[str]) -> Iterator[tuple[Path, bool]]:
    """The files that an input means, and whether each is .jsonl."""
    path = Path(name)
    if name == STDLIB:
        for module in _standard_library():
            yield module, False
    elif path.is_dir():
        for file in _tree(path, out, skipped):
            yield file, False
    elif path.suffix == ".jsonl":
        yield path, True
    else:
        flaw = _flaw(path)
        if flaw:
            raise ValueError(f"{path} is no text in UTF-8 ({flaw}): convert it, or leave it out")
        yield path, False


def _tree(folder: Path, out: Path, skipped: Counter[str]) -> Iterator[Path]:
    """The text files of a folder in the order of their names; not what is hidden or a link."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            skipped["hidden"] += 1
        elif path.is_symlink():
            skipped["links"] += 1
        elif path.is_dir():
            if not (out.exists() and path.samefile(out)):
                yield from _tree(path, out, skipped)
        elif path.is_file():
            flaw = _flaw(path)
            if flaw:
                skipped[flaw] += 1
            else:
                yield path


def _flaw(path: Path) -> str | None:
    """Why a file is no text, if it is none."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        for block in chain(iter(lambda: file.read(2**20), b""), [b""]):
            if b"\0" in block:
                return "binary"
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError:
                return "not UTF-8"
    return None


def _standard_library() -> list[Path]:
    """The top-level modules of the running Python, without what its build left there."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [
        path
        for path in sorted(folder.glob("*.py"))
        if not path.name.startswith("_sysconfigdata") and not path.is_symlink() and not _flaw(path)
    ]
    if not modules:
        raise ValueError(f"{STDLIB}: this Python has no sources in {folder}: name text of your own")
    return modules


def _tokenizer_maker(name: str) -> Callable[[Iterable[str]], Tokenizer]:
    """What makes the tokenizer of that name from texts, which some do not look at."""
    if name == "byte":
        return lambda texts: ByteTokenizer()
    if name == "char":
        return CharTokenizer.of
    size = name.removeprefix("bpe:")
    if size != name and size.isascii() and size.isdecimal():
        return lambda texts: BPETokenizer.train(texts, int(size))
    if not Path(name).exists():
        raise ValueError(
            f"tokenizer is {name!r}, expected byte, char, bpe:2048 (or another size), or a file: "
            "tokenizer.json or meta.pkl"
        )
    loaded = load_tokenizer(Path(name))
    return lambda texts: loaded
