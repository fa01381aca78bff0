"""`jaxslm train`: a config file, its fields as options, one call."""

import difflib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from train.config import ClusterConfig, TrainConfig, read_config
from train.loop import TrainingFailed, train
from train.stop import exit_now

USAGE = "usage: jaxslm train CONFIG.py [--FIELD VALUE ...] [--resume]   (or a run's folder)"


def command(arguments: Sequence[str]) -> int:
    """Parses and runs `jaxslm train`.

    Args:
        arguments: what stands after `train`.

    Returns:
        The exit status, as `train.loop.train`.

    Raises:
        ValueError: there is no config, or it is none; and as `train.loop.train`.
        OSError: as `train.loop.train`.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nTrain a model; jaxslm train CONFIG.py --help lists the fields.\n"
              f"configs here: {', '.join(map(str, _configs())) or 'none'}")  # fmt: skip
        return 0
    if arguments[0].startswith("-"):
        raise ValueError(f"the config comes first: {USAGE}")
    path = Path(arguments[0])
    config = load_config(path)

    def options(
        config: Annotated[TrainConfig, tyro.conf.arg(name="", prefix_name=False)] = config,
        resume: bool = False,
    ) -> tuple[TrainConfig, bool]:
        """Train a model.

        Args:
            config: the run.
            resume: go on from the run's latest whole checkpoint.
        """
        return config, resume

    chosen, resume = tyro.cli(
        options, args=list(arguments[1:]), prog=f"jaxslm train {path}",
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
    )  # fmt: skip
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        status = train(chosen, resume=resume, console=console)
        exit_now(status)
        return status
    except TrainingFailed as error:
        status = _failed(str(error), 1)
        exit_now(status, abandoned=isinstance(error.__cause__, OSError) or _is_one_of_several())
        return status
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _failed(
            "the devices' memory is not enough: raise --accumulation or --mesh.fsdp, set "
            "--model.remat dots or full, lower --loss-chunk or --data.batch-size\n"
            + str(error).splitlines()[0],
            1,
        )
    except (ValueError, OSError) as error:
        if _is_one_of_several():  # the others wait for this process: it must not wait for them
            exit_now(_failed(str(error), 2), abandoned=True)
        raise


def _is_one_of_several() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _failed(words: str, status: int) -> int:
    print(f"jaxslm: {words}", file=sys.stderr)
    return status


def load_config(path: Path, usage: str = USAGE) -> TrainConfig:
    """The config of a run's folder, or that which a config file, which is run, calls `config`.

    Args:
        path: the folder or file.
        usage: of the command, for its errors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it fails, or has no `config`.
    """
    if path.is_dir():  # wherever it lies now, and whatever machine this is
        return replace(read_config(path), out=path, cluster=ClusterConfig())
    if not path.is_file():
        near = difflib.get_close_matches(str(path), map(str, _configs()), n=1)
        hint = f": did you mean {near[0]}?" if near else f"; {usage}"
        raise FileNotFoundError(f"there is no config {path}{hint}")
    spec = importlib.util.spec_from_file_location("jaxslm_config", path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; {usage}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} fails: {type(error).__name__}: {error}") from error
    config = getattr(module, "config", None)
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path} must set `config` to a train.config.TrainConfig")
    return config


def _configs() -> list[Path]:
    return sorted(path for path in Path("configs").glob("*.py"))
