"""Two processes of `jax.distributed` on this machine are one run."""

import os
import signal
import socket
import time
from dataclasses import replace

import pytest

from tests.train.kill_runs import FORKS, base_config, difference, rows, run_once, target, write_data
from train.checkpoints import Checkpoints
from train.config import ClusterConfig, MeshConfig


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def alone(room):
    """The run in one process on one device."""
    config = small(room, "alone")
    assert run_once(config, str(room)) == 0
    return rows(config)


def small(room, name, **changes):
    config = replace(base_config(room), out=room / name, steps=12, accumulation=2)
    return replace(config, **changes)


def start(config, room, *, resume=False, devices=2):
    """Two processes of one run; they find each other on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for number in range(2):
        cluster = ClusterConfig(coordinator=f"127.0.0.1:{port}", processes=2, process=number)
        arguments = (replace(config, cluster=cluster), resume, devices, str(room))
        processes.append(FORKS.Process(target=target, args=arguments))
        processes[-1].start()
    return processes


def ended(processes):
    for process in processes:
        process.join(240)
    states = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return states


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(), MeshConfig(fsdp=4, data=1), MeshConfig(fsdp=2, tensor=2, data=1)],
    ids=["data 4", "fsdp 4", "fsdp 2 x tensor 2"],
)
def test_two_processes_have_the_batches_and_losses_of_one(room, alone, mesh):
    config = small(room, f"mesh {mesh.data} {mesh.fsdp} {mesh.tensor}", mesh=mesh)
    assert ended(start(config, room)) == [0, 0]
    assert difference(rows(config), alone) < 1e-6
    assert Checkpoints(config.out).steps()[0] == 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_one_process_stops_both_after_one_update_and_one_resumes(room, alone, number):
    config = small(room, f"stopped {number}")
    long = replace(config, steps=4000, eval=replace(config.eval, every=5))
    processes = start(long, room, devices=1)
    limit = time.monotonic() + 120
    while len(rows(long)) < 3 and time.monotonic() < limit:
        time.sleep(0.05)
    os.kill(processes[1].pid, number)
    assert ended(processes) == [143, 143]
    steps = Checkpoints(long.out).steps()
    assert steps[0] == max(row["step"] for row in rows(long))
    further = replace(long, steps=steps[0] + 2)
    assert run_once(further, str(room)) == 0
    batches = [row["batch"] for row in alone if "batch" in row]
    found = [row["batch"] for row in rows(further) if "batch" in row]
    assert found[:12] == batches[: len(found[:12])]
