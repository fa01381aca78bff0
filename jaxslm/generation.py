"""Generation: prompts in, tokens out, by a key-value cache and a loop that runs on the device.

Programs are compiled for sizes, not for prompts: a prompt is padded to the next of a few lengths,
the cache starts small and doubles when it is full, and a decoding program makes up to SEGMENT
tokens for any temperature, any number of tokens, any lengths of the rows.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxslm.cache import Cache, fill, grow, ring_slots
from jaxslm.layers import compute_dtype
from jaxslm.models import Model, RippleConfig
from jaxslm.prompts import Prompt, check_count, check_end, check_stop, encode, row_keys
from jaxslm.rows import SequenceState, Stats
from jaxslm.sampling import Filters, Sampling, choose
from jaxslm.sharding import AXES
from jaxslm.tokenizer import Tokenizer
from jaxslm.weights import from_arrays, to_arrays

SEGMENT = 256  # tokens of a row that a program makes before the host looks at them
STOP_SEGMENT = 16  # the same where the host looks for a stop string
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


def prepared(model: Model) -> Model:
    """The model with its parameters as decoding reads them.

    Each layer's are arrays of their own, and factors of matrix products stand in the compute dtype,
    so that no step casts them again. On CPUs a bfloat16 model is computed in float32 from weights
    rounded to bfloat16: XLA's bfloat16 matrix-vector product is about ten times slower there.
    """
    arrays = to_arrays(model)
    config, dtype = model.config, compute_dtype(model.config.dtype)
    stored = dtype
    if dtype == jnp.bfloat16 and _devices(arrays)[0].platform == "cpu":
        config, stored = replace(config, dtype="float32"), jnp.dtype(jnp.float32)

    def is_factor(path: str) -> bool:
        return "norm." not in path and not path.endswith(".decay")

    def block(number: int) -> Any:
        """One layer's, its parameters copied out of the stacked ones."""
        picked = [
            (path, leaf.replace(_pick(leaf.get_value(), number, *dtypes(".".join(map(str, path))))))
            for path, leaf in stacked
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(picked))

    def dtypes(path: str) -> tuple[jnp.dtype, jnp.dtype] | tuple[None, None]:
        return (dtype, stored) if is_factor(path) else (None, None)

    with _mesh_of(arrays):
        others = {
            path: w.astype(dtype).astype(stored) if is_factor(path) else w
            for path, w in arrays.items()
            if not path.startswith("blocks.")
        }
        ready: Any = from_arrays(config, arrays | others)
        graphdef, blocks = nnx.split(ready.blocks)
        stacked = nnx.to_flat_state(blocks)
        ready.blocks = nnx.List([block(n) for n in range(len(arrays["blocks.attention.wq"]))])
        return ready


@functools.partial(jax.jit, static_argnums=(2, 3))
def _pick(w: jax.Array, number: int, dtype: Any, stored: Any) -> jax.Array:
    """A layer of a stacked array, rounded to `dtype`; one small program for all layers."""
    one = jax.lax.dynamic_index_in_dim(w, number, keepdims=False)
    return one if dtype is None else one.astype(dtype).astype(stored)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """All that a decoding program takes and returns, [B] each.

    Attributes:
        cache: of the tokens before `last_B`.
        last_B: int32, the latest token of each row.
        made_B: int32, new tokens of each row.
        done_B: bool, rows that have ended.
        fault_B: bool, rows whose logits were not finite.
        seen_BV: bool, tokens that occurred; None without a repetition penalty.
    """

    cache: Cache
    last_B: jax.Array
    made_B: jax.Array
    done_B: jax.Array
    fault_B: jax.Array
    seen_BV: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rules:
    """What programs take besides the state: numbers that may differ from call to call.

    Attributes:
        filters: of the sampling.
        keys_B: a PRNG key a row.
        limit_B: int32, new tokens of each row at most.
        end: int32, the end-of-text id, or -1.
    """

    filters: Filters
    keys_B: jax.Array
    limit_B: Any
    end: Any


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
            rules = _Rules(
                Filters.of(sampling, self.config.vocab_size), keys_B,
                np.array([sequence.limit for sequence in sequences], np.int32),
                np.int32(-1 if end is None else end),
            )  # fmt: skip
            exact = "float32" if self._compute == "float32" else None
            with _mesh_of(self._leaves), jax.default_matmul_precision(exact):
                first = self._run(sequences, rules, on_tokens)
        seconds = time.perf_counter() - start
        tokens = [
            np.concatenate([sequence.prompt, np.array(sequence.new, np.int32)])
            for sequence in sequences
        ]
        return tokens, Stats(
            tuple(sequence.result() for sequence in sequences), first - start, seconds
        )

    def _run(self, sequences: list[SequenceState], rules: _Rules, on_tokens: Any) -> float:
        """Generates; the time at which the first tokens were there."""
        lengths_B = np.array([len(sequence.prompt) for sequence in sequences], np.int32)
        tokens_BT = np.zeros((len(sequences), self._prompt_length(int(lengths_B.max()))), np.int32)
        for sequence, row_T in zip(sequences, tokens_BT, strict=True):
            row_T[: len(sequence.prompt)] = sequence.prompt
        # A row's last token is never fed.
        needed = int((lengths_B.astype(np.int64) + rules.limit_B).max()) - 1
        whole = self._slots(needed)
        state = _prefill(
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
                state = _grow(state, slots=min(whole, self._slots(slots + 1)))
                continue
            state = replace(state, done_B=done_B, fault_B=np.zeros_like(done_B))
            state, tokens_BM, count = _decode(
                self._structure, self._leaves, state, rules, np.int32(min(segment, room))
            )
            made += int(count)
            done_B = self._collect(
                sequences, state, np.asarray(tokens_BM)[:, : int(count)], on_tokens
            )
        return first

    def _collect(
        self, sequences: list[SequenceState], state: _State, tokens_BM: np.ndarray, on_tokens: Any
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
        limits = (self._ring(), self.config.context)
        size = max(LEAST_SLOTS, 1 << (needed - 1).bit_length())
        return min([size, *(limit for limit in limits if limit is not None)])

    def _prompt_length(self, needed: int) -> int:
        """Positions that a prompt is padded to."""
        small = [length for length in PROMPT_LENGTHS if length >= needed]
        size = small[0] if small else 1 << (needed - 1).bit_length()
        return size if self.config.context is None else min(size, self.config.context)


@functools.partial(jax.jit, static_argnums=0, static_argnames="slots")
def _prefill(
    structure: Any,
    leaves: list[jax.Array],
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    rules: _Rules,
    *,
    slots: int,
) -> _State:
    """Reads the prompts and chooses the first new token of each row."""
    model: Model = jax.tree.unflatten(structure, leaves)
    found = model.activations(tokens_BT, keys_values=True, logits=False)
    dtype = found["keys"].dtype
    cache = fill(found["keys"], found["values"], lengths_B, slots, dtype)
    last_B11 = (lengths_B - 1)[:, None, None]
    logits_B1V = model.unembed(jnp.take_along_axis(found["final_norm"], last_B11, axis=1))
    seen_BV = None
    if rules.filters.repetition_penalty is not None:
        B, T = tokens_BT.shape
        counts_BT = jnp.arange(T)[None, :] < lengths_B[:, None]
        seen_BV = jnp.zeros((B, model.config.vocab_size), bool)
        seen_BV = seen_BV.at[jnp.arange(B)[:, None], tokens_BT].max(counts_BT)
    zeros_B = jnp.zeros_like(lengths_B)
    state = _State(cache, zeros_B, zeros_B, rules.limit_B <= 0, zeros_B.astype(bool), seen_BV)
    return _advance(state, cache, logits_B1V[:, 0], rules)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(
    structure: Any, leaves: list[jax.Array], state: _State, rules: _Rules, count: jax.Array
) -> tuple[_State, jax.Array, jax.Array]:
    """Makes up to `count` tokens a row, at most SEGMENT; stops when every row has ended.

    Returns:
        The state, the tokens [B, SEGMENT], and how many of them were made.
    """
    model: Model = jax.tree.unflatten(structure, leaves)

    def unfinished(carry: tuple[jax.Array, _State, jax.Array]) -> jax.Array:
        number, state, _ = carry
        return (number < count) & ~state.done_B.all() & ~state.fault_B.any()

    def step(
        carry: tuple[jax.Array, _State, jax.Array],
    ) -> tuple[jax.Array, _State, jax.Array]:
        number, state, tokens_BM = carry
        logits_BV, cache = model.decode(state.last_B, state.cache)
        position_B = jnp.where(state.done_B, state.cache.position_B, cache.position_B)
        state = _advance(state, Cache(cache.layers, position_B), logits_BV, rules)
        tokens_BM = jax.lax.dynamic_update_slice(
            tokens_BM, state.last_B[:, None], (jnp.zeros_like(number), number)
        )
        return number + 1, state, tokens_BM

    tokens_BM = jnp.zeros((state.last_B.shape[0], SEGMENT), jnp.int32)
    made, state, tokens_BM = jax.lax.while_loop(
        unfinished, step, (jnp.zeros((), jnp.int32), state, tokens_BM)
    )
    return state, tokens_BM, made


def _advance(state: _State, cache: Cache, logits_BV: jax.Array, rules: _Rules) -> _State:
    """The state with the token that the logits give each row that has not ended."""
    fault_B = ~jnp.isfinite(logits_BV.max(-1)) & ~state.done_B
    logits_BV = jnp.where((fault_B | state.done_B)[:, None], 0.0, logits_BV)
    keys_B = jax.vmap(jax.random.fold_in)(rules.keys_B, state.made_B)
    chosen_B = choose(logits_BV, rules.filters, keys_B, state.seen_BV)
    going_B = ~state.done_B & ~fault_B
    seen_BV = state.seen_BV
    if seen_BV is not None:
        rows_B = jnp.arange(chosen_B.shape[0])
        seen_BV = seen_BV.at[rows_B, chosen_B].max(going_B)
    made_B = state.made_B + going_B
    ended_B = (chosen_B == rules.end) | (made_B >= rules.limit_B)
    return _State(
        cache,
        jnp.where(going_B, chosen_B, state.last_B),
        made_B,
        state.done_B | fault_B | ended_B,
        state.fault_B | fault_B,
        seen_BV,
    )


@functools.partial(jax.jit, static_argnames="slots")
def _grow(state: _State, *, slots: int) -> _State:
    return replace(state, cache=grow(state.cache, slots))


def _devices(arrays: Any) -> list[Any]:
    return list(jax.tree.leaves(arrays)[0].devices())


def _mesh_of(arrays: Any) -> Any:
    """Enters the mesh that arrays lie on, if it is one of ours."""
    sharding = jax.tree.leaves(arrays)[0].sharding
    if isinstance(sharding, NamedSharding) and set(AXES) <= set(sharding.mesh.axis_names):
        return jax.set_mesh(cast(Mesh, sharding.mesh))
    return contextlib.nullcontext()
