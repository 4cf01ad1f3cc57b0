"""Solutions to the exercises of notebook 18."""

import numpy as np


# LN(x) = gain · x / s − mean · gain / s: both terms go through W, and s is a number of the row.
def late_layer_norm(Wx, Wg, sum_x: float, sum_squares: float, n: int, eps: float) -> np.ndarray:
    """W · LN(x) for one row x of n values."""
    mean = sum_x / n
    variance = sum_squares / n - mean**2
    return (Wx - mean * Wg) / np.sqrt(variance + eps)


# Of a lane's 8 columns the first four belong to the first mma; of those, two to each pair of registers.
def place(row: int, k: int) -> tuple[int, int, int]:
    """Lane, register, half."""
    of_lane = k % 8
    return 4 * (row % 8) + k // 8, of_lane // 4 * 4 + of_lane % 4 // 2 * 2 + row // 8, of_lane % 2


# A tile is 16 rows: 8 of the gate, then the same 8 of up.
def rows_of_block(b: int, row_tiles: int) -> list[tuple[int, str, int]]:
    """(row of the interleaved matrix, "gate" or "up", row of that matrix in the file)."""
    rows = range(16 * row_tiles * b, 16 * row_tiles * (b + 1))
    return [(at, "up" if at % 16 >= 8 else "gate", at // 16 * 8 + at % 8) for at in rows]
