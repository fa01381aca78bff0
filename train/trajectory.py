"""Updates of a run, numpy in and out: what the parity check holds against torch's."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxslm.layers import compute_dtype
from jaxslm.models import Config
from jaxslm.rope import RopeTables
from train.config import DataConfig, OptimConfig, TrainConfig
from train.optimizer import build_optimizer, moments_of, with_moments
from train.step import TrainState, initial_state, make_step, partition

Arrays = dict[str, np.ndarray]


class Trainer:
    """A run's own step, jitted once, from any state of parameters and moments; no dropout.

    Args:
        model: the architecture; its dropout and compute dtype are replaced.
        optim: AdamW and its schedule.
        steps: updates of the whole run, which the schedule may span.
        batch_size: sequences in an update.
        sequence_length: tokens in a sequence.
        accumulation: microbatches that an update's batch is cut into.
        dtype: of parameters, moments and computation: "float32", or "float64" in JAX's x64 mode.
        rope: tables in place of the model's own.

    Raises:
        ValueError: the batch, the sequence or the schedule do not fit; Muon.
    """

    def __init__(
        self,
        model: Config,
        optim: OptimConfig,
        *,
        steps: int,
        batch_size: int,
        sequence_length: int,
        accumulation: int,
        dtype: str,
        rope: RopeTables | None = None,
    ):
        if optim.name != "adamw":
            raise ValueError(f"a trajectory is held against torch's AdamW, got {optim.name!r}")
        fields: dict[str, Any] = {"dtype": dtype}
        fields |= {"dropout": 0.0} if hasattr(model, "dropout") else {}
        self._config = TrainConfig(
            out=Path(),
            model=replace(model, **fields),
            optim=optim,
            data=DataConfig(batch_size=batch_size, sequence_length=sequence_length),
            steps=steps,
            accumulation=accumulation,
        )
        self._step = jax.jit(make_step(self._config, rope=rope), donate_argnums=0)
        self._state: TrainState | None = None

    def load(
        self,
        parameters: Mapping[str, np.ndarray],
        moments: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]] | None = None,
        count: int = 0,
    ) -> None:
        """Starts from these parameters.

        Args:
            parameters: by path, cast to the run's dtype.
            moments: first and second, of the trained parameters by path, likewise cast; None
                before the first update.
            count: updates done; the schedule goes on from there.

        Raises:
            ValueError: a trained parameter has no moments.
        """
        dtype = compute_dtype(self._config.model.dtype)
        frozen = self._config.trained_without
        params = {path: jnp.array(array, dtype) for path, array in parameters.items()}
        trained, _ = partition(params, frozen)
        optimizer = build_optimizer(self._config.optim, self._config.steps, trained)
        state = initial_state(params, optimizer, frozen)
        if moments is not None:
            if absent := sorted(trained.keys() - (moments[0].keys() & moments[1].keys())):
                raise ValueError(f"there are no moments of {', '.join(absent)}")
            first, second = (
                {path: jnp.array(of[path], dtype) for path in trained} for of in moments
            )
            state = replace(
                state,
                step=jnp.array(count, jnp.int32),
                optimizer=with_moments(
                    state.optimizer, first, second, lambda like: jnp.array(count, like.dtype)
                ),
            )
        self._state = state

    def update(self, inputs_BT: np.ndarray, targets_BT: np.ndarray) -> tuple[float, float]:
        """One update; targets of -1 count nothing.

        Returns:
            The loss in nats and the gradient's global norm before clipping.
        """
        shape = (self._config.accumulation, -1, self._config.data.sequence_length)
        inputs_ABT, targets_ABT = (
            jnp.asarray(array.reshape(shape), jnp.int32) for array in (inputs_BT, targets_BT)
        )
        self._state, metrics = self._step(self._loaded, inputs_ABT, targets_ABT)
        return float(metrics["loss"]), float(metrics["grad_norm"])

    def parameters(self) -> Arrays:
        """Copies of the parameters by path."""
        return {path: np.array(value) for path, value in self._loaded.params.items()}

    def moments(self) -> tuple[Arrays, Arrays]:
        """Copies of the first and second moments of the trained parameters, by path."""
        first, second, _ = moments_of(self._loaded.optimizer)
        return (
            {path: np.array(value) for path, value in first.items()},
            {path: np.array(value) for path, value in second.items()},
        )

    @property
    def _loaded(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("load() comes first")
        return self._state
