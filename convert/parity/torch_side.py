"""The torch half of the parity check: our counterpart, or the class in the user's own file."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from convert.rules import Leaf
from convert.tables import TABLES
from convert.torch_io import from_numpy, to_numpy
from jaxslm.models import Config, model_name

# Module paths that the hooks hang on: the blocks, the norm in the middle of each, the last norm.
PATHS = {
    "lumen": ("layers", "post_attention_layernorm", "norm"),
    "gpt": ("transformer.h", "ln_2", "transformer.ln_f"),
    "ripple": ("blocks", "ln2", "ln_f"),
}

ROPE_BUFFERS = (("rope_cos", "rope_sin"), ("rotary_emb.cos_cached", "rotary_emb.sin_cached"))


class TorchSide:
    """A torch model in one dtype, watched.

    Args:
        build: makes the module with its own initial parameters.
        config: the model's config.
        state: every torch key -> array; loaded with strict=True.
        dtype: "float64", "float32" or "bfloat16".
        longest: number of tokens in the longest sequence to come.

    Raises:
        ValueError: the module's state dict is not the checkpoint's, or it cannot run.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        config: Config,
        state: Mapping[str, np.ndarray],
        dtype: str,
        longest: int,
    ):
        self.dtype = dtype
        self._kind = getattr(torch, dtype)
        self._ties = TABLES[model_name(config)].ties
        self._blocks, self._middle, self._norm = PATHS[model_name(config)]
        self._layers = len({key.split(".")[len(self._blocks.split("."))]
                            for key in state if key.startswith(self._blocks + ".")})  # fmt: skip
        self.module = build().eval()
        if self._kind == torch.bfloat16:
            # Masks and tables that a module makes in its first pass are float32, and do not mix
            # with bfloat16 unless they are there to be converted along with the weights.
            with torch.no_grad():
                self._run(np.zeros((1, longest), np.int64))
        self.module.to(self._kind)
        tensors = {key: from_numpy(array) for key, array in state.items()}
        try:
            self.module.load_state_dict(tensors, strict=True)
        except RuntimeError as error:
            raise ValueError(f"{self._name} does not take these weights: {error}") from None

    def activations(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Embedding, attention [L, ...], block [L, ...], final_norm and logits, where seen."""
        seen: dict[str, torch.Tensor] = {}
        hooks = []
        for layer in range(self._layers):
            block = self.module.get_submodule(f"{self._blocks}.{layer}")
            middle = self.module.get_submodule(f"{self._blocks}.{layer}.{self._middle}")
            hooks.append(middle.register_forward_pre_hook(_keep_input(seen, f"attention {layer}")))
            hooks.append(block.register_forward_hook(_keep_output(seen, f"block {layer}")))
            if layer == 0:
                hooks.append(block.register_forward_pre_hook(_keep_input(seen, "embedding")))
        norm = self.module.get_submodule(self._norm)
        hooks.append(norm.register_forward_hook(_keep_output(seen, "final_norm")))
        try:
            with torch.no_grad():
                seen["logits"] = self._run(tokens)[0]
        finally:
            for hook in hooks:
                hook.remove()
        arrays = {name: to_numpy(value) for name, value in seen.items()}
        for name in ("attention", "block"):
            layers = [arrays.pop(f"{name} {layer}", None) for layer in range(self._layers)]
            if all(array is not None for array in layers):
                arrays[name] = np.stack(layers)  # type: ignore[arg-type]
        return arrays

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """The logits [B, T, V]."""
        with torch.no_grad():
            return to_numpy(self._run(tokens)[0])

    def final_norm(self, x: np.ndarray) -> np.ndarray:
        """The last norm applied to x [..., D] (float64, cast to this side's dtype)."""
        with torch.no_grad():
            return to_numpy(
                self.module.get_submodule(self._norm)(torch.from_numpy(x).to(self._kind))
            )

    def loss_and_gradients(
        self, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray | None]]:
        """The model's own loss, and the gradient of every parameter (None where torch has none)."""
        self.module.zero_grad(set_to_none=True)
        _, loss, *_ = *self._run(tokens, targets), None
        if loss is None or loss.ndim or not loss.requires_grad:
            raise ValueError(
                f"{self._name} must return (logits, loss) when it is called with "
                "tokens and targets, the loss a scalar with a gradient"
            )
        loss.backward()
        return to_numpy(loss), {
            key: None if parameter.grad is None else to_numpy(parameter.grad)
            for key, parameter in self._parameters()
        }

    def parameters(self) -> dict[str, np.ndarray]:
        """Every parameter by torch key, tied ones once."""
        return {key: to_numpy(parameter) for key, parameter in self._parameters()}

    def adamw_update(
        self, settings: Mapping[str, Any], length: int, group: Sequence[Leaf]
    ) -> dict[str, np.ndarray]:
        """What one step of torch.optim.AdamW from the last gradients adds, in float64."""
        del length  # torch knows by itself what it freezes
        wanted = {part.key for leaf in group for part in leaf.parts}
        updates = {}
        for key, parameter in self._parameters():
            if key not in wanted:
                continue
            before = parameter.detach().clone()
            torch.optim.AdamW([parameter], **settings).step()
            with torch.no_grad():
                updates[key] = to_numpy(parameter.double() - before.double())
                parameter.copy_(before)
        return updates

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def _run(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Calls the module; the tensors that it returns, of tokens alone logits [B, T, V] first.

        Raises:
            ValueError: it cannot be called like our counterpart.
        """
        try:
            result = self.module(*map(torch.from_numpy, arrays))
        except Exception as error:  # the user's code may raise anything
            words = f"{self._name} fails in {self.dtype}: {type(error).__name__}: {error}"
            raise ValueError(words) from error
        values = result if isinstance(result, tuple | list) else [result]
        found = [value for value in values if isinstance(value, torch.Tensor)]
        if not found or (len(arrays) == 1 and found[0].shape[:-1] != arrays[0].shape):
            shape = list(found[0].shape) if found else "no tensor"
            raise ValueError(
                f"{self._name} must return logits [batch, positions, vocabulary] for tokens "
                f"{list(arrays[0].shape)}, alone or first of a tuple; got {shape}"
            )
        return found

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters once each, a tied one under its owner's key."""
        return [(self._ties.get(key, key), p) for key, p in self.module.named_parameters()]

    def rope_tables(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The tables that the module used, [context, H/2], where it keeps them in known buffers."""
        buffers = dict(self.module.named_buffers())
        for names in ROPE_BUFFERS:
            if all(buffers.get(name) is not None for name in names):
                cos, sin = (to_numpy(buffers[name]) for name in names)
                if cos.ndim == sin.ndim == 2:
                    return cos[:, : cos.shape[1] // 2], sin[:, : sin.shape[1] // 2]
        return None


def _first(result: Any) -> torch.Tensor:
    """The tensor of a result that may be a tuple."""
    return result[0] if isinstance(result, tuple) else result


def _keep_input(seen: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[name] = args[0].detach().clone()

    return hook


def _keep_output(seen: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen[name] = _first(output).detach().clone()

    return hook


def builder(against: str | None, config: Config) -> tuple[str, Callable[[], nn.Module]]:
    """The torch class to check against.

    Args:
        against: "path/to/model.py:Class", or None for our own counterpart.
        config: the model's config, handed to the class in its own config type.

    Returns:
        A name for it, and a function that builds a module.

    Raises:
        ValueError: the file or class cannot be imported or built.
    """
    if against is None:
        from convert.counterparts import build

        return "jaxslm's torch counterpart", lambda: build(config)
    file, colon, name = against.rpartition(":")
    if not colon or not file or not name:
        raise ValueError(f"--against takes FILE.py:CLASS, got {against!r}")
    module = _import_file(Path(file))
    kind = getattr(module, name, None)
    if not inspect.isclass(kind) or not issubclass(kind, nn.Module):
        classes = [
            key for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, nn.Module)
        ]  # fmt: skip
        raise ValueError(
            f"{file} has no torch module class {name}; it has {', '.join(classes) or 'none'}"
        )

    def build_theirs() -> nn.Module:
        try:
            return kind(_their_config(module, kind, config))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            raise ValueError(
                f"{against} cannot be built: {type(error).__name__}: {error}"
            ) from error

    return against, build_theirs


def _import_file(path: Path) -> ModuleType:
    """Runs the user's file as a module, within its package if it lies in one."""
    if not path.is_file():
        raise ValueError(f"--against: there is no file {path}")
    names, root = [path.stem], path.resolve().parent
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    name = ".".join(names)
    spec = importlib.util.spec_from_file_location(f"jaxslm_against_{name}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--against: {path} is not a Python file")
    sys.path.insert(0, str(root))
    try:
        if len(names) > 1:
            module = importlib.import_module(name)
        else:
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        raise ValueError(
            f"--against: {path} fails to import: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(root))
    if module.__file__ is None or Path(module.__file__).resolve() != path.resolve():
        raise ValueError(f"--against: a package {names[0]} is already imported from elsewhere")
    return module


def _their_config(module: ModuleType, kind: type, config: Config) -> Any:
    """The config in the type that the user's class wants, as far as can be seen."""
    values = asdict(config)
    first = next(iter(list(inspect.signature(kind.__init__).parameters.values())[1:]), None)
    wanted = first.annotation if first is not None else None
    if not inspect.isclass(wanted) or wanted is inspect.Parameter.empty:
        named = {
            name: value for name, value in vars(module).items()
            if inspect.isclass(value) and name.endswith("Config")
        }  # fmt: skip
        wanted = named.get(f"{kind.__name__}Config") or named.get(type(config).__name__)
        wanted = wanted or (next(iter(named.values())) if len(named) == 1 else SimpleNamespace)
    if is_dataclass(wanted):
        return wanted(**{f.name: values[f.name] for f in fields(wanted) if f.name in values})
    if wanted is SimpleNamespace:
        return SimpleNamespace(**values)
    theirs = wanted()
    for name, value in values.items():
        setattr(theirs, name, value)
    return theirs
