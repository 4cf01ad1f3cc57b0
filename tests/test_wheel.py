"""An installed wheel has everything: kernels, headers, the emulator's C++; started from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rvllm import emulator

ROOT = Path(__file__).parents[1]
PROGRAM = """
import numpy as np, rvllm
from rvllm import ops
from rvllm.runtime import Runtime, source_text
assert rvllm.__file__.startswith({site!r}), rvllm.__file__
for name in ("rmsnorm.cu", "warp.cuh", "kv_gather.cu"):
    assert "Launch" in source_text(name) or "warp" in source_text(name)
if {emulate}:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    print(ops.rmsnorm(Runtime("emulator"), x, np.ones(3, np.float32), 1e-5).astype(float).round(3).tolist())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = folder / "source"  # a copy: setuptools leaves its build folder beside what it builds
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "rvllm", source / "rvllm", ignore=shutil.ignore_patterns("__pycache__"))
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder / "dist"), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("rvllm-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def test_kernels_run_from_an_installed_wheel(site: Path, tmp_path: Path) -> None:
    works, _ = emulator.available("check")
    environment = os.environ | {"PYTHONPATH": str(site)}
    program = PROGRAM.format(site=str(site), emulate=works)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert not works or done.stdout.strip() == "[[0.0, 0.775, 1.549], [0.735, 0.98, 1.225]]"


def test_nothing_that_is_not_the_package_is_in_the_wheel(site: Path) -> None:
    assert {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")} <= {"rvllm", "bin"}
