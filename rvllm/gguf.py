"""Read GGUF model files: metadata, the tensor table, and the packed bytes of each tensor, every field
checked.

Generated from notebooks/01_gguf.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from rvllm.errors import RvllmError


def shorten(text: str, limit: int = 200) -> str:
    """Text out of a file, fit for a message: no control characters, and no megabytes of it."""
    text = text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class GGUFError(RvllmError):
    """A file that can't be read as GGUF: which file, which field, what was found, what is allowed.

    Notebook 01, section 2.
    """

    def __init__(self, path: Path, field: str, found: str, allowed: str) -> None:
        field, found = shorten(field), shorten(found)
        self.path, self.field, self.found, self.allowed = path, field, found, allowed
        super().__init__(f"{path}: {field}: found {found}; allowed: {allowed}")


class NotGGUFError(GGUFError):
    """The first four bytes are not `GGUF`."""


class VersionError(GGUFError):
    """A GGUF version, or a byte order, that this reader does not know."""


class TruncatedError(GGUFError):
    """The file ends before what its header promises: nearly always an unfinished download."""


class MetadataError(GGUFError):
    """A metadata key or value that breaks the format."""


class TensorInfoError(GGUFError):
    """An entry of the tensor table that breaks the format."""


MAX_STRING = 1 << 30  # bytes; ggml's own cap
MAX_KEY = 65_535
MAX_ARRAY_DEPTH = 4

_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<B"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_MIN_BYTES = {GGUFValueType.STRING: 8, GGUFValueType.ARRAY: 12}  # what one value takes at the very least


class Cursor:
    """A position in the mapped file.

    Every read is compared with the bytes left before anything is allocated.
    """

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data, self.path, self.size, self.position = data, path, len(data), 0

    def need(self, n_bytes: int, field: str) -> int:
        """Step over `n_bytes` and return where they start; TruncatedError if the file is shorter."""
        start, left = self.position, self.size - self.position
        if n_bytes > left:
            raise TruncatedError(self.path, field, f"{left:,} bytes left in the file", f"{n_bytes:,} bytes or more")
        self.position = start + n_bytes
        return start

    def scalar(self, type_: GGUFValueType, field: str) -> Any:
        """One number or bool."""
        layout = _SCALARS[type_]
        (value,) = layout.unpack_from(self.data, self.need(layout.size, field))
        return self.boolean(value, field) if type_ == GGUFValueType.BOOL else value

    def boolean(self, byte: int, field: str) -> bool:
        """A bool is a byte that is 0 or 1; anything else means we are reading the wrong place."""
        if byte > 1:
            raise MetadataError(self.path, field, f"bool byte {byte}", "0 or 1")
        return bool(byte)

    def u32(self, field: str) -> int:
        """Four bytes, unsigned."""
        return int(self.scalar(GGUFValueType.UINT32, field))

    def u64(self, field: str) -> int:
        """Eight bytes, unsigned."""
        return int(self.scalar(GGUFValueType.UINT64, field))

    def string(self, field: str, limit: int = MAX_STRING, error: type[GGUFError] = MetadataError) -> str:
        """A length (u64) and that many bytes of UTF-8."""
        length = self.u64(f"{field} (length)")
        if length > limit:
            raise error(self.path, field, f"a string of {length:,} bytes", f"at most {limit:,}")
        start = self.need(length, field)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError as problem:
            raise error(self.path, field, f"bytes that are not UTF-8 ({problem.reason})", "UTF-8 text") from None

    def value_type(self, field: str) -> GGUFValueType:
        """The tag in front of every value."""
        tag = self.u32(f"{field} (type)")
        try:
            return GGUFValueType(tag)
        except ValueError:
            raise MetadataError(self.path, field, f"value type {tag}", "types 0 to 12") from None

    def value(self, type_: GGUFValueType, field: str, depth: int = 0) -> Any:
        """One value of any type: Python numbers, bools and strings; arrays as below."""
        if type_ == GGUFValueType.STRING:
            return self.string(field)
        if type_ == GGUFValueType.ARRAY:
            return self.array(field, depth + 1)
        return self.scalar(type_, field)

    def array(self, field: str, depth: int) -> Any:
        """Element type, count, elements.

        Numbers and bools become a NumPy array, strings and arrays a list.
        """
        if depth > MAX_ARRAY_DEPTH:
            raise MetadataError(self.path, field, f"arrays nested {depth} deep", f"at most {MAX_ARRAY_DEPTH}")
        type_, count = self.value_type(field), self.u64(f"{field} (count)")
        layout = _SCALARS.get(type_)
        n_bytes = count * (layout.size if layout else _MIN_BYTES[type_])
        start = self.need(n_bytes, f"{field} ({count:,} elements)")
        if layout is None:  # the smallest conceivable list would fit: go back and read the real one
            self.position = start
            return [self.value(type_, field, depth) for _ in range(count)]
        values = np.frombuffer(self.data, f"<{layout.format[1:]}", count, start).copy()
        if type_ != GGUFValueType.BOOL:
            return values
        self.boolean(int(values.max(initial=0)), field)
        return values.astype(np.bool_)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies in the file. Notebook 01, section 4.

    `shape` is in NumPy's order (slowest dimension first; the file stores it the other way round), `offset` counts
    bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        """The block format by its usual name, such as `Q4_1`."""
        return self.type.name


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ALIGNMENT = 1 << 20
MAX_NAME = 64
MIN_KEY_BYTES = 8 + 1 + 4 + 1  # key length, one character, value type, one byte
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, one character, n_dims, one dim, type, offset

_LOOKS_LIKE = {
    b"<!doctype": "an HTML page: a login or error page was saved instead of the model; download it again",
    b"<html": "an HTML page: a login or error page was saved instead of the model; download it again",
    b"version https://git-lfs": "a Git LFS pointer: fetch the real file with `git lfs pull`, or with huggingface_hub",
    b"pk\x03\x04": "a zip archive (a PyTorch checkpoint?): convert it with llama.cpp's convert_hf_to_gguf.py",
    b"ggjt": "a GGML file from before GGUF: convert it with an old llama.cpp, or download a GGUF",
}


def round_up(position: int, alignment: int) -> int:
    """The next multiple of `alignment`, or `position` itself if it is one."""
    return (position + alignment - 1) // alignment * alignment


class GGUFFile:
    """A GGUF model file behind a memory map. Notebook 01, sections 2 to 4.

    Opening reads the metadata and the tensor table and checks both; weights stay on disk until `raw` touches them.

    path, size, version, alignment: the file and its header.
    metadata: key -> Python value, NumPy array (numbers, bools) or list (strings).
    tensors: name -> TensorInfo, in the file's order.
    Raises FileNotFoundError, IsADirectoryError, or a GGUFError that names file, field, value found, values allowed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = self._open()
        self.size = len(self._map)
        cursor = Cursor(self._map, self.path)
        self.version = self._read_version(cursor)
        n_tensors, n_keys = self._read_counts(cursor)
        self.metadata: dict[str, Any] = {}
        self.alignment = 32
        for _ in range(n_keys):
            self._read_key(cursor)
        infos = [self._read_tensor(cursor) for _ in range(n_tensors)]
        self.tensors = self._place(infos, data_start=round_up(cursor.position, self.alignment))

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The packed bytes of a tensor: uint8 [..., bytes per row], a read-only view of the map (no copy)."""
        if name not in self.tensors:
            raise TensorInfoError(self.path, name, "no such tensor", f"one of the file's {len(self.tensors)} tensors")
        info = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        return data.reshape(*info.shape[:-1], -1)

    def _open(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            head = file.read(4)
            if head != MAGIC:
                raise self._not_gguf(head + file.read(60))
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _not_gguf(self, start: bytes) -> GGUFError:
        if MAGIC.startswith(start):
            return TruncatedError(self.path, "magic", f"a file of {len(start)} bytes", "a whole GGUF file")
        text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
        hint = next((hint for prefix, hint in _LOOKS_LIKE.items() if text.startswith(prefix)), "not a GGUF file")
        if start[8:9] == b"{":  # after the length of its header
            hint = "a safetensors file: convert it with llama.cpp's convert_hf_to_gguf.py"
        return NotGGUFError(self.path, "magic", f"{start[:4]!r}, {hint}", "a file that starts with b'GGUF'")

    def _read_version(self, cursor: Cursor) -> int:
        cursor.need(4, "magic")
        version = cursor.u32("version")
        if version and version & 0xFFFF == 0:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            found = f"version {swapped} in big-endian byte order"
            raise VersionError(self.path, "endianness", found, "little-endian; convert with gguf-convert-endian")
        if version not in VERSIONS:
            raise VersionError(self.path, "version", f"version {version}, not supported", "2 and 3 are")
        return version

    def _read_counts(self, cursor: Cursor) -> tuple[int, int]:
        n_tensors, n_keys = cursor.u64("tensor_count"), cursor.u64("metadata_kv_count")
        for field, count, each in (
            ("tensor_count", n_tensors, MIN_TENSOR_BYTES),
            ("metadata_kv_count", n_keys, MIN_KEY_BYTES),
        ):
            left = cursor.size - cursor.position
            if count * each > left:
                found = f"{count:,} entries of at least {each} bytes"
                raise TruncatedError(self.path, field, found, f"what fits in the {left:,} bytes left")
        return n_tensors, n_keys

    def _read_key(self, cursor: Cursor) -> None:
        key = cursor.string("metadata key", MAX_KEY)
        if not key or key in self.metadata:
            found = f"the key {key!r} twice" if key else "an empty key"
            raise MetadataError(self.path, "metadata key", found, "keys that are unique and not empty")
        type_ = cursor.value_type(key)
        self.metadata[key] = cursor.value(type_, key)
        if key == "general.alignment":
            self.alignment = self._check_alignment(type_, self.metadata[key])

    def _check_alignment(self, type_: GGUFValueType, value: Any) -> int:
        is_u32 = type_ == GGUFValueType.UINT32
        if not is_u32 or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            allowed = f"a uint32 power of two from 8 to {MAX_ALIGNMENT:,}"
            raise MetadataError(self.path, "general.alignment", f"{value!r} ({type_.name})", allowed)
        return int(value)

    def _read_tensor(self, cursor: Cursor) -> TensorInfo:
        name = cursor.string("tensor name", MAX_NAME, TensorInfoError)
        n_dims = cursor.u32(f"{name} (n_dims)")
        if not name or not 1 <= n_dims <= 4:
            raise TensorInfoError(
                self.path, name or "tensor name", f"{n_dims} dimensions", "a name and 1 to 4 dimensions"
            )
        dims = [cursor.u64(f"{name} (dims)") for _ in range(n_dims)]
        type_ = self._tensor_type(name, cursor.u32(f"{name} (type)"))
        offset = cursor.u64(f"{name} (offset)")
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if 0 in dims or dims[0] % block:
            allowed = f"dimensions above 0 and rows in multiples of {block} for {type_.name}"
            raise TensorInfoError(self.path, name, f"dims {dims}", allowed)
        nbytes = prod(dims) // block * block_bytes  # Python ints: can't wrap
        return TensorInfo(name, tuple(reversed(dims)), type_, offset, nbytes)

    def _tensor_type(self, name: str, type_id: int) -> GGMLQuantizationType:
        try:
            return GGMLQuantizationType(type_id)
        except ValueError:
            known = ", ".join(f"{t.value} {t.name}" for t in GGMLQuantizationType)
            raise TensorInfoError(self.path, name, f"tensor type {type_id}", known) from None

    def _place(self, infos: list[TensorInfo], data_start: int) -> dict[str, TensorInfo]:
        """Turn offsets into file positions; check alignment, names, the end of the file, and that none overlap."""
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in tensors or info.offset % self.alignment:
                allowed = f"one entry a name, at a multiple of {self.alignment}"
                raise TensorInfoError(self.path, info.name, f"offset {info.offset:,} (or the name twice)", allowed)
            start = data_start + info.offset
            if start + info.nbytes > self.size:
                found = f"bytes {start:,} to {start + info.nbytes:,} of a file of {self.size:,}"
                raise TruncatedError(self.path, info.name, found, "tensors that end inside the file")
            tensors[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.nbytes)
        by_offset = sorted(tensors.values(), key=lambda t: t.offset)
        for first, second in pairwise(by_offset):
            if first.offset + first.nbytes > second.offset:
                raise TensorInfoError(
                    self.path, second.name, f"bytes shared with {first.name}", "tensors that do not overlap"
                )
        return tensors
