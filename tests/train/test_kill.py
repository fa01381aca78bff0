"""Killed runs, bit for bit; `python -m tests.train.kill_runs` does more of them."""

import shutil
import time
from dataclasses import replace

import pytest

from tests.train.kill_runs import (
    difference,
    killed_run,
    rows,
    run_once,
    variants,
    write_data,
)


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
