"""What the parts of tools/nb.py share: a loaded notebook, its error, and writing or checking files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
WIDTH = 110  # of generated text, as in pyproject.toml
DIFF_LINES = 40


class NotebookError(Exception):
    """A broken rule: one line that names the notebook, the cell and the reason."""


@dataclass
class Notebook:
    """One notebook: `name` is its path below the root, `raw` its JSON."""

    path: Path
    name: str
    raw: dict[str, Any]

    @classmethod
    def load(cls, path: Path, root: Path) -> Notebook:
        """Read a notebook; anything but format 4 with a list of cells is an error."""
        name = path.relative_to(root).as_posix()
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise NotebookError(f"{name}: not a notebook, its JSON does not parse: {error}") from None
        if not (isinstance(raw, dict) and raw.get("nbformat") == 4 and well_formed(raw.get("cells"))):
            raise NotebookError(f"{name}: not a notebook of format 4: open and save it in JupyterLab")
        return cls(path, name, raw)

    def cells(self, kind: str | None = None) -> Iterator[tuple[int, Cell]]:
        """Cells of one kind (all if None) with their number, counted from 1 over all cells."""
        for number, cell in enumerate(self.raw["cells"], 1):
            if kind in (None, cell["cell_type"]):
                yield number, cell

    def error(self, reason: str, number: int | None = None) -> NotebookError:
        """A one-line error about this notebook or one of its cells."""
        return NotebookError(f"{self.name}{f', cell {number}' if number else ''}: {reason}")

    def text(self) -> str:
        """The file's text, laid out as nbformat does."""
        return json.dumps(self.raw, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def well_formed(cells: object) -> bool:
    """Do all cells and outputs have the keys that every notebook of format 4 has?"""
    return isinstance(cells, list) and all(
        isinstance(cell, dict)
        and {"cell_type", "source"} <= cell.keys()
        and all("output_type" in output for output in cell.get("outputs", []))
        for cell in cells
    )


def source(cell: Cell) -> str:
    """A cell's text: notebooks store a string or a list of lines."""
    return "".join(cell["source"])


def is_setup(cell: Cell) -> bool:
    """Is this the generated setup cell?"""
    return cell["cell_type"] == "code" and "setup" in cell.get("metadata", {}).get("tags", [])


def find_notebooks(root: Path, solutions: bool = True) -> list[Path]:
    """The course's notebooks in order, then those with solutions."""
    folder = root / "notebooks"
    return sorted(folder.glob("*.ipynb")) + (sorted(folder.glob("solutions/*.ipynb")) if solutions else [])


def settle(root: Path, want: dict[Path, str], check: bool, remedy: Callable[[Path], str]) -> int:
    """Write the files that differ from `want`; under `check` only show how. Returns how many differ."""
    bad = 0
    for path, text in want.items():
        have = path.read_text(encoding="utf-8") if path.exists() else None
        if have == text:
            continue
        bad += 1
        name = path.relative_to(root).as_posix()
        if check:
            print(f"{name}: {'differs' if have is not None else 'missing'}; {remedy(path)}")
            print("\n".join(diff(name, have or "", text)))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"{name}: written")
    return bad


def diff(name: str, have: str, want: str) -> list[str]:
    """The first lines of a unified diff, long lines cut (a picture is one line)."""
    lines = difflib.unified_diff(have.splitlines(), want.splitlines(), name, "what the notebooks say", lineterm="")
    return [line if len(line) <= 200 else line[:200] + "..." for line in list(lines)[:DIFF_LINES]]
