"""Row-major matrix products on cuBLAS, which is column-major, and on its stand-in for the emulator.

Generated from notebooks/08_cublas.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rvllm.errors import RvllmError
from rvllm.ops import expect
from rvllm.runtime import Array, Runtime

N, T = 0, 1  # CUBLAS_OP_N, CUBLAS_OP_T


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices as cuBLAS sees memory: column-major. Notebook 08, section 3.

    Element (row, column) of matrix b lies at b · stride + column · ld + row of the flat buffer.
    op: N to use it as it lies, T to use its transpose.
    """

    data: Array
    ld: int
    op: int = N
    stride: int = 0


class BlasError(RvllmError):
    """A product that cuBLAS would refuse, or that would read or write past the end of a buffer."""


def columns(data: NDArray[np.float32], rows: int, cols: int, ld: int, stride: int, batch: int) -> NDArray[np.float32]:
    """View [batch, rows, cols] of a flat buffer in cuBLAS's column-major meaning; BlasError if it does not fit."""
    check_fit(data, rows, cols, ld, stride, batch)
    item = data.itemsize
    view = np.lib.stride_tricks.as_strided(data.reshape(-1), (batch, cols, rows), (stride * item, ld * item, item))
    return view.swapaxes(1, 2)


def check_fit(data: Array, rows: int, cols: int, ld: int, stride: int, batch: int) -> None:
    """BlasError unless such a batch of column-major matrices lies inside a buffer of float32 in one piece."""
    last = (batch - 1) * stride + (cols - 1) * ld + rows
    if ld < max(1, rows) or stride < 0 or last > data.size:
        raise BlasError(f"a {rows} x {cols} matrix with ld {ld}, stride {stride}, batch {batch} in {data.size} floats")
    if data.dtype != np.float32 or not data.flags.c_contiguous:
        layout = "in one piece" if data.flags.c_contiguous else "with gaps"
        raise BlasError(f"a buffer of {data.dtype}, {layout}; allowed: float32 in one piece")


def emulated_gemm(m: int, n: int, k: int, alpha: float, a: Matrix, b: Matrix, c: Matrix, batch: int) -> None:
    """What cublasSgemmStridedBatched does, on NumPy buffers: C = alpha · op(A) op(B), all column-major."""

    def operand(matrix: Matrix, rows: int, cols: int) -> NDArray[np.float32]:
        if matrix.op == T:
            return columns(matrix.data, cols, rows, matrix.ld, matrix.stride, batch).swapaxes(1, 2)
        return columns(matrix.data, rows, cols, matrix.ld, matrix.stride, batch)

    product = operand(a, m, k) @ operand(b, k, n)
    columns(c.data, m, n, c.ld, c.stride, batch)[...] = np.float32(alpha) * product


def gemm(rt: Runtime, m: int, n: int, k: int, alpha: float, a: Matrix, b: Matrix, c: Matrix, batch: int = 1) -> None:
    """C = alpha · op(A) op(B) in cuBLAS's terms: op(A) m x k, op(B) k x n, C m x n, column-major, float32."""
    if min(m, n, k, batch) < 1:
        raise BlasError(f"m {m}, n {n}, k {k}, batch {batch}; allowed: at least 1 each")
    if a.op not in (N, T) or b.op not in (N, T) or c.op != N:
        raise BlasError(f"ops {a.op}, {b.op}, {c.op}; allowed: N (0) or T (1) for A and B, N for C")
    for matrix, rows, cols in ((a, m, k), (b, k, n), (c, m, n)):
        rows, cols = (cols, rows) if matrix.op == T else (rows, cols)
        check_fit(matrix.data, rows, cols, matrix.ld, matrix.stride, batch)
    if not rt.is_cuda:
        rt.submit(partial(emulated_gemm, m, n, k, alpha, a, b, c, batch))
        return
    from cupy.cuda import cublas, device

    scalars = np.array([alpha, 0.0], np.float32)  # cuBLAS reads alpha and beta through pointers
    one, zero = scalars.ctypes.data, scalars.ctypes.data + 4
    with rt.on_device():
        cublas.sgemmStridedBatched(
            device.get_cublas_handle(), a.op, b.op, m, n, k,
            one, a.data.data.ptr, a.ld, a.stride, b.data.data.ptr, b.ld, b.stride,
            zero, c.data.data.ptr, c.ld, c.stride, batch,
        )  # fmt: skip


def linear(rt: Runtime, x: Array, weight: Array) -> Array:
    """y = x Wᵀ: float32 [n, in], [out, in] -> [n, out], all row-major. Notebook 08, section 5.

    cuBLAS sees xᵀ (in × n), Wᵀ (in × out) and yᵀ (out × n); yᵀ = W xᵀ, so A is the weight with T, B is x with N.
    """
    expect("linear", x=(x, (None, None)), weight=(weight, (None, None)))
    (n, n_in), n_out = x.shape, weight.shape[0]
    expect("linear", weight=(weight, (n_out, n_in)))
    if 0 in (n, n_in, n_out):  # nothing to add up, as in NumPy; cuBLAS takes no empty matrices
        return rt.zeros((n, n_out))
    y = rt.empty((n, n_out))
    gemm(rt, n_out, n, n_in, 1.0, Matrix(weight, n_in, T), Matrix(x, n_in), Matrix(y, n_out))
    return y


def scores(rt: Runtime, q: Array, k: Array, scale: float) -> Array:
    """scale · q kᵀ for each of a batch: float32 [batch, M, d], [batch, S, d] -> [batch, M, S]. Notebook 08, section 6.

    The G query heads of a KV head are folded into M = G · T rows, so batch is sequences times KV heads.
    """
    expect("scores", q=(q, (None,) * 3), k=(k, (None,) * 3))
    (batch, M, d), S = q.shape, k.shape[1]
    expect("scores", k=(k, (batch, S, d)))
    if 0 in (batch, M, S, d):
        return rt.zeros((batch, M, S))
    out = rt.empty((batch, M, S))
    gemm(rt, S, M, d, scale, Matrix(k, d, T, S * d), Matrix(q, d, N, M * d), Matrix(out, S, N, M * S), batch)
    return out


def weighted_values(rt: Runtime, p: Array, v: Array) -> Array:
    """p v for each of a batch: float32 [batch, M, S], [batch, S, d] -> [batch, M, d]."""
    expect("weighted_values", p=(p, (None,) * 3), v=(v, (None,) * 3))
    (batch, M, S), d = p.shape, v.shape[2]
    expect("weighted_values", v=(v, (batch, S, d)))
    if 0 in (batch, M, S, d):
        return rt.zeros((batch, M, d))
    out = rt.empty((batch, M, d))
    gemm(rt, d, M, S, 1.0, Matrix(v, d, N, S * d), Matrix(p, S, N, M * S), Matrix(out, d, N, M * d), batch)
    return out
