"""Read the container of torch.save before version 1.6, which is not a zip.

Five pickles follow each other: a magic number, the format's version, the writer's byte order, the
object, and the list of storage keys. Then come the storages in the order of that list, each an
8-byte count of elements and the elements. There is no checksum.
"""

import mmap
import struct

from convert.checkpoint.lazy_tensor import DTYPES, CheckpointError, Record, SourceFile, printable
from convert.checkpoint.torch_zip import TorchFile
from convert.checkpoint.unpickle import unpickle

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
VERSION = 1001
COUNT = struct.Struct("<q")


def read_torch_legacy(source: SourceFile) -> TorchFile:
    """Read the object in an old torch file; the storages stay on disk.

    Raises:
        CheckpointError: another pickle, damaged, cut off or big-endian.
    """
    try:
        with (
            source.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            magic = unpickle(data)
            if magic.value != MAGIC_NUMBER:
                raise CheckpointError(
                    "looks like a plain Python pickle; expected a file written by torch.save"
                )
            version = unpickle(data, magic.end)
            if version.value != VERSION:
                raise CheckpointError(f"damaged: its format is not version {VERSION}")
            system = unpickle(data, version.end)
            if not isinstance(system.value, dict) or system.value.get("little_endian") is not True:
                raise CheckpointError(
                    "was not written on a little-endian machine; save it again on one"
                )
            found = unpickle(data, system.end)
            keys = unpickle(data, found.end)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    if not isinstance(keys.value, list) or any(type(key) is not str for key in keys.value):
        raise CheckpointError("damaged: its list of storages makes no sense")
    if len(set(keys.value)) != len(keys.value) or set(keys.value) != found.storages.keys():
        raise CheckpointError("damaged: its list of storages does not match its pickle")

    records: dict[str, Record] = {}
    position = keys.end
    for key in keys.value:
        storage = found.storages[key]
        size = position + COUNT.size + storage.nbytes - source.size
        if size > 0:
            raise CheckpointError(
                f"cut off: {size:,} bytes are missing in storage {printable(key)}; "
                "copy the file again"
            )
        (count,) = COUNT.unpack(source.read(position, COUNT.size))
        if count != storage.numel:
            raise CheckpointError(
                f"damaged: storage {printable(key)} has {count} elements of "
                f"{DTYPES[storage.dtype].itemsize} bytes, its pickle says {storage.numel}"
            )
        start = position + COUNT.size
        records[key] = Record(file=source, name=key, offset=start, nbytes=storage.nbytes)
        position = start + storage.nbytes
    if position != source.size:
        raise CheckpointError(f"damaged: {source.size - position:,} bytes follow the last storage")
    return TorchFile(root=found.value, records=records, has_checksums=False)
