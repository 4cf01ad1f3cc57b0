"""BLAS takes no processors that others keep busy; a user's own number stays. The machine's load is made up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from rvllm import LLM, blas_threads
from rvllm.blas_threads import fit_blas_threads, free_processors
from tests import toy

Machine = Callable[[int, int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """machine(processors, busy): with so many programs beside that always want to run. BLAS takes 4 threads."""
    for name in blas_threads.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(blas_threads, "_lowered", [])

    def set_to(processors: int, busy: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
        monkeypatch.setattr(blas_threads, "_running", lambda: busy + 1)

    with threadpool_limits(4, "blas"):
        if blas_threads.blas_threads() != 4:
            pytest.skip("this BLAS has a number of threads of its own")
        yield set_to


@pytest.mark.parametrize(
    ("processors", "busy", "threads"), [(4, 0, 4), (4, 1, 3), (4, 3, 1), (4, 4, 1), (2, 4, 1), (64, 8, 4), (2, 0, 2)]
)
def test_others_keep_their_processors(machine: Machine, processors: int, busy: int, threads: int) -> None:
    machine(processors, busy)
    fit_blas_threads()
    assert blas_threads.blas_threads() == threads


def test_the_number_comes_back_with_the_processors(machine: Machine) -> None:
    for busy, threads in ((4, 1), (2, 2), (0, 4), (0, 4)):
        machine(4, busy)
        fit_blas_threads()
        assert blas_threads.blas_threads() == threads


def test_a_number_that_the_user_sets_in_between_stays(machine: Machine) -> None:
    machine(4, 4)
    fit_blas_threads()
    threadpool_limits(2, "blas")
    machine(4, 0)
    fit_blas_threads()
    assert blas_threads.blas_threads() == 2


@pytest.mark.parametrize("name", blas_threads.SETTINGS)
def test_a_setting_of_the_users_own_wins(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine(4, 4)
    monkeypatch.setenv(name, "4")
    fit_blas_threads()
    assert blas_threads.blas_threads() == 4


def test_a_system_that_tells_no_load_is_left_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(4, 4)

    def missing() -> int:
        raise FileNotFoundError("/proc/loadavg")

    monkeypatch.setattr(blas_threads, "_running", missing)
    fit_blas_threads()
    assert free_processors() is None and blas_threads.blas_threads() == 4


def test_one_burst_is_no_load(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(4, 0)
    readings = iter([9, 1, 1, 9, 1, 1, 9, 1, 1, 9, 1])
    monkeypatch.setattr(blas_threads, "_running", lambda: next(readings))
    assert free_processors() == 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
def test_what_the_system_tells_counts_this_thread() -> None:
    assert blas_threads._running() >= 1


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_a_model_is_fitted_when_it_is_loaded(machine: Machine, tmp_path: Path, device: str) -> None:
    machine(2, 4)
    with LLM(toy.write(tmp_path / "toy.gguf"), device=device):
        assert blas_threads.blas_threads() == 1


def test_tests_and_their_children_take_one_thread(tmp_path: Path) -> None:
    """Whatever their number is here: pytest in a process without a setting, and a process that it starts."""
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\n"
        "code = 'import numpy; from rvllm.blas_threads import blas_threads; print(blas_threads())'\n"
        "def test_it():\n"
        "    namespace = {}\n"
        "    exec(code.replace('print(blas_threads())', 'n = blas_threads()'), namespace)\n"
        "    assert namespace['n'] in (1, None)\n"
        "    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() in ('1', 'None')\n"
    )
    root = Path(__file__).parents[1]
    environment = {key: value for key, value in os.environ.items() if key not in blas_threads.SETTINGS}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml")]
    command += ["--confcutdir", str(root), "-p", "conftest", str(tmp_path / "test_it.py")]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
