"""The conversion table: one rule a parameter, read in both directions.

A rule pairs a torch key with a JAX path through an einops pattern. Indices in braces in the key are
axes that are stacked: "h.{l}.q.weight" with "(n h) d -> l d n h" says that layer l's [N*H, D]
matrix, reshaped and transposed, is slice l of one [L, D, N, H] parameter. Only reshapes, transposes
and stacking happen here, so both directions keep every byte.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import einops
import numpy as np

from convert.casting import FLOATS
from convert.checkpoint.lazy_tensor import printable
from convert.transpose import copy_into
from jaxslm.models import Config


@dataclass(frozen=True)
class Rule:
    """One parameter: torch key, JAX path, einops pattern, and the config field that it needs."""

    torch: str
    jax: str
    pattern: str
    when: str | None = None  # the rule holds where this config field is true


@dataclass(frozen=True)
class Ignored:
    """Keys that hold no parameter: a regular expression and, where it matters, the rank."""

    pattern: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """All there is to know of one model's torch side.

    Attributes:
        model: key of jaxslm.models.MODELS.
        version: raised when a rule changes meaning; recorded in parity.json.
        rules: every parameter.
        ties: alias key -> key of the rule that owns the shared tensor.
        ignored: buffers.
        sizes: axis letters of the patterns -> their sizes under a config.
        facts: config fields that the tensors' shapes tell, given the fields already known.
        constants: config fields that the original fixes in its code.
        presets: named configs of the original.
    """

    model: str
    version: int
    rules: tuple[Rule, ...]
    ties: Mapping[str, str]
    ignored: tuple[Ignored, ...]
    sizes: Callable[[Any], dict[str, int]]
    facts: Callable[[Mapping[str, tuple[int, ...]], Mapping[str, Any]], dict[str, Any]]
    constants: tuple[str, ...]
    presets: Mapping[str, Config]


@dataclass(frozen=True)
class Part:
    """One torch tensor's place in a JAX parameter."""

    key: str
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]
    forward: str  # einops pattern torch -> slice
    backward: str
    axes: Mapping[str, int]


@dataclass(frozen=True)
class Leaf:
    """One JAX parameter and the torch tensors that fill it."""

    path: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def leaves(table: Table, config: Config) -> list[Leaf]:
    """The table's rules under a config."""
    sizes = table.sizes(config)
    active = [rule for rule in table.rules if rule.when is None or getattr(config, rule.when)]
    return [_leaf(rule, sizes) for rule in active]


def _leaf(rule: Rule, sizes: Mapping[str, int]) -> Leaf:
    left, right = (side.strip() for side in rule.pattern.split("->"))
    stacked = re.findall(r"{(\w+)}", rule.torch)
    order = right.split()
    inner = " ".join(axis for axis in order if axis not in stacked)
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", left)]
    shape = tuple(int(np.prod([_size(axis, sizes) for axis in group])) for group in groups)
    names = {axis for group in groups for axis in group if axis != "1"}
    axes = {axis: sizes[axis] for axis in sorted(names)}
    parts = []
    for indices in itertools.product(*(range(sizes[axis]) for axis in stacked)):
        at = dict(zip(stacked, indices, strict=True))
        index = tuple(at.get(axis, slice(None)) for axis in order)
        key = rule.torch.format(**at)
        parts.append(Part(key, index, shape, f"{left} -> {inner}", f"{inner} -> {left}", axes))
    return Leaf(rule.jax, tuple(sizes[axis] for axis in order), tuple(parts))


def layer_count(keys: Iterable[str], prefix: str) -> int:
    """How many numbered items follow a prefix ("h." -> h.0, h.1, ...): the highest number and one.

    Where numbers are missing on a scale that no model has, the count of those present.
    """
    numbers = {int(found[1]) for key in keys if (found := re.match(rf"{prefix}(\d{{1,9}})\.", key))}
    highest = max(numbers, default=-1) + 1
    return highest if highest <= 4 * len(numbers) else len(numbers)


def kv_heads(rows: int, width: int, heads: Any, *, stated: bool) -> int | None:
    """How many key-value heads a key projection of `rows` rows holds, under `heads` query heads.

    Where these do not go together, None if the files state a number; else the nearest, so that the
    user is told what does not fit and not asked for one more field.
    """
    if type(heads) is not int or heads < 1 or width < 1:
        return None
    fits = width % heads == 0 and rows % (width // heads) == 0
    return max(1, rows * heads // width) if fits or not stated else None


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return 1 if axis == "1" else sizes[axis]


def assemble(
    leaf: Leaf, read: Callable[[str], np.ndarray], dtype: np.dtype, *, pool: Executor
) -> np.ndarray:
    """One JAX parameter from its torch tensors.

    Args:
        leaf: the parameter.
        read: gives the torch tensor of a key, in `dtype`; called in the pool's threads.
        dtype: of the result.
        pool: copies several tensors at once.

    Returns:
        A new array of the leaf's shape.
    """
    out = np.empty(leaf.shape, dtype)

    def fill(part: Part) -> None:
        slot = out[part.index] if part.index else out
        tensor = einops.rearrange(read(part.key), part.forward, **part.axes)
        copy_into(slot if isinstance(slot, np.ndarray) else out[(*part.index, None)], tensor)

    for _ in pool.map(fill, leaf.parts):
        pass
    return out


def disassemble(leaf: Leaf, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A parameter's torch tensors: views of `array` in the torch layout, not contiguous."""
    for part in leaf.parts:
        yield part.key, einops.rearrange(np.asarray(array[part.index]), part.backward, **part.axes)


def is_ignored(table: Table, key: str, shape: tuple[int, ...]) -> bool:
    """Whether a key is a declared buffer."""
    return any(
        re.fullmatch(rule.pattern, key) and rule.rank in (None, len(shape))
        for rule in table.ignored
    )


def faults(
    table: Table,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, np.dtype],
    *,
    mixed: bool = False,
) -> list[str]:
    """All that keeps a set of torch tensors from being this model; empty if nothing does.

    Either key of a tied pair will do. Tensors that are stacked must have one dtype, unless `mixed`.
    """
    found: list[str] = []
    taken: set[str] = set()
    owners = {owner: alias for alias, owner in table.ties.items()}
    for leaf in leaves(table, config):
        kinds = set()
        for part in leaf.parts:
            names = [part.key] + ([owners[part.key]] if part.key in owners else [])
            present = [name for name in names if name in shapes]
            taken.update(names)
            kinds.update(dtypes[name] for name in present[:1])
            if not present:
                found.append(f"missing     {' or '.join(names)}  {list(part.shape)}")
            for name in present:
                if shapes[name] != part.shape:
                    found.append(
                        f"mis-shaped  {name}  {list(shapes[name])}, expected {list(part.shape)}"
                    )
                if dtypes[name] not in FLOATS.values():
                    found.append(
                        f"not a float {name}  is {dtypes[name]}: quantised or integer weights "
                        "cannot be converted; save the model in float32, bfloat16 or float16"
                    )
        if len(kinds) > 1 and kinds <= set(FLOATS.values()) and not mixed:
            found.append(
                f"mixed dtypes {' and '.join(sorted(map(str, kinds)))} in {leaf.path}, which "
                f"stacks {leaf.parts[0].key} and its like: pass --dtype to cast"
            )
    found += [
        f"unexpected  {printable(key)}  {list(shape)}"
        for key, shape in shapes.items()
        if key not in taken and not is_ignored(table, key, shape)
    ]
    return found


def torch_keys(table: Table, config: Config) -> list[str]:
    """Every torch key in the order of the original's state dict, aliases of tied tables last.

    The rules stand in that order; rules that share numbered modules are dealt out module by module.
    """
    sizes = table.sizes(config)
    active = [rule for rule in table.rules if rule.when is None or getattr(config, rule.when)]
    return _dealt([rule.torch for rule in active], sizes) + list(table.ties)


def _dealt(templates: list[str], sizes: Mapping[str, int]) -> list[str]:
    keys: list[str] = []
    for head, group in itertools.groupby(templates, lambda text: text.partition("}")[0]):
        same = list(group)
        if "{" not in head:
            keys += same
            continue
        axis = head.rpartition("{")[2]
        for index in range(sizes[axis]):
            keys += _dealt([text.replace(f"{{{axis}}}", str(index), 1) for text in same], sizes)
    return keys
