"""Running a test's functions in threads of their own, each to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE = 300  # seconds: whoever takes that long hangs


def start(work: Callable[[], Any], results: list[Any], index: int, name: str | None = None) -> threading.Thread:
    """A thread that leaves what `work` returns, or the error that it raises, in results[index]."""

    def run() -> None:
        try:
            results[index] = work()
        except BaseException as error:
            results[index] = error

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def in_threads(works: Sequence[Callable[[], Any]], raise_errors: bool = True) -> list[Any]:
    """What each returns, all run at the same time; the first error is raised, or stands among the results."""
    results: list[Any] = [None] * len(works)
    join([start(work, results, i) for i, work in enumerate(works)])
    for result in results:
        if raise_errors and isinstance(result, BaseException):
            raise result
    return results


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait for them; one that hangs is an error."""
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
