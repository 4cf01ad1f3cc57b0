"""Installed is not usable: the machines that `cuda_available` and `rvllm doctor` must tell apart, all of them fakes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rvllm import device
from rvllm.device import Availability, DeviceError, cuda_available, describe_device, resolve_device
from rvllm.errors import RvllmError

ROOT = Path(device.__file__).parents[1]
MISSING_LIBRARY = "libnvrtc.so.12: cannot open shared object file: No such file or directory"


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def package(folder: Path, source: str) -> None:
    (folder / "cupy").mkdir(parents=True)
    (folder / "cupy/__init__.py").write_text(source)


def fake_cupy(count, name: bytes = b"Tesla T4"):
    """A CuPy whose getDeviceCount returns `count`, or raises it."""

    def get_count():
        if isinstance(count, Exception):
            raise count
        return count

    card = {"name": name, "major": 7, "minor": 5}
    runtime = SimpleNamespace(getDeviceCount=get_count, getDeviceProperties=lambda _index: card)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without CuPy, with a driver for CUDA 12.4, not on Colab; what is put into the folder is installed."""
    for name in ("CUDA_VISIBLE_DEVICES", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "driver_cuda_version", lambda: (12, 4))
    monkeypatch.setattr(
        device.metadata, "distributions", lambda: device.metadata.Distribution.discover(path=[tmp_path])
    )
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not (Path(p) / "cupy").exists())])
    return tmp_path


def no_driver(monkeypatch):
    monkeypatch.setattr(device, "driver_cuda_version", lambda: None)


def test_a_gpu_that_works(machine, monkeypatch):
    distribution(machine, "cupy-cuda12x", "13.4.0")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(2))
    available = cuda_available()
    assert available
    assert available.reason == "2 GPU(s), the first one is Tesla T4, compute capability 7.5"
    assert describe_device() == "Tesla T4"


@pytest.mark.usefixtures("machine")
def test_no_cupy_beside_a_driver_is_mended_by_the_matching_one(monkeypatch):
    assert cuda_available() == Availability(False, "CuPy is not installed", "python -m pip install cupy-cuda12x")
    monkeypatch.setattr(device, "driver_cuda_version", lambda: (13, 0))
    assert cuda_available().remedy == "python -m pip install cupy-cuda13x"


@pytest.mark.usefixtures("machine")
def test_no_cupy_and_no_driver_needs_no_remedy(monkeypatch):
    no_driver(monkeypatch)
    available = cuda_available()
    assert "no NVIDIA driver" in available.reason
    assert available.remedy == ""
    assert describe_device().startswith("cpu (")


@pytest.mark.parametrize(
    "names", [("cupy-cuda11x", "cupy-cuda12x"), ("cupy", "cupy-cuda13x"), ("cupy_cuda12x", "cupy")]
)
def test_two_cupy_packages_are_named_with_the_one_command(machine, monkeypatch, names):
    for name in names:
        distribution(machine, name, "13.4.0")
    distribution(machine, "cupy-xarray", "0.1")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(1))
    available = cuda_available()
    plain = sorted(name.replace("_", "-") for name in names)
    assert not available
    assert available.reason == f"2 CuPy packages overwrite each other: {plain[0]} 13.4.0, {plain[1]} 13.4.0"
    assert available.remedy == f"python -m pip uninstall -y {' '.join(plain)} && python -m pip install cupy-cuda12x"


@pytest.mark.parametrize(
    "error", [f"ImportError({MISSING_LIBRARY!r})", "OSError('bad ELF header')", "AttributeError('x')"]
)
def test_a_cupy_that_does_not_load(machine, error):
    distribution(machine, "cupy-cuda12x", "13.4.0")
    package(machine, f"raise {error}")
    available = cuda_available()
    assert not available
    assert "does not load" in available.reason
    assert error.partition("(")[0] in available.reason
    assert available.remedy == "python -m pip uninstall -y cupy-cuda12x && python -m pip install cupy-cuda12x"


def test_a_cupy_that_misses_a_module_of_its_own_is_not_called_missing(machine):
    package(machine, "import cupy_backends_that_is_not_there")
    assert "does not load (ModuleNotFoundError" in cuda_available().reason


def test_an_empty_folder_called_cupy_is_no_cupy(machine):
    package(machine, "")
    assert not cuda_available()


@pytest.mark.usefixtures("machine")
def test_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(0))
    assert cuda_available() == Availability(False, "the driver shows no GPU")


@pytest.mark.usefixtures("machine")
def test_get_device_count_that_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(RuntimeError("cudaErrorUnknown: unknown error")))
    assert cuda_available() == Availability(False, "no GPU can be used (cudaErrorUnknown: unknown error)")
    assert describe_device().startswith("cpu (")


def test_a_driver_that_is_too_old_and_one_that_is_missing_say_the_same_and_are_told_apart(machine, monkeypatch):
    distribution(machine, "cupy-cuda13x", "13.6.0")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(RuntimeError("cudaErrorInsufficientDriver: CUDA driver ...")))
    available = cuda_available()
    assert "it runs CUDA up to 12.4" in available.reason
    assert available.remedy == "python -m pip uninstall -y cupy-cuda13x && python -m pip install cupy-cuda12x"
    monkeypatch.setattr(device, "driver_cuda_version", lambda: (11, 4))
    assert "update the driver" in cuda_available().reason
    no_driver(monkeypatch)
    assert "no NVIDIA driver" in cuda_available().reason


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("value", ["", "-1"])
def test_a_hidden_gpu_is_the_users_own_setting(monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(RuntimeError("cudaErrorNoDevice: no CUDA-capable device")))
    available = cuda_available()
    assert available.reason == f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU"
    assert available.remedy == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("count", [0, RuntimeError("cudaErrorInsufficientDriver"), None])
@pytest.mark.parametrize("visible", [None, ""])
def test_colab_without_a_gpu_says_how_to_switch(monkeypatch, count, visible):
    no_driver(monkeypatch)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if count is not None:
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count))
    assert "Runtime > Change runtime type > T4 GPU" in cuda_available().reason


def test_auto_is_cuda_where_it_works_and_the_cpu_elsewhere(monkeypatch):
    monkeypatch.setattr(device, "cuda_available", lambda: Availability(True, "1 GPU(s)"))
    assert resolve_device("auto") == "cuda"
    assert resolve_device("cpu") == "cpu"
    monkeypatch.setattr(device, "cuda_available", lambda: Availability(False, "none"))
    assert resolve_device("auto") == "cpu"
    assert resolve_device("emulator") == "emulator"


@pytest.mark.parametrize("name", ["gpu", "", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda:0\n", None, 0])
def test_a_device_that_does_not_exist_is_told_with_what_does(name):
    with pytest.raises(DeviceError, match="one of auto, cpu, cuda, cuda:N, emulator"):
        resolve_device(name)
    assert issubclass(DeviceError, RvllmError)


@pytest.mark.usefixtures("machine")
def test_cuda_by_name_must_work(monkeypatch):
    with pytest.raises(DeviceError, match="CuPy is not installed; to mend it: python -m pip install cupy-cuda12x"):
        resolve_device("cuda")
    assert resolve_device("auto") == "cpu"
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(2))
    assert resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(DeviceError, match=r"no cuda:2; this machine shows 2 GPU"):
        resolve_device("cuda:2")


# The same machines, as `rvllm doctor` reports them


# Only the CuPy in the first folder is seen, whatever this machine has installed.
DOCTOR = """
import sys
from importlib import metadata
from rvllm import cli, device
real = metadata.distributions
others = lambda: (d for d in real() if "cupy" not in (d.metadata["Name"] or "").lower())
metadata.distributions = lambda: [*metadata.Distribution.discover(path=[sys.argv[1]]), *others()]
sys.exit(cli.main(["doctor"]))
"""


def doctor(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "COLAB_RELEASE_TAG")
    }
    return subprocess.run(
        [sys.executable, "-c", DOCTOR, str(folder)],
        env={**inherited, "RVLLM_CACHE": str(folder / "cache"), "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


STUB = """
from types import SimpleNamespace
def count():
    {body}
cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count))
"""


@pytest.mark.parametrize(
    ("names", "source", "environment", "words"),
    [
        (("cupy-cuda11x", "cupy-cuda12x"), f"raise ImportError({MISSING_LIBRARY!r})", {},
         "2 CuPy packages overwrite each other: cupy-cuda11x 13.4.0, cupy-cuda12x 13.4.0"),
        (("cupy-cuda12x",), f"raise ImportError({MISSING_LIBRARY!r})", {}, MISSING_LIBRARY),
        (("cupy-cuda12x",), STUB.format(body="raise RuntimeError('cudaErrorUnknown')"), {}, "cudaErrorUnknown"),
        (("cupy-cuda12x",), STUB.format(body="return 0"), {"COLAB_RELEASE_TAG": "x", "CUDA_VISIBLE_DEVICES": ""},
         "Change runtime type"),
    ],
    ids=["two packages", "a library is missing", "getDeviceCount raises", "no GPU on Colab"],
)  # fmt: skip
def test_doctor_on_a_machine_whose_cuda_does_not_work(tmp_path, names, source, environment, words):
    for name in names:
        distribution(tmp_path, name, "13.4.0")
    package(tmp_path, source)
    report = doctor(tmp_path, **environment)
    line = next(line for line in report.stdout.splitlines() if "CUDA through CuPy" in line)
    assert line.startswith("--")
    assert words in line
    assert "The CPU path works." in report.stdout
    assert report.returncode == 0
    assert report.stderr == ""
    if len(names) == 2:
        assert "to mend it: python -m pip uninstall -y cupy-cuda11x cupy-cuda12x && " in report.stdout


def test_doctor_names_a_missing_compiler_and_an_empty_cache(tmp_path):
    report = doctor(tmp_path, PATH=str(tmp_path))
    assert "--  C++ compiler (for the emulator of CUDA): neither g++ nor clang++" in report.stdout
    assert f"--  models: none in {tmp_path / 'cache'}" in report.stdout
    assert report.returncode == 0
