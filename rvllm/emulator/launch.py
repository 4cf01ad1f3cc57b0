"""Preparing a launch: converted arguments, checked sizes, and the struct that the runtime reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from rvllm.emulator.arguments import ArrayArgument, Parameter, convert_array, convert_scalar
from rvllm.emulator.chain import GRAIN, MARK, Chain
from rvllm.emulator.errors import KernelArgumentError, LaunchConfigError

Dimensions = int | Sequence[int]

# The limits of compute capability 7.5 to 9.0.
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_DYNAMIC_SHARED_BYTES = 227 * 1024


class LaunchRequest(ctypes.Structure):
    """`struct LaunchRequest` of cuda/launch.cpp."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_bytes", ctypes.c_size_t),
        ("cpu_seconds", ctypes.c_double),
        ("cooperative", ctypes.c_int),
        ("reverse", ctypes.c_int),
        ("races", ctypes.c_int),
        ("counting", ctypes.c_int),
        ("array_count", ctypes.c_int),
        ("array_begins", ctypes.POINTER(ctypes.c_void_p)),
        ("array_sizes", ctypes.POINTER(ctypes.c_size_t)),
        ("array_arguments", ctypes.POINTER(ctypes.c_int)),
        ("array_writable", ctypes.POINTER(ctypes.c_int)),
        ("array_marks", ctypes.POINTER(ctypes.c_void_p)),
        ("number", ctypes.c_uint),
        ("settled", ctypes.c_uint),
        ("dependent", ctypes.c_int),
        ("early", ctypes.c_int),
        ("waits", ctypes.c_int),
    ]


class PreparedArguments:
    """Arguments in the form that the runtime takes; holds the memory that `values` points to.

    Attributes:
        values: a C array with, for each parameter, a pointer to its value.
        arrays: the arrays among the arguments.

    Raises:
        KernelArgumentError: `args` does not fit `parameters`.
    """

    def __init__(self, kernel: str, parameters: list[Parameter], args: Sequence[Any]) -> None:
        if len(args) != len(parameters):
            expected = ", ".join(parameter.c_type for parameter in parameters)
            raise KernelArgumentError(kernel, None, expected, f"{len(args)} arguments")
        self.arrays: list[ArrayArgument] = []
        cells = [self._convert(kernel, i, p, args[i]) for i, p in enumerate(parameters)]
        self._buffers = [ctypes.create_string_buffer(cell, len(cell)) for cell in cells]
        pointers = [ctypes.addressof(buffer) for buffer in self._buffers]
        self.values = (ctypes.c_void_p * len(pointers))(*pointers)

    def _convert(self, kernel: str, index: int, parameter: Parameter, value: Any) -> bytes:
        if not parameter.is_pointer:
            return convert_scalar(kernel, index, parameter, value)
        array = convert_array(kernel, index, parameter, value)
        if array is None:
            return bytes(parameter.size)
        self.arrays.append(array)
        return array.address.to_bytes(parameter.size, "little")


def make_request(arguments: PreparedArguments, grid: Dimensions, block: Dimensions, shared: int) -> LaunchRequest:
    """A request with sizes and arguments filled in; `arguments` must live as long as the request.

    Raises:
        LaunchConfigError: sizes that no GPU accepts.
    """
    request = LaunchRequest()
    request.grid = (ctypes.c_uint * 3)(*_three("grid", grid, MAX_GRID))
    request.block = (ctypes.c_uint * 3)(*_three("block", block, MAX_BLOCK))
    threads = request.block[0] * request.block[1] * request.block[2]
    if threads > MAX_THREADS:
        raise LaunchConfigError(f"a block holds at most {MAX_THREADS} threads, not {threads}")
    if not 0 <= shared <= MAX_DYNAMIC_SHARED_BYTES:
        limit = MAX_DYNAMIC_SHARED_BYTES
        raise LaunchConfigError(f"a block has 0 to {limit} bytes of dynamic shared memory, not {shared}")
    request.dynamic_bytes = shared
    request.values = ctypes.addressof(arguments.values)
    _describe_arrays(request, arguments.arrays)
    return request


def _three(what: str, sizes: Dimensions, limits: tuple[int, int, int]) -> tuple[int, ...]:
    """x, or up to (x, y, z), as three numbers within the limits."""
    given = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    three = tuple(int(size) for size in given) + (1,) * (3 - len(given))
    if len(three) != 3 or not all(1 <= size <= limit for size, limit in zip(three, limits, strict=True)):
        raise LaunchConfigError(f"{what} is {sizes!r}, but (x, y, z) must be 1 to {limits}")
    return three


def _describe_arrays(request: LaunchRequest, arrays: list[ArrayArgument]) -> None:
    """Tells the runtime what memory the arrays are. (A ctypes pointer field keeps its array alive.)"""
    count = len(arrays)
    request.array_count = count
    request.array_begins = (ctypes.c_void_p * count)(*(array.address for array in arrays))
    request.array_sizes = (ctypes.c_size_t * count)(*(array.nbytes for array in arrays))
    request.array_arguments = (ctypes.c_int * count)(*(array.index for array in arrays))
    request.array_writable = (ctypes.c_int * count)(*(array.writable for array in arrays))


def join_chain(request: LaunchRequest, kernel: str, args: Sequence[Any], chain: Chain, dependent: bool) -> None:
    """Makes a request the next launch of a chain, which must live as long as the request."""
    chain.begin(kernel, dependent)
    request.number, request.settled, request.dependent = chain.number, chain.settled, dependent
    found = [chain.marks_of(value) for value in args if isinstance(value, np.ndarray)]
    places = (marks.ctypes.data + offset // GRAIN * MARK.itemsize for marks, offset in found)
    request.array_marks = (ctypes.c_void_p * len(found))(*places)
