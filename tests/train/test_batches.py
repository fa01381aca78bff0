import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.batches import IGNORED, ORDERS, Batches, EvaluationBatches, permute, prefetch
from train.tokens import TokenFile, TokenSet, open_tokens

VOCAB = 50_000


class MemorySet(TokenSet):
    """Token files that are nowhere: token i of file f is f * 1000 + i."""

    def tokens(self, index):
        return np.arange(self.files[index].count, dtype=np.uint16) + 1000 * index


def memory_set(*lengths: int, vocab_size=None) -> MemorySet:
    files = tuple(
        TokenFile(path=Path(f"memory-{index}"), dtype=np.dtype("<u2"), count=length, offset=0)
        for index, length in enumerate(lengths)
    )
    return MemorySet(files=files, vocab_size=vocab_size, tokenizer=None)


def make(tokens, batch_size=4, sequence_length=8, order="shuffled", seed=0, vocab_size=VOCAB):
    return Batches(
        tokens,
        batch_size=batch_size,
        sequence_length=sequence_length,
        order=order,
        seed=seed,
        vocab_size=vocab_size,
    )


def whole(batches, step: int) -> tuple[np.ndarray, np.ndarray]:
    return batches.rows(step, np.arange(batches.batch_size))


def equal(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_int32_neighbours(order):
    inputs, targets = whole(make(memory_set(40, 90), order=order), 0)
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == targets.dtype == np.int32
    assert ((targets == inputs + 1) | (targets == IGNORED)).all()
    assert (np.diff(inputs, axis=1) == 1).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_global_batch_is_the_same_however_it_is_shared(order, processes):
    for step in (0, 1, 7, 1000):
        expected = whole(make(memory_set(300, 90), 8, order=order), step)
        shares = np.random.default_rng(0).permutation(8).reshape(processes, -1)
        for share in shares:
            found = make(memory_set(300, 90), 8, order=order).rows(step, share)
            equal(found, [array[share] for array in expected])


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_does_not_depend_on_the_steps_before(order):
    through = make(memory_set(300, 90), order=order, seed=3)
    history = [whole(through, step) for step in range(60)]
    for step in (59, 0, 31):
        equal(whole(make(memory_set(300, 90), order=order, seed=3), step), history[step])


def test_the_shuffled_order_is_the_one_that_runs_began_with():
    """Resumed runs depend on it: neither NumPy nor a change of ours may move it."""
    found = permute(np.arange(10), 10, 7, np.zeros(10, np.int64))
    assert found.tolist() == [0, 5, 6, 3, 9, 4, 7, 1, 8, 2]
    found = permute(np.arange(5), 10**6, 7, np.zeros(5, np.int64))
    assert found.tolist() == [232221, 312582, 938068, 538254, 438855]
    inputs, _ = whole(make(memory_set(300), order="random", seed=7), 5)
    assert inputs[:, 0].tolist() == [204, 230, 267, 255]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(1, 7),
    st.integers(0, 2**64 - 1),
)
def test_every_position_is_a_target_exactly_once_an_epoch(lengths, T, batch_size, seed):
    tokens = memory_set(*lengths)
    if max(lengths) <= T:
        with pytest.raises(ValueError, match=f"the longest of {len(lengths)} has {max(lengths)}"):
            make(tokens, batch_size, T, seed=seed)
        return
    batches = make(tokens, batch_size, T, seed=seed)
    long = [(index, length) for index, length in enumerate(lengths) if length > T]
    assert batches.windows == sum(-(-(length - 1) // T) for _, length in long)
    assert batches.unused == sum(lengths) - sum(length for _, length in long)
    steps = -(-3 * batches.windows // batch_size)
    targets = np.concatenate([whole(batches, step)[1] for step in range(steps)])
    expected = Counter(1000 * index + at for index, length in long for at in range(1, length))
    for epoch in range(3):
        seen = targets[epoch * batches.windows : (epoch + 1) * batches.windows].ravel()
        assert Counter(seen[seen != IGNORED].tolist()) == expected


def test_files_of_no_t_and_t_plus_one_tokens():
    batches = make(memory_set(0, 8, 9), 1, 8)
    assert (batches.windows, batches.unused) == (1, 8)
    inputs, targets = whole(batches, 0)
    assert inputs.tolist() == [list(range(2000, 2008))]
    assert targets.tolist() == [list(range(2001, 2009))]


def test_the_window_that_ends_a_file_repeats_no_target():
    batches = make(memory_set(12), 2, 8)
    inputs, targets = whole(batches, 0)
    last = int(np.argmax(inputs[:, 0] == 3))
    assert inputs[last].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert targets[last].tolist() == [IGNORED] * 5 + [9, 10, 11]
    assert targets[1 - last].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_epochs_and_seeds_are_shuffled_differently():
    first = make(memory_set(801), 100)
    orders = [whole(batches, step)[0][:, 0] for batches, step in [
        (first, 0), (first, 1), (make(memory_set(801), 100, seed=1), 0)
    ]]  # fmt: skip
    for order in orders:
        assert sorted(order.tolist()) == list(range(0, 800, 8))
        assert (order == np.arange(0, 800, 8)).sum() < 10
    assert (orders[0] == orders[1]).sum() < 10
    assert (orders[0] == orders[2]).sum() < 10


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 64, 1000, 4097])
def test_permute_is_a_permutation(count):
    for epoch in range(5):
        found = permute(np.arange(count), count, 2**64 - 1, np.full(count, epoch))
        assert sorted(found.tolist()) == list(range(count))


def test_permute_prefers_no_place():
    count, epochs = 5, 20_000
    index = np.tile(np.arange(count), epochs)
    found = permute(index, count, 0, np.repeat(np.arange(epochs), count)).reshape(epochs, count)
    places = np.stack([np.bincount(found[:, i], minlength=count) for i in range(count)])
    expected = epochs / count
    assert ((places - expected) ** 2 / expected).sum() < 60  # chi-square, 16 degrees: p < 1e-6
    orders = np.unique(found, axis=0, return_counts=True)[1]
    assert len(orders) == 120
    assert ((orders - epochs / 120) ** 2 / (epochs / 120)).sum() < 220  # 119 degrees


def test_permute_serves_more_windows_than_a_table_could():
    count = 3 * 10**12
    found = permute(np.arange(10_000), count, 0, np.zeros(10_000, np.int64))
    assert len(set(found.tolist())) == 10_000
    assert 0 <= found.min() < count // 1000
    assert count - count // 1000 < found.max() < count


def dataloader_lite(lengths, batch_size, T, steps):
    """build-nanogpt's loader, as a walk: positions of the first token of each batch."""
    file, position, starts = 0, 0, []
    for _ in range(steps):
        starts.append(1000 * file + position)
        position += batch_size * T
        if position + batch_size * T + 1 > lengths[file]:
            file, position = (file + 1) % len(lengths), 0
    return starts


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 7))
def test_sequential_is_build_nanogpts_loader(extra, batch_size, T):
    span = batch_size * T
    lengths = [span + 1 + more for more in extra]  # the original fails on shorter files
    batches = make(memory_set(*lengths), batch_size, T, "sequential")
    for step, start in enumerate(dataloader_lite(lengths, batch_size, T, 80)):
        inputs, targets = whole(batches, step)
        assert inputs.ravel().tolist() == list(range(start, start + span))
        assert targets.ravel().tolist() == list(range(start + 1, start + span + 1))
    assert batches.windows == batch_size * sum((length - 1) // span for length in lengths)
    assert batches.unused == sum((length - 1) % span for length in lengths)


def test_sequential_passes_files_that_hold_no_batch():
    batches = make(memory_set(16, 17, 0, 40), 2, 8, "sequential")
    assert [whole(batches, step)[0][0, 0] for step in range(5)] == [1000, 3000, 3016, 1000, 3000]
    assert batches.unused == 16 + 7
    with pytest.raises(ValueError, match="a batch of 2 x 8: it takes 17 tokens, the longest of 1"):
        make(memory_set(16), 2, 8, "sequential")


def test_random_draws_every_start_alike():
    batches = make(memory_set(12, 8, 20), 1000, 8, "random")
    assert (batches.windows, batches.unused) == (16, 8)
    starts = np.concatenate([whole(batches, step)[0][:, 0] for step in range(16)])
    values, counts = np.unique(starts, return_counts=True)
    assert values.tolist() == [*range(4), *range(2000, 2012)]
    assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi-square, 15 degrees
    other = make(memory_set(12, 8, 20), 1000, 8, "random", seed=1)
    assert (whole(other, 0)[0] != whole(batches, 0)[0]).any()


@pytest.mark.parametrize("order", ORDERS)
def test_an_id_outside_the_vocabulary_names_file_place_and_id(tmp_path, order):
    path = tmp_path / "a.bin"
    ids = np.zeros(33, "<u2")
    for at in (0, 13, 32):  # an input alone, both, a target alone
        damaged = ids.copy()
        damaged[at] = 82
        damaged.tofile(path)
        batches = make(open_tokens(path), 4, 8, order, vocab_size=82)
        words = rf"a\.bin: token {at} is 82, which is no id of the model's vocabulary of 82"
        with pytest.raises(ValueError, match=words):
            [whole(batches, step) for step in range(100)]
        whole(make(open_tokens(path), 4, 8, order, vocab_size=83), 0)


@pytest.mark.parametrize("bad", [-1, 2**32 + 1, 2**64 - 1])
def test_an_id_of_a_wide_dtype_does_not_wrap_into_the_vocabulary(tmp_path, bad):
    path = tmp_path / "a.npy"
    np.save(path, np.array([1] * 8 + [bad], np.int64 if bad < 0 else np.uint64))
    with pytest.raises(ValueError, match=f"token 8 is {bad}, "):
        whole(make(open_tokens(path), 1, 8, vocab_size=100), 0)


def test_a_masked_target_is_checked_too(tmp_path):
    """The last window's first tokens are inputs, though their targets do not count."""
    path = tmp_path / "a.bin"
    np.array([1] * 8 + [9, 1, 1, 1], "<u2").tofile(path)
    batches = make(open_tokens(path), 1, 8, vocab_size=9)
    for step in range(2):
        with pytest.raises(ValueError, match="token 8 is 9"):
            whole(batches, step)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"order": "other"}, "order is 'other', expected one of shuffled"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
        ({"vocab_size": 99}, "the data has a vocabulary of 100, the model's vocab_size is 99"),
        ({"sequence_length": 60}, r"T = 60: it takes 61 tokens, the longest of 2 has 60"),
    ],
)
def test_arguments_out_of_range_are_refused(options, words):
    make(memory_set(60, 30, vocab_size=100), vocab_size=100)
    with pytest.raises(ValueError, match=words):
        make(memory_set(60, 30, vocab_size=100), **options)


@pytest.mark.parametrize(("step", "rows"), [(-1, [0]), (0, [4]), (0, [-1]), (0, [[0]])])
def test_rows_out_of_range_are_refused(step, rows):
    with pytest.raises(ValueError, match=r"rows from 0 to 3"):
        make(memory_set(60)).rows(step, np.array(rows))


def test_no_rows_are_none():
    inputs, targets = make(memory_set(60)).rows(0, np.array([], np.int64))
    assert inputs.shape == targets.shape == (0, 8)


def test_position_counts_epochs_and_tokens():
    assert make(memory_set(65)).position(3) == {"epoch": 12 / 8, "tokens": 96}
    assert make(memory_set(70), order="sequential").position(3) == {"epoch": 12 / 8, "tokens": 96}
    assert make(memory_set(48, 5), order="random").position(3) == {"epoch": 2, "tokens": 96}


@given(st.integers(9, 200), st.integers(1, 9), st.none() | st.integers(1, 5))
def test_evaluation_sees_each_window_once_and_pads_with_ignored_rows(length, batch_size, limit):
    tokens = memory_set(length, 5)
    batches = EvaluationBatches(
        tokens, batch_size=batch_size, sequence_length=8, vocab_size=VOCAB, limit=limit
    )
    windows = -(-(length - 1) // 8)
    assert len(batches) == min(limit or windows, -(-windows // batch_size))
    found = [batches.rows(index, np.arange(batch_size)) for index in range(len(batches))]
    targets = np.concatenate([targets for _, targets in found])
    shown = min(windows, len(batches) * batch_size)
    assert (targets[shown:] == IGNORED).all()
    assert (targets[:shown] != IGNORED).any(axis=1).all()
    if shown == windows:
        assert sorted(targets[targets != IGNORED].tolist()) == list(range(1, length))
    expected = whole(make(tokens, shown, 8), 0)
    equal([targets[:shown]], expected[1:])
    equal(batches.rows(len(batches) - 1, np.array([batch_size - 1])), [a[-1:] for a in found[-1]])


def test_evaluation_has_no_batch_past_its_end():
    options = {"batch_size": 4, "sequence_length": 8, "vocab_size": VOCAB}
    batches = EvaluationBatches(memory_set(60), **options, limit=1)
    for index in (-1, 1):
        with pytest.raises(IndexError, match="of 1"):
            batches.rows(index, np.arange(4))
    with pytest.raises(ValueError, match="limit is 0"):
        EvaluationBatches(memory_set(60), **options, limit=0)


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "grain" in thread.name]


def wait_for_threads_to_end() -> None:
    deadline = time.monotonic() + 10
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not prefetch_threads()


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefetch_gives_the_steps_in_order(threads):
    batches = make(memory_set(300, 90))
    rows = np.array([2, 0])
    found = list(prefetch(batches, rows, start=5, stop=40, threads=threads, buffer=4))
    assert [step for step, _, _ in found] == list(range(5, 40))
    for step, inputs, targets in found:
        assert type(step) is int
        equal((inputs, targets), batches.rows(step, rows))
    wait_for_threads_to_end()
    assert list(prefetch(batches, rows, start=5, stop=5)) == []


def test_prefetch_reads_ahead_but_not_far():
    read = []

    class Slow(Batches):
        def rows(self, step, rows):
            read.append(step)
            return super().rows(step, rows)

    batches = Slow(
        memory_set(300), batch_size=4, sequence_length=8, order="random", seed=0, vocab_size=VOCAB
    )
    steps = prefetch(batches, np.arange(4), start=0, stop=1000, threads=1, buffer=5)
    next(steps)
    deadline = time.monotonic() + 10
    while len(read) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(read) == list(range(6))
    steps.close()
    wait_for_threads_to_end()
    assert len(read) == 6


def test_prefetch_raises_the_error_of_the_step_where_it_comes(tmp_path):
    path = tmp_path / "a.bin"
    ids = np.zeros(81, "<u2")
    ids[60] = 99
    ids.tofile(path)
    batches = make(open_tokens(path), 2, 8, "sequential", vocab_size=50)
    steps = prefetch(batches, np.arange(2), start=0, stop=100, buffer=8)
    assert [next(steps)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"a\.bin: token 60 is 99"):
        next(steps)
    assert list(steps) == []
    wait_for_threads_to_end()


def test_a_process_ends_quietly_in_the_middle_of_prefetching(tmp_path):
    np.zeros(1000, "<u2").tofile(tmp_path / "a.bin")
    program = f"""
import numpy as np
from pathlib import Path
from train.batches import Batches, prefetch
from train.tokens import open_tokens

batches = Batches(open_tokens(Path({str(tmp_path / "a.bin")!r})), batch_size=2, sequence_length=8,
                  order="shuffled", seed=0, vocab_size=10)
steps = prefetch(batches, np.arange(2), start=0, stop=10**9)
next(steps)
print("done")
"""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "vocab_size"), [("char", 82), ("bpe", 2048)])
def test_the_real_files_are_served(shared, name, vocab_size, order):
    tokens = open_tokens([shared("data", f"{name}_{split}.bin") for split in ("train", "val")])
    batches = make(tokens, 8, 128, order, 1, vocab_size)
    assert batches.unused < 8 * 128 * 2
    for step in (0, 10**6):
        inputs, targets = whole(batches, step)
        assert inputs.max() < vocab_size
        assert (inputs[:, 1:] == targets[:, :-1])[targets[:, :-1] != IGNORED].all()
