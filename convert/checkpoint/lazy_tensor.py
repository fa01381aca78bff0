"""Tensors that stay on disk: where their bytes lie, what they mean, and a read-only view of them.

A `SourceFile` is a regular file as it was when first looked at, a `Record` is a run of bytes in
it, and a `LazyTensor` is a shape, strides and dtype laid over a record. Nothing is read until it
is asked for.
"""

import math
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint64": np.dtype(np.uint64),
    "uint32": np.dtype(np.uint32),
    "uint16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
}
"""Every dtype we read: torch's name for it -> numpy's (or ml_dtypes') dtype of the same bits."""

MAX_DIMENSIONS = 64  # of torch and of numpy alike
EXPANSION_ALLOWANCE = 64 * 2**20  # bytes by which stride-0 tensors may outgrow their file
CHECKSUM_BUFFER = 2**20


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: the message says what is wrong and what to do."""


def printable(text: str, limit: int = 80) -> str:
    """Return text from a file cut to `limit`, with what could upset a terminal escaped."""
    shown = text[: limit + 1]
    shown = shown if shown.isprintable() else ascii(shown)[1:-1]
    return shown if len(shown) <= limit else shown[:limit] + "..."


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A regular file and what it looked like when it was first opened, to notice if it changes."""

    path: Path
    size: int
    modified_ns: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> "SourceFile":
        """Look at `path` without opening it, so that a FIFO or a device cannot block us.

        Raises:
            CheckpointError: it is missing, unreadable, or not a regular file.
        """
        try:
            found = path.stat()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot be read: {_reason(error)}") from None
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError("is not a regular file; expected a checkpoint file or a folder")
        return cls(
            path=path,
            size=found.st_size,
            modified_ns=found.st_mtime_ns,
            inode=found.st_ino,
        )

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if the file is not the one that was opened first."""
        if SourceFile.at(self.path) != self:
            raise CheckpointError(
                f"{printable(str(self.path), 300)} changed while it was being read; "
                "run again once nothing writes to it"
            )

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes at `offset`, fewer at the end of the file."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                return file.read(max(0, min(nbytes, self.size - offset)))
        except OSError as error:
            raise CheckpointError(f"cannot be read: {_reason(error)}") from None

    def map(self, offset: int, nbytes: int) -> np.ndarray:
        """Return a read-only memory map of bytes as uint8 [nbytes]; no page is touched yet."""
        self.check_unchanged()
        try:
            mapped = np.memmap(self.path, np.uint8, mode="r", offset=offset, shape=(nbytes,))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{printable(str(self.path), 300)} cannot be mapped into memory: {_reason(error)}"
            ) from None
        return mapped.view(np.ndarray)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run of bytes in a file, under the name the container gives it.

    `crc32` is the checksum the container keeps for it, `None` where it keeps none.
    """

    file: SourceFile
    name: str
    offset: int
    nbytes: int
    crc32: int | None = None

    def is_intact(self) -> bool:
        """Compare the CRC-32, in small buffers; True where there is none to compare with."""
        if self.crc32 is None:
            return True
        self.file.check_unchanged()
        crc, left = 0, self.nbytes
        buffer = memoryview(bytearray(CHECKSUM_BUFFER))
        try:
            with self.file.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
                    crc = zlib.crc32(buffer[:count], crc)
                    left -= count
        except OSError as error:
            raise CheckpointError(
                f"{printable(str(self.file.path), 300)} cannot be read: {_reason(error)}"
            ) from None
        return left == 0 and crc == self.crc32


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is still on disk.

    `strides` and `offset` count elements, as in torch. `torch_dtype` is torch's name, a key of
    `DTYPES`. Two tensors with equal `storage` are the same numbers (a tied weight).

    Raises:
        CheckpointError: a shape or strides that reach outside the record.
    """

    record: Record
    torch_dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        if self.torch_dtype not in DTYPES:
            raise CheckpointError(
                f"dtype {printable(self.torch_dtype)} is not supported; "
                "save the weights as float32, float16 or bfloat16"
            )
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMENSIONS:
            raise CheckpointError(
                f"damaged: a tensor of {len(self.shape)} dimensions has {len(self.strides)} strides"
            )
        if min((self.offset, *self.shape, *self.strides), default=0) < 0:
            raise CheckpointError("damaged: a tensor has a negative size, stride or storage offset")
        end = (self.offset + self._span) * self.dtype.itemsize
        if end > self.record.nbytes:
            raise CheckpointError(
                f"damaged: a tensor of shape {list(self.shape)} reaches to byte {end} of "
                f"{printable(self.record.name)}, which holds {self.record.nbytes}"
            )
        # numpy counts a dimension of 0 as 1 when it looks for overflow; so do we.
        widest = math.prod(max(size, 1) for size in self.shape) * self.dtype.itemsize
        if widest > self.record.file.size + EXPANSION_ALLOWANCE:
            raise CheckpointError(
                f"a tensor of shape {list(self.shape)} is spread over {self.record.nbytes} bytes: "
                "it was saved from an expanded view; save `tensor.contiguous()` instead"
            )

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype of the same bits; bfloat16 and float8 are those of ml_dtypes."""
        return DTYPES[self.torch_dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's own elements, whatever the size of the storage behind them."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def storage(self) -> tuple[str | int | tuple[int, ...], ...]:
        """What makes two tensors one: file, record, dtype, offset, shape and strides."""
        path, name = str(self.record.file.path), self.record.name
        return path, name, self.torch_dtype, self.offset, self.shape, self.strides

    @property
    def _span(self) -> int:
        """Elements from the first to the last in memory, both counted."""
        if 0 in self.shape:
            return 0
        return 1 + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )

    def read(self) -> np.ndarray:
        """Return the tensor as a read-only view into the file, without a copy.

        Only the pages of this tensor are ever touched, and they are given back with the last
        reference to the view. The view has the strides of the torch tensor, and in old (non-zip)
        torch files its address may not be a multiple of the item size.

        Raises:
            CheckpointError: the file changed or shrank since it was opened.
        """
        if 0 in self.shape:
            empty = np.empty(self.shape, self.dtype)
            empty.flags.writeable = False
            return empty
        itemsize = self.dtype.itemsize
        start = self.record.offset + self.offset * itemsize
        mapped = self.record.file.map(start, self._span * itemsize)
        strides = tuple(stride * itemsize for stride in self.strides)
        return np.ndarray(self.shape, self.dtype, buffer=mapped, strides=strides)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _reason(error: Exception) -> str:
    """Return the words of an operating-system error without its number and path."""
    return (getattr(error, "strerror", None) or str(error)).lower()
