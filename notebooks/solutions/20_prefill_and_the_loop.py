"""Solutions to the exercises of notebook 20."""

import numpy as np


def pairs(length: int, tile: int) -> int:
    ends = [min(first + tile, length) for first in range(0, length, tile)]
    return sum((end - first) * end for first, end in zip(range(0, length, tile), ends, strict=True))


# Digit by digit from the top: the digit at which the count from above reaches k, then only its own values.
def kth_largest(values: np.ndarray, k: int) -> int:
    """uint32 [n], 1 <= k <= n."""
    found = 0
    for shift in (24, 16, 8, 0):
        digits = values >> np.uint32(shift) & np.uint32(255)
        above = np.cumsum(np.bincount(digits, minlength=256)[::-1])
        digit = 255 - int(np.searchsorted(above, k))
        k -= int((digits > digit).sum())
        values, found = values[digits == digit], found << 8 | digit
    return found


def makespan(lengths: list[int], slots: int) -> int:
    free = [0] * slots
    for length in lengths:
        slot = free.index(min(free))
        free[slot] += length
    return max(free)
