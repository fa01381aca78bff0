"""What a training run is: one frozen dataclass, built by a file in configs/."""

import dataclasses
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxslm.models import MODELS, Config, model_name
from jaxslm.models.config import check_positive

CONFIG_FILE = "config.json"
FORMAT = "jaxslm-run"
FORMAT_VERSION = 3
SINCE_2 = ("sample_tokens", "sample_prompt")  # of EvalConfig; runs of version 1 get the defaults


def _check_types(config: Any) -> None:
    """Refuses a field whose value is not of its annotated type (bool is no int; int is a float).

    Raises:
        TypeError: naming the field, what was expected and what came.
    """
    hints = get_type_hints(type(config))
    for entry in dataclasses.fields(config):
        value, hint = getattr(config, entry.name), hints[entry.name]
        if not _fits(value, hint):
            raise TypeError(f"{entry.name} must be {_in_words(hint)}, got {value!r}")
        if type(value) is int and float in (hint, *get_args(hint)):
            object.__setattr__(config, entry.name, float(value))


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return type(value) is str and value in options
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in options)
    if get_origin(hint) is tuple:
        return (
            type(value) is tuple and len(value) == len(options) and all(map(_fits, value, options))
        )
    if hint is float:
        return type(value) in (int, float)
    return isinstance(value, hint) and not (hint is int and type(value) is not int)


def _in_words(hint: Any) -> str:
    """A type as a message names it."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a tuple of {', '.join(map(_in_words, get_args(hint)))}"
    return "None" if hint is type(None) else hint.__name__


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files and how batches are taken from them.

    Attributes:
        train: token file or folder (see docs/data.md).
        val: held-out token file or folder; None for no evaluation.
        batch_size: sequences in one update, over all devices and microbatches.
        sequence_length: tokens in a sequence.
        tokenizer: tokenizer.json or meta.pkl of the data, where its folder is not one of ours; it
            travels with the model.
        order: "shuffled", every position a target once an epoch; "sequential", as build-nanogpt;
            "random", as nanoGPT.
    """

    train: Path = Path("data/train")
    val: Path | None = Path("data/val")
    batch_size: int = 8
    sequence_length: int = 256
    tokenizer: Path | None = None
    order: Literal["shuffled", "sequential", "random"] = "shuffled"

    def __post_init__(self):
        _check_types(self)
        check_positive(self, "batch_size", "sequence_length")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule.

    Attributes:
        name: "adamw" as torch computes it; "muon" for the matrices of the layers, with adamw for
            the rest.
        lr: peak learning rate.
        betas: decay rates of AdamW's two moments.
        eps: AdamW's.
        weight_decay: decoupled, times the learning rate.
        decay: parameters that are decayed: "matrices", tensors of two or more dimensions in torch;
            "all", also norms, biases and decays.
        clip: largest global norm of the gradient, as torch clips; None for no clipping.
        schedule: "constant", "cosine" to `final_lr`, or "wsd": constant, then linear to `final_lr`
            over the last `decay_steps`.
        warmup_steps: updates of linear warm-up.
        warmup: the first step's rate: "nanogpt", lr / (warmup_steps + 1); "build-nanogpt",
            lr / warmup_steps.
        final_lr: rate at the end of "cosine" and "wsd".
        decay_steps: length of the cosine, warm-up included (None: all of the run's steps), or of
            wsd's last phase (None: a tenth of them).
        muon_lr: learning rate of the matrices under "muon"; scheduled alike.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    clip: float | None = 1.0
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    warmup: Literal["nanogpt", "build-nanogpt"] = "nanogpt"
    final_lr: float = 0.0
    decay_steps: int | None = None
    muon_lr: float = 0.02

    def __post_init__(self):
        _check_types(self)
        check_positive(self, "lr", "eps", "muon_lr")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        for name in ("weight_decay", "final_lr", "warmup_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above zero, or None for no clipping, got {self.clip}")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ValueError(f"decay_steps must be 1 or more, got {self.decay_steps}")


# The originals' recipes. GPT's is build-nanogpt's, Ripple's RippleGPT's; Lumen follows GPT.
RECIPES = {
    "gpt": OptimConfig(
        lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0, schedule="cosine",
        warmup_steps=715, warmup="build-nanogpt", final_lr=6e-5,
    ),
    "ripple": OptimConfig(
        lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, decay="all", clip=None,
        schedule="constant",
    ),
    "lumen": OptimConfig(
        lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0, schedule="cosine",
        warmup_steps=715, warmup="build-nanogpt", final_lr=6e-5,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the device mesh; their product is the number of devices.

    Attributes:
        data: copies of the model, each with its share of the batch; -1 takes the devices left.
        fsdp: pieces that parameters and optimizer state are cut into; also shares the batch.
        tensor: pieces that heads, mlp width and vocabulary are cut into.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        _check_types(self)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved and which are kept; the last step is always saved.

    Attributes:
        every: updates between saves.
        keep_last: how many of the latest stay.
        keep_best: how many of the lowest evaluation loss stay.
        keep_every: checkpoints at multiples of this many steps stay; None for none.
    """

    every: int = 1000
    keep_last: int = 2
    keep_best: int = 1
    keep_every: int | None = None

    def __post_init__(self):
        _check_types(self)
        check_positive(self, "every", "keep_last")
        if self.keep_best < 0 or (self.keep_every is not None and self.keep_every < 1):
            raise ValueError("keep_best must be 0 or more and keep_every 1 or more")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on a fixed set of held-out sequences.

    Attributes:
        every: updates between evaluations; the last step is always evaluated.
        batches: batches of the set; None for all of the held-out data.
        sample_tokens: tokens of text that the model writes after each evaluation, where the data
            has a tokenizer and there is one process; 0 for none.
        sample_prompt: what it goes on from; empty for the beginning of a document, or of a line
            where the tokenizer has no end-of-text.
    """

    every: int = 250
    batches: int | None = 20
    sample_tokens: int = 100
    sample_prompt: str = ""

    def __post_init__(self):
        _check_types(self)
        check_positive(self, "every")
        if self.sample_tokens < 0:
            raise ValueError(f"sample_tokens must be 0 or more, got {self.sample_tokens}")
        if self.batches is not None and self.batches < 1:
            raise ValueError(f"batches must be 1 or more, or None for all, got {self.batches}")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run shows.

    Attributes:
        every: updates between reports on the terminal and to TensorBoard; metrics.jsonl has a line
            for each update.
        tensorboard: write event files to the run's folder.
        profile: first and last update (exclusive) of a profiler trace, written to the run's folder.
        compilation_cache: keep compiled programs in the user's cache folder.
    """

    every: int = 10
    tensorboard: bool = True
    profile: tuple[int, int] | None = None
    compilation_cache: bool = True

    def __post_init__(self):
        _check_types(self)
        check_positive(self, "every")
        if self.profile is not None and not 0 <= self.profile[0] < self.profile[1]:
            raise ValueError(f"profile must be a first and a later last update: {self.profile}")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How this process finds the others, by `jax.distributed`.

    Attributes:
        distributed: join the processes that the environment describes (Cloud TPU, GKE, Slurm,
            Open MPI).
        coordinator: host:port of process 0, where the environment does not say.
        processes: number of processes.
        process: index of this one.
    """

    distributed: bool = False
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None

    def __post_init__(self):
        _check_types(self)
        given = [value is not None for value in (self.coordinator, self.processes, self.process)]
        if any(given) and not all(given):
            raise ValueError("coordinator, processes and process go together: give all three")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        out: the run's folder.
        model: the architecture.
        data: tokens and batches.
        optim: optimizer and schedule.
        mesh: device mesh.
        checkpoint: saving.
        eval: evaluation.
        log: what is shown.
        cluster: several processes.
        steps: updates.
        accumulation: microbatches that one update's batch is cut into.
        loss_chunk: positions whose logits exist at one time; None for all.
        seed: of initial parameters, batches and dropout.
        max_skipped: updates in a row that may be skipped because loss or gradient are not finite.
        init_from: model folder to start from; with an optimizer.safetensors in it, the run goes
            on at its step.
    """

    out: Path
    model: Config
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    steps: int = 1000
    accumulation: int = 1
    loss_chunk: int | None = 512
    seed: int = 1337
    max_skipped: int = 10
    init_from: Path | None = None

    def __post_init__(self):
        _check_types(self)
        check_positive(self, "steps", "accumulation", "max_skipped")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"loss_chunk must be 1 or more, or None for all: {self.loss_chunk}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {self.seed}")
        if self.data.batch_size % self.accumulation:
            raise ValueError(
                f"data.batch_size {self.data.batch_size} is not divisible by accumulation "
                f"{self.accumulation}"
            )
        context = self.model.context
        if context is not None and self.data.sequence_length > context:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is above the model's context "
                f"of {context}"
            )

    @property
    def trained_without(self) -> tuple[str, ...]:
        """Paths of the parameters that this run does not train (see `frozen_parameters`)."""
        return self.model.frozen_parameters(self.data.sequence_length)


# A resumed run may change these without ceasing to be the same run: where it runs, what it shows
# and keeps, how much memory it takes, how far it goes.
MAY_CHANGE = (
    "out", "mesh", "checkpoint", "eval.every", "eval.sample_tokens", "eval.sample_prompt", "log",
    "cluster", "steps", "accumulation", "loss_chunk", "max_skipped", "data.train", "data.val",
    "data.tokenizer", "init_from", "model.unroll", "model.remat", "model.attention",
)  # fmt: skip


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The config as JSON values, `model` under its name."""
    values = json.loads(json.dumps(asdict(config), default=str))
    return {
        "format": FORMAT, "format_version": FORMAT_VERSION, "model": model_name(config.model),
        "config": values,
    }  # fmt: skip


def from_json(content: Any, source: Path) -> TrainConfig:
    """The config of a run folder's config.json, strictly.

    Raises:
        ValueError: it is not one, naming the file and field.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{source} is not the config of a training run")
    version = content.get("format_version")
    if version not in range(1, FORMAT_VERSION + 1) or content.get("model") not in list(MODELS):
        raise ValueError(f"{source} is of a version or model that this jaxslm does not know")
    values = content.get("config")
    if version == 1 and isinstance(values, dict) and isinstance(values.get("eval"), dict):
        defaults = asdict(EvalConfig())
        added = {name: defaults[name] for name in SINCE_2}
        values = {**values, "eval": {**added, **values["eval"]}}
    if version in (1, 2) and isinstance(values, dict) and isinstance(values.get("model"), dict):
        values = {**values, "model": {"attention": "auto", **values["model"]}}
    try:
        return _build("config", TrainConfig, values, MODELS[content["model"]][0])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{source}: {error}") from None


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a training run."""
    file = path / CONFIG_FILE
    return file.is_file() and f'"{FORMAT}"' in file.read_text(errors="replace")[:200]


def read_config(run: Path) -> TrainConfig:
    """The config of a run folder.

    Raises:
        FileNotFoundError: the path holds no run.
        ValueError: its config.json is damaged.
    """
    path = run / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run} holds no run: it has no {CONFIG_FILE}")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return from_json(content, path)


def changed(before: TrainConfig, after: TrainConfig) -> list[str]:
    """What of a config would make a resumed run another run: "field: before -> after"."""
    old, new = _leaves(before), _leaves(after)
    follows = ""
    if before.optim.schedule == after.optim.schedule != "constant":  # None may be given in full
        length = old["optim.decay_steps"] = decay_length(before.optim, before.steps)
        new["optim.decay_steps"] = decay_length(after.optim, after.steps)
        if before.steps != after.steps:
            follows = f" (it follows from steps: set optim.decay_steps {length} to keep it)"
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        + (follows if name == "optim.decay_steps" else "")
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
        and not any(name == free or name.startswith(f"{free}.") for free in MAY_CHANGE)
    ]


def decay_length(optim: OptimConfig, steps: int) -> int:
    """Updates that the schedule's cosine (warm-up included) or last linear phase takes."""
    whole = steps if optim.schedule == "cosine" else max(steps // 10, 1)
    return whole if optim.decay_steps is None else optim.decay_steps


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Fields of nested dataclasses by dotted name; the model's kind under "model"."""
    found = {}
    for entry in dataclasses.fields(value):
        child, name = getattr(value, entry.name), prefix + entry.name
        if dataclasses.is_dataclass(child):
            found |= {name: type(child).__name__} | _leaves(child, f"{name}.")
        else:
            found[name] = child
    return found


def _build(name: str, kind: type, values: Any, model: type) -> Any:
    """A dataclass from JSON values, its nested ones too; every field must be there."""
    hints = get_type_hints(kind)
    names = {entry.name for entry in dataclasses.fields(kind)}
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be an object of fields, got {values!r}")
    if wrong := names ^ set(values):
        raise ValueError(
            f"{kind.__name__} fields are missing or unknown: {', '.join(sorted(wrong))}"
        )
    built = {}
    for name, value in values.items():
        hint = model if name == "model" else hints[name]
        if dataclasses.is_dataclass(hint):
            built[name] = _build(name, hint, value, model)  # type: ignore[arg-type]
        elif isinstance(value, str) and Path in (hint, *get_args(hint)):
            built[name] = Path(value)
        else:
            built[name] = tuple(value) if isinstance(value, list) else value
    return kind(**built)
