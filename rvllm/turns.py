"""One at a time and in turn: how several threads share what was made for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Turns:
    """Runs one action at a time, whatever thread it comes from, and lets nobody be overtaken for ever.

    A plain lock would: the thread that lets go of it and wants it again is faster than one that sleeps. So there is a
    line, and whoever joins it waits first for all who are ahead. A place in the line is a lock that its owner holds
    until its turn is over; since only `with` takes and leaves locks, an interrupt at any moment leaves none behind.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: dict[threading.Lock, int] = {}  # the places, oldest first, and whose they are
        self._owner: int | None = None  # the thread whose turn it is

    def run(self, action: Callable[[], Result]) -> Result:
        """Run `action` while no other thread runs one. An action may run another one: the turn is its thread's."""
        me = threading.get_ident()
        if self._owner == me:
            return action()
        # A thread can be in line already where a signal handler comes: those behind it wait for it, not it for them.
        all_ahead = [] if me in list(self._line.values()) else list(self._line)
        place = threading.Lock()
        self._line[place] = me
        try:
            with place:
                for ahead in all_ahead:
                    with ahead:
                        pass
                with self._lock:
                    try:
                        self._owner = me
                        return action()
                    finally:
                        self._owner = None
        finally:
            del self._line[place]
