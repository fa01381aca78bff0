"""Read a torch pickle without running anything in it.

A pickle is a program for a stack machine: it can name any function of any module and call it. This
machine has only the instructions that checkpoints need. A name becomes an inert `Global`; a call
goes through `HANDLERS`, a short table of pure functions, or is refused; an object of an unknown
class becomes a `StandIn` that only remembers what the file said. Nothing is imported and no
attribute of ours can be set. Sizes are checked before anything is allocated, and the number of
steps is limited, so that a hostile file fails quickly.
"""

import io
import mmap
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from convert.checkpoint.lazy_tensor import CheckpointError, printable
from convert.checkpoint.pickle_values import (
    HANDLERS,
    STORAGE_DTYPES,
    UNSUPPORTED,
    Global,
    StandIn,
    StorageRef,
    class_name,
    dict_key,
    frozen_set,
    integer,
    text,
)

MAX_BYTES = 64 * 2**20  # a training checkpoint of 100 layers needs under 1 MB
MAX_STEPS = 2_000_000  # it takes about 200,000
MAX_NAME = 4096


class UnsafePickleError(CheckpointError):
    """A pickle that asks to call something; nothing was called."""


@dataclass(frozen=True, eq=False)
class Unpickled:
    """The value of one pickle, the storages it refers to by key, and the position after it."""

    value: object
    storages: dict[str, StorageRef]
    end: int


def unpickle(data: bytes | mmap.mmap, start: int = 0) -> Unpickled:
    """Read the pickle that begins at `start`; runs and imports nothing.

    Raises:
        UnsafePickleError: it asks for a call that is not one of the few that checkpoints need.
        CheckpointError: it is damaged, too large, or holds what cannot be converted.
    """
    machine = _InertUnpickler(data, start)
    return Unpickled(machine.load(), machine.storages, machine.position)


# Base-class instructions that are taken as they are: they push a constant, regroup the stack or use
# the memo. All protocol-0 text forms, extension codes and out-of-band buffers are absent.
_PLAIN_INSTRUCTIONS = (
    pickle.PROTO + pickle.STOP + pickle.MARK + pickle.POP + pickle.POP_MARK + pickle.DUP
    + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE
    + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT
    + pickle.BINSTRING + pickle.SHORT_BINSTRING
    + pickle.BINBYTES + pickle.SHORT_BINBYTES + pickle.BINBYTES8
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    + pickle.EMPTY_LIST + pickle.LIST + pickle.EMPTY_DICT + pickle.EMPTY_SET
    + pickle.BINGET + pickle.LONG_BINGET + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE
    + pickle.GLOBAL + pickle.STACK_GLOBAL + pickle.BINPERSID
)  # fmt: skip


class _InertUnpickler(pickle._Unpickler):  # the C one allocates whatever a memo index asks for
    """The pure-Python unpickler with its own instruction table, reader and limits."""

    stack: list[Any]
    append: Callable[[object], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes | mmap.mmap, start: int) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.data, self.position = data, start
        self.limit = min(len(data), start + MAX_BYTES)
        self.steps = 0
        self.memo: dict[int, object] = {}
        self.metastack: list[list[object]] = []
        self.stack = []
        self.append = self.stack.append
        self.storages: dict[str, StorageRef] = {}

    def load(self) -> object:
        try:
            while True:
                self._spend(1)
                code = self.read(1)
                instruction = self.dispatch.get(code[0])
                if instruction is None:
                    raise CheckpointError(
                        f"damaged, or not a checkpoint: its pickle holds instruction {code!r}, "
                        "which torch.save never writes"
                    )
                instruction(self)  # pyright: ignore[reportArgumentType]
        except pickle._Stop as stop:  # pyright: ignore[reportAttributeAccessIssue]
            return stop.value
        except CheckpointError:
            raise
        except (
            LookupError,
            TypeError,
            AttributeError,
            ValueError,
            OverflowError,
            struct.error,
            pickle.UnpicklingError,
        ) as error:
            detail = printable(f"{type(error).__name__}: {error}", 160)
            raise CheckpointError(f"damaged: its pickle makes no sense ({detail})") from None

    def read(self, count: int) -> bytes:
        end = self.position + count
        if end > self.limit:
            raise CheckpointError(
                f"damaged or cut off: its pickle asks for {count} bytes where "
                f"{self.limit - self.position} are left"
            )
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def readline(self) -> bytes:
        end = self.data.find(b"\n", self.position, min(self.limit, self.position + MAX_NAME))
        if end < 0:
            raise CheckpointError("damaged: its pickle holds a name without an end")
        return self.read(end + 1 - self.position)

    def find_class(self, module: str, name: str) -> Global:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Global(module, name)

    def persistent_load(self, pid: object) -> object:
        """Return the storage, or in old files the class, that a persistent id stands for."""
        if not isinstance(pid, tuple) or not pid:
            raise TypeError("a persistent id that is not a tuple")
        if pid[0] == "module" and len(pid) == 4 and isinstance(pid[1], Global):
            return pid[1]
        if pid[0] != "storage" or len(pid) not in (5, 6) or not isinstance(pid[1], Global):
            raise TypeError("a persistent id that is not a storage")
        fields: tuple[Any, ...] = pid
        _, kind, key, location, numel, *view = fields
        if any(view):
            raise CheckpointError("holds storage views of torch before 0.4; save it again")
        if location == "meta":
            _refuse(UNSUPPORTED["torch._utils._rebuild_meta_tensor_no_storage"])
        if kind.name.startswith("Q") and kind.name.endswith("Storage"):
            _refuse(UNSUPPORTED["torch._utils._rebuild_qtensor"])
        if kind.module.partition(".")[0] != "torch" or kind.name not in STORAGE_DTYPES:
            raise CheckpointError(f"holds an unknown storage type, {printable(kind.qualified)}")
        if integer(numel) < 0:
            raise TypeError("a storage of negative size")
        storage = StorageRef(text(key), STORAGE_DTYPES[kind.name], numel)
        if self.storages.setdefault(key, storage).nbytes != storage.nbytes:
            raise CheckpointError(f"damaged: storage {printable(key)} has two sizes")
        return storage

    def _spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise CheckpointError(
                f"refused: its pickle takes over {MAX_STEPS:,} steps; no state dict needs so many"
            )

    def _frame(self) -> None:
        self.read(8)  # a frame is only a hint for reading ahead

    def _text(self, layout: str) -> None:
        (count,) = struct.unpack(layout, self.read(struct.calcsize(layout)))
        self.append(self.read(count).decode("utf-8"))

    def _text_1(self) -> None:
        self._text("<B")

    def _text_4(self) -> None:
        self._text("<I")

    def _text_8(self) -> None:
        self._text("<Q")

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise UnsafePickleError(
                "the file asks to call something that is not a named function; "
                "refused, nothing was run"
            )
        name = function.qualified
        if name in UNSUPPORTED:
            _refuse(UNSUPPORTED[name])
        handler = HANDLERS.get(name)
        if handler is None:
            raise UnsafePickleError(
                f"the file asks to call {printable(name)}; refused, nothing was run. A checkpoint "
                "needs no such call: save `model.state_dict()` alone, where you trust the file"
            )
        self._spend(len(args) + sum(len(arg) for arg in args if hasattr(arg, "__len__")))
        self.append(handler(*args))

    def _new_object(self) -> None:
        args, cls = self.stack.pop(), self.stack.pop()
        if not isinstance(args, tuple):
            raise TypeError("an object whose arguments are not a tuple")
        self.append(StandIn(class_name(cls), args))

    def _new_object_with_keywords(self) -> None:
        keywords, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.append(StandIn(class_name(cls), (args, keywords)))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, StandIn):
            if target.state is not None:
                raise TypeError(f"an object of {target.qualified_name} with two states")
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict's attributes (`_metadata`) are dropped
            raise UnsafePickleError(
                f"the file asks to set attributes of a {type(target).__name__}; "
                "refused, nothing was run"
            )

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        entries = target.entries if isinstance(target, StandIn) else target
        if type(entries) is not dict or len(items) % 2:
            raise TypeError("entries for something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            entries[dict_key(key)] = value

    def _set_item(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._set_items(items)

    def _set_marked_items(self) -> None:
        self._set_items(self.pop_mark())

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        elements = target.elements if isinstance(target, StandIn) else target
        if type(elements) is not list:
            raise TypeError("elements for something that is not a list")
        elements.extend(items)

    def _append_one(self) -> None:
        self._extend([self.stack.pop()])

    def _append_marked(self) -> None:
        self._extend(self.pop_mark())

    def _add_to_set(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set:
            raise TypeError("elements for something that is not a set")
        target.update(dict_key(item) for item in items)

    def _frozenset(self) -> None:
        items = self.pop_mark()  # first: it changes what `append` is
        self.append(frozen_set(items))

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in _PLAIN_INSTRUCTIONS},
        pickle.FRAME[0]: _frame,
        pickle.SHORT_BINUNICODE[0]: _text_1,
        pickle.BINUNICODE[0]: _text_4,
        pickle.BINUNICODE8[0]: _text_8,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _new_object,
        pickle.NEWOBJ_EX[0]: _new_object_with_keywords,
        pickle.BUILD[0]: _build,
        pickle.DICT[0]: _dict,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_marked_items,
        pickle.APPEND[0]: _append_one,
        pickle.APPENDS[0]: _append_marked,
        pickle.ADDITEMS[0]: _add_to_set,
        pickle.FROZENSET[0]: _frozenset,
    }


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(f"cannot be converted: it holds {what}")
