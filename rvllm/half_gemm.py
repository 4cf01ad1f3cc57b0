"""Products of halfs on cuBLAS, through ctypes, so that they may be captured.

Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import ctypes
import weakref
from functools import partial
from typing import Any

import numpy as np

from rvllm.blas import BlasError, N, T
from rvllm.ops import expect
from rvllm.runtime import Array, Runtime

# Values of cuBLAS's enums, from cublas_api.h and library_types.h.
R_32F, R_16F = 0, 2  # cudaDataType: float32, half
COMPUTE_32F = 68  # cublasComputeType_t: products of halfs are added in float32
DEFAULT_ALGORITHM = -1  # cublasGemmAlgo_t: the library chooses
SUMS_STAY_FLOAT32 = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: also where parts of a sum are added
WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper; more than older cards need
DTYPES = {np.dtype(np.float16): R_16F, np.dtype(np.float32): R_32F}


class CublasLibrary:
    """The cuBLAS that CuPy has loaded, called through ctypes. BlasError if there is none, or if a call fails.

    CuPy's own wrapper refuses to work while a stream is captured into a graph; the library itself does not.
    """

    def __init__(self) -> None:
        import cupy
        from cupy.cuda import device

        device.get_cublas_handle()  # makes CuPy load the library, from wherever it lies
        name = f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
        try:
            self._library = ctypes.CDLL(name)  # the loaded one: the loader compares names
        except OSError as error:
            raise BlasError(f"{name}, which CuPy should have loaded, was not found: {error}") from None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; BlasError if its status is not 0 (CUBLAS_STATUS_SUCCESS)."""
        status = getattr(self._library, name)(*arguments)
        if status:
            raise BlasError(f"{name} failed with status {status}; cuBLAS's documentation of cublasStatus_t says why")

    def create(self) -> ctypes.c_void_p:
        """A handle: cuBLAS's state for the current device."""
        handle = ctypes.c_void_p()
        self.call("cublasCreate_v2", ctypes.byref(handle))
        self.call("cublasSetMathMode", handle, SUMS_STAY_FLOAT32)
        return handle


def check_operands(x: Array, weight: Array, y: Array) -> None:
    """ShapeError or BlasError unless y = x Wᵀ can be computed from such arrays."""
    expect("half_gemm", x=(x, (None, None)), weight=(weight, (None, None)))
    (n, k), m = x.shape, weight.shape[0]
    expect("half_gemm", weight=(weight, (m, k)), y=(y, (n, m)))
    if min(n, k, m) < 1 or k % 8 or m % 8:
        raise BlasError(f"n {n}, k {k}, m {m}; allowed: at least 1 each, k and m multiples of 8 for the tensor cores")
    half, outputs = [np.dtype(np.float16)], list(DTYPES)
    for name, array, allowed in (("x", x, half), ("weight", weight, half), ("y", y, outputs)):
        if array.dtype not in allowed or not array.flags.c_contiguous:
            layout = "in one piece" if array.flags.c_contiguous else "with gaps"
            wanted = " or ".join(map(str, allowed))
            raise BlasError(f"{name} is {array.dtype}, {layout}; allowed: {wanted} in one piece")


def emulated_half_gemm(x: Array, weight: Array, y: Array, alpha: float, add: bool) -> None:
    """What cuBLAS does, on NumPy arrays."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinity beyond half's range, then NaN, as on a GPU
        product = np.float32(alpha) * (x.astype(np.float32) @ weight.astype(np.float32).T)
        y[...] = product + y if add else product


class HalfGemm:
    """y = alpha · x Wᵀ, or y += alpha · x Wᵀ: products of halfs on the tensor cores, sums in float32.

    Works inside a stream capture, with a handle and a workspace of its own: a captured product keeps using that
    workspace, so this object must live as long as the graph. Products of one object must not run at the same time.
    cuBLAS prepares itself at a shape's first call, so run each once before a capture.
    """

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        if rt.is_cuda:
            with rt.on_device():
                self._library = CublasLibrary()
                self._handle = self._library.create()
                self._workspace = rt.empty(WORKSPACE_BYTES, np.uint8)
            destroy = weakref.finalize(self, self._library.call, "cublasDestroy_v2", self._handle)
            destroy.atexit = False  # at the end of the process CUDA may have gone already

    def __call__(self, x: Array, weight: Array, y: Array, alpha: float = 1.0, add: bool = False) -> None:
        """y [n, m] = alpha · x [n, k] weight [m, k]ᵀ, with add also + y. x, weight float16; y float16 or float32.

        Row-major, k and m multiples of 8. ShapeError, or BlasError for a type, a layout, or what cuBLAS reports.
        """
        check_operands(x, weight, y)
        if self._rt.is_cuda:
            with self._rt.on_device():
                self._on_cublas(x, weight, y, alpha, float(add))
            return
        self._rt.submit(partial(emulated_half_gemm, x, weight, y, alpha, add))

    def _on_cublas(self, x: Array, weight: Array, y: Array, alpha: float, beta: float) -> None:
        """As in `rvllm.blas.linear`: cuBLAS sees xᵀ (k × n), Wᵀ (k × m), yᵀ (m × n); yᵀ = W xᵀ, so A is Wᵀ with T."""
        (n, k), m = x.shape, weight.shape[0]
        self._use_current_stream()
        factors = ctypes.c_float(alpha), ctypes.c_float(beta)  # cuBLAS reads them during the call
        self._library.call(
            "cublasGemmEx", self._handle, T, N, m, n, k,
            ctypes.byref(factors[0]), pointer(weight), R_16F, k, pointer(x), R_16F, k,
            ctypes.byref(factors[1]), pointer(y), DTYPES[y.dtype], m, COMPUTE_32F, DEFAULT_ALGORITHM,
        )  # fmt: skip

    def _use_current_stream(self) -> None:
        """A new stream makes cuBLAS forget its workspace; it would allocate one, which a capture does not allow."""
        import cupy

        stream = ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)
        self._library.call("cublasSetStream_v2", self._handle, stream)
        workspace = pointer(self._workspace), ctypes.c_size_t(WORKSPACE_BYTES)
        self._library.call("cublasSetWorkspace_v2", self._handle, *workspace)


def pointer(array: Array) -> ctypes.c_void_p:
    """Where a CuPy array starts on the device."""
    return ctypes.c_void_p(array.data.ptr)
