"""Find the state dict, the config, the optimizer and the rest in what a torch file holds.

A raw state dict maps names to tensors. A training checkpoint is a dict that holds one under
"model", "state_dict" or "model_state_dict", beside the config (`model_args`, or a pickled config
object), the optimizer's state dict and numbers such as the step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from convert.checkpoint.lazy_tensor import CheckpointError, LazyTensor, printable
from convert.checkpoint.pickle_values import Global, PickledTensor, StandIn
from convert.checkpoint.torch_zip import TorchFile

STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_state")
CONFIG_KEYS = ("model_args", "config", "model_config", "cfg", "args", "hparams", "hyper_parameters")
WRAPPERS = ("_orig_mod", "module")  # of torch.compile; of DataParallel and DDP
LIBRARIES = ("numpy", "datetime", "collections", "torch")  # objects of these are no configs
MAX_DEPTH = 32
MAX_NODES = 200_000
MAX_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The parts of a checkpoint; the fields are those of `containers.Checkpoint`."""

    layout: str
    tensors: dict[str, LazyTensor]
    config_sources: dict[str, dict[str, object]]
    extras: dict[str, str]
    optimizer: object | None = None
    other: dict[str, object]


def contents_of_pickle(file: TorchFile) -> Contents:
    """Sort what a torch file holds.

    Raises:
        CheckpointError: there is no state dict in it, more than one, or a whole pickled module.
    """
    top = _top_level(file.root)
    key = _state_dict_key(top)
    state_dict = top if key is None else _mapping(top[key]) or {}
    tensors, unbound = _bind_state_dict(file, state_dict)
    rest = unbound if key is None else {name: v for name, v in top.items() if name != key}
    extras = (
        {} if key is None else {f"{key}.{describe(k)}": describe(v) for k, v in unbound.items()}
    )
    config_sources: dict[str, dict[str, object]] = {}
    other: dict[str, object] = {}
    optimizer = None
    for name, value in rest.items():
        label = printable(str(name))
        if optimizer is None and name in OPTIMIZER_KEYS and _mapping(value):
            optimizer = _Plain(file.tensor).convert(value)
            extras[label] = _describe_optimizer(optimizer)
        elif _is_config(name, value):
            source = label
            if isinstance(value, StandIn):
                source = f"pickled {printable(value.qualified_name)}"
            if source in config_sources:
                source += f' under "{label}"'
            config_sources[source] = _config_fields(file, value)
        else:
            number = _number(file, value) if isinstance(value, PickledTensor) else value
            if isinstance(number, bool | int | float | str) or value is None:
                other[label] = number
            extras[label] = describe(value if number is None else number)
    if not file.has_checksums:
        extras["checksums"] = "none in the file, so damage to weights cannot be noticed"
    return Contents(
        layout="raw state dict" if key is None else f'state dict under "{key}"',
        tensors=tensors,
        config_sources=config_sources,
        extras=extras,
        optimizer=optimizer,
        other=other,
    )


def strip_prefixes(
    tensors: dict[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Take the wrappers of torch.compile and DDP off every key, wherever in it they stand.

    Raises:
        CheckpointError: two keys become one, or nothing is left of a key; names all of them.
    """
    originals: dict[str, str] = {}
    stripped: set[str] = set()
    faults: list[str] = []
    for key in tensors:
        parts = key.split(".")
        stripped.update(part for part in parts if part in WRAPPERS)
        short = ".".join(part for part in parts if part not in WRAPPERS)
        if not short:
            faults.append(f"nothing is left of {printable(key)}")
        elif short in originals:
            faults.append(
                f"{printable(originals[short])} and {printable(key)} are both {printable(short)}"
            )
        originals.setdefault(short, key)
    if faults:
        listed = "; ".join(faults[:MAX_LISTED])
        raise CheckpointError(
            f"once {' and '.join(f'{part}.' for part in WRAPPERS if part in stripped)} is taken "
            f"off the keys, {listed}{' ...' if len(faults) > MAX_LISTED else ''}"
        )
    short_tensors = {short: tensors[key] for short, key in originals.items()}
    return short_tensors, tuple(f"{part}." for part in WRAPPERS if part in stripped)


def tensors_in(tree: object) -> Iterator[LazyTensor]:
    """Yield every tensor of a plain tree such as `Checkpoint.optimizer`."""
    if isinstance(tree, LazyTensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(branch)


def describe(value: object) -> str:
    """Return what `value` is, in a few words that are safe to print."""
    match value:
        case PickledTensor():
            return f"{value.dtype} tensor {list(value.shape)}"
        case str():
            return printable(value)
        case None | bool() | int() | float():
            return str(value)
        case dict():
            return f"dict of {len(value)}"
        case list() | tuple() | set() | frozenset():
            return f"{type(value).__name__} of {len(value)}"
        case bytes():
            return f"{len(value)} bytes"
        case Global():
            return f"the class or function {printable(value.qualified)}"
        case StandIn():
            return f"object of class {printable(value.qualified_name)}"
        case _:
            return type(value).__name__


def _mapping(value: object) -> dict[object, object] | None:
    """Return the entries of a dict, or of an object of an unknown subclass of dict."""
    if isinstance(value, StandIn) and value.entries:
        return value.entries
    return value if isinstance(value, dict) else None


def _top_level(root: object) -> dict[object, object]:
    _refuse_module(root)
    top = _mapping(root)
    if top is None:
        raise CheckpointError(f"holds one {describe(root)}; expected a state dict")
    return top


def _refuse_module(value: object) -> None:
    if isinstance(value, StandIn) and {"_parameters", "_modules"} <= value.fields.keys():
        raise CheckpointError(
            f"holds a whole pickled module, {printable(value.qualified_name)}; load it where its "
            "class can be imported and save `model.state_dict()` instead"
        )


def _state_dict_key(top: dict[object, object]) -> str | None:
    """Return the key the state dict lies under, None if `top` is one itself."""
    for key in STATE_DICT_KEYS:
        _refuse_module(top.get(key))
    keys = [key for key in STATE_DICT_KEYS if _holds_tensors(top.get(key))]
    if len(keys) > 1:
        raise CheckpointError(
            f"holds state dicts under {' and '.join(map(repr, keys))}; save a file with one of them"
        )
    if not keys and not any(isinstance(value, PickledTensor) for value in top.values()):
        names = ", ".join(printable(str(name), 40) for name in list(top)[:10]) or "nothing"
        raise CheckpointError(
            f"holds no state dict; at its top are: {names}. Expected tensors there, or under "
            f"{', '.join(STATE_DICT_KEYS)}"
        )
    return keys[0] if keys else None


def _holds_tensors(value: object) -> bool:
    entries = _mapping(value) or {}
    return any(isinstance(entry, PickledTensor) for entry in entries.values())


def _bind_state_dict(
    file: TorchFile, state_dict: dict[object, object]
) -> tuple[dict[str, LazyTensor], dict[object, object]]:
    """Return the tensors, and the entries that are none (`_extra_state` and such)."""
    tensors: dict[str, LazyTensor] = {}
    unbound: dict[object, object] = {}
    for key, value in state_dict.items():
        if isinstance(value, PickledTensor):
            if not isinstance(key, str):
                raise CheckpointError(f"key {describe(key)} of the state dict is not a string")
            try:
                tensors[key] = file.tensor(value)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {printable(key)}: {error}") from None
        elif key not in OPTIMIZER_KEYS and _nested_tensor(value):
            raise CheckpointError(
                f"entry {describe(key)} of the state dict is a {describe(value)} with tensors in "
                "it; expected one flat dict from names to tensors"
            )
        else:
            unbound[key] = value
    return tensors, unbound


def _nested_tensor(value: object) -> bool:
    """Look for a tensor inside lists, dicts and objects, each looked into once."""
    todo, seen = [value], set[int]()
    while todo:
        branch = todo.pop()
        if isinstance(branch, PickledTensor):
            return True
        if id(branch) in seen:
            continue
        seen.add(id(branch))
        if isinstance(branch, StandIn):
            todo += [branch.state, branch.entries, branch.elements]
        elif isinstance(branch, dict):
            todo += branch.values()
        elif isinstance(branch, list | tuple):
            todo += branch
    return False


def _is_config(name: object, value: object) -> bool:
    """Whether a top-level entry may hold the model's config."""
    if isinstance(value, StandIn):
        return value.qualified_name.partition(".")[0] not in LIBRARIES
    return name in CONFIG_KEYS and isinstance(value, dict)


def _config_fields(file: TorchFile, value: object) -> dict[str, object]:
    def plain_tensor(tensor: PickledTensor) -> object:
        number = _number(file, tensor)
        return describe(tensor) if number is None else number

    fields = value.fields | value.entries if isinstance(value, StandIn) else value
    plain = _Plain(plain_tensor).convert(fields)
    assert isinstance(plain, dict)
    return {str(field): setting for field, setting in plain.items()}


class _Plain:
    """Turns unpickled values into a tree of plain ones; a bomb of shared references is an error."""

    def __init__(self, on_tensor: Callable[[PickledTensor], object]) -> None:
        self.on_tensor = on_tensor
        self.nodes = 0

    def convert(self, value: object, depth: int = 0) -> object:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise CheckpointError(
                f"refused: an entry nests over {MAX_DEPTH} deep or has over {MAX_NODES:,} parts; "
                "save `model.state_dict()` alone"
            )
        match value:
            case PickledTensor():
                return self.on_tensor(value)
            case None | bool() | int() | float() | str():
                return value
            case dict():
                return {
                    key if isinstance(key, str | int | float | None) else describe(key): (
                        self.convert(entry, depth + 1)
                    )
                    for key, entry in value.items()
                }
            case list():
                return [self.convert(entry, depth + 1) for entry in value]
            case tuple():
                return tuple(self.convert(entry, depth + 1) for entry in value)
            case Global():
                return value.qualified
            case StandIn() if value.fields or value.entries:
                return self.convert(value.fields | value.entries, depth + 1)
            case _:
                return describe(value)


def _number(file: TorchFile, pickled: PickledTensor) -> bool | int | float | None:
    """Read a tensor without dimensions; None for any other."""
    if pickled.shape or pickled.dtype.startswith("complex"):
        return None
    array = file.tensor(pickled).read()
    return array.item() if array.dtype.kind in "biu" else array.astype(np.float64).item()


def _describe_optimizer(optimizer: object) -> str:
    """Return for example "32 parameters, 64 moment tensors, 26.0 MB"."""
    entries = optimizer if isinstance(optimizer, dict) else {}
    groups, state = entries.get("param_groups"), entries.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        return describe(optimizer)
    parameters = [group.get("params") for group in groups if isinstance(group, dict)]
    count = sum(len(indices) for indices in parameters if isinstance(indices, list))
    moments = [
        value
        for slots in state.values()
        if isinstance(slots, dict)
        for name, value in slots.items()
        if isinstance(value, LazyTensor) and name != "step"
    ]
    megabytes = sum(moment.nbytes for moment in moments) / 1e6
    return f"{count} parameters, {len(moments)} moment tensors, {megabytes:.1f} MB"
