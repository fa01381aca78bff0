"""Safetensors files, mapped into memory for reading and streamed for writing; no torch.

The format: 8 bytes of header length, a JSON header (name -> dtype, shape, offsets), then the data.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of one tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def map_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Maps a file's tensors; nothing is read until an array is used.

    Returns:
        Read-only arrays by name, in file order, and the header's metadata.

    Raises:
        ValueError: the file is damaged, truncated or of a dtype that numpy cannot hold.
        OSError: it cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass  # the library checks the header: sizes, offsets, overlaps, the file's length
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}): copy or download it again"
        ) from None
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    metadata = header.pop("__metadata__", None) or {}
    unknown = sorted({entry["dtype"] for entry in header.values()} - set(DTYPES))
    if unknown:
        raise ValueError(
            f"{path} holds tensors of dtype {', '.join(unknown)}, which is unsupported"
        )
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(data[begin:end], np.uint8)
        tensors[name] = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def write_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes a file tensor by tensor, so that only one is in memory at a time.

    Args:
        path: new file.
        specs: names, shapes and dtypes, in the order in which they are written.
        read: gives the array of a name, called once each in that order.
        metadata: strings for the header.

    Raises:
        ValueError: an array is not what its spec says.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, spec in specs.items():
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 64 + 56)  # data starts 64-byte aligned
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, spec in specs.items():
            array = read(name)
            if (array.shape, array.dtype) != (spec.shape, spec.dtype):
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}, its spec says {spec.dtype} "
                    f"{spec.shape}"
                )
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            del array  # or it would stay while the next is read
