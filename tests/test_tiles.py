"""Weight tiles: repacked matrices mean what the file says, bit for bit, and products with them match float64.

With RVLLM_TEST_DEVICE=cuda the same tests run on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from rvllm import runtime
from rvllm.gguf import GGUFFile
from rvllm.quants import dequantize
from rvllm.runtime import Array, Runtime
from rvllm.tiles import TILE_NAMES, TileError, Tiles, concatenate, interleave, read_tiles, repack

PROBE = """
// Every weight of a matrix three ways. Launch: a warp for a tile, grid (k-blocks, row tiles). Limit: not measured.
#include "tile.cuh"

extern "C" __global__ void tile_probe(const unsigned char* tiles, float* values, float* exact, float* folded) {
    int k_blocks = gridDim.x, lane = threadIdx.x, g = lane / 4, q = lane % 4;
    const unsigned char* data = tiles + (blockIdx.y * k_blocks + blockIdx.x) * TILE::BYTES;
    TILE tile;
    tile.load(data);
    unsigned a[8], b[8];
    tile.fragments(a);
    tile.folded(b);
    for (int i = 0; i < 8; i++) {
        int row = g + i % 2 * 8, k = 8 * q + 2 * (i / 2);
        float scale = i % 2 ? tile.scale().y : tile.scale().x, minimum = i % 2 ? tile.minimum().y : tile.minimum().x;
        float2 quants = __half22float2(as_halfs(a[i])), weights = __half22float2(as_halfs(b[i]));
        long long at = (blockIdx.y * 16 + row) * (32 * k_blocks) + 32 * blockIdx.x + k;
        values[at] = TILE::value(data, row, k);
        values[at + 1] = TILE::value(data, row, k + 1);
        exact[at] = __fadd_rn(__fmul_rn(quants.x, scale), minimum);
        exact[at + 1] = __fadd_rn(__fmul_rn(quants.y, scale), minimum);
        folded[at] = weights.x;
        folded[at + 1] = weights.y;
    }
}
"""
TYPES = list(TILE_NAMES)
every_type = pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)


@pytest.fixture
def device(device: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setitem(runtime.LIVE_SOURCES, "tile_probe.cu", PROBE)
    return device


def random_matrix(type_: Type, rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """Bytes of a matrix: every quant and 6-bit scale, half scales of either sign around `scale`."""
    rng = np.random.default_rng(seed)
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if type_ == Type.F16:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float16).view(np.uint8)
    raw = rng.integers(0, 256, (rows, columns // block, block_bytes), np.uint8)
    n_halfs = 1 if type_ in (Type.Q8_0, Type.Q4_0) else 2
    halfs = (rng.standard_normal((*raw.shape[:2], n_halfs)) * scale).astype(np.float16)
    raw[:, :, : 2 * n_halfs] = halfs.view(np.uint8)
    return raw.reshape(rows, -1)


def probe(rt: Runtime, tiles: Tiles) -> tuple[np.ndarray, ...]:
    """All weights of the tiles, by value(), by fragments() and by folded(): float32 [rows up to a tile, columns]."""
    row_tiles, k_blocks, _ = tiles.data.shape
    out: list[Array] = [rt.empty((16 * row_tiles, tiles.columns)) for _ in range(3)]
    rt.launch("tile_probe", (k_blocks, row_tiles), 32, [tiles.data, *out], defines={"TILE": tiles.kind})
    return tuple(rt.download(o) for o in out)


@every_type
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_tiles_hold_what_the_file_says(device: Runtime, type_: Type, rows: int) -> None:
    raw = random_matrix(type_, rows, 512)
    tiles = repack(device, raw, type_, rows, 512)
    values, exact, folded = probe(device, tiles)
    expected = dequantize(raw, type_)
    assert np.array_equal(values[:rows], expected)
    assert np.array_equal(exact[:rows], expected)
    assert not values[rows:].any()  # the last tile is filled up with zeros
    error = np.abs(folded[:rows] - expected)  # one rounding to halfs; for Q4_K also of scale and minimum
    assert (error <= np.abs(expected).max() * 2.0**-10).all()


@every_type
def test_extreme_factors(device: Runtime, type_: Type) -> None:
    """Scales from the smallest half to the largest, and zero."""
    raws = [random_matrix(type_, 16, 256, seed, scale) for seed, scale in enumerate([1e-7, 3e-5, 1e4, 0.0])]
    raw = concatenate(raws)
    values, exact, _ = probe(device, repack(device, raw, type_, 64, 256))
    assert np.array_equal(values, dequantize(raw, type_))
    assert np.array_equal(exact, values)


def test_interleaved_and_concatenated_rows(device: Runtime) -> None:
    gate, up, more = (random_matrix(Type.Q8_0, rows, 64, seed) for seed, rows in enumerate([24, 24, 5]))
    tiles = repack(device, concatenate([interleave(gate, up), more]), Type.Q8_0, 53, 64)
    values = probe(device, tiles)[0]
    assert (tiles.rows, tiles.row_tiles, tiles.k_blocks, tiles.nbytes) == (53, 4, 2, 4 * 2 * 544)
    for t in range(3):
        rows = slice(8 * t, 8 * t + 8)
        assert np.array_equal(values[16 * t : 16 * t + 8], dequantize(gate[rows], Type.Q8_0))
        assert np.array_equal(values[16 * t + 8 : 16 * t + 16], dequantize(up[rows], Type.Q8_0))
    assert np.array_equal(values[48:53], dequantize(more, Type.Q8_0))


def write_file(tmp_path: Path, *tensors: tuple[str, tuple[int, int], Type]) -> GGUFFile:
    path, writer = tmp_path / "m.gguf", GGUFWriter(tmp_path / "m.gguf", "llama")
    for seed, (name, (rows, columns), type_) in enumerate(tensors):
        plain = type_ in (Type.F16, Type.F32)
        data = np.ones((rows, columns), np.float32) if plain else random_matrix(type_, rows, columns, seed)
        writer.add_tensor(name, data, raw_dtype=None if plain else type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def test_matrices_of_a_file(device: Runtime, tmp_path: Path) -> None:
    names = [("q", (40, 64), Type.Q8_0), ("k", (8, 64), Type.Q8_0), ("up", (8, 64), Type.Q8_0)]
    file = write_file(tmp_path, *names, ("v", (8, 64), Type.Q4_0), ("norm", (8, 64), Type.F32))
    q, k, up = (dequantize(file.raw(name), Type.Q8_0) for name in ("q", "k", "up"))
    assert np.array_equal(probe(device, read_tiles(device, file, "q", "k"))[0], np.concatenate([q, k]))
    gate_up = probe(device, read_tiles(device, file, "k", "up", interleaved=True))[0]
    assert np.array_equal(gate_up, np.concatenate([k, up]))
    with pytest.raises(TileError, match=r"v: found type Q4_0, shape \[8, 64\]; allowed: as q, Q8_0, \[\*, 64\]"):
        read_tiles(device, file, "q", "v")
    with pytest.raises(TileError, match=r"norm: found type F32; allowed: F16, Q4_0, Q4_1, Q8_0, Q4_K"):
        read_tiles(device, file, "norm")
    with pytest.raises(TileError, match=r"q: found shapes \[40, 64\], \[8, 64\]; allowed: two alike"):
        read_tiles(device, file, "q", "k", interleaved=True)


def test_what_cannot_be_cut(rt: Runtime) -> None:
    with pytest.raises(TileError, match=r"w: found shape \[4, 40\]; allowed: columns in multiples of 32"):
        repack(rt, np.zeros((4, 80), np.uint8), Type.F16, 4, 40, "w")
    with pytest.raises(TileError, match=r"w: found 68 bytes; allowed: 136"):
        repack(rt, np.zeros((2, 34), np.uint8), Type.Q8_0, 4, 32, "w")


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """The worst token's |got - expected| over its |expected|, lengths of whole vectors."""
    return float((np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())


def product(rt: Runtime, tiles: Tiles, x: np.ndarray, hi_lo: int, warps: int, factor: float, extra: int) -> np.ndarray:
    """activations.cu, then quantised_product.cu; the grid and the arrays have room for `extra` more tokens."""
    N, columns = x.shape
    counts, room = rt.upload(np.array([N, 1], np.int32)), N + extra
    padded = np.concatenate([x, np.full((extra, columns), np.nan, np.float32)])
    halfs = rt.upload(np.full(((1 + hi_lo) * room, columns), np.nan, np.float16))
    y = rt.upload(np.full((room, tiles.rows), 300, np.float32))
    grid = -(-room * columns // 4 // 64)
    rt.launch("activations", grid, 64, [rt.upload(padded), halfs, counts, columns, factor], defines={"HI_LO": hi_lo})
    defines = {"TILE": tiles.kind, "K_BLOCKS": tiles.k_blocks, "WARPS": warps, "HI_LO": hi_lo}
    grid_xy = (tiles.row_tiles, -(-room * (1 + hi_lo) // 8))
    arguments = [tiles.data, halfs, y, counts, tiles.rows, 1 / factor]
    rt.launch("quantised_product", grid_xy, 32 * warps, arguments, defines=defines)
    got = rt.download(y)
    assert (got[N:] == 300).all()  # nobody writes past the tokens that there are
    return got[:N]


# hi/lo: what is left are float32 sums and 22 of 24 bits of the activations; plain: one rounding to halfs, 2^-11
TOLERANCES = {0: 1e-3, 1: 1e-6}


@every_type
@pytest.mark.parametrize("hi_lo", [0, 1])
def test_products_of_each_type(device: Runtime, type_: Type, hi_lo: int) -> None:
    raw = random_matrix(type_, 37, 256)
    x = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)
    got = product(device, repack(device, raw, type_, 37, 256), x, hi_lo, 2, 1.0, 0)
    assert relative_error(got, x @ dequantize(raw, type_).T.astype(np.float64)) < TOLERANCES[hi_lo]


@pytest.mark.parametrize("hi_lo", [0, 1])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9])
def test_products_of_any_number_of_tokens(device: Runtime, tokens: int, hi_lo: int) -> None:
    raw = random_matrix(Type.Q4_1, 21, 96)
    x = np.random.default_rng(tokens).standard_normal((tokens, 96)).astype(np.float32)
    got = product(device, repack(device, raw, Type.Q4_1, 21, 96), x, hi_lo, 2, 1.0, extra=5)
    assert relative_error(got, x @ dequantize(raw, Type.Q4_1).T.astype(np.float64)) < TOLERANCES[hi_lo]


@pytest.mark.parametrize("warps, k_blocks", [(1, 1), (1, 13), (2, 11), (4, 3), (16, 30)])
def test_products_of_any_width(device: Runtime, warps: int, k_blocks: int) -> None:
    raw = random_matrix(Type.Q8_0, 16, 32 * k_blocks)
    x = np.random.default_rng(1).standard_normal((2, 32 * k_blocks)).astype(np.float32)
    tiles = repack(device, raw, Type.Q8_0, 16, 32 * k_blocks)
    got = product(device, tiles, x, 1, warps, 1.0, 0)
    assert relative_error(got, x @ dequantize(raw, Type.Q8_0).T.astype(np.float64)) < TOLERANCES[1]
    assert np.array_equal(got, product(device, tiles, x, 1, warps, 1.0, 0))


@pytest.mark.parametrize("scale, factor", [(2e5, 2.0**-5), (1e-6, 2.0**20)])
def test_activations_beyond_halfs(device: Runtime, scale: float, factor: float) -> None:
    raw = random_matrix(Type.Q4_0, 16, 64)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32) * np.float32(scale)
    got = product(device, repack(device, raw, Type.Q4_0, 16, 64), x, 1, 2, factor, 0)
    assert relative_error(got, x @ dequantize(raw, Type.Q4_0).T.astype(np.float64)) < TOLERANCES[1]
