"""Finding a C++ compiler, and running it."""

from __future__ import annotations

import errno
import functools
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rvllm.emulator.errors import CompilerMissingError

INSTALL_HINT = "install one with: sudo apt-get install -y g++"
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # not the kernel's, whose text a log is about


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    `identity` changes whenever the program changes. It is taken from the file (path, size, time) and not from
    `--version`, so that a program that finds everything in the cache never starts the compiler.
    """

    path: str
    identity: str
    is_clang: bool


def find_compiler() -> Compiler:
    """The compiler named by the environment variable CXX, else g++, clang++ or c++.

    Raises:
        CompilerMissingError: there is none, or CXX names a program that does not exist.
    """
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "clang++", "c++"]:
        if path := shutil.which(name):
            return _describe(path, os.stat(path).st_mtime_ns)
    what = f"CXX={chosen} is not a program" if chosen else "found no g++, clang++ or c++"
    raise CompilerMissingError(f"the CUDA emulator needs a C++ compiler, but {what}; {INSTALL_HINT}")


def require_check_mode(compiler: Compiler, mode: str) -> None:
    """Raises CompilerMissingError if the mode is "check" and the compiler cannot do it."""
    if mode == "check" and compiler.is_clang:
        raise CompilerMissingError(
            f"check mode relies on g++ (its calls for memory accesses), but the compiler is {compiler.path}; "
            'use mode="fast", or install g++ with: sudo apt-get install -y g++'
        )


@functools.lru_cache
def _describe(path: str, changed: int) -> Compiler:
    real = Path(path).resolve()
    status = real.stat()
    is_clang = "clang" in real.name
    return Compiler(path, f"{real} {status.st_size} {status.st_mtime_ns} {changed}", is_clang)


def available(mode: str = "fast") -> tuple[bool, str]:
    """Can kernels be emulated on this machine in this mode? If not, the second value says why."""
    if not sys.platform.startswith("linux"):
        return False, f"the CUDA emulator runs on Linux (or WSL) only, this is {platform.system()}"
    try:
        compiler = find_compiler()
        require_check_mode(compiler, mode)
    except CompilerMissingError as error:
        return False, str(error)
    return True, f"kernels are compiled by {compiler.path}"


def run_compiler(compiler: Compiler, arguments: list[str], folder: Path) -> str | None:
    """Runs the compiler in `folder`; None on success, else what it printed. OSError if the folder is at fault."""
    environment = os.environ | {"LC_ALL": "C"}
    command = [compiler.path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder, env=environment)
    if done.returncode == 0:
        return None
    log = done.stderr or done.stdout or f"exit status {done.returncode}"
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "removed while the compiler ran", str(folder))
    for number in DISK_FAULTS:
        if os.strerror(number) in log:
            raise OSError(number, os.strerror(number), str(folder))
    return log
