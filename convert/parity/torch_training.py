"""The torch half of a training trajectory, as the originals' loops train."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from convert.optimizer import torch_optimizer_state, training_checkpoint
from convert.parity.torch_side import TorchSide
from convert.parity.training_plan import IGNORED, Arrays, Plan, learning_rate
from convert.rules import leaves
from convert.tables import TABLES
from convert.torch_io import to_numpy
from convert.transform import with_aliases
from jaxslm.models import model_name
from jaxslm.optimizer_file import OptimizerState

MARGIN = 0.9  # of the first gradient's norm: where to clip if the recipe's own limit is above it


class TorchTrainer:
    """Torch training as the originals do, watched.

    Args:
        build: makes the module.
        plan: the training; its clip may still be set before the first update.
        dtype: "float64" or "float32".
        tensors: parameters by torch key, tied ones once.
        optimizer: the state to go on from.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        plan: Plan,
        dtype: str,
        tensors: Arrays,
        optimizer: OptimizerState | None,
    ):
        self.plan, table = plan, TABLES[model_name(plan.config)]
        state = with_aliases(plan.config, dict(tensors))
        self.module = TorchSide(build, plan.config, state, dtype, plan.length).module  # in eval
        path_of = {
            part.key: leaf.path for leaf in leaves(table, plan.config) for part in leaf.parts
        }
        self.named = {table.ties.get(k, k): p for k, p in self.module.named_parameters()}
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for k, p in self.named.items() if path_of[k] in g["parameters"]],
                    "weight_decay": g["weight_decay"],
                }
                for g in plan.groups
            ],
            lr=plan.recipe.lr,
            betas=plan.recipe.betas,
            eps=plan.recipe.eps,
        )
        self.count = plan.start
        if optimizer is not None:
            self.count = optimizer.count
            continued = replace(optimizer, groups=plan.groups)
            self.optimizer.load_state_dict(torch_optimizer_state(plan.config, continued))

    def update(self, inputs_BT: np.ndarray, targets_BT: np.ndarray) -> tuple[float, float]:
        """One update, as build-nanogpt's loop; the loss and the gradient's norm before clipping."""
        recipe = self.plan.recipe
        loss = self._backward(inputs_BT, targets_BT)
        norm = nn.utils.clip_grad_norm_(
            self.module.parameters(), math.inf if recipe.clip is None else recipe.clip
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe, self.plan.total, self.count)
        self.optimizer.step()
        self.count += 1
        return loss, float(norm)

    def gradient_norm(self, inputs_BT: np.ndarray, targets_BT: np.ndarray) -> float:
        """The norm of a batch's gradient."""
        self._backward(inputs_BT, targets_BT)
        return float(nn.utils.clip_grad_norm_(self.module.parameters(), math.inf))

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies by torch key, tied ones once."""
        return {key: to_numpy(parameter).copy() for key, parameter in self.named.items()}

    def moments(self) -> dict[str, np.ndarray]:
        """By `exp_avg.<torch key>` and `exp_avg_sq.<torch key>`, where torch has them."""
        return {
            f"{name}.{key}": to_numpy(self.optimizer.state[parameter][name])
            for name in ("exp_avg", "exp_avg_sq")
            for key, parameter in self.named.items()
            if parameter in self.optimizer.state
        }

    def save(self, path: Path) -> None:
        """A training checkpoint, as build-nanogpt's loop writes it."""
        state, optimizer = self.module.state_dict(), self.optimizer.state_dict()
        torch.save(training_checkpoint(self.plan.config, state, optimizer, self.count), path)

    def _backward(self, inputs_BT: np.ndarray, targets_BT: np.ndarray) -> float:
        """Leaves the mean gradient over all targets that count; returns their mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        number = self.plan.asked.accumulation
        kept = int((targets_BT != IGNORED).sum())
        total = torch.zeros(())
        for inputs, targets in zip(
            np.split(inputs_BT, number), np.split(targets_BT, number), strict=True
        ):
            tokens, labels = torch.from_numpy(inputs), torch.from_numpy(targets)
            if kept == targets_BT.size:  # the model's own loss, as in its own loop
                loss = self.module(tokens, labels)[1] / number
            else:
                found = self.module(tokens)
                logits = found[0] if isinstance(found, tuple | list) else found
                loss = F.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
                ) / max(kept, 1)
            loss.backward()
            total = total + loss.detach()
        return float(total)


def clipped_within(side: TorchTrainer, recipe: Any) -> Any:
    """The recipe, its clip lowered below the first gradient's norm if it would not bind there."""
    norm = side.gradient_norm(*side.plan.batch(0))
    if recipe.clip is None or norm > recipe.clip or not 0.0 < norm < math.inf:
        return recipe
    return replace(recipe, clip=MARGIN * norm)
