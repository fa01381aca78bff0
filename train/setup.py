"""What a run is built from: processes, mesh, data, the first state.

All that can be refused is refused here, before anything is compiled or written.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxslm.models import MODELS, Config, model_name
from jaxslm.optimizer_file import OptimizerState, map_optimizer
from jaxslm.sharding import BATCH, make_mesh, plan
from jaxslm.weights import abstract_parameters, map_folder, to_arrays
from train.batches import Batches, EvaluationBatches
from train.config import ClusterConfig, TrainConfig
from train.optimizer import is_decayed, learning_rate, with_moments
from train.step import TrainState, initial_state, partition
from train.tokens import TokenSet, open_tokens

# Fields in which a model folder may differ from the run that starts from it.
CHOICES = (
    "dtype", "unroll", "remat", "attention", "window_mode", "decay_gradient", "dropout",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Where everything lies.

    Attributes:
        mesh: the devices.
        state: a TrainState of shapes with shardings.
        batch: sharding of [A, B / A, T].
        notes: what could not be split.
    """

    mesh: Mesh
    state: TrainState
    batch: NamedSharding
    notes: tuple[str, ...]

    def notes_in_words(self) -> list[str]:
        """A line for each parameter that is whole on every device though an axis could cut it."""
        return [f"replicated, because it cannot be split: {note}" for note in self.notes]


def join_cluster(cluster: ClusterConfig) -> None:
    """Joins the other processes of the run, if there are any.

    Raises:
        OSError: they cannot be found or do not answer.
    """
    if cluster.coordinator is None and not cluster.distributed:
        return
    try:
        jax.distributed.initialize(cluster.coordinator, cluster.processes, cluster.process)
    except (RuntimeError, ValueError) as error:
        raise OSError(f"the processes of the run do not come together: {error}") from error


def make_layout(
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Layout:
    """The mesh, and what lies where on it.

    Args:
        config: the run's.
        optimizer: whose state lies with the parameters.
        devices: all of them by default.

    Raises:
        ValueError: the mesh, the batch and the model do not fit each other.
    """
    sizes = config.mesh
    mesh = make_mesh(
        sizes.data, sizes.fsdp, sizes.tensor, jax.devices() if devices is None else devices
    )
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = config.data.batch_size // config.accumulation
    if rows % parts:
        unit = parts * config.accumulation
        below = config.data.batch_size // unit * unit
        sizes_that_fit = ", ".join(str(size) for size in (below, below + unit) if size)
        raise ValueError(
            f"data.batch_size {config.data.batch_size} in {config.accumulation} microbatches of "
            f"{rows} cannot be split over data {mesh.shape['data']} x fsdp {mesh.shape['fsdp']} "
            f"devices: it must be a multiple of {unit}, such as {sizes_that_fit}"
        )
    shapes = abstract_parameters(config.model)
    layout = plan({path: leaf.shape for path, leaf in shapes.items()}, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    params = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, jnp.float32, sharding=NamedSharding(mesh, layout.specs[path])
        )
        for path, leaf in shapes.items()
    }
    state = jax.eval_shape(lambda p: initial_state(p, optimizer, config.trained_without), params)

    def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        like = params.get(str(getattr(path[-1], "key", ""))) if path else None
        same = like is not None and like.shape == leaf.shape
        sharding = like.sharding if like is not None and same else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return Layout(
        mesh=mesh,
        state=jax.tree.map_with_path(placed, state),
        batch=NamedSharding(mesh, PartitionSpec(None, BATCH, None)),
        notes=layout.notes,
    )


def new_state(
    config: TrainConfig, optimizer: optax.GradientTransformation, layout: Layout
) -> tuple[TrainState, list[str]]:
    """The state that a run starts with, and notes on it for the user.

    Raises:
        ValueError: the folder to start from does not fit the run.
        OSError: it cannot be read.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, layout.state)
    frozen = config.trained_without
    if config.init_from is None:
        build: Any = MODELS[model_name(config.model)][1]

        def draw(key: jax.Array) -> TrainState:
            return initial_state(to_arrays(build(config.model, key=key)), optimizer, frozen)

        with jax.set_mesh(layout.mesh):
            return jax.jit(draw, out_shardings=shardings)(jax.random.key(config.seed)), []
    model, arrays = map_folder(config.init_from)
    _check_same_model(config.init_from, model, config.model)
    dtypes = {str(array.dtype) for array in arrays.values()} - {"float32"}
    notes = [f"parameters in {', '.join(sorted(dtypes))} are trained in float32"] if dtypes else []
    params = {path: _place(arrays[path], leaf) for path, leaf in layout.state.params.items()}
    state = jax.jit(lambda p: initial_state(p, optimizer, frozen), out_shardings=shardings)(params)
    stored = map_optimizer(config.init_from)
    if stored is None:
        return state, [*notes, "no optimizer.safetensors there: the optimizer starts anew"]
    if config.optim.name != "adamw":
        raise ValueError(
            f"{config.init_from} holds AdamW's state: train with --optim.name adamw, or convert "
            "it without --with-optimizer"
        )
    trained, _ = partition(layout.state.params, frozen)
    if missing := sorted(trained.keys() - stored.first_moment.keys()):
        raise ValueError(
            f"the optimizer state in {config.init_from} has no moments of {', '.join(missing)}, "
            "which this run trains"
            + (": set --model.decay-gradient as_torch, or " if "blocks.attention.decay" in missing
               else ": ")
            + "convert without --with-optimizer"
        )  # fmt: skip
    if extra := sorted(stored.first_moment.keys() - trained.keys()):
        notes.append(f"moments of {', '.join(extra)} are dropped: this run does not train them")
    if stored.count >= config.steps:
        raise ValueError(
            f"{config.init_from} stands at update {stored.count}, and steps is {config.steps}: "
            "set --steps to where the run is to end"
        )
    notes += _differing_settings(config, stored)
    first, second = (
        {path: _place(moment[path], leaf) for path, leaf in trained.items()}
        for moment in (stored.first_moment, stored.second_moment)
    )
    count = np.int32(stored.count)
    state = replace(
        state,
        step=_place(count, layout.state.step),
        optimizer=with_moments(state.optimizer, first, second, lambda like: _place(count, like)),
    )
    return state, [*notes, f"goes on at update {stored.count} with AdamW's state"]


def _check_same_model(folder: Path, found: Config, wanted: Config) -> None:
    """Refuses a folder whose model is not the run's."""
    if type(found) is not type(wanted):
        raise ValueError(f"{folder} holds a {type(found).__name__}, the run trains "
                         f"a {type(wanted).__name__}")  # fmt: skip
    there, here = asdict(found), asdict(wanted)
    differing = [
        f"model.{name} is {here[name]!r}, there {there[name]!r}"
        for name in here
        if here[name] != there[name] and name not in CHOICES
    ]
    if differing:
        raise ValueError(
            f"{folder} holds another model than the run's:\n  " + "\n  ".join(differing)
        )


def _differing_settings(config: TrainConfig, stored: OptimizerState) -> list[str]:
    """Where the run's optimizer is not the one that made the state, in words.

    Raises:
        ValueError: it was made by going uphill.
    """
    if any(group.get("maximize") for group in stored.groups):
        raise ValueError(f"the optimizer state in {config.init_from} is of maximize=True, which "
                         "no run here does")  # fmt: skip
    optim = config.optim
    rate = float(np.asarray(learning_rate(optim, config.steps)(stored.count)))
    found: dict[str, list[str]] = {}
    for group in stored.groups:
        for path in group["parameters"]:
            here = {
                "betas": tuple(optim.betas), "eps": optim.eps, "lr": rate,
                "weight_decay": optim.weight_decay if is_decayed(path, optim) else 0.0,
            }  # fmt: skip
            for name, value in here.items():
                there = group.get(name)
                there = tuple(there) if isinstance(there, list) else there
                if there is not None and not np.allclose(there, value, rtol=0.05 * (name == "lr")):
                    words = (
                        f"optim.{name} was {there} for {{}} when the state was saved, is {value}"
                    )
                    found.setdefault(words, []).append(path)
    return [words.format(_listed(paths)) for words, paths in found.items()]


def _listed(paths: list[str]) -> str:
    """Some parameters in words."""
    return ", ".join(paths) if len(paths) < 4 else f"{paths[0]} and {len(paths) - 1} more"


def open_data(
    config: TrainConfig,
) -> tuple[Batches, EvaluationBatches | None, dict[str, str]]:
    """Training batches, the evaluation set if there is one, and fingerprints of both.

    Raises:
        ValueError: the data is damaged, too short, or of a larger vocabulary than the model's.
        OSError: it cannot be read.
    """
    data, vocabulary = config.data, config.model.vocab_size
    train = open_tokens(data.train, split="train")
    batches = Batches(
        train, batch_size=data.batch_size, sequence_length=data.sequence_length, order=data.order,
        seed=config.seed, vocab_size=vocabulary,
    )  # fmt: skip
    prints = {"train": fingerprint(train)}
    if data.val is None:
        return batches, None, prints
    val = open_tokens(data.val, split="val")
    evaluation = EvaluationBatches(
        val, batch_size=data.batch_size, sequence_length=data.sequence_length,
        vocab_size=vocabulary, limit=config.eval.batches,
    )  # fmt: skip
    return batches, evaluation, prints | {"val": fingerprint(val)}


def fingerprint(tokens: TokenSet) -> str:
    """A hash of every file's dtype, count, first and last 64 Ki tokens: where it lies is not in it.

    Files that are swapped, cut or in another order are noticed; a changed token within is not.
    """
    digest = hashlib.sha256()
    for file in tokens.files:
        ends = (
            file.read(0, min(file.count, 65536)),
            file.read(max(0, file.count - 65536), file.count),
        )
        digest.update(f"{file.dtype} {file.count}".encode())
        for end in ends:
            digest.update(end.tobytes())
    return digest.hexdigest()


class Placer:
    """Puts a global batch on the devices, each process its own rows.

    Args:
        config: the run's.
        sharding: of [A, B / A, T].

    Attributes:
        rows: rows of the global batch that this process needs.
    """

    def __init__(self, config: TrainConfig, sharding: NamedSharding):
        self._sharding = sharding
        a, b = config.accumulation, config.data.batch_size // config.accumulation
        self._shape = (a, b, config.data.sequence_length)
        spans = {
            (index[1].start or 0, b if index[1].stop is None else index[1].stop)
            for index in sharding.addressable_devices_indices_map(self._shape).values()
            if index is not None
        }
        columns = sorted({column for start, stop in spans for column in range(start, stop)})
        self._columns = {column: place for place, column in enumerate(columns)}
        self.rows = np.array([m * b + column for m in range(a) for column in columns])

    def __call__(self, rows_RT: np.ndarray) -> jax.Array:
        """The values of `rows` as an array [A, B / A, T]."""
        local = rows_RT.reshape(self._shape[0], -1, self._shape[2])
        if jax.process_count() == 1:
            return jax.device_put(local, self._sharding)

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(self._shape[1])
            first = self._columns[start]
            return local[:, first : first + stop - start]

        return jax.make_array_from_callback(self._shape, self._sharding, part)


def _place(array: Any, like: Any) -> jax.Array:
    """A host array on the devices, in the dtype and sharding of `like`."""
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.asarray(array[index], like.dtype)
    )
