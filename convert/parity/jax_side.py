"""The JAX half of the parity check."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from convert.casting import float_dtype
from convert.rules import Leaf, disassemble
from convert.transform import torch_arrays
from jaxslm.models import Config, Ripple
from jaxslm.rope import RopeTables
from jaxslm.weights import from_arrays, to_arrays


class JaxSide:
    """Our model in one dtype; gives numpy arrays under the names of the torch half.

    Args:
        config: the model's config; its compute dtype is replaced.
        arrays: parameters by JAX path, cast to `dtype`.
        dtype: "float64" (needs x64 mode), "float32" or "bfloat16".
        rope: torch's tables to use in place of our own.
    """

    def __init__(
        self,
        config: Config,
        arrays: Mapping[str, np.ndarray],
        dtype: str,
        rope: RopeTables | None = None,
    ):
        self.dtype = dtype
        self.config = replace(config, dtype=dtype)
        kind = float_dtype(dtype)
        self.model = from_arrays(
            self.config, {name: array.astype(kind) for name, array in arrays.items()}
        )
        self._options = {} if rope is None else {"rope": rope}
        self._activations = jax.jit(
            lambda model, tokens: model.activations(tokens, every_layer=True, **self._options)
        )
        self._logits = jax.jit(
            lambda model, tokens: model.activations(tokens, **self._options)["logits"]
        )
        self._gradients = jax.jit(jax.value_and_grad(self._loss))

    def activations(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Embedding, attention [L, ...], block [L, ...], final_norm and logits."""
        found = self._activations(self.model, tokens)
        return {name: np.asarray(value) for name, value in found.items()}

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """The logits [B, T, V]."""
        return np.asarray(self._logits(self.model, tokens))

    def final_norm(self, x: np.ndarray) -> np.ndarray:
        """The last norm applied to x [..., D] (float64, cast to this side's dtype)."""
        return np.asarray(jax.jit(self.model.final_norm)(jnp.asarray(x, self.dtype)))

    def rope_tables(self) -> RopeTables | None:
        """Our own tables, float32 [context, H/2]; None for a model without."""
        return None if isinstance(self.model, Ripple) else self.model.rope_tables()

    def loss_and_gradients(
        self, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Mean cross-entropy, and the gradient of every torch key (tied ones once)."""
        loss, self._gradient = self._gradients(self.model, tokens, targets)
        gradient = {name: np.asarray(value) for name, value in to_arrays(self._gradient).items()}
        return np.asarray(loss), torch_arrays(self.config, gradient)

    def parameters(self) -> dict[str, np.ndarray]:
        """Every parameter by torch key, tied ones once."""
        arrays = {name: np.asarray(value) for name, value in to_arrays(self.model).items()}
        return torch_arrays(self.config, arrays)

    def adamw_update(
        self, settings: Mapping[str, Any], length: int, group: Sequence[Leaf]
    ) -> dict[str, np.ndarray]:
        """What one step of optax.adamw from the last gradients adds, in float64, by torch key.

        The parameters that torch freezes at this sequence length are left as they are.
        """
        optimizer = optax.adamw(
            settings["lr"], settings["betas"][0], settings["betas"][1], settings["eps"],
            weight_decay=settings["weight_decay"],
        )  # fmt: skip
        frozen = self.config.frozen_parameters(length)

        @jax.jit
        def step(before: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
            update: Any
            update, _ = optimizer.update(gradients, optimizer.init(before), before)
            return {
                name: value if name in frozen else optax.apply_updates(value, update[name])
                for name, value in before.items()
            }

        parameters, gradients = to_arrays(self.model), to_arrays(self._gradient)
        before = {leaf.path: parameters[leaf.path] for leaf in group}
        after = step(before, {name: gradients[name] for name in before})
        return {
            key: update
            for leaf in group
            for key, update in disassemble(
                leaf,
                np.asarray(after[leaf.path], np.float64)
                - np.asarray(before[leaf.path], np.float64),
            )
        }

    def _loss(self, model, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        logits_BTV = model.activations(tokens_BT, **self._options)["logits"]
        return cross_entropy(logits_BTV, targets_BT)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of the targets in nats, a scalar in the logits' dtype."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    return losses.mean()
