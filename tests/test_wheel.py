"""An installed wheel has everything: kernels, headers, the emulator's C++; started from another folder."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rvllm import emulator
from tests.wheel import ROOT, installed_wheel, wheel_first

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
def site() -> Path:
    """A folder that holds the installed wheel and nothing else."""
    return installed_wheel()


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


def test_notebooks_import_the_installed_wheel(site: Path) -> None:
    """Started as conftest.py starts them: in the repository, whose own package must not be taken for the wheel's."""
    environment = os.environ | {"PYTHONPATH": wheel_first()}
    code = "import rvllm; print(rvllm.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT / "notebooks", env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(site)


def test_recorded_data_are_read_from_an_installed_wheel(site: Path, tmp_path: Path) -> None:
    """All that the tree has, with no network and no checkout beside."""
    names = sorted(path.name for path in (ROOT / "rvllm" / "recorded").iterdir())
    code = f"from rvllm import plots; print([len(plots.load(name)) > 0 for name in {names}].count(True))"
    environment = os.environ | {"PYTHONPATH": str(site), "HTTPS_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(names) > 20


# What a notebook's setup cell installs

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ON_COLAB = {"IPython", "cupy"}  # what the machine brings; `cupy` is imported only where there is a GPU


def packages(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in requirements}


def imports(code: str) -> Iterator[str]:
    """The modules that a cell imports, magics left out; `from rvllm import plots` as rvllm.plots."""
    for node in ast.walk(ast.parse(re.sub(r"^([ \t]*)[%!].*", r"\1pass", code, flags=re.M))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_the_setup_cell_installs_what_the_notebook_imports(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = {name for text in code if not text.startswith("%%") for name in imports(text)}
    draws = any(name.startswith(("rvllm.plots", "rvllm.trace_plots", "matplotlib")) for name in found)
    (extra,) = re.findall(r'pip install -q "rvllm(?:\[(\w+)\])? @ git', code[0])
    assert extra == ("plots" if draws else "")
    installed = packages(PROJECT["dependencies"]) | packages(PROJECT["optional-dependencies"].get(extra, []))
    needed = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - {"rvllm"}
    assert needed <= installed | ON_COLAB
    assert not any("cupy" in text and "pip install" in text for text in code[:1])
    assert not re.search(r"\.\./|figures/|getcwd", "\n".join(code)), "a notebook reads nothing beside itself"
