"""The errors of the emulator, all of them `RvllmError`s."""

from __future__ import annotations

from rvllm.errors import RvllmError

Index3 = tuple[int, int, int]


class CompilerMissingError(RvllmError):
    """No C++ compiler was found, or none that can do what was asked. The message says what to install."""


class CompileError(RvllmError):
    """A kernel file does not compile.

    Attributes:
        kernel: the name of the source as given to `Module`.
        log: what the compiler said; below each message stands the line of the kernel file that it is about.
        include_paths: the folders, and the names of in-memory headers, in which `#include` was looked up.
    """

    def __init__(self, kernel: str, log: str, include_paths: list[str]) -> None:
        self.kernel, self.log, self.include_paths = kernel, log, include_paths
        tried = ", ".join(include_paths)
        super().__init__(f"{kernel} does not compile:\n{log}\ninclude paths tried: {tried}")


class KernelArgumentError(RvllmError, TypeError):
    """An argument does not fit the kernel's signature.

    Attributes:
        kernel: the kernel's name.
        index: which parameter, from 0; None when the number of arguments is wrong.
        expected: the declared C type.
        found: what was passed.
    """

    def __init__(self, kernel: str, index: int | None, expected: str, found: str) -> None:
        self.kernel, self.index, self.expected, self.found = kernel, index, expected, found
        if index is None:
            super().__init__(f"{kernel} takes ({expected}), got {found}")
        else:
            super().__init__(f"{kernel}: argument {index} is declared {expected}, got {found}")


class LaunchConfigError(RvllmError, ValueError):
    """A grid, block or shared memory size that no GPU accepts, or a kernel that the module does not hold."""


class HostBufferError(RvllmError):
    """The host wrote to memory that the device had yet to read."""


class EmulatorError(RvllmError):
    """A run was stopped because the kernel did something wrong.

    Attributes:
        kind: one of "out of bounds", "misaligned access", "unset shared memory", "shared memory race",
            "global memory race", "read-only array", "null pointer", "invalid address", "barrier divergence",
            "warp divergence", "deadlock", "timeout", "division by zero", "stack overflow", "assertion",
            "trap", "out of memory"; in a chain of launches "early read", "early write", "no wait".
        kernel: the kernel's name.
        file, line: where in the kernel source; None if unknown.
        other_line: for a race, the line of the other access.
        block, thread: blockIdx and threadIdx as (x, y, z) of the thread that was stopped; None if no single
            one.
        detail: what happened, without the location.
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        kernel: str,
        file: str | None = None,
        line: int | None = None,
        other_line: int | None = None,
        block: Index3 | None = None,
        thread: Index3 | None = None,
    ) -> None:
        self.kind, self.detail, self.kernel = kind, detail, kernel
        self.file, self.line, self.other_line = file, line, other_line
        self.block, self.thread = block, thread
        place = f"{file}:{line}: " if line else ""
        who = f" [block {_tuple(block)} thread {_tuple(thread)}]" if block and thread else ""
        super().__init__(f"{place}{kernel}: {kind}: {detail}{who}")


def _tuple(index: Index3) -> str:
    return "({},{},{})".format(*index)
