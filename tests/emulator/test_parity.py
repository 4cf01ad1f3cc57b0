"""Whole kernels against NumPy, in both modes and both orders, on odd sizes."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import Run

ODD_SIZES = [1, 31, 33, 100, 255, 257]
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dim", ODD_SIZES)
@pytest.mark.parametrize("block", [32, 256])
def test_rmsnorm(run: Run, dim: int, block: int) -> None:
    x, weight, out = normal(3, dim), normal(dim), np.zeros((3, dim), np.float32)
    run("rmsnorm", "rmsnorm", 3, block, [x, weight, out, dim, 1e-5])
    mean_square = (x.astype(np.float64) ** 2).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out, x / np.sqrt(mean_square + 1e-5) * weight, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("cols", ODD_SIZES)
def test_softmax(run: Run, cols: int) -> None:
    x = normal(5, cols) * 4
    valid = cols // 2 + 1
    y = x.copy()
    run("softmax", "softmax", 5, 128, [y, cols, valid], shared=128 * 4)
    e = np.exp(x[:, :valid] - x[:, :valid].max(axis=1, keepdims=True))
    want = np.zeros_like(x)
    want[:, :valid] = e / e.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tokens", ODD_SIZES)
def test_rope(run: Run, tokens: int) -> None:
    heads, d = 3, 16
    x, positions = normal(tokens, heads, d), rng.integers(0, 200, tokens).astype(np.int32)
    y = x.copy()
    run("rope", "rope", -(-tokens * heads * d // 2 // 128), 128, [y, positions, tokens, heads, d, 10000.0])
    angle = positions[:, None] * 10000.0 ** (-2 * np.arange(d // 2) / d)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    np.testing.assert_allclose(y, np.concatenate([a * c - b * s, b * c + a * s], axis=-1), atol=5e-5)


@pytest.mark.parametrize("tokens", [1, 31, 33, 100])
def test_kv_gather(run: Run, tokens: int) -> None:
    pool = normal(8, 16, 192).astype(np.float16)
    table = rng.permutation(8)[: -(-tokens // 16)].astype(np.int32)
    out = np.zeros((tokens, 192), np.float16)
    run("kv_gather", "kv_gather", tokens, 32, [pool, table, out, tokens, 16, 192])
    np.testing.assert_array_equal(out, pool[table].reshape(-1, 192)[:tokens])


Q8_0 = np.dtype([("d", np.float16), ("qs", np.int8, 32)])


def quantise(x: np.ndarray) -> np.ndarray:
    """[..., n] float32 -> [..., n / 32] blocks."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    packed = np.zeros(blocks.shape[:-1], Q8_0)
    packed["d"] = np.abs(blocks).max(axis=-1) / 127
    packed["qs"] = np.rint(blocks / packed["d"].astype(np.float32)[..., None]).clip(-127, 127)
    return packed


def dequantise(packed: np.ndarray) -> np.ndarray:
    values = packed["d"].astype(np.float32)[..., None] * packed["qs"]
    return values.reshape(*packed.shape[:-1], -1)


@pytest.mark.parametrize("rows", [1, 31, 33, 100])
def test_q8_matvec(run: Run, rows: int) -> None:
    w, x, y = quantise(normal(rows, 576)), quantise(normal(576)), np.zeros(rows, np.float32)
    run("q8_matvec", "q8_matvec", -(-rows // 4), (32, 4), [w, x, y, rows, 576])
    np.testing.assert_allclose(y, dequantise(w) @ dequantise(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 4, 33])
def test_cooperative(run: Run, blocks: int) -> None:
    x = normal(blocks * 100)
    y, partial, count = x.copy(), np.zeros(blocks, np.float32), np.zeros(1, np.uint32)
    run("cooperative", "row_mean_subtract", blocks, 64, [y, partial, count, x.size], cooperative=True)
    np.testing.assert_allclose(y, x - x.mean(), atol=1e-5)
