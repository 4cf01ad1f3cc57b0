"""`rvllm doctor`: what of this machine the engine and the course can use, and the command that mends the rest."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rvllm.errors import RvllmError

CORE_PACKAGES = ("numpy", "gguf", "tokenizers", "jinja2", "huggingface_hub", "tqdm", "threadpoolctl")


@dataclass(frozen=True)
class Check:
    """One line of the report. `essential`: without it not even the CPU path works."""

    ok: bool
    text: str
    remedy: str = ""
    essential: bool = False

    def __str__(self) -> str:
        line = f"{'ok' if self.ok else '--'}  {self.text}"
        return line if self.ok or not self.remedy else f"{line}\n      to mend it: {self.remedy}"


def report() -> bool:
    """Print one line for each thing looked at; true if the CPU path works."""
    checks = []
    for check in _checks():
        print(check, flush=True)
        checks.append(check)
    works = all(check.ok for check in checks if check.essential)
    print("The CPU path works." if works else "The CPU path does not work: see the lines above.")
    return works


def _checks() -> Iterator[Check]:
    yield Check(
        sys.version_info >= (3, 11),
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "install Python 3.11 or newer",
        essential=True,
    )
    for name in CORE_PACKAGES:
        yield _check_package(name)
    yield _check_blas()
    yield _check_compute()
    yield _check_driver()
    yield _check_cuda()
    yield _check_compiler()
    yield from _check_models()


def _check_package(name: str) -> Check:
    """Installed is not usable: the package is imported, not looked up."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Check(False, f"{name} ({words})", f"python -m pip install --force-reinstall {name}", essential=True)
    version = getattr(module, "__version__", None) or metadata.version(name)
    return Check(True, f"{name} {version}", essential=True)


def _check_blas() -> Check:
    try:
        import numpy as np

        from rvllm.blas_threads import blas_threads

        config = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    except Exception:  # without NumPy, or where it does not say how it was built
        return Check(False, "BLAS: NumPy does not say which one it uses")
    name = config.get("name", "none")
    if not config.get("found", True) or name == "none":
        return Check(False, "BLAS: NumPy has none and is slow", "python -m pip install --force-reinstall numpy")
    threads = blas_threads()
    counted = f"{threads} threads" if threads else "number of threads unknown"
    return Check(True, f"BLAS {name} {config.get('version', '')}, {counted} on {os.cpu_count()} processors")


def _check_compute() -> Check:
    from rvllm.device import describe_device, resolve_device

    return Check(True, f"computes on {resolve_device('auto')}; this machine has {describe_device()}")


def _check_driver() -> Check:
    from rvllm.device import driver_cuda_version

    version = driver_cuda_version()
    if version is None:
        return Check(False, "NVIDIA driver: none (only needed for CUDA)")
    return Check(True, f"NVIDIA driver, runs CUDA up to {version[0]}.{version[1]}")


def _check_cuda() -> Check:
    from rvllm.device import cuda_available, cupy_packages

    available = cuda_available()
    packages = "".join(f" [{name} {version}]" for name, version in cupy_packages().items())
    return Check(available.ok, f"CUDA through CuPy: {available.reason}{packages}", available.remedy)


def _check_compiler() -> Check:
    name = "C++ compiler (for the emulator of CUDA)"
    mend = "xcode-select --install" if sys.platform == "darwin" else "sudo apt-get install g++"
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        return Check(False, f"{name}: neither g++ nor clang++", mend)
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(False, f"{name}: {found} does not run ({error})", mend)
    return Check(True, f"{name}: {(done.stdout.splitlines() or [found])[0]}")


def _check_models() -> Iterator[Check]:
    try:
        from rvllm.cache import cache_dir
        from rvllm.hub import cached_models

        models, place = cached_models(), cache_dir()
    except (ImportError, RvllmError, OSError) as error:
        yield Check(False, f"models: the cache cannot be looked at ({error})")
        return
    for model in models:
        yield Check(True, f"model {model.name}, {model.size / 1e6:.1f} MB, {_short(model.path)}")
    if not models:
        yield Check(False, f"models: none in {_short(place)}", 'rvllm generate "Hello" fetches the default one (98 MB)')


def _short(path: Path) -> str:
    home = str(Path.home())
    return f"~{str(path)[len(home) :]}" if str(path).startswith(home + os.sep) else str(path)
