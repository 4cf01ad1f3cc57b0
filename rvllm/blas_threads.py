"""How many threads NumPy's BLAS takes: no more than there are processors that nobody else keeps busy.

The threads of a product wait for each other several times, and OpenBLAS waits by asking again and again. Where another
program has the processor of one of them, all wait until its turn comes: on two processors with four busy programs
beside, two threads took five times as long as one for the 135M model, and more for small products. On a quiet machine
they take a fifth to a third less time than one, so the number depends on the machine's other work.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from threadpoolctl import threadpool_info, threadpool_limits

# What a user may have set: then it stays as it is.
SETTINGS = tuple(f"{name}_NUM_THREADS" for name in ("OPENBLAS", "GOTO", "OMP", "MKL", "BLIS"))
READINGS, PAUSE = 11, 0.002  # the median of so many, seconds apart: a process that runs for a moment does not count


@dataclass
class Lowered:
    """What this module has changed: the number before, and the number that it set."""

    before: int
    to: int


_lowered: list[Lowered] = []  # at most one


def blas_threads() -> int | None:
    """The number of threads that BLAS takes now; None where that can't be told."""
    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=None)


def fit_blas_threads() -> None:
    """Fit the number to the machine's other work, for the whole process; called when a model is loaded.

    Once for a model, since sums of another number of threads differ in the last digits. The number is never raised
    above what it was before, and not touched where an environment variable sets it or the system tells no load.
    """
    now, free = blas_threads(), free_processors()
    if now is None or free is None or any(os.environ.get(name) for name in SETTINGS):
        return
    before = _lowered[0].before if _lowered and _lowered[0].to == now else now
    threads = max(1, min(before, free))
    if threads != now:
        threadpool_limits(threads, "blas")
    _lowered[:] = [Lowered(before, threads)] if threads < before else []


def free_processors() -> int | None:
    """This process's processors less the other threads that want to run; may be negative, and None if unknown."""
    try:
        readings = [_running() for _ in range(READINGS)]
        return len(os.sched_getaffinity(0)) - (round(statistics.median(readings)) - 1)
    except (AttributeError, OSError, ValueError):  # no Linux
        return None


def _running() -> int:
    """Threads of the whole machine that run or want to, this one among them."""
    time.sleep(PAUSE)
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
