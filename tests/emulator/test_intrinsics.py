"""The intrinsics, each against its definition in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import Run

THREADS = 64


@pytest.fixture
def results(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """out[thread, 16] float, n[thread, 16] int, extremes[2], histogram[4] of one launch."""
    out, n = np.zeros((THREADS, 16), np.float32), np.zeros(THREADS * 16 + 2, np.int32)
    histogram = np.zeros(4, np.uint32)
    run("intrinsics", "intrinsics", 1, THREADS, [out, n, histogram], shared=THREADS * 16)
    return out, n[: THREADS * 16].reshape(THREADS, 16), n[THREADS * 16 :], histogram


def test_intrinsics(results: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    out, n, extremes, histogram = results
    t = np.arange(THREADS)
    lane, base = t % 32, t // 32 * 32
    shuffles = {
        0: 63 - t + 3,
        1: base + 5,
        2: np.where(lane % 16 + 3 < 16, t + 3, t),
        3: np.where(lane > 0, t - 1, t),
        4: t ^ 8,
        5: np.where(lane < 16, t ^ 1, t ^ 2),
        6: np.full(THREADS, 63),
        7: t ^ 1,
        11: np.array([1, 2, 4, 8])[t % 4],
        12: (base + 31) * 1.5,
    }
    for column, want in shuffles.items():
        np.testing.assert_array_equal(out[:, column], want, err_msg=f"out[:, {column}]")
    tenth = (t * np.float32(0.1)).astype(np.float16)
    np.testing.assert_array_equal(out[:, 8], (tenth + tenth).astype(np.float32))
    assert np.isinf(out[:, 10]).all()
    ballots = [sum(1 << i for i in range(32) if (first + i) % 3 == 0) for first in (0, 32)]
    np.testing.assert_array_equal(n[:, 0].view(np.uint32), np.repeat(ballots, 32))
    a, b = np.array([0x7F80FF01, 0x02FE0304], np.uint32).view(np.int8).reshape(2, 4).astype(int)
    constants = {1: 13, 2: 7 + a @ b, 3: 1, 5: 1, 8: 3}
    for column, value in constants.items():
        assert (n[:, column] == value).all(), f"n[:, {column}]"
    np.testing.assert_array_equal(n[:, 4], np.repeat([496, 1520], 32))
    np.testing.assert_array_equal(n[:, 6], [bin(i).count("1") + 32 - int(i | 1).bit_length() for i in t])
    np.testing.assert_array_equal(n[:, 7], (t + 1).astype(np.float32).view(np.int32))
    np.testing.assert_array_equal(n[:, 9], np.maximum(t, 10) + 3)
    assert (histogram == 32).all() and extremes.tolist() == [63, -5]


def test_bits_and_math(run: Run) -> None:
    out, n = np.zeros(16, np.float32), np.zeros(32, np.uint32)
    run("intrinsics", "bits_and_math", 1, 1, [out, n])
    a, b = 0x11223344, 0x8899AABB
    reversed_bits = int(f"{0x00112334:032b}"[::-1], 2)
    want = [0x44332211, 0xBBAA9988, 0x2211FF00, 5, 32, 64, 0, 3, 0xFFFFFFFE, reversed_bits]
    want.append(a << 4 & 0xFFFFFFFF | b >> 28)
    want += [(b << 32 | a) >> 8 & 0xFFFFFFFF, 4 * 255 * 255, 0x3F800000, 3, 2]
    assert [hex(v) for v in n[: len(want)]] == [hex(v) for v in want]
    np.testing.assert_allclose(out[:6], [0.5, np.e, 1.0, np.sin(0.5), np.cos(0.5), 1.0], rtol=1e-6)


def test_atomics(run: Run) -> None:
    n, total, big = np.zeros(10, np.uint32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    n[[2, 4]] = 0xFFFFFFFF
    run("intrinsics", "atomics", 2, 50, [n, total, big])
    assert n.tolist() == [100, 99, 0, 0x7F, 0xFFFFFF80, 100 % 7, 1, 100, 4294967196, 0]
    assert total[0] == 50.0 and big[0] == 100 << 33
