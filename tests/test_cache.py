"""Files in the cache are looked at before they are used, and a cache that can't be used costs time alone."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from rvllm import cache, hub, random_weights
from rvllm.cache import CacheError, cached
from rvllm.device import Target
from rvllm.emulator import CompileError, available, compiler
from rvllm.gguf import GGUFFile
from rvllm.runtime import CudaBackend

ROOT = Path(__file__).parents[1]
CONTENT = bytes(range(256)) * 20
needs_compiler = pytest.mark.skipif(not available("fast")[0], reason=available("fast")[1])


def cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, min(length, path.stat().st_size - 1))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def swap(path: Path) -> None:
    """The content of another file: whole, but not this one."""
    path.write_bytes(b"another file")


DAMAGES = [cut(0), cut(100), cut(1000), flip, append, swap]
NAMES = ["0 bytes", "100 bytes", "1000 bytes", "a bit in the middle", "a byte too many", "another file"]
damages = pytest.mark.parametrize("damage", DAMAGES, ids=NAMES)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has warned of nothing and has made nothing for itself."""
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "cache"))
    cache._warned.clear()
    cache._temporary.cache_clear()
    return tmp_path / "cache"


class Builder:
    """Counts how often it is asked to build."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content, self.calls = content, 0

    def __call__(self, output: Path, _work: Path) -> None:
        self.calls += 1
        output.write_bytes(self.content)

    def get(self, key: object = "key") -> bytes:
        return cached("kind", key, ".bin", self, Path.read_bytes)


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.rglob(f"*{suffix}"))


def quiet() -> warnings.catch_warnings:
    return warnings.catch_warnings(action="error")


@damages
def test_a_damaged_file_is_made_anew_once(own_cache: Path, damage: Callable[[Path], None]) -> None:
    build = Builder()
    with quiet():
        assert build.get() == build.get() == CONTENT and build.calls == 1
    (path,) = files(own_cache, ".bin")
    damage(path)
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert build.get() == CONTENT
    with quiet():
        assert build.get() == CONTENT
    assert len(caught) == 1 and build.calls == 2
    assert files(own_cache, ".bin") == [path]


def test_two_files_that_changed_places_warn_once(own_cache: Path) -> None:
    one, two = Builder(b"one"), Builder(b"two")
    assert (one.get(1), two.get(2)) == (b"one", b"two")
    first, second = files(own_cache, ".bin")
    first.rename(own_cache / "aside")
    second.rename(first)
    (own_cache / "aside").rename(second)
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert (one.get(1), two.get(2)) == (b"one", b"two")
    assert (one.calls, two.calls, len(caught)) == (2, 2, 1)


def test_two_folders_that_changed_places_are_noticed(own_cache: Path) -> None:
    one, two = Builder(b"one"), Builder(b"two")
    assert (one.get(1), two.get(2)) == (b"one", b"two")
    first, second = (path.parent for path in files(own_cache, ".bin"))
    first.rename(own_cache / "aside")
    second.rename(first)
    (own_cache / "aside").rename(second)
    with pytest.warns(UserWarning, match="damaged"):
        assert (one.get(1), two.get(2)) == (b"one", b"two")


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_time_alone(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda a, b: full() if own_cache in a.parents else replace(a, b))
    build = Builder()
    with pytest.warns(UserWarning, match="No space left") as caught:
        assert [build.get(), build.get("another key")] == [CONTENT] * 2
    assert len(caught) == 1 and not files(own_cache, ".bin")


@pytest.mark.parametrize("place", ["file", "/proc/no/such/place", "/dev/null/cache"])
def test_a_cache_that_is_no_folder_costs_time_alone(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / place))
    build = Builder()
    with pytest.warns(UserWarning, match="set RVLLM_CACHE") as caught:
        assert build.get() == build.get() == CONTENT
    assert len(caught) == 1 and build.calls == 1, "made once for this process"


def test_no_home_folder_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("RVLLM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(UserWarning, match="no home folder"):
        assert Builder().get() == CONTENT


def test_a_read_only_cache_still_serves_what_it_has(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    build.get()
    monkeypatch.setattr(Path, "mkdir", full)
    with quiet():
        assert build.get() == CONTENT and build.calls == 1
    flip(files(own_cache, ".bin")[0])
    monkeypatch.setattr(Path, "unlink", full)
    monkeypatch.setattr(cache, "_temporary", lambda: SimpleNamespace(name=str(own_cache / "elsewhere")))
    with (
        pytest.warns(UserWarning, match="rvllm's cache"),
        pytest.raises(CacheError, match="neither the cache nor a temporary folder"),
    ):
        build.get()


def test_nothing_can_be_written_at_all_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.warns(UserWarning, match="rvllm's cache"), pytest.raises(CacheError, match="No space left on device"):
        cached("kind", "a key that no folder has", ".bin", Builder(), Path.read_bytes)


def test_a_file_removed_between_check_and_use_is_made_again(own_cache: Path) -> None:
    build, uses = Builder(), 0

    def use(path: Path) -> bytes:
        nonlocal uses
        uses += 1
        if uses == 1:
            shutil.rmtree(own_cache)
        return path.read_bytes()

    with quiet():
        assert cached("kind", "key", ".bin", build, use) == CONTENT
    assert (uses, build.calls) == (2, 2)


def test_threads_that_build_the_same_get_whole_files(own_cache: Path) -> None:
    """Each with other bytes, as compilers write the folder's name into what they make."""

    def get(number: int) -> bytes:
        return Builder(CONTENT + bytes([number])).get()

    with ThreadPoolExecutor(8) as pool, quiet():
        results = list(pool.map(get, range(40)))
    assert {result[:-1] for result in results} == {CONTENT}
    assert not list(own_cache.rglob("build-*"))


# The emulator's objects

USE = (
    "from rvllm.emulator import Module; import numpy as np; x = np.zeros(3, np.float32);"
    "m = Module('extern \"C\" __global__ void five(float* x) { x[threadIdx.x] += 5; }', 'five.cu', 'fast');"
    "m.launch('five', 1, 3, [x]); print(x)"
)


def run_python(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "RVLLM_CACHE": str(folder)} | environment
    return subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the runtime's object and a kernel's."""
    folder = tmp_path_factory.mktemp("compiled")
    done = run_python(folder)
    assert (done.stdout, done.stderr) == ("[5. 5. 5.]\n", "")
    return folder


@needs_compiler
@damages
def test_damaged_objects_are_compiled_anew(compiled: Path, own_cache: Path, damage: Callable[[Path], None]) -> None:
    """Loaded as it is, an object cut short ends the process by a bus error. The runtime's is linked anew."""
    shutil.copytree(compiled, own_cache)
    for path in files(own_cache, ".so") + files(own_cache, ".o"):
        damage(path)
    done = run_python(own_cache)
    assert done.stdout == "[5. 5. 5.]\n"
    assert done.stderr.count("is damaged") == 1
    done = run_python(own_cache)
    assert (done.stdout, done.stderr) == ("[5. 5. 5.]\n", "")


@needs_compiler
def test_kernels_run_beside_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run_python(tmp_path / "file", TMPDIR=str(temporary))
    assert done.stdout == "[5. 5. 5.]\n"
    assert done.stderr.count("can't be used") == 1
    assert not list(temporary.iterdir()), "the process takes its folder away"


@needs_compiler
def test_a_disk_that_fills_up_while_the_compiler_writes(own_cache: Path, tmp_path: Path) -> None:
    """The compiler ends with an error that is none of the kernel's."""
    real, wrapper = compiler.find_compiler().path, tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    message = "Fatal error: can't write 44 bytes to section .text: 'No space left on device'"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$PWD" in {own_cache}*) echo "{message}" >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    done = run_python(own_cache, CXX=str(wrapper))
    assert done.stdout == "[5. 5. 5.]\n"
    assert done.stderr.count("No space left on device") == 1


@needs_compiler
def test_neither_cache_nor_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rvllm.emulator import Module

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.warns(UserWarning, match="rvllm's cache"), pytest.raises(CompileError, match="RVLLM_CACHE"):
        Module('extern "C" __global__ void k(float* x) { *x = 1; }', "k.cu", "fast")


# Code for GPUs


@damages
def test_damaged_gpu_code_is_compiled_anew(
    own_cache: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is handed to the driver, with a stand-in for the compiler: its answers are counted."""
    compiled: list[str] = []
    monkeypatch.setattr(CudaBackend, "_compile", lambda self, source, kernel, *_: compiled.append(kernel) or CONTENT)
    backend = CudaBackend.__new__(CudaBackend)
    backend.xp = SimpleNamespace(cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=lambda: (12, 9))))
    backend._target = Target(75, is_ptx=False)
    source = 'extern "C" __global__ void k(float* x) { *x = 1; }'
    assert backend._cubin(source, "k") == backend._cubin(source, "k") == CONTENT and compiled == ["k"]
    damage(files(own_cache, ".cubin")[0])
    with pytest.warns(UserWarning, match="damaged"):
        assert backend._cubin(source, "k") == CONTENT
    with quiet():
        assert backend._cubin(source, "k") == CONTENT
    assert compiled == ["k", "k"]


# Generated models


@pytest.mark.parametrize("damage", [cut(1000), flip], ids=["1000 bytes", "a bit in the middle"])
def test_a_damaged_generated_model_is_made_anew(
    model_path: Path, own_cache: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "resolve", lambda _: model_path)
    path, _ = random_weights.random_weights("tiny")
    whole = path.read_bytes()
    damage(path)
    with pytest.warns(UserWarning, match="damaged"):
        path, _ = random_weights.random_weights("tiny")
    assert path.read_bytes() == whole
    assert GGUFFile(path).tensors["output_norm.weight"].shape == (64,)
