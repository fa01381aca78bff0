"""What a training trajectory does: its recipe, schedule, groups and batches, and where it starts.

Written apart from train/, which it is to be held against: no fault of its can be on both sides.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from convert.optimizer import open_optimizer
from convert.reader import Reader
from convert.rules import leaves
from convert.source import TorchSource, open_torch
from convert.tables import TABLES
from jaxslm.models import Config, model_name
from jaxslm.optimizer_file import FIRST, SECOND, OptimizerState, map_optimizer
from jaxslm.weights import is_model_folder

LENGTH = 128  # tokens in a sequence, where none is asked for
HALF = 10  # updates before the state changes sides, and after
IGNORED = -1
# At steps 3, 8, 13, ... half of the last sequence counts nothing; betas are seen at step 2 already.
UNEVEN, EVERY = 3, 5

Arrays = Mapping[str, np.ndarray]


class Trainer(Protocol):
    """Our half: `train.trajectory.Trainer`."""

    def load(
        self, parameters: Arrays, moments: tuple[Arrays, Arrays] | None = None, count: int = 0
    ) -> None:
        """Starts from parameters and moments by path, after `count` updates."""
        ...

    def update(self, inputs_BT: np.ndarray, targets_BT: np.ndarray) -> tuple[float, float]:
        """One update; the loss and the gradient's norm before clipping."""
        ...

    def parameters(self) -> dict[str, np.ndarray]:
        """By path."""
        ...

    def moments(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Of the trained parameters, by path."""
        ...


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be trained.

    Attributes:
        trainer: builds our half.
        recipe: `train.config.OptimConfig`, of the whole run; it is shortened to `steps`.
        steps: updates, 2 or more.
        batch_size: sequences in an update.
        accumulation: microbatches in an update.
        length: tokens in a sequence; None chooses.
        optimizer: the state to go on from.
        note: what else there is to say of where it starts.
    """

    trainer: Callable[..., Trainer]
    recipe: Any
    steps: int
    batch_size: int = 4
    accumulation: int = 2
    length: int | None = None
    optimizer: OptimizerState | None = None
    note: str = ""

    def __post_init__(self):
        if self.steps < 2:
            raise ValueError(f"--steps must be 2 or more, got {self.steps}")
        if self.accumulation < 1 or self.batch_size < 1 or self.batch_size % self.accumulation:
            raise ValueError(
                f"--batch-size {self.batch_size} must be a multiple of --accumulation "
                f"{self.accumulation}, both 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The training of both halves, settled.

    Attributes:
        config: the model's.
        recipe: shortened; its schedule counts from the optimizer's first update.
        groups: torch's parameter groups, `parameters` being our paths.
        start: updates done before.
        length: tokens in a sequence.
        tokens: real ones, or None for random ones.
        seed: of the batches.
        asked: the rest.
    """

    config: Config
    recipe: Any
    groups: tuple[dict[str, Any], ...]
    start: int
    length: int
    tokens: np.ndarray | None
    seed: int
    asked: Asked

    @property
    def total(self) -> int:
        """Updates from the optimizer's first to the trajectory's last."""
        return self.start + self.asked.steps

    @property
    def half(self) -> int:
        """The step at which the state changes sides."""
        return min(HALF, self.asked.steps // 2)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Paths of the parameters that torch does not train at this length."""
        return self.config.frozen_parameters(self.length)

    def is_uneven(self, step: int) -> bool:
        """Whether the microbatches of a step hold unequal numbers of targets that count."""
        return self.asked.accumulation > 1 and step % EVERY == UNEVEN

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets [B, T] of a step, int64."""
        rng = np.random.default_rng((self.seed, step))
        shape = (self.asked.batch_size, self.length + 1)
        if self.tokens is None:
            tokens_BT = rng.integers(0, self.config.vocab_size, shape)
        else:
            starts_B1 = rng.integers(0, len(self.tokens) - self.length, (shape[0], 1))
            tokens_BT = self.tokens[starts_B1 + np.arange(shape[1])].astype(np.int64)
        inputs_BT, targets_BT = tokens_BT[:, :-1].copy(), tokens_BT[:, 1:].copy()
        if self.is_uneven(step):
            targets_BT[-1, self.length // 2 :] = IGNORED
        return inputs_BT, targets_BT


def make_plan(config: Config, asked: Asked, tokens: np.ndarray | None, seed: int) -> Plan:
    """Settles length, groups and schedule.

    Raises:
        ValueError: the optimizer's groups are none that the recipe can say, it lacks moments of
            what this length trains, or there are too few tokens.
    """
    optimizer, recipe = asked.optimizer, asked.recipe
    length = asked.length or _default_length(config, optimizer)
    if tokens is not None:
        length = min(length, len(tokens) - 1)
    start = 0
    matrices = tuple(
        leaf.path
        for leaf in leaves(TABLES[model_name(config)], config)
        if len(leaf.parts[0].shape) >= 2  # in torch's shapes, where nothing is stacked
    )
    every = tuple(leaf.path for leaf in leaves(TABLES[model_name(config)], config))
    if optimizer is not None:
        start = optimizer.count
        recipe = _recipe_of(optimizer.groups, recipe, matrices, every)
        trained = set(every) - set(config.frozen_parameters(length))
        if absent := sorted(trained - optimizer.first_moment.keys()):
            raise ValueError(
                f"the optimizer has no moments of {', '.join(absent)}, which sequences of "
                f"{length} tokens train: torch would count its updates apart from the others'; "
                "give other --lengths"
            )
    decayed = every if recipe.decay == "all" else matrices
    rest = tuple(path for path in every if path not in decayed)
    recipe = shortened(recipe, start, asked.steps)
    settings = {"lr": recipe.lr, "betas": tuple(recipe.betas), "eps": recipe.eps}
    groups = tuple(
        {"parameters": list(paths), "weight_decay": decay, **settings}
        for paths, decay in ((decayed, recipe.weight_decay), (rest, 0.0))
        if paths
    )
    return Plan(
        config=config, recipe=recipe, groups=groups, start=start, length=length, tokens=tokens,
        seed=seed, asked=asked,
    )  # fmt: skip


def shortened(recipe: Any, start: int, steps: int) -> Any:
    """The recipe with its whole schedule within the steps after `start`.

    Warm-up, if it has any, takes up to the first fifth of the steps; a cosine ends with the last
    one, the last phase of "wsd" takes the last third.
    """
    warmup = start + max(1, steps // 5) if recipe.warmup_steps else 0
    decay = {"constant": None, "cosine": start + steps, "wsd": max(1, steps // 3)}
    return replace(recipe, warmup_steps=warmup, decay_steps=decay[recipe.schedule])


def learning_rate(recipe: Any, total: int, count: int) -> float:
    """The rate of the update after `count` others, in Python floats.

    Sources: `get_lr` of nanoGPT and of build-nanogpt (the warm-up's divisor apart, they are one);
    warmup-stable-decay of Hu et al. 2024.
    """
    if count < recipe.warmup_steps:
        divisor = recipe.warmup_steps + (1 if recipe.warmup == "nanogpt" else 0)
        return recipe.lr * (count + 1) / divisor
    if recipe.schedule == "constant":
        return recipe.lr
    if recipe.schedule == "cosine":
        if count > recipe.decay_steps:
            return recipe.final_lr
        ratio = (count - recipe.warmup_steps) / (recipe.decay_steps - recipe.warmup_steps)
        coefficient = 0.5 * (1.0 + math.cos(math.pi * ratio))
        return recipe.final_lr + coefficient * (recipe.lr - recipe.final_lr)
    since = count - (total - recipe.decay_steps)
    if since <= 0:
        return recipe.lr
    return recipe.lr + (recipe.final_lr - recipe.lr) * since / recipe.decay_steps


def _default_length(config: Config, optimizer: OptimizerState | None) -> int:
    context = config.context or config.block_size  # type: ignore[union-attr]
    length = min(LENGTH, context)
    if optimizer is not None and "blocks.attention.decay" not in optimizer.first_moment:
        length = min(length, getattr(config, "attention_window", None) or length)
    return length


def _recipe_of(
    groups: Sequence[Mapping[str, Any]],
    recipe: Any,
    matrices: Sequence[str],
    every: Sequence[str],
) -> Any:
    """The recipe with the hyperparameters of a checkpoint's groups.

    Raises:
        ValueError: they are none that the recipe can say.
    """
    same: dict[str, Any] = {}
    for name in ("lr", "betas", "eps"):
        values = {tuple(v) if isinstance(v := group[name], list) else v for group in groups}
        if len(values) > 1:
            raise ValueError(f"the optimizer's groups differ in {name}: {sorted(values)}")
        same[name] = values.pop()
    if any(group.get("maximize") for group in groups):
        raise ValueError("the optimizer maximizes, which no recipe of ours does")
    decays = {group["weight_decay"] for group in groups if group["weight_decay"]}
    decayed = {path for group in groups if group["weight_decay"] for path in group["parameters"]}
    if len(decays) > 1 or (decayed and decayed not in (set(matrices), set(every))):
        raise ValueError(
            "the optimizer's groups decay neither all parameters nor all matrices, by one rate: "
            f"{sorted(decays)} on {', '.join(sorted(decayed))}"
        )
    final = recipe.final_lr / recipe.lr
    rate = same["lr"] or recipe.lr  # a finished schedule may have left 0
    return replace(
        recipe,
        **same | {"lr": rate, "final_lr": final * rate},
        weight_decay=decays.pop() if decays else 0.0,
        decay="all" if decayed == set(every) else "matrices",
    )


def source_optimizer(
    path: Path, *, overrides: tuple[str, ...] = (), preset: str | None = None
) -> tuple[OptimizerState | None, str]:
    """AdamW's state in what is checked, and what there is to say where it cannot be used.

    Raises:
        OSError: the file cannot be read.
    """
    if is_model_folder(path):
        return map_optimizer(path), ""
    source = open_torch(path, overrides=overrides, preset=preset)
    if source.checkpoint.optimizer is None:
        return None, ""
    try:
        return read_optimizer(source), ""
    except ValueError as error:
        return None, str(error)


def read_optimizer(source: TorchSource) -> OptimizerState:
    """The state of torch's AdamW in an open checkpoint, by our paths.

    Raises:
        ValueError: as `open_optimizer`; a checksum is wrong, or a moment is not finite.
    """
    found = open_optimizer(source)
    arrays = read_parameters(found.moments)
    first, second = (
        {path.removeprefix(f"{name}."): a for path, a in arrays.items() if path.startswith(name)}
        for name in (FIRST, SECOND)
    )
    return OptimizerState(
        count=found.count, first_moment=first, second_moment=second, groups=found.groups,
        step=found.step,
    )  # fmt: skip


def read_parameters(source: TorchSource) -> dict[str, np.ndarray]:
    """Every parameter of an open checkpoint by our path.

    Raises:
        ValueError: a checksum is wrong, or numbers are not finite.
    """
    with Reader(source, None) as reader:
        arrays = {leaf.path: reader.parameter(leaf) for leaf in source.leaves}
        reader.finish(allow_nonfinite=False)
    return arrays


def in_words(plan: Plan, clipped: int) -> str:
    """The training in one sentence."""
    recipe, asked = plan.recipe, plan.asked
    began = f"from update {plan.start:,} of the checkpoint's AdamW" if plan.start else "from new"
    schedule = f"{recipe.schedule} rate {recipe.lr:.3g}"
    schedule += f" to {recipe.final_lr:.3g}" if recipe.schedule != "constant" else ""
    if recipe.warmup_steps:
        schedule += f" after {recipe.warmup_steps - plan.start} steps of warm-up"
    clip = (
        "no clipping"
        if recipe.clip is None
        else f"clipped to {recipe.clip:.3g} at {clipped} of {asked.steps} steps"
    )
    tokens = "random" if plan.tokens is None else "the file's"
    frozen = f"; {', '.join(plan.frozen)} frozen" if plan.frozen else ""
    note = f"; {asked.note}" if asked.note else ""
    return (
        f"{asked.steps} steps of {asked.batch_size} x {plan.length} {tokens} tokens in "
        f"{asked.accumulation} microbatches, {began}: betas {recipe.betas[0]:g} and "
        f"{recipe.betas[1]:g}, decay {recipe.weight_decay:g} on {recipe.decay}, {schedule}, "
        f"{clip}, no dropout{frozen}{note}"
    )
