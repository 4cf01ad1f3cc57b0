"""Arrays and kernel launches on one device: a GPU through CuPy and NVRTC, or the emulator.

Generated from notebooks/05_first_kernels.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import functools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import resources, util
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rvllm import emulator
from rvllm.cache import cached
from rvllm.device import DeviceError, Target, compile_target, cuda_available, nvrtc_version
from rvllm.emulator import CompileError, KernelArgumentError, LaunchConfigError
from rvllm.errors import RvllmError

Array = Any  # numpy.ndarray on the emulator, cupy.ndarray on a GPU; both have shape, dtype, reshape, slices
Size = int | tuple[int, ...]
Defines = Mapping[str, int | str]


class NoGpuError(DeviceError):
    """CUDA was asked for and can't be used; the message says why and what would help. Notebook 05, section 4."""


class DeviceMemoryError(RvllmError):
    """The device has no room for an array."""


LIVE_SOURCES: dict[str, str] = {}  # file name -> text; a %%cuda cell puts its text here, and it goes before the files


def source_text(filename: str) -> str:
    """The text of a kernel file, `rmsnorm.cu` or a header `warp.cuh`: from a notebook cell, else from the package."""
    if filename in LIVE_SOURCES:
        return LIVE_SOURCES[filename]
    file = resources.files("rvllm.kernels") / filename
    if not file.is_file():
        raise LaunchConfigError(f"{filename}: no such kernel file in rvllm.kernels, and no %%cuda cell defines it")
    return file.read_text(encoding="utf-8")


def without_comments(source: str) -> str:
    """The text with every comment replaced by a space."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)


def with_defines(source: str, filename: str, defines: Defines) -> str:
    """The text after a `#define` for each macro, its lines numbered as before."""
    if not defines:
        return source
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return f'{macros}#line 1 "{filename}"\n{source}'


def headers_of(source: str) -> dict[str, str]:
    """The project's headers that a source includes, directly or through another header: name -> text."""
    include = re.compile(r'#\s*include\s*"(\w+\.cuh)"')
    found: dict[str, str] = {}
    waiting = include.findall(without_comments(source))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = source_text(name)
            waiting += include.findall(without_comments(found[name]))
    return found


DTYPES: dict[str, Any] = {
    "float": np.float32,
    "int": np.int32,
    "unsigned": np.uint32,
    "unsigned char": np.uint8,
    "half": np.float16,
    "unsigned long long": np.uint64,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: its C type without qualifiers, and whether it is a pointer."""

    base: str
    is_pointer: bool
    declared: str

    @functools.cached_property
    def dtype(self) -> Any:
        """The NumPy type of the C type."""
        return np.dtype(DTYPES[self.base])

    @functools.cached_property
    def limits(self) -> tuple[Any, Any]:
        """Smallest and largest value of the type."""
        if self.dtype.kind == "f":
            return float(np.finfo(self.dtype).min), float(np.finfo(self.dtype).max)
        return np.iinfo(self.dtype).min, np.iinfo(self.dtype).max

    def convert(self, kernel: str, index: int, value: Any, array_type: Any) -> Any:
        """The argument as the kernel expects it, or KernelArgumentError: nothing else would notice a wrong type."""
        if self.is_pointer:
            if isinstance(value, array_type) and value.dtype == self.dtype and value.flags.c_contiguous:
                return value
        elif self.dtype.kind == "f":
            if isinstance(value, (int, float, np.integer, np.floating)) and not _is_huge(value):
                beyond = abs(float(value)) > self.limits[1]  # becomes infinity, as in C
                return self.dtype.type(math.copysign(math.inf, value) if beyond else value)
        elif _is_whole(value) and self.limits[0] <= value <= self.limits[1]:
            return self.dtype.type(value)
        raise KernelArgumentError(kernel, index, self.declared, describe(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_huge(value: Any) -> bool:
    """An integer that no float can hold."""
    return isinstance(value, int) and value.bit_length() > 1023


def describe(value: Any) -> str:
    """What was passed, for a message."""
    if not hasattr(value, "dtype") or not getattr(value, "shape", ()):
        return f"{type(value).__name__} {value!r}"
    layout = "" if value.flags.c_contiguous else ", not contiguous"
    return f"{type(value).__module__.split('.')[0]} array of {value.dtype}, shape {value.shape}{layout}"


def parameters_of(source: str, kernel: str) -> list[Parameter]:
    """A kernel's parameters, read from its source text."""
    match = re.search(rf'extern\s+"C"\s+__global__[^;{{]*?\b{kernel}\s*\(([^)]*)\)', without_comments(source))
    if match is None:
        raise LaunchConfigError(f'{kernel}.cu defines no kernel: extern "C" __global__ void {kernel}(...)')
    parameters = []
    for declared in filter(None, (" ".join(text.split()) for text in match[1].split(","))):
        words = re.sub(r"\b(const|volatile|__restrict__)\b|\*", " ", declared).split()
        parameters.append(Parameter(" ".join(words[:-1]), "*" in declared, declared))
    strange = ("[", "(", "&")
    if unknown := [
        p.declared
        for p in parameters
        if p.base not in DTYPES or p.declared.count("*") > 1 or any(c in p.declared for c in strange)
    ]:
        raise LaunchConfigError(f"{kernel}: parameter {unknown[0]!r}; known types: {', '.join(DTYPES)}")
    return parameters


class Compiled(Protocol):
    """A kernel that is ready to run."""

    def __call__(self, grid: Size, block: Size, args: Sequence[Any], shared: int, cooperative: bool) -> None:
        """Start it."""

    def allow_shared(self, shared: int) -> None:
        """Make launches with so many bytes of dynamic shared memory possible; LaunchConfigError where they are not."""


SHARED_BY_DEFAULT = 48 * 1024  # bytes of shared memory, static and dynamic, that a block gets without asking


def check_shared(kernel: str, static: int, dynamic: int, allowed: int) -> None:
    """LaunchConfigError if a block wants more bytes than the device has for one: what is declared and what is asked for
    at the launch count together.
    """
    if static + dynamic > allowed:
        found = f"{static + dynamic:,} bytes of shared memory a block, {static:,} static and {dynamic:,} dynamic"
        raise LaunchConfigError(f"{kernel}: found {found}; allowed: {allowed:,}")


@dataclass(frozen=True)
class Prepared:
    """A launch with its arguments in the kernel's own types. Call it to start it; the arrays in it stay alive."""

    name: str
    kernel: Compiled
    grid: Size
    block: Size
    args: Sequence[Any]
    shared: int = 0
    cooperative: bool = False

    def __call__(self) -> None:
        self.kernel(self.grid, self.block, self.args, self.shared, self.cooperative)


class EmulatorKernel:
    """A kernel on the emulator."""

    def __init__(self, runtime: Runtime, module: emulator.Module, kernel: str, max_shared: int) -> None:
        self._runtime, self._module, self._kernel, self._max_shared = runtime, module, kernel, max_shared

    def __call__(
        self, grid: Size, block: Size, args: Sequence[Any], shared: int, cooperative: bool, **more: Any
    ) -> None:
        """Start it. more: other options of `emulator.Module.launch`."""
        self._runtime.submit(partial(self._run, grid, block, args, shared, cooperative, **more))

    def _run(self, *arguments: Any, **more: Any) -> None:
        rt, module = self._runtime, self._module
        more |= {"reverse": rt.reverse, "timeout": rt.timeout, "count": rt.counting and module.mode == "check"}
        module.launch(self._kernel, *arguments, **more)
        rt.counters = module.counters

    def allow_shared(self, shared: int) -> None:
        """Nothing needs to be asked for, but there is as little as on a card."""
        check_shared(self._kernel, self._module.static_shared, shared, self._max_shared)


class EmulatorBackend:
    """Kernels compiled by g++ and run on the CPU. Arrays are NumPy's."""

    array_type: type = np.ndarray

    def __init__(self, runtime: Runtime, mode: str, deferred: bool) -> None:
        works, reason = emulator.available(mode)
        if not works:
            raise emulator.CompilerMissingError(reason)
        self.xp, self._runtime, self._mode = np, runtime, mode
        self._queue = emulator.LaunchQueue(deferred)
        # As small as it gets: every block costs time.
        self.compute_capability, self.multiprocessors, self.max_shared = 80, 2, 64 * 1024
        self.name = f"emulator, {mode} mode"

    def compile(self, source: str, kernel: str) -> Compiled:
        """The kernel as something that runs it and leaves its counters in the runtime."""
        module = emulator.Module(source, f"{kernel}.cu", self._mode, headers_of(source))
        if module.static_shared > SHARED_BY_DEFAULT:  # a GPU's compiler refuses that on every card
            log = f"it declares {module.static_shared:,} bytes of __shared__ memory; allowed: {SHARED_BY_DEFAULT:,}"
            raise CompileError(f"{kernel}.cu", log, [])
        return EmulatorKernel(self._runtime, module, kernel, self.max_shared)

    def submit(self, call: Callable[[], None], reads: np.ndarray | None = None) -> None:
        """Run it, now or when somebody waits."""
        self._queue.submit(call, reads)

    def event(self) -> emulator.QueueEvent:
        """What was submitted so far."""
        return self._queue.event()

    def synchronize(self) -> None:
        """Wait until everything that was started has ended."""
        self.event().synchronize()

    def download(self, array: Array) -> np.ndarray:
        """A copy, as from a GPU; waits for what computes the array."""
        self.synchronize()
        return np.array(array)


class Order:
    """Starting work on a device, and waiting for it."""

    _backend: Any

    def submit(self, call: Callable[[], None], reads: np.ndarray | None = None) -> None:
        """Start work on the device by a call that does not wait.

        reads: host memory that the work reads, and that nobody may change until it has ended. HostBufferError, when the
        work runs, if somebody did; only a deferred emulator finds that out.
        """
        self._backend.submit(call, reads)

    def event(self) -> Any:
        """What was started so far on the current stream: `synchronize()` of the event waits for that."""
        return self._backend.event()

    def synchronize(self) -> None:
        """Wait for the device."""
        self._backend.synchronize()

    def download(self, array: Array) -> np.ndarray:
        """A copy in NumPy; waits for what computes the array."""
        return self._backend.download(array)


def include_paths() -> list[str]:
    """Folders with CUDA's own headers: a toolkit's, or those of NVIDIA's wheels. Empty ones are left out."""
    candidates = [Path(os.environ[v], "include") for v in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(v)]
    nvidia = util.find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or []) if nvidia else []:
        candidates += [*Path(root).glob("cuda_runtime/include"), *Path(root).glob("cu1*/include")]
    candidates.append(Path("/usr/local/cuda/include"))
    return list(dict.fromkeys(str(path) for path in candidates if (path / "cuda_fp16.h").is_file()))


STATIC_SHARED, MAX_DYNAMIC_SHARED = 1, 8  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, _MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaKernel:
    """A kernel on a GPU; started on the current stream. `function.ptr` is what CUDA's driver calls it."""

    def __init__(self, backend: CudaBackend, module: Any, kernel: str) -> None:
        # A function outlives its module only if somebody holds the module.
        self._backend, self._module, self._kernel = backend, module, kernel
        self.function = module.get_function(kernel)
        self._driver = backend.xp.cuda.driver
        self._static: int = self._driver.funcGetAttribute(STATIC_SHARED, self.function.ptr)
        self._dynamic = SHARED_BY_DEFAULT - self._static  # what a launch may ask for so far

    def __call__(self, grid: Size, block: Size, args: Sequence[Any], shared: int, cooperative: bool) -> None:
        with self._backend.device:
            self.function(_triple(grid), _triple(block), tuple(args), shared, enable_cooperative_groups=cooperative)

    def allow_shared(self, shared: int) -> None:
        """Beyond what every block may have, dynamic shared memory must be asked for once."""
        check_shared(self._kernel, self._static, shared, self._backend.max_shared)
        if shared > self._dynamic:
            self.set_attribute(MAX_DYNAMIC_SHARED, shared)
            self._dynamic = shared

    def set_attribute(self, attribute: int, value: int) -> None:
        """A CU_FUNC_ATTRIBUTE of the kernel."""
        self._driver.funcSetAttribute(self.function.ptr, attribute, value)


class CudaBackend:
    """Kernels compiled by NVRTC for the device's own compute capability. Arrays are CuPy's."""

    def __init__(self, index: int, arch: str | None) -> None:
        available = cuda_available()
        if not available.ok:
            raise NoGpuError(f"{available.reason}. {available.remedy}".strip(". ") + ".")
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if index >= count:
            raise NoGpuError(f"cuda:{index}: found {count} GPU(s); allowed: cuda:0 to cuda:{count - 1}")
        self.xp, self.device = cupy, cupy.cuda.Device(index)
        self.array_type = cupy.ndarray
        card = cupy.cuda.runtime.getDeviceProperties(index)
        self.multiprocessors: int = card["multiProcessorCount"]
        self.max_shared: int = card["sharedMemPerBlockOptin"]
        own = compile_target(cupy.cuda.nvrtc, int(self.device.compute_capability))
        # Code for an older card comes as PTX, which the driver translates: machine code would not run.
        self._target = own if arch is None else Target(int(arch), is_ptx=True)
        self.compute_capability = self._target.capability
        self.name = f"{card['name'].decode()}, compute capability {card['major']}.{card['minor']}"

    def compile(self, source: str, kernel: str) -> Compiled:
        """A function that starts the kernel on the current stream. NoGpuError if the driver does not take it."""
        module, code = self.xp.cuda.function.Module(), self._cubin(source, kernel)
        with self.device:
            try:
                module.load(code)
            except self.xp.cuda.driver.CUDADriverError as error:
                version = nvrtc_version(self.xp.cuda.nvrtc)
                raise NoGpuError(f"{self.name}: the driver refuses {self._target} by {version} ({error})") from error
            return CudaKernel(self, module, kernel)

    def _cubin(self, source: str, kernel: str) -> bytes:
        paths, headers = include_paths(), headers_of(source)
        version = self.xp.cuda.nvrtc.getVersion()
        options = (self._target.option, "-std=c++17")

        def build(output: Path, _folder: Path) -> None:
            output.write_bytes(self._compile(source, kernel, headers, options, paths))

        key = source, sorted(headers.items()), options, version, paths
        return cached("cubin", key, ".cubin", build, Path.read_bytes)

    def _compile(
        self, source: str, kernel: str, headers: dict[str, str], options: tuple[str, ...], paths: list[str]
    ) -> bytes:
        nvrtc = self.xp.cuda.nvrtc
        texts, names = ([text.encode() for text in part] for part in (headers.values(), headers))
        program = nvrtc.createProgram(source, f"{kernel}.cu", texts, names)
        try:
            nvrtc.compileProgram(program, (*options, *(f"-I{path}" for path in paths)))
            if self._target.is_ptx:
                ptx = nvrtc.getPTX(program)  # text in some versions of CuPy, bytes in others
                return (ptx.encode() if isinstance(ptx, str) else bytes(ptx)) + b"\0"
            return bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError:
            hint = "" if paths else "no CUDA headers found: set CUDA_PATH, or pip install nvidia-cuda-runtime-cu12"
            log = "\n".join(filter(None, [nvrtc.getProgramLog(program), hint]))
            raise CompileError(f"{kernel}.cu", log, [*headers, *paths]) from None
        finally:
            nvrtc.destroyProgram(program)

    def submit(self, call: Callable[[], None], _reads: np.ndarray | None = None) -> None:
        """It starts work on the current stream, and returns."""
        call()

    def event(self) -> Any:
        """A point of the current stream."""
        with self.device:
            event = self.xp.cuda.Event(disable_timing=True)
            event.record()
        return event

    def synchronize(self) -> None:
        """Wait until everything that was started has ended."""
        with self.device:
            self.xp.cuda.get_current_stream().synchronize()

    def download(self, array: Array) -> np.ndarray:
        """Copy to NumPy; waits for what computes the array."""
        return np.asarray(self.xp.asnumpy(array))


def _triple(size: Size) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


class Runtime(Order):
    """Arrays and kernel launches on one device. Notebook 05, section 4.

    device: "cuda", "cuda:1", "emulator", or "auto" (a GPU where one works, else the emulator).
    mode: of the emulator: "check" watches every memory access, "fast" does not.
    deferred: of the emulator: nothing that is started runs before somebody waits for it. The host is then as far ahead
    of the device as it can get: who changes what the device has yet to read is found out.
    arch: compile for another compute capability than the card's own, such as "75": to try a T4's code elsewhere.
    Attributes, emulator only: `reverse` runs threads backwards, `timeout` in seconds of CPU time, `counting` fills
    `counters` at each launch, `chain` (check mode only) checks launches that start early.
    `is_cuda`, `name`, `compute_capability` (90 for 9.0), `multiprocessors`, `max_shared` (bytes
    a block may ask for): of the card, or of what kernels are compiled for.
    Raises DeviceError, of which NoGpuError is one, and CompilerMissingError.
    """

    def __init__(
        self, device: str = "auto", mode: str = "check", arch: str | None = None, deferred: bool = False
    ) -> None:
        if device == "auto":
            device = "cuda" if cuda_available().ok else "emulator"
        match = re.fullmatch(r"emulator|cuda(?::([0-9]+))?", device) if isinstance(device, str) else None
        if match is None or mode not in ("check", "fast"):
            found = f"device {device!r}, mode {mode!r}"
            raise LaunchConfigError(f"{found}; allowed: cuda, cuda:N, emulator, auto; modes check and fast")
        self.is_cuda = device.startswith("cuda")
        self.reverse, self.timeout, self.counting = False, 60.0, False
        self.counters: emulator.Counters | None = None
        self.chain = None if self.is_cuda or mode == "fast" else emulator.Chain()
        self._backend: Any = (
            CudaBackend(int(match[1] or 0), arch) if self.is_cuda else EmulatorBackend(self, mode, deferred)
        )
        self.name: str = self._backend.name
        self.compute_capability: int = self._backend.compute_capability
        self.multiprocessors: int = self._backend.multiprocessors
        self.max_shared: int = self._backend.max_shared
        self._kernels: dict[tuple[Any, ...], tuple[list[Parameter], Compiled]] = {}
        self._live: dict[str, str] = {}

    def on_device(self) -> AbstractContextManager[Any]:
        """Inside it this device is CuPy's current one: calls of libraries need that where there are several."""
        return self._backend.device if self.is_cuda else nullcontext()

    def empty(self, shape: Size, dtype: Any = np.float32) -> Array:
        """An array whose content is undefined. DeviceMemoryError if it does not fit."""
        return self._allocate(self._backend.xp.empty, shape, dtype)

    def zeros(self, shape: Size, dtype: Any = np.float32) -> Array:
        """An array of zeros."""
        return self._allocate(self._backend.xp.zeros, shape, dtype)

    def upload(self, array: np.ndarray) -> Array:
        """A C-contiguous copy on the device."""
        copy = self.empty(array.shape, array.dtype)
        if self.is_cuda:
            with self.on_device():
                copy.set(np.asarray(array, order="C"))
        else:
            copy[...] = array
        return copy

    def kernel(self, name: str, defines: Defines | None = None) -> tuple[list[Parameter], Compiled]:
        """Parameters and compiled form of the kernel `name` in `name.cu`; compiled once, until a cell changes.

        defines: macros that the text leaves open, such as sizes that its loops are unrolled for.
        """
        if self._live != LIVE_SOURCES:
            self._live = dict(LIVE_SOURCES)
            self._kernels.clear()
        key = (name, *sorted((defines or {}).items()))
        if key not in self._kernels:
            source = source_text(f"{name}.cu")
            defined = with_defines(source, f"{name}.cu", defines or {})
            self._kernels[key] = parameters_of(source, name), self._backend.compile(defined, name)
        return self._kernels[key]

    def launch(
        self,
        name: str,
        grid: Size,
        block: Size,
        args: Sequence[Any],
        shared: int = 0,
        cooperative: bool = False,
        defines: Defines | None = None,
    ) -> None:
        """Start a kernel. `args` are checked against its signature; Python numbers become the declared C type.

        grid, block: x, or (x, y[, z]).   shared: bytes of dynamic shared memory.   defines: see `kernel`.
        Raises KernelArgumentError, CompileError, and on the emulator EmulatorError for what the kernel does wrong.
        """
        self.prepare(name, grid, block, args, shared, cooperative, defines)()

    def prepare(
        self,
        name: str,
        grid: Size,
        block: Size,
        args: Sequence[Any],
        shared: int = 0,
        cooperative: bool = False,
        defines: Defines | None = None,
    ) -> Prepared:
        """A launch whose arguments are checked now and which can be started again and again."""
        parameters, compiled = self.kernel(name, defines)
        if len(args) != len(parameters):
            expected = ", ".join(p.declared for p in parameters)
            raise KernelArgumentError(name, None, expected, f"{len(args)} arguments")
        kind, pairs = self._backend.array_type, zip(parameters, args, strict=True)
        converted = [p.convert(name, i, value, kind) for i, (p, value) in enumerate(pairs)]
        compiled.allow_shared(shared)
        return Prepared(name, compiled, grid, block, converted, shared, cooperative)

    def milliseconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Median time of a call: by CUDA events on a GPU, wall-clock time on the emulator.

        On a GPU ten calls stand between two events, so that the card has the next one waiting when it ends one. What
        takes the card less time than starting it takes the host, some 20 microseconds, shows the host's time.
        """
        call()
        return statistics.median(self._once(call) for _ in range(repeats))

    def _once(self, call: Callable[[], object]) -> float:
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        with self.on_device():
            events = self._backend.xp.cuda.Event(), self._backend.xp.cuda.Event()
            events[0].record()
            for _ in range(10):
                call()
            events[1].record()
            events[1].synchronize()
            return float(self._backend.xp.cuda.get_elapsed_time(*events)) / 10

    def _allocate(self, make: Callable[..., Array], shape: Size, dtype: Any) -> Array:
        full: Any = self._backend.xp.cuda.memory.OutOfMemoryError if self.is_cuda else MemoryError
        with self.on_device():
            try:
                return make(shape, dtype)
            except full:
                wanted = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
                message = f"{self.name}: {wanted / 1e6:,.0f} MB wanted{self._memory_left()}"
        raise DeviceMemoryError(f"{message}; take fewer cache blocks or sequences, or a smaller model")

    def _memory_left(self) -> str:
        if not self.is_cuda:
            return ""
        free, total = self._backend.xp.cuda.runtime.memGetInfo()
        return f", {free / 1e6:,.0f} of {total / 1e6:,.0f} MB free"
