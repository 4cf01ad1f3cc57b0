"""Programs recorded as CUDA graphs, with kernels that start behind one another early.

Generated from notebooks/19_cuda_graphs.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np

from rvllm.errors import RvllmError
from rvllm.program import Program
from rvllm.runtime import CudaKernel, EmulatorKernel, Prepared, Runtime

PREFERRED_CARVEOUT, SHARED_PERCENT = 9, 25  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, of all of it
STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class DriverError(RvllmError):
    """CUDA's driver refused a call."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: which property, and its value in a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: what cuLaunchKernelEx must know besides kernel and arguments."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


def as_c(argument: Any) -> Any:
    """An argument of a prepared launch as a C value: a pointer, or a number of its own type."""
    if isinstance(argument, np.generic):
        as_type: Any = np.ctypeslib.as_ctypes_type
        return as_type(argument.dtype)(argument.item())
    return ctypes.c_void_p(argument.data.ptr)


def three(size: Any) -> tuple[int, int, int]:
    """A grid or block size with all three numbers."""
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def settle_shared_memory(prepared: Prepared) -> None:
    """Ask for the same split of an SM's memory into cache and shared memory for every kernel of a graph.

    Otherwise each kernel gets the split that suits it, and an SM must run empty before the split can change: the next
    kernel could not start early. A kernel that needs more shared memory gets it all the same.
    """
    kernel = prepared.kernel
    assert isinstance(kernel, CudaKernel)
    kernel.set_attribute(PREFERRED_CARVEOUT, SHARED_PERCENT)


def launch_dependent(prepared: Prepared, stream: Any) -> None:
    """Start a kernel so that it may begin before the one before it has ended: see dependent.cuh.

    CuPy's launch can't ask for that; the driver's can, and it may be captured like any other.
    """
    kernel = prepared.kernel
    assert isinstance(kernel, CudaKernel)
    values = [as_c(argument) for argument in prepared.args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    attribute = LaunchAttribute(id=STREAM_SERIALIZATION, value=1)
    config = LaunchConfig(three(prepared.grid), three(prepared.block), prepared.shared, stream.ptr)
    config.attributes, config.num_attributes = ctypes.pointer(attribute), 1
    function = ctypes.c_void_p(kernel.function.ptr)
    status = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
    if status:
        raise DriverError(f"cuLaunchKernelEx({prepared.name}): found error {status}; allowed: 0")


def launch_checked(prepared: Prepared, rt: Runtime, early: bool) -> None:
    """Run a kernel on the emulator as the next one of the runtime's chain: EmulatorError where it starts too early."""
    kernel, p = prepared.kernel, prepared
    assert isinstance(kernel, EmulatorKernel)
    kernel(p.grid, p.block, p.args, p.shared, p.cooperative, chain=rt.chain, dependent=early)


class GraphProgram:
    """A program that becomes a CUDA graph: its launches are recorded once and start as one. Notebook 19, section 4.

    The first run starts every launch by itself, which also lets libraries load what they load when first used. The
    second records them. On the emulator, which has no graphs, all runs are like the first; in check mode it reports
    what would go wrong if kernels started early.
    dependent: start kernels early, behind one another (sm_90, or that check; elsewhere it is left out).
    """

    def __init__(self, rt: Runtime, program: Program, dependent: bool) -> None:
        self.rt, self.program, self.max_rows = rt, program, program.max_rows
        self.dependent, self._runs = dependent, 0
        self._graph: Any = None

    def run(self) -> None:
        """Start the whole step on the current stream."""
        self._runs += 1
        if self.dependent and self.rt.chain is not None:
            self._check()
            return
        if self._runs == 1 or not self.rt.is_cuda:
            self.program.run()
            return
        stream = import_module("cupy").cuda.get_current_stream()
        if self._graph is None:
            self._graph = self._record(stream)
        self._graph.launch(stream)

    def run_head(self) -> None:
        """Start the last part again, launch by launch."""
        self.program.run_head()

    def _record(self, stream: Any) -> Any:
        stream.begin_capture()
        try:
            for launch, early in self._launches():
                if isinstance(launch, Prepared):
                    settle_shared_memory(launch)
                if early and isinstance(launch, Prepared):
                    launch_dependent(launch, stream)
                else:
                    launch()
        finally:
            graph = stream.end_capture()
        return graph

    def _check(self) -> None:
        """On the emulator: tell it which launches start early."""
        for launch, early in self._launches():
            if isinstance(launch, Prepared):
                launch_checked(launch, self.rt, early)
            else:
                launch()

    def _launches(self) -> Iterator[tuple[Prepared | Callable[[], None], bool]]:
        """Every launch, and whether it starts early.

        Behind a library's kernel there is nothing to gain: it does not let the next one start early.
        """
        before: Prepared | Callable[[], None] | None = None
        for launch in self.program.launches:
            both = isinstance(launch, Prepared) and isinstance(before, Prepared)
            yield launch, self.dependent and both
            before = launch
