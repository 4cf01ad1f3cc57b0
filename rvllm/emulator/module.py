"""`Module`: kernels compiled from one source text, and their launches."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rvllm.emulator.arguments import Parameter, parse_types
from rvllm.emulator.build import choose_target, load_module
from rvllm.emulator.chain import Chain
from rvllm.emulator.counters import Counters, read_counters
from rvllm.emulator.errors import LaunchConfigError
from rvllm.emulator.launch import Dimensions, PreparedArguments, join_chain, make_request
from rvllm.emulator.report import Report, check_waits, make_error
from rvllm.emulator.source import kernel_names, parameter_names

MAX_STACKS = 16_000  # of all modules: each takes two of the 65,530 mappings that Linux allows a process


class Module:
    """Kernels of one CUDA C source text, compiled for the CPU.

    Args:
        source: the text of a `.cu` file with `extern "C" __global__` kernels.
        name: its name, which reports and compile errors show.
        mode: "check" watches every memory access; "fast" finds only what stops it, at 2 to 50 times the
            speed.
        headers: texts that `#include "name"` may name.
        arch: what `__CUDA_ARCH__` is, 800 for compute capability 8.0.
        portable: use the fiber switch and the half conversion of CPUs other than x86-64, to test them.

    Attributes:
        name, mode: as given.
        kernels: the kernels' names, in the order of the text.
        counters: of the last launch with `count=True`; None before it and after a launch without.
        path: the shared object.
        static_shared: bytes of `__shared__` variables, those of dynamic size left out; a few more where the C++
            compiler keeps thread-local variables of its own.

    Raises:
        CompileError, CompilerMissingError.
    """

    _stacks: ClassVar[dict[Module, int]] = {}  # how many each keeps for its next launch; the last one used last

    def __init__(
        self,
        source: str,
        name: str,
        mode: str = "check",
        headers: Mapping[str, str] | None = None,
        *,
        arch: int = 800,
        portable: bool = False,
    ) -> None:
        self.name, self.mode = name, mode
        self.kernels = kernel_names(source)
        self.counters: Counters | None = None
        self._library = load_module(source, name, headers or {}, choose_target(mode, arch, portable))
        self.path = Path(self._library._name)
        self._library.emu_report.restype = ctypes.c_void_p
        self._library.emu_counters.restype = ctypes.c_void_p
        self._library.emu_static_shared.restype = ctypes.c_size_t
        self.static_shared: int = self._library.emu_static_shared()
        self._names = {kernel: parameter_names(source, kernel) for kernel in self.kernels}
        self._parameters = {kernel: self._read_parameters(kernel) for kernel in self.kernels}

    @classmethod
    def from_file(cls, path: str | Path, mode: str = "check", **options: Any) -> Module:
        """A module from a `.cu` file, with the `.cuh` files beside it as headers. `options`: see `Module`."""
        file = Path(path)
        headers = {header.name: header.read_text() for header in sorted(file.parent.glob("*.cuh"))}
        return cls(file.read_text(), file.name, mode, headers, **options)

    def signature(self, kernel: str) -> list[str]:
        """The C types of a kernel's parameters, such as `["const float*", "int"]`."""
        return [parameter.c_type for parameter in self._find(kernel)]

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared: int = 0,
        cooperative: bool = False,
        reverse: bool = False,
        timeout: float = 60.0,
        races: bool = True,
        count: bool = False,
        chain: Chain | None = None,
        dependent: bool = False,
    ) -> None:
        """Runs a kernel to its end. Arrays are used in place.

        Args:
            grid, block: the number of blocks, and of threads in a block: x, or up to (x, y, z).
            args: one per parameter: a NumPy array (or None) for a pointer, a number for a value.
            shared: bytes of dynamic shared memory for a block.
            cooperative: all blocks are alive at once and may wait for each other.
            reverse: blocks and threads in descending order. A correct kernel gives the same result.
            timeout: the limit in seconds of CPU time.
            races: report races. False for kernels that order their accesses by atomics of their own.
            count: gather `counters`; check mode only.
            chain: the launches before this one; check mode only. What they touched is checked and remembered.
            dependent: in the chain, this launch may start before the one before it has ended.

        Raises:
            KernelArgumentError: `args` does not fit the signature.
            LaunchConfigError: no such kernel, or sizes that no GPU accepts.
            EmulatorError: the kernel did something wrong.
        """
        if (count or chain is not None) and self.mode != "check":
            raise LaunchConfigError('count=True and chain need a module in mode="check"')
        arguments = PreparedArguments(kernel, self._find(kernel), args)
        request = make_request(arguments, grid, block, shared)
        request.kernel = ctypes.cast(self._library[f"emu_call_{kernel}"], ctypes.c_void_p)
        request.cpu_seconds = timeout
        request.cooperative, request.reverse = cooperative, reverse
        request.races, request.counting = races, count
        if chain is not None:
            join_chain(request, kernel, args, chain, dependent)
        failed = self._library.emu_launch(ctypes.byref(request))
        self._count_stacks()
        self.counters = read_counters(self._library.emu_counters()) if count else None
        if failed:
            report = Report.from_address(self._library.emu_report())
            raise make_error(report, self.path, kernel, self._names[kernel], chain)
        if chain is not None:
            chain.end(bool(request.early))
            check_waits(chain, dependent, bool(request.waits), kernel, self.name)

    def _count_stacks(self) -> None:
        """Where too many stacks are kept, those of the modules that were not used for longest are given back."""
        stacks = Module._stacks
        stacks.pop(self, None)
        stacks[self] = self._library.emu_stacks()
        total = sum(stacks.values())
        while total > MAX_STACKS and len(stacks) > 1:
            oldest = next(iter(stacks))
            total -= stacks.pop(oldest)
            oldest._library.emu_free_stacks()

    def _find(self, kernel: str) -> list[Parameter]:
        if kernel not in self._parameters:
            raise LaunchConfigError(f"{self.name} has no kernel {kernel!r}, only {', '.join(self.kernels)}")
        return self._parameters[kernel]

    def _read_parameters(self, kernel: str) -> list[Parameter]:
        types_function = self._library[f"emu_types_{kernel}"]
        sizes_function = self._library[f"emu_sizes_{kernel}"]
        types_function.restype, sizes_function.restype = ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)
        types, sizes = parse_types(types_function().decode()), sizes_function()
        return [Parameter(c_type, sizes[i], sizes[len(types) + i]) for i, c_type in enumerate(types)]
