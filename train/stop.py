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


class StopRequested(Exception):
    """A signal came while nothing was there that needs saving."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


class Stop:
    """Notes the first signal; a second Ctrl-C interrupts at once."""

    def __init__(self):
        self.signal: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGTERM and SIGINT inside the block.

        With several processes SIGTERM is left to JAX's preemption service, by which all of them
        come to stop after the same step.
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

        If a signal comes, the process ends at once with the signal's status: nothing is lost that a
        checkpoint does not hold.
        """
        future: Future[Any] = Future()

        def target() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=target, daemon=True).start()
        while True:
            try:
                return future.result(timeout=0.1)
            except TimeoutError:
                if future.done():
                    raise  # the work's own
            if self.signal is not None:
                name = signal.Signals(self.signal).name
                print(f"\njaxslm: stopped by {name} while compiling", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(128 + self.signal)

    def _note(self, number: int, frame: object) -> None:
        del frame
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
