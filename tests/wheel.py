"""The package as `pip install` leaves it, in a folder of its own."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="rvllm-wheel-")


@functools.cache
def installed_wheel() -> Path:
    """A folder that holds the wheel of this tree, installed, and nothing else. Built once, without a network."""
    source, site = Path(_folder().name, "source"), Path(_folder().name, "site")
    source.mkdir()  # a copy: setuptools leaves its build folder beside what it builds
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "rvllm", source / "rvllm", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"no wheel could be made of {ROOT}; its log:\n{done.stdout}{done.stderr}")
    return site


def wheel_first() -> str:
    """A PYTHONPATH by which child processes import the installed wheel, whatever else they would find."""
    rest = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(installed_wheel()), *(entry for entry in rest if entry not in ("", str(ROOT)))])
