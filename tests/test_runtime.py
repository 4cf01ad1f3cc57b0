"""The runtime: what a launch takes and refuses, where sources come from, and machines that can't compute.

Cases C66 to C69 and C71. Machines without a GPU, and GPUs that fail, are fakes; the rest runs on the fixture `rt`.
"""

import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rvllm import device, emulator, ops, runtime
from rvllm.device import DeviceError
from rvllm.emulator import CompileError, EmulatorError, KernelArgumentError, LaunchConfigError
from rvllm.errors import RvllmError
from rvllm.runtime import (
    LIVE_SOURCES,
    DeviceMemoryError,
    NoGpuError,
    Runtime,
    headers_of,
    include_paths,
    parameters_of,
    source_text,
)

ROOT = Path(runtime.__file__).parents[1]
KERNELS = sorted(path.stem for path in (ROOT / "rvllm/kernels").glob("*.cu"))


@pytest.fixture
def write(monkeypatch):
    """write("name.cu", text): the text a notebook's cell would give, until the test ends."""
    return lambda filename, text: monkeypatch.setitem(LIVE_SOURCES, filename, text)


@pytest.fixture
def emu(rt):
    """The runtime, where it is the emulator."""
    if rt.is_cuda:
        pytest.skip("only the emulator has this")
    return rt


# Arguments (C69) ------------------------------------------------------------------------------------------------------


PROBE = """
extern "C" __global__ void probe(float* reals, int* wholes, unsigned* naturals, unsigned char* bytes,
                                 float eps, int n, unsigned m, unsigned char c) {
    reals[0] = eps;
    wholes[0] = n;
    naturals[0] = m;
    bytes[0] = c;
}
"""
DECLARED = ["float* reals", "int* wholes", "unsigned* naturals", "unsigned char* bytes",
            "float eps", "int n", "unsigned m", "unsigned char c"]  # fmt: skip


@pytest.fixture
def probe(rt, write):
    """Launch `probe`; `changes` replace arguments by position. Returns what arrived."""
    write("probe.cu", PROBE)
    arrays = [rt.zeros(1, dtype) for dtype in (np.float32, np.int32, np.uint32, np.uint8)]

    def call(changes=(), drop=0):
        args = [*arrays, 1.0, 2, 3, 4]
        for index, value in dict(changes).items():
            args[index] = value
        rt.launch("probe", 1, 1, args[: len(args) - drop])
        return [rt.download(array)[0] for array in arrays]

    return call


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (4, 1e-5), (4, np.float64(1e-5)), (4, np.float32(1e-5)), (4, np.float16(0.5)), (4, 3), (4, np.int64(-3)),
        (4, -0.0), (4, math.inf), (4, math.nan), (4, 2**31), (4, 1e-45),
        (5, 3), (5, np.int64(3)), (5, np.uint8(3)), (5, -(2**31)), (5, 2**31 - 1), (5, np.int64(-(2**31))),
        (6, 0), (6, 2**32 - 1), (6, np.int8(7)), (6, np.uint64(2**32 - 1)), (7, 255), (7, np.int64(0)),
    ],
    ids=repr,
)  # fmt: skip
def test_c69_numbers_become_the_declared_type(probe, index, value):
    """C69: Python's and NumPy's numbers of any width arrive as they are, and so do their neighbours."""
    expected = [np.float32(1), 2, 3, 4]
    expected[index - 4] = np.float32(value) if index == 4 else int(value)
    assert np.array_equal(probe({index: value}), expected, equal_nan=True)


def test_c69_a_double_beyond_floats_range_is_infinity(probe):
    """As in C; and without a warning of NumPy's in the middle of a launch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert probe({4: 1e300})[0] == np.inf


@pytest.mark.parametrize(
    ("index", "value"),
    [
        *((4, value) for value in (None, "1", 1j, np.complex128(1), np.complex64(1), np.bool_(True), [1.0], 10**400,
                                   np.zeros(1, np.float32), np.array(1.0), b"1")),
        *((5, value) for value in (True, False, np.bool_(True), 3.0, np.float64(3), "3", None, 2**31, -(2**31) - 1,
                                   np.int64(2**31), np.uint32(2**31), 10**30, np.array(3), np.zeros(1, np.int32))),
        *((6, value) for value in (-1, np.int8(-1), 2**32, True, 1.0)),
        *((7, value) for value in (-1, 256, np.int64(256), True, "a", b"a")),
    ],
    ids=lambda value: repr(value)[:24],
)  # fmt: skip
def test_c69_numbers_that_would_be_misread_are_refused(probe, index, value):
    """C69: the message names the kernel, the argument, its declaration and what came."""
    with pytest.raises(KernelArgumentError, match="probe: argument") as caught:
        probe({index: value})
    assert (caught.value.index, caught.value.expected) == (index, DECLARED[index])
    assert type(value).__name__ in caught.value.found or "array of" in caught.value.found
    assert isinstance(caught.value, RvllmError)


class Foreign:
    """An array of the other library: it has all that an array has, and its memory is elsewhere."""

    __module__ = "elsewhere.core"
    shape, dtype, size = (1,), np.dtype(np.float32), 1
    flags = SimpleNamespace(c_contiguous=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda rt: rt.zeros(1, np.float64), lambda rt: rt.zeros(1, np.float16), lambda rt: rt.zeros(1, np.int32),
        lambda rt: rt.zeros(8)[::2], lambda rt: rt.zeros((3, 4)).T, lambda rt: rt.zeros((4, 6))[:, :3],
        lambda rt: rt.zeros(5)[::-1],
        lambda rt: None, lambda rt: 1.0, lambda rt: [1.0], lambda rt: np.float32(1), lambda rt: Foreign(),
        lambda rt: memoryview(bytearray(4)),
        lambda rt: np.zeros(1, np.float32) if rt.is_cuda else Foreign(),
    ],
    ids=["float64", "float16", "int32", "every second", "transposed", "a corner", "backwards", "None", "a number",
         "a list", "a NumPy scalar", "a foreign array", "a memoryview", "NumPy's on a GPU"],
)  # fmt: skip
def test_arrays_of_another_kind_are_refused(rt, probe, make):
    """A pointer is all a kernel gets: nothing else would notice another dtype, gaps, or memory of another device."""
    with pytest.raises(KernelArgumentError, match=r"probe: argument 0 is declared float\* reals, got"):
        probe({0: make(rt)})


def test_the_message_says_what_an_array_is(rt, probe):
    with pytest.raises(KernelArgumentError, match=r"array of float32, shape \(4, 3\), not contiguous"):
        probe({0: rt.zeros((3, 4)).T})
    with pytest.raises(KernelArgumentError, match=r"elsewhere array of float32, shape \(1,\)"):
        probe({0: Foreign()})


@pytest.mark.skipif(os.environ.get("RVLLM_TEST_DEVICE", "emulator") != "emulator", reason="CuPy has no such dtype")
def test_bytes_in_the_wrong_order_are_another_dtype(rt, probe):
    with pytest.raises(KernelArgumentError):
        probe({0: rt.upload(np.zeros(1, ">f4"))})


@pytest.mark.parametrize("drop", [1, 7, 8])
def test_too_few_arguments(probe, drop):
    with pytest.raises(KernelArgumentError, match=rf"probe takes \(float\* reals, .*\), got {8 - drop} arguments"):
        probe(drop=drop)


def test_too_many_arguments(rt, write):
    write("nothing.cu", 'extern "C" __global__ void nothing() {}')
    rt.launch("nothing", 1, 1, [])
    with pytest.raises(KernelArgumentError, match="got 1 arguments"):
        rt.launch("nothing", 1, 1, [0])


def test_halves(rt, write):
    """float16 arrays and scalars; the header comes with the emulator, a toolkit or NVIDIA's wheels."""
    if rt.is_cuda and not include_paths():
        pytest.skip("no CUDA headers here")
    text = '#include <cuda_fp16.h>\nextern "C" __global__ void twice(half* x, half y) { x[0] = __hadd(x[0], y); }'
    write("twice.cu", text)
    x = rt.upload(np.array([1.5], np.float16))
    for y in (0.25, np.float64(0.25), np.float16(0.25), 1):
        rt.launch("twice", 1, 1, [x, y])
    assert rt.download(x)[0] == 3.25
    with pytest.raises(KernelArgumentError):
        rt.launch("twice", 1, 1, [rt.zeros(1), 1.0])


SIZES = """
extern "C" __global__ void sizes(int* out) {
    extern __shared__ int mine[];
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int threads = blockDim.x * blockDim.y * blockDim.z;
    mine[thread] = block * threads + thread;
    __syncthreads();
    out[block * threads + thread] = mine[threads - 1 - thread];
}
"""


@pytest.mark.parametrize(
    ("grid", "block"), [(3, 5), ((3,), (5,)), ((2, 3), (4, 2)), ((2, 3, 4), (2, 3, 4)), (1, (1, 1, 64)), ((1, 7), 1)]
)
@pytest.mark.parametrize("cooperative", [False, True])
def test_grid_block_and_shared_memory(rt, write, grid, block, cooperative):
    write("sizes.cu", SIZES)
    blocks, threads = int(np.prod(grid)), int(np.prod(block))
    out = rt.zeros((blocks, threads), np.int32)
    rt.launch("sizes", grid, block, [out], shared=4 * threads, cooperative=cooperative)
    assert np.array_equal(rt.download(out), np.arange(blocks * threads).reshape(blocks, threads)[:, ::-1])


@pytest.mark.parametrize(("grid", "block"), [(0, 1), (1, 0), (1, 1025), ((1, 65536), 1), (-1, 1), ((1, 1, 1, 1), 1)])
def test_sizes_that_no_gpu_accepts(emu, grid, block):
    x = emu.zeros(1)
    with pytest.raises(LaunchConfigError):
        emu.launch("residual_add", grid, block, [x, x, 1])


# Signatures -----------------------------------------------------------------------------------------------------------


def signature(parameters: str, name: str = "k", before: str = "") -> list[tuple[str, bool]]:
    source = f'{before}\nextern "C" __global__ void {name}({parameters}) {{ }}\n'
    return [(p.base, p.is_pointer) for p in parameters_of(source, name)]


POINTER, SCALAR = ("float", True), ("int", False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("  \n ", []),
        ("float* x, int n", [POINTER, SCALAR]),
        ("const float* __restrict__ x,const int n", [POINTER, SCALAR]),
        ("float *x,\n\n   int\n n", [POINTER, SCALAR]),
        ("float const * const x, volatile int n", [POINTER, SCALAR]),
        ("float*x, int n", [POINTER, SCALAR]),
        ("const float* x,  // the input, float [n, (m)]\n    int n  /* rows,\n columns) */", [POINTER, SCALAR]),
        ("/* int m, */ float* x, // int k,\n int n", [POINTER, SCALAR]),
        ("unsigned char* codes, unsigned n, half* h, half s, const unsigned* u",
         [("unsigned char", True), ("unsigned", False), ("half", True), ("half", False), ("unsigned", True)]),
    ],
)  # fmt: skip
def test_signatures(text, expected):
    assert signature(text) == expected


@pytest.mark.parametrize(
    "before",
    [
        'extern "C" __global__ void k2(double d) {}\nextern "C" __global__ void k_(float x) {}',
        "// __global__ void k(float y) {",
        "/* __global__ void k(float y); */",
        '__device__ float k1(float v) { return v; }\nextern "C" __global__ void other(float a) { k1(a); }',
    ],
)
def test_several_kernels_in_a_file(before):
    """Names that begin alike, comments that mention the kernel, calls in another kernel's body."""
    assert signature("float* x, int n", before=before) == [POINTER, SCALAR]


@pytest.mark.parametrize(
    "qualifiers", ["__launch_bounds__(256) void", "void __launch_bounds__(256, 2)", "void\n", "static void"]
)
def test_words_between_global_and_the_name(qualifiers):
    source = f'extern "C" __global__ {qualifiers} k(float* x, int n) {{}}'
    assert [(p.base, p.is_pointer) for p in parameters_of(source, "k")] == [POINTER, SCALAR]


@pytest.mark.parametrize(
    "parameter", ["double x", "long long n", "float4* x", "const char* text", "Thing t", "float** rows", "float x[4]"]
)
def test_types_that_no_argument_fits(parameter):
    """What can't be converted is named, rather than passed as something else."""
    with pytest.raises(LaunchConfigError, match="known types: float, int") as caught:
        signature(f"int n, {parameter}")
    assert parameter in str(caught.value)


def test_a_kernel_that_is_not_there(rt, write):
    with pytest.raises(LaunchConfigError, match=r"no_such\.cu: no such kernel file"):
        rt.launch("no_such", 1, 1, [])
    write("wrong.cu", 'extern "C" __global__ void right(int n) {}')
    with pytest.raises(LaunchConfigError, match=r"wrong\.cu defines no kernel.* void wrong"):
        rt.launch("wrong", 1, 1, [1])


def test_a_kernel_without_extern_c_is_an_error_in_words(rt, write):
    """Its name would be mangled, and no launch would find it."""
    write("mangled.cu", "__global__ void mangled(int n) {}")
    with pytest.raises(RvllmError, match="extern"):
        rt.launch("mangled", 1, 1, [1])


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_of_the_package_can_be_read(name):
    assert parameters_of(source_text(f"{name}.cu"), name)


# Live sources ---------------------------------------------------------------------------------------------------------


def constant(value: str, include: str = "") -> str:
    return f'{include}\nextern "C" __global__ void put(int* out) {{ out[0] = {value}; }}'


@pytest.fixture
def put(rt):
    def call():
        out = rt.zeros(1, np.int32)
        rt.launch("put", 1, 1, [out])
        return int(rt.download(out)[0])

    return call


def test_an_edit_takes_effect_at_the_next_launch(rt, write, put):
    for value in (1, 2, 1):
        write("put.cu", constant(str(value)))
        assert put() == value
    assert rt.kernel("put") is rt.kernel("put"), "compiled once until something changes"


def test_so_does_an_edit_of_a_header_that_another_header_includes(write, put):
    write("put.cu", constant("OUTER", '#include "outer.cuh"'))
    write("outer.cuh", '#pragma once\n#include "inner.cuh"\n#define OUTER (INNER + 1)')
    for value in (1, 5):
        write("inner.cuh", f"#pragma once\n#define INNER {value}")
        assert put() == value + 1
    write("outer.cuh", "#pragma once\n#define OUTER 9")
    assert put() == 9


def test_an_edited_signature_is_the_one_that_counts(rt, write, put):
    write("put.cu", constant("1"))
    assert put() == 1
    write("put.cu", 'extern "C" __global__ void put(int* out, int n) { out[0] = n; }')
    with pytest.raises(KernelArgumentError, match=r"put takes \(int\* out, int n\), got 1"):
        put()


def test_a_cell_goes_before_the_package_and_the_package_comes_back(rt, monkeypatch):
    x = rt.upload(np.ones(3, np.float32))
    with monkeypatch.context() as patch:
        body = "if (threadIdx.x < n) x[threadIdx.x] = 7;"
        text = f'extern "C" __global__ void residual_add(float* x, const float* y, int n) {{ {body} }}'
        patch.setitem(LIVE_SOURCES, "residual_add.cu", text)
        ops.residual_add(rt, x, rt.zeros(3))
    assert rt.download(x).tolist() == [7, 7, 7]
    ops.residual_add(rt, x, x)
    assert rt.download(x).tolist() == [14, 14, 14]


def test_headers():
    assert list(headers_of(source_text("softmax.cu"))) == ["warp.cuh"]
    assert headers_of(source_text("residual_add.cu")) == {}
    with pytest.raises(LaunchConfigError, match=r"gone\.cuh"):
        headers_of('#include "gone.cuh"')


def test_headers_that_include_each_other_end(write):
    write("a.cuh", '#pragma once\n#include "b.cuh"')
    write("b.cuh", '#pragma once\n#include "a.cuh"')
    assert set(headers_of('#include "a.cuh"')) == {"a.cuh", "b.cuh"}


@pytest.mark.parametrize("text", ['// #include "gone.cuh"', '/* once:\n#include "gone.cuh" */'])
def test_an_include_in_a_comment_is_none(text):
    assert headers_of(text) == {}


@pytest.mark.parametrize("text", ['#include"warp.cuh"', '# include "warp.cuh"', '#include\t"warp.cuh"'])
def test_an_include_may_be_spaced_as_c_allows(text):
    assert list(headers_of(text)) == ["warp.cuh"]


# Compile errors (C71) -------------------------------------------------------------------------------------------------


def test_a_compile_error_shows_kernel_line_and_include_paths(rt, write, put):
    """C71: and the next edit is compiled as if nothing had been."""
    write("mine.cuh", "#pragma once")
    write("put.cu", constant("1 +\n  nonsense", '#include "mine.cuh"'))
    with pytest.raises(CompileError) as caught:
        put()
    message = str(caught.value)
    assert message.startswith("put.cu does not compile")
    assert re.search(r"put\.cu[:(]3\b", caught.value.log), caught.value.log
    assert "nonsense" in caught.value.log
    assert "mine.cuh" in message.rpartition("include paths tried:")[2]
    write("put.cu", constant("8"))
    assert put() == 8


def toolkit(folder: Path) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "include/cuda_fp16.h").touch()
    return folder


def test_c71_include_paths(monkeypatch, tmp_path):
    """C71: the toolkit that CUDA_PATH names comes first; folders without the headers are left out."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    usual = include_paths()
    assert all(Path(path, "cuda_fp16.h").is_file() for path in usual)
    (tmp_path / "empty").mkdir()
    for value in ("", str(tmp_path / "empty"), str(tmp_path / "missing")):
        monkeypatch.setenv("CUDA_PATH", value)
        assert include_paths() == usual
    monkeypatch.setenv("CUDA_PATH", str(toolkit(tmp_path / "12.4")))
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "11.8")))
    first = [str(tmp_path / version / "include") for version in ("12.4", "11.8")]
    assert include_paths() == [*first, *usual]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "12.4"))
    assert include_paths() == [first[0], *usual]


def kernels_with_defines(capability: int) -> list[tuple[str, dict[str, object]]]:
    """Every kernel of the package once, with macros that some model launches it with on a card like this one."""
    from tests.test_nvrtc import CARDS, model_launches

    card = max((card for card in CARDS.values() if int(card.arch[3:]) <= capability), key=lambda card: card.arch)
    defines = {launch.name: dict(launch.defines) for launch in model_launches(card)}
    return [(name, defines.get(name, {})) for name in KERNELS]


@pytest.mark.parametrize("cuda_path", [None, "empty"])
def test_c71_all_kernels_compile_in_a_fresh_process(rt, tmp_path, cuda_path):
    """C71: without a toolkit's path, and with one that names an empty folder; nothing is in the cache.

    Each with macros that a model launches it with: the texts of part IV leave sizes open.
    """
    if not rt.is_cuda:
        pytest.skip("NVRTC needs a GPU's CuPy")
    kernels = kernels_with_defines(rt.compute_capability)
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_PATH", "CUDA_HOME")}
    environment |= {
        "RVLLM_CACHE": str(tmp_path),
        "CUPY_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if cuda_path:
        environment["CUDA_PATH"] = str(tmp_path)
    code = f"from rvllm.runtime import Runtime\nrt = Runtime('cuda')\nfor kernel in {kernels}: rt.kernel(*kernel)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "cubin").rglob("*.cubin"))) == len(KERNELS)


# A GPU that is a fake -------------------------------------------------------------------------------------------------


class FakeCard:
    """cupy.cuda.Device."""

    compute_capability = "75"

    def __init__(self, index):
        self.index = index

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None


class FakeCupy(SimpleNamespace):
    """What the runtime uses of CuPy. `log` makes every compilation fail; `full` every allocation.

    static: bytes of shared memory that every kernel declares; `attributes` gets those that are set.
    """

    def __init__(self, count=1, log="", full=False, static=0):
        out_of_memory = type("OutOfMemoryError", (MemoryError,), {})
        error = type("NVRTCError", (RuntimeError,), {})
        launches, attributes, self.compiled, self.destroyed = [], [], [], 0
        self.launches, self.attributes = launches, attributes

        def get_count():
            if isinstance(count, Exception):
                raise count
            return count

        def allocate(shape, dtype):
            if full:
                raise out_of_memory
            return np.zeros(shape, dtype)

        def compile_program(program, options):
            self.compiled.append((program, options))
            if log:
                raise error

        def destroy(_program):
            self.destroyed += 1

        class Module:
            def load(self, cubin):
                assert cubin == b"cubin"

            def get_function(self, name):
                def function(grid, block, args, shared, enable_cooperative_groups):
                    launches.append((name, grid, block, args, shared, enable_cooperative_groups))

                function.ptr = 0
                return function

        card = {"name": b"Tesla T4", "major": 7, "minor": 5, "multiProcessorCount": 40, "sharedMemPerBlockOptin": 65536}
        super().__init__(
            ndarray=np.ndarray,
            empty=allocate,
            zeros=allocate,
            cuda=SimpleNamespace(
                Device=FakeCard,
                function=SimpleNamespace(Module=Module),
                memory=SimpleNamespace(OutOfMemoryError=out_of_memory),
                driver=SimpleNamespace(
                    funcGetAttribute=lambda attribute, _ptr: {runtime.STATIC_SHARED: static}[attribute],
                    funcSetAttribute=lambda _ptr, *pair: attributes.append(pair),
                ),
                runtime=SimpleNamespace(
                    getDeviceCount=get_count,
                    getDeviceProperties=lambda _index: card,
                    memGetInfo=lambda: (123_000_000, 16_000_000_000),
                ),
                nvrtc=SimpleNamespace(
                    NVRTCError=error,
                    getVersion=lambda: (12, 4),
                    createProgram=lambda *program: program,
                    compileProgram=compile_program,
                    getCUBIN=lambda _program: b"cubin",
                    getProgramLog=lambda _program: log,
                    destroyProgram=destroy,
                ),
            ),
        )


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without CuPy, with a driver for CUDA 12.4, not on Colab, with an empty cache."""
    for name in ("CUDA_VISIBLE_DEVICES", "COLAB_RELEASE_TAG", "CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "driver_cuda_version", lambda: (12, 4))
    site = tmp_path / "site"
    monkeypatch.setattr(device.metadata, "distributions", lambda: device.metadata.Distribution.discover(path=[site]))
    monkeypatch.setitem(sys.modules, "cupy", None)
    return site


def install(site: Path, name: str) -> None:
    info = site / f"{name.replace('-', '_')}-13.4.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 13.4.0\n")


@pytest.fixture
def fake(machine, monkeypatch):
    """fake(...): a machine with a GPU of that kind."""

    def make(**options):
        cupy = FakeCupy(**options)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        return cupy

    return make


def test_a_gpu_is_named_and_gets_numbers_of_the_declared_type(fake, write):
    """C69 without a GPU: CuPy would pass a Python float as 8 bytes; the runtime hands it NumPy's 4."""
    cupy = fake(count=2)
    rt = Runtime("cuda:1")
    assert (rt.is_cuda, rt.name) == (True, "Tesla T4, compute capability 7.5")
    write("k.cu", 'extern "C" __global__ void k(float* x, float eps, int n, unsigned char c) {}')
    x = rt.empty(3)
    rt.launch("k", (2, 3), 32, [x, 1e-5, np.int64(3), 4], shared=8, cooperative=True)
    ((name, grid, block, args, shared, cooperative),) = cupy.launches
    assert (name, grid, block, shared, cooperative) == ("k", (2, 3, 1), (32, 1, 1), 8, True)
    assert args[0] is x
    assert [type(a) for a in args[1:]] == [np.float32, np.int32, np.uint8]
    assert args[1:] == (np.float32(1e-5), 3, 4)


@pytest.mark.parametrize(
    ("static", "asked"), [(0, [48 << 10]), (6400, [(42 << 10) - 300, (42 << 10)]), (48 << 10, [0, 16, 1024, 512])]
)
def test_static_and_dynamic_shared_memory_count_together(fake, write, static, asked):
    """Above 48 KiB in all a launch must have asked, once for each larger size."""
    cupy = fake(static=static)
    write("k.cu", 'extern "C" __global__ void k(int n) {}')
    rt, granted = Runtime("cuda"), 0
    for dynamic in asked:
        rt.launch("k", 1, 32, [1], shared=dynamic)
        granted = max(granted, dynamic) if static + dynamic > 48 << 10 else granted
        assert ([value for _, value in cupy.attributes] or [0])[-1] == granted
    assert len(set(cupy.attributes)) == len(cupy.attributes)
    assert {attribute for attribute, _ in cupy.attributes} <= {runtime.MAX_DYNAMIC_SHARED}


SHARES = """extern "C" __global__ void shares(float* x) {
    __shared__ float fixed[100];
    extern __shared__ float rest[];
    fixed[threadIdx.x] = rest[threadIdx.x] = 1.0f;
    x[threadIdx.x] = fixed[threadIdx.x] + rest[threadIdx.x];
}"""


def test_more_shared_memory_than_there_is(rt, write):
    """Found and allowed, before the kernel starts: on a card, and the same on the emulator."""
    write("shares.cu", SHARES)
    x, most = rt.zeros(32), rt.max_shared - 400
    rt.launch("shares", 1, 32, [x], shared=most - 64)  # some C++ compilers add a few bytes to the static part
    assert (rt.download(x) == 2).all()
    words = r"shares: found [\d,]+ bytes of shared memory a block, 4\d\d static and"
    with pytest.raises(LaunchConfigError, match=rf"{words} {most + 4:,} dynamic; allowed: {rt.max_shared:,}"):
        rt.launch("shares", 1, 32, [x], shared=most + 4)


def test_a_card_has_less_shared_memory_than_asked(fake, write):
    cupy = fake(static=400)
    write("k.cu", 'extern "C" __global__ void k(int n) {}')
    with pytest.raises(LaunchConfigError, match=r"found 65,540 bytes.* 65,140 dynamic; allowed: 65,536"):
        Runtime("cuda").launch("k", 1, 32, [1], shared=65_140)
    assert (cupy.launches, cupy.attributes) == ([], [])


def test_more_static_shared_memory_than_any_card_gives(rt, write):
    """A GPU's compiler says so in its own words."""
    write("shares.cu", SHARES.replace("fixed[100]", "fixed[12289]"))
    with pytest.raises(CompileError, match=r"49,1\d\d|0xc010"):
        rt.launch("shares", 1, 32, [rt.zeros(32)], shared=128)


def test_nvrtc_compiles_for_the_card_and_once(fake, write, tmp_path):
    """The cubin is kept by all that goes into it: source, headers, architecture."""
    cupy = fake()
    write("k.cu", '#include "mine.cuh"\nextern "C" __global__ void k(int n) {}')
    for header, compiled in (("// 1", 1), ("// 1", 1), ("// 2", 2)):
        write("mine.cuh", header)
        Runtime("cuda").launch("k", 1, 1, [1])
        assert (len(cupy.compiled), cupy.destroyed) == (compiled, compiled)
    (source, name, texts, names), options = cupy.compiled[0]
    assert (name, texts, names) == ("k.cu", [b"// 1"], [b"mine.cuh"])
    assert "--gpu-architecture=sm_75" in options
    assert len(list((tmp_path / "cache/cubin").iterdir())) == 2


@pytest.mark.parametrize("cuda_path", [None, "empty", "toolkit"])
def test_c71_a_header_that_is_missing(fake, write, monkeypatch, tmp_path, cuda_path):
    """C71: NVRTC's log, the include paths tried and, where there is none, what to install."""
    log = "k.cu(1): catastrophic error: cannot open source file cuda_fp16.h"
    cupy = fake(log=log)
    monkeypatch.setattr(runtime, "util", SimpleNamespace(find_spec=lambda _name: None))
    monkeypatch.setattr(runtime, "include_paths", lambda own=include_paths: [p for p in own() if "/usr/local" not in p])
    if cuda_path:
        folder = tmp_path / cuda_path
        monkeypatch.setenv("CUDA_PATH", str(toolkit(folder) if cuda_path == "toolkit" else folder))
    write("k.cu", '#include <cuda_fp16.h>\nextern "C" __global__ void k(int n) {}')
    with pytest.raises(CompileError) as caught:
        Runtime("cuda").launch("k", 1, 1, [1])
    message = str(caught.value)
    assert message.startswith("k.cu does not compile")
    assert log in message
    assert "include paths tried" in message
    assert cupy.destroyed == 1
    assert not list(tmp_path.glob("cache/cubin/*")), "nothing half done in the cache"
    if cuda_path == "toolkit":
        assert str(folder / "include") in message
        assert f"-I{folder / 'include'}" in cupy.compiled[0][1]
    else:
        assert re.search("pip install|CUDA_PATH", message), f"no remedy in: {message}"


def test_device_memory_error_says_how_much_and_what_helps(fake):
    fake(full=True)
    rt = Runtime("cuda")
    for make in (rt.empty, rt.zeros):
        with pytest.raises(DeviceMemoryError) as caught:
            make((1000, 1000, 500), np.float32)
        message = str(caught.value)
        assert message.startswith("Tesla T4")
        assert "2,000 MB wanted, 123 of 16,000 MB free" in message
        assert "fewer cache blocks" in message
        assert caught.value.__cause__ is None


def test_what_no_device_has_room_for(rt):
    with pytest.raises(DeviceMemoryError):
        rt.empty(1 << 50)


# No GPU (C66, C67, C68) -----------------------------------------------------------------------------------------------


NO_GPU = {
    "C66 two packages": (
        ("cupy-cuda11x", "cupy-cuda12x"), None, {},
        ["cupy-cuda11x 13.4.0, cupy-cuda12x 13.4.0", "pip uninstall -y cupy-cuda11x cupy-cuda12x"],
    ),
    "C67 Colab": ((), FakeCupy(count=0), {"COLAB_RELEASE_TAG": "x"}, ["Runtime > Change runtime type > T4 GPU"]),
    "C67 hidden": ((), FakeCupy(count=RuntimeError("cudaErrorNoDevice")), {"CUDA_VISIBLE_DEVICES": ""},
                   ["hides every GPU", "unset CUDA_VISIBLE_DEVICES"]),
    "C68 raises": ((), FakeCupy(count=RuntimeError("cudaErrorUnknown: unknown error")), {}, ["cudaErrorUnknown"]),
    "C68 none": ((), FakeCupy(count=0), {}, ["the driver shows no GPU"]),
    "C68 a stub": ((), SimpleNamespace(), {}, ["no attribute 'cuda'"]),
    "not installed": ((), None, {}, ["CuPy is not installed", "python -m pip install cupy-cuda12x"]),
}  # fmt: skip


@pytest.mark.parametrize(("packages", "cupy", "environment", "words"), NO_GPU.values(), ids=NO_GPU)
def test_no_gpu_error_has_reason_and_remedy(machine, monkeypatch, packages, cupy, environment, words):
    """C66, C67, C68: a named error in one sentence or two; "auto" goes to the emulator instead."""
    for name in packages:
        install(machine, name)
    if cupy is None:  # as on a machine without it; `None` in sys.modules alone reads as a broken installation
        monkeypatch.delitem(sys.modules, "cupy")
        monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "cupy").exists()])
    else:
        monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(NoGpuError) as caught:
            Runtime(name)
        message = str(caught.value)
        assert all(part in message for part in words), message
        assert message.endswith(".")
        assert not re.search(r"\.\s*\.|\n", message)
    assert isinstance(caught.value, DeviceError)
    if emulator.available("check")[0]:
        assert not Runtime("auto").is_cuda


@pytest.mark.parametrize("index", [2, 3, 99])
def test_a_gpu_that_is_not_there(fake, index):
    fake(count=2)
    with pytest.raises(NoGpuError, match=rf"cuda:{index}: found 2 GPU\(s\); allowed: cuda:0 to cuda:1"):
        Runtime(f"cuda:{index}")


@pytest.mark.parametrize(
    "name", ["gpu", "", "cpu", "CUDA", "cuda:x", "cuda:-1", "cuda:", "cuda:1:2", "cuda:²", "emulator:1", "emulator:",
             " cuda", "cuda:0\n", None, 0],
)  # fmt: skip
def test_device_names_that_mean_nothing(fake, name):
    fake(count=2)
    with pytest.raises(LaunchConfigError, match="allowed: cuda, cuda:N, emulator, auto"):
        Runtime(name)


@pytest.mark.parametrize("mode", ["slow", "", None, "Check"])
def test_modes_that_mean_nothing(mode):
    with pytest.raises(LaunchConfigError, match="modes check and fast"):
        Runtime("emulator", mode)


def test_names(emu):
    assert emu.name == "emulator, check mode"
    assert Runtime("emulator", "check").name == emu.name


@pytest.mark.parametrize("module", ["rvllm", "rvllm.runtime", "rvllm.cuda_model", "rvllm.llm", "rvllm.cli"])
def test_import_needs_no_cupy(module):
    """C68: not even a try, which would take a second where it is installed."""
    code = f"import sys; sys.modules['cupy'] = None; import {module}; assert 'cupy.cuda' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# Arrays ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(24, dtype=np.int32).reshape(2, 3, 4).T,
        np.arange(10, dtype=np.float32)[::-3], np.zeros((0, 4), np.float32), np.array(5, np.int32),
        np.arange(4, dtype=np.uint8), np.array([1.5, np.nan, -np.inf], np.float16),
        np.broadcast_to(np.float32(2), (3, 4)), np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.exp(1j * np.arange(3)).astype(np.complex64).imag,
    ],
    ids=["plain", "transposed", "backwards", "empty", "no axis", "bytes", "half", "broadcast", "Fortran", "imag"],
)  # fmt: skip
def test_upload_and_download_are_copies(rt, array):
    there = rt.upload(array)
    assert there.flags.c_contiguous
    assert (there.shape, there.dtype) == (array.shape, array.dtype)
    back = rt.download(there)
    assert type(back) is np.ndarray
    assert np.array_equal(back, array, equal_nan=True)
    if array.size:
        back[...] = 1
        assert np.array_equal(rt.download(there), array, equal_nan=True), "download gave a view"


def test_an_upload_is_no_view_and_a_part_can_be_downloaded(rt):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    there = rt.upload(x)
    x[:] = 0
    assert rt.download(there[:, ::2]).tolist() == [[0, 2], [4, 6], [8, 10]]


def test_empty_and_zeros(rt):
    assert rt.empty(3).dtype == rt.zeros((1, 2)).dtype == np.float32
    assert rt.zeros((2, 3), np.int32).shape == (2, 3)
    assert not rt.download(rt.zeros(1000)).any()


# The emulator's own ---------------------------------------------------------------------------------------------------


def test_milliseconds_counts_calls(rt):
    calls = []
    x = rt.zeros(32)

    def call():
        calls.append(1)
        ops.residual_add(rt, x, x)

    assert rt.milliseconds(call, repeats=5) > 0
    assert len(calls) == 1 + 5 * (10 if rt.is_cuda else 1), "one to warm up; ten in a row keep a card busy"


def test_milliseconds_is_the_median(emu, monkeypatch):
    now = 0.0
    durations = iter([9.0, 0.004, 0.001, 0.007, 0.002, 0.003])  # the first call does not count

    def call():
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(runtime.time, "perf_counter", lambda: now)
    assert emu.milliseconds(call, repeats=5) == pytest.approx(3)


def test_counters_are_those_of_the_last_launch(emu, monkeypatch):
    monkeypatch.setattr(emu, "counting", True)
    x = emu.zeros(64)
    ops.residual_add(emu, x, x)
    counters = emu.counters
    assert (counters.global_reads, counters.global_read_bytes, counters.global_writes) == (128, 512, 64)
    assert (counters.sectors, counters.sectors_per_request) == (24, 4.0)
    ops.softmax(emu, x)
    assert emu.counters.barriers > 0
    monkeypatch.setattr(emu, "counting", False)
    ops.residual_add(emu, x, x)
    assert emu.counters is None


def test_fast_mode_counts_nothing_and_still_runs():
    works, reason = emulator.available("fast")
    if not works:
        pytest.skip(reason)
    fast = Runtime("emulator", "fast")
    fast.counting = True
    x = fast.upload(np.ones(5, np.float32))
    ops.residual_add(fast, x, x)
    assert (fast.download(x).tolist(), fast.counters) == ([2] * 5, None)


def test_reverse_runs_threads_backwards(emu, write, monkeypatch):
    write("order.cu", 'extern "C" __global__ void order(int* out, int* n) {'
                      " out[atomicAdd(n, 1)] = blockIdx.x * blockDim.x + threadIdx.x; }")  # fmt: skip
    for reverse in (False, True):
        monkeypatch.setattr(emu, "reverse", reverse)
        out = emu.zeros(12, np.int32)
        emu.launch("order", 3, 4, [out, emu.zeros(1, np.int32)])
        assert emu.download(out).tolist() == sorted(range(12), reverse=reverse)


def test_an_endless_kernel_ends_at_the_timeout(emu, write, monkeypatch):
    write("endless.cu", 'extern "C" __global__ void endless(volatile int* x) {\n    while (x[0] == 0) {}\n}')
    monkeypatch.setattr(emu, "timeout", 0.3)
    with pytest.raises(EmulatorError, match=r"endless\.cu:2: endless: timeout") as caught:
        emu.launch("endless", 1, 1, [emu.zeros(1, np.int32)])
    assert caught.value.kind == "timeout"
    x = emu.upload(np.ones(3, np.float32))
    ops.residual_add(emu, x, x)
    assert emu.download(x).tolist() == [2, 2, 2]


def test_an_error_names_line_block_and_thread(emu, write):
    write("beyond.cu", 'extern "C" __global__ void beyond(float* x, int n) {\n    if (threadIdx.x <= n)\n'
                       "        x[threadIdx.x] = 1.0f;\n}")  # fmt: skip
    with pytest.raises(EmulatorError, match=r"beyond\.cu:3: beyond: out of bounds: .*`x`") as caught:
        emu.launch("beyond", 1, 8, [emu.zeros(5), 5])
    assert (caught.value.block, caught.value.thread) == ((0, 0, 0), (5, 0, 0))


# Shapes that the ops refuse -------------------------------------------------------------------------------------------


def F(*shape):
    return shape, np.float32


def I(*shape):  # noqa: E743
    return shape, np.int32


REFUSED = [
    ("residual_add", F(2, 3), F(3, 2)), ("residual_add", F(6), F(7)), ("residual_add", F(2, 3), F(6)),
    ("rope", F(2, 3, 8), F(2, 3), F(2, 4)), ("rope", F(2, 3, 8), F(2, 4), F(3, 4)), ("rope", F(2, 3, 8), F(4), F(4)),
    ("rope", F(2, 3, 7), F(2, 3), F(2, 3)), ("rope", F(2, 8), F(2, 4), F(2, 4)),
    ("silu_mul", F(2, 3), F(2, 4)), ("silu_mul", F(2, 3), F(6)),
    ("mask_add", F(2, 1, 3, 4), I(2, 4)), ("mask_add", F(2, 1, 3, 4), I(1, 3)), ("mask_add", F(2, 1, 3, 4), I(6)),
    ("mask_add", F(2, 3, 4), I(2, 3)),
    ("last_row", F(2, 3, 4), I(3)), ("last_row", F(2, 3, 4), I(2, 1)), ("last_row", F(6, 4), I(6)),
    ("transpose_axes12", F(2, 3, 4)), ("transpose_axes12", F(2, 3, 4, 5, 6)),
    ("rmsnorm", F(2, 3), F(4), 1e-5), ("rmsnorm", F(2, 3), F(1, 3), 1e-5), ("rmsnorm", F(3), F(3), 1e-5),
    ("softmax", F()),
    ("embedding", F(5, 4), I(2, 3)), ("embedding", F(20), I(2)),
    ("kv_write", F(3, 2, 4), F(3, 2, 5), F(2, 4, 2, 4), F(2, 4, 2, 4), I(3)),
    ("kv_write", F(3, 2, 4), F(3, 2, 4), F(2, 4, 1, 4), F(2, 4, 1, 4), I(3)),
    ("kv_write", F(3, 2, 4), F(3, 2, 4), F(2, 4, 2, 4), F(2, 5, 2, 4), I(3)),
    ("kv_write", F(3, 2, 4), F(3, 2, 4), F(8, 2, 4), F(8, 2, 4), I(3)),
    ("kv_write", F(3, 2, 4), F(3, 2, 4), F(2, 4, 2, 4), F(2, 4, 2, 4), I(4)),
    ("kv_write", F(3, 2, 4), F(2, 2, 4), F(2, 4, 2, 4), F(2, 4, 2, 4), I(3)),
    ("kv_write", F(3, 2, 4), F(3, 2, 4), F(2, 4, 2, 5), F(2, 4, 2, 4), I(3)),
    ("kv_write", F(3, 2, 4), F(3, 2, 4), F(2, 4, 2, 4), F(8, 2, 4), I(3)),
    ("kv_write", F(3, 2, 4), F(3, 2, 4), F(2, 4, 2, 4), F(2, 4, 2, 4), I(3, 1)),
    ("kv_write", F(3, 8), F(3, 8), F(2, 4, 2, 4), F(2, 4, 2, 4), I(3)),
    ("kv_gather", F(6, 4, 2, 3), I(2, 3), I(3), 12), ("kv_gather", F(6, 4, 2, 3), I(2, 3), I(2), 13),
    ("kv_gather", F(6, 4, 2, 3), I(2, 3), I(2), -1), ("kv_gather", F(6, 4, 6), I(2, 3), I(2), 12),
    ("kv_gather", F(6, 4, 2, 3), I(6), I(2), 12),
]  # fmt: skip


def devices(rt, specs):
    return [rt.zeros(*spec) if isinstance(spec, tuple) else spec for spec in specs]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]} {[c[0] for c in case[1:] if type(c) is tuple]}")
def test_ops_refuse_arrays_that_do_not_fit(rt, case):
    """A kernel would read or write past an end, or take one axis for another."""
    name, *specs = case
    with pytest.raises(ops.ShapeError, match=name):
        getattr(ops, name)(rt, *devices(rt, specs))


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("residual_add", [F(2), I(2)]), ("rmsnorm", [F(2, 3), ((3,), np.float64), 1e-5]),
        ("embedding", [F(5, 4), ((2,), np.int64)]), ("silu_mul", [((2,), np.float16), ((2,), np.float16)]),
        ("last_row", [F(2, 3, 4), ((2,), np.int64)]), ("rmsnorm", [F(2, 3), F(3), "1e-5"]),
    ],
)  # fmt: skip
def test_ops_refuse_arrays_of_another_dtype(rt, name, specs):
    with pytest.raises(KernelArgumentError, match=f"{name}: argument"):
        getattr(ops, name)(rt, *devices(rt, specs))


@pytest.mark.parametrize("op", [ops.residual_add, ops.softmax, ops.transpose_axes12, ops.silu_mul])
def test_ops_refuse_arrays_with_gaps(rt, op):
    x = rt.zeros((2, 3, 4, 8))[..., ::2]
    with pytest.raises(KernelArgumentError, match="not contiguous"):
        op(rt, *([x] if op in (ops.softmax, ops.transpose_axes12) else [x, x]))
