"""Solutions to the exercises of notebook 16."""

import numpy as np


# Lane 4g + q has 16 bytes: 8 of row g, then 8 of row g + 8.
def offset(row: int, column: int) -> int:
    lane = 4 * (row % 8) + column // 8
    return 16 * lane + 8 * (row // 8) + column % 8


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 -> hi, lo, float16 each."""
    hi = x.astype(np.float16)
    return hi, (x - hi.astype(np.float32)).astype(np.float16)


# Rows 2q, 2q + 1, 2q + 8 and 2q + 9 of the mma are columns 8q .. 8q + 3 of the tile, in the second 8q + 4 .. 8q + 7.
def b_operands(x: np.ndarray, lane: int) -> tuple[np.ndarray, np.ndarray]:
    eight = x[lane // 4, 8 * (lane % 4) :][:8]
    return eight[:4], eight[4:]
