"""Turns: one action at a time, nobody overtaken by those who come later, and no trace of whoever was interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rvllm.turns import Turns
from tests.threads import in_threads, join, start


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def test_one_at_a_time() -> None:
    turns, counter = Turns(), [0]

    def add() -> None:
        seen = counter[0]
        time.sleep(0)  # an invitation to the others
        counter[0] = seen + 1

    in_threads([lambda: [turns.run(add) for _ in range(200)]] * 6)
    assert counter == [1200]


def test_an_action_may_run_another_one() -> None:
    turns = Turns()
    assert turns.run(lambda: 1 + turns.run(lambda: 2)) == 3


def test_who_comes_again_stands_behind_those_who_wait() -> None:
    """Two come while the first has its turn; when it comes again they have been there."""
    turns, order = Turns(), []

    def first() -> None:
        def action() -> None:
            order.append("first")
            if len(order) == 1:
                may_come.set()
                wait_until(lambda: len(turns._line) == 3)

        turns.run(action)
        turns.run(action)

    def other(name: str) -> None:
        may_come.wait()
        turns.run(lambda: order.append(name))

    may_come = threading.Event()
    in_threads([first, lambda: other("b"), lambda: other("c")])
    assert (order[0], sorted(order[1:3]), order[3]) == ("first", ["b", "c"], "first")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing_behind(error: type[BaseException]) -> None:
    def fail() -> Any:
        raise error

    turns = Turns()
    for _ in range(2):
        with pytest.raises(error):
            turns.run(lambda: turns.run(fail))
    assert turns._line == {}
    in_threads([lambda: turns.run(lambda: None)] * 2)


def test_a_place_that_was_left_behind_holds_nobody_up() -> None:
    """What an interrupt just before the end may leave: a lock in the line that nobody holds."""
    turns = Turns()
    turns._line[threading.Lock()] = threading.get_ident() + 1
    assert turns.run(lambda: 5) == 5


def test_a_thread_in_line_may_run_another_action() -> None:
    """As a signal handler does, wherever its thread was: here in line, while somebody stands behind it."""
    turns, done, me = Turns(), [], threading.get_ident()
    place = threading.Lock()
    turns._line[place] = me
    with place:
        thread = start(lambda: turns.run(lambda: done.append("behind")), [None], 0)
        wait_until(lambda: len(turns._line) == 2)
        turns.run(lambda: done.append("handler"))
    join([thread])
    assert done == ["handler", "behind"]
