"""Reads parameters out of a torch checkpoint, several tensors at once, checked and hashed."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from types import TracebackType

import numpy as np

from convert.casting import all_finite, cast, float_dtype
from convert.rules import Leaf, assemble
from convert.source import TorchSource
from convert.transpose import contiguous
from jaxslm.safetensors_io import TensorSpec


class Reader:
    """Assembles one parameter at a time; only that one, and pages of the file, are in memory.

    Threads copy and hash its tensors and meanwhile verify the container's checksums. Use as a
    context manager, and call `finish` before the parameters are trusted.
    """

    def __init__(self, source: TorchSource, dtype: str | None):
        self.source = source
        self._target = None if dtype is None else float_dtype(dtype)
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        self._checksums = self._pool.submit(self._verify)
        self._digests: dict[str, str] = {}
        self._nonfinite: set[str] = set()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def specs(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of all parameters as `parameter` gives them."""
        return {leaf.path: TensorSpec(leaf.shape, self._dtype(leaf)) for leaf in self.source.leaves}

    def parameter(self, leaf: Leaf) -> np.ndarray:
        """One parameter, assembled and cast.

        Raises:
            ValueError: the cast overflows; names the tensor.
        """
        dtype = self._dtype(leaf)
        return assemble(
            leaf, lambda key: cast(self._tensor(key), dtype, key), dtype, pool=self._pool
        )

    def read_ahead(self, assembler: Executor) -> Callable[[str], np.ndarray]:
        """Parameters in the source's order; one is assembled while the one before it is used."""
        order = iter(self.source.leaves)
        coming = [assembler.submit(self.parameter, next(order))]

        def read(path: str) -> np.ndarray:
            found = coming.pop().result()
            coming.extend(assembler.submit(self.parameter, leaf) for leaf in islice(order, 1))
            return found

        return read

    def finish(self, *, allow_nonfinite: bool) -> dict[str, str]:
        """Waits for the checksums and says what was found.

        Returns:
            SHA-256 of each torch tensor that was read, of its bytes in row-major order.

        Raises:
            ValueError: a checksum of the container is wrong, or a tensor has NaN or infinite
                numbers and that is not allowed.
        """
        self._checksums.result()
        if self._nonfinite and not allow_nonfinite:
            raise ValueError(
                f"{self.source.checkpoint.path}: NaN or infinite numbers in "
                f"{', '.join(sorted(self._nonfinite))}: the run that made it diverged, or the file "
                "is damaged; pass --allow-nonfinite to convert it all the same"
            )
        return dict(self._digests)

    def _dtype(self, leaf: Leaf) -> np.dtype:
        return self._target or self.source.tensor(leaf.parts[0].key).dtype

    def _tensor(self, key: str) -> np.ndarray:
        array = self.source.tensor(key).read()
        self._digests[key] = sha256(array)
        if not all_finite(array):
            self._nonfinite.add(key)
        return array

    def _verify(self) -> None:
        keys = [part.key for leaf in self.source.leaves for part in leaf.parts]
        present = set(self.source.checkpoint.tensors)
        aliases = {owner: alias for alias, owner in self.source.table.ties.items()}
        self.source.checkpoint.verify(key if key in present else aliases[key] for key in keys)


def sha256(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in row-major order, in hex."""
    return hashlib.sha256(contiguous(array).reshape(-1).view(np.uint8).data).hexdigest()
