"""What the emulator is to do, in order: at once, or not before somebody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rvllm.emulator.errors import HostBufferError


class LaunchQueue:
    """Launches and copies in order: run at once or, deferred, not before somebody waits for them.

    A GPU is somewhere between the two: it may be done with a launch when the call returns, or far behind the host.
    """

    def __init__(self, deferred: bool) -> None:
        self._deferred, self._running = deferred, False
        self._waiting: deque[Callable[[], None]] = deque()
        self._submitted = 0

    def submit(self, call: Callable[[], None], reads: np.ndarray | None = None) -> None:
        """One more; what a call submits while it runs is a part of it.

        reads: host memory that the call reads. HostBufferError, when it runs, if somebody changed it in between.
        """
        if not self._deferred or self._running:
            call()
            return
        self._waiting.append(call if reads is None else partial(_run_unchanged, call, reads, reads.copy()))
        self._submitted += 1

    def event(self) -> QueueEvent:
        """The point behind all that was submitted so far."""
        return QueueEvent(self, self._submitted)

    def run_until(self, number: int) -> None:
        """Run the first `number` of all that were ever submitted, as far as they have not run."""
        while self._waiting and self._submitted - len(self._waiting) < number:
            call, self._running = self._waiting.popleft(), True
            try:
                call()
            finally:
                self._running = False


@dataclass(frozen=True)
class QueueEvent:
    """The point of a queue that lies behind the first `number` submissions."""

    queue: LaunchQueue
    number: int

    def synchronize(self) -> None:
        """Wait until all before it has ended."""
        self.queue.run_until(self.number)


def _run_unchanged(call: Callable[[], None], buffer: np.ndarray, before: np.ndarray) -> None:
    changed = np.flatnonzero(buffer != before)
    if changed.size:
        found = f"element {changed[0]} of {buffer.size} was {before[changed[0]]} and is {buffer[changed[0]]}"
        raise HostBufferError(f"a host buffer was written again before the device had read it: {found}")
    call()
