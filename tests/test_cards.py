"""Cards older and newer than the compiler: what the GPU back end asks NVRTC for, and which bytes it would load.

NVRTC is the real one, reached through cuda-bindings; CuPy is a stand-in that writes down what it is given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rvllm import device, doctor, variants
from rvllm.device import DeviceError, Target, compile_target, cuda_available, resolve_device
from rvllm.gguf import GGUFFile
from rvllm.runtime import NoGpuError, Runtime
from rvllm.sampling import ParameterError
from rvllm.variants import NAMES, PACKED, choose_variant
from tests.fast_toy import write_fast_toy

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is for Linux")

PLAIN = ("rmsnorm", "softmax", "rope", "kv_write", "kv_gather4", "silu_mul", "argmax", "prepare_step", "sample")


class NvrtcError(RuntimeError):
    """A status that is not 0."""


class DriverError(RuntimeError):
    """What CuPy raises where the driver refuses something."""


def check(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise NvrtcError(status)
    return values[0] if values else None


class Nvrtc:
    """`cupy.cuda.nvrtc` on the real library. newest: as if it knew no card beyond; oldest: none before."""

    NVRTCError = NvrtcError

    def __init__(self, newest: int = 999, oldest: int = 0) -> None:
        self.options: list[tuple[str, ...]] = []
        self._range = range(oldest, newest + 1)

    def getVersion(self) -> tuple[int, int]:
        _, major, minor = nvrtc.nvrtcVersion()
        return major, minor

    def getSupportedArchs(self) -> tuple[int, ...]:
        return tuple(arch for arch in check(nvrtc.nvrtcGetSupportedArchs()) if arch in self._range)

    def createProgram(self, source: str, name: str, texts: list[bytes], names: list[bytes]) -> Any:
        return check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names))

    def compileProgram(self, program: Any, options: tuple[str, ...]) -> None:
        self.options.append(options)
        check(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))

    def _read(self, size: Callable[[Any], Any], get: Callable[[Any, bytearray], Any], program: Any) -> bytes:
        content = bytearray(check(size(program)))
        check(get(program, content))
        return bytes(content)

    def getCUBIN(self, program: Any) -> bytes:
        return self._read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)

    def getPTX(self, program: Any) -> bytes:
        return self._read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)

    def getProgramLog(self, program: Any) -> str:
        return self._read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()

    def destroyProgram(self, program: Any) -> None:
        check(nvrtc.nvrtcDestroyProgram(program))


class Card:
    """`cupy.cuda.Device` of a card of this capability; a context that does nothing."""

    def __init__(self, capability: int) -> None:
        self.compute_capability = str(capability)

    def __enter__(self) -> Card:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Cupy(ModuleType):
    """A machine with one card. `loaded` holds the bytes that would have gone to the driver, or it refuses them."""

    def __init__(self, capability: int, compiler: Any, refuses: bool = False) -> None:
        super().__init__("cupy")
        self.loaded: list[bytes] = []
        own = self

        class Module:
            def load(self, code: bytes) -> None:
                if refuses:
                    raise DriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
                own.loaded.append(code)

            def get_function(self, name: str) -> Any:
                return SimpleNamespace(ptr=0, name=name)

        card = {"name": b"Card", "major": capability // 10, "minor": capability % 10}
        card |= {"multiProcessorCount": 40, "sharedMemPerBlockOptin": 64 << 10}
        self.ndarray = np.ndarray
        self.cuda = SimpleNamespace(
            Device=lambda _index: Card(capability),
            driver=SimpleNamespace(CUDADriverError=DriverError, funcGetAttribute=lambda _attribute, _pointer: 0),
            function=SimpleNamespace(Module=Module),
            nvrtc=compiler,
            runtime=SimpleNamespace(getDeviceCount=lambda: 1, getDeviceProperties=lambda _index: card),
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Cupy]:
    """machine(capability, ...): one with such a card, one CuPy, and an empty cache."""
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(device, "driver_cuda_version", lambda: (12, 9))
    monkeypatch.setattr(device, "cupy_packages", lambda: {"cupy-cuda13x": "14.0.1"})

    def make(capability: int, compiler: Any = None, refuses: bool = False) -> Cupy:
        cupy = Cupy(capability, compiler or Nvrtc(), refuses)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        return cupy

    return make


def load(rt: Runtime, cupy: Cupy, kernel: str) -> tuple[str, bytes]:
    """The architecture asked for, and the bytes loaded."""
    rt.kernel(kernel)
    options = cupy.cuda.nvrtc.options[-1]
    return options[0].removeprefix("--gpu-architecture="), cupy.loaded[-1]


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_c98_a_card_that_the_compiler_knows_gets_machine_code(machine: Callable[..., Cupy], capability: int) -> None:
    cupy = machine(capability)
    rt = Runtime("cuda")
    for kernel in ("rmsnorm", "kv_write", "sample"):
        architecture, code = load(rt, cupy, kernel)
        assert architecture == f"sm_{capability}" and code.startswith(b"\x7fELF")
    assert rt.compute_capability == capability
    assert "PTX" not in cuda_available().reason


def newest_up_to(capability: int, newest: int = 999) -> int:
    """The newest architecture that the installed NVRTC knows up to this one."""
    return max(arch for arch in Nvrtc(newest).getSupportedArchs() if arch <= capability)


def needs(capability: int) -> None:
    """Skip where the installed NVRTC does not compile for such cards."""
    if capability not in Nvrtc().getSupportedArchs():
        pytest.skip(
            f"NVRTC {'.'.join(map(str, Nvrtc().getVersion()))} does not compile for {device.dotted(capability)}"
        )


@pytest.mark.parametrize(("capability", "newest"), [(130, 999), (120, 90), (100, 90), (91, 90), (88, 87)])
def test_a_card_newer_than_the_compiler_gets_ptx_for_the_newest_known(
    machine: Callable[..., Cupy], capability: int, newest: int
) -> None:
    cupy, known = machine(capability, Nvrtc(newest)), newest_up_to(capability, newest)
    rt = Runtime("cuda")
    architecture, code = load(rt, cupy, "rmsnorm")
    assert architecture == f"compute_{known}"
    assert f".target sm_{known}".encode() in code and code.endswith(b"\0")
    assert rt.compute_capability == known, "kernels may use what they are compiled for, no more"
    assert f"makes PTX for {device.dotted(known)}" in cuda_available().reason


def test_code_for_another_card_on_demand_is_ptx(machine: Callable[..., Cupy]) -> None:
    cupy = machine(90)
    architecture, code = load(Runtime("cuda", arch="75"), cupy, "rmsnorm")
    assert architecture == "compute_75" and b".target sm_75" in code


@pytest.mark.parametrize(("capability", "kernel"), [*((50, name) for name in PLAIN), (61, "rmsnorm"), (70, "sample")])
def test_a_card_without_tensor_cores_has_the_plain_kernels(
    machine: Callable[..., Cupy], capability: int, kernel: str
) -> None:
    needs(capability)
    cupy = machine(capability)
    architecture, code = load(Runtime("cuda"), cupy, kernel)
    assert architecture == f"sm_{capability}" and code.startswith(b"\x7fELF")
    assert "runs the plain model alone, the others need 7.5" in cuda_available().reason


@pytest.mark.parametrize("capability", [50, 61, 70, 72])
def test_without_tensor_cores_the_plain_variant_runs(
    machine: Callable[..., Cupy], tmp_path: Path, capability: int
) -> None:
    needs(capability)
    machine(capability)
    file = GGUFFile(write_fast_toy(tmp_path / "toy.gguf"))
    name, remark = choose_variant(None, "cuda", file, 16)
    assert name == "f32" and f"compute capability {device.dotted(capability)}; allowed 7.5 and up" in remark
    for name in NAMES:
        if name in PACKED:
            with pytest.raises(ParameterError, match=r"allowed 7\.5"):
                choose_variant(name, "cuda", file, 16)
        else:
            assert choose_variant(name, "cuda", file, 16) == (name, "")


@pytest.mark.parametrize("capability", [75, 86, 130])
def test_with_tensor_cores_the_fast_variant_runs(machine: Callable[..., Cupy], tmp_path: Path, capability: int) -> None:
    machine(capability)
    file = GGUFFile(write_fast_toy(tmp_path / "toy.gguf"))
    assert choose_variant(None, "cuda", file, 16) == ("graph", "")
    assert variants.why_not("graph", "emulator", file, variants.read_config(file), 16) == ""


# Neither --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "oldest"), [(35, 0), (70, 75)])
def test_a_card_older_than_all_that_the_compiler_knows(
    machine: Callable[..., Cupy], capability: int, oldest: int
) -> None:
    """The error names both versions and what helps; `auto` takes the CPU; the doctor says the same."""
    machine(capability, Nvrtc(oldest=oldest))
    with pytest.raises(NoGpuError) as caught:
        Runtime("cuda")
    version = ".".join(map(str, Nvrtc().getVersion()))
    first = Nvrtc(oldest=oldest).getSupportedArchs()[0]
    for words in (device.dotted(capability), f"NVRTC {version}", f"for {device.dotted(first)} to", "cupy-cuda12x"):
        assert words in str(caught.value)
    with pytest.raises(DeviceError, match=re.escape(f"NVRTC {version}")):
        resolve_device("cuda")
    assert resolve_device("auto") == "cpu"
    assert not doctor._check_cuda().ok and cuda_available().reason in str(doctor._check_cuda())


def test_a_driver_that_refuses_the_code(machine: Callable[..., Cupy]) -> None:
    machine(130, refuses=True)
    rt = Runtime("cuda")
    with pytest.raises(NoGpuError) as caught:
        rt.kernel("rmsnorm")
    version = ".".join(map(str, Nvrtc().getVersion()))
    for words in (
        "compute capability 13.0",
        f"PTX for {device.dotted(newest_up_to(130))}",
        f"NVRTC {version}",
        "UNSUPPORTED_PTX",
    ):
        assert words in str(caught.value)


def test_a_compiler_that_does_not_load(machine: Callable[..., Cupy]) -> None:
    def missing() -> Any:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12: OSError")

    machine(90, SimpleNamespace(getSupportedArchs=missing, getVersion=missing))
    assert not cuda_available() and "CuPy cannot use NVRTC" in cuda_available().reason
    assert resolve_device("auto") == "cpu"
    with pytest.raises(NoGpuError, match=r"libnvrtc\.so\.12"):
        Runtime("cuda")


def test_a_compiler_that_names_no_cards_is_taken_to_know_this_one() -> None:
    assert compile_target(SimpleNamespace(getVersion=lambda: (11, 0)), 86) == Target(86, is_ptx=False)
