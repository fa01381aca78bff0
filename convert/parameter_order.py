"""Which parameter a torch optimizer means by its numbers.

Torch numbers parameters in the order in which an optimizer was given them, group after group, and
keeps no names. Every recipe of the originals hands over `named_parameters()`, whole or dealt to
groups, in its order; shapes then tell which parameter went to which group, or it is refused.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from convert.checkpoint.layout import WRAPPERS
from convert.checkpoint.lazy_tensor import printable
from convert.rules import Table, leaves, torch_keys
from jaxslm.models import Config

MAX_STATES = 2_000  # ways to have dealt the parameters so far, before shapes count as no help
_SAVE_NAMES = (
    "save the checkpoint with names, from an optimizer whose groups hold entries of "
    "model.named_parameters() (torch 2.6 or newer)"
)

Shape = tuple[int, ...]


def named_parameters(table: Table, config: Config) -> dict[str, Shape]:
    """Torch keys and shapes in the order of the original's `named_parameters()`, tied ones once."""
    shapes = {part.key: part.shape for leaf in leaves(table, config) for part in leaf.parts}
    return {key: shapes[key] for key in torch_keys(table, config) if key in shapes}


def assign(
    groups: Sequence[Mapping[str, Any]],
    shapes: Sequence[Sequence[Shape | None]],
    parameters: Mapping[str, Shape],
    table: Table,
) -> list[list[str]]:
    """The torch key of each parameter of each group: by name where there are names, else by shape.

    Args:
        groups: torch's param_groups.
        shapes: of the moments of each group's parameters; None for a parameter without.
        parameters: from `named_parameters`.
        table: the model's.

    Raises:
        ValueError: the groups do not hold the model's parameters, or could hold them in two ways.
    """
    held = sum(map(len, shapes))
    if held != len(parameters):
        raise ValueError(
            f"its groups hold {held} parameters, the model has {len(parameters)} (a tied table "
            "once): it is another model's, or was given only some of the parameters"
        )
    names = [_names(group, table) for group in groups]
    if None in names:
        return deal(parameters, shapes)
    dealt = [list(of_group or ()) for of_group in names]
    given = Counter(itertools.chain.from_iterable(dealt))
    if wrong := sorted(given.keys() ^ parameters.keys() | {k for k in given if given[k] > 1}):
        listed = ", ".join(map(printable, wrong[:5]))
        raise ValueError(f"the names in it are not the model's, each once: {listed}")
    for keys, of_group in zip(dealt, shapes, strict=True):
        for key, shape in zip(keys, of_group, strict=True):
            if shape not in (None, parameters[key]):
                raise ValueError(
                    f"the moments of {key} have the shape {list(shape)}, expected "
                    f"{list(parameters[key])}"
                )
        if keys != [key for key in parameters if key in set(keys)]:
            raise ValueError(f"{keys[0]} and its group are not in the order of named_parameters()")
    return dealt


def deal(
    parameters: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]
) -> list[list[str]]:
    """Deals parameters, in their order, to groups of known shapes, in the one way that fits.

    Args:
        parameters: key -> shape.
        groups: shapes of each group, as many in all as there are parameters; None fits any.

    Returns:
        The keys of each group.

    Raises:
        ValueError: there is no way, or more than one.
    """
    items = list(parameters.items())
    reached: dict[tuple[int, ...], list[int]] = {(0,) * len(groups): []}
    steps = []  # a parameter each: how many every group holds -> the groups it may have gone to
    for key, shape in items:
        following: dict[tuple[int, ...], list[int]] = {}
        for at in reached:
            for number, group in enumerate(groups):
                if at[number] < len(group) and group[at[number]] in (None, shape):
                    then = (*at[:number], at[number] + 1, *at[number + 1 :])
                    following.setdefault(then, []).append(number)
        if not following:
            raise ValueError(
                f"no group's next moments have the shape {list(shape)} of {key}: expected all in "
                f"the order of named_parameters(), whole or dealt to groups; {_SAVE_NAMES}"
            )
        if len(following) > MAX_STATES:
            raise ValueError(_ambiguous(key, shape, range(len(groups))))
        steps.append(following)
        reached = following
    at = tuple(map(len, groups))
    dealt: list[list[str]] = [[] for _ in groups]
    for (key, shape), following in zip(reversed(items), reversed(steps), strict=True):
        if len(following[at]) > 1:
            raise ValueError(_ambiguous(key, shape, following[at]))
        (number,) = following[at]
        dealt[number].append(key)
        at = (*at[:number], at[number] - 1, *at[number + 1 :])
    return [keys[::-1] for keys in dealt]


def _names(group: Mapping[str, Any], table: Table) -> list[str] | None:
    """The names that newer torch, or FSDP, keeps for a group's parameters, without wrappers."""
    names = group.get("param_names", group["params"])
    if not isinstance(names, list | tuple) or len(names) != len(group["params"]):
        raise ValueError("param_names is no list as long as params")
    if not all(type(name) is str for name in names):
        return None
    short = (".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names)
    return [table.ties.get(name, name) for name in short]


def _ambiguous(key: str, shape: Shape, groups: Sequence[int]) -> str:
    return (
        f"shapes do not tell which parameter is which: {key} {list(shape)} may be in group "
        f"{' or '.join(map(str, sorted(groups)))}; {_SAVE_NAMES}"
    )
