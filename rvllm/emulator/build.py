"""From kernel text to a loaded shared object."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rvllm.cache import CacheError, cached
from rvllm.emulator.compiler import Compiler, find_compiler, require_check_mode, run_compiler
from rvllm.emulator.errors import CompileError
from rvllm.emulator.source import kernel_names, rewrite_dynamic_shared, unit_text

SHIM_FOLDER = Path(__file__).parent / "cuda"
# By name, not by path: an object in the cache may have been compiled by an installation in another folder.
SHIM_FILES = {path.name for path in SHIM_FOLDER.rglob("*") if path.suffix in (".h", ".cpp")}

# CUDA code reads the same bytes as different types and counts on integers that wrap. -g1 keeps line numbers;
# in version 4 of the format, because addr2line confuses the file names of g++ 12's version 5 after a #line.
# Fortified longjmp refuses to jump between stacks. Warnings about CUDA-isms would only be noise.
COMMON_FLAGS = [
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-fwrapv", "-fno-exceptions"),
    *("-U_FORTIFY_SOURCE", "-fno-stack-protector", "-w", "-g1", "-gdwarf-4"),
]
RUNTIME_FLAGS = ["-O2"]
# -fstack-clash-protection makes a large frame touch each of its pages, so that it cannot jump over the guard
# page. Without -fno-tree-sra a float4 load would be split in four before it is checked, and lose its
# alignment.
KERNEL_FLAGS = {
    "fast": ["-O2", "-fstack-clash-protection"],
    "check": ["-O1", "-fstack-clash-protection", "-fno-tree-sra", "-fsanitize=thread,bounds"],
}


@dataclass(frozen=True)
class Target:
    """How to compile: in which mode, for which compute capability, with which compiler."""

    compiler: Compiler
    mode: str
    arch: int
    portable: bool

    @property
    def flags(self) -> list[str]:
        """The flags that kernels and the runtime have in common."""
        flags = [*COMMON_FLAGS, f"-D__CUDA_ARCH__={self.arch}", f"-DEMU_CHECK={int(self.mode == 'check')}"]
        if self.portable:
            flags.append("-DEMU_PORTABLE")
        elif has_f16c():
            flags.append("-mf16c")
        return flags


@functools.lru_cache
def has_f16c() -> bool:
    """Does this CPU convert half by itself (x86-64 since 2012)? Others, and `portable`, do it in integers."""
    return platform.machine() == "x86_64" and re.search(r"\bf16c\b", Path("/proc/cpuinfo").read_text()) is not None


def choose_target(mode: str, arch: int, portable: bool) -> Target:
    """The target for a mode, on this machine's compiler.

    Raises:
        ValueError: an unknown mode.
        CompilerMissingError: no compiler, or check mode without g++.
    """
    if mode not in KERNEL_FLAGS:
        raise ValueError(f'mode is "check" or "fast", not {mode!r}')
    compiler = find_compiler()
    require_check_mode(compiler, mode)
    return Target(compiler, mode, arch, portable)


@functools.lru_cache
def shim_text() -> str:
    """All C++ files of the emulator in one string: part of every cache key."""
    files = sorted(path for path in SHIM_FOLDER.rglob("*") if path.suffix in (".h", ".cpp"))
    return "".join(f"{path.relative_to(SHIM_FOLDER)}\n{path.read_text()}" for path in files)


def load_module(source: str, name: str, headers: Mapping[str, str], target: Target) -> ctypes.PyDLL:
    """Compiles kernel text (or finds it compiled) and loads the shared object.

    Raises:
        CompileError: with the compiler's log, or because no folder can be written.
    """
    kernels = kernel_names(source)
    if not kernels:
        raise CompileError(name, 'it has no kernel: nothing matches `extern "C" __global__ void name(`', [])
    flags = [*target.flags, *KERNEL_FLAGS[target.mode]]
    text = unit_text(source, name, kernels)
    files = {header: rewrite_dynamic_shared(body) for header, body in sorted(headers.items())}

    def build(output: Path, work: Path) -> None:
        for header, body in files.items():
            path = work / "headers" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
        (work / "unit.cpp").write_text(text)
        copy_runtime(target, work / "runtime.o")
        includes = [str(SHIM_FOLDER), str(SHIM_FOLDER / "include"), str(work / "headers")]
        unit = [*flags, *(f"-I{folder}" for folder in includes), "-c", "unit.cpp", "-o", "unit.o"]
        _compile(target, unit, work, name, source, headers)
        # The check runtime stands in for the sanitizer's library, so that must not be linked: no -fsanitize
        # here.
        _compile(target, ["-shared", "unit.o", "runtime.o", "-o", str(output)], work, name, source, headers)

    # PyDLL keeps the interpreter lock during calls: two Python threads never enter the emulator's one state.
    try:
        return cached(
            "emulator", (shim_text(), text, files, flags, target), ".so", build, lambda p: ctypes.PyDLL(str(p))
        )
    except CacheError as error:
        raise CompileError("cache", str(error), []) from error


def copy_runtime(target: Target, path: Path) -> None:
    """Writes the emulator's own object file for a target, which all kernels share."""
    flags = [*target.flags, *RUNTIME_FLAGS]

    def build(output: Path, work: Path) -> None:
        unit = str(SHIM_FOLDER / "runtime_unit.cpp")
        _compile(target, [*flags, "-c", unit, "-o", str(output)], work, "the emulator's runtime", "", {})

    cached("emulator", (shim_text(), flags, target), ".o", build, lambda kept: shutil.copyfile(kept, path))


def _compile(
    target: Target, arguments: list[str], work: Path, name: str, source: str, headers: Mapping[str, str]
) -> None:
    log = run_compiler(target.compiler, arguments, work)
    if log is not None:
        folders = [str(SHIM_FOLDER / "include"), *(f"{header} (in memory)" for header in headers)]
        raise CompileError(name, quote_lines(log.strip(), name, source), folders)


def quote_lines(log: str, name: str, source: str) -> str:
    """The compiler's log with the line of the source below each message that names one."""
    lines = source.split("\n")
    place = re.compile(rf"^{re.escape(name)}:(\d+):")
    quoted = []
    for message in log.split("\n"):
        quoted.append(message)
        match = place.match(message)
        if match and 0 < int(match[1]) <= len(lines):
            quoted.append(f"{match[1]:>5} | {lines[int(match[1]) - 1]}")
    return "\n".join(quoted)
