"""Small seeded models to check, with no weight left at a value behind which a fault could hide."""

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from convert.counterparts import build
from convert.parity.subject import Subject
from convert.rules import assemble, leaves
from convert.tables import TABLES
from jaxslm.models import MODELS, Config, model_name
from tests.golden.make_golden import randomize

FIELDS: dict[str, dict[str, Any]] = {
    "lumen": {"vocab_size": 31, "hidden_dim": 16, "num_layers": 2, "num_heads": 4,
              "num_kv_heads": 2, "intermediate_dim": 24, "max_seq_len": 16},
    "gpt": {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2,
            "block_size": 16},
    "ripple": {"vocab_size": 31, "n_embd": 18, "n_layer": 2, "n_head": 3, "block_size": 16,
               "bias": True, "use_absolute_pos_emb": True, "attention_window": 4},
}  # fmt: skip


def config_of(model: str, **fields: Any) -> Config:
    """A small config of a model, with some fields changed."""
    return MODELS[model][0](**(FIELDS[model] | fields))


def subject_of(model: str, seed: int = 0, **fields: Any) -> Subject:
    """A small model with random weights; Ripple's decays have both signs."""
    config = config_of(model, **fields)
    module = build(config)
    randomize(module, seed)
    state = {key: tensor.detach().numpy() for key, tensor in module.state_dict().items()}
    return converted(config, state)


def converted(config: Config, state: Mapping[str, np.ndarray]) -> Subject:
    """The tensors of a torch state dict, and what the conversion table makes of them."""
    table = TABLES[model_name(config)]
    rules = leaves(table, config)
    with ThreadPoolExecutor(1) as pool:
        arrays = {
            leaf.path: assemble(leaf, state.__getitem__, state[leaf.parts[0].key].dtype, pool=pool)
            for leaf in rules
        }
    return Subject(
        source="a seeded model",
        config=config,
        arrays=arrays,
        torch_state={part.key: state[part.key] for leaf in rules for part in leaf.parts},
    )


@contextmanager
def quick_checks() -> Iterator[None]:
    """Compiling is nearly all the time of a small check: XLA tries less and keeps what it made.

    What is kept is found by the program itself, so a function that was changed is compiled anew.
    Torch's threads only wait for one another over so little work.
    """
    threads = torch.get_num_threads()
    settings = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        settings["jax_compilation_cache_dir"] = folder
        before = {name: getattr(jax.config, name) for name in settings}
        patch.setattr(jax, "jit", partial(jax.jit, compiler_options=options))
        try:
            torch.set_num_threads(1)
            for name, value in settings.items():
                jax.config.update(name, value)
            yield
        finally:
            torch.set_num_threads(threads)
            for name, value in before.items():
                jax.config.update(name, value)
            reset_cache()
