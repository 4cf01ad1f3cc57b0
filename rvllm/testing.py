"""One comparison for tests and notebooks: it says how far apart two arrays are, also when they agree."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def assert_close(
    actual: ArrayLike, expected: ArrayLike, atol: float = 0.0, rtol: float = 0.0, why: str = "", name: str = "values"
) -> str:
    """Check |actual - expected| <= atol + rtol · |expected| everywhere; return one line that says how close it was.

    `why`: where the tolerance comes from. On failure AssertionError shows the ten worst places. NaN is never close.
    """
    got, want = np.asarray(actual), np.asarray(expected)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}")
    if got.size == 0:
        return f"{name}: empty, nothing to compare"
    wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(wide_got == wide_want, 0.0, np.abs(wide_got - wide_want))  # equal infinities differ by 0
        allowed = atol + rtol * np.abs(wide_want)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), got.shape)
    place = tuple(int(i) for i in worst)
    line = f"{name}: largest difference {error[worst]:.2e} at {place}, allowed {allowed[worst]:.2e}"
    line += f" ({why})" if why else ""
    bad = ~(error <= allowed)
    if bad.any():
        raise AssertionError(f"{line}; {bad.sum():,} of {bad.size:,} are off:\n{_worst_pairs(got, want, error, bad)}")
    return line


def _worst_pairs(got: np.ndarray, want: np.ndarray, error: np.ndarray, bad: np.ndarray) -> str:
    badness = np.where(bad, np.nan_to_num(error, nan=np.inf), -1.0)
    order = np.argsort(badness, axis=None)[::-1][: min(10, int(bad.sum()))]
    places = [tuple(int(i) for i in np.unravel_index(i, got.shape)) for i in order]
    return "\n".join(f"  {place}: got {got[place]!r}, expected {want[place]!r}" for place in places)
