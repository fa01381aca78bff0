"""Batches of windows over token files: the batch of a step is a function of the seed and the step.

A window is T + 1 neighbouring tokens of one file: T inputs and, one further, T targets. Nothing is
drawn and nothing is remembered: any process computes any rows of any step, so the batches do not
depend on how many processes or devices share them, nor on where a run was stopped. Letters: R rows
asked for, T positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from train.tokens import TokenSet

ORDERS = ("shuffled", "sequential", "random")
IGNORED = -1  # a target that counts for nothing
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: SplitMix64's step


class Batches:
    """The global batch of every step, a pure function of (seed, step).

    Args:
        tokens: the token files.
        batch_size: rows of the global batch.
        sequence_length: T.
        order: "shuffled": every position but a file's first is a target exactly once an epoch, in
            another order each epoch. "sequential": file after file, as build-nanogpt's
            DataLoaderLite. "random": starts drawn uniformly with replacement, as nanoGPT's.
        seed: of the shuffled and random orders.
        vocab_size: the model's; every token read is checked against it.

    Attributes:
        windows: rows an epoch; for "random" the number of starts there are.
        unused: tokens that this order never reads, because they do not fill a window (or, in the
            sequential order, a batch).

    Raises:
        ValueError: an argument is out of range, or no file is long enough.
    """

    def __init__(
        self,
        tokens: TokenSet,
        *,
        batch_size: int,
        sequence_length: int,
        order: str,
        seed: int,
        vocab_size: int,
    ):
        for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}, expected one of {', '.join(ORDERS)}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}, expected 0 to 2**64 - 1")
        if tokens.vocab_size is not None and tokens.vocab_size > vocab_size:
            raise ValueError(
                f"the data has a vocabulary of {tokens.vocab_size:,}, the model's vocab_size is "
                f"{vocab_size:,}: set --model.vocab-size {tokens.vocab_size}, or prepare the "
                "data with the model's tokenizer"
            )
        self.tokens = tokens
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.order = order
        self.seed = seed
        self.vocab_size = vocab_size
        T = sequence_length
        n_F = np.array([file.count for file in tokens.files], np.int64)
        span = batch_size * T if order == "sequential" else T
        if (n_F <= span).all():
            what = f"a batch of {batch_size:,} x {T:,}" if order == "sequential" else f"T = {T:,}"
            raise ValueError(
                f"no file is long enough for {what}: it takes {span + 1:,} tokens, the longest of "
                f"{len(n_F)} has {n_F.max():,}; add data, or lower the sequence length"
                + (" or batch size" if order == "sequential" else "")
            )
        self._windows = {
            "shuffled": _shuffled_windows,
            "sequential": _sequential_windows,
            "random": _random_windows,
        }[order](n_F, batch_size, T, seed)
        self.windows = self._windows.count
        self.unused = self._windows.unused

    def rows(self, step: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some rows of a step's global batch.

        Args:
            step: 0, 1, ...
            rows: which, each 0 to batch_size - 1; int [R].

        Returns:
            Inputs and targets, int32 [R, T]; a target that counted before in its epoch is -1.

        Raises:
            ValueError: a token is no id of the vocabulary, or rows are out of range.
        """
        rows = np.asarray(rows, np.int64)
        if step < 0 or rows.ndim != 1 or ((rows < 0) | (rows >= self.batch_size)).any():
            raise ValueError(
                f"step {step}, rows {rows.tolist()}: expected a step from 0 on and rows from 0 to "
                f"{self.batch_size - 1}"
            )
        file_R, start_R, repeated_R = self._windows.locate(step, rows)
        return read_windows(
            self.tokens, file_R, start_R, repeated_R, self.sequence_length, self.vocab_size
        )

    def position(self, step: int) -> dict[str, float]:
        """What has been seen before a step: epochs (a fraction) and tokens, for logging."""
        seen = step * self.batch_size * self.sequence_length
        if self.order == "random":
            epoch = seen / (self.tokens.count - self.unused)
        else:
            epoch = step * self.batch_size / self.windows
        return {"epoch": epoch, "tokens": seen}


def read_windows(
    tokens: TokenSet,
    file_R: np.ndarray,
    start_R: np.ndarray,
    repeated_R: np.ndarray,
    sequence_length: int,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of windows, int32 [R, T]; the first `repeated_R` targets of each are -1.

    Raises:
        ValueError: a token is no id of the vocabulary.
    """
    block = np.empty((len(file_R), sequence_length + 1), np.int64)
    places = list(zip(file_R.tolist(), start_R.tolist(), strict=True))
    for row, (file, start) in enumerate(places):
        block[row] = tokens.tokens(file)[start : start + sequence_length + 1]
    if block.size and (block.min() < 0 or block.max() >= vocab_size):
        row, column = np.argwhere((block < 0) | (block >= vocab_size))[0].tolist()
        file, start = places[row]
        found = tokens.tokens(file)[start + column]
        raise ValueError(
            f"{tokens.files[file].path}: token {start + column:,} is {found}, which is no id of "
            f"the model's vocabulary of {vocab_size:,}: the data was made with another tokenizer, "
            "or the file is damaged or of another kind"
        )
    inputs_RT = block[:, :-1].astype(np.int32)
    targets_RT = block[:, 1:].astype(np.int32)
    for row in np.flatnonzero(repeated_R).tolist():
        targets_RT[row, : repeated_R[row]] = IGNORED
    return inputs_RT, targets_RT


@dataclass(frozen=True)
class _Windows:
    """The windows of one order.

    Attributes:
        count: rows an epoch.
        unused: tokens never read.
        locate: (step, rows [R]) -> file, start, and number of repeated targets of each, [R].
    """

    count: int
    unused: int
    locate: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


def _shuffled_windows(n_F: np.ndarray, batch_size: int, T: int, seed: int) -> _Windows:
    """Windows at 0, T, 2T, ... and, where tokens are left, one more that ends with the file."""
    windows_F = np.where(n_F > T, -(-(n_F - 1) // T), 0)
    first_F = np.cumsum(windows_F) - windows_F
    count = int(windows_F.sum())

    def locate(step: int, rows: np.ndarray):
        epoch, place = divmod(step * batch_size, count)
        place_R = place + rows
        window_R = permute(place_R % count, count, seed, epoch + place_R // count)
        file_R = _file_of(window_R, first_F)
        regular_R = (window_R - first_F[file_R]) * T
        start_R = np.minimum(regular_R, n_F[file_R] - 1 - T)
        return file_R, start_R, regular_R - start_R

    return _Windows(count, int(n_F[n_F <= T].sum()), locate)


def _sequential_windows(n_F: np.ndarray, batch_size: int, T: int, seed: int) -> _Windows:
    """Batches of neighbouring windows; a file's tokens that fill no batch are passed over."""
    span = batch_size * T
    batches_F = (n_F - 1).clip(0) // span
    first_F = np.cumsum(batches_F) - batches_F
    count = int(batches_F.sum())

    def locate(step: int, rows: np.ndarray):
        batch_R = np.full(rows.shape, step % count)
        file_R = _file_of(batch_R, first_F)
        start_R = (batch_R - first_F[file_R]) * span + rows * T
        return file_R, start_R, np.zeros_like(rows)

    read_F = np.where(batches_F > 0, batches_F * span + 1, 0)
    return _Windows(count * batch_size, int((n_F - read_F).sum()), locate)


def _random_windows(n_F: np.ndarray, batch_size: int, T: int, seed: int) -> _Windows:
    """Starts 0 to n - T - 1 of every file, all equally likely."""
    starts_F = (n_F - T).clip(0)
    first_F = np.cumsum(starts_F) - starts_F
    count = int(starts_F.sum())

    def locate(step: int, rows: np.ndarray):
        drawn = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(batch_size)
        place_R = (drawn[rows] % np.uint64(count)).astype(np.int64)
        file_R = _file_of(place_R, first_F)
        return file_R, place_R - first_F[file_R], np.zeros_like(rows)

    return _Windows(count, int(n_F[n_F <= T].sum()), locate)


def _file_of(place_R: np.ndarray, first_F: np.ndarray) -> np.ndarray:
    """The file of each place, where file f has the places from `first_F[f]` on."""
    return np.searchsorted(first_F, place_R, "right") - 1  # "right" passes files of no place


def permute(index_R: np.ndarray, count: int, seed: int, epoch_R: np.ndarray) -> np.ndarray:
    """Where one permutation of [0, count) for each (seed, epoch) sends each index, int64 [R].

    No table: a Feistel network permutes the next power of two (its halves are XORed in turn with a
    hash of the other), and what it sends beyond `count` goes through again until it is inside,
    which keeps it a permutation.
    """
    bits = max(2, (count - 1).bit_length())
    seed_R = np.full(index_R.shape, seed, np.uint64)
    key_R = _mix(_mix(seed_R) + epoch_R.astype(np.uint64))
    value_R = index_R.astype(np.uint64)
    outside = np.arange(len(index_R))
    while outside.size:
        value_R[outside] = _network(value_R[outside], key_R[outside], bits)
        outside = outside[value_R[outside] >= count]
    return value_R.astype(np.int64)


def _network(value: np.ndarray, key: np.ndarray, bits: int) -> np.ndarray:
    low_bits = bits // 2
    rounds = 8 if bits <= 8 else 4  # narrow halves mix slowly; measured: 8 make 5 places uniform
    high, low = value >> np.uint64(low_bits), value & np.uint64(2**low_bits - 1)
    for _ in range(rounds):
        key = key + GOLDEN
        low ^= _mix(high + key) >> np.uint64(64 - low_bits)
        key = key + GOLDEN
        high ^= _mix(low + key) >> np.uint64(64 - (bits - low_bits))
    return high << np.uint64(low_bits) | low


def _mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood, 2014): every bit of a uint64 reaches every other."""
    value = value + GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class EvaluationBatches:
    """A fixed set of batches: the first windows of the shuffled order under seed 0, each once.

    Args:
        tokens: the token files.
        batch_size: rows of a batch.
        sequence_length: T.
        vocab_size: the model's.
        limit: number of batches; None takes every window.
    """

    def __init__(
        self,
        tokens: TokenSet,
        *,
        batch_size: int,
        sequence_length: int,
        vocab_size: int,
        limit: int | None,
    ):
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}, expected 1 or more batches, or None for all")
        self._batches = Batches(
            tokens,
            batch_size=batch_size,
            sequence_length=sequence_length,
            order="shuffled",
            seed=0,
            vocab_size=vocab_size,
        )
        whole = -(-self._batches.windows // batch_size)
        self._length = whole if limit is None else min(limit, whole)

    def __len__(self) -> int:
        return self._length

    def rows(self, index: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some rows of batch `index`, as `Batches.rows`; rows past the last window have targets -1.

        Raises:
            ValueError: as `Batches.rows`.
            IndexError: there is no such batch.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"evaluation batch {index} of {self._length}")
        inputs_RT, targets_RT = self._batches.rows(index, rows)
        past_R = index * self._batches.batch_size + np.asarray(rows) >= self._batches.windows
        targets_RT[past_R] = IGNORED
        return inputs_RT, targets_RT


def prefetch(
    batches: Batches | EvaluationBatches,
    rows: np.ndarray,
    *,
    start: int,
    stop: int,
    threads: int = 2,
    buffer: int = 8,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (step, inputs, targets) of the steps [start, stop), read ahead by Grain's threads.

    Reading begins with the first `next` and ends when the iterator is closed or runs out.

    Args:
        batches: what to read.
        rows: of every step's batch, [R].
        start: first step.
        stop: one after the last.
        threads: that read; 0 reads in the caller's.
        buffer: steps read ahead.

    Raises:
        ValueError: at the step that `batches.rows` refuses, in its words.
    """
    import grain  # half a second, which evaluation and tests of batches need not spend

    def read(step: int) -> tuple[int, np.ndarray, np.ndarray]:
        return int(step), *batches.rows(int(step), rows)

    steps = grain.MapDataset.range(start, stop).map(read)
    iterator = iter(steps.to_iter_dataset(grain.ReadOptions(threads, buffer)))
    try:
        yield from iterator
    finally:
        iterator.close()
