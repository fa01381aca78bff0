"""Checkpoints of a run, by orbax: asynchronous, each there whole or not at all.

runs/x/checkpoints/<step>/ holds three items: `params`, `optimizer` and `meta` (JSON: counters, data
position, checksums). Each item is read without the others, and onto any mesh. What is read is
compared with the checksums that were taken on the device before it was written.
"""

import contextlib
import errno
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from train.config import CheckpointConfig
from train.step import Parameters, TrainState, checksum

FOLDER, DAMAGED = "checkpoints", "damaged"
NOT_DAMAGE = (errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.EACCES)
COUNTERS = ("step", "skipped", "streak")


class CheckpointError(ValueError):
    """A checkpoint that is not whole."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run: the run's folder.
        config: which are kept; None to read only.
    """

    def __init__(self, run: Path, config: CheckpointConfig | None = None):
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells its progress there
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # and what we raise ourselves
        self._run, self._config = run.resolve(), config
        self._folder = self._run / FOLDER
        keep: list[Any] = []
        if config is not None:
            self._folder.mkdir(exist_ok=True)
            keep.append(policies.LatestN(config.keep_last))
            if config.keep_best:
                keep.append(
                    policies.BestN(
                        get_metric_fn=lambda metrics: metrics["val_loss"], reverse=True,
                        n=config.keep_best, keep_checkpoints_without_metrics=False,
                    )
                )  # fmt: skip
            if config.keep_every:
                keep.append(policies.EveryNSteps(config.keep_every))
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_names=("params", "optimizer", "meta"),
            options=ocp.CheckpointManagerOptions(
                best_fn=lambda metrics: metrics["val_loss"],  # else metrics do not reach the disk
                best_mode="min",
                read_only=config is None,
                create=False,
                cleanup_tmp_directories=config is not None,
                save_decision_policy=_Always(),
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                preservation_policy=policies.AnyPreservationPolicy(keep) if keep else None,
            ),
        )
        self._checksums = jax.jit(lambda tree: jax.tree.map(checksum, tree))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, the latest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def folder(self, step: int) -> Path:
        """Where a checkpoint's files lie."""
        return self._folder / str(step)

    def save(
        self, state: TrainState, meta: Mapping[str, Any], *, val_loss: float | None = None
    ) -> None:
        """Starts to save; the arrays are copied before this returns, the files are written later.

        Raises:
            OSError: this save or the one before it could not be written.
        """
        if val_loss is not None and not math.isfinite(val_loss):
            val_loss = None
        self.wait()  # so that a failure is told of the save that failed
        sums = self._checksums({"params": state.params, "optimizer": _storable(state.optimizer)})
        step = int(state.step)
        counters = {name: int(getattr(state, name)) for name in COUNTERS}
        record = {**meta, "counters": counters, "checksums": named_leaves(jax.device_get(sums))}
        with _as_os_errors(self.folder(step)):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    optimizer=ocp.args.StandardSave(_storable(state.optimizer)),
                    meta=ocp.args.JsonSave(record),
                ),
                metrics={"val_loss": val_loss} if val_loss is not None else None,
            )

    def wait(self) -> None:
        """Waits until every save has ended.

        Raises:
            OSError: one could not be written.
        """
        with _as_os_errors(self._folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves, and ends the threads.

        Raises:
            OSError: a save could not be written.
        """
        with _as_os_errors(self._folder):
            self._manager.close()

    def without(self, steps: Sequence[int]) -> "Checkpoints":
        """The same without some steps, whose folders are moved to damaged/ in the run's folder."""
        if not steps:
            return self
        self.close()
        if jax.process_index() == 0:
            aside = self._run / DAMAGED
            aside.mkdir(exist_ok=True)
            for step in steps:
                number = len(list(aside.iterdir()))
                self.folder(step).rename(aside / f"{step}.{number}")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("damaged checkpoints are set aside")
        return Checkpoints(self._run, self._config)

    def meta(self, step: int) -> dict[str, Any]:
        """What was recorded beside the arrays.

        Raises:
            CheckpointError: it is damaged.
        """
        with _agreed(), _as_damage(step):
            found = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )
            meta = found["meta"]
            counters, sums = meta["counters"], meta["checksums"]
            if set(counters) != set(COUNTERS) or counters["step"] != step or not sums:
                raise CheckpointError(f"the meta data of checkpoint {step} is not its own")
        return meta

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a step.

        Args:
            step: of the checkpoint.
            like: arrays or shapes with the dtypes and shardings that are wanted.

        Raises:
            CheckpointError: it is damaged, or not of this model and optimizer.
        """
        meta = self.meta(step)
        optimizer = _storable(like.optimizer)
        params, stored = self._read(step, meta, {"params": like.params, "optimizer": optimizer})
        counters = {
            name: _on_device(meta["counters"][name], getattr(like, name)) for name in COUNTERS
        }
        leaves = [stored[name] for name in optimizer]
        treedef = jax.tree.structure(like.optimizer)
        return TrainState(params=params, optimizer=jax.tree.unflatten(treedef, leaves), **counters)

    def restore_params(self, step: int, like: Parameters) -> Parameters:
        """The parameters of a step alone; arguments and errors as `restore`."""
        return self._read(step, self.meta(step), {"params": like})[0]

    def _read(
        self, step: int, meta: Mapping[str, Any], like: Mapping[str, Parameters]
    ) -> list[Parameters]:
        """Items of a checkpoint, held to their checksums."""
        with _agreed(), _as_damage(step):
            shapes = jax.tree.map(_abstract, dict(like))
            args = {name: ocp.args.StandardRestore(tree) for name, tree in shapes.items()}
            found = self._manager.restore(step, args=ocp.args.Composite(**args))
            items = {name: found[name] for name in like}
            for name, tree in shapes.items():
                for path, leaf in tree.items():
                    if (got := items[name][path]).shape != leaf.shape or got.dtype != leaf.dtype:
                        raise CheckpointError(f"{name} {path} is {got.dtype} {got.shape}")
        sums = named_leaves(jax.device_get(self._checksums(items)))
        wrong = [name for name, value in sums.items() if meta["checksums"].get(name) != value]
        if wrong:
            raise CheckpointError(
                f"checkpoint {step} is damaged: the numbers of {', '.join(wrong[:3])}"
                f"{' ...' if len(wrong) > 3 else ''} are not those that were saved"
            )
        return list(items.values())


class _Always(policies.SaveDecisionPolicy):
    """The loop decides when to save."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        del step, previous_steps, context
        return True


def _storable(optimizer: Any) -> Parameters:
    """An optimizer state's leaves by name, so that reading needs no classes of optax."""
    flat, _ = jax.tree.flatten_with_path(optimizer)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def named_leaves(tree: Any) -> dict[str, int]:
    """Integer leaves of two nested dicts under "outer/inner"."""
    return {
        f"{outer}/{name}": int(value)
        for outer, inner in tree.items()
        for name, value in inner.items()
    }


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _on_device(value: int, like: Any) -> jax.Array:
    """A counter laid out as another."""
    return jax.make_array_from_callback((), like.sharding, lambda _: np.asarray(value, np.int32))


@contextlib.contextmanager
def _as_damage(step: int) -> Iterator[None]:
    """What a library says of a checkpoint that it cannot read, as CheckpointError.

    What says nothing of the files (memory, permissions, a device that does not answer) stays as it
    is: it must not be taken for damage.
    """
    try:
        yield
    except (CheckpointError, MemoryError, PermissionError):
        raise
    except Exception as error:  # tensorstore and orbax raise many kinds
        lacking = isinstance(error, jax.errors.JaxRuntimeError) and "EXHAUSTED" in str(error)
        if lacking or getattr(error, "errno", None) in NOT_DAMAGE:
            raise
        words = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"checkpoint {step} cannot be read ({type(error).__name__}: {words[0][:200]})"
        ) from error


@contextlib.contextmanager
def _agreed() -> Iterator[None]:
    """With several processes, a CheckpointError in one is one in all of them."""
    failure: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        failure = error
    if jax.process_count() > 1:
        failed = np.asarray(multihost_utils.process_allgather(np.array(failure is not None)))
        if failed.any() and failure is None:
            failure = CheckpointError(f"process {int(failed.argmax())} cannot read a checkpoint")
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _as_os_errors(path: Path) -> Iterator[None]:
    """A save that failed, for whatever reason, as OSError with the folder's name."""
    try:
        yield
    except Exception as error:  # tensorstore reports a full disk as ValueError
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise OSError(f"{path} could not be saved: {words[0][:300]}") from error
