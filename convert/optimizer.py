"""The state of torch's AdamW, by parameter name: out of a checkpoint, and back into one.

Moments pass through the rules of their parameters, so that every byte is kept both ways.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.adamw import MOMENTS, read_state, settings, updates
from convert.parameter_order import assign, deal, named_parameters
from convert.resolve import CHOICES
from convert.rules import Leaf, disassemble, leaves
from convert.source import TorchSource
from convert.tables import TABLES
from jaxslm.models import Config, model_name
from jaxslm.optimizer_file import FIRST, SECOND, OptimizerState, state_faults

if TYPE_CHECKING:
    import torch

PATHS = {"exp_avg": FIRST, "exp_avg_sq": SECOND}  # a moment's name in torch -> in our paths
STEP_KEYS = ("step", "iter_num")  # of build-nanogpt; of nanoGPT and RippleGPT
# What torch itself fills in where a group is silent.
TORCH_DEFAULTS = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
    "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer:
    """AdamW's state in a torch checkpoint, its parameters known by name.

    Attributes:
        moments: the moments as a source of their own, with tensors `exp_avg.<torch key>` and
            `exp_avg_sq.<torch key>` and leaves `first_moment.<path>` and `second_moment.<path>`.
        count: updates done.
        groups: as in `jaxslm.optimizer_file.OptimizerState`.
        step: the training step, where the checkpoint says it.
        without: paths of the parameters that were never updated and have no moments.
    """

    moments: TorchSource
    count: int
    groups: tuple[dict[str, Any], ...]
    step: int | None
    without: tuple[str, ...]


def open_optimizer(source: TorchSource) -> TorchOptimizer:
    """Finds the state of torch's AdamW in a checkpoint, and the parameter that each part is of.

    Raises:
        ValueError: there is none, it is of another optimizer or damaged, or its parameters cannot
            be told apart; names keys and indices.
    """
    try:
        return _open(source)
    except ValueError as error:
        raise ValueError(
            f"{source.checkpoint.path}: its optimizer cannot be converted: {error}; leave "
            "--with-optimizer out to convert the weights alone"
        ) from None


def _open(source: TorchSource) -> TorchOptimizer:
    state, groups = read_state(source.checkpoint.optimizer)
    indices = [index for group in groups for index in group["params"]]
    shapes = [[state[i]["exp_avg"].shape if i in state else None for i in group["params"]]
              for group in groups]  # fmt: skip
    order = named_parameters(source.table, source.config)
    dealt = assign(groups, shapes, order, source.table)
    index_of = dict(zip(itertools.chain.from_iterable(dealt), indices, strict=True))
    group_of = {key: number for number, keys in enumerate(dealt) for key in keys}
    slots = {key: state[index] for key, index in index_of.items() if index in state}
    count, step = updates(slots), _training_step(source.checkpoint.other)
    records = [settings(number, group) | {"parameters": []} for number, group in enumerate(groups)]
    without = []
    for leaf in source.leaves:
        keys = [part.key for part in leaf.parts]
        _check_alike(leaf, {key: f"is in group {group_of[key]}" for key in keys})
        _check_alike(leaf, {key: "has moments" if key in slots else "has none" for key in keys})
        records[group_of[keys[0]]]["parameters"].append(leaf.path)
        if keys[0] not in slots:
            without.append(leaf.path)
            continue
        for name in MOMENTS:
            dtypes = {key: slots[key][name].torch_dtype for key in keys}
            _check_alike(leaf, {key: f"has its {name} in {dtypes[key]}" for key in keys})
    if faults := state_faults(count, records, step):
        raise ValueError("; ".join(faults))
    tensors = {f"{name}.{key}": slots[key][name] for name in MOMENTS for key in slots}
    rules = [
        _moment_leaf(leaf, name)
        for name in MOMENTS
        for leaf in source.leaves
        if leaf.path not in without
    ]
    checkpoint = replace(source.checkpoint, tensors=tensors, optimizer=None)
    return TorchOptimizer(
        moments=replace(source, checkpoint=checkpoint, leaves=rules),
        count=count,
        groups=tuple(records),
        step=step,
        without=tuple(without),
    )


def _check_alike(leaf: Leaf, words: Mapping[str, str]) -> None:
    """Refuses a stacked parameter whose tensors differ in what it can have once only."""
    first, *others = words
    if other := next((key for key in others if words[key] != words[first]), None):
        raise ValueError(
            f"{first} {words[first]}, {other} {words[other]}, but they are parts of one parameter, "
            f"{leaf.path}"
        )


def _training_step(other: Mapping[str, object]) -> int | None:
    steps = [step for name in STEP_KEYS if type(step := other.get(name)) is int]
    if len(set(steps)) > 1:
        raise ValueError(f"{' and '.join(STEP_KEYS)} of the checkpoint differ: {steps}")
    return steps[0] if steps else None


def _moment_leaf(leaf: Leaf, name: str) -> Leaf:
    """The parameter's rule for one of its moments."""
    parts = tuple(replace(part, key=f"{name}.{part.key}") for part in leaf.parts)
    return Leaf(f"{PATHS[name]}.{leaf.path}", leaf.shape, parts)


def moment_arrays(config: Config, optimizer: OptimizerState) -> dict[str, np.ndarray]:
    """Moments as torch has them: views by `exp_avg.<torch key>` and `exp_avg_sq.<torch key>`."""
    rules = leaves(TABLES[model_name(config)], config)
    both = (optimizer.first_moment, optimizer.second_moment)
    return {
        f"{name}.{key}": view
        for name, arrays in zip(MOMENTS, both, strict=True)
        for leaf in rules
        if leaf.path in arrays
        for key, view in disassemble(leaf, arrays[leaf.path])
    }


def torch_optimizer_state(
    config: Config,
    optimizer: OptimizerState,
    tensors: "Mapping[str, torch.Tensor] | None" = None,
) -> dict[str, Any]:
    """The state dict for a torch AdamW with the same groups over the original's parameters.

    Within a group the parameters stand in the order of `named_parameters()`. Where shapes alone
    would not tell them apart the groups carry torch's `param_names`, so that `open_optimizer` reads
    back whatever is written here.

    Args:
        config: the model's.
        optimizer: the state.
        tensors: `moment_arrays` as torch tensors; None to make them.

    Raises:
        ValueError: a parameter is in no group, or in several.
        ImportError: torch is not installed.
    """
    from convert.torch_io import from_numpy

    if tensors is None:
        views = moment_arrays(config, optimizer)
        tensors = {name: from_numpy(view) for name, view in views.items()}
    table = TABLES[model_name(config)]
    order = named_parameters(table, config)
    path_of = {part.key: leaf.path for leaf in leaves(table, config) for part in leaf.parts}
    keys = [[k for k in order if path_of[k] in group["parameters"]] for group in optimizer.groups]
    index_of = {key: index for index, key in enumerate(itertools.chain.from_iterable(keys))}
    if len(index_of) != len(order) or sum(map(len, keys)) != len(order):
        raise ValueError("the groups do not hold every parameter once")
    groups = []
    for group, of_group in zip(optimizer.groups, keys, strict=True):
        kept = {name: value for name, value in group.items() if name != "parameters"}
        kept |= {"betas": tuple(group["betas"]), "params": [index_of[key] for key in of_group]}
        groups.append(TORCH_DEFAULTS | kept)
    shapes = [[order[k] if f"exp_avg.{k}" in tensors else None for k in of] for of in keys]
    try:
        deal(order, shapes)
    except ValueError:
        groups = [group | {"param_names": of} for group, of in zip(groups, keys, strict=True)]
    state = {
        index: {
            "step": from_numpy(np.array(optimizer.count, np.float32)),  # torch counts up in place
            **{name: tensors[f"{name}.{key}"] for name in MOMENTS},
        }
        for key, index in index_of.items()
        if f"exp_avg.{key}" in tensors
    }
    return {"state": state, "param_groups": groups}


def training_checkpoint(
    config: Config, state_dict: Mapping[str, Any], optimizer: Mapping[str, Any], step: int | None
) -> dict[str, Any]:
    """A checkpoint in the layout that the originals' training scripts write.

    `model_args` holds the fields of the original's config class; what the original fixes in its
    code only where it is another number here.
    """
    constants = TABLES[model_name(config)].constants
    initial = {field.name: field.default for field in fields(config)}
    said = {
        name: value
        for name, value in asdict(config).items()
        if name not in CHOICES and not (name in constants and value == initial[name])
    }
    known = {} if step is None else {"step": step}
    return {"model": state_dict, "optimizer": optimizer, "model_args": said, **known}
