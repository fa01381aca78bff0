"""Read safetensors files, one or many under an index: header only, the tensors stay on disk.

The `safetensors` library validates a header (offsets, sizes, no holes, no overlaps); what it
accepted is then parsed here for the positions.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from convert.checkpoint.lazy_tensor import (
    CheckpointError,
    LazyTensor,
    Record,
    SourceFile,
    contiguous_strides,
    printable,
)

MAX_JSON = 16 * 2**20  # bytes of header, index or config; the largest models need about 1 MB
MAX_LISTED = 5
INDEX_SUFFIX = ".index.json"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


@dataclass(frozen=True, kw_only=True)
class SafetensorsFiles:
    """The tensors of one or more safetensors files, their metadata, and every file read."""

    tensors: dict[str, LazyTensor]
    metadata: dict[str, str]
    files: tuple[Path, ...]


def read_safetensors(source: SourceFile) -> SafetensorsFiles:
    """Read the header of one safetensors file.

    Raises:
        CheckpointError: the header is damaged or does not match the file's size.
    """
    header_size = int.from_bytes(source.read(0, 8), "little")
    if header_size > min(MAX_JSON, source.size - 8):
        raise CheckpointError(
            f"damaged or cut off: its safetensors header claims {header_size:,} bytes, "
            f"the file has {max(0, source.size - 8):,} left; copy the file again"
        )
    try:
        with safe_open(source.path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"damaged or cut off: safetensors says {printable(str(error), 160)!r}; "
            "copy the file again"
        ) from None
    header = parse_json(source.read(8, header_size))
    metadata = header.pop("__metadata__", None) or {}
    tensors: dict[str, LazyTensor] = {}
    for key, entry in header.items():
        dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
        shape = tuple(entry["shape"])
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"tensor {printable(key)} has dtype {printable(dtype)}, which is not supported"
            )
        tensors[key] = LazyTensor(
            record=Record(
                file=source, name=key, offset=8 + header_size + begin, nbytes=end - begin
            ),
            torch_dtype=_DTYPES[dtype],
            shape=shape,
            strides=contiguous_strides(shape),
        )
    return SafetensorsFiles(tensors=tensors, metadata=metadata, files=(source.path,))


def read_sharded_safetensors(index: SourceFile) -> SafetensorsFiles:
    """Read the shards that an index names, from the folder it lies in.

    Raises:
        CheckpointError: a shard is missing, damaged or stray, or the index and the shards disagree
            about which tensor lies where; all disagreements at once.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("is JSON without a weight_map; expected a safetensors index")
    folder, shards = index.path.parent, sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"names the shard {printable(shard)}; expected .safetensors files beside the index"
            )
    faults = [f"shard {printable(s)} is missing" for s in shards if not (folder / s).exists()]
    faults += [
        f"{printable(path.name)} lies beside the index but is not in it: remove it or index it"
        for path in sorted(folder.glob("*.safetensors"))
        if path.name not in shards
    ]
    _raise_all(faults)

    tensors: dict[str, LazyTensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        try:
            found = read_safetensors(SourceFile.at(folder / shard))
        except CheckpointError as error:
            raise CheckpointError(f"shard {printable(shard)}: {error}") from None
        for key, tensor in found.tensors.items():
            if key in tensors:
                other = tensors[key].record.file.path.name
                faults.append(
                    f"{printable(key)} is in both {printable(other)} and {printable(shard)}"
                )
            elif weight_map.get(key) != shard:
                expected = printable(str(weight_map.get(key, "nowhere")))
                faults.append(f"{printable(key)} is in {printable(shard)}, indexed in {expected}")
            tensors.setdefault(key, tensor)
        metadata |= found.metadata
    faults += [
        f"{printable(key)} is indexed in {printable(shard)} but not there"
        for key, shard in weight_map.items()
        if key not in tensors
    ]
    _raise_all(faults)
    files = (index.path, *(folder / shard for shard in shards))
    return SafetensorsFiles(
        tensors={key: tensors[key] for key in weight_map}, metadata=metadata, files=files
    )


def read_json(source: SourceFile) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        CheckpointError: too large, not JSON, not an object, or a name that occurs twice.
    """
    if source.size > MAX_JSON:
        raise CheckpointError(f"is {source.size:,} bytes of JSON; expected under {MAX_JSON:,}")
    return parse_json(source.read(0, source.size))


def parse_json(text: bytes | str) -> dict[str, Any]:
    """Parse a JSON object; as `read_json`."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be printed
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON ({printable(str(error), 120)})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"is a JSON {type(value).__name__}; expected a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise CheckpointError(f"damaged: {printable(twice)} is in its JSON twice")
    return names


def _raise_all(faults: list[str]) -> None:
    if faults:
        more = f" (and {len(faults) - MAX_LISTED} more)" if len(faults) > MAX_LISTED else ""
        raise CheckpointError("; ".join(faults[:MAX_LISTED]) + more)
