"""`tools/nb.py run`: execute notebooks and record what their outputs belong to."""

from __future__ import annotations

import datetime
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nb_clean import Repository, cleaned, code_hash, failed, outputs_hash
from nb_common import Notebook, NotebookError

TIMEOUT = 600  # seconds a cell
SCALE = "RVLLM_NOTEBOOK_SCALE"
# Asked in the notebook's own kernel after its last cell.
ASK_DEVICE = """\
try:
    from rvllm.device import describe_device as _describe
    print(_describe())
except (ImportError, AttributeError):
    print("cpu")
"""


@dataclass
class Timer:
    """Seconds of each cell, through nbclient's hooks; `current` is the cell that runs (or failed)."""

    current: int = 0
    seconds: dict[int, float] = field(default_factory=dict)
    started: float = 0.0

    def start(self, cell_index: int, **_: Any) -> None:
        """A cell begins."""
        self.current, self.started = cell_index + 1, time.perf_counter()

    def stop(self, cell_index: int, **_: Any) -> None:
        """A cell is done."""
        self.seconds[cell_index + 1] = time.perf_counter() - self.started

    def slowest(self) -> str:
        """The slowest cell in words."""
        number = max(self.seconds, key=lambda n: self.seconds[n], default=0)
        if not number:
            return "no cell ran"
        return f"slowest cell {number}: {self.seconds[number]:.1f} s"


def select(paths: list[Path], wanted: list[str]) -> list[Path]:
    """The notebooks whose file name starts with one of the wanted numbers or names."""
    for name in wanted:
        if not any(path.stem.startswith(name) for path in paths):
            raise NotebookError(f"no notebook starts with {name}")
    return [path for path in paths if not wanted or path.stem.startswith(tuple(wanted))]


def run_notebook(nb: Notebook, root: Path, repository: Repository, scale: str | None) -> bool:
    """Run one notebook. Store it if every cell passed at full scale and nobody edited it meanwhile."""
    before = nb.path.read_bytes()
    ready = cleaned(nb, repository)
    print(f"{nb.name}: running", flush=True)
    timer, begin = Timer(), time.perf_counter()
    try:
        raw, device = execute(ready, root, scale, timer)
    except CellFailed as failure:
        print(f"{nb.name}, cell {timer.current}: {failure}\n{nb.name}: failed, file unchanged", flush=True)
        return False
    took = f"{time.perf_counter() - begin:.1f} s, {timer.slowest()}, device {device}"
    done = cleaned(Notebook(nb.path, nb.name, raw), repository)
    if bad := failed(done):
        print(f"{nb.name}, cell {bad[0]}: its output is an error\n{nb.name}: failed, file unchanged")
        return False
    if scale:
        print(f"{nb.name}: passed, {took}; nothing stored at scale {scale}", flush=True)
        return True
    if nb.path.read_bytes() != before:
        raise nb.error("was edited while it ran; nothing stored, run it again")
    record(done, device)
    for number, cell in done.cells("code"):
        if re.search(re.escape(str(root)) + r"\b", json.dumps(cell.get("outputs"), ensure_ascii=False)):
            print(f"{nb.name}, cell {number}: note: its output shows where the project lies on this machine")
    nb.path.write_text(done.text(), encoding="utf-8", newline="\n")
    print(f"{nb.name}: stored, {took}", flush=True)
    return True


def record(nb: Notebook, device: str) -> None:
    """Write down which code and which outputs belong together, and where they were made."""
    date = datetime.date.today().isoformat()
    hashes = {"code_sha256": code_hash(nb), "outputs_sha256": outputs_hash(nb)}
    nb.raw["metadata"]["rvllm"] = {**hashes, "date": date, "device": device}


class CellFailed(Exception):
    """A cell raised, ran too long or killed the kernel; the text is what to show."""


def execute(nb: Notebook, root: Path, scale: str | None, timer: Timer) -> tuple[dict[str, Any], str]:
    """The notebook's JSON with fresh outputs, and the device it ran on."""
    try:
        import nbformat
        from jupyter_client.kernelspec import NoSuchKernel
        from nbclient import NotebookClient
        from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError
    except ImportError as error:
        raise NotebookError(f"run needs {error.name}: pip install -e '.[dev]'") from None
    node = nbformat.reads(nb.text(), as_version=4)
    node.cells.append(nbformat.v4.new_code_cell(ASK_DEVICE))
    where = {"metadata": {"path": str(nb.path.parent)}}
    client = NotebookClient(node, timeout=TIMEOUT, kernel_name="python3", resources=where)
    client.on_cell_start, client.on_cell_executed = timer.start, timer.stop
    try:
        client.execute(env=environment(root, scale))
    except NoSuchKernel:
        raise NotebookError("run needs the kernel python3: pip install -e '.[dev]'") from None
    except CellExecutionError as error:
        lines = re.sub(r"\x1b\[[0-9;]*m", "", error.traceback).rstrip().splitlines()
        raise CellFailed("\n".join([f"{error.ename}: {error.evalue}".splitlines()[0], *lines[-8:]])) from None
    except (CellControlSignal, DeadKernelError) as error:
        raise CellFailed(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from None
    asked = node.cells.pop()
    timer.seconds.pop(len(node.cells) + 1)
    device = "".join(output.get("text", "") for output in asked.outputs).strip().splitlines()
    return node, device[-1] if device else "cpu"


def environment(root: Path, scale: str | None) -> dict[str, str]:
    """The kernel finds the package uninstalled; the scale is what the command line says, not the shell."""
    env = {key: value for key, value in os.environ.items() if key != SCALE}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    return env | ({SCALE: scale} if scale else {})
