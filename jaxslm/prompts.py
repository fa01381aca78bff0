"""What generation is asked for, checked: prompts, numbers, stop strings, keys."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxslm.models import Config
from jaxslm.tokenizer import Tokenizer

MOST_TOKENS = 2**30
Prompt = str | Sequence[int] | np.ndarray


def encode(
    prompts: Sequence[Prompt],
    config: Config,
    tokenizer: Tokenizer | None = None,
    names: Sequence[str] | None = None,
    *,
    special: bool = False,
) -> list[np.ndarray]:
    """The token ids of prompts, int32 [n] each, checked.

    Args:
        prompts: as in `jaxslm.generate`.
        config: of the model that is to continue them.
        tokenizer: for texts.
        names: what errors call the prompts; "prompt 0" and so on by default.
        special: names of special tokens in texts become their ids.

    Raises:
        ValueError: a prompt is none that the model can continue.
    """
    if isinstance(prompts, str) or any(isinstance(p, int | np.integer) for p in prompts):
        raise ValueError("prompts is one prompt: pass a list of them, [prompt]")
    names = [f"prompt {n}" for n in range(len(prompts))] if names is None else names
    return [
        _encode_one(name, prompt, config, tokenizer, special)
        for name, prompt in zip(names, prompts, strict=True)
    ]


def _encode_one(
    name: str, prompt: Prompt, config: Config, tokenizer: Tokenizer | None, special: bool
) -> np.ndarray:
    """One prompt's ids."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name} is text: pass tokenizer=, or token ids")
        try:
            ids = tokenizer.encode(prompt, special=special)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if not len(ids) and tokenizer.end_of_text is not None:
            ids = np.array([tokenizer.end_of_text])
    else:
        try:
            ids = np.asarray(prompt)
        except ValueError:
            raise ValueError(f"{name}: expected integers along one axis") from None
    if ids.size == 0:
        raise ValueError(
            f"{name} is empty: give it at least one token"
            + (
                " (the tokenizer has no end-of-text to begin after)"
                if isinstance(prompt, str)
                else ""
            )
        )
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise ValueError(f"{name} is {ids.dtype} {ids.shape}: expected integers along one axis")
    V, context = config.vocab_size, config.context
    if (bad := np.flatnonzero((ids < 0) | (ids >= V))).size:
        raise ValueError(
            f"{name} has token {ids[bad[0]]} at {bad[0]}: the model's vocabulary is 0 to {V - 1}"
            + (": this is not its tokenizer" if isinstance(prompt, str) else "")
        )
    if context is not None and len(ids) > context:
        raise ValueError(
            f"{name} has {len(ids):,} tokens, the model's context is {context:,}: shorten it"
        )
    return ids.astype(np.int32)


def check_end(
    end_of_text: int | str | None, config: Config, tokenizer: Tokenizer | None
) -> int | None:
    """The id that ends a row."""
    if end_of_text == "tokenizer":
        return None if tokenizer is None else tokenizer.end_of_text
    if end_of_text is None:
        return None
    if not isinstance(end_of_text, int | np.integer) or isinstance(end_of_text, bool):
        raise ValueError(f"end_of_text must be a token id, 'tokenizer' or None: {end_of_text!r}")
    if not 0 <= end_of_text < config.vocab_size:
        raise ValueError(
            f"end_of_text {end_of_text} is no token of the model: its vocabulary is 0 to "
            f"{config.vocab_size - 1}"
        )
    return int(end_of_text)


def check_count(max_new_tokens: Any) -> None:
    """Refuses what is no number of tokens."""
    whole = isinstance(max_new_tokens, int | np.integer) and not isinstance(max_new_tokens, bool)
    if not whole or not 0 <= max_new_tokens <= MOST_TOKENS:
        raise ValueError(
            f"max_new_tokens must be a whole number from 0 to {MOST_TOKENS:,}, got "
            f"{max_new_tokens!r}"
        )


def check_stop(stop: Any) -> tuple[str, ...]:
    """Stop strings."""
    found = () if isinstance(stop, str) else tuple(stop)
    if isinstance(stop, str) or not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"stop must be a list of strings that are not empty, got {stop!r}")
    return found


def row_keys(key: jax.Array | None, rows: int, *, needed: bool) -> jax.Array:
    """A PRNG key for each row."""
    if key is None:
        if needed:
            raise ValueError(
                "sampling needs a key: pass key=jax.random.key(seed), or temperature 0"
            )
        key = jax.random.key(0)
    if not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"key must be a PRNG key, such as jax.random.key(0), got {key!r}")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    typed: Any = key if is_typed else jax.random.wrap_key_data(key)
    if typed.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(typed, jnp.arange(rows))
    if typed.shape != (rows,):
        raise ValueError(
            f"key has shape {typed.shape}: expected one key, or one for each of {rows} prompts"
        )
    return typed
