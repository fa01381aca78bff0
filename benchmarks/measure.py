"""Alternating runs and their medians; processes with their peak memory."""

import os
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
    inner: float  # seconds that the program printed last, of the work itself; NaN if it did not
    peak: int  # bytes of resident memory, mapped pages included


def run_python(code: str) -> Process:
    """Runs a program in a new interpreter.

    Raises:
        RuntimeError: it fails.
    """
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.stdout.close()
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"exit status {child.returncode} of {code}")
    last = output.strip().splitlines()[-1:]
    inner = float(last[0]) if last and last[0].replace(".", "").isdigit() else float("nan")
    return Process(wall, inner, usage.ru_maxrss * 1024)
