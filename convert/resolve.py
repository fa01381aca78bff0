"""The config of a torch checkpoint: from what its files say, what its shapes tell, what one passes.

Nothing is guessed: a field that no source gives is an error, and so are two that disagree.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

import numpy as np

from convert.checkpoint.lazy_tensor import printable
from convert.rules import Table, faults
from jaxslm.models import MODELS, Config

# Ours to choose: no torch checkpoint speaks of them.
CHOICES = ("dtype", "unroll", "remat", "attention", "window_mode", "decay_gradient")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config and where each field came from.

    Attributes:
        values: fields that are known.
        origins: field -> words for its source.
        unknown: fields that no source gives.
        conflicts: disagreements between sources, in words.
        unused: source -> fields in it that the model does not have.
        fitting_preset: name of a preset whose shapes are exactly the checkpoint's.
    """

    table: Table
    values: dict[str, Any]
    origins: dict[str, str]
    unknown: tuple[str, ...]
    conflicts: tuple[str, ...]
    unused: dict[str, tuple[str, ...]]
    fitting_preset: str | None

    def config(self) -> Config:
        """The config.

        Raises:
            ValueError: a field is unknown, or sources disagree, or the values make no model.
        """
        if self.conflicts:
            raise ValueError("the sources disagree:\n  " + "\n  ".join(self.conflicts))
        if self.unknown:
            example = " ".join(f"{name}=..." for name in self.unknown)
            hint = (
                f"; the shapes fit --preset {self.fitting_preset}, if that is what was trained"
                if self.fitting_preset
                else ""
            )
            raise ValueError(
                f"the checkpoint does not say {', '.join(self.unknown)} and its weights cannot "
                f"tell: pass --config {example}{hint}"
            )
        try:
            return MODELS[self.table.model][0](**self.values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the checkpoint's config makes no model: {error}") from None


def resolve(
    table: Table,
    shapes: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, Mapping[str, Any]],
    *,
    overrides: tuple[str, ...] = (),
    preset: str | None = None,
) -> Resolved:
    """Brings all that is said of a checkpoint's config together.

    Args:
        table: the model's table.
        shapes: torch shapes by key.
        sources: fields by source, from the checkpoint's files.
        overrides: "field=value" strings of the command line.
        preset: a name in table.presets.

    Raises:
        ValueError: an override or preset cannot be understood. Disagreements and gaps are only
            reported in the result, for `Resolved.config` to refuse.
    """
    kind = MODELS[table.model][0]
    names = [field.name for field in fields(kind)]
    asked = {name for name in names if name not in CHOICES}
    said: dict[str, Mapping[str, Any]] = {}
    if overrides:
        said["--config"] = parse_overrides(kind, overrides)
    if preset is not None:
        said[f"preset {preset}"] = _preset_values(table, preset, asked)
    unused = {}
    for source, given in sources.items():
        said[source] = {name: given[name] for name in given if name in names}
        if left := tuple(printable(str(name)) for name in given if name not in names):
            unused[source] = left
    known = {name: value for given in reversed(said.values()) for name, value in given.items()}
    said["the tensors' shapes"] = table.facts(shapes, known)
    defaults = {field.name: field.default for field in fields(kind)}
    said["constant of the original"] = {
        name: defaults[name]
        for name in table.constants
        if not any(name in given for given in said.values())
    }

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    conflicts = []
    for source, given in said.items():
        for name, value in given.items():
            if name not in values:
                values[name], origins[name] = value, source
            elif not _same(values[name], value):
                conflicts.append(
                    f"{name} is {printable(repr(values[name]))} by {origins[name]}, "
                    f"but {printable(repr(value))} by {source}"
                )
            elif source not in origins[name]:
                origins[name] += f", {source}"
    unknown = tuple(name for name in names if name in asked and name not in values)
    for name in names:
        if name in CHOICES and name not in values:
            values[name], origins[name] = defaults[name], "default"
    return Resolved(
        table=table,
        values={name: values[name] for name in names if name in values},
        origins={name: origins[name] for name in names if name in origins},
        unknown=unknown,
        conflicts=tuple(conflicts),
        unused=unused,
        fitting_preset=_fitting_preset(table, shapes),
    )


def parse_overrides(kind: type, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Values of "field=value" strings, by the field's annotated type.

    Raises:
        ValueError: no such field (with the nearest names), or a value of another type.
    """
    hints = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
    values: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--config takes FIELD=VALUE, got {override!r}")
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=2) or list(hints)
            raise ValueError(f"--config {name}: no such field; did you mean {' or '.join(near)}?")
        if name in values:
            raise ValueError(f"--config gives {name} twice")
        values[name] = _parse(name, text, hints[name])
    return values


def _parse(name: str, text: str, allowed: tuple[type, ...]) -> Any:
    if type(None) in allowed and text.lower() in ("none", "null"):
        return None
    if bool in allowed and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, str):
        if kind in allowed:
            try:
                return kind(text)
            except ValueError:
                break
    wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in allowed)
    raise ValueError(f"--config {name} takes {wanted}, got {text!r}")


def _preset_values(table: Table, preset: str, asked: set[str]) -> dict[str, Any]:
    if preset not in table.presets:
        raise ValueError(
            f"no preset {preset!r} for {table.model}: the presets are {', '.join(table.presets)}"
        )
    return {name: getattr(table.presets[preset], name) for name in asked}


def _fitting_preset(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """A preset whose tensors have just these names and shapes."""
    dtypes = dict.fromkeys(shapes, np.dtype(np.float32))
    for name, config in table.presets.items():
        if not faults(table, config, shapes, dtypes):
            return name
    return None


def _same(a: Any, b: Any) -> bool:
    """Equal, and not a bool against a number; a window of 0 is none, as the original reads it."""
    a, b = (None if type(value) is int and value == 0 else value for value in (a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)
