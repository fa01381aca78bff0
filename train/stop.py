"""Stopping on request: SIGTERM (preemption notices come as it), Ctrl-C."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
from jax.experimental import multihost_utils

WORKING = "jaxslm: work that cannot be interrupted"


class StopRequested(Exception):
    """A signal came where the work at hand cannot go on."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


class Stop:
    """Notes the first signal; a second Ctrl-C interrupts at once."""

    def __init__(self):
        self.signal: int | None = None
        self._noted = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGTERM and SIGINT inside the block.

        With several processes SIGTERM is left to JAX's preemption service, by which all of them
        come to stop after the same step, and Ctrl-C is handed to it as SIGTERM.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread only
            return
        numbers = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def after(self, step: int) -> bool:
        """Whether to stop after this step; with several processes, the same answer in all."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = self.signal or signal.SIGTERM
        return self.signal is not None

    def check(self) -> None:
        """Raises StopRequested if a signal came."""
        if self.signal is not None:
            raise StopRequested(self.signal)

    def during(self, work: Callable[[], Any]) -> Any:
        """Does work that cannot be interrupted, such as a compilation, in a thread of its own.

        Raises:
            StopRequested: a signal came; the work is left to its thread (see `exit_now`).
        """
        future: Future[Any] = Future()

        def target() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=target, name=WORKING, daemon=True).start()
        while not future.done():
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=0.1)
            self.check()
        return future.result()

    def _note(self, number: int, frame: object) -> None:
        del frame
        if self._noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._noted = True
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signal = number


def exit_now(status: int, *, abandoned: bool = False) -> None:
    """Ends the process at once if work was abandoned in threads; otherwise does nothing.

    Args:
        status: the exit status.
        abandoned: there is such work besides that of `Stop.during`: a save that failed.
    """
    if abandoned or any(thread.name == WORKING for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
