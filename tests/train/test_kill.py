"""Killed runs, bit for bit; `python -m tests.train.kill_runs` does more of them."""

import resource
import shutil
import signal
import time
from dataclasses import replace

import pytest

from tests.train.kill_runs import (
    FORKS,
    base_config,
    difference,
    killed_run,
    rows,
    run_once,
    target,
    variants,
    write_data,
)
from train.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    write_data(folder)
    return folder


@pytest.mark.parametrize("name", ["shuffled", "accumulation", "sequential"])
def test_killed_run_equals_the_uninterrupted_one(room, name):
    config = replace(variants(room)[name], out=room / name)
    assert run_once(config, str(room)) == 0
    expected = rows(config)
    shutil.rmtree(config.out)
    start = time.monotonic()
    assert run_once(config, str(room)) == 0  # the second run finds its programs compiled
    seconds = time.monotonic() - start
    assert rows(config) == expected
    killed = replace(config, out=room / f"{name} killed")
    for seed in range(2):
        words = killed_run(killed, str(room), seconds, seed)
        assert rows(killed) == expected, words
    if name == "shuffled":
        words = killed_run(killed, str(room), seconds, 2, devices=(2, 4))
        assert difference(rows(killed), expected) < 1e-6, words


def test_run_goes_from_8_devices_to_4_to_1_to_8(room):
    config = replace(base_config(room), out=room / "alone", steps=12)
    assert run_once(config, str(room)) == 0
    moved = replace(config, out=room / "moved")
    for steps, devices in ((3, 8), (6, 4), (9, 1), (12, 8)):
        assert run_once(replace(moved, steps=steps), str(room), devices=devices) == 0
        assert Checkpoints(moved.out).steps()[0] == steps
    found = [row for row in rows(moved) if row["step"] % 5 == 0 or "loss" in row]  # ends evaluate
    expected = [row for row in rows(config) if row["step"] % 5 == 0 or "loss" in row]
    assert difference([row for row in found if "loss" in row],
                      [row for row in expected if "loss" in row]) < 1e-6  # fmt: skip


def test_full_disk_ends_the_run_and_keeps_what_was_saved(room):
    config = replace(base_config(room), out=room / "uncut", steps=12)
    assert run_once(config, str(room)) == 0
    cut = replace(config, out=room / "cut")
    assert run_once(replace(cut, steps=6), str(room)) == 0
    before = Checkpoints(cut.out).steps()
    process = FORKS.Process(target=on_full_disk, args=(cut, str(room)))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    assert Checkpoints(cut.out).steps() == before == [6, 3]
    assert run_once(cut, str(room)) == 0
    losses = [[row for row in rows(one) if "loss" in row] for one in (cut, config)]
    assert losses[0] == losses[1]


def on_full_disk(config, cache):
    """A resumed run whose files cannot grow beyond 5,000 bytes once it stands."""
    from train import loop

    def save(self, done):
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        saved(self, done)

    saved, loop._Run._save = loop._Run._save, save
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    target(config, True, 1, cache)
