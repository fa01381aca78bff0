"""The programs of a run, as its loop and its plan compile them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from train.config import TrainConfig
from train.setup import Layout


def lower(
    config: TrainConfig,
    layout: Layout,
    function: Callable[..., Any],
    first: Any,
    *,
    donate: bool,
) -> jax.stages.Lowered:
    """A function of a state and a batch's inputs and targets, ready to compile for its devices.

    Args:
        config: the run's.
        layout: the mesh, whose devices need not be attached, and how a batch lies on it.
        function: (first, inputs_ABT, targets_ABT) -> anything; the next state and more if it
            donates.
        first: arrays, or shapes with shardings, of its first argument.
        donate: the first argument's memory becomes the first result's, which lies as it did.
    """
    a, b = config.accumulation, config.data.batch_size // config.accumulation
    batch = jax.ShapeDtypeStruct(
        (a, b, config.data.sequence_length), np.int32, sharding=layout.batch
    )
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first
    )
    shardings = (jax.tree.map(lambda x: x.sharding, first), None) if donate else None
    jitted = jax.jit(function, donate_argnums=(0,) if donate else (), out_shardings=shardings)
    # A float32 product is one: left to themselves, GPUs and TPUs would round its factors.
    exact = "float32" if config.model.dtype == "float32" else None
    with jax.set_mesh(layout.mesh), jax.default_matmul_precision(exact):
        return jitted.lower(like, batch, batch)
