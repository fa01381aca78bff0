"""What the host keeps of each row of a generation: its tokens, where it ends, its text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxslm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Row:
    """What became of one prompt.

    Attributes:
        prompt_tokens: number of tokens in the prompt.
        new_tokens: number of tokens made, the end-of-text token included.
        finish: "length", as many as were asked for; "end_of_text"; "stop", a stop string; or
            "context", the model takes no more.
        text: the new text up to the end of its stop string; None without a tokenizer.
    """

    prompt_tokens: int
    new_tokens: int
    finish: str
    text: str | None


@dataclass(frozen=True)
class Stats:
    """How a generation went.

    Attributes:
        rows: one a prompt.
        first_seconds: until the first token of every row was there, compiling included.
        seconds: in all.
    """

    rows: tuple[Row, ...]
    first_seconds: float
    seconds: float

    @property
    def new_tokens(self) -> int:
        """Tokens made, of all rows."""
        return sum(row.new_tokens for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second after each row's first; NaN where there are none."""
        later = sum(max(row.new_tokens - 1, 0) for row in self.rows)
        seconds = self.seconds - self.first_seconds
        return later / seconds if later and seconds > 0 else float("nan")


class SequenceState:
    """One row while it grows.

    Args:
        name: what errors call the prompt.
        number: of the row.
        prompt: int32 [n].
        limit: new tokens at most.
        asked: new tokens that were asked for, which the model's context may not allow.
        end: the end-of-text id, if there is one.
        tokenizer: for texts, and needed for stop strings.
        stop: strings that end the row.

    Attributes:
        new: the new tokens.
        finish: see `Row`; None while there is more to come.
    """

    def __init__(
        self, name: str, number: int, prompt: np.ndarray, limit: int, asked: int, end: int | None,
        tokenizer: Tokenizer | None, stop: Sequence[str],
    ):  # fmt: skip
        self.name, self.number, self.prompt, self.limit = name, number, prompt, limit
        self.stop = tuple(stop)
        self._asked, self._end, self._tokenizer = asked, end, tokenizer
        self._before = "" if tokenizer is None else _decode_known(tokenizer, prompt.tolist())
        self.new: list[int] = []
        self.finish: str | None = None
        self._text: str | None = None
        self._streamed = ""
        self._settle()

    @property
    def ended(self) -> bool:
        """Whether there is no more to come."""
        return self.finish is not None

    def take(self, tokens: list[int]) -> list[int]:
        """Adds new tokens, up to the end of the row; those that were added."""
        before = len(self.new)
        if self.ended:
            return []
        self.new += tokens
        if self.stop and tokens:
            self._look_for_stop(before)
        if not self.ended:
            self._settle()
        return self.new[before:]

    def stream(self) -> str | None:
        """Text that is new and certain: no half of a character, no part of a stop string yet."""
        if self._tokenizer is None:
            return None
        text = self._decode(len(self.new)) if self._text is None else self._text
        if not self.ended:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
            text = text[: len(text) - max((_overlap(text, stop) for stop in self.stop), default=0)]
        if self._streamed.startswith(text):
            return ""
        same = (a == b for a, b in zip(text, self._streamed, strict=False))
        common = (
            len(self._streamed) if text.startswith(self._streamed) else [*same, False].index(False)
        )
        self._streamed = text
        return text[common:]

    def result(self) -> Row:
        """What became of the row."""
        text = self._text
        if text is None and self._tokenizer is not None:
            text = self._decode(len(self.new))
        return Row(len(self.prompt), len(self.new), self.finish or "length", text)

    def _settle(self) -> None:
        if self.new and self.new[-1] == self._end:
            self.finish = "end_of_text"
        elif len(self.new) >= self.limit:
            self.finish = "length" if self.limit == self._asked else "context"

    def _look_for_stop(self, before: int) -> None:
        """Ends the row at the first token that completes a stop string."""
        if not any(stop in self._decode(len(self.new)) for stop in self.stop):
            return
        for count in range(before + 1, len(self.new) + 1):
            text = self._decode(count)
            ends = [text.find(stop) + len(stop) for stop in self.stop if stop in text]
            if ends:
                self.new, self.finish, self._text = self.new[:count], "stop", text[: min(ends)]
                return

    def _decode(self, count: int) -> str:
        """The text of the first new tokens, in the light of the prompt."""
        whole = _decode_known(self._tokenizer, self.prompt.tolist() + self.new[:count])
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        return _decode_known(self._tokenizer, self.new[:count])


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop string may begin with."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)


def _decode_known(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids; one that only the model has, whose table may be padded, becomes U+FFFD."""
    parts, known = [], []
    for id_ in [*ids, None]:
        if id_ is not None and id_ < tokenizer.vocab_size:
            known.append(id_)
            continue
        parts.append(tokenizer.decode(known))
        known = []
    return "\N{REPLACEMENT CHARACTER}".join(parts)
