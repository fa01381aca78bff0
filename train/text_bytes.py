"""How many bytes of text tokens stand for: what bits per byte are counted by."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxslm.tokenizer import Tokenizer, load_tokenizer

UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class TextBytes:
    """The bytes of UTF-8 that ids stand for; special tokens, end-of-text among them, have none.

    Attributes:
        tokenizer: the file that says it, where there is one.
        of_id_V: bytes of each id of the model, int64 [V], UNKNOWN where the tokenizer has no such
            id; None where it cannot be told.
        missing: why it cannot.
    """

    tokenizer: Path | None
    of_id_V: np.ndarray | None
    missing: str | None = None

    def of(self, ids: np.ndarray) -> int:
        """Bytes that ids stand for in all; 0 where it cannot be told.

        Raises:
            ValueError: the tokenizer has no such id.
        """
        if self.of_id_V is None:
            return 0
        bytes_of = self.of_id_V[ids]
        if (bytes_of == UNKNOWN).any():
            raise ValueError(
                f"the data holds id {ids[bytes_of == UNKNOWN][0]}, which {self.tokenizer} does not "
                "have: name the tokenizer that the data was made with"
            )
        return int(bytes_of.sum())


def read_text_bytes(tokenizers: Sequence[Path], vocab_size: int) -> TextBytes:
    """Reads what ids stand for.

    Args:
        tokenizers: files of the model's tokenizer, which must all say the same.
        vocab_size: the model's.

    Raises:
        ValueError: two of them differ, one is damaged, or they have more ids than the model.
        OSError: one cannot be read.
    """
    if not tokenizers:
        return TextBytes(
            tokenizer=None, of_id_V=None,
            missing="no tokenizer lies in the model folder or beside the data (name one by "
            "--tokenizer)",
        )  # fmt: skip
    first = tokenizers[0]
    tokenizer = load_tokenizer(first)
    content = _content(tokenizer)
    for other in tokenizers[1:]:
        if _content(load_tokenizer(other)) != content:
            raise ValueError(
                f"{other} is another tokenizer than {first}, so the ids of the data mean something "
                "else to the model: prepare the data with the model's tokenizer"
            )
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{first} has {tokenizer.vocab_size:,} ids, the model's vocab_size is {vocab_size:,}: "
            "name the tokenizer of the model"
        )
    lengths = _lengths(tokenizer, content)
    if lengths is None:
        return TextBytes(
            tokenizer=first, of_id_V=None,
            missing=f"{first} is not byte-level: it does not say what bytes its tokens stand for",
        )  # fmt: skip
    of_id_V = np.full(vocab_size, UNKNOWN, np.int64)
    of_id_V[list(lengths)] = list(lengths.values())
    return TextBytes(tokenizer=first, of_id_V=of_id_V)


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    """What its saved file says, however it is laid out."""
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(tokenizer.save(Path(folder)).read_text("utf-8"))


def _lengths(tokenizer: Tokenizer, content: dict[str, Any]) -> dict[int, int] | None:
    """Bytes by id."""
    if tokenizer.kind == "byte":
        found = dict.fromkeys(range(256), 1)
    elif tokenizer.kind == "char":
        found = {id_: len(c.encode("utf-8")) for id_, c in enumerate(content["characters"])}
    else:
        decoder, model = content.get("decoder") or {}, content["model"]
        kinds = {part.get("type") for part in decoder.get("decoders", [decoder])}
        # Early files, GPT-2's among them, do not say the model's type; BPE alone has merges.
        is_bpe = model.get("type", "BPE") == "BPE" and "merges" in model
        if kinds != {"ByteLevel"} or not is_bpe or not isinstance(model["vocab"], dict):
            return None
        # A byte-level token is written with one character for each of its bytes.
        found = {id_: len(token) for token, id_ in model["vocab"].items()}
        for added in content.get("added_tokens", ()):
            text = "" if added["special"] else added["content"]
            found[added["id"]] = len(text.encode("utf-8"))
    if tokenizer.end_of_text is not None:
        found[tokenizer.end_of_text] = 0
    return found
