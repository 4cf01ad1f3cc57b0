"""A step as a list of launches with fixed arguments: made once, started as often as wanted.

Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rvllm.ops import blocks_for
from rvllm.runtime import Prepared, Runtime, Size


class Program:
    """A step as a list of launches with fixed arguments: made once, started as often as wanted. Notebook 15, section 3.

    Arguments are checked when a launch is added, and arrays never move; a step then costs the host nothing but the
    starting. `launches` holds Prepared kernels, and other calls, such as cuBLAS's; from `head_at` on they make logits
    of up to `max_rows` tokens.
    """

    def __init__(self, rt: Runtime, max_rows: int) -> None:
        self.rt, self.max_rows, self.head_at = rt, max_rows, 0
        self.launches: list[Prepared | Callable[[], None]] = []

    def add(self, name: str, grid: Size, block: Size, args: Sequence[Any], shared: int = 0, **defines: Any) -> None:
        """A kernel at the end of the list. `defines`: the macros that its text leaves open."""
        self.launches.append(self.rt.prepare(name, grid, block, args, shared, defines=defines))

    def add_for_each(self, name: str, n: int, args: Sequence[Any], threads: int = 256, **defines: Any) -> None:
        """A kernel with a thread for each of n elements."""
        self.add(name, blocks_for(n, threads), threads, args, **defines)

    def call(self, function: Callable[[], None]) -> None:
        """Something else that starts work on the device."""
        self.launches.append(function)

    def run(self) -> None:
        """Start everything, in order, on the current stream."""
        for launch in self.launches:
            launch()

    def begin_head(self) -> None:
        """What is added from now on makes logits."""
        self.head_at = len(self.launches)

    def run_head(self) -> None:
        """Start the last part again."""
        for launch in self.launches[self.head_at :]:
            launch()
