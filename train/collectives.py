"""What a compiled program sends between devices, read from its text."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "c64": 64, "c128": 128}  # the others have them in their names
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_OPERATION = re.compile(rf" ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations|branch_computations)="
                     r"(\{[^}]*\}|%?[\w.-]+)")  # fmt: skip
_LIMIT = re.compile(r"%?([\w.-]+) = s32\[\]\S* constant\((\d+)\)")


@dataclass(frozen=True)
class Collective:
    """Exchanges of one kind in one run of a program.

    Attributes:
        kind: one of KINDS.
        count: how many.
        bytes: that each device sends, over the fewest steps that the kind takes on a ring.
    """

    kind: str
    count: int
    bytes: float


def collectives(text: str, devices: int) -> tuple[Collective, ...]:
    """The collectives of a program, by kind.

    A ring of g devices sends (g-1)/g of what an all-gather or all-to-all gives and of what a
    reduce-scatter takes, twice that of what an all-reduce takes, and a permute's operand once.

    Args:
        text: the compiled module, as `Compiled.as_text()` gives it. What stands in a loop counts as
            often as the loop runs; once, where that is not fixed (a decoder's loop over tokens).
        devices: that the program runs on.
    """
    computations = dict(_computations(text))
    entry = next(name for name, lines in computations.items() if lines and lines[0] == "ENTRY")
    totals: dict[str, tuple[int, float]] = {}
    for (kind, _), (times, nbytes) in _found(computations, entry, devices).items():
        count, total = totals.get(kind, (0, 0.0))
        totals[kind] = (count + times, total + times * nbytes)
    return tuple(Collective(kind, *totals[kind]) for kind in KINDS if kind in totals)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and lines of each computation; the entry's begin with "ENTRY"."""
    name, lines = "", []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name, lines = match[2], ["ENTRY"] if match[1] else []
        elif line == "}" and name:
            yield name, lines
            name = ""
        elif name:
            lines.append(line)


def _found(
    computations: dict[str, list[str]], entry: str, devices: int
) -> dict[tuple[str, str], tuple[int, float]]:
    """Runs and bytes of each collective, by kind and channel.

    The compiler may write one exchange as a chain of fused steps, each of which names it whole:
    they share its channel.
    """
    found: dict[tuple[str, str], tuple[int, float]] = {}

    def visit(name: str, times: int) -> None:
        for line in computations.get(name, ()):
            if match := _OPERATION.search(line):
                channel = re.search(r"channel_id=(\d+)", line)
                key = (match[1], channel[1] if channel else line.partition(" = ")[0])
                before, _ = found.get(key, (0, 0.0))
                found[key] = (max(before, times), _bytes(line, match, devices))
                continue
            trips = 1
            if " while(" in line:
                trips = _trips(line, computations)
            for called in _CALLED.findall(line):
                for other in re.findall(r"[\w.-]+", called):
                    visit(other, times * trips)

    visit(entry, 1)
    return found


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """How often a loop runs, where that is fixed; else 1.

    Compilers for GPUs and CPUs write it down. The TPU's does not, but the counter of JAX's scan
    goes from 0 to a constant.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line):
        return int(known[1])
    match = re.search(r"condition=%?([\w.-]+)", line)
    condition = computations.get(match[1], []) if match else []
    constants = {m[1]: int(m[2]) for line in condition if (m := _LIMIT.search(line))}
    for line in condition:
        if line.lstrip().startswith("ROOT") and "direction=LT" in line:
            for name in re.findall(r"%([\w.-]+)", line.partition("compare(")[2]):
                if name in constants:
                    return constants[name]
    return 1


def _bytes(line: str, match: re.Match[str], devices: int) -> float:
    """Bytes that a device sends in one run of a collective."""
    kind = match[1]
    arrays = [_size(*array) for array in _ARRAY.findall(line[: match.start()].partition(" = ")[2])]
    group = _group(line, devices)
    share = (group - 1) / group
    if kind == "collective-permute":
        return float(arrays[0])
    if match[2] and kind == "all-gather":  # its start gives operands, and then results
        arrays = arrays[len(arrays) // 2 :]
    result = sum(arrays)
    if kind == "reduce-scatter":
        result *= group  # what it takes
    return (2.0 if kind == "all-reduce" else 1.0) * share * result


def _group(line: str, devices: int) -> int:
    """Devices that exchange with one another."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(match[2])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    return devices


def _size(dtype: str, shape: str) -> int:
    """Bytes of an array of a type such as bf16[2,3]."""
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype) or (int(digits[0]) if digits else 0)
    return math.prod(int(n) for n in shape.split(",") if n) * bits // 8
