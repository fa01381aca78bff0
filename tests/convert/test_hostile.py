"""Hostile and damaged files: nothing runs, nothing grows, nothing hangs, and the error is ours."""

import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from convert.checkpoint.containers import (
    Checkpoint,
    CheckpointError,
    UnsafePickleError,
    open_checkpoint,
)
from convert.checkpoint.layout import tensors_in
from tests.convert.damage import (
    damaged_files,
    hostile_calls,
    hostile_files,
    hostile_fragments,
    state_dict,
    torch_zip,
    training_checkpoint,
)

SECONDS = 8.0  # of processor time for one file; most take a millisecond
MEGABYTES = 450
INERT = ("NEWOBJ of a function", "NEWOBJ_EX of a function", "default factory", "reconstructor")
SLOW_PLACES = ("zip, config", "legacy, system")
CALLS = list(hostile_calls(Path("/")))
FRAGMENTS = list(hostile_fragments(Path("/")))


def read_all(path: Path) -> Checkpoint:
    """Open, verify and read everything, as a conversion of weights and optimizer would."""
    checkpoint = open_checkpoint(path)
    checkpoint.verify(optimizer=True)
    for tensor in (*checkpoint.tensors.values(), *tensors_in(checkpoint.optimizer)):
        assert tensor.read().tobytes() is not None
    return checkpoint


@pytest.fixture(autouse=True)
def bounded(tmp_path: Path) -> Iterator[None]:
    """Fail a test that took long, grew large or ran what a file asked for."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    files = len(list(tmp_path.iterdir()))
    assert time.process_time() - start < SECONDS * max(1, files / 20)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown / 1024 < MEGABYTES
    assert not list(tmp_path.rglob("sentinel"))


@pytest.mark.parametrize("name", CALLS)
def test_hostile_call_is_refused_wherever_it_stands(name: str, tmp_path: Path) -> None:
    files = hostile_files(hostile_calls(tmp_path / "sentinel")[name])
    assert len(files) == 8
    for place, data in files.items():
        path = tmp_path / f"{place}.pt"
        path.write_bytes(data)
        with pytest.raises(UnsafePickleError, match="refused, nothing was run") as caught:
            open_checkpoint(path)
        assert str(caught.value).startswith(str(path)), place
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", FRAGMENTS)
def test_hostile_fragment_runs_nothing(name: str, tmp_path: Path) -> None:
    fragment = hostile_fragments(tmp_path / "sentinel")[name]
    files = hostile_files(fragment)
    places = SLOW_PLACES if len(fragment) > 10_000 else list(files)
    for place in places:
        path = tmp_path / f"{place}.pt"
        path.write_bytes(files[place])
        message, checkpoint = "", None
        try:
            checkpoint = read_all(path)
        except CheckpointError as error:
            message = str(error)
        assert message.isprintable()
        if checkpoint:  # harmless beside a good state dict
            assert place in ("zip, config", "zip, entry", "zip, state")
            assert set(checkpoint.tensors) == set(state_dict())


@pytest.mark.parametrize("name", INERT)
def test_hostile_class_is_only_a_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "inert.pt"
    path.write_bytes(hostile_files(hostile_fragments(tmp_path / "sentinel")[name])["zip, config"])
    checkpoint = read_all(path)
    if name != "default factory":
        assert checkpoint.config_sources == {"pickled os.system": {}}


def test_hostile_optimizer_of_shared_references_is_refused(tmp_path: Path) -> None:
    good = training_checkpoint()
    doubled: list[object] = []
    for _ in range(30):
        doubled = [doubled] * 10
    path = tmp_path / "bomb.pt"
    path.write_bytes(torch_zip({**good, "optimizer": {"state": doubled}}))
    with pytest.raises(CheckpointError, match="refused: an entry nests"):
        open_checkpoint(path)


def test_damaged_files_are_the_same_for_a_seed(tmp_path: Path) -> None:
    made: list[list[tuple[str, bytes]]] = []
    for _ in range(2):
        made.append([])
        folder = tmp_path / "damaged"
        folder.mkdir()
        for description, path in damaged_files(folder, seed=7, count=40):
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            made[-1].append((description, b"".join(file.read_bytes() for file in files)))
        shutil.rmtree(folder)
    assert made[0] == made[1]
    assert len({data for _, data in made[0]}) > 35


def test_damaged_files_give_our_error_or_the_right_weights(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    whole.write_bytes(torch_zip(state_dict()))
    weights = {key: tensor.read().tobytes() for key, tensor in read_all(whole).tensors.items()}
    failed = unsafe = 0
    for description, path in damaged_files(tmp_path, seed=1, count=800):
        start, message, checkpoint = time.process_time(), "", None
        try:
            checkpoint = read_all(path)
        except CheckpointError as error:
            message = str(error)
            failed += 1
            unsafe += isinstance(error, UnsafePickleError)
        assert message.isprintable(), description
        if checkpoint and checkpoint.container == "torch zip" and " swap" not in description:
            for key, tensor in checkpoint.tensors.items():  # checksums let no change through
                assert tensor.read().tobytes() == weights[key], (description, key)
        assert time.process_time() - start < SECONDS, description
    assert 500 < failed < 790
    assert unsafe > 30


def test_verify_catches_every_flipped_bit_of_a_zip_weight(tmp_path: Path) -> None:
    data = bytearray(torch_zip(state_dict()))
    path = tmp_path / "whole.pt"
    path.write_bytes(data)
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    name = "transformer.h.0.norm.weight"
    record = checkpoint.tensors[name].record
    for bit in range(record.nbytes * 8):
        data[record.offset + bit // 8] ^= 1 << bit % 8
        flipped = tmp_path / "flipped.pt"
        flipped.write_bytes(data)
        data[record.offset + bit // 8] ^= 1 << bit % 8
        damaged = open_checkpoint(flipped)
        damaged.verify(["lm_head.weight"])
        with pytest.raises(CheckpointError, match=f"checksum does not match in {name};"):
            damaged.verify()
