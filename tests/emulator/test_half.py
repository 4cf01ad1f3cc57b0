"""half and bfloat16: all values, all roundings, with the CPU's conversion and with the portable one."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.emulator import Module

from .conftest import load

ALL_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
rng = np.random.default_rng(1)


@pytest.fixture(params=[False, True], ids=["f16c", "portable"])
def module(request: pytest.FixtureRequest) -> Module:
    return load("half", "fast", request.param)


def convert(module: Module, kernel: str, x: np.ndarray, dtype: type) -> np.ndarray:
    y: np.ndarray = np.zeros(x.size, dtype)
    module.launch(kernel, -(-x.size // 256), 256, [x, y, x.size])
    return y


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bit by bit, but any NaN is as good as any other."""
    integer = f"u{got.itemsize}"
    differ = (got.view(integer) != want.view(integer)) & ~(np.isnan(got) & np.isnan(want))
    assert not differ.any(), (np.flatnonzero(differ)[:5], got[differ][:5], want[differ][:5])


def hard_floats() -> np.ndarray:
    """Floats around every half and every midpoint of two halves, random bit patterns, and the extremes."""
    halves = ALL_HALVES[np.isfinite(ALL_HALVES)].astype(np.float64)
    ordered = np.sort(halves)
    middles = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    near = [f(middles, np.float32(s)) for f, s in [(np.nextafter, np.inf), (np.nextafter, -np.inf)]]
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    extremes = np.array([65504, 65519.996, 65520, 65536, 1e-8, 2**-25, 2**-24, 0, -0.0, np.inf, np.nan], np.float32)
    return np.concatenate([middles, *near, bits, extremes, -extremes])


def test_every_half_to_float(module: Module) -> None:
    assert_same_bits(convert(module, "half_to_float", ALL_HALVES, np.float32), ALL_HALVES.astype(np.float32))


def test_float_to_half(module: Module) -> None:
    x = hard_floats()
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(convert(module, "float_to_half", x, np.float16), x.astype(np.float16))


def test_double_to_half_rounds_once(module: Module) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        middles = hard_floats().astype(np.float64)
        x = np.concatenate([middles, middles * (1 + 2.0**-40), middles * (1 - 2.0**-40)])
        assert_same_bits(convert(module, "double_to_half", x, np.float16), x.astype(np.float16))


def test_bfloat(module: Module) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert_same_bits(convert(module, "bfloat_to_float", bits, np.float32), values)
    x = hard_floats()
    u = x.view(np.uint32).astype(np.uint64)
    want = np.where(np.isnan(x), 0x7FFF, (u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(convert(module, "float_to_bfloat", x, np.uint16), want)


def test_arithmetic_rounds_once(module: Module) -> None:
    n = 50_000
    a, b, c = (rng.integers(0, 65536, n).astype(np.uint16).view(np.float16) for _ in range(3))
    y = np.zeros((8, n), np.float16)
    module.launch("arithmetic", -(-n // 256), 256, [a, b, c, y, n])
    p, q, r = (v.astype(np.float64) for v in (a, b, c))
    with np.errstate(all="ignore"):
        # One rounding from float64; its own rounding is exact for these (fma: wherever the result is finite).
        for row, want in enumerate([p + q, p - q, p * q, p / q, p * q + r, -p]):
            assert_same_bits(y[row], want.astype(np.float16))
        assert_same_bits(y[6], np.where(p < q, np.fmax(a, b), np.fmin(a, b)))
        pair = [(p * r).astype(np.float16), (q * r).astype(np.float16)]
        assert_same_bits(y[7], (pair[0].astype(np.float64) + pair[1].astype(np.float64)).astype(np.float16))


def test_half_and_bfloat_scalars(module: Module) -> None:
    y = np.zeros(3, np.float32)
    module.launch("scalars", 1, 1, [y, 0.1, 1 / 3, 2049])
    assert y.tolist() == [float(np.float16(0.1)), 0.333984375, 2048.0]
