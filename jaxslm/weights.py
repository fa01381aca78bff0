"""The model folder: config.json and model.safetensors, in our own parameter names. No torch.

config.json says {"format": "jaxslm", "format_version": 3, "model": ..., "config": {...}};
model.safetensors holds one tensor a parameter, named by its path in the module
("blocks.attention.wq"), each in the dtype that it was saved with.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxslm.files import atomic_output
from jaxslm.models import MODELS, Config, Model, model_name
from jaxslm.safetensors_io import TensorSpec, map_tensors, write_tensors
from jaxslm.sharding import plan
from jaxslm.tokenizer import FILE as TOKENIZER_FILE

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT_VERSION = 3
OWNED_FILES = (CONFIG_FILE, WEIGHTS_FILE, "parity.json", "optimizer.safetensors", TOKENIZER_FILE)


def load(path: str | Path, *, mesh: Mesh | None = None) -> Model:
    """Loads a model folder.

    Args:
        path: the folder.
        mesh: of `jaxslm.sharding.make_mesh`, to lay the parameters out on; None for JAX's default
            device.

    Returns:
        The model, its parameters in the dtypes of the file.

    Raises:
        ValueError: the folder is not one of ours, is damaged, or does not fit its config or the
            mesh; or a parameter is float64 and JAX's x64 mode is off.
        OSError: it cannot be read.
    """
    config, arrays = map_folder(Path(path))
    if mesh is None:
        return from_arrays(config, arrays)
    return from_arrays(config, place(arrays, mesh)[0])


def place(
    arrays: Mapping[str, np.ndarray], mesh: Mesh
) -> tuple[dict[str, jax.Array], tuple[str, ...]]:
    """Lays parameters out on a mesh, in their dtypes.

    Returns:
        The parameters, and words on those that could not be split.

    Raises:
        ValueError: they do not fit the mesh, or JAX would narrow a dtype.
    """
    for name, array in arrays.items():
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise ValueError(_would_narrow(name, array.dtype))
    layout = plan({name: array.shape for name, array in arrays.items()}, mesh)
    placed = {
        name: jax.device_put(array, NamedSharding(mesh, layout.specs[name]))
        for name, array in arrays.items()
    }
    return placed, layout.notes


def _would_narrow(name: str, dtype: Any) -> str:
    return (
        f"{name} is {dtype}, which JAX holds only in its x64 mode: set jax_enable_x64, or convert "
        "with --dtype float32"
    )


def save(model: Model, path: str | Path, *, overwrite: bool = False) -> None:
    """Saves a model folder, which appears whole or not at all.

    Args:
        model: the model; parameters keep their dtypes.
        path: folder to create.
        overwrite: replace an earlier model folder, all but its tokenizer.json.

    Raises:
        FileExistsError: the folder exists and may not be replaced.
    """
    earlier = Path(path) / TOKENIZER_FILE
    arrays = {name: np.asarray(value) for name, value in to_arrays(model).items()}
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
    with atomic_output(Path(path), overwrite=overwrite, owns=OWNED_FILES) as folder:
        write_folder(folder, model.config, specs, arrays.__getitem__)
        if earlier.is_file():
            shutil.copyfile(earlier, folder / TOKENIZER_FILE)


def is_model_folder(path: Path) -> bool:
    """Whether a path is a folder whose config.json says that it is one of ours."""
    try:
        text = (path / CONFIG_FILE).read_text()
        return json.loads(text).get("format") == "jaxslm"
    except (OSError, ValueError, RecursionError, AttributeError):
        return False


def map_folder(path: Path) -> tuple[Config, dict[str, np.ndarray]]:
    """Reads a model folder's config and maps its parameters, checked against each other.

    Raises:
        ValueError: as `load`.
        OSError: as `load`.
    """
    config = _read_config(path / CONFIG_FILE)
    arrays, _ = map_tensors(path / WEIGHTS_FILE)
    wanted = {name: leaf.shape for name, leaf in abstract_parameters(config).items()}
    found = {name: array.shape for name, array in arrays.items()}
    faults = [f"missing {name} {wanted[name]}" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"unexpected {name} {found[name]}" for name in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{name} has shape {found[name]}, expected {wanted[name]}"
        for name in sorted(wanted.keys() & found.keys())
        if wanted[name] != found[name]
    ]
    faults += [
        f"{name} is {array.dtype}, expected a float dtype"
        for name, array in arrays.items()
        if not jnp.issubdtype(array.dtype, jnp.floating)
    ]
    if faults:
        raise ValueError(f"{path} does not fit its config.json:\n  " + "\n  ".join(faults))
    return config, arrays


def write_folder(
    folder: Path,
    config: Config,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], np.ndarray],
) -> None:
    """Creates a model folder, streaming one parameter at a time (see `write_tensors`)."""
    folder.mkdir()
    write_tensors(folder / WEIGHTS_FILE, specs, read, {"format": "jaxslm"})
    content = {
        "format": "jaxslm",
        "format_version": FORMAT_VERSION,
        "model": model_name(config),
        "config": asdict(config),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def abstract_parameters(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and initial dtypes of a config's parameters by path, without making them."""
    return _flatten(nnx.state(_abstract_model(config)))


def to_arrays(model: Model) -> dict[str, jax.Array]:
    """A model's parameters by path."""
    return _flatten(nnx.state(model))


def from_arrays(config: Config, arrays: Mapping[str, np.ndarray | jax.Array]) -> Model:
    """A model with the given parameters, which keep their dtypes.

    Raises:
        ValueError: the names or shapes are not the config's, or JAX would narrow a dtype.
    """
    graphdef, state = nnx.split(_abstract_model(config))
    flat = nnx.to_flat_state(state)
    names = {".".join(map(str, path)) for path, _ in flat}
    if names != set(arrays):
        raise ValueError(f"parameters {sorted(names ^ set(arrays))} are missing or unexpected")
    filled = []
    for path, leaf in flat:
        name = ".".join(map(str, path))
        array = jnp.asarray(arrays[name])
        if array.shape != leaf.shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {leaf.shape}")
        if array.dtype != arrays[name].dtype:
            raise ValueError(_would_narrow(name, arrays[name].dtype))
        filled.append((path, leaf.replace(array)))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _abstract_model(config: Config) -> Model:
    """The model with shapes in place of arrays."""
    build = MODELS[model_name(config)][1]
    return nnx.eval_shape(lambda: build(config, key=jax.random.key(0)))  # type: ignore[arg-type]


def _flatten(state: nnx.State) -> dict[str, Any]:
    """State leaves by dotted path."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def _read_config(path: Path) -> Config:
    """The config of a model folder, strictly: every field known, of its type, none missing."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} is not a model folder: it has no {path.name} (`jaxslm convert` makes "
            "one of a torch checkpoint, `jaxslm export` of a training run)"
        )
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != "jaxslm":
        raise ValueError(
            f"{path} is no model's: `jaxslm convert` makes a model folder of a torch checkpoint, "
            "`jaxslm export` of a training run"
        )
    if content.get("format_version") not in range(1, FORMAT_VERSION + 1):
        raise ValueError(
            f"{path} has format_version {content.get('format_version')!r}; "
            f"this jaxslm reads 1 to {FORMAT_VERSION}"
        )
    if content.get("model") not in list(MODELS) or not isinstance(content.get("config"), dict):
        raise ValueError(f"{path} must name a model of {', '.join(MODELS)} and its config")
    kind = MODELS[content["model"]][0]
    values = dict(content["config"])
    if content["format_version"] < 3:
        values.setdefault("attention", "auto")  # versions 1 and 2 had no choice
    missing = [field.name for field in fields(kind) if field.name not in values]
    if missing:
        raise ValueError(f"{path} lacks the config fields {', '.join(missing)}")
    if content["format_version"] == 1 and isinstance(values["remat"], bool):
        values["remat"] = "full" if values["remat"] else "none"  # the policies of version 1
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
