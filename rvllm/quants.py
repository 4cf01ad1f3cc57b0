"""Turn packed weight blocks into float32: eleven formats in NumPy, bit-equal to the gguf package.

Generated from notebooks/01_gguf.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from numpy.typing import NDArray

from rvllm.errors import RvllmError

Floats = NDArray[np.float32]


# One record per block, field by field as the C structs of ggml lay it out.
Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
Q5_0 = np.dtype([("d", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)])
Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def column(values: NDArray[np.generic]) -> Floats:
    """One number a block, float32 [n, 1], ready to scale that block's row of weights."""
    return values.astype(np.float32)[:, None]


def nibbles(qs: NDArray[np.uint8], out: Floats) -> None:
    """Unpack [n, 16] bytes into [n, 32]: low halves are weights 0 to 15, high halves weights 16 to 31."""
    out[:, :16] = qs & 0x0F
    out[:, 16:] = qs >> 4


def fifth_bits(qh: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Bit j of each uint32 as 0 or 16 for weight j, uint8 [n, 32]."""
    bits = np.unpackbits(qh.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return bits << np.uint8(4)


def decode_f32(raw: NDArray[np.uint8], out: Floats) -> None:
    """Four bytes a weight: nothing to decode."""
    out[...] = raw.view("<f4")


def decode_f16(raw: NDArray[np.uint8], out: Floats) -> None:
    """IEEE half precision: 1 sign, 5 exponent, 10 mantissa bits."""
    out[...] = raw.view("<f2")


def decode_bf16(raw: NDArray[np.uint8], out: Floats) -> None:
    """The upper half of a float32: shift it back into place."""
    np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def decode_q8_0(raw: NDArray[np.uint8], out: Floats) -> None:
    """q · d, with q in -128 to 127."""
    blocks = raw.view(Q8_0)[:, 0]
    np.multiply(blocks["qs"], column(blocks["d"]), out=out)


def decode_q4_0(raw: NDArray[np.uint8], out: Floats) -> None:
    """(q - 8) · d, with q in 0 to 15."""
    blocks = raw.view(Q4_0)[:, 0]
    nibbles(blocks["qs"], out)
    out -= np.float32(8)
    out *= column(blocks["d"])


def decode_q4_1(raw: NDArray[np.uint8], out: Floats) -> None:
    """q · d + m: a smallest value instead of a fixed -8."""
    blocks = raw.view(Q4_1)[:, 0]
    nibbles(blocks["qs"], out)
    out *= column(blocks["d"])
    out += column(blocks["m"])


def decode_q5_0(raw: NDArray[np.uint8], out: Floats) -> None:
    """(q - 16) · d; the fifth bits of all 32 weights sit together in one uint32."""
    blocks = raw.view(Q5_0)[:, 0]
    nibbles(blocks["qs"], out)
    out += fifth_bits(blocks["qh"])
    out -= np.float32(16)
    out *= column(blocks["d"])


def decode_q5_1(raw: NDArray[np.uint8], out: Floats) -> None:
    """q · d + m with five bits."""
    blocks = raw.view(Q5_1)[:, 0]
    nibbles(blocks["qs"], out)
    out += fifth_bits(blocks["qh"])
    out *= column(blocks["d"])
    out += column(blocks["m"])


def k_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Eight 6-bit scales and eight 6-bit mins from 12 bytes: uint8 [n, 8] each.

    Bytes 0-3 and 4-7 hold scale and min 0-3 in their low six bits; their top two bits complete the low and high
    nibbles of bytes 8-11 to scale and min 4-7.
    """
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 0x3F, (last & 0x0F) | (first >> 6 << 4)], axis=1)
    mins = np.concatenate([second & 0x3F, (last >> 4) | (second >> 6 << 4)], axis=1)
    return scales, mins


def scale_groups(blocks: NDArray[np.void], q: Floats) -> None:
    """In place on q [n, 8, 32]: group g becomes q · (d · scale_g) - dmin · min_g."""
    scales, mins = k_scales(blocks["scales"])
    q *= (column(blocks["d"]) * scales)[:, :, None]
    q -= (column(blocks["dmin"]) * mins)[:, :, None]


def decode_q4_k(raw: NDArray[np.uint8], out: Floats) -> None:
    """256 weights: eight groups of 32; each 32 bytes hold one group in the low nibbles, the next in the high ones."""
    blocks = raw.view(Q4_K)[:, 0]
    qs, q = blocks["qs"].reshape(-1, 4, 32), out.reshape(-1, 8, 32)
    q[:, 0::2] = qs & 0x0F
    q[:, 1::2] = qs >> 4
    scale_groups(blocks, q)


def decode_q5_k(raw: NDArray[np.uint8], out: Floats) -> None:
    """As Q4_K, and bit g of qh[j] is the fifth bit of weight j in group g."""
    blocks = raw.view(Q5_K)[:, 0]
    qs, q = blocks["qs"].reshape(-1, 4, 32), out.reshape(-1, 8, 32)
    q[:, 0::2] = qs & 0x0F
    q[:, 1::2] = qs >> 4
    group = np.arange(8, dtype=np.uint8)[:, None]
    q += (blocks["qh"][:, None, :] >> group & 1) << 4
    scale_groups(blocks, q)


def decode_q6_k(raw: NDArray[np.uint8], out: Floats) -> None:
    """(q - 32) · (d · scale): four low bits in ql, two high bits in qh, one int8 scale for 16 weights."""
    blocks = raw.view(Q6_K)[:, 0]
    ql = blocks["ql"].reshape(-1, 2, 1, 64)
    qh = blocks["qh"].reshape(-1, 2, 1, 32)
    low = np.concatenate([ql & 0x0F, ql >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = qh >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = out.reshape(-1, 16, 16)
    q[...] = (low | high << 4).reshape(-1, 16, 16)
    q -= np.float32(32)
    q *= (column(blocks["d"]) * blocks["scales"])[:, :, None]


class TensorTypeError(RvllmError):
    """A tensor type that neither this module nor the gguf package can decode. Notebook 01, section 5."""


Decoder = Callable[[NDArray[np.uint8], Floats], None]

DECODERS: dict[GGMLQuantizationType, Decoder] = {
    GGMLQuantizationType.F32: decode_f32,
    GGMLQuantizationType.F16: decode_f16,
    GGMLQuantizationType.BF16: decode_bf16,
    GGMLQuantizationType.Q4_0: decode_q4_0,
    GGMLQuantizationType.Q4_1: decode_q4_1,
    GGMLQuantizationType.Q5_0: decode_q5_0,
    GGMLQuantizationType.Q5_1: decode_q5_1,
    GGMLQuantizationType.Q8_0: decode_q8_0,
    GGMLQuantizationType.Q4_K: decode_q4_k,
    GGMLQuantizationType.Q5_K: decode_q5_k,
    GGMLQuantizationType.Q6_K: decode_q6_k,
}
CHUNK_WEIGHTS = 1 << 16  # 256 kB of float32: the piece in work stays in the L2 cache


def decode_by_gguf(type_: GGMLQuantizationType) -> Decoder:
    """A decoder for the rarer types, by the gguf package; TensorTypeError where it has none either."""

    def decode(raw: NDArray[np.uint8], out: Floats) -> None:
        try:
            out[...] = gguf_dequantize(raw, type_)
        except NotImplementedError:
            supported = ", ".join(t.name for t in DECODERS)
            message = f"tensor type {type_.name}: supported are {supported}, and what the gguf package decodes"
            raise TensorTypeError(message) from None

    return decode


def dequantize(raw: NDArray[np.uint8], type_: GGMLQuantizationType, out: Floats | None = None) -> Floats:
    """Packed rows to float32: uint8 [..., bytes per row] -> float32 [..., weights per row]. Notebook 01, section 5.

    `out` may have any memory layout; without it F32 comes back as a view of `raw`, all else as a new array.
    Bit-equal to `gguf.quants.dequantize`.
    Raises TensorTypeError for a type that no decoder knows.
    """
    if out is None and type_ == GGMLQuantizationType.F32:
        return (raw if raw.strides[-1] == 1 else np.ascontiguousarray(raw)).view("<f4")
    block, block_bytes = GGML_QUANT_SIZES[type_]
    row_length = raw.shape[-1] // block_bytes * block
    shape = (*raw.shape[:-1], row_length)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape:
        raise ValueError(f"out: found shape {out.shape}; allowed: {shape}")
    elif out.ndim > 2 and not out.flags.c_contiguous:  # a reshape would copy it
        for part, part_out in zip(raw, out, strict=True):
            dequantize(part, type_, part_out)
        return out
    decode = DECODERS.get(type_) or decode_by_gguf(type_)
    rows, out_rows = raw.reshape(-1, raw.shape[-1]), out.reshape(-1, row_length)
    step = max(1, CHUNK_WEIGHTS // row_length)
    for start in range(0, len(rows), step):
        target = out_rows[start : start + step]
        chunk = target if target.flags.c_contiguous else np.empty(target.shape, np.float32)
        blocks = np.ascontiguousarray(rows[start : start + step]).reshape(-1, block_bytes)
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be inf or NaN: that is the file's affair
            decode(blocks, chunk.reshape(-1, block))
        if chunk is not target:
            target[...] = chunk
    return out
