"""Half-precision products against float64; on a GPU (RVLLM_TEST_DEVICE=cuda) also while a stream is captured."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.blas import BlasError
from rvllm.half_gemm import HalfGemm
from rvllm.ops import ShapeError
from rvllm.runtime import Runtime
from rvllm.testing import assert_close

RNG = np.random.default_rng(0)
SUMS = "float32 sums of k products, in another order"
HALF = "the result is rounded to half"


@pytest.fixture(scope="module")
def gemm(rt: Runtime) -> HalfGemm:
    return HalfGemm(rt)


def operands(n: int, k: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    x, weight = (RNG.standard_normal(shape, dtype=np.float32) for shape in ((n, k), (m, k)))
    return x.astype(np.float16), weight.astype(np.float16)


def exact(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ weight.astype(np.float64).T


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 16.0, -0.3])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("n", "k", "m"), [(1, 8, 8), (3, 32, 40), (17, 64, 96), (33, 576, 192), (130, 96, 8)])
def test_half_gemm(gemm: HalfGemm, rt: Runtime, n: int, k: int, m: int, dtype: type, alpha: float, add: bool) -> None:
    x, weight = operands(n, k, m)
    before = RNG.standard_normal((n, m)).astype(dtype) if add else np.full((n, m), np.nan, dtype)  # NaN: not read
    y = rt.upload(before)
    gemm(rt.upload(x), rt.upload(weight), y, alpha, add)
    expected = alpha * exact(x, weight) + (before.astype(np.float64) if add else 0)
    rounded = dtype == np.float16
    atol = 1e-5 * max(1, abs(alpha)) * k**0.5
    if rounded and add:  # cuBLAS may round the product to half before it adds it
        atol += 1e-3 * max(1, abs(alpha)) * k**0.5
    why = f"{SUMS}{'; ' + HALF if rounded else ''}"
    assert_close(rt.download(y), expected, atol=atol, rtol=6e-4 if rounded else 1e-6, why=why)


def test_rows_of_a_workspace(gemm: HalfGemm, rt: Runtime) -> None:
    """A step uses the first n rows of a bucket's arrays; the others stay."""
    x, weight = operands(10, 64, 16)
    y = rt.upload(np.full((10, 16), 7, np.float32))
    gemm(rt.upload(x)[2:5], rt.upload(weight), y[4:7])
    got = rt.download(y)
    assert_close(got[4:7], exact(x[2:5], weight), atol=1e-4, why=SUMS)
    assert (got[[0, 1, 2, 3, 7, 8, 9]] == 7).all()


def test_beyond_the_range_of_half(gemm: HalfGemm, rt: Runtime) -> None:
    """Sums are float32: they may pass 65,504 on the way, and are infinite in half only where the result is."""
    x = np.full((1, 16), 200, np.float16)
    weight = np.full((8, 16), 200, np.float16)
    weight[1:, 8:] = -200
    y = rt.empty((1, 8), np.float16)
    gemm(rt.upload(x), rt.upload(weight), y)
    assert np.array_equal(rt.download(y), [[np.inf, *[0] * 7]])


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


@pytest.mark.parametrize(
    ("x", "weight", "y", "error", "message"),
    [
        (half(2, 8), half(8, 16), half(2, 8), ShapeError, "weight"),
        (half(2, 8), half(8, 8), half(3, 8), ShapeError, "y"),
        (half(8), half(8, 8), half(2, 8), ShapeError, "x"),
        (half(1, 2, 8), half(8, 8), half(2, 8), ShapeError, "x"),
        (half(2, 8), half(8), half(2, 8), ShapeError, "weight"),
        (half(2, 8), half(8, 8), half(16), ShapeError, "y"),
        (half(2, 8), half(8, 8), half(2, 16), ShapeError, "y"),
        (half(2, 0), half(8, 0), half(2, 8), BlasError, "k 0"),
        (half(2, 8), half(0, 8), half(2, 0), BlasError, "m 0"),
        (half(2, 8), half(12, 8), half(2, 12), BlasError, "m 12; .*multiples of 8"),
        (half(0, 8), half(8, 8), half(0, 8), BlasError, "n 0"),
        (half(2, 12), half(8, 12), half(2, 8), BlasError, "multiples of 8"),
        (half(2, 8).astype(np.float32), half(8, 8), half(2, 8), BlasError, "x is float32"),
        (half(2, 8), half(8, 8).astype(np.float32), half(2, 8), BlasError, "weight is float32.*allowed: float16 in"),
        (half(2, 8), half(8, 8), half(2, 8).astype(np.float64), BlasError, "y is float64.*float16 or float32"),
    ],
)
def test_refusals(
    gemm: HalfGemm, rt: Runtime, x: np.ndarray, weight: np.ndarray, y: np.ndarray, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        gemm(rt.upload(x), rt.upload(weight), rt.upload(y))


@pytest.mark.parametrize("name", ["x", "weight", "y"])
def test_gaps_are_refused(gemm: HalfGemm, rt: Runtime, name: str) -> None:
    """Of each operand alone."""
    arrays = {"x": half(2, 8), "weight": half(8, 8), "y": half(2, 8)}
    on_device = {key: rt.upload(array) for key, array in arrays.items()}
    on_device[name] = rt.upload(half(len(arrays[name]), 16))[:, :8]
    with pytest.raises(BlasError, match=f"{name} is float16, with gaps"):
        gemm(*on_device.values())


def test_in_a_capture(gemm: HalfGemm, rt: Runtime) -> None:
    """A captured product does nothing until the graph is launched, and then reads what is there by that time."""
    if not rt.is_cuda:
        pytest.skip("graphs are CUDA's")
    import cupy

    (x, weight), (later, _) = operands(5, 64, 32), operands(5, 64, 32)
    on_device, w, y = rt.upload(x), rt.upload(weight), rt.zeros((5, 32))
    stream = cupy.cuda.Stream(non_blocking=True)
    rt.synchronize()
    with stream:
        gemm(on_device, w, y)  # cuBLAS prepares itself
        stream.begin_capture()
        gemm(on_device, w, y, 2.0, add=True)
        graph = stream.end_capture()
        on_device.set(later, stream=stream)
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
    expected = exact(x, weight) + 4 * exact(later, weight)
    assert_close(rt.download(y), expected, atol=5e-4, why=SUMS)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, rt: Runtime) -> None:
    if not rt.is_cuda:
        pytest.skip("the library is CUDA's")

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("rvllm.half_gemm.ctypes.CDLL", missing)
    with pytest.raises(BlasError, match=r"libcublas\.so\.\d+.*not found"):
        HalfGemm(rt)
