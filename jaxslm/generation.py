"""Generation: prompts in, tokens out, by a key-value cache and a loop that runs on the device.

Programs are compiled for sizes, not for prompts: a prompt is padded to the next of a few lengths,
the cache starts small and doubles when it is full, and a decoding program makes up to SEGMENT
tokens for any temperature, any number of tokens, any lengths of the rows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np

from jaxslm.cache import ring_slots
from jaxslm.decoding import (
    SEGMENT,
    Rules,
    State,
    decode,
    grow_state,
    mesh_of,
    most_slots,
    prefill,
    prepared,
)
from jaxslm.models import Model, RippleConfig
from jaxslm.prompts import Prompt, check_count, check_end, check_stop, encode, row_keys
from jaxslm.rows import SequenceState, Stats
from jaxslm.sampling import Filters, Sampling
from jaxslm.tokenizer import Tokenizer

STOP_SEGMENT = 16  # tokens between looks of the host where it looks for a stop string
LEAST_SLOTS = 256
PROMPT_LENGTHS = (32, 128, 512)  # then doubling
OnTokens = Callable[[int, list[int], str | None], None]


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (it is frozen)
    key: jax.Array | None = None,
    tokenizer: Tokenizer | None = None,
    end_of_text: int | Literal["tokenizer"] | None = "tokenizer",
    stop: Sequence[str] = (),
    on_tokens: OnTokens | None = None,
) -> tuple[list[np.ndarray], Stats]:
    """Continues prompts; see `Generator` to do so more than once with one model.

    A row does not depend on the others: it is what its prompt gives alone, up to the rounding of
    the logits.

    Args:
        model: on one device, or on a mesh (`jaxslm.load(path, mesh=...)`).
        prompts: of any lengths: token ids, or texts, which need the tokenizer. An empty text is the
            tokenizer's end-of-text token, after which documents begin.
        max_new_tokens: for each row; 0 returns the prompts.
        sampling: how tokens are chosen.
        key: PRNG key; row i draws from `fold_in(key, i)`. Or one key a row, that it draws from.
            Needed unless the temperature is 0.
        tokenizer: for texts and stop strings.
        end_of_text: id after which a row ends; "tokenizer" for the tokenizer's, if there is one;
            None to go on.
        stop: strings, each of which ends a row where its new text holds it.
        on_tokens: called with a row's number, its new tokens and, where there is a tokenizer, the
            text that they make certain, as they are made; the device then waits for the host at
            each token.

    Returns:
        The tokens of each row, prompt included, int32; and what there is to tell of them.

    Raises:
        ValueError: a prompt is empty, longer than the model's context or holds what is no token; an
            argument is out of range; the logits are not finite, which names row and step.
    """
    return Generator(model)(
        prompts, max_new_tokens=max_new_tokens, sampling=sampling, key=key, tokenizer=tokenizer,
        end_of_text=end_of_text, stop=stop, on_tokens=on_tokens,
    )  # fmt: skip


class Generator:
    """A model made ready for generation.

    Args:
        model: on one device, or on a mesh. It may be dropped: the generator has its own copy.
    """

    def __init__(self, model: Model):
        self.config = model.config
        ready = prepared(model)
        self._leaves, self._structure = jax.tree.flatten(ready)
        self._compute = ready.config.dtype

    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 (it is frozen)
        key: jax.Array | None = None,
        tokenizer: Tokenizer | None = None,
        end_of_text: int | Literal["tokenizer"] | None = "tokenizer",
        stop: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
        names: Sequence[str] | None = None,
    ) -> tuple[list[np.ndarray], Stats]:
        """See `jaxslm.generate`; `names` are what errors call the prompts."""
        start = time.perf_counter()
        names = [f"prompt {n}" for n in range(len(prompts))] if names is None else names
        rows = self.encode(prompts, tokenizer, names)
        check_count(max_new_tokens)
        stop = check_stop(stop)
        if stop and tokenizer is None:
            raise ValueError("stop strings need the tokenizer: pass tokenizer=")
        if not rows:
            return [], Stats((), 0.0, 0.0)
        end = check_end(end_of_text, self.config, tokenizer)
        keys_B = row_keys(key, len(rows), needed=max_new_tokens > 0 and not sampling.greedy)
        sequences = [
            SequenceState(
                names[number],
                number,
                row,
                self._limit(row, max_new_tokens),
                max_new_tokens,
                end,
                tokenizer,
                stop,
            )
            for number, row in enumerate(rows)
        ]
        first = start
        if any(sequence.limit for sequence in sequences):
            rules = Rules(
                Filters.of(sampling, self.config.vocab_size), keys_B,
                np.array([sequence.limit for sequence in sequences], np.int32),
                np.int32(-1 if end is None else end),
            )  # fmt: skip
            exact = "float32" if self._compute == "float32" else None
            with mesh_of(self._leaves), jax.default_matmul_precision(exact):
                first = self._run(sequences, rules, on_tokens)
        seconds = time.perf_counter() - start
        tokens = [
            np.concatenate([sequence.prompt, np.array(sequence.new, np.int32)])
            for sequence in sequences
        ]
        return tokens, Stats(
            tuple(sequence.result() for sequence in sequences), first - start, seconds
        )

    def _run(self, sequences: list[SequenceState], rules: Rules, on_tokens: Any) -> float:
        """Generates; the time at which the first tokens were there."""
        lengths_B = np.array([len(sequence.prompt) for sequence in sequences], np.int32)
        tokens_BT = np.zeros((len(sequences), self._prompt_length(int(lengths_B.max()))), np.int32)
        for sequence, row_T in zip(sequences, tokens_BT, strict=True):
            row_T[: len(sequence.prompt)] = sequence.prompt
        # A row's last token is never fed.
        needed = int((lengths_B.astype(np.int64) + rules.limit_B).max()) - 1
        whole = self._slots(needed)
        state = prefill(
            self._structure, self._leaves, tokens_BT, lengths_B, rules,
            slots=self._slots(tokens_BT.shape[1]),
        )  # fmt: skip
        done_B = self._collect(sequences, state, np.asarray(state.last_B)[:, None], on_tokens)
        first, made = time.perf_counter(), 1
        segment = 1 if on_tokens else STOP_SEGMENT if any(b.stop for b in sequences) else SEGMENT
        while not done_B.all():
            slots, used = state.cache.slots, int(lengths_B[~done_B].max()) + made - 1
            room = segment if slots == self._ring() else slots - used
            if room < 1:
                state = grow_state(state, slots=min(whole, self._slots(slots + 1)))
                continue
            state = replace(state, done_B=done_B, fault_B=np.zeros_like(done_B))
            state, tokens_BM, count = decode(
                self._structure, self._leaves, state, rules, np.int32(min(segment, room))
            )
            made += int(count)
            done_B = self._collect(
                sequences, state, np.asarray(tokens_BM)[:, : int(count)], on_tokens
            )
        return first

    def _collect(
        self, sequences: list[SequenceState], state: State, tokens_BM: np.ndarray, on_tokens: Any
    ) -> np.ndarray:
        """Adds new tokens to their rows; bool [B], which rows have ended."""
        fault_B, made_B = np.asarray(state.fault_B), np.asarray(state.made_B)
        for sequence, row_M, made in zip(
            sequences, tokens_BM.tolist(), made_B.tolist(), strict=True
        ):
            new = sequence.take(row_M[: max(0, made - len(sequence.new))])
            if new and on_tokens:
                on_tokens(sequence.number, new, sequence.stream())
        ended_B = np.array([sequence.ended for sequence in sequences])
        fault_B = fault_B & ~ended_B  # such as what the device made after a stop string
        if fault_B.any():
            row = int(np.argmax(fault_B))
            sequence, step = sequences[row], int(made_B[row])
            raise ValueError(
                f"{sequence.name}: the logits are not finite at new token {step + 1} (position "
                f"{len(sequence.prompt) + step}): the weights hold NaN or infinity, or overflow in "
                f"{self._compute}"
            )
        return np.asarray(state.done_B) | ended_B

    def encode(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer | None = None,
        names: Sequence[str] | None = None,
        *,
        special: bool = False,
    ) -> list[np.ndarray]:
        """The token ids of prompts, checked against the model; see `jaxslm.prompts.encode`."""
        return encode(prompts, self.config, tokenizer, names, special=special)

    def _limit(self, prompt: np.ndarray, max_new_tokens: int) -> int:
        """New tokens that a prompt may get: a full context still predicts one."""
        context = self.config.context
        return max_new_tokens if context is None else min(max_new_tokens, context + 1 - len(prompt))

    def _ring(self) -> int | None:
        config = self.config
        if not isinstance(config, RippleConfig):
            return None
        return ring_slots(config.attention_window, config.window_mode)

    def _slots(self, needed: int) -> int:
        """Slots of the cache for so many positions."""
        return most_slots(self.config, max(LEAST_SLOTS, 1 << (needed - 1).bit_length()))

    def _prompt_length(self, needed: int) -> int:
        """Positions that a prompt is padded to."""
        small = [length for length in PROMPT_LENGTHS if length >= needed]
        size = small[0] if small else 1 << (needed - 1).bit_length()
        return size if self.config.context is None else min(size, self.config.context)
