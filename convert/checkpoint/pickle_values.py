"""What a checkpoint's pickle may build: inert values, and the short table of calls it may ask for.

Every entry of `HANDLERS` is a pure function that takes what the file holds and returns plain data
or one of the dataclasses here. A wrong argument is a `TypeError`, reported as damage by the reader.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np

from convert.checkpoint.lazy_tensor import DTYPES, MAX_DIMENSIONS, CheckpointError, printable


@dataclass(frozen=True)
class Global:
    """A class or function that the file names. It is never looked up."""

    module: str
    name: str

    @property
    def qualified(self) -> str:
        """`module.name`, as Python would print it."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False)
class StandIn:
    """An object of a class we do not import: what the file gave to build it, and no behaviour."""

    qualified_name: str
    args: tuple[object, ...] = ()
    state: object = None
    entries: dict[object, object] = field(default_factory=dict)  # of a subclass of dict
    elements: list[object] = field(default_factory=list)  # of a subclass of list

    @cached_property
    def fields(self) -> dict[str, object]:
        """The instance attributes, from `__dict__` and from `__slots__`."""
        parts = self.state[:2] if isinstance(self.state, tuple) else (self.state,)
        dicts = [part for part in parts if isinstance(part, dict)]
        return {key: value for part in dicts for key, value in part.items() if type(key) is str}


@dataclass(frozen=True, eq=False)
class StorageRef:
    """A torch storage: `numel` elements of `dtype` kept elsewhere in the file under `key`."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        """Size of the storage in bytes."""
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, eq=False)
class PickledTensor:
    """What a pickle says about a tensor; offset and strides count elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}


def _tensor(storage: object, offset: object, size: object, stride: object) -> PickledTensor:
    if not isinstance(storage, StorageRef):
        raise TypeError("a tensor without a storage")
    return PickledTensor(storage, storage.dtype, integer(offset), _sizes(size), _sizes(stride))


def _tensor_v2(*args: object) -> PickledTensor:
    storage, offset, size, stride, _requires_grad, _hooks, metadata = (*args, None)[:7]
    if metadata:
        raise CheckpointError(
            "cannot be converted: it holds a lazily conjugated or negated tensor; "
            "save `tensor.resolve_conj().resolve_neg()`"
        )
    return _tensor(storage, offset, size, stride)


def _tensor_v3(*args: object) -> PickledTensor:
    *common, dtype, metadata = (*args, None)[:8]
    plain = _tensor_v2(*common, metadata)
    if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in DTYPES:
        name = printable(dtype.qualified) if isinstance(dtype, Global) else "unknown"
        raise CheckpointError(f"cannot be converted: it holds tensors of dtype {name}")
    return PickledTensor(plain.storage, dtype.name, plain.offset, plain.shape, plain.strides)


def _parameter(data: object, *_: object) -> PickledTensor:
    if not isinstance(data, PickledTensor):
        raise TypeError("a parameter without a tensor")
    return data


def _tensor_of_type(function: object, _cls: object, args: object, *_: object) -> PickledTensor:
    rebuild = _TENSOR_HANDLERS.get(function.qualified) if isinstance(function, Global) else None
    if rebuild is None or not isinstance(args, tuple):
        raise TypeError("a tensor subclass that is built in an unknown way")
    return rebuild(*args)


def _ordered_dict(pairs: object = ()) -> dict[object, object]:
    if not isinstance(pairs, list | tuple):
        raise TypeError("an OrderedDict that is not built from a list")
    return {dict_key(key): value for key, value in pairs}


def _default_dict(*_factory: object) -> dict[object, object]:
    return {}


def _counter(counts: object = None) -> dict[object, object]:
    if not isinstance(counts, dict | None):
        raise TypeError("a Counter that is not built from a dict")
    return dict(counts or {})


def frozen_set(items: object = ()) -> frozenset[object]:
    """Return a set of cheap keys from a list or another set."""
    if not isinstance(items, list | tuple | set | frozenset):
        raise TypeError("a set that is not built from a list")
    return frozenset(dict_key(item) for item in items)


def _device(kind: object, index: object = None) -> str:
    return text(kind) if index is None else f"{text(kind)}:{integer(index)}"


def _posix_path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _windows_path(*parts: str) -> str:
    return str(PureWindowsPath(*parts))


def _encoded(characters: object, encoding: object) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes in an encoding other than latin1")
    return text(characters).encode("latin1")


def _reconstructed(cls: object, _base: object, state: object) -> StandIn:
    return StandIn(class_name(cls), () if state is None else (state,))


def _numpy_scalar(dtype: object, data: object) -> int | float | bool:
    """Read one number; `dtype` is the stand-in of numpy.dtype, with the byte order in its state."""
    if not isinstance(dtype, StandIn) or dtype.qualified_name != "numpy.dtype" or not dtype.args:
        raise TypeError("a numpy scalar without a dtype")
    code = text(dtype.args[0])
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    if not re.fullmatch("b1|[iu][1248]|f[248]", code) or order not in ("<", ">", "|", "="):
        raise TypeError("a numpy scalar that is not a number")
    if not isinstance(data, bytes):
        raise TypeError("a numpy scalar without data")
    (number,) = np.frombuffer(data, np.dtype(code).newbyteorder(order))
    return number.item()


def _stand_in(qualified_name: str) -> Callable[..., StandIn]:
    return lambda *args: StandIn(qualified_name, args)


_TENSOR_HANDLERS: dict[str, Callable[..., PickledTensor]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
HANDLERS: dict[str, Callable[..., object]] = {
    **_TENSOR_HANDLERS,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "torch.Size": lambda sizes=(): _sizes(sizes),
    "torch.device": _device,
    "torch.serialization._get_layout": lambda name: text(name),
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _counter,
    "builtins.set": frozen_set,
    "builtins.frozenset": frozen_set,
    "__builtin__.set": frozen_set,
    "__builtin__.frozenset": frozen_set,
    "_codecs.encode": _encoded,
    "copyreg._reconstructor": _reconstructed,
    "copy_reg._reconstructor": _reconstructed,
    "pathlib.Path": _posix_path,
    "pathlib.PosixPath": _posix_path,
    "pathlib.PurePosixPath": _posix_path,
    "pathlib.WindowsPath": _windows_path,
    "pathlib.PureWindowsPath": _windows_path,
    "pathlib._local.PosixPath": _posix_path,
    "pathlib._local.WindowsPath": _windows_path,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    **{
        name: _stand_in(name)
        for name in (
            "numpy.dtype",
            "numpy.core.multiarray._reconstruct",
            "numpy._core.multiarray._reconstruct",
            "numpy.random._pickle.__randomstate_ctor",
            "numpy.random._pickle.__generator_ctor",
            "numpy.random._pickle.__bit_generator_ctor",
            "collections.deque",
            "datetime.datetime",
            "datetime.date",
            "datetime.time",
            "datetime.timedelta",
            "datetime.timezone",
        )
    },
}
UNSUPPORTED = {
    "torch.storage._load_from_bytes": "tensors pickled without torch.save; save with torch.save",
    **{
        f"torch._utils._rebuild_{kind}": advice
        for kind, advice in {
            "qtensor": "quantised tensors; save the dequantised weights",
            "sparse_tensor": "sparse tensors; save `tensor.to_dense()`",
            "sparse_csr_tensor": "sparse tensors; save `tensor.to_dense()`",
            "nested_tensor": "nested tensors; save `tensor.to_padded_tensor(0)`",
            "meta_tensor_no_storage": "tensors on the meta device, which have no values",
            "xla_tensor": "tensors of an XLA device; save `tensor.cpu()`",
            "device_tensor_from_numpy": "tensors of another device; save `tensor.cpu()`",
            "device_tensor_from_cpu_tensor": "tensors of another device; save `tensor.cpu()`",
            "wrapper_subclass": "wrapped (distributed or quantised) tensors; save plain ones",
        }.items()
    },
}
"""Calls that only a tensor we cannot convert needs: what it is, and what to do instead."""


def class_name(cls: object) -> str:
    """Return the qualified name of a class given as a `Global`."""
    if not isinstance(cls, Global):
        raise TypeError("an object whose class is not a name")
    return cls.qualified


def text(value: object) -> str:
    """Return `value`, which must be a string."""
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} where a string is expected")
    return value


def integer(value: object) -> int:
    """Return `value`, which must be an integer of 64 bits."""
    if type(value) is not int or abs(value) >= 2**63:
        raise TypeError(f"{type(value).__name__} where an integer of 64 bits is expected")
    return value


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise TypeError("sizes that are not a tuple of integers")
    return tuple(integer(size) for size in value)


def dict_key(value: object) -> object:
    """Return `value` if hashing it is cheap, cannot recurse and cannot be made to collide."""
    simple = str, bytes, float, bool, type(None), Global
    if isinstance(value, simple) or (type(value) is int and abs(value) < 2**60):
        return value
    if isinstance(value, tuple) and len(value) <= 8 and not any(type(v) is tuple for v in value):
        return tuple(dict_key(part) for part in value)
    raise TypeError(f"{type(value).__name__} as the key of a dict")
