"""A run's checkpoint as a model folder."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxslm.files import atomic_output, check_destination
from jaxslm.models import Config
from jaxslm.optimizer_file import FIRST, OPTIMIZER_FILE, SECOND, write_optimizer
from jaxslm.safetensors_io import TensorSpec
from jaxslm.tokenizer import FILE, load_tokenizer
from jaxslm.weights import OWNED_FILES, abstract_parameters, write_folder
from train.checkpoints import CheckpointError, Checkpoints
from train.config import TrainConfig, read_config
from train.optimizer import build_optimizer, is_decayed, learning_rate, moments_of
from train.step import initial_state


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was exported.

    Attributes:
        config: the model's.
        step: of the checkpoint.
        parameters: number of numbers.
        notes: what the user should know.
    """

    config: Config
    step: int
    parameters: int
    notes: tuple[str, ...]


def export(
    run: Path,
    destination: Path,
    *,
    step: int | None = None,
    with_optimizer: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Writes a checkpoint of a run as a model folder, which appears whole or not at all.

    Args:
        run: the run's folder.
        destination: folder to create.
        step: of the checkpoint; None for the latest that is whole.
        with_optimizer: AdamW's state too, which `jaxslm convert --with-optimizer` takes to torch
            and `init_from` goes on with.
        overwrite: replace an earlier model folder.

    Raises:
        ValueError: there is no such checkpoint, none is whole, or the optimizer is not AdamW.
        OSError: a file cannot be read or written, or the destination exists.
    """
    check_destination(destination, overwrite=overwrite, owns=OWNED_FILES)
    if run.resolve().is_relative_to(destination.resolve()):
        raise ValueError(f"{destination} holds the run: name another output")
    config = read_config(run)
    if with_optimizer and config.optim.name != "adamw":
        raise ValueError(
            f"{run} was trained with {config.optim.name}: only AdamW's state leaves a run"
        )
    checkpoints = Checkpoints(run)
    try:
        found = checkpoints.steps()
        if not found or (step is not None and step not in found):
            wanted = "a checkpoint" if step is None else f"checkpoint {step}"
            there = ", ".join(map(str, sorted(found))) or "none"
            raise ValueError(f"{run} has not {wanted}; there: {there}")
        read = _reader(config, with_optimizer)
        notes = []
        for number in found if step is None else [step]:
            try:
                arrays, count = read(checkpoints, number)
                break
            except CheckpointError as error:
                notes.append(f"warning: {error}")
        else:
            raise ValueError(f"no checkpoint of {run} is whole: {'; '.join(notes)}")
    finally:
        checkpoints.close()
    params = {name: value for name, value in arrays.items() if not name.startswith((FIRST, SECOND))}
    with atomic_output(destination, overwrite=overwrite, owns=OWNED_FILES) as folder:
        # The kernel was for the run's devices; the folder is for any.
        model = replace(config.model, attention="auto")
        write_folder(folder, model, _specs(params), params.__getitem__)
        if with_optimizer:
            moments = {name: value for name, value in arrays.items() if name not in params}
            write_optimizer(
                folder / OPTIMIZER_FILE, _specs(moments), moments.__getitem__,
                count=count, groups=groups(config, count), step=number,
            )  # fmt: skip
        if (run / FILE).exists():
            load_tokenizer(run / FILE).save(folder)
        elif (destination / FILE).is_file():  # of the folder that is replaced
            shutil.copyfile(destination / FILE, folder / FILE)
    size = sum(value.size for value in params.values())
    return Exported(config=config.model, step=number, parameters=size, notes=tuple(notes))


def groups(config: TrainConfig, count: int) -> list[dict[str, Any]]:
    """The parameter groups of torch's AdamW that the run's optimizer equals, by parameter path."""
    optim = config.optim
    rate = float(np.asarray(learning_rate(optim, config.steps)(max(count - 1, 0))))
    common = {"lr": rate, "betas": list(optim.betas), "eps": optim.eps}
    paths = list(abstract_parameters(config.model))
    decayed = [path for path in paths if is_decayed(path, optim)]
    others = [path for path in paths if path not in decayed]
    found = [{"parameters": decayed, **common, "weight_decay": optim.weight_decay}]
    return found + ([{"parameters": others, **common, "weight_decay": 0.0}] if others else [])


def _reader(
    config: TrainConfig, with_optimizer: bool
) -> Callable[[Checkpoints, int], tuple[dict[str, np.ndarray], int]]:
    """Reads parameters, and moments under their names in optimizer.safetensors, to the host."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)

    params = placed(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, np.float32)
            for path, leaf in abstract_parameters(config.model).items()
        }
    )

    def read(checkpoints: Checkpoints, step: int) -> tuple[dict[str, np.ndarray], int]:
        if not with_optimizer:
            return jax.device_get(checkpoints.restore_params(step, params)), 0
        trained = sorted(params.keys() - set(config.trained_without))
        optimizer = build_optimizer(config.optim, config.steps, trained)
        like = jax.eval_shape(lambda p: initial_state(p, optimizer, config.trained_without), params)
        state = checkpoints.restore(step, placed(like))
        first, second, count = moments_of(state.optimizer)
        arrays = dict(state.params)
        arrays |= {f"{FIRST}.{path}": value for path, value in first.items()}
        arrays |= {f"{SECOND}.{path}": value for path, value in second.items()}
        return jax.device_get(arrays), count

    return read


def _specs(arrays: dict[str, np.ndarray]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(value.shape, value.dtype) for name, value in arrays.items()}
