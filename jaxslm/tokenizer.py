"""Text to token ids and back: bytes, characters, or byte-level BPE.

Every tokenizer is saved as one `tokenizer.json`: BPE in Hugging Face's format, as it came, the
others as `{"format": "jaxslm-tokenizer", "format_version": 1, "kind": "byte" | "char", ...}`.

What looks like a special token in a text is text: `<|endoftext|>` becomes the end-of-text id only
if `encode` is told `special=True`, or else a page about language models could end a document. Ids
decode to what they stand for, special tokens to their names.
"""

import hashlib
import io
import json
import pickle
import pickletools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

FILE = "tokenizer.json"
FORMAT = "jaxslm-tokenizer"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")  # the names in use elsewhere
MAX_PICKLE = 4 * 2**20  # bytes; RippleGPT's has under 1,000


class Tokenizer(Protocol):
    """What every tokenizer can do."""

    kind: ClassVar[str]

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document, where there is one."""
        ...

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Ids, int32 [n]; with `special`, the names of special tokens become their ids.

        Raises:
            ValueError: the text holds what the vocabulary does not.
        """
        ...

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
        """`encode` of each text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; bytes that are no whole character become U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary, or the tokenizer cannot decode it.
        """
        ...

    def save(self, folder: Path) -> Path:
        """Writes `tokenizer.json` into a folder that has none; its path."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, then end-of-text as id 256."""

    kind: ClassVar[str] = "byte"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """See Tokenizer."""
        if not special:
            return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)
        end = np.array([self.end_of_text], np.int32)
        parts = [self.encode(part) for part in text.split(END_OF_TEXT)]
        return np.concatenate([array for part in parts for array in (end, part)][1:])

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
        """See Tokenizer."""
        return [self.encode(text, special=special) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See Tokenizer."""
        ids = _checked(ids, self.vocab_size)
        parts = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        raw = [part[part < 256].astype(np.uint8).tobytes() for part in parts]
        return END_OF_TEXT.encode().join(raw).decode("utf-8", "replace")

    def save(self, folder: Path) -> Path:
        """See Tokenizer."""
        return _save(folder, _our_json({"kind": self.kind}))


class CharTokenizer:
    """One id a character; no end-of-text.

    Args:
        characters: character i has id i.

    Raises:
        ValueError: there is none, or one occurs twice.
    """

    kind: ClassVar[str] = "char"
    end_of_text = None

    def __init__(self, characters: str):
        codes = _codes(characters)
        if codes.size == 0 or np.unique(codes).size != codes.size:
            raise ValueError(
                f"a vocabulary of {codes.size} characters is empty or holds one twice: name each "
                "character once"
            )
        _utf8(characters)
        self._characters = characters
        self._codes = codes
        self._ids = np.argsort(codes).astype(np.int32)
        self._sorted = codes[self._ids]

    @classmethod
    def of(cls, texts: Iterable[str]) -> "CharTokenizer":
        """The characters that occur in texts, in the order of their code points."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls("".join(sorted(found)))

    @property
    def vocab_size(self) -> int:
        """See Tokenizer."""
        return self._codes.size

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """See Tokenizer; there are no special tokens."""
        codes = _codes(text)
        place = np.searchsorted(self._sorted, codes).clip(max=self.vocab_size - 1)
        unknown = np.flatnonzero(self._sorted[place] != codes)
        if unknown.size:
            at = int(unknown[0])
            line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
            raise ValueError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}) at line {line}, column {column} "
                f"is not among the {self.vocab_size} of the vocabulary: use a tokenizer that has "
                "it, or `byte`, which has all"
            )
        return self._ids[place]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
        """See Tokenizer."""
        return [self.encode(text, special=special) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See Tokenizer."""
        return self._codes[_checked(ids, self.vocab_size)].tobytes().decode("utf-32-le")

    def save(self, folder: Path) -> Path:
        """See Tokenizer."""
        return _save(folder, _our_json({"kind": self.kind, "characters": self._characters}))


class BPETokenizer:
    """A tokenizer in Hugging Face's format, run by their `tokenizers`.

    Padding and truncation, which the file may ask for, are off: every token is kept.

    Args:
        contents: of its tokenizer.json.

    Raises:
        ValueError: `tokenizers` cannot read it.
    """

    kind: ClassVar[str] = "bpe"

    def __init__(self, contents: str):
        self._contents = contents
        self._with_special = self._build()
        self._plain = self._build()
        self._plain.encode_special_tokens = True  # "encode": as any other text
        self.vocab_size = max(self._plain.get_vocab().values(), default=-1) + 1
        ids = (self._plain.token_to_id(name) for name in ENDS)
        self.end_of_text = next((id_ for id_ in ids if id_ is not None), None)

    def _build(self):
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_str(self._contents)
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(
                f"`tokenizers` cannot read it ({error}): save it again with its own `save`"
            ) from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Byte-level BPE: the special tokens, the 256 bytes, then merges; the same every time.

        Args:
            texts: to learn from.
            vocab_size: ids in all; fewer where the texts have nothing left to merge.

        Raises:
            ValueError: it is too small for special tokens and bytes.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        least = len(SPECIAL_TOKENS) + 256
        if vocab_size < least:
            raise ValueError(
                f"a BPE vocabulary of {vocab_size} is too small: {len(SPECIAL_TOKENS)} special "
                f"tokens and 256 bytes take {least}"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str(pretty=True))

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """See Tokenizer."""
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
        """See Tokenizer; runs on all cores."""
        for text in texts:
            _utf8(text)
        tokenizer = self._with_special if special else self._plain
        try:
            encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(
                f"the tokenizer cannot encode the text ({error}): it has no id for something in "
                "it; add an unknown token to its vocabulary, or use a tokenizer that has every byte"
            ) from None
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See Tokenizer."""
        checked = _checked(ids, self.vocab_size)
        try:
            return self._plain.decode(checked.tolist(), skip_special_tokens=False)
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(
                f"the tokenizer cannot decode the ids ({error}): use the tokenizer that they were "
                "made with, or mend the decoder in its tokenizer.json"
            ) from None

    def save(self, folder: Path) -> Path:
        """See Tokenizer."""
        return _save(folder, self._contents)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json, a meta.pkl of nanoGPT or RippleGPT, or the one in a folder.

    Raises:
        ValueError: it is no tokenizer, or a damaged one.
        OSError: it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in (FILE, "meta.pkl") if (path / name).is_file()]
        if not found:
            raise ValueError(f"{path} holds no {FILE} and no meta.pkl: name the tokenizer's file")
        path = found[0]
    try:
        if path.suffix == ".pkl":
            return CharTokenizer(_read_meta_pickle(path))
        contents = path.read_text("utf-8")
        value = json.loads(contents)
        if not isinstance(value, dict):
            raise ValueError("expected a JSON object")
        if value.get("format") == FORMAT:
            return _read_ours(value)
        if "model" not in value:
            raise ValueError(f"expected format {FORMAT!r}, or Hugging Face's with a `model`")
        return BPETokenizer(contents)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no tokenizer that can be read: {error}") from None


def tokenizer_sha256(path: Path) -> str:
    """What a tokenizer is known by: the SHA-256 of its saved file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_ours(value: dict) -> Tokenizer:
    fields = {"byte": set(), "char": {"characters"}}.get(value.get("kind", ""))
    version = value.get("format_version")
    if fields is None or version != 1:
        raise ValueError(
            f"kind is {value.get('kind')!r}, format_version {version!r}; expected byte or char, 1"
        )
    expected = {"format", "format_version", "kind"} | fields
    if value.keys() != expected:
        raise ValueError(f"fields {', '.join(sorted(value.keys() ^ expected))} amiss")
    if value["kind"] == "byte":
        return ByteTokenizer()
    if not isinstance(value["characters"], str):
        raise ValueError("characters is no string")
    return CharTokenizer(value["characters"])


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, strings and dicts; a pickle that names a function or class is refused."""

    def find_class(self, module: str, name: str):
        raise ValueError(f"it asks for {module}.{name}, which a vocabulary does not need")


# Instructions that make dicts of strings and integers. Others, and PUT, allocate whatever size a
# hostile file names, so they are looked at before `pickle` runs any.
_PLAIN = (
    *("PROTO", "FRAME", "STOP", "MARK", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "INT", "BININT", "BININT1", "BININT2", "LONG1"),
)


def _read_meta_pickle(path: Path) -> str:
    """The characters of {"vocab_size": n, "stoi": {character: id}, "itos": {id: character}}."""
    with path.open("rb") as file:
        data = file.read(MAX_PICKLE + 1)
    if len(data) > MAX_PICKLE:
        raise ValueError(f"it has over {MAX_PICKLE:,} bytes, no vocabulary of characters does")
    try:
        for instruction, argument, _ in pickletools.genops(data):
            if instruction.name not in _PLAIN:
                raise ValueError(f"it has a {instruction.name}, which a vocabulary does not need")
            if "PUT" in instruction.name and not 0 <= int(argument or 0) <= len(data):
                raise ValueError("it is damaged: it asks for more room than it could fill")
        meta = _PlainUnpickler(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:  # pickle raises whatever a damaged file leads it into
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(meta, dict) or not {"vocab_size", "stoi", "itos"} <= meta.keys():
        raise ValueError("expected a dict of vocab_size, stoi and itos")
    stoi, itos, size = meta["stoi"], meta["itos"], meta["vocab_size"]
    if (
        type(size) is not int
        or not isinstance(stoi, dict)
        or not isinstance(itos, dict)
        or not all(isinstance(key, str) and len(key) == 1 for key in stoi)
        or not all(type(key) is int and isinstance(itos[key], str) for key in itos)
        or sorted(itos) != list(range(size))
        or stoi != {character: id_ for id_, character in itos.items()}
    ):
        raise ValueError(
            "expected itos to name one character for each id from 0 to vocab_size - 1, and stoi to "
            "be its inverse"
        )
    return "".join(itos[id_] for id_ in range(size))


def _our_json(value: dict) -> str:
    return json.dumps({"format": FORMAT, "format_version": 1, **value}, indent=1) + "\n"


def _save(folder: Path, contents: str) -> Path:
    path = folder / FILE
    with path.open("xb") as file:
        file.write(contents.encode("utf-8"))
    return path


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start:,} is U+{ord(text[error.start]):04X}, half of a surrogate "
            "pair, which is no text: remove it"
        ) from None


def _codes(text: str) -> np.ndarray:
    """Code points, uint32 [n]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _checked(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Ids as an array, int64 [n], every one in the vocabulary."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(f"ids are {array.dtype} {array.shape}, expected integers along one axis")
    bad = (array < 0) | (array >= vocab_size)
    if bad.any():
        at = int(np.argmax(bad))
        raise ValueError(f"id {array[at]} at {at} is not in the vocabulary of {vocab_size:,}")
    return array.astype(np.int64)
