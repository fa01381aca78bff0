"""Small torch checkpoints in every container and layout, for the tests of conversion."""

import json
import sys
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from convert.checkpoint.lazy_tensor import LazyTensor
from convert.counterparts import build
from convert.resolve import CHOICES
from convert.torch_io import to_numpy
from jaxslm.models import MODELS, Config
from tests.golden.make_golden import randomize

FIELDS: dict[str, dict[str, Any]] = {
    "lumen": {"vocab_size": 31, "hidden_dim": 16, "num_layers": 2, "num_heads": 4,
              "num_kv_heads": 2, "intermediate_dim": 24, "max_seq_len": 16},
    "gpt": {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2,
            "block_size": 16},
    "ripple": {"vocab_size": 31, "n_embd": 18, "n_layer": 2, "n_head": 3, "block_size": 16,
               "attention_window": 4, "bias": True, "use_absolute_pos_emb": True},
}  # fmt: skip
TIES = {
    "lumen": ("embed_tokens.weight", "lm_head.weight"),
    "gpt": ("transformer.wte.weight", "lm_head.weight"),
}
State = dict[str, torch.Tensor]


def config_of(model: str, **fields: Any) -> Config:
    """The small config of a model, some fields changed."""
    return MODELS[model][0](**(FIELDS[model] | fields))


def said(model: str, **fields: Any) -> dict[str, Any]:
    """What the original's config holds: all but what is ours to choose."""
    values = asdict(config_of(model, **fields))
    ours = (*CHOICES, "layer_norm_eps", "rope_base")
    return {name: value for name, value in values.items() if name not in ours}


def overrides(model: str) -> list[str]:
    """The same for --config."""
    return [f"{name}={value}" for name, value in said(model).items()]


def state_of(model: str, seed: int = 0, **fields: Any) -> State:
    """A counterpart's state dict with random weights, tied keys sharing one tensor."""
    module = build(config_of(model, **fields))
    randomize(module, seed)
    return {key: tensor.detach() for key, tensor in module.state_dict().items()}


def pickled_config(model: str, **fields: Any) -> object:
    """A config object of the original's class, which nobody can import once it is pickled."""
    name = MODELS[model][0].__name__
    kind = type(name, (), {"__module__": f"gone_{model}"})
    module = types.ModuleType(f"gone_{model}")
    setattr(module, name, kind)
    sys.modules[module.__name__] = module  # only while it is pickled: `save` takes it away
    config = kind()
    config.__dict__.update(said(model, **fields))
    return config


def training_checkpoint(model: str, state: State) -> dict[str, Any]:
    """Weights, the moments of AdamW, a pickled config object, numbers."""
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in state.values()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "config": pickled_config(model),
        "iter_num": 3,
        "best_val_loss": torch.tensor(1.5),
    }


def save(obj: object, path: Path, *, zipped: bool = True) -> Path:
    """A torch file."""
    torch.save(obj, path, _use_new_zipfile_serialization=zipped)
    for name in [name for name in sys.modules if name.startswith("gone_")]:
        del sys.modules[name]
    return path


def gpt_file(path: Path, state: State | None = None, **fields: Any) -> Path:
    """A GPT in a torch file with its config, of which some fields may be changed."""
    state = state_of("gpt") if state is None else state
    return save({"model": state, "model_args": said("gpt", **fields)}, path)


def save_shards(folder: Path, state: State, config: dict[str, Any] | None) -> Path:
    """Two safetensors shards with index, and config.json if there is a config."""
    folder.mkdir()
    names = list(state)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: state[name].contiguous().clone() for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _safetensors(path: Path, model: str, state: State) -> Path:
    path.mkdir()
    one = {key: tensor.contiguous().clone() for key, tensor in state.items()}
    save_file(one, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(said(model)))
    return path / "model.safetensors"


# What stands for "every container and layout": (path, model, state) -> what to open.
CONTAINERS: dict[str, Callable[[Path, str, State], Path]] = {
    "zip, model and model_args": lambda path, model, state: save(
        {"model": state, "model_args": said(model)}, path
    ),
    "zip, state_dict": lambda path, model, state: save(
        {"state_dict": state, "config": said(model)}, path
    ),
    "zip, model_state_dict of DDP": lambda path, model, state: save(
        {
            "model_state_dict": {f"module.{key}": value for key, value in state.items()},
            "hparams": said(model),
        },
        path,
    ),
    "zip, training checkpoint of a compiled model": lambda path, model, state: save(
        training_checkpoint(model, {f"_orig_mod.{key}": value for key, value in state.items()}),
        path,
    ),
    "legacy, training checkpoint": lambda path, model, state: save(
        training_checkpoint(model, state), path, zipped=False
    ),
    "legacy, wrapped twice and in mid-key": lambda path, model, state: save(
        {
            "model": {
                f"module._orig_mod.{key.replace('.0.', '.0._orig_mod.')}": value
                for key, value in state.items()
            },
            "model_args": said(model),
        },
        path,
        zipped=False,
    ),
    "safetensors": _safetensors,
    "sharded safetensors": lambda path, model, state: save_shards(path, state, said(model)),
}


def raw(array: np.ndarray | torch.Tensor | LazyTensor) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes."""
    if isinstance(array, LazyTensor):
        array = array.read()
    if isinstance(array, torch.Tensor):
        array = to_numpy(array)
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, to see that nothing was left or changed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
