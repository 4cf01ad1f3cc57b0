"""One at a time and in turn: how several threads share what was made for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Turns:
    """Runs one action at a time, whatever thread it comes from, and lets nobody be overtaken for ever.

    A plain lock would: the thread that lets go of it and wants it again is faster than one that sleeps. So whoever
    comes waits first for all who stand in line at that moment. A place in the line is a lock that its owner holds
    until its turn is over; since only `with` takes and leaves locks, an interrupt at any moment leaves none behind.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: dict[threading.Lock, None] = {}
        self._owner: int | None = None  # the thread whose turn it is

    def run(self, action: Callable[[], Result]) -> Result:
        """Run `action` while no other thread runs one. An action may run another one: the turn is its thread's."""
        me = threading.get_ident()
        if self._owner == me:
            return action()
        for ahead in list(self._line):
            with ahead:
                pass
        place = threading.Lock()
        self._line[place] = None
        try:
            with place, self._lock:
                return self._run_as(me, action)
        finally:
            del self._line[place]

    def _run_as(self, me: int, action: Callable[[], Result]) -> Result:
        self._owner = me
        try:
            return action()
        finally:
            self._owner = None
