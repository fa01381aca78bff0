"""libtpu on machines that have no TPU: it comes with the extra `plan`, whose compiler it is."""

import os
from pathlib import Path

# Without these libtpu asks the network what machine this is, complains of the answer at length,
# and is refused where another process has loaded it, though no TPU is used.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def compile_only() -> None:
    """For a process that uses libtpu as a compiler alone; before JAX looks for devices."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def quiet_without_tpu() -> None:
    """The same, on a machine without TPUs; where there may be one, nothing."""
    devices = Path("/dev")
    if not any(devices.glob("accel*")) and not any(devices.glob("vfio/[0-9]*")):
        compile_only()
