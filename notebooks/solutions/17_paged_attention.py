"""Solutions to the exercises of notebook 17."""

import numpy as np


def merge(a: tuple, b: tuple) -> tuple:
    largest = max(a[0], b[0])
    first, second = np.exp(a[0] - largest), np.exp(b[0] - largest)
    return largest, a[1] * first + b[1] * second, a[2] * first + b[2] * second


# Keys and values, two bytes a number, 16 tokens.
def blocks_in(n: int, L: int, K: int, d: int) -> int:
    return n // (2 * 2 * 16 * L * K * d)


# Token n of a page is in column 2 (n / 4) + n % 2 of product n % 4 / 2: that column is a group of four lanes.
def key_lanes(n: int) -> list[int]:
    group = 2 * (n // 4) + n % 2
    return [4 * group + q for q in range(4)]


# Lane 4h + q has the scores of head h with tokens 4q to 4q + 3.
def score_lane(h: int, n: int) -> int:
    return 4 * h + n // 4
