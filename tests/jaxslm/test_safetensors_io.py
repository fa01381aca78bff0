import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from jaxslm.safetensors_io import DTYPES, TensorSpec, map_tensors, write_tensors

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__")


def random_array(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    """Any bits, NaNs of every kind among them; a bool is 0 or 1."""
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8
    )
    return (
        np.frombuffer(raw.tobytes(), dtype).reshape(shape) if raw.size else np.zeros(shape, dtype)
    )


def write(path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
    write_tensors(path, specs, arrays.__getitem__, metadata or {})


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def header_and_data(content: bytes) -> tuple[dict, bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(header: object, data: bytes) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


@given(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(sorted(DTYPES)), st.integers(0))))
def test_what_is_written_is_mapped_bit_for_bit(tmp_path_factory, tensors):
    arrays = {
        name: random_array(shape, DTYPES[dtype], seed)
        for name, (shape, dtype, seed) in tensors.items()
    }
    path = tmp_path_factory.mktemp("round") / "model.safetensors"
    write(path, arrays, {"format": "jaxslm"})
    found, metadata = map_tensors(path)
    assert metadata == {"format": "jaxslm"}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert_same_bits(found[name], array)


def test_the_safetensors_library_reads_what_we_write(tmp_path):
    arrays = {name: random_array((3, 2), dtype) for name, dtype in DTYPES.items()}
    write(tmp_path / "ours.safetensors", arrays, {"format": "jaxslm"})
    content = (tmp_path / "ours.safetensors").read_bytes()
    found = dict(safetensors.deserialize(content))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name]["dtype"], found[name]["shape"]) == (name, [3, 2])
        assert bytes(found[name]["data"]) == array.tobytes()
    header, data = header_and_data(content)
    assert header["__metadata__"] == {"format": "jaxslm"}
    assert (len(content) - len(data)) % 64 == 0  # aligned for every dtype


def test_we_read_what_the_safetensors_library_writes(tmp_path):
    arrays = {
        "weight": random_array((4, 3), np.dtype(np.float32)),
        "half": random_array((5,), np.dtype(np.float16)),
        "scalar": random_array((), np.dtype(np.int64)),
        "flag": random_array((3,), np.dtype(np.bool_)),
        "brain": random_array((3, 1), np.dtype(ml_dtypes.bfloat16)),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors", {"format": "np"})
    found, metadata = map_tensors(tmp_path / "theirs.safetensors")
    assert metadata == {"format": "np"}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert_same_bits(found[name], array)


def test_tensors_are_mapped_not_read(tmp_path):
    write(tmp_path / "model.safetensors", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    array = map_tensors(tmp_path / "model.safetensors")[0]["w"]
    assert not array.flags.writeable
    bases = []
    while array is not None:
        bases.append(type(array))
        array = getattr(array, "base", None) if not isinstance(array, memoryview) else array.obj
    assert np.memmap in bases


def test_mapped_tensors_come_in_file_order(tmp_path):
    write(tmp_path / "model.safetensors", {name: np.zeros(2, np.float32) for name in "bca"})
    content = (tmp_path / "model.safetensors").read_bytes()
    header, data = header_and_data(content)
    shuffled = {name: header[name] for name in "abc"}
    (tmp_path / "shuffled.safetensors").write_bytes(with_header(shuffled, data))
    for name in ("model", "shuffled"):
        assert list(map_tensors(tmp_path / f"{name}.safetensors")[0]) == ["b", "c", "a"]


def test_file_without_tensors_is_no_error(tmp_path):
    write(tmp_path / "empty.safetensors", {})
    assert map_tensors(tmp_path / "empty.safetensors") == ({}, {})
    page = b"{}".ljust(4096 - 8)  # nothing at all lies on the page that would be mapped
    (tmp_path / "page.safetensors").write_bytes(with_header(page, b""))
    assert map_tensors(tmp_path / "page.safetensors") == ({}, {})


def damaged() -> dict[str, bytes]:
    """Every way that a file goes wrong, by name."""
    header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    data = b"\0" * 8
    whole = with_header(header, data)
    return {
        "empty": b"",
        "a text": b"these are not the weights you are looking for",
        "truncated length": whole[:5],
        "truncated header": whole[:20],
        "truncated data": whole[:-1],
        "trailing bytes": whole + b"\0",
        "header of no JSON": with_header(b"{" * 40, data),
        "header of a list": with_header([1, 2], data),
        "header length beyond the file": b"\xff" * 8 + whole[8:],
        "unknown dtype": with_header({"w": header["w"] | {"dtype": "Q4"}}, data),
        "shape that does not fit": with_header({"w": header["w"] | {"shape": [3]}}, data),
        "negative shape": with_header({"w": header["w"] | {"shape": [-2]}}, data),
        "offset beyond the data": with_header({"w": header["w"] | {"data_offsets": [4, 12]}}, data),
        "overlap": with_header(header | {"v": header["w"]}, data),
        "hole": with_header({"w": header["w"] | {"data_offsets": [8, 16]}}, data * 2),
        "missing field": with_header({"w": {"dtype": "F32", "shape": [2]}}, data),
    }


@pytest.mark.parametrize("fault", damaged())
def test_damaged_file_is_refused_by_name(tmp_path, fault):
    (tmp_path / "bad.safetensors").write_bytes(damaged()[fault])
    with pytest.raises(ValueError, match=r"bad\.safetensors is not a whole safetensors file"):
        map_tensors(tmp_path / "bad.safetensors")


def test_dtype_that_numpy_cannot_hold_is_named(tmp_path):
    header = {"w": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}
    (tmp_path / "scale.safetensors").write_bytes(with_header(header, b"\0\0"))
    with pytest.raises(ValueError, match=r"scale\.safetensors holds tensors of dtype F8_E8M0"):
        map_tensors(tmp_path / "scale.safetensors")


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        map_tensors(tmp_path / "none.safetensors")


def test_writing_takes_one_tensor_at_a_time_in_order(tmp_path):
    asked = []

    def read(name: str) -> np.ndarray:
        asked.append(name)
        return np.full(2, len(asked), np.float32)

    specs = {name: TensorSpec((2,), np.dtype(np.float32)) for name in "bac"}
    write_tensors(tmp_path / "model.safetensors", specs, read, {})
    assert asked == ["b", "a", "c"]
    found, _ = map_tensors(tmp_path / "model.safetensors")
    assert [found[name][0] for name in "bac"] == [1, 2, 3]


def test_views_are_written_in_their_own_order(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write(tmp_path / "model.safetensors", {"w": array})
    np.testing.assert_array_equal(map_tensors(tmp_path / "model.safetensors")[0]["w"], array)


@pytest.mark.parametrize(
    ("array", "came"),
    [
        (np.zeros((2, 3)), r"float64 \(2, 3\)"),
        (np.zeros((3, 2), np.float32), r"float32 \(3, 2\)"),
        (np.zeros(6, np.float32), r"float32 \(6,\)"),
        (np.zeros((2, 4), np.float32), r"float32 \(2, 4\)"),
    ],
)
def test_array_that_is_not_as_announced_is_refused(tmp_path, array, came):
    specs = {"w": TensorSpec((2, 3), np.dtype(np.float32))}
    with pytest.raises(ValueError, match=rf"w is {came}, its spec says float32 \(2, 3\)"):
        write_tensors(tmp_path / "model.safetensors", specs, lambda _: array, {})


def test_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").write_text("precious")
    with pytest.raises(FileExistsError):
        write(tmp_path / "model.safetensors", {})
    assert (tmp_path / "model.safetensors").read_text() == "precious"
