"""Products in cuBLAS's column-major terms beside three nested loops, and the row-major wrappers beside float64."""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest

from rvllm.blas import BlasError, Matrix, N, T, columns, emulated_gemm, gemm, linear, scores, weighted_values
from rvllm.errors import RvllmError
from rvllm.ops import ShapeError
from rvllm.testing import assert_close

WHY = "float32 against float64"
SIZES = [(1, 1, 1, 1), (1, 2, 3, 2), (5, 1, 4, 3), (7, 3, 1, 1), (4, 4, 4, 2), (33, 17, 5, 2)]


def at(rows: int, ld: int, stride: int, op: int, z: int, row: int, column: int) -> int:
    """Where cuBLAS finds element (row, column) of op(X) of matrix z."""
    if op == T:
        row, column = column, row
    assert row < rows <= ld
    return z * stride + column * ld + row


def operand(rng, rows, cols, op, batch, pad, gap):
    """A buffer with op(X) rows x cols in it, NaN wherever nothing may look; its ld and stride."""
    stored_rows, stored_cols = (cols, rows) if op == T else (rows, cols)
    ld = stored_rows + pad
    stride = ld * stored_cols + gap
    buffer = np.full((batch - 1) * stride + (stored_cols - 1) * ld + stored_rows, np.nan, np.float32)
    for z, i, j in product(range(batch), range(rows), range(cols)):
        buffer[at(stored_rows, ld, stride, op, z, i, j)] = rng.standard_normal()
    return buffer, ld, stride, stored_rows


def loops(m, n, k, alpha, a, b, c, batch):
    """C = alpha · op(A) op(B), one product after the other; a, b: buffer, ld, stride, rows, op."""
    (x, lda, sa, ra, opa), (y, ldb, sb, rb, opb), (out, ldc, sc) = a, b, c
    for z, i, j in product(range(batch), range(m), range(n)):
        total = 0.0
        for step in range(k):
            left, right = x[at(ra, lda, sa, opa, z, i, step)], y[at(rb, ldb, sb, opb, z, step, j)]
            total += float(left) * float(right)
        out[at(m, ldc, sc, N, z, i, j)] = alpha * total


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("ops", list(product((N, T), (N, T))), ids=["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(("pad", "gap", "alpha"), [(0, 0, 1.0), (3, 5, -0.125)])
def test_gemm_against_the_definition(rt, size, ops, pad, gap, alpha):
    """All four flags, ld larger than the rows, strides with gaps, batches; nothing but C's elements is written."""
    m, n, k, batch = size
    rng = np.random.default_rng(m + n)
    x, lda, sa, ra = operand(rng, m, k, ops[0], batch, pad, gap)
    y, ldb, sb, rb = operand(rng, k, n, ops[1], batch, pad + 1, gap)
    ldc = m + pad
    out = np.full(batch * (ldc * n + gap), np.nan, np.float32)  # beta is 0: what stands in C must not matter
    expected = out.astype(np.float64)
    loops(m, n, k, alpha, (x, lda, sa, ra, ops[0]), (y, ldb, sb, rb, ops[1]), (expected, ldc, ldc * n + gap), batch)
    c = rt.upload(out)
    a, b = Matrix(rt.upload(x), lda, ops[0], sa), Matrix(rt.upload(y), ldb, ops[1], sb)
    gemm(rt, m, n, k, alpha, a, b, Matrix(c, ldc, N, ldc * n + gap), batch)
    got = rt.download(c)
    assert np.array_equal(np.isnan(got), np.isnan(expected)), "written beside C, or not all of C"
    assert_close(np.nan_to_num(got), np.nan_to_num(expected), atol=2e-6 * k, rtol=1e-6, why=WHY)


def test_a_shared_operand_has_stride_0(rt):
    """One weight for a whole batch."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((3, 4), np.float32), rng.standard_normal((5, 2, 4), np.float32)
    y = rt.zeros((5, 2, 3))
    gemm(rt, 3, 2, 4, 1.0, Matrix(rt.upload(w), 4, T, 0), Matrix(rt.upload(x), 4, N, 8), Matrix(y, 3, N, 6), batch=5)
    assert_close(rt.download(y), x.astype(float) @ w.T.astype(float), atol=1e-5, why=WHY)


def test_columns_is_a_view_of_column_major_memory():
    """Rows are neighbours, columns lie ld apart, matrices stride apart."""
    view = columns(np.arange(20, dtype=np.float32), rows=2, cols=3, ld=3, stride=10, batch=2)
    assert view.tolist() == [[[0, 3, 6], [1, 4, 7]], [[10, 13, 16], [11, 14, 17]]]
    buffer = np.zeros(6, np.float32)
    columns(buffer, 2, 3, 2, 0, 1)[0, 1, 2] = 1
    assert buffer.tolist() == [0, 0, 0, 0, 0, 1]


# What a wrong flag does -----------------------------------------------------------------------------------------------


WRONG = {
    "op of A": ({"op": N}, {}, {}), "op of B": ({}, {"op": T}, {}), "both ops": ({"op": N}, {"op": T}, {}),
    "ld of A": ({"ld": 4}, {}, {}), "ld of B": ({}, {"ld": 4}, {}), "ld of C": ({}, {}, {"ld": 3}),
    "stride of A": ({"stride": 8}, {}, {}), "stride of B": ({}, {"stride": 8}, {}),
    "stride of C": ({}, {}, {"stride": 0}),
}  # fmt: skip


@pytest.mark.parametrize("square", [False, True], ids=["oblong", "square"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_flag_is_seen_without_a_gpu(wrong, square):
    """y = x Wᵀ of a batch of two, with one number of the call wrong: refused, or another result."""
    n, n_in, n_out = (4, 4, 4) if square else (3, 5, 4)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, n, n_in), np.float32), rng.standard_normal((2, n_out, n_in), np.float32)
    right = (
        {"ld": n_in, "op": T, "stride": n_out * n_in},
        {"ld": n_in, "op": N, "stride": n * n_in},
        {"ld": n_out, "op": N, "stride": n * n_out},
    )
    if all(flags[name] == value for flags, change in zip(right, wrong, strict=True) for name, value in change.items()):
        return  # with these sizes, this is the right number
    y = np.zeros((2, n, n_out), np.float32)

    def call(changes):
        a, b, c = (Matrix(data, **(f | g)) for data, f, g in zip((w, x, y), right, changes, strict=True))
        emulated_gemm(n_out, n, n_in, 1.0, a, b, c, 2)
        return y.copy()

    expected = x @ w.swapaxes(1, 2)
    assert_close(call(({}, {}, {})), expected, atol=1e-6)
    y[:] = 0
    with suppress(BlasError):
        assert not np.allclose(call(wrong), expected, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a", {"size": 11}), ("b", {"size": 19}), ("c", {"size": 14}),
        ("a", {"ld": 3}), ("b", {"ld": 3}), ("c", {"ld": 2}), ("a", {"ld": 0}), ("c", {"ld": -3}),
        ("a", {"op": N}), ("a", {"ld": 5}), ("b", {"ld": 5}), ("c", {"ld": 4}),
        ("m", 0), ("n", 0), ("k", 0), ("batch", 0), ("m", -1),
    ],
    ids=str,
)  # fmt: skip
def test_blas_error_for_what_does_not_fit(rt, name, change):
    """A is 3 x 4 (op T), B 4 x 5, C 3 x 5. On a GPU, too, nothing may be read or written past a buffer's end."""
    refuse(rt, name, change)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a", {"op": 2}), ("b", {"op": 7}), ("c", {"op": T}),
        ("a", {"dtype": np.float64}), ("b", {"dtype": np.float16}), ("c", {"dtype": np.int32}),
        ("a", {"skip": True}), ("b", {"skip": True}), ("c", {"skip": True}),
    ],
    ids=str,
)  # fmt: skip
def test_blas_error_for_what_a_gpu_would_misread(rt, name, change):
    """Only a pointer reaches cuBLAS: an array of another dtype, or one with gaps, would be read as something else."""
    refuse(rt, name, change)


def refuse(rt, name, change):
    sizes = {"m": 3, "n": 5, "k": 4, "batch": 1} | ({name: change} if isinstance(change, int) else {})
    matrices = {}
    for key, size, ld, op in (("a", 12, 4, T), ("b", 20, 4, N), ("c", 15, 3, N)):
        own = {"size": size, "ld": ld, "op": op, "dtype": np.float32} | (change if key == name else {})
        data = rt.zeros(own["size"] * (2 if "skip" in own else 1), own["dtype"])
        matrices[key] = Matrix(data[::2] if "skip" in own else data, own["ld"], own["op"])
    with pytest.raises((BlasError, ShapeError)):
        gemm(rt, sizes["m"], sizes["n"], sizes["k"], 1.0, *matrices.values(), sizes["batch"])


@pytest.mark.parametrize("stride", [-12, 13])
def test_a_stride_that_leaves_the_buffer_is_refused(rt, stride):
    """Backwards as well: matrix 1 would lie before the buffer."""
    a, b, c = rt.zeros(24), rt.zeros(40), rt.zeros(30)
    with pytest.raises(BlasError):
        gemm(rt, 3, 5, 4, 1.0, Matrix(a, 4, T, stride), Matrix(b, 4, N, 20), Matrix(c, 3, N, 15), batch=2)


# The wrappers ---------------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize(
    ("n", "n_in", "n_out"), [(1, 1, 1), (1, 31, 33), (3, 100, 7), (257, 5, 64), (2, 255, 300), (33, 1, 2)]
)
def test_linear(rt, n, n_in, n_out):
    x, w = random(n, n_in), random(n_out, n_in, seed=1)
    got = rt.download(linear(rt, rt.upload(x), rt.upload(w)))
    assert got.dtype == np.float32
    assert_close(got, x.astype(float) @ w.astype(float).T, atol=2e-6 * n_in**0.5 + 1e-6, rtol=1e-5, why=WHY)


@pytest.mark.parametrize(
    ("batch", "M", "S", "d"), [(1, 1, 1, 1), (1, 3, 1, 16), (3, 1, 33, 7), (6, 31, 17, 64), (2, 100, 257, 5)]
)
@pytest.mark.parametrize("scale", [1.0, 0.125, -3.0])
def test_scores_and_weighted_values(rt, batch, M, S, d, scale):
    q, k, v, p = random(batch, M, d), random(batch, S, d, seed=1), random(batch, S, d, seed=2), random(batch, M, S)
    got = rt.download(scores(rt, rt.upload(q), rt.upload(k), scale))
    expected = scale * np.einsum("bmd,bsd->bms", q.astype(float), k.astype(float))
    assert_close(got, expected, atol=4e-6 * abs(scale) * d**0.5, rtol=1e-5, why=WHY)
    got = rt.download(weighted_values(rt, rt.upload(p), rt.upload(v)))
    assert_close(
        got, np.einsum("bms,bsd->bmd", p.astype(float), v.astype(float)), atol=4e-6 * S**0.5, rtol=1e-5, why=WHY
    )


def test_the_two_by_three_example_of_the_notebook(rt):
    """Row-major (2, 3) is column-major (3, 2): y = x Wᵀ worked by hand."""
    x, w = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([[1, 0, -1], [2, 1, 0]], np.float32)
    assert rt.download(linear(rt, rt.upload(x), rt.upload(w))).tolist() == [[-2, 4], [-2, 13]]


@pytest.mark.parametrize(
    ("op", "left", "right"),
    [
        (linear, (2, 3), (4, 5)), (linear, (2, 3), (3, 2)), (linear, (2, 3), (3,)), (linear, (3,), (4, 3)),
        (linear, (1, 2, 3), (4, 3)), (linear, (2, 3), (1, 4, 3)),
        (scores, (2, 3, 4), (2, 3, 5)), (scores, (2, 3, 4), (1, 3, 4)), (scores, (3, 4), (3, 4)),
        (scores, (2, 3, 4), (3,)),
        (weighted_values, (2, 3, 4), (2, 3, 4)), (weighted_values, (2, 3, 4), (1, 4, 5)),
        (weighted_values, (3, 4), (4, 5)), (weighted_values, (2, 3, 4), (4, 5)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_shapes_that_do_not_fit(rt, op, left, right):
    extra = [1.0] if op is scores else []
    with pytest.raises(ShapeError, match=op.__name__):
        op(rt, rt.zeros(left), rt.zeros(right), *extra)


@pytest.mark.parametrize("which", [0, 1])
def test_a_matrix_that_is_a_slice_is_refused_or_right(rt, which):
    """The left half of a wider matrix: its rows are not neighbours, and cuBLAS is told they are."""
    wide = [random(4, 10), random(4, 10, seed=1)]
    arrays = [rt.upload(w)[:, :5] if i == which else rt.upload(w[:, :5]) for i, w in enumerate(wide)]
    try:
        got = rt.download(linear(rt, *arrays))
    except RvllmError:
        return
    assert_close(got, wide[0][:, :5].astype(float) @ wide[1][:, :5].astype(float).T, atol=1e-5, why=WHY)
