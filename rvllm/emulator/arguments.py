"""C parameter types, and the conversion of Python arguments to them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rvllm.emulator.errors import KernelArgumentError

# C types that correspond to one NumPy type. bfloat16 has none: arrays hold its 16 bits.
DTYPES = {
    "bool": "?",
    "char": "i1",
    "signed char": "i1",
    "unsigned char": "u1",
    "short": "i2",
    "unsigned short": "u2",
    "int": "i4",
    "unsigned int": "u4",
    "long": "i8",
    "unsigned long": "u8",
    "long long": "i8",
    "unsigned long long": "u8",
    "float": "f4",
    "double": "f8",
    "__half": "f2",
    "__nv_bfloat16": "u2",
}
# g++ writes "short unsigned int" where clang++ and people write "unsigned short".
GXX_NAMES = {
    "short int": "short",
    "short unsigned int": "unsigned short",
    "long int": "long",
    "long unsigned int": "unsigned long",
    "long long int": "long long",
    "long long unsigned int": "unsigned long long",
}


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its C type as text, and in bytes its size and (pointers) that of its target."""

    c_type: str
    size: int
    pointee_size: int

    @property
    def is_pointer(self) -> bool:
        return self.c_type.endswith("*")

    @property
    def base(self) -> str:
        """The type without pointer and qualifiers: `const float*` -> `float`."""
        return " ".join(word for word in self.c_type.rstrip("*").split() if word not in ("const", "volatile"))


@dataclass(frozen=True)
class ArrayArgument:
    """The memory that an argument gives a kernel access to."""

    index: int
    address: int
    nbytes: int
    writable: bool


def parse_types(pretty_function: str) -> list[str]:
    """The parameter types from a compiler's name of an instance of `parameter_types` in cuda_shim.h.

    >>> parse_types("const char* emu::parameter_types(void (*)(P ...)) [with P = {const float*, int}]")
    ['const float*', 'int']
    """
    match = re.search(r"P = [{<](.*)[}>]\]$", pretty_function)
    if not match:
        raise ValueError(f"unexpected signature {pretty_function!r}")
    return [_normalise(part) for part in _split_at_commas(match[1])]


def _split_at_commas(text: str) -> list[str]:
    """Splits at commas outside <>: a template type holds commas of its own."""
    parts = re.findall(r"(?:[^,<>]|<(?:[^<>]|<[^<>]*>)*>)+", text)
    return [part.strip() for part in parts if part.strip()]


def _normalise(c_type: str) -> str:
    compact = c_type.replace(" *", "*").replace(" &", "&")
    for gxx, usual in sorted(GXX_NAMES.items(), key=lambda item: -len(item[0])):
        compact = re.sub(rf"(?<!\w){gxx}(?!\w)", usual, compact)
    return compact


def convert_array(kernel: str, index: int, parameter: Parameter, value: Any) -> ArrayArgument | None:
    """Checks an argument for a pointer parameter; None is the null pointer.

    A parameter of a plain type takes a C-contiguous array of just that dtype. `void*`, structs and vector
    types take any dtype whose array is a whole number of the type's bytes.

    Raises:
        KernelArgumentError: not an array, another dtype, not contiguous, or a part of a struct.
    """
    if value is None:
        return None
    if not isinstance(value, np.ndarray):
        raise KernelArgumentError(kernel, index, parameter.c_type, describe(value))
    dtype = DTYPES.get(parameter.base)
    fits = dtype is None or value.dtype == np.dtype(dtype) or value.dtype.name == _alias(parameter.base)
    whole = dtype is not None or not parameter.pointee_size or value.nbytes % parameter.pointee_size == 0
    if not (fits and whole and value.flags.c_contiguous):
        raise KernelArgumentError(kernel, index, parameter.c_type, describe(value))
    return ArrayArgument(index, value.ctypes.data, value.nbytes, bool(value.flags.writeable))


def _alias(base: str) -> str:
    """The name of a dtype that packages outside NumPy define for a C type."""
    return "bfloat16" if base == "__nv_bfloat16" else ""


def convert_scalar(kernel: str, index: int, parameter: Parameter, value: Any) -> bytes:
    """The bytes of a value parameter.

    Python and NumPy numbers become the declared type: any real number for a floating type, a whole number in
        range
    for an integer type. A struct takes its bytes (bytes, or a NumPy structured scalar).

    Raises:
        KernelArgumentError: anything else.
    """
    data = _number(parameter.base, value) if parameter.base in DTYPES else _struct(value)
    if data is None or len(data) != parameter.size:
        raise KernelArgumentError(kernel, index, parameter.c_type, describe(value))
    return data


def _number(base: str, value: Any) -> bytes | None:
    dtype = np.dtype(DTYPES[base])
    is_whole = isinstance(value, (int, np.integer, np.bool_))
    if base == "__nv_bfloat16":
        return _bfloat16(float(value)) if is_whole or isinstance(value, (float, np.floating)) else None
    if dtype.kind == "f":
        if not is_whole and not isinstance(value, (float, np.floating)):
            return None
        with np.errstate(over="ignore"):  # beyond the largest float: infinity, as in C
            return np.array(value, dtype).tobytes()
    if not is_whole:
        return None
    whole = int(value)
    info = np.iinfo(dtype) if dtype.kind != "b" else None
    in_range = info.min <= whole <= info.max if info else whole in (0, 1)
    return np.array(whole, dtype).tobytes() if in_range else None


def _bfloat16(value: float) -> bytes:
    """Rounded to nearest even by integer arithmetic on the bits of the float32."""
    bits = int(np.array(value, "f4").view("u4"))
    rounded = 0x7FFF if value != value else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.array(rounded, "u2").tobytes()


def _struct(value: Any) -> bytes | None:
    if isinstance(value, np.void):
        return value.tobytes()
    return bytes(value) if isinstance(value, (bytes, bytearray)) else None


def describe(value: Any) -> str:
    """What was passed, for a message."""
    if not isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value!r}"[:80]
    layout = "" if value.flags.c_contiguous else ", not C-contiguous"
    return f"array of {value.dtype} and shape {value.shape}{layout}"
