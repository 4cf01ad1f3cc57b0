"""Every exercise: its check says "not solved yet" for the gap that ships, and "solved" for the solution."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rvllm.runtime import LIVE_SOURCES

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = [path.stem for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))]


def cells(name: str, tag: str) -> list[str]:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if tag in c["metadata"].get("tags", [])]


@pytest.fixture(autouse=True)
def own_kernels() -> Iterator[None]:
    """A kernel of an exercise is live in its notebook alone: one is called like a kernel of the package."""
    before = dict(LIVE_SOURCES)
    yield
    LIVE_SOURCES.clear()
    LIVE_SOURCES.update(before)


@pytest.mark.real_model
@pytest.mark.parametrize("name", NAMES)
def test_gaps_are_open_and_solutions_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    gaps, checks = cells(name, "exercise"), cells(name, "exercise-check")
    assert len(gaps) == len(checks) >= 1, "each exercise has a gap and a check"
    namespace: dict[str, Any] = {}
    for source in [*gaps, *checks]:
        exec(compile(source, f"{name}.ipynb", "exec"), namespace)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("exercise")]
    assert [": not solved yet" in line for line in said] == [True] * len(checks), said

    solution = NOTEBOOKS / "solutions" / f"{name}.py"
    exec(compile(solution.read_text(encoding="utf-8"), solution.name, "exec"), namespace)
    for source in checks:
        exec(compile(source, f"{name}.ipynb", "exec"), namespace)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("exercise")]
    assert [line.endswith(": solved") for line in said] == [True] * len(checks), said
