"""Compiling: errors, headers, cache, compilers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rvllm.emulator import CompileError, CompilerMissingError, Module, available, compiler
from rvllm.emulator.source import kernel_names, rewrite_dynamic_shared, without_comments

from .conftest import KERNELS, load

ADD = """#include "step.cuh"
extern "C" __global__ void add(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += STEP;
}
"""
ROOT = Path(__file__).parents[2]
needs_check_mode = pytest.mark.skipif(not available("check")[0], reason=available("check")[1])


def test_headers_are_given_as_text() -> None:
    for step in (1, 2):
        x = np.zeros(5, np.float32)
        Module(ADD, "add.cu", "fast", {"step.cuh": f"#define STEP {step}.0f\n"}).launch("add", 1, 8, [x, 5])
        assert (x == step).all()


@needs_check_mode
def test_header_lines_are_reported_as_the_headers_own() -> None:
    header = "\n\n__device__ inline float get(const float* p) {\n    return p[7];\n}\n"
    source = '#include "get.cuh"\nextern "C" __global__ void k(float* x) { x[0] = get(x); }\n'
    with pytest.raises(Exception, match=r"get\.cuh:4: k: out of bounds"):
        Module(source, "k.cu", headers={"get.cuh": header}).launch("k", 1, 1, [np.zeros(4, np.float32)])


@needs_check_mode
def test_compile_error_shows_the_kernel_line() -> None:
    source = 'extern "C" __global__ void k(float* x) {\n    x[0] = 1.0f\n}\n'
    with pytest.raises(CompileError) as caught:
        Module(source, "broken.cu")
    error = caught.value
    assert error.kernel == "broken.cu" and "broken.cu:2:" in error.log
    assert "    2 |     x[0] = 1.0f" in error.log


@needs_check_mode
def test_compile_error_lists_the_include_paths() -> None:
    with pytest.raises(CompileError) as caught:
        Module(ADD, "add.cu", headers={"other.cuh": ""})
    assert "step.cuh" in caught.value.log
    assert "other.cuh (in memory)" in caught.value.include_paths


def test_source_without_a_kernel() -> None:
    with pytest.raises(CompileError, match="it has no kernel"):
        Module("__device__ int x;\n", "empty.cu", "fast")


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="slow"):
        Module(ADD, "add.cu", "slow")


def test_comments_and_strings() -> None:
    source = 'int a; // extern "C" __global__ void no1(\n'
    source += '/* extern "C" __global__ void no2(\n*/ const char* s = "/*";\n'
    source += 'extern "C" __global__ void __launch_bounds__(32, 1)\nyes(int n) {}'
    assert kernel_names(source) == ["yes"]
    assert without_comments(source).count("\n") == source.count("\n")


@pytest.mark.parametrize(
    "declaration,pointer",
    [
        ("extern __shared__ float s[];", "float* s = (float*)emu::dynamic_shared();"),
        (
            "extern __shared__ __align__(16) unsigned char s[];",
            "unsigned char* s = (unsigned char*)emu::dynamic_shared();",
        ),
        ("extern __shared__\n  half2 s[ ];", "half2* s = (half2*)emu::dynamic_shared();\n"),
    ],
)
def test_dynamic_shared_memory_is_rewritten_in_place(declaration: str, pointer: str) -> None:
    assert rewrite_dynamic_shared(declaration) == pointer


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


USE = (
    "from rvllm.emulator import Module; import numpy as np; x = np.zeros(3, np.float32);"
    f"m = Module({ADD!r}, 'add.cu', 'fast', {{'step.cuh': '#define STEP 5'}});"
    "m.launch('add', 1, 3, [x, 3]); print(x)"
)


def test_a_second_process_does_not_start_the_compiler(tmp_path: Path) -> None:
    real = compiler.find_compiler().path  # under whose name the wrapper below is found
    log, wrapper = tmp_path / "log", tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho called >> {log}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    environment = {"CXX": str(wrapper), "RVLLM_CACHE": str(tmp_path / "cache")}
    for calls in (3, 3):  # the runtime, the kernel, the link; then none
        done = run_python(USE, **environment)
        assert "[5. 5. 5.]" in done.stdout, done.stderr
        assert log.read_text().count("called") == calls
    assert not list((tmp_path / "cache").rglob("build-*"))


def test_processes_that_build_the_same_do_not_clash(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: run_python(USE, RVLLM_CACHE=str(tmp_path)), range(2)))
    assert [result.stdout for result in results] == ["[5. 5. 5.]\n"] * 2


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerMissingError, match="apt-get install -y g"):
        Module(ADD, "add.cu")
    works, reason = available()
    assert not works and "needs a C++ compiler" in reason
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerMissingError, match="CXX=no-such-compiler"):
        Module(ADD, "add.cu")


def test_only_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available()[0]
    monkeypatch.setattr("sys.platform", "darwin")
    works, reason = available()
    assert not works and "Linux" in reason


def other_compilers() -> list[str]:
    """The compilers of this machine beside the default one."""
    names = ("g++-11", "g++-12", "g++-13", "g++-14", "clang++")
    default = Path(compiler.find_compiler().path).resolve() if available()[0] else None
    return [name for name in names if (path := shutil.which(name)) and Path(path).resolve() != default]


@pytest.mark.parametrize("name", other_compilers())
def test_other_compilers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", name)
    source = (KERNELS / "rmsnorm.cu").read_text()
    x, out = np.arange(200, dtype=np.float32).reshape(2, 100), np.zeros((2, 100), np.float32)
    for mode in ("fast", "check"):
        if mode == "check" and "clang" in name:
            with pytest.raises(CompilerMissingError, match="check mode relies on g"):
                Module(source, "rmsnorm.cu", mode)
            continue
        Module(source, "rmsnorm.cu", mode).launch("rmsnorm", 2, 64, [x, np.ones(100, np.float32), out, 100, 0.0])
        np.testing.assert_allclose(out, x / np.sqrt((x**2).mean(axis=1, keepdims=True)), rtol=1e-5)


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_portable_switch(mode: str) -> None:
    """The fiber switch of other CPUs: barriers, shuffles, preemption, and reports that leave by it."""
    x, partial, count = np.arange(400, dtype=np.float32), np.zeros(4, np.float32), np.zeros(1, np.uint32)
    y = x.copy()
    load("cooperative", mode, True).launch("row_mean_subtract", 4, 64, [y, partial, count, 400], cooperative=True)
    np.testing.assert_allclose(y, x - x.mean(), atol=1e-4)
    for _ in range(2):
        with pytest.raises(Exception, match="barrier divergence"):
            load("bugs_control", mode, True).launch("two_barriers", 1, 64, [x, y, 32])
