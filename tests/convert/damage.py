"""Damaged and hostile checkpoints, made from a seed: for the reader's tests and the command line's.

`damaged_files` writes variants of tiny checkpoints in every container. `hostile_pickles` are
programs that would create the file `sentinel` if anything in them were run.
"""

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
SYSTEM = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


class GPTConfig:
    """A config object that checkpoints pickle; its class is never imported by the reader."""

    def __init__(self) -> None:
        self.n_layer, self.n_head, self.n_embd = 2, 2, 4


def state_dict(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return five small tensors, one transposed, one bfloat16, two sharing a storage."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(6, 4, generator=generator)
    return {
        "transformer.wte.weight": table,
        "transformer.h.0.attn.q_proj.weight": torch.randn(4, 4, generator=generator).t(),
        "transformer.h.0.norm.weight": torch.randn(4, generator=generator).bfloat16(),
        "transformer.h.1.step": torch.tensor(7),
        "lm_head.weight": table,
    }


def training_checkpoint(seed: int = 0) -> dict[str, object]:
    """Return what a training loop saves: weights, optimizer, config and numbers."""
    weights = state_dict(seed)
    moments = {
        index: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(weight, 0.5, dtype=torch.float32),
            "exp_avg_sq": torch.full_like(weight, 0.25, dtype=torch.float32),
        }
        for index, weight in enumerate(weights.values())
    }
    return {
        "model": {f"_orig_mod.{key}": value for key, value in weights.items()},
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": list(moments)}]},
        "model_args": {"n_layer": 2, "n_head": 2},
        "config": GPTConfig(),
        "iter_num": 3,
        "best_val_loss": torch.tensor(1.5),
    }


def torch_zip(obj: object) -> bytes:
    """Return `obj` as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def torch_legacy(obj: object, location: str = "cpu") -> bytes:
    """Return `obj` as old versions of torch.save wrote it, with storage keys that do not vary."""
    storages: dict[int, tuple[str, torch.storage.TypedStorage]] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> tuple[object, ...] | None:
            if not isinstance(obj, torch.storage.TypedStorage):
                return None
            key, storage = storages.setdefault(obj._cdata, (str(len(storages)), obj))
            kind = getattr(torch, storage._pickle_storage_type())
            return "storage", kind, key, location, storage._size(), None

    body = io.BytesIO()
    Pickler(body, protocol=2).dump(obj)
    data = b"".join(
        struct.pack("<q", storage._size())
        + bytes(torch.tensor([], dtype=storage.dtype).set_(storage).view(torch.uint8).tolist())
        for _, storage in storages.values()
    )
    return legacy_file(body.getvalue(), [key for key, _ in storages.values()], data)


def legacy_file(
    body: bytes, keys: list[str] | bytes = b"\x80\x02].", data: bytes = b"", system: bytes = b""
) -> bytes:
    """Put the parts of an old torch file together; bytes are taken as pickles."""
    first = b"".join(pickle.dumps(part, protocol=2) for part in (MAGIC_NUMBER, 1001))
    keys = keys if isinstance(keys, bytes) else pickle.dumps(keys, protocol=2)
    return first + (system or pickle.dumps(SYSTEM, protocol=2)) + body + keys + data


def zip_file(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip of these records."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in records.items():  # a ZipInfo has a fixed date, a bare name has today's
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return buffer.getvalue()


def zip_records(data: bytes) -> dict[str, bytes]:
    """Return the records of a zip."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sharded(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the files of a safetensors checkpoint in two shards."""
    names = list(weights)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    files, weight_map = dict[str, bytes](), dict[str, str]()
    for index, half in enumerate(halves, 1):
        shard = f"model-{index:05}-of-00002.safetensors"
        files[shard] = save({name: weights[name].clone().contiguous() for name in half})
        weight_map |= dict.fromkeys(half, shard)
    index_json = {"metadata": {}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index_json).encode()
    files["config.json"] = b'{"n_layer": 2, "n_head": 2}'
    return files


def _name(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def _string(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def call(module: str, name: str, *args: bytes) -> bytes:
    """Return the pickle instructions that call a function with arguments already in pickle form."""
    return _name(module, name) + b"(" + b"".join(args) + b"tR"


def hostile_calls(sentinel: Path) -> dict[str, bytes]:
    """Return pickle fragments that run code; each leaves one value and is refused by its call."""
    shell, python = f"touch {sentinel}", f"open({str(sentinel)!r}, 'w')"
    system, one = _name("os", "system"), b"K\x01\x85"
    # fmt: off
    return {
        "os.system": call("os", "system", _string(shell)),
        "posix.system": call("posix", "system", _string(shell)),
        "nt.system": call("nt", "system", _string(shell)),
        "builtins.eval": call("builtins", "eval", _string(python)),
        "builtins.exec": call("builtins", "exec", _string(python)),
        "__builtin__.eval": call("__builtin__", "eval", _string(python)),
        "builtins.open": call("builtins", "open", _string(str(sentinel)), _string("w")),
        "builtins.getattr": call("builtins", "getattr", system, _string("__call__")),
        "builtins.__import__": call("builtins", "__import__", _string("antigravity")),
        "builtins.map": call("builtins", "map", system, b"](" + _string(shell) + b"e"),
        "subprocess.Popen": call("subprocess", "Popen", _string(shell), b"K\xffNNNNN\x89\x88"),
        "functools.partial": call("functools", "partial", system, _string(shell)),
        "operator.methodcaller": call("operator", "methodcaller", _string("system")),
        "pickle.loads": call("pickle", "loads", b"C\x02N."),
        "torch.load": call("torch", "load", _string(str(sentinel))),
        "torch.hub.load": call("torch.hub", "load", _string("a/b"), _string("c")),
        "webbrowser.open": call("webbrowser", "open", _string("file:///")),
        "shutil.rmtree": call("shutil", "rmtree", _string(str(sentinel.parent / "nothing"))),
        "runpy._run_code": call("runpy", "_run_code", _string(python), b"}"),
        "codecs.decode": call("codecs", "decode", _string(python), _string("rot13")),
        "numpy.load": call("numpy", "load", _string(str(sentinel))),
        "pathlib.Path.touch": call("pathlib", "Path.touch", _string(str(sentinel))),
        "by stack global": b"\x8c\x02os\x8c\x06system\x93" + _string(shell) + b"\x85R",
        "unicode name": call("оs", "system", _string(shell)),
        "escape sequence": call("os\x1b[2J", "system", _string(shell)),
        "call of a string": _string("os.system") + one + b"R",
        "call of a stand-in": _name("os", "system") + b")\x81" + _string(shell) + b"\x85R",
        "call of a called": call("os", "system", _string(shell)) + b")R",
        "build on a function": system + b"}" + _string("__code__") + b"Nsb",
        "build on a string": _string("text") + b"}b",
        "build on a list": b"]}b",
        "nested in a tensor": call(
            "torch._utils", "_rebuild_tensor_v2",
            call("os", "system", _string(shell)), b"K\x00))\x89N",
        ),
        "in a persistent id": (
            b"(" + _string("storage") + call("os", "system", _string(shell)) + b"tQ"
        ),
    }
    # fmt: on


def hostile_fragments(sentinel: Path) -> dict[str, bytes]:
    """Return further fragments that must not run: refused as damage, or built as inert objects."""
    shell = f"touch {sentinel}"
    system = _name("os", "system")
    argument = _string(shell)
    colliding = b"".join(
        b"\x8a\x0b" + (k * (2**61 - 1)).to_bytes(11, "little") + b"N" for k in range(1, 999)
    )
    encode = b"0" + call("_codecs", "encode", b"h\x00", _string("latin1"))
    copy = b"0" + call("builtins", "set", b"h\x00")
    # each list holds the one before it ten times
    doubled = b"]q\x00" + b"".join(b"(" + b"h\x00" * 10 + b"lq\x00" for _ in range(40))
    # fmt: off
    return {
        "INST": b"(S'" + shell.encode() + b"'\nios\nsystem\n",
        "OBJ": b"(" + system + argument + b"o",
        "EXT1": b"\x82\x01",
        "EXT4": b"\x84\xff\xff\xff\x7f",
        "text PERSID": b"Pstorage\n",
        "text LONG": b"L" + b"9" * 5000 + b"L\n",
        "BYTEARRAY8 of 2**62": b"\x96" + struct.pack("<Q", 2**62),
        "BINBYTES8 of 2**62": b"\x8e" + struct.pack("<Q", 2**62),
        "BINUNICODE8 of 2**40": b"\x8d" + struct.pack("<Q", 2**40),
        "BINBYTES of 2**32-1": b"B\xff\xff\xff\xff",
        "BINSTRING negative": b"T\xff\xff\xff\xff",
        "LONG4 of 2**31-1": b"\x8b\xff\xff\xff\x7f",
        "FRAME of 2**63": b"\x95" + struct.pack("<Q", 2**63) + b"N",
        "LONG_BINPUT huge": b"Nr\xff\xff\xff\xff",
        "NEXT_BUFFER": b"\x97",
        "GLOBAL without an end": b"c" + b"a" * 10_000,
        "lone surrogate": b"X\x03\x00\x00\x00\xed\xa0\x80",
        "NEWOBJ of a function": system + argument + b"\x85\x81",
        "NEWOBJ_EX of a function": system + argument + b"\x85}\x92",
        "default factory": call("collections", "defaultdict", system),
        "reconstructor": call(
            "copyreg", "_reconstructor", system, _name("builtins", "object"), b"N"
        ),
        "stand-in built twice": system + b")\x81}" + argument + b"Nsb}b",
        "tensor of a function": call(
            "torch._tensor", "_rebuild_from_type_v2", system, system, argument + b"\x85", b"}"
        ),
        "parameter of a string": call("torch._utils", "_rebuild_parameter", argument, b"\x88N"),
        "colliding integer keys": b"}(" + colliding + b"u",
        "deep tuple as a key": b"}N" + b"\x85" * 150_000 + b"Ns",
        "deep list": b"]" * 150_000 + b"a" * 149_999,
        "deep objects": _name("a", "B") + b")\x81" + b"\x85" * 150_000,
        "deep states": b"N" + (_name("a", "B") + b")\x81") * 30_000 + b"b" * 29_999,
        "shared references": doubled,
        "steps": b"N0" * 1_100_000 + b"N",
        "amplified bytes": _string("a" * 200_000) + b"q\x00" + encode * 500,
        "amplified sets": b"](" + b"K\x01" * 10_000 + b"eq\x00" + copy * 2_000,
        "self-containing list": b"]q\x00h\x00a",
        "missing memo": b"j\xff\xff\xff\xff",
        "quantised": call("torch._utils", "_rebuild_qtensor", b"N"),
        "sparse": call("torch._utils", "_rebuild_sparse_tensor", b"N"),
        "meta": call("torch._utils", "_rebuild_meta_tensor_no_storage", b"N"),
        "negative stride": _tensor(size=b"K\x04", stride=b"J\xff\xff\xff\xff"),
        "beyond the storage": _tensor(size=b"K\x19", stride=b"K\x01"),
        "huge expanded": _tensor(size=b"\x8a\x07" + b"\x7f" * 7, stride=b"K\x00"),
        "size beyond 64 bits": _tensor(size=b"\x8a\x10" + b"\x7f" * 16, stride=b"K\x01"),
        "boolean size": _tensor(size=b"\x88", stride=b"K\x01"),
    }
    # fmt: on


def _tensor(size: bytes, stride: bytes) -> bytes:
    """Return the pickle of a float tensor over the 24 floats of storage "0"."""
    storage = (
        b"(" + _string("storage") + _name("torch", "FloatStorage") + _string("0") + _string("cpu")
        + b"K\x18tQ"
    )  # fmt: skip
    arguments = storage, b"K\x00", size + b"\x85", stride + b"\x85", b"\x89N"
    return call("torch._utils", "_rebuild_tensor_v2", *arguments)


def hostile_files(fragment: bytes) -> dict[str, bytes]:
    """Return checkpoint files that hold the fragment in different places of their pickle."""
    good = zip_records(torch_zip(state_dict()))
    body = good["archive/data.pkl"][2:-1]  # without PROTO and STOP
    start, stop = b"\x80\x02", b"."
    placed = {
        "top": start + fragment + stop,
        "config": start + b"}(" + _string("model") + body + _string("config") + fragment + b"u.",
        "entry": start + body + _string("entry") + fragment + b"s.",
        "state": start + b"}(" + _string("model") + body + _string("config")
        + _name("model", "GPTConfig") + b")\x81}" + _string("n_head") + fragment + b"sbu.",
    }  # fmt: skip
    files = {
        f"zip, {place}": zip_file({**good, "archive/data.pkl": pickled})
        for place, pickled in placed.items()
    }
    files["legacy, object"] = legacy_file(placed["top"])
    files["legacy, keys"] = legacy_file(b"\x80\x02}.", keys=placed["top"])
    files["legacy, system"] = legacy_file(b"\x80\x02}.", system=placed["top"])
    files["bare pickle"] = placed["top"]
    return files


def damaged_files(directory: Path, seed: int, count: int) -> Iterator[tuple[str, Path]]:
    """Write `count` damaged checkpoints into `directory`, one after the other.

    Yields a description and the path: a file, or a folder for sharded checkpoints. The same seed
    gives the same bytes. Hostile ones would create `directory / "sentinel"`.
    """
    rng = random.Random(seed)
    weights = {key: value.contiguous().clone() for key, value in state_dict().items()}
    whole = {
        "zip.pt": torch_zip(state_dict()),
        "training.pt": torch_zip(training_checkpoint()),
        "legacy.pt": torch_legacy(state_dict()),
        "legacy-training.pt": torch_legacy(training_checkpoint()),
        "model.safetensors": save(weights),
    }
    shards = sharded(weights)
    sentinel = directory / "sentinel"
    hostile = [
        (f"{name} in {place}", data)
        for name, fragment in (hostile_calls(sentinel) | hostile_fragments(sentinel)).items()
        if len(fragment) < 10**5  # the slow ones have tests of their own
        for place, data in hostile_files(fragment).items()
    ]
    rng.shuffle(hostile)
    for index in range(count):
        folder = directory / f"{index:05}"
        folder.mkdir()
        kind = index % 8
        if kind == 0 and hostile:
            description, data = hostile.pop()
            path = folder / "hostile.pt"
            path.write_bytes(data)
        elif kind == 1:
            name = rng.choice(list(shards))
            description, data = _damage(rng, name, shards[name], whole)
            for shard, content in shards.items():
                (folder / shard).write_bytes(data if shard == name else content)
            description, path = f"sharded: {description}", folder
        else:
            name = rng.choice(list(whole))
            description, data = _damage(rng, name, whole[name], whole)
            path = folder / name
            path.write_bytes(data)
        yield f"{index}: {description}", path


def _damage(
    rng: random.Random, name: str, data: bytes, others: dict[str, bytes]
) -> tuple[str, bytes]:
    """Return one damaged variant of a file and what was done to it."""
    areas = _areas(name, data)
    area = rng.choice(list(areas))
    at = rng.choice(areas[area])
    changed = bytearray(data)
    kind = rng.choice(
        ["flip", "flip", "flips", "extreme", "cut", "insert", "delete", "splice", "repeat", "edit"]
    )
    if kind == "flip":
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == "flips":
        for position in rng.choices(areas[area], k=4):
            changed[position] ^= 1 << rng.randrange(8)
    elif kind == "extreme":
        size = rng.choice([1, 2, 4, 8])
        changed[at : at + size] = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * size
    elif kind == "cut":
        del changed[at:]
    elif kind == "insert":
        changed[at:at] = rng.randbytes(rng.randrange(1, 32))
    elif kind == "delete":
        del changed[at : at + rng.randrange(1, 32)]
    elif kind == "splice":
        other = others[rng.choice(list(others))]
        begin, size = rng.randrange(len(other)), rng.randrange(1, 200)
        changed[at : at + size] = other[begin : begin + size]
    elif kind == "repeat":
        changed[at:at] = changed[max(0, at - rng.randrange(1, 400)) : at]
    elif data.startswith(b"PK"):
        changed, kind = _edited_zip(rng, data)
    elif name.endswith((".json", ".safetensors")):
        changed, kind = _edited_json(rng, name, data)
    if changed == data:
        kind = "flip"
        changed[at] ^= 1 << rng.randrange(8)
    return f"{name}: {kind} in {area} at {at}", bytes(changed)


def _areas(name: str, data: bytes) -> dict[str, range]:
    """Return the parts of a file that are read in different ways."""
    end = len(data)
    if data.startswith(b"PK"):
        directory = data.index(b"PK\x01\x02")
        pickled = data.index(b"\x80\x02")
        headers = data.index(b"PK\x03\x04", 4)
        return {
            "pickle": range(pickled, data.index(b".PK\x07\x08")),
            "headers": range(headers, headers + 120),
            "data": range(headers, directory),
            "directory": range(directory, end),
        }
    if name.endswith(".safetensors"):
        header = 8 + int.from_bytes(data[:8], "little")
        return {"size": range(8), "header": range(8, header), "data": range(header, end)}
    if name.endswith(".json"):
        return {"text": range(end)}
    middle = data.rindex(b"e.") if b"e." in data else end // 2
    return {"pickles": range(middle), "data": range(middle, end), "start": range(100)}


def _edited_zip(rng: random.Random, data: bytes) -> tuple[bytearray, str]:
    """Change a zip in a way that leaves it a valid zip."""
    records = zip_records(data)
    storages = [name for name in records if "/data/" in name]
    name, other = rng.sample(storages, 2)
    edit = rng.choice(["drop", "swap", "grow", "compress", "big-endian", "twice", "rename"])
    if edit == "drop":
        del records[name]
    elif edit == "swap":
        records[name], records[other] = records[other], records[name]
    elif edit == "grow":
        records[name] += b"\0" * rng.randrange(1, 9)
    elif edit == "big-endian":
        records["archive/byteorder"] = b"big"
    elif edit == "rename":
        records["archive/renamed.pkl"] = records.pop("archive/data.pkl")
    if edit == "compress":
        return bytearray(zip_file(records, zipfile.ZIP_DEFLATED)), edit
    changed = bytearray(zip_file(records))
    if edit == "twice":  # the other name, of the same length, in both of its headers
        changed = bytearray(changed.replace(name.encode(), other.encode().ljust(len(name))))
    return changed, f"zip {edit}"


def _edited_json(rng: random.Random, name: str, data: bytes) -> tuple[bytearray, str]:
    """Change the JSON of a safetensors header or of an index and keep it JSON."""
    is_header = name.endswith(".safetensors")
    size = int.from_bytes(data[:8], "little") if is_header else len(data)
    start = 8 if is_header else 0
    text = data[start : start + size].decode()
    old, new = rng.choice(
        [
            ("F32", "BF16"), ("F32", "I4"), ("F32", "C64"), ("[6,4]", "[4611686018427387904,4]"),
            ("[6,4]", "[24]"), ("[6,4]", "[-6,-4]"), ("[0,", "[8,"), ("{", '{"x":' * 3000),
            ("lm_head", "transformer.wte"), ('"shape"', '"data_offsets"'),
            ("weight", "\\ud800"),
            ("model-00001", "../model-00001"), ("model-00001", "model-00002"),
            ("weight_map", "map"), (": 2", ": NaN"), ("weight", "weight.module"),
            ("}", ', "n_head": 3}'),
        ]
    )  # fmt: skip
    edited = text.replace(old, new, 1).encode()
    if is_header:
        edited = struct.pack("<Q", len(edited)) + edited
    return bytearray(edited + data[start + size :]), f"json {old} -> {new[:20]}"
