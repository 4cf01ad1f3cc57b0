"""Which device computes: is CUDA usable here and, if not, why not and what mends it.

"CuPy is installed" and "a GPU can be used" are different statements. `cuda_available` asks for the second,
and its answer is a reason in words, never an exception: a course that runs without a GPU must not fail on the
question.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from rvllm.errors import RvllmError

DEVICE_NAME = re.compile(r"cpu|emulator|cuda(?::(\d+))?")
CUPY_NAME = re.compile(r"cupy(-cuda\w+|-rocm\w+)?")  # not cupy-xarray and other packages that build on CuPy
TENSOR_CORES = 75  # compute capability from which on cards have the products of halfs that part IV is made of
COLAB_HELP = "on Colab choose Runtime > Change runtime type > T4 GPU, then run all cells again"


class DeviceError(RvllmError):
    """A device that does not exist, or that cannot compute here."""


@dataclass(frozen=True)
class Availability:
    """The answer to "can CUDA be used?", with the reason, and the one command that mends it, if any."""

    ok: bool
    reason: str
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.ok


def cuda_available() -> Availability:
    """Whether CuPy is installed, loads, and sees a GPU. Never raises."""
    packages = cupy_packages()
    if len(packages) > 1:
        return _several_packages(packages)
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:  # a broken installation fails in any way it likes; this is the place that says so
        return _import_failed(error, packages)
    return _usable(cupy)


def describe_device(device: str = "auto") -> str:
    """The name of the card that a device computes on; for `cpu` and `emulator`, `cpu` and the processor's name."""
    name = resolve_device(device)
    if name.startswith("cuda"):
        cupy = importlib.import_module("cupy")
        return str(cupy.cuda.runtime.getDeviceProperties(device_index(name))["name"].decode())
    return f"cpu ({processor_name()})"


def resolve_device(name: str, must_work: bool = True) -> str:
    """The device to compute on: `auto` becomes the best one that works, any other name must work as it is.

    must_work: False where nothing is to be computed: a GPU that is not here then is a good name too.
    """
    if name == "auto":
        return "cuda" if cuda_available() else "cpu"
    match = DEVICE_NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(f"there is no device {name!r}; it is one of auto, cpu, cuda, cuda:N, emulator")
    if must_work and name.startswith("cuda"):
        _require_cuda(int(match[1] or 0))
    return name


def cupy_packages() -> dict[str, str]:
    """The installed distributions that provide `import cupy`, with versions. More than one is a fault."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if CUPY_NAME.fullmatch(name):
            found[name] = distribution.version
    return found


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver runs, or None where there is no driver. Needs no CuPy."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for: a compute capability, 75 for 7.5, as machine code or as PTX.

    Machine code runs on cards of that capability; PTX, which the driver translates, on newer ones too.
    """

    capability: int
    is_ptx: bool

    @property
    def option(self) -> str:
        """NVRTC's option."""
        return f"--gpu-architecture={'compute' if self.is_ptx else 'sm'}_{self.capability}"

    def __str__(self) -> str:
        return f"{'PTX' if self.is_ptx else 'machine code'} for {dotted(self.capability)}"


def compile_target(nvrtc: Any, capability: int) -> Target:
    """What CuPy's NVRTC should compile for a card: its own machine code or, for one too new for it, PTX.

    DeviceError for a card that is older than all that NVRTC knows, or where NVRTC does not load.
    """
    ask = getattr(nvrtc, "getSupportedArchs", None)
    try:
        known = sorted(ask()) if ask else [capability]
    except Exception as error:  # CuPy loads the library when it is first asked for something
        raise DeviceError(f"CuPy cannot use NVRTC, the compiler ({_one_line(error)})") from error
    if capability in known:
        return Target(capability, is_ptx=False)
    older = [other for other in known if other < capability]
    if not older:
        can = f"{nvrtc_version(nvrtc)} compiles for {dotted(known[0])} to {dotted(known[-1])}"
        raise DeviceError(f"no code for compute capability {dotted(capability)}: {can}")
    return Target(older[-1], is_ptx=True)


def nvrtc_version(nvrtc: Any) -> str:
    """NVRTC and its version, for messages."""
    return f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))}"


def dotted(capability: int) -> str:
    """7.5 for 75."""
    return f"{capability // 10}.{capability % 10}"


def card_capability(device: str) -> int | None:
    """The compute capability of a GPU, 75 for 7.5; None for the other devices, and for a card that is not here."""
    if not device.startswith("cuda") or not cuda_available():
        return None
    cupy = importlib.import_module("cupy")
    card = cupy.cuda.runtime.getDeviceProperties(device_index(device))
    return 10 * int(card["major"]) + int(card["minor"])


def _require_cuda(index: int) -> None:
    available = cuda_available()
    if not available:
        raise DeviceError(f"CUDA cannot be used: {_sentence(available)}")
    count = importlib.import_module("cupy").cuda.runtime.getDeviceCount()
    if index >= count:
        raise DeviceError(f"there is no cuda:{index}; this machine shows {count} GPU(s), counted from 0")


def _sentence(available: Availability) -> str:
    return f"{available.reason}; to mend it: {available.remedy}" if available.remedy else available.reason


def _several_packages(packages: dict[str, str]) -> Availability:
    listed = ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
    remedy = f"python -m pip uninstall -y {' '.join(sorted(packages))} && {_install_command()}"
    return Availability(False, f"{len(packages)} CuPy packages overwrite each other: {listed}", remedy)


def _import_failed(error: Exception, packages: dict[str, str]) -> Availability:
    if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
        if driver_cuda_version() is None:
            return _no_gpu("no NVIDIA driver here, and CuPy is not installed")
        return Availability(False, "CuPy is not installed", _install_command())
    words = f"{type(error).__name__}: {_one_line(error)}"
    remedy = f"python -m pip uninstall -y {' '.join(packages)} && {_install_command()}" if packages else ""
    return Availability(False, f"CuPy is installed but does not load ({words})", remedy)


def _install_command() -> str:
    # A CuPy built for a newer CUDA than the driver's does not run, one built for an older CUDA does.
    version = driver_cuda_version()
    return f"python -m pip install cupy-cuda{13 if version and version[0] >= 13 else 12}x"


def _usable(cupy: ModuleType) -> Availability:
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        card = cupy.cuda.runtime.getDeviceProperties(0) if count else {}
    except Exception as error:  # CUDARuntimeError, or AttributeError where `cupy` is an empty folder or a stub
        return _runtime_failed(error)
    if not count:
        return _no_gpu("the driver shows no GPU")
    capability = f"compute capability {card['major']}.{card['minor']}"
    found = f"{count} GPU(s), the first one is {card['name'].decode()}, {capability}"
    return _compilable(cupy, found, 10 * card["major"] + card["minor"])


def _compilable(cupy: ModuleType, found: str, capability: int) -> Availability:
    """Whether NVRTC can compile for the card, and what is special about that."""
    nvrtc = getattr(cupy.cuda, "nvrtc", None)
    try:
        target = compile_target(nvrtc, capability)
    except DeviceError as error:
        return Availability(False, f"{found}; {error}", _other_compiler())
    if target.is_ptx:
        found += f"; {nvrtc_version(nvrtc)} does not know it and makes {target}"
    if capability < TENSOR_CORES:
        found += f"; runs the plain model alone, the others need {dotted(TENSOR_CORES)}"
    return Availability(True, found)


def _other_compiler() -> str:
    """CUDA 13 has left old cards behind; for those a CuPy of CUDA 12 is right. Empty where that is not the trouble."""
    newest = [name for name in cupy_packages() if name == "cupy-cuda13x"]
    return f"python -m pip uninstall -y {newest[0]} && python -m pip install cupy-cuda12x" if newest else ""


def _runtime_failed(error: Exception) -> Availability:
    words = _one_line(error)
    driver = driver_cuda_version()
    if "InsufficientDriver" in words and driver:  # without a driver CUDA says the same
        supported = f"the NVIDIA driver is too old for this CuPy: it runs CUDA up to {driver[0]}.{driver[1]}"
        if driver[0] >= 12:
            remedy = f"python -m pip uninstall -y {' '.join(cupy_packages())} && {_install_command()}"
            return Availability(False, f"{supported} ({words})", remedy)
        return _no_gpu(f"{supported}, and rvllm needs 12; update the driver ({words})")
    return _no_gpu(f"no GPU can be used ({words})" if driver else f"no NVIDIA driver here ({words})")


def _no_gpu(reason: str) -> Availability:
    """Not usable for want of a GPU. Two causes are settings of the user's own, and are named."""
    remedy = ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1") and driver_cuda_version():
        reason, remedy = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    if "COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules:
        reason = f"{reason}; {COLAB_HELP}"
    return Availability(False, reason, remedy)


def _one_line(error: Exception) -> str:
    # CuPy's import error is a page of advice; its cause is in the first lines.
    return " ".join(str(error).split())[:200]


def processor_name() -> str:
    """The name of the processor, as the operating system tells it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def device_index(device: str) -> int:
    """1 of `cuda:1`, 0 of `cuda`."""
    return int(device.partition(":")[2] or 0)


def gpu_memory(device: str) -> tuple[int, int]:
    """Bytes of a GPU: free, and in all."""
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(device_index(device)):
        free, total = cupy.cuda.runtime.memGetInfo()
    return int(free), int(total)


def shared_memory(device: str) -> int:
    """Bytes of shared memory that a block of a GPU may ask for; on the emulator, or of a card not here, a T4's."""
    if not device.startswith("cuda") or not cuda_available():
        return 64 << 10
    cupy = importlib.import_module("cupy")
    return int(cupy.cuda.runtime.getDeviceProperties(device_index(device))["sharedMemPerBlockOptin"])


def free_memory(device: str) -> int:
    """Bytes that can be had without taking them from somebody: of the GPU, or of main memory (0 if unknown).

    Where the system does not count free pages (macOS), half of all.
    """
    if device.startswith("cuda"):
        return gpu_memory(device)[0]
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) * 1024 if match else _free_pages()


def _free_pages() -> int:
    for name, part in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf, macOS not the first of these
            return max(0, os.sysconf(name)) * os.sysconf("SC_PAGE_SIZE") // part
    return 0
