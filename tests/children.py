"""Processes of their own, for what JAX decides when it starts: fake devices, another compiler."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

EIGHT = "--xla_force_host_platform_device_count=8"
on_eight_devices = pytest.mark.skipif(
    EIGHT not in os.environ.get("XLA_FLAGS", ""),
    reason="run with eight devices by another test of this file",
)


def run_child(*arguments: str, flags: str = "") -> str:
    """What Python prints with these arguments, on the CPU; XLA's flags are added to those set."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")} | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def pass_on_eight_devices(file: str, select: str, count: int) -> None:
    """Runs so many tests of a file, chosen as by pytest's -k, on eight fake devices."""
    shown = run_child(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-x", "-k", select, file,
        flags=EIGHT,
    )  # fmt: skip
    assert re.search(rf"\n{count} passed", shown), shown
    assert "skipped" not in shown
