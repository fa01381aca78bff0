"""Alternating runs and their medians; processes with their peak memory."""

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of several runs of one thing."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.runs)

    def __str__(self) -> str:
        return f"{self.median:.3g} s ({min(self.runs):.3g} to {max(self.runs):.3g})"


def alternate(functions: Sequence[Callable[[], object]], rounds: int) -> list[Timing]:
    """Times functions in turn, A B A B, after one run of each that is not counted."""
    for function in functions:
        function()
    runs: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, seconds in zip(functions, runs, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [Timing(tuple(seconds)) for seconds in runs]


@dataclass(frozen=True)
class Process:
    """One finished process."""

    wall: float  # seconds, start of the interpreter included
    inner: float  # seconds of the part of the program that it times itself; NaN if none
    peak: int  # bytes of resident memory, mapped pages included


_LAST = """
from pathlib import Path
print("seconds", globals().get("seconds", "nan"))
print(Path("/proc/self/status").read_text())
"""


def run_python(code: str) -> Process:
    """Runs a program in a new interpreter; it may leave a number in a global called `seconds`.

    Raises:
        RuntimeError: it fails.
    """
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code + _LAST], capture_output=True, text=True)
    wall = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode} of {code}\n{done.stderr}")
    seconds = re.search(r"^seconds (\S+)$", done.stdout, re.MULTILINE)
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", done.stdout, re.MULTILINE)
    if seconds is None or peak is None:
        raise RuntimeError(f"no figures in the output of {code}")
    return Process(wall, float(seconds[1]), int(peak[1]) * 1024)
