"""Every kernel file compiles by NVRTC for a T4, an A100 and an H200."""

from __future__ import annotations

from importlib import resources

import pytest

from rvllm.runtime import headers_of, include_paths, source_text

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is for Linux")

KERNELS = sorted(f.name for f in resources.files("rvllm.kernels").iterdir() if f.name.endswith(".cu"))


def compile_cubin(source: str, name: str, arch: str) -> bytes:
    """Machine code, or AssertionError with the compiler's log."""
    headers = headers_of(source)
    texts, names = [h.encode() for h in headers.values()], [h.encode() for h in headers]
    options = [f"--gpu-architecture={arch}", "-std=c++17", *(f"-I{path}" for path in include_paths())]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles(name: str, arch: str) -> None:
    assert compile_cubin(source_text(name), name, arch)[:4] == b"\x7fELF"


def test_what_the_emulator_accepts_and_nvrtc_does_not() -> None:
    """Why both are needed: g++ knows INFINITY."""
    with pytest.raises(AssertionError, match='identifier "INFINITY" is undefined'):
        compile_cubin('extern "C" __global__ void bad(float* x) { *x = INFINITY; }', "bad.cu", "sm_75")


@pytest.mark.parametrize("name", sorted(f.name for f in resources.files("rvllm.kernels").iterdir() if ".cu" in f.name))
def test_kernel_files_are_short_and_say_what_they_do(name: str) -> None:
    lines = source_text(name).splitlines()
    assert len(lines) <= 70
    header = "\n".join(line for line in lines[:14] if line.startswith("//"))
    for word in ("Launch:", "Limit:") if name.endswith(".cu") else ("block",):
        assert word in header, f"{name}: its header lacks {word!r}"
