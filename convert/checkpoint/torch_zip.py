"""Read the container of torch.save since version 1.6: a zip of a pickle and one record a storage.

    archive/data.pkl      the object, with storages by key
    archive/byteorder     "little" or "big" (absent in older files)
    archive/data/<key>    the bytes of one storage, uncompressed

Only the zip directory, the local headers and the pickle are read.
"""

import io
import os
import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass

from convert.checkpoint.lazy_tensor import (
    CheckpointError,
    LazyTensor,
    Record,
    SourceFile,
    printable,
)
from convert.checkpoint.pickle_values import PickledTensor
from convert.checkpoint.unpickle import MAX_BYTES, unpickle

MAX_DIRECTORY = 16 * 2**20  # 100,000 storages need about 10 MB
ENCRYPTED = 0x1 | 0x40
UTF8_NAME = 0x800
LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")


@dataclass(frozen=True, kw_only=True)
class TorchFile:
    """The pickled object of a torch file and the record behind each storage key."""

    root: object
    records: dict[str, Record]
    has_checksums: bool

    def tensor(self, pickled: PickledTensor) -> LazyTensor:
        """Lay the tensor that the pickle describes over its record."""
        return LazyTensor(
            record=self.records[pickled.storage.key],
            torch_dtype=pickled.dtype,
            shape=pickled.shape,
            strides=pickled.strides,
            offset=pickled.offset,
        )


def read_torch_zip(source: SourceFile) -> TorchFile:
    """Read the object in a torch zip file; the storages stay on disk.

    Raises:
        CheckpointError: not a zip of torch.save, damaged, compressed, encrypted or big-endian.
    """
    try:
        with _CappedFile(source.path) as file, zipfile.ZipFile(file) as archive:
            entries, directory = archive.infolist(), archive.start_dir
            _check_names([entry.filename for entry in entries])
            records = _records(source, file, entries, directory)
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"damaged or cut off: its zip directory cannot be read ({printable(str(error))}); "
            "copy the file again"
        ) from None
    root_folder = next(name for name in records if _is_pickle(name))[: -len("data.pkl")]
    _check_byteorder(records.get(f"{root_folder}byteorder"))
    found = unpickle(_read_pickle(records[f"{root_folder}data.pkl"]))
    storages: dict[str, Record] = {}
    for key, storage in found.storages.items():
        record = records.get(f"{root_folder}data/{key}")
        if record is None:
            raise CheckpointError(f"damaged: storage {printable(key)} is not in the file")
        if record.nbytes != storage.nbytes:
            raise CheckpointError(
                f"damaged: {printable(record.name)} holds {record.nbytes} bytes, "
                f"its pickle says {storage.nbytes}"
            )
        storages[key] = record
    has_checksums = any(record.crc32 is not None for record in records.values())
    return TorchFile(root=found.value, records=storages, has_checksums=has_checksums)


class _CappedFile(io.FileIO):
    """A file that refuses to read a huge piece, whatever size a zip header asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # to the end, as zipfile reads the last record
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > MAX_DIRECTORY:
            raise CheckpointError("damaged: its zip directory is larger than any checkpoint needs")
        return super().read(size) or b""


def _is_pickle(name: str) -> bool:
    return name.count("/") == 1 and name.endswith("/data.pkl")


def _check_names(names: list[str]) -> None:
    """Refuse zips of something else, and names that occur twice."""
    for name in names:
        if name.partition("/")[2] == "constants.pkl" or name.partition("/")[2].startswith("code/"):
            raise CheckpointError(
                "looks like a TorchScript archive (torch.jit.save), which holds code; "
                "save `torch.jit.load(path).state_dict()` with torch.save"
            )
    pickles = [name for name in names if _is_pickle(name)]
    if len(set(names)) != len(names):
        ((twice, _),) = Counter(names).most_common(1)
        raise CheckpointError(f"damaged: {printable(twice)} is in the zip twice")
    if len(pickles) > 1:
        raise CheckpointError("damaged: it holds two data.pkl; expected one")
    if not pickles:
        if names and all(name.endswith(".npy") for name in names):
            what = "a numpy archive (.npz)"
        else:
            what = f"a zip of something else ({printable(', '.join(names[:5])) or 'empty'})"
        raise CheckpointError(
            f"looks like {what}; expected a zip written by torch.save, with a data.pkl"
        )


def _records(
    source: SourceFile, file: io.FileIO, entries: list[zipfile.ZipInfo], directory: int
) -> dict[str, Record]:
    """Return where each record's bytes lie, found from its local header."""
    has_checksums = any(entry.CRC for entry in entries)  # torch can be told to write none: all 0
    entries = sorted(entries, key=lambda entry: entry.header_offset)
    limits = [entry.header_offset for entry in entries[1:]] + [directory]
    records: dict[str, Record] = {}
    for entry, limit in zip(entries, limits, strict=True):
        name = printable(entry.filename)
        if entry.flag_bits & ENCRYPTED:
            raise CheckpointError(f"{name} is encrypted; decrypt the file first")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise CheckpointError(
                f"{name} is compressed, which torch.save never does; "
                "unpack the zip and pack it again uncompressed (zip -0)"
            )
        raw_name = entry.orig_filename.encode("utf-8" if entry.flag_bits & UTF8_NAME else "cp437")
        file.seek(entry.header_offset)
        header = file.read(LOCAL_HEADER.size + len(raw_name))
        if len(header) < LOCAL_HEADER.size:
            raise CheckpointError(f"damaged: {name} begins outside the file")
        fields = LOCAL_HEADER.unpack_from(header)
        signature, method, name_size, extra_size = fields[0], fields[3], *fields[9:]
        start = entry.header_offset + LOCAL_HEADER.size + name_size + extra_size
        if (
            signature != b"PK\x03\x04"
            or method != zipfile.ZIP_STORED
            or header[LOCAL_HEADER.size :] != raw_name
            or name_size != len(raw_name)
        ):
            raise CheckpointError(f"damaged: the header of {name} disagrees with the directory")
        if start + entry.file_size > limit:
            raise CheckpointError(f"damaged: {name} overlaps what follows it")
        records[entry.filename] = Record(
            file=source,
            name=entry.filename,
            offset=start,
            nbytes=entry.file_size,
            crc32=entry.CRC if has_checksums else None,
        )
    return records


def _check_byteorder(record: Record | None) -> None:
    if record is None:
        return
    order = record.file.read(record.offset, min(record.nbytes, 16))
    if order != b"little":
        raise CheckpointError(
            f"byteorder is {printable(order.decode('latin1'))!r}, expected 'little'; "
            "save the file again on a little-endian machine"
        )


def _read_pickle(record: Record) -> bytes:
    if record.nbytes > MAX_BYTES:
        raise CheckpointError(
            f"its pickle is {record.nbytes:,} bytes, more than any state dict needs; "
            "save `model.state_dict()` alone"
        )
    pickled = record.file.read(record.offset, record.nbytes)
    if record.crc32 is not None and zlib.crc32(pickled) != record.crc32:
        raise CheckpointError(
            f"damaged: {printable(record.name)} does not match its checksum; copy the file again"
        )
    return pickled
