"""Solutions to the exercises of notebook 01."""

import struct

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


def decode_q8_0_block(block: bytes) -> list[float]:
    """34 bytes -> 32 floats."""
    d, *q = struct.unpack("<e32b", block)
    return [d * value for value in q]


def packed_bytes(weights: dict[str, int]) -> int:
    """{"Q4_1": 1024, "F32": 64} -> bytes."""
    sizes = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in weights}
    return sum(count // sizes[name][0] * sizes[name][1] for name, count in weights.items())


def quantize_q4_0_block(weights: np.ndarray) -> bytes:
    """float32 [32] -> 18 bytes. The largest weight takes code 0, which means -8: d = largest / -8."""
    largest = weights[np.abs(weights).argmax()]
    d = np.float16(largest / -8)
    scaled = weights / np.float32(d) if d else np.zeros_like(weights)
    codes = np.clip(np.round(scaled) + 8, 0, 15).astype(np.uint8)
    return d.tobytes() + (codes[:16] | codes[16:] << 4).tobytes()
