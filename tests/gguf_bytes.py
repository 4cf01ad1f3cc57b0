"""GGUF files byte by byte, right or wrong on purpose: what the official writer refuses to write."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.constants import GGUFValueType as Value

ALIGNMENT = 32
LAYOUTS = {
    Value.UINT8: "B",
    Value.INT8: "b",
    Value.UINT16: "H",
    Value.INT16: "h",
    Value.UINT32: "I",
    Value.INT32: "i",
    Value.FLOAT32: "f",
    Value.BOOL: "B",
    Value.UINT64: "Q",
    Value.INT64: "q",
    Value.FLOAT64: "d",
}


@dataclass
class Bytes:
    """A growing file that remembers where its integers lie: (offset, size) each."""

    data: bytearray = field(default_factory=bytearray)
    integers: list[tuple[int, int]] = field(default_factory=list)

    def __iadd__(self, other: Bytes | bytes) -> Bytes:
        if isinstance(other, Bytes):
            self.integers += [(len(self.data) + offset, size) for offset, size in other.integers]
        self.data += other.data if isinstance(other, Bytes) else other
        return self


def join(*parts: Bytes | bytes) -> Bytes:
    """Parts one after the other."""
    whole = Bytes()
    for part in parts:
        whole += part
    return whole


def number(layout: str, value: float) -> Bytes:
    """One little-endian number, such as number("Q", 3)."""
    data = bytearray(struct.pack(f"<{layout}", value))
    return Bytes(data, [] if layout in "fd" else [(0, len(data))])


def string(text: str | bytes, length: int | None = None) -> Bytes:
    """Length and bytes; `length` may lie."""
    data = text.encode() if isinstance(text, str) else text
    return join(number("Q", len(data) if length is None else length), data)


def payload(kind: Value, value: Any) -> Bytes:
    """A value without its tag; an array is (element kind, elements)."""
    if kind == Value.STRING:
        return string(value)
    if kind == Value.ARRAY:
        element, values = value
        return join(number("I", element), number("Q", len(values)), *(payload(element, v) for v in values))
    return number(LAYOUTS[kind], value)


def key(name: str | bytes, kind: int, value: Any) -> Bytes:
    """One metadata entry; `value` is Bytes or bytes where the payload is wrong on purpose."""
    body = value if isinstance(value, (Bytes, bytes)) and kind != Value.STRING else payload(Value(kind), value)
    return join(string(name), number("I", kind), body)


def tensor(
    name: str | bytes, dims: Sequence[int], type_: int = Type.F32, offset: int = 0, n_dims: int | None = None
) -> Bytes:
    """One entry of the tensor table, dims in the file's order."""
    return join(
        string(name),
        number("I", len(dims) if n_dims is None else n_dims),
        *(number("Q", dim) for dim in dims),
        number("I", type_),
        number("Q", offset),
    )


def file(
    keys: Sequence[Bytes] = (),
    tensors: Sequence[Bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = ALIGNMENT,
) -> Bytes:
    """A whole file; the counts may lie."""
    head = join(
        b"GGUF",
        number("I", version),
        number("Q", len(tensors) if n_tensors is None else n_tensors),
        number("Q", len(keys) if n_keys is None else n_keys),
        *keys,
        *tensors,
    )
    return join(head, bytes(-len(head.data) % alignment), data)


EVERY_VALUE: dict[str, tuple[Value, Any]] = {
    "a.uint8": (Value.UINT8, 255),
    "a.int8": (Value.INT8, -128),
    "a.uint16": (Value.UINT16, 65_535),
    "a.int16": (Value.INT16, -32_768),
    "a.uint32": (Value.UINT32, 2**32 - 1),
    "a.int32": (Value.INT32, -(2**31)),
    "a.float32": (Value.FLOAT32, 1.5),
    "a.bool": (Value.BOOL, True),
    "a.string": (Value.STRING, "zwölf \0 中文 👩‍🚀"),
    "a.empty": (Value.STRING, ""),
    "a.uint64": (Value.UINT64, 2**64 - 1),
    "a.int64": (Value.INT64, -(2**63)),
    "a.float64": (Value.FLOAT64, 0.1),
    "a.strings": (Value.ARRAY, (Value.STRING, ["one", "", "drei"])),
    "a.bools": (Value.ARRAY, (Value.BOOL, [True, False, True])),
    "a.bytes": (Value.ARRAY, (Value.UINT8, [0, 255])),
    "a.shorts": (Value.ARRAY, (Value.INT16, [-1, 1])),
    "a.longs": (Value.ARRAY, (Value.UINT64, [0, 2**64 - 1])),
    "a.doubles": (Value.ARRAY, (Value.FLOAT64, [0.1, -0.0])),
    "a.nested": (Value.ARRAY, (Value.ARRAY, [(Value.INT32, [1, 2]), (Value.INT32, [3])])),
    "a.sentinel": (Value.UINT32, 0x5EED),
}


def every_key() -> list[Bytes]:
    """One key of every value type, and arrays of numbers, bools, strings and arrays; the sentinel comes last."""
    return [key(name, kind, value) for name, (kind, value) in EVERY_VALUE.items()]


def every_type(rows: int = 2) -> tuple[list[Bytes], bytes]:
    """One tensor of each type that the gguf package knows, `rows` rows of two blocks: table and zeroed data."""
    table, data = [], b""
    for type_ in Type:
        block, block_bytes = GGML_QUANT_SIZES[type_]
        table.append(tensor(f"t.{type_.name}", [2 * block, rows], type_, len(data)))
        data += bytes(-(-2 * rows * block_bytes // ALIGNMENT) * ALIGNMENT)
    return table, data
