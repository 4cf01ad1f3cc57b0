"""`tools/nb.py clean`: a notebook's stored form, its badge and setup cell, checks of its outputs."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nb_common import Cell, Notebook, NotebookError, is_setup, source

NOTEBOOK_KEYS = {"accelerator", "colab", "execution", "kernelspec", "language_info", "rvllm"}
CELL_KEYS = {"tags", "magics_language"}
RUN_KEYS = {"code_sha256", "outputs_sha256", "device", "date"}
DROPPED_MIMES = ("application/vnd.google.colaboratory.", "application/vnd.jupyter.widget-view")
CELL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
BADGE = re.compile(r"^\[!\[Open In Colab\]\([^)\n]*\)\]\([^)\n]*\)[ \t]*$", re.M)
SETUP = """\
import importlib.util
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("rvllm") is None:
    !pip install -q "rvllm{extra} @ git+https://github.com/{repository}"
%load_ext rvllm.notebook"""
DRAWS = re.compile(r"^[ \t]*(?:import|from)\b.*\b(?:matplotlib|\w*plots)\b", re.M)  # imports that need matplotlib


@dataclass
class Repository:
    """The public address, from [project.urls] Repository of pyproject.toml: the one place that has it."""

    path: str  # OWNER/REPO

    @classmethod
    def of(cls, root: Path) -> Repository:
        """Read pyproject.toml."""
        try:
            url = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
        except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
            raise NotebookError(f"pyproject.toml: no [project.urls] Repository ({error!r})") from None
        match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", url)
        if not match:
            raise NotebookError(f"pyproject.toml: Repository must be https://github.com/OWNER/REPO, not {url}")
        return cls(match[1])

    def badge(self, name: str) -> str:
        """The line that opens a notebook in Colab."""
        page = f"https://colab.research.google.com/github/{self.path}/blob/main/{name}"
        return f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]({page})"


def cleaned(nb: Notebook, repository: Repository) -> Notebook:
    """A notebook in its stored form; doing it again changes nothing."""
    done = Notebook(nb.path, nb.name, copy.deepcopy(nb.raw))
    done.raw["metadata"] = notebook_metadata(done.raw.get("metadata", {}))
    done.raw["nbformat_minor"] = 5
    set_ids([cell for _, cell in done.cells()])
    for _, cell in done.cells():
        clean_cell(cell)
    set_badge(done, repository)
    set_setup(done, repository)
    for _, cell in done.cells():
        cell["source"] = source(cell).splitlines(True)
    return done


def notebook_metadata(old: dict[str, Any]) -> dict[str, Any]:
    """The keys worth keeping; the kernel has the name that exists everywhere."""
    new = {key: value for key, value in old.items() if key in NOTEBOOK_KEYS}
    new["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    new["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    for key, inner in (("colab", {"gpuType"}), ("rvllm", RUN_KEYS)):
        if key in new and not (kept := {k: v for k, v in new[key].items() if k in inner}):
            del new[key]
        elif key in new:
            new[key] = kept
    return new


def set_ids(cells: list[Cell]) -> None:
    """Keep ids (Colab has them in the metadata); make missing and repeated ones from the cell's text."""
    seen: set[str] = set()
    for cell in cells:
        old = cell.get("id") or cell.get("metadata", {}).get("id") or ""
        count = 0
        while not CELL_ID.fullmatch(old) or old in seen:
            old = hashlib.sha256(f"{cell['cell_type']} {count} {source(cell)}".encode()).hexdigest()[:8]
            count += 1
        seen.add(old)
        cell["id"] = old


def clean_cell(cell: Cell) -> None:
    """Drop what changes by itself: counters, timestamps, what a viewer stored."""
    cell["metadata"] = {key: value for key, value in cell.get("metadata", {}).items() if key in CELL_KEYS}
    cell["metadata"].pop("magics_language", None)
    if cell["cell_type"] != "code":
        return
    if source(cell).startswith("%%cuda"):
        cell["metadata"]["magics_language"] = "cuda"
    cell["execution_count"] = None
    for output in cell.setdefault("outputs", []):
        clean_output(output)
    cell["outputs"] = join_streams([output for output in cell["outputs"] if output.get("data", True) != {}])


def join_streams(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join pieces of one stream: how it is cut depends on timing."""
    joined: list[dict[str, Any]] = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output["output_type"] == "stream" and output["name"] == last.get("name"):
            last["text"] = "".join([*last["text"], *output["text"]]).splitlines(True)
        else:
            joined.append(output)
    return joined


def clean_output(output: dict[str, Any]) -> None:
    """Bring one output into nbformat's stored layout, without what Colab and widgets add."""
    output.pop("transient", None)
    if "execution_count" in output:
        output["execution_count"] = None
    if output["output_type"] == "stream":
        output["text"] = "".join(output["text"]).splitlines(True)
    data = {k: v for k, v in output.get("data", {}).items() if not k.startswith(DROPPED_MIMES)}
    for mime, value in data.items():
        if not isinstance(value, str):
            continue
        if mime.startswith("text/") or mime in ("image/svg+xml", "application/javascript"):
            data[mime] = value.splitlines(True)
        elif mime.startswith("image/"):
            data[mime] = value.strip()  # base64; some kernels end it with a newline
    if "data" in output:
        output["data"] = data


# --- Generated parts ------------------------------------------------------------------------------


def set_badge(nb: Notebook, repository: Repository) -> None:
    """The Colab badge in the title cell: over the old one, else below the `> ` line, else the title."""
    cells = nb.raw["cells"]
    if not cells or cells[0]["cell_type"] != "markdown" or not source(cells[0]).startswith("# "):
        raise nb.error("no place for the Colab badge: the first cell is markdown and starts with `# Title`")
    text, badge = source(cells[0]), repository.badge(nb.name)
    if BADGE.search(text):
        cells[0]["source"] = BADGE.sub(lambda _: badge, text, count=1)
        return
    place = re.search(r"^>.*$", text, re.M) or re.search(r"^# .*$", text, re.M)
    assert place
    rest = text[place.end() :].lstrip("\n")
    cells[0]["source"] = f"{text[: place.end()]}\n\n{badge}" + (f"\n\n{rest}" if rest else "")


def set_setup(nb: Notebook, repository: Repository) -> None:
    """Generate the first code cell, tagged `setup`; only its `#| default_exp` line is the author's.

    On Colab it installs the package, with matplotlib for a notebook that draws. CuPy is there already.
    """
    code = list(nb.cells("code"))
    tagged = [number for number, cell in code if is_setup(cell)]
    if not tagged:
        raise nb.error("no setup cell: tag the first code cell `setup`, its text is generated")
    if len(tagged) > 1 or tagged[0] != code[0][0]:
        raise nb.error("one setup cell, and it is the first code cell", tagged[-1])
    cell = code[0][1]
    default = re.match(r"\s*(#\|\s*default_exp\b.*\n?)", source(cell))
    head = default[1].rstrip() + "\n" if default else ""
    draws = any(DRAWS.search(source(cell)) for _, cell in code)
    cell["source"] = head + SETUP.format(repository=repository.path, extra="[plots]" if draws else "")


# --- Stored outputs -------------------------------------------------------------------------------


def authored_cells(nb: Notebook) -> list[Cell]:
    """The code cells but the generated one: a new repository address leaves the stored outputs valid."""
    return [cell for _, cell in nb.cells("code") if not is_setup(cell)]


def digest(value: list[Any]) -> str:
    """SHA-256 over JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def code_hash(nb: Notebook) -> str:
    """Names the code that the stored outputs came from."""
    return digest([source(cell) for cell in authored_cells(nb)])


def outputs_hash(nb: Notebook) -> str:
    """Names the stored outputs themselves, of a cleaned notebook: typing into them shows."""
    return digest([cell["outputs"] for cell in authored_cells(nb)])


def output_problems(nb: Notebook) -> list[str]:
    """What is wrong with the outputs of a cleaned notebook; at most one line for each cell or notebook."""
    mend = f"run: python tools/nb.py run {nb.path.stem}"
    problems = [str(nb.error(f"a stored output is an error; mend the cell, then {mend}", n)) for n in failed(nb)]
    record = nb.raw["metadata"].get("rvllm", {})
    if not problems and authored_cells(nb):
        if "code_sha256" not in record:
            problems.append(str(nb.error(f"its outputs were never recorded; {mend}")))
        elif record["code_sha256"] != code_hash(nb):
            problems.append(str(nb.error(f"the stored outputs belong to other code than the present; {mend}")))
        elif record.get("outputs_sha256") != outputs_hash(nb):
            problems.append(str(nb.error(f"the stored outputs are not those that its run recorded; {mend}")))
    return problems


def failed(nb: Notebook) -> list[int]:
    """Numbers of the cells with a stored error."""
    return [n for n, cell in nb.cells("code") if any(o["output_type"] == "error" for o in cell.get("outputs", []))]
