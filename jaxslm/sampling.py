"""From logits to the next token: temperature, filters, draws.

The order is that of nanoGPT, RippleGPT and transformers: repetition penalty, temperature, top-k,
top-p, min-p, each on the distribution that the one before left. Values that are equal are treated
alike: whoever ties with the last that is kept is kept.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TINY = 1e-37  # temperatures below it do what it does: all but the largest logits get nothing
LARGE = 1e6  # of temperature and penalty; beyond, float32 logits would be lost


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the largest logit (the first of equals).
        top_k: keep the k largest logits and their equals; None, or the vocabulary's size or more,
            for all.
        top_p: keep the fewest most likely tokens whose probabilities sum to this, and equals of the
            least likely of them (Holtzman et al. 2020); 1 for all.
        min_p: keep tokens of at least this times the largest probability (Nguyen et al. 2024); 0
            for all.
        repetition_penalty: positive logits of tokens that stand in the prompt or were generated are
            divided by it, negative ones multiplied (Keskar et al. 2019); 1 for none.

    Raises:
        ValueError: a value is out of its range, named.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if not 0.0 <= self.temperature <= LARGE:
            raise ValueError(
                f"temperature must be 0 (the likeliest token) or more, up to {LARGE:g}, got "
                f"{self.temperature}"
            )
        k = self.top_k
        whole = isinstance(k, int | np.integer) and not isinstance(k, bool)
        if k is not None and not (whole and k >= 1):
            raise ValueError(
                f"top_k must be a whole number, 1 or more, or None for all tokens, got {k!r}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be from 0 to 1, got {self.min_p}")
        if not 1 / LARGE <= self.repetition_penalty <= LARGE:
            raise ValueError(
                f"repetition_penalty must be from {1 / LARGE:g} to {LARGE:g} (1 for none), got "
                f"{self.repetition_penalty}"
            )

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Filters:
    """A `Sampling` for a compiled program: which steps there are is static, their numbers are not.

    None leaves a step out.
    """

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int) -> "Filters":
        """The numbers as arrays; steps that change nothing are left out."""
        penalty = sampling.repetition_penalty
        penalised = None if penalty == 1.0 else np.float64(penalty)
        if sampling.greedy:
            return cls(repetition_penalty=penalised)
        k = sampling.top_k
        return cls(
            temperature=np.float64(max(sampling.temperature, TINY)),
            top_k=None if k is None or k >= vocab_size else np.int32(k),
            top_p=None if sampling.top_p == 1.0 else np.float64(sampling.top_p),
            min_p=None if sampling.min_p == 0.0 else np.float64(sampling.min_p),
            repetition_penalty=penalised,
        )


def filter_logits(
    logits_BV: jax.Array, filters: Filters, seen_BV: jax.Array | None = None
) -> jax.Array:
    """Logits of the distribution that is drawn from, -inf where nothing is.

    Args:
        logits_BV: float32 or wider, without NaN.
        filters: the steps; without a temperature only the penalty's.
        seen_BV: bool, tokens that count as repeated; needed for the penalty.

    Returns:
        Logits [B, V]; under a temperature the largest is 0.
    """
    dtype = logits_BV.dtype
    if filters.repetition_penalty is not None:
        assert seen_BV is not None
        penalty = jnp.asarray(filters.repetition_penalty, dtype)
        repeated_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = jnp.where(seen_BV, repeated_BV, logits_BV)
    if filters.temperature is None:
        return logits_BV
    # From the largest: a small temperature then overflows to -inf, which has probability 0.
    logits_BV = logits_BV - logits_BV.max(-1, keepdims=True)
    logits_BV = logits_BV / jnp.asarray(filters.temperature, dtype)
    if filters.top_k is not None:
        kept_BV = _largest(logits_BV, jnp.ones_like(logits_BV), filters.top_k)
        logits_BV = jnp.where(kept_BV, logits_BV, -jnp.inf)
    if filters.top_p is not None:
        kept_BV = _largest(logits_BV, jax.nn.softmax(logits_BV, axis=-1), filters.top_p)
        logits_BV = jnp.where(kept_BV, logits_BV, -jnp.inf)
    if filters.min_p is not None:  # the largest logit is 0
        least = jnp.log(jnp.asarray(filters.min_p, dtype))
        slack = 8 * jnp.finfo(dtype).eps * (1 + jnp.abs(least))  # of logits that tie with it
        logits_BV = jnp.where(logits_BV < least - slack, -jnp.inf, logits_BV)
    return logits_BV


def _largest(x_BV: jax.Array, weight_BV: jax.Array, target: Any) -> jax.Array:
    """The largest entries of each row whose weights sum to `target` at least, and their equals.

    As few as can be, but one; all where the sum of all falls short. The least of them is found bit
    by bit, from the highest: on a CPU a tenth of the time of a sort.
    """
    dtype = x_BV.dtype
    bits, unsigned = jnp.finfo(dtype).bits, f"uint{jnp.finfo(dtype).bits}"
    pattern_BV = jax.lax.bitcast_convert_type(x_BV + 0.0, unsigned)  # + 0.0: there is no -0
    sign = jnp.asarray(1 << (bits - 1), unsigned)
    order_BV = jnp.where(pattern_BV >= sign, ~pattern_BV, pattern_BV | sign)  # as the floats
    target = jnp.asarray(target, dtype)

    def with_bit(number: jax.Array, least_B1: jax.Array) -> jax.Array:
        higher_B1 = least_B1 | (sign >> number.astype(unsigned))
        enough_B1 = jnp.where(order_BV >= higher_B1, weight_BV, 0.0).sum(-1, keepdims=True)
        return jnp.where(enough_B1 >= target, higher_B1, least_B1)

    least_B1 = jax.lax.fori_loop(0, bits, with_bit, jnp.zeros_like(order_BV[:, :1]))
    return order_BV >= jnp.minimum(least_B1, order_BV.max(-1, keepdims=True))


def choose(
    logits_BV: jax.Array, filters: Filters, keys_B: jax.Array, seen_BV: jax.Array | None = None
) -> jax.Array:
    """The next token of each row, int32 [B]; a row's draw depends on its own key only.

    Args:
        logits_BV: as in `filter_logits`, and so the next and the last.
        filters: without a temperature the largest logit wins and no key is used.
        keys_B: PRNG keys.
        seen_BV: see `filter_logits`.
    """
    logits_BV = filter_logits(logits_BV, filters, seen_BV)
    if filters.temperature is None:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
