"""AdamW's state in a file beside a model's weights: optimizer.safetensors.

    first_moment.blocks.attention.wq     running mean of the gradient, shaped as the parameter
    second_moment.blocks.attention.wq    running mean of its square

The metadata holds as JSON what is no tensor: the number of updates, the groups of parameters with
their settings, and the training step. A parameter without moments has never been updated.
"""

import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxslm.safetensors_io import DTYPES, TensorSpec, map_tensors, write_tensors
from jaxslm.weights import map_folder

OPTIMIZER_FILE = "optimizer.safetensors"
FIRST, SECOND = "first_moment", "second_moment"
MAX_COUNT = 2**24  # torch counts in float32, exact so far
_FORMAT = {"format": "jaxslm-optimizer", "format_version": "1"}
_FLOATS = {DTYPES[name] for name in ("F64", "F32", "F16", "BF16")}


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """AdamW's state.

    Attributes:
        count: updates done; the next one is corrected for bias as number `count + 1`.
        first_moment: running means of the gradient by parameter path, shaped as the parameter.
        second_moment: running means of its square, of the same parameters.
        groups: for each group `parameters` (their paths), `lr`, `betas`, `eps`, `weight_decay`,
            and what torch keeps beside these. Every parameter is in one group.
        step: the training step, where it is known.
    """

    count: int
    first_moment: Mapping[str, np.ndarray]
    second_moment: Mapping[str, np.ndarray]
    groups: tuple[Mapping[str, Any], ...]
    step: int | None


def map_optimizer(folder: Path) -> OptimizerState | None:
    """Maps the optimizer state of a model folder; None where it has no optimizer.safetensors.

    Returns:
        The state, its arrays read-only and in the file until they are used.

    Raises:
        ValueError: the file is damaged or does not fit the folder's parameters; lists all that is
            wrong.
        OSError: it cannot be read.
    """
    path = folder / OPTIMIZER_FILE
    if not path.exists():
        return None
    parameters = {name: array.shape for name, array in map_folder(folder)[1].items()}
    tensors, metadata = map_tensors(path)
    state = _read_state(path, metadata)
    faults = state_faults(state.get("count"), state.get("groups"), state.get("step"))
    if not faults:
        faults = _group_faults(state["groups"], parameters) + _tensor_faults(tensors, parameters)
    if faults:
        raise ValueError(f"{path} does not fit the model beside it:\n  " + "\n  ".join(faults))
    return OptimizerState(
        count=state["count"],
        first_moment=_under(FIRST, tensors),
        second_moment=_under(SECOND, tensors),
        groups=tuple(state["groups"]),
        step=state.get("step"),
    )


def write_optimizer(
    path: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], np.ndarray],
    *,
    count: int,
    groups: Sequence[Mapping[str, Any]],
    step: int | None,
) -> None:
    """Writes optimizer.safetensors, one tensor in memory at a time (see `write_tensors`).

    Args:
        path: new file.
        specs: tensors `first_moment.<parameter path>` and `second_moment.<parameter path>`.
        read: gives the array of such a name.
        count: as in `OptimizerState`.
        groups: as in `OptimizerState`; every parameter of the model is in one of them.
        step: as in `OptimizerState`.

    Raises:
        ValueError: the state is none that `map_optimizer` would read; lists all that is wrong.
    """
    faults = state_faults(count, groups, step)
    if not faults:
        listed = {name for group in groups for name in group["parameters"]}
        faults = [
            f"{name} is the moment of no parameter in a group"
            for name in specs
            if name.partition(".")[2] not in listed
        ]
    if faults:
        raise ValueError("the optimizer's state cannot be written:\n  " + "\n  ".join(faults))
    state = {"kind": "adamw", "count": count, "groups": list(groups), "step": step}
    write_tensors(path, specs, read, _FORMAT | {"state": json.dumps(state, sort_keys=True)})


def state_faults(count: object, groups: object, step: object) -> list[str]:
    """What is wrong with a state's count, groups and step, each looked at by itself."""
    found = []
    if type(count) is not int or not 1 <= count <= MAX_COUNT:
        found.append(f"count is {_short(count)}, expected the updates done, 1 to {MAX_COUNT:,}")
    if step is not None and (type(step) is not int or step < 0):
        found.append(f"step is {_short(step)}, expected a training step, 0 or more, or none")
    if not isinstance(groups, list | tuple) or not all(isinstance(one, Mapping) for one in groups):
        return [*found, f"groups are {_short(groups)}, expected a list of objects"]
    names: Counter[str] = Counter()
    for number, group in enumerate(groups):
        for name in ("lr", "eps", "weight_decay"):
            if not _within(group.get(name), math.inf):
                found.append(
                    f"{name} of group {number} is {_short(group.get(name))}, expected a finite "
                    "number, 0 or more"
                )
        betas = group.get("betas")
        pair = betas if isinstance(betas, list | tuple) and len(betas) == 2 else (None,)
        if not all(_within(beta, 1.0) for beta in pair):
            found.append(
                f"betas of group {number} are {_short(betas)}, expected two numbers of 0 up to 1"
            )
        paths = group.get("parameters")
        if not isinstance(paths, list | tuple) or not all(type(path) is str for path in paths):
            found.append(f"parameters of group {number} are {_short(paths)}, expected their paths")
        else:
            names.update(paths)
    return found + [
        f"{name!r:.120} is in the groups {n} times" for name, n in names.items() if n > 1
    ]


def _read_state(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The JSON in the metadata, of a format and kind that we know."""
    for name, expected in _FORMAT.items():
        if metadata.get(name) != expected:
            raise ValueError(
                f"{path} has {name} {_short(metadata.get(name))}; this jaxslm reads {expected!r}"
            )
    try:
        state = json.loads(metadata.get("state", ""))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged: the state in its header is not JSON") from None
    if not isinstance(state, dict) or state.get("kind") != "adamw":
        kind = state.get("kind") if isinstance(state, dict) else state
        raise ValueError(f"{path} holds the state of {_short(kind)}; this jaxslm reads 'adamw'")
    return state


def _group_faults(groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]) -> list[str]:
    listed = {name for group in groups for name in group["parameters"]}
    return [f"{name} is in no group" for name in parameters if name not in listed] + [
        f"{name!r:.120} is in a group, but no parameter"
        for name in sorted(listed - parameters.keys())
    ]


def _tensor_faults(
    tensors: Mapping[str, np.ndarray], parameters: Mapping[str, tuple[int, ...]]
) -> list[str]:
    found = [] if tensors else ["it holds no moments"]
    for name, array in tensors.items():
        moment, _, parameter = name.partition(".")
        if moment not in (FIRST, SECOND) or parameter not in parameters:
            found.append(f"unexpected {name!r:.120} {array.shape}")
        elif array.shape != parameters[parameter]:
            found.append(f"{name} has shape {array.shape}, expected {parameters[parameter]}")
        elif array.dtype not in _FLOATS:
            found.append(f"{name} is {array.dtype}, expected a float dtype")
    lone = _under(FIRST, tensors).keys() ^ _under(SECOND, tensors).keys()
    return found + [f"{name!r:.120} has one moment and not the other" for name in sorted(lone)]


def _under(moment: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of one moment by parameter path."""
    prefix = f"{moment}."
    return {
        name.removeprefix(prefix): array
        for name, array in tensors.items()
        if name.startswith(prefix)
    }


def _within(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < limit


def _short(value: object) -> str:
    """A value from a file, cut to some length, control characters escaped."""
    return reprlib.repr(value)
