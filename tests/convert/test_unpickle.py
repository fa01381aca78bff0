"""The inert unpickler: what it builds, and that it builds nothing else."""

import collections
import datetime
import io
import pickle
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from convert.checkpoint import unpickle as unpickle_module
from convert.checkpoint.lazy_tensor import CheckpointError
from convert.checkpoint.pickle_values import Global, PickledTensor, StandIn, StorageRef, dict_key
from convert.checkpoint.unpickle import UnsafePickleError, unpickle
from tests.convert.damage import call, hostile_calls

_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"


@dataclass
class Config:
    n_head: int
    window: int | None = None


@dataclass(slots=True)
class SlottedConfig:
    n_head: int


class PlainConfig:
    n_head = 4


class DictConfig(dict[str, int]):
    pass


class ListConfig(list[int]):
    pass


def unpickled(obj: object, protocol: int = 2) -> Any:
    return unpickle(pickle.dumps(obj, protocol=protocol)).value


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_unpickle_returns_plain_values_as_they_were(protocol: int) -> None:
    obj = {
        "none": None,
        "numbers": [0, 255, 65535, -1, 2**31, 2**100, 1.5, True],
        "text": "α" * 300,
        "bytes": b"\xff\x00",
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "sets": {1, 2},
        "frozen": frozenset("ab"),
        "ordered": collections.OrderedDict(a=1),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, a=[1]),
        3: {"nested": {}},
        (1, "a"): "tuple key",
    }
    assert unpickled(obj, protocol) == obj


def test_unpickle_shares_what_the_pickle_shares() -> None:
    shared = [1]
    first, second = unpickled([shared, shared])
    assert first is second


def test_unpickle_returns_the_position_after_the_pickle() -> None:
    data = b"junk" + pickle.dumps([1], protocol=2)
    assert unpickle(data + b"more", 4).end == len(data)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(1.5), 1.5),
        (np.float32(-2), -2.0),
        (np.int16(-3), -3),
        (np.bool_(True), True),
        (np.dtype(">i4").type(7), 7),
        (PurePosixPath("/a/b"), "/a/b"),
        (torch.Size([2, 3]), (2, 3)),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cpu"), "cpu"),
        (torch.strided, "torch.strided"),
    ],
)
def test_unpickle_reads_library_values_without_the_library(value: object, expected: object) -> None:
    found = unpickled(value)
    assert found == expected
    assert type(found) is type(expected)


def test_unpickle_reads_big_endian_numpy_scalars() -> None:
    pickled = pickle.dumps(np.int32(0x01020304), protocol=2)
    swapped = pickled.replace(b"X\x01\x00\x00\x00<", b"X\x01\x00\x00\x00>")
    assert swapped != pickled
    assert unpickle(swapped).value == 0x04030201


def test_unpickle_keeps_names_as_inert_globals() -> None:
    value = unpickled([torch.float32, Config, print])
    assert value == [
        Global("torch", "float32"),
        Global(Config.__module__, "Config"),
        Global("__builtin__", "print"),
    ]


@pytest.mark.parametrize(
    ("obj", "fields"),
    [
        (Config(4, 8), {"n_head": 4, "window": 8}),
        (SlottedConfig(4), {"n_head": 4}),
        (PlainConfig(), {}),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_unpickle_stands_in_for_unknown_classes(
    obj: object, fields: dict[str, object], protocol: int
) -> None:
    found = unpickled(obj, protocol)
    assert type(found) is StandIn
    assert found.qualified_name == f"{type(obj).__module__}.{type(obj).__qualname__}"
    assert found.fields == fields


def test_unpickle_keeps_the_items_of_unknown_containers() -> None:
    entries, elements = unpickled([DictConfig(n_head=4), ListConfig([1, 2])])
    assert entries.entries == {"n_head": 4}
    assert elements.elements == [1, 2]


@pytest.mark.parametrize(
    "value", [datetime.datetime(2024, 1, 1), np.zeros(3), np.dtype("f4"), collections.deque([1])]
)
def test_unpickle_stands_in_for_other_library_objects(value: object) -> None:
    assert type(unpickled(value)) is StandIn


def _tensor_pickle(obj: object) -> bytes:
    """Pickle as torch.save does, with a storage as a persistent id."""
    buffer = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> object:
            if isinstance(obj, torch.storage.TypedStorage):
                kind = getattr(torch, obj._pickle_storage_type())
                return "storage", kind, f"k{obj._size()}", "cuda:0", obj._size()
            return None

    Pickler(buffer, protocol=2).dump(obj)
    return buffer.getvalue()


@pytest.mark.parametrize("wrap", [lambda t: t, torch.nn.Parameter])
def test_unpickle_describes_tensors(wrap: Any) -> None:
    tensor = wrap(torch.zeros(4, 6).t()[2:, 1:])
    found = unpickle(_tensor_pickle(tensor))
    value = found.value
    assert isinstance(value, PickledTensor)
    assert (value.dtype, value.offset) == ("float32", tensor.storage_offset())
    assert (value.shape, value.strides) == (tuple(tensor.shape), tensor.stride())
    assert found.storages["k24"] is value.storage
    assert (value.storage.dtype, value.storage.numel, value.storage.nbytes) == ("float32", 24, 96)


def test_unpickle_reads_parameters_with_attributes() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.no_decay = True  # type: ignore[attr-defined]
    assert isinstance(unpickle(_tensor_pickle(parameter)).value, PickledTensor)


def test_unpickle_drops_attributes_of_dicts() -> None:
    state_dict = torch.nn.Linear(2, 2).state_dict()
    value = unpickle(_tensor_pickle(state_dict)).value
    assert isinstance(value, dict)
    assert list(value) == ["weight", "bias"]
    built = b"\x80\x02ccollections\nOrderedDict\n)R}X\x01\x00\x00\x00aK\x01sb."
    assert unpickle(built).value == {}


@pytest.mark.parametrize(
    ("fragment", "words"),
    [
        (call("torch._utils", "_rebuild_qtensor"), "quantised"),
        (call("torch._utils", "_rebuild_sparse_tensor"), "sparse"),
        (call("torch._utils", "_rebuild_meta_tensor_no_storage"), "meta device"),
        (call("torch.storage", "_load_from_bytes", b"C\x00"), "torch.save"),
        (b"(X\x07\x00\x00\x00storagectorch\nQInt8Storage\nX\x01\x00\x00\x000hK\x01tQ", "damaged"),
    ],
)
def test_unpickle_says_what_cannot_be_converted(fragment: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        unpickle(b"\x80\x02" + fragment + b".")
    assert not isinstance(caught.value, UnsafePickleError)


def test_unpickle_refuses_lazily_conjugated_tensors() -> None:
    with pytest.raises(CheckpointError, match="resolve_conj"):
        unpickle(_tensor_pickle(torch.zeros(2, dtype=torch.complex64).conj()))


@pytest.mark.parametrize("name", hostile_calls(Path("/nonexistent")))
def test_unpickle_refuses_calls(name: str, tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    with pytest.raises(UnsafePickleError, match="refused, nothing was run") as caught:
        unpickle(b"\x80\x02" + hostile_calls(sentinel)[name] + b".")
    assert not sentinel.exists()
    assert str(caught.value).isprintable()
    if "." in name:
        assert f"asks to call {name};" in str(caught.value)


def test_unpickle_builds_only_on_stand_ins_and_dicts() -> None:
    storage = _STORAGE + b"X\x03\x00\x00\x00cpuK\x01tQ"
    tensor = call("torch._utils", "_rebuild_tensor_v2", storage, b"K\x00))\x89N")
    for target in (storage, tensor, b"cos\nsystem\n", b"K\x01", b")", b"]", b"\x8f"):
        with pytest.raises(UnsafePickleError, match="set attributes"):
            unpickle(b"\x80\x02" + target + b"}X\x05\x00\x00\x00shapeK\x01sb.")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (b"ca\nB\n)\x81}X\x01\x00\x00\x00kNsb}b", "a.B with two states"),
        (_STORAGE + b"X\x03\x00\x00\x00cpuK\x01(K\x01K\x02ttQ", "views of torch before 0.4"),
        (_STORAGE + b"X\x04\x00\x00\x00metaK\x01tQ", "meta device"),
        (_STORAGE + b"X\x03\x00\x00\x00cpuJ\xff\xff\xff\xfftQ", "negative size"),
        (_STORAGE + b"X\x03\x00\x00\x00cpu\x8a\x09" + bytes(8) + b"\x01tQ", "64 bits"),
        (_STORAGE + b"X\x03\x00\x00\x00cpu\x88tQ", "bool where an integer"),
        (_STORAGE.replace(b"Float", b"Weird") + b"X\x03\x00\x00\x00cpuK\x01tQ", "unknown storage"),
        (_STORAGE.replace(b"Float", b"QInt8") + b"X\x03\x00\x00\x00cpuK\x01tQ", "quantised"),
        (b")Q", "persistent id"),
        (b"NQ", "persistent id"),
    ],
)
def test_unpickle_names_what_is_wrong(target: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        unpickle(b"\x80\x02" + target + b".")


def test_unpickle_takes_only_the_instructions_on_the_list() -> None:
    pushed = [b"P1\n", b"I1\n", b"L1L\n", b"F1\n", b"S'a'\n", b"Va\n", b"\x8b\x01\x00\x00\x00\x01"]
    pushed += [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"\x97", b"N\x98"]
    pushed += [
        b"\x96" + struct.pack("<Q", 0),
        b"(ios\nsystem\n",
        b"(cos\nsystem\no",
        b"Np0\n",
        b"\xff",
    ]
    for code in pushed:
        with pytest.raises(CheckpointError, match="never writes"):
            unpickle(b"\x80\x02" + code + b".")


@pytest.mark.parametrize("cut", range(60))
def test_unpickle_reports_truncation(cut: int) -> None:
    data = pickle.dumps({"a": [1, 2.5, "text"], "b": (True, None, 2**70), "c": {1}}, protocol=2)
    with pytest.raises(CheckpointError, match="damaged"):
        unpickle(data[:cut])


def test_unpickle_limits_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle_module, "MAX_STEPS", 100)
    assert unpickle(b"\x80\x02" + b"N0" * 40 + b"N.").value is None
    with pytest.raises(CheckpointError, match="steps"):
        unpickle(b"\x80\x02" + b"N0" * 60 + b"N.")
    copies = b"](" + b"K\x01" * 30 + b"eq\x00" + call("builtins", "set", b"h\x00") * 3
    with pytest.raises(CheckpointError, match="steps"):
        unpickle(b"\x80\x02" + copies + b".")


def test_unpickle_limits_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps("a" * 100, protocol=2)
    monkeypatch.setattr(unpickle_module, "MAX_BYTES", len(data))
    assert unpickle(b"xx" + data, 2).value == "a" * 100
    monkeypatch.setattr(unpickle_module, "MAX_BYTES", len(data) - 4)
    with pytest.raises(CheckpointError, match="where"):
        unpickle(data)


@pytest.mark.parametrize(
    "key", [[1], {}, 2**60, ((1,),), StorageRef("k", "float32", 1), tuple(range(9)), (2**61,)]
)
def test_dict_key_refuses_what_is_costly_to_hash(key: object) -> None:
    with pytest.raises(TypeError, match="as the key of a dict"):
        dict_key(key)


def test_stand_in_has_no_deep_recursion() -> None:
    nested = b"N" + b"ca\nB\n)\x81" * 50_000 + b"b" * 49_999
    assert type(unpickle(b"\x80\x02" + nested + b".").value) is StandIn


def test_modules_import_neither_torch_nor_jax() -> None:
    program = (
        "import sys, types; package = types.ModuleType('convert'); package.__path__ = ['convert'];"
        "sys.modules['convert'] = package; import convert.checkpoint.containers;"
        "sys.exit(sorted({'torch', 'jax'} & sys.modules.keys()) or 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
