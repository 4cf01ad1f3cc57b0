"""Launches that start behind one another early: which of them may still run, and who touched what."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np

Marks = dict[int, tuple[weakref.ref[Any], np.ndarray]]  # by address of the memory
GRAIN, MARK = 2, np.dtype("4u4")  # as in cuda/chain.cpp: bytes that are remembered together, and what of them


class Chain:
    """What a sequence of launches did to the arrays, remembered from one launch to the next.

    A launch is ordinary (it starts when all before it have ended) or dependent: it may start as soon as the one before
    it allows that, and must wait in the kernel for that one to end. All launches of a sequence get the same object.
    """

    def __init__(self) -> None:
        self.names = ["nothing"]  # by number of the launch
        self.settled = 0  # launches up to this number have ended when the last one starts
        self._early = False  # the last launch let the next one start before it had waited itself
        self._marks: Marks = {}

    @property
    def number(self) -> int:
        """Of the last launch, from 1."""
        return len(self.names) - 1

    def begin(self, kernel: str, dependent: bool) -> None:
        """One more launch."""
        self.names.append(kernel)
        if not dependent:
            self.settled = self.number - 1
        elif not self._early:  # the one before waited before it let this one start: those before it have ended
            self.settled = max(self.settled, self.number - 2)

    def end(self, early: bool) -> None:
        """The launch has ended. early: it let the next one start before it had waited."""
        self._early = early

    def marks_of(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        """The marks of the memory that an array is a view of, and the place of its first byte there."""
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        address = owner.ctypes.data
        known = self._marks.get(address)
        if known is None or known[0]() is not owner:
            marks = np.zeros(-(-owner.nbytes // GRAIN), MARK)
            known = self._marks[address] = weakref.ref(owner, partial(_forget, self._marks, address)), marks
        return known[1], array.ctypes.data - address


def _forget(marks: Marks, address: int, gone: weakref.ref[Any]) -> None:
    """Memory was freed; its address may belong to another array already."""
    if address in marks and marks[address][0] is gone:
        del marks[address]
