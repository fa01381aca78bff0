"""Checks that every model config runs when it is built."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

DTYPES = ("float32", "bfloat16", "float64")


def check_types(config: Any) -> None:
    """Refuses a field whose value is not of its annotated type (bool is no int; int is a float).

    Raises:
        TypeError: naming the field, what was expected and what came.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        allowed = get_args(hints[field.name]) or (hints[field.name],)
        if type(value) is int and float in allowed:
            object.__setattr__(config, field.name, float(value))
        elif type(value) not in allowed:
            names = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
            raise TypeError(f"{field.name} must be {names}, got {value!r}")


def check_positive(config: Any, *names: str) -> None:
    """Refuses a listed field that is not above zero and finite.

    Raises:
        ValueError: naming the field and the value.
    """
    for name in names:
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{name} must be above zero, got {getattr(config, name)}")


def check_choice(config: Any, name: str, choices: tuple[str, ...]) -> None:
    """Refuses a field that is not one of `choices`.

    Raises:
        ValueError: naming the field, the choices and the value.
    """
    if getattr(config, name) not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {getattr(config, name)!r}")


def check_divides(config: Any, part: str, whole: str) -> None:
    """Refuses a config in which field `part` does not divide field `whole`.

    Raises:
        ValueError: naming both fields and their values.
    """
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(
            f"{whole} {getattr(config, whole)} is not divisible by {part} {getattr(config, part)}"
        )
