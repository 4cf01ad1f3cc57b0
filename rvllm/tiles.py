"""Matrices packed as in the file, cut into tiles of 16 rows and 32 columns for the tensor cores.

Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from rvllm.errors import RvllmError
from rvllm.gguf import GGUFFile
from rvllm.quants import k_scales
from rvllm.runtime import Array, Runtime

TILE_ROWS, TILE_COLUMNS = 16, 32

TILE_NAMES: dict[GGMLQuantizationType, str] = {
    GGMLQuantizationType.F16: "TileF16",
    GGMLQuantizationType.Q4_0: "TileQ4_0",
    GGMLQuantizationType.Q4_1: "TileQ4_1",
    GGMLQuantizationType.Q8_0: "TileQ8_0",
    GGMLQuantizationType.Q4_K: "TileQ4_K",
}


class TileError(RvllmError):
    """A matrix that cannot be cut into tiles: its type or its shape."""


@dataclass(frozen=True)
class Tiles:
    """A matrix [rows, columns] on the device, cut into tiles of 16 x 32. Notebook 16, section 2.

    data: uint8 [ceil(rows / 16), columns / 32, bytes of a tile]; the rows that fill up the last tile are zeros.
    rows, columns: of the matrix, without those rows.   kind: the struct in tile.cuh that reads a tile, such as
    `TileQ8_0`; a product takes it as the macro TILE.
    """

    data: Array
    rows: int
    columns: int
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes on the device, rows that fill up the last tile included."""
        return int(self.data.nbytes)

    @property
    def row_tiles(self) -> int:
        """Tiles in a column of tiles: ceil(rows / 16)."""
        return int(self.data.shape[0])

    @property
    def k_blocks(self) -> int:
        """Tiles in a row of tiles: columns / 32."""
        return int(self.data.shape[1])


# Array methods and np.concatenate alone: they work on CuPy's arrays too. Axis names: R rows, a multiple of 16, T tiles
# of 16 rows, h upper or lower half of a tile, g row in it, KB k-blocks of 32 columns, q quarter of a k-block.


def by_rows(part: Array) -> Array:
    """Bytes that belong to a row of a k-block, as lanes read them: uint8 [R, KB, q, n] -> [T, KB, 16 · q · n].

    A quarter's bytes for row g come just before those for row g + 8; so do scales, with one quarter. Order of the last
    axis: g, quarter, half, byte.
    """
    R, KB, quarters, n = part.shape
    halves = part.reshape(R // TILE_ROWS, 2, 8, KB, quarters, n)
    return halves.transpose(0, 3, 2, 4, 1, 5).reshape(R // TILE_ROWS, KB, 16 * quarters * n)


def as_nibbles(qs: Array) -> Array:
    """Sixteen bytes of a file's block, in the order of nibbles.cuh: uint8 [R, KB, 16] -> [R, KB, 4, 4].

    In the file the low halves are weights 0 to 15, the high halves 16 to 31. A lane wants weights 0, 2, 4, 6, 1, 3, 5,
    7 of its quarter, two to a byte.
    """
    R, KB, _ = qs.shape
    weights = np.concatenate([qs & 0x0F, qs >> 4], axis=2)
    ordered = weights.reshape(R, KB, 4, 4, 2).swapaxes(3, 4).reshape(R, KB, 4, 4, 2)
    return ordered[..., 0] | ordered[..., 1] << 4


def tiles_f16(raw: Array) -> Array:
    """Halfs, 64 bytes a row and k-block: uint8 [R, KB, 64] -> [T, KB, 1024], the upper 8 rows, then the lower 8."""
    R, KB, _ = raw.shape
    halves = raw.reshape(R // TILE_ROWS, 2, 8, KB, 64)
    return halves.transpose(0, 3, 1, 2, 4).reshape(R // TILE_ROWS, KB, -1)


def tiles_q8_0(raw: Array) -> Array:
    """Blocks of a scale and 32 quants: uint8 [R, KB, 34] -> [T, KB, 544], 512 bytes of quants, 32 of scales.

    It moves bytes and looks at none, so an array of any other type is put in the same order.
    """
    R, KB, _ = raw.shape
    quants = raw[:, :, 2:].reshape(R, KB, 4, 8)
    return np.concatenate([by_rows(quants), by_rows(raw[:, :, None, :2])], axis=2)


def tiles_q4(raw: Array) -> Array:
    """Blocks of a scale, for Q4_1 a minimum, and 16 bytes of quants: uint8 [R, KB, 18 or 20] -> [T, KB, 288 or 320].

    256 bytes of quants, then 32 of scales, then for Q4_1 32 of minima.
    """
    quants, halfs = raw[:, :, -16:], raw[:, :, None, :-16]
    return np.concatenate([by_rows(as_nibbles(quants)), by_rows(halfs[..., :2]), by_rows(halfs[..., 2:])], axis=2)


def tiles_q4_k(raw: Array) -> Array:
    """Blocks of 256 weights: uint8 [R, KB / 8, 144] -> [T, KB, 384], 256 bytes of quants, 128 of float32 factors.

    In the file: d, dmin (halfs), 12 bytes of 6-bit scales and minima, 128 of quants. For each g the factors are the
    scales of rows g and g + 8, then their minima.
    """
    R, blocks, _ = raw.shape
    pairs = raw[:, :, 16:].reshape(R, blocks, 4, 2, 16)  # a 32-byte run holds one group low, the next one high
    runs = pairs.reshape(R, blocks, 4, 32)
    groups = np.concatenate([runs & 0x0F, runs >> 4], axis=3).reshape(R, blocks * 8, 32)
    as_in_q4_0 = groups[:, :, :16] | groups[:, :, 16:] << 4
    scales, minima = q4_k_factors(raw[:, :, :16])
    T, KB = R // TILE_ROWS, blocks * 8
    factors = [by_rows(f.view(np.uint8).reshape(R, KB, 1, 4)).reshape(T, KB, 8, 8) for f in (scales, minima)]
    return np.concatenate([by_rows(as_nibbles(as_in_q4_0)), np.concatenate(factors, axis=3).reshape(T, KB, -1)], axis=2)


def q4_k_factors(heads: Array) -> tuple[Array, Array]:
    """Scale and minimum of each group, from a block's first 16 bytes: uint8 [R, KB / 8, 16] -> float32 [R, KB] each.

    The minimum comes with its sign: it is to be added. Both are exact: 11 bits times 6.
    """
    R, blocks, _ = heads.shape
    d = heads[:, :, :4].copy().view(np.float16).astype(np.float32).reshape(-1, 2)
    scales, minima = k_scales(heads[:, :, 4:].reshape(-1, 12))
    return (d[:, :1] * scales).reshape(R, -1), (-d[:, 1:] * minima).reshape(R, -1)


TILERS: dict[str, Callable[[Array], Array]] = {
    "TileF16": tiles_f16,
    "TileQ8_0": tiles_q8_0,
    "TileQ4_0": tiles_q4,
    "TileQ4_1": tiles_q4,
    "TileQ4_K": tiles_q4_k,
}


def repack(
    rt: Runtime, raw: NDArray[np.uint8], type_: GGMLQuantizationType, rows: int, columns: int, name: str = "matrix"
) -> Tiles:
    """A matrix of the file as tiles on the device, which also does the work. Notebook 16, section 2.

    raw: its bytes, uint8 [rows, bytes of a row] (or any shape of as many).   name: the tensor's, for messages.
    Raises TileError for another type than those in TILE_NAMES, columns that are no multiple of 32, or another number of
    bytes than such a matrix has.
    """
    if type_ not in TILE_NAMES:
        allowed = ", ".join(t.name for t in TILE_NAMES)
        raise TileError(f"{name}: found type {type_.name}; allowed: {allowed}")
    if rows < 1 or columns < 1 or columns % TILE_COLUMNS:
        raise TileError(f"{name}: found shape [{rows}, {columns}]; allowed: columns in multiples of {TILE_COLUMNS}")
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if raw.size * block != rows * columns * block_bytes:
        raise TileError(f"{name}: found {raw.size:,} bytes; allowed: {rows * columns // block * block_bytes:,}")
    kind = TILE_NAMES[type_]
    with rt.on_device():
        padded = rt.zeros((-(-rows // TILE_ROWS) * TILE_ROWS, raw.size // rows), np.uint8)
        padded[:rows] = rt.upload(raw.reshape(rows, -1))
        # A k-block is a block of the file, except that halfs have no blocks and Q4_K has eight k-blocks in one.
        data = TILERS[kind](padded.reshape(len(padded), columns // max(block, TILE_COLUMNS), -1))
    return Tiles(data, rows, columns, kind)


def concatenate(parts: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """One matrix above the other, such as Q, K and V: raw rows uint8 [rows_i, n] -> [sum of rows_i, n]."""
    return np.concatenate(parts)


def interleave(gate: NDArray[np.uint8], up: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Eight rows of gate, eight of up, and so on: raw rows uint8 [F, n] each -> [2F, n]; F a multiple of 8.

    A tile then has gate's row over up's of the same number: a lane that owns one owns both (notebook 18).
    """
    F, n = gate.shape
    return np.concatenate([gate.reshape(F // 8, 8, n), up.reshape(F // 8, 8, n)], axis=1).reshape(2 * F, n)


def read_tiles(rt: Runtime, file: GGUFFile, *names: str, interleaved: bool = False) -> Tiles:
    """Matrices of a file as one: the rows of the first above those of the second and so on, or two interleaved.

    names: tensors [rows_i, columns] of one type -> Tiles [sum of rows_i, columns] of that type. Notebook 16, section 2.
    Raises TileError where the matrices differ in type or columns, and as `repack`.
    """
    infos = [file.tensors[name] for name in names]
    first = infos[0]
    for info in infos:
        if info.type != first.type or info.shape[1:] != first.shape[1:]:
            found = f"{info.name}: found type {info.type_name}, shape {list(info.shape)}"
            raise TileError(f"{found}; allowed: as {first.name}, {first.type_name}, [*, {first.shape[-1]}]")
    if interleaved and (len(infos) != 2 or first.shape != infos[1].shape or first.shape[0] % 8):
        shapes = ", ".join(str(list(info.shape)) for info in infos)
        raise TileError(f"{first.name}: found shapes {shapes}; allowed: two alike, rows in multiples of 8")
    raws = [file.raw(name) for name in names]
    raw = interleave(*raws) if interleaved else concatenate(raws)
    return repack(rt, raw, first.type, len(raw), first.shape[-1], first.name)
