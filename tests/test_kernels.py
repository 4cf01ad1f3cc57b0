"""Every kernel against NumPy: odd sizes, extreme values, threads in order and reversed, in the emulator's check mode.

With RVLLM_TEST_DEVICE=cuda the same tests run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rvllm import blas, cpu_model, ops
from rvllm.ops import ShapeError
from rvllm.runtime import DeviceMemoryError, Runtime
from rvllm.testing import assert_close

SIZES = [1, 31, 33, 100, 255, 257, 1000]
RNG = np.random.default_rng(0)
LARGE = 22_500  # the real model's residual reaches this


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


@pytest.fixture
def run(device: Runtime) -> Callable[..., np.ndarray]:
    """run(op, *arrays): upload, call, download the result, or the first argument where the op works in place."""

    def call(op: Callable, *arguments: object) -> np.ndarray:
        uploaded = [device.upload(a) if isinstance(a, np.ndarray) else a for a in arguments]
        result = op(device, *uploaded)
        return device.download(uploaded[0] if result is None else result)

    return call


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dim", [1, 31, 64, 257])
def test_embedding(run: Callable, n: int, dim: int) -> None:
    table, ids = normal(50, dim), RNG.integers(0, 50, n).astype(np.int32)
    assert np.array_equal(run(ops.embedding, table, ids), table[ids])


def test_embedding_never_reads_outside_its_table(run: Callable) -> None:
    table, ids = normal(5, 7), np.array([-1, 4, 5, 2**31 - 1, -(2**31)], np.int32)
    assert np.array_equal(run(ops.embedding, table, ids), table[[0, 4, 0, 0, 0]])


@pytest.mark.parametrize("n", SIZES)
def test_residual_add(run: Callable, n: int) -> None:
    x, y = normal(n) * LARGE, normal(n) * LARGE
    x[0] = np.inf
    assert np.array_equal(run(ops.residual_add, x, y), x + y)


@pytest.mark.parametrize("heads", [1, 3, 9])
@pytest.mark.parametrize("d", [2, 6, 64, 128])
@pytest.mark.parametrize("n", [1, 5, 33])
def test_rope(run: Callable, n: int, heads: int, d: int) -> None:
    x = normal(n, heads, d) * 100
    phases = cpu_model.RotaryEmbedding(d, 1e5).phases(RNG.integers(0, 8192, n).astype(np.int32))
    got = run(ops.rope, x, phases.real[:, 0], phases.imag[:, 0])
    assert_close(got, cpu_model.rope(x, phases), atol=1e-4, why="products fused on a GPU")
    before, after = (np.linalg.norm(a.reshape(n, heads, d // 2, 2), axis=-1) for a in (x, got))
    assert_close(after, before, rtol=1e-5, why="a rotation keeps lengths")


@pytest.mark.parametrize("n", SIZES)
def test_silu_mul(run: Callable, n: int) -> None:
    gate, up = normal(n) * 10, normal(n)
    gate[: min(n, 6)] = [-5400, 5400, -0.0, -88.8, 88.8, np.inf][: min(n, 6)]
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = wide / (1 + np.exp(-wide)) * up
    assert_close(run(ops.silu_mul, gate, up), expected, rtol=5e-6, atol=1e-30, why="expf")


@pytest.mark.parametrize(("B", "H", "T", "S"), [(1, 1, 1, 1), (1, 9, 1, 33), (3, 2, 5, 31), (2, 3, 17, 100)])
def test_mask_add(run: Callable, B: int, H: int, T: int, S: int) -> None:
    scores, positions = normal(B, H, T, S) * LARGE, RNG.integers(0, S, (B, T)).astype(np.int32)
    scores[0, 0, 0, 0] = -np.inf
    hidden = np.arange(S) > positions[:, None, :, None]
    assert np.array_equal(run(ops.mask_add, scores, positions), np.where(hidden, -np.inf, scores))


@pytest.mark.parametrize(("B", "T", "D"), [(1, 1, 1), (3, 7, 65), (2, 33, 255)])
def test_last_row(run: Callable, B: int, T: int, D: int) -> None:
    x, last = normal(B, T, D), RNG.integers(0, T, B).astype(np.int32)
    assert np.array_equal(run(ops.last_row, x, last), x[np.arange(B), last])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 33, 9, 64), (3, 1, 9, 31)])
def test_transpose_axes12(run: Callable, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    assert np.array_equal(run(ops.transpose_axes12, x), x.swapaxes(1, 2))


@pytest.mark.parametrize("scale", [1.0, LARGE, 1e-6])
@pytest.mark.parametrize("dim", SIZES)
def test_rmsnorm(run: Callable, dim: int, scale: float) -> None:
    x, weight = normal(3, dim) * np.float32(scale), RNG.uniform(0.5, 1.5, dim).astype(np.float32)
    x[1] = 0
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert_close(run(ops.rmsnorm, x, weight, 1e-5), expected, rtol=1e-5, atol=1e-9, why="float32 sums, rsqrtf")


def softmax_rows(cols: int) -> dict[str, np.ndarray]:
    one_left = np.full((2, cols), -np.inf, np.float32)
    one_left[:, cols // 2] = [-7, 3e38]
    return {
        "normal": normal(2, cols) * 5,
        "all negative": normal(2, cols) - 300,
        "large": normal(2, cols) * LARGE,
        "equal": np.full((2, cols), -1e30, np.float32),
        "masked but one": one_left,
    }


@pytest.mark.parametrize("kind", ["normal", "all negative", "large", "equal", "masked but one"])
@pytest.mark.parametrize("cols", SIZES)
def test_softmax(run: Callable, cols: int, kind: str) -> None:
    x = softmax_rows(cols)[kind]
    wide = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    got = run(ops.softmax, x)
    assert_close(got, wide / wide.sum(axis=1, keepdims=True), atol=2e-6, why="float32 sums, expf")
    assert_close(got.sum(axis=1), np.ones(2), atol=1e-5, why="a distribution")


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("K", "d"), [(1, 1), (3, 5), (3, 64)])
@pytest.mark.parametrize("lengths", [[1], [1, 9, 4], [33, 16, 17, 1]])
def test_kv_write_and_gather(rt: Runtime, lengths: list[int], K: int, d: int, block_size: int) -> None:
    width = -(-max(lengths) // block_size)
    blocks = RNG.permutation(len(lengths) * width + 3).astype(np.int32)
    tables = blocks[: len(lengths) * width].reshape(len(lengths), width)
    tables_of = [(b, p) for b, n in enumerate(lengths) for p in range(n)]
    slots = np.array([-1, *(tables[b, p // block_size] * block_size + p % block_size for b, p in tables_of)], np.int32)
    new = normal(2, len(slots), K, d)
    storage = rt.upload(np.full((len(blocks), block_size, K, d), np.nan, np.float32))
    other = rt.upload(np.full((len(blocks), block_size, K, d), np.nan, np.float32))
    ops.kv_write(rt, rt.upload(new[0]), rt.upload(new[1]), storage, other, rt.upload(slots))
    for which, stored in enumerate((storage, other)):
        flat = rt.download(stored).reshape(-1, K, d)
        assert np.array_equal(flat[slots[1:]], new[which, 1:])
        assert np.isnan(flat).all(axis=(1, 2)).sum() == len(flat) - len(slots) + 1, "padding was stored somewhere"
    longest = max(lengths) + (width * block_size > max(lengths))
    got = rt.download(ops.kv_gather(rt, storage, rt.upload(tables), rt.upload(np.array(lengths, np.int32)), longest))
    expected = np.zeros((len(lengths), K, longest, d), np.float32)
    for (b, p), row in zip(tables_of, new[0, 1:], strict=True):
        expected[b, :, p] = row
    assert np.array_equal(got, expected)


# Sizes at the ends ----------------------------------------------------------------------------------------------------


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def none(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


# Operations on arrays without elements, and the shapes that come out: those of NumPy. In place: as they were.
EMPTY: list[tuple[Callable, tuple[object, ...], tuple[int, ...]]] = [
    (ops.embedding, (zeros(5, 3), none(0)), (0, 3)),
    (ops.embedding, (zeros(5, 0), none(2)), (2, 0)),
    (ops.embedding, (zeros(0, 3), none(0)), (0, 3)),
    (ops.residual_add, (zeros(0, 3), zeros(0, 3)), (0, 3)),
    (ops.rope, (zeros(0, 2, 4), zeros(0, 2), zeros(0, 2)), (0, 2, 4)),
    (ops.rope, (zeros(3, 0, 4), zeros(3, 2), zeros(3, 2)), (3, 0, 4)),
    (ops.silu_mul, (zeros(0), zeros(0)), (0,)),
    (ops.mask_add, (zeros(0, 1, 1, 1), none(0, 1)), (0, 1, 1, 1)),
    (ops.mask_add, (zeros(1, 1, 1, 0), none(1, 1)), (1, 1, 1, 0)),
    (ops.last_row, (zeros(0, 2, 3), none(0)), (0, 3)),
    (ops.last_row, (zeros(2, 1, 0), none(2)), (2, 0)),
    (ops.transpose_axes12, (zeros(2, 0, 3, 4),), (2, 3, 0, 4)),
    (ops.rmsnorm, (zeros(0, 3), zeros(3), 1e-5), (0, 3)),
    (ops.rmsnorm, (zeros(2, 0), zeros(0), 1e-5), (2, 0)),
    (ops.softmax, (zeros(0, 3),), (0, 3)),
    (ops.softmax, (zeros(2, 0),), (2, 0)),
    (ops.kv_write, (zeros(0, 1, 4), zeros(0, 1, 4), zeros(3, 2, 1, 4), zeros(3, 2, 1, 4), none(0)), (0, 1, 4)),
    (ops.kv_gather, (zeros(3, 2, 1, 4), none(0, 2), none(0), 0), (0, 1, 0, 4)),
    (ops.kv_gather, (zeros(3, 2, 1, 4), none(2, 2), none(2), 0), (2, 1, 0, 4)),
    (ops.kv_gather, (zeros(3, 2, 0, 4), none(2, 2), none(2), 3), (2, 0, 3, 4)),
    (blas.linear, (zeros(0, 3), zeros(4, 3)), (0, 4)),
    (blas.linear, (zeros(2, 3), zeros(0, 3)), (2, 0)),
    (blas.linear, (zeros(2, 0), zeros(4, 0)), (2, 4)),
    (blas.scores, (zeros(0, 2, 3), zeros(0, 5, 3), 1.0), (0, 2, 5)),
    (blas.scores, (zeros(1, 2, 0), zeros(1, 5, 0), 1.0), (1, 2, 5)),
    (blas.weighted_values, (zeros(2, 3, 0), zeros(2, 0, 4)), (2, 3, 4)),
    (blas.weighted_values, (zeros(2, 0, 3), zeros(2, 3, 4)), (2, 0, 4)),
]


@pytest.mark.parametrize(("op", "arguments", "shape"), EMPTY, ids=lambda value: getattr(value, "__name__", ""))
def test_arrays_without_elements(run: Callable, op: Callable, arguments: tuple, shape: tuple[int, ...]) -> None:
    got = run(op, *arguments)
    assert got.shape == shape
    assert (got == 0).all(), "a sum of nothing"


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (ops.embedding, (zeros(0, 3), none(2)), "a table without rows"),
        (ops.last_row, (zeros(2, 0, 3), none(2)), "at least one row for each sequence"),
        (ops.softmax, (zeros(),), "a single number"),
    ],
)
def test_nothing_where_something_is_needed(run: Callable, op: Callable, arguments: tuple, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        run(op, *arguments)


def test_more_elements_than_an_int_counts(rt: Runtime) -> None:
    """last_row picks few elements of many. Of 8.6 GB that are never touched, two rows are."""
    B, T, D = 2, 2**20 + 8, 1024
    try:
        x = rt.empty((B, T, D))
    except DeviceMemoryError as error:
        pytest.skip(f"no room for an array of 2**31 elements: {error}")
    last = np.array([3, T - 2], np.int32)
    for b, row in enumerate(last):
        x[b, row] = b + 1
    got = rt.download(ops.last_row(rt, x, rt.upload(last)))
    assert (got == np.array([[1], [2]])).all()
