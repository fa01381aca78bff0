"""The state dict of torch's AdamW: that it is one, whole, and what it says.

{"state": {index: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [{"params": [index, ...],
"lr", "betas", "eps", "weight_decay", "amsgrad", ...}]}
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from convert.casting import FLOATS
from convert.checkpoint.layout import describe
from convert.checkpoint.lazy_tensor import LazyTensor, printable

MOMENTS = ("exp_avg", "exp_avg_sq")
SLOTS = {"step", *MOMENTS}

State = dict[int | str, dict[str, Any]]  # a parameter's index -> its slots
Groups = list[dict[str, Any]]


def read_state(tree: object) -> tuple[State, Groups]:
    """The two halves of the state dict; a parameter that was never updated has no entry in `state`.

    Args:
        tree: `Checkpoint.optimizer`.

    Raises:
        ValueError: it is no such state dict, of another optimizer, or damaged.
    """
    state, groups = _sections(tree)
    _check_slots(state, groups)
    _check_moments(state)
    return state, groups


def describe_optimizer(tree: object) -> str:
    """What an optimizer's state dict is, in a few words; or why it cannot be converted."""
    try:
        state, groups = read_state(tree)
        steps = {_number(slots["step"]) for slots in state.values()}
    except ValueError as error:
        return f"cannot be converted: {error}"
    counts = " or ".join(f"{count:,.10g}" for count in sorted(steps))
    sizes = " and ".join(str(len(group["params"])) for group in groups)
    return f"AdamW after {counts} updates, parameters in its groups: {sizes}"


def updates(slots: Mapping[str, Mapping[str, Any]]) -> int:
    """The updates done, the same for every parameter that has any.

    Args:
        slots: of each parameter by torch key.

    Raises:
        ValueError: they differ, or are no whole number.
    """
    counts = {key: _number(of_key["step"]) for key, of_key in slots.items()}
    ((common, _),) = Counter(counts.values()).most_common(1)
    if other := [f"{key} ({count:.10g})" for key, count in counts.items() if count != common]:
        raise ValueError(
            f"step is {common:.10g} for most parameters, but not for {_some(other)}: they were not "
            "updated equally often, and here one count is kept for all that have moments"
        )
    if common != int(common):
        raise ValueError(f"step is {common:.10g}, expected a whole number")
    return int(common)


def settings(number: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON has them, its parameters left out.

    Raises:
        ValueError: one is neither a number, a word, nor a list of these.
    """
    found = {name: _plain(v) for name, v in group.items() if name not in ("params", "param_names")}
    if odd := [name for name in found if type(name) is not str or name == "parameters"]:
        raise ValueError(f"group {number} has a field {describe(odd[0])}, expected torch's own")
    return found


def _sections(tree: object) -> tuple[State, Groups]:
    """The two halves of an optimizer's state dict, in the shape that torch gives them."""
    if tree is None:
        raise ValueError("the file holds none that can be read")
    entries = tree if isinstance(tree, dict) else {}
    state, groups = entries.get("state"), entries.get("param_groups")
    if not (
        isinstance(state, dict) and all(isinstance(slots, dict) for slots in state.values())
        and isinstance(groups, list) and groups
        and all(isinstance(one, dict) and isinstance(one.get("params"), list) for one in groups)
    ):  # fmt: skip
        raise ValueError(
            "expected what torch's optimizer.state_dict() gives, state by index and param_groups "
            f"with params; got {describe(tree)}"
        )
    listed = [index for group in groups for index in group["params"]]
    if bad := [index for index in (*listed, *state) if type(index) not in (int, str)]:
        raise ValueError(f"{describe(bad[0])} stands where a parameter's index is expected")
    if twice := [index for index, times in Counter(listed).items() if times > 1]:
        raise ValueError(f"its groups list parameter {_some(twice)} more than once")
    if extra := state.keys() - set(listed):
        raise ValueError(f"its state has parameter {_some(extra)}, which no group lists")
    return state, groups


def _check_slots(state: State, groups: Groups) -> None:
    """Refuses the state of anything but torch's AdamW."""
    slots = {name for one in state.values() for name in one}
    kind = None
    if "max_exp_avg_sq" in slots or any(group.get("amsgrad") for group in groups):
        kind = "AdamW with amsgrad"
    elif "momentum_buffer" in slots or not all("betas" in group for group in groups):
        kind = "SGD, Muon or another optimizer without betas"
    elif "state1" in slots:
        kind = "an 8-bit or other optimizer of bitsandbytes"
    elif state and slots != SLOTS:
        kind = f"an optimizer that keeps {_some(slots)} for a parameter"
    elif not all("amsgrad" in group for group in groups):
        kind = "RAdam, or AdamW of another library"
    elif any(g.get("decoupled_weight_decay") is False and g.get("weight_decay") for g in groups):
        kind = "Adam, whose weight decay goes through the gradient"
    if kind:
        raise ValueError(f"it is {kind}, and only torch's AdamW without amsgrad is known")
    if not state:
        raise ValueError("it has made no update yet, so that there is nothing to convert")
    if short := [index for index, one in state.items() if one.keys() != SLOTS]:
        raise ValueError(f"the state of parameter {_some(short)} is not whole: expected "
                         f"{_some(SLOTS)}")  # fmt: skip


def _check_moments(state: State) -> None:
    """Both moments of a parameter are tensors of floats, and of one shape."""
    for index, slots in state.items():
        for name in MOMENTS:
            kind = _kind(slots[name])
            if not isinstance(slots[name], LazyTensor) or slots[name].dtype not in FLOATS.values():
                raise ValueError(f"{name} of parameter {_some([index])} is {kind}, expected floats")
        one, other = (list(slots[name].shape) for name in MOMENTS)
        if one != other:
            raise ValueError(
                f"parameter {_some([index])} has an exp_avg {one}, but an exp_avg_sq {other}"
            )


def _plain(value: object) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | str) else _number(value)


def _number(value: object) -> int | float:
    """A plain number, or what a tensor without dimensions holds."""
    number = value
    if isinstance(value, LazyTensor) and not value.shape:
        number = value.read().item()
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 2**63:
        raise ValueError(f"{_kind(number)} stands where a finite number is expected")
    return number


def _kind(value: object) -> str:
    if isinstance(value, LazyTensor):
        return f"a {value.torch_dtype} tensor {list(value.shape)}"
    return describe(value)


def _some(things: Iterable[object]) -> str:
    shown = sorted(printable(str(thing)) for thing in things)
    return ", ".join(shown[:5]) + (" and others" if len(shown) > 5 else "")
