"""What the notebooks share: timing, tables, pictures with a text, exercises, errors shown without a traceback.

`%load_ext rvllm.notebook` puts nothing into the reader's namespace; each notebook imports what it uses.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rvllm.device import cuda_available
from rvllm.emulator import Counters
from rvllm.errors import RvllmError
from rvllm.runtime import LIVE_SOURCES, Runtime, without_comments

Value = TypeVar("Value")
CELL_OPTIONS = ("--draft", "--header")


class CellError(RvllmError):
    """A `%%cuda` line that can't be understood: what was found, what is allowed."""


def load_ipython_extension(ipython: Any) -> None:
    """Called by `%load_ext rvllm.notebook`: makes `%%cuda` known."""
    ipython.register_magic_function(cuda_cell, magic_kind="cell", magic_name="cuda")
    # tqdm, imported by huggingface_hub, complains where ipywidgets is missing. rvllm draws no widgets.
    warnings.filterwarnings("ignore", message="IProgress not found")


def cuda_cell(line: str, cell: str) -> None:
    """`%%cuda NAME [--draft] [--header]`: the cell's text is the source of kernel NAME from now on.

    The runtime looks here before it looks into the package, so an edit takes effect at the next launch. `--draft`
    only matters to the exporter: such a kernel lives in its notebook alone. A text that nothing would run, as after a
    slip in NAME, gets a remark. Raises CellError for a line without a name, or with other options.
    """
    name, *options = line.split() or [""]
    if not re.fullmatch(r"\w+", name):
        raise CellError(f"%%cuda: found {name!r}; allowed: %%cuda NAME [--draft] [--header]")
    if unknown := [option for option in options if option not in CELL_OPTIONS]:
        raise CellError(f"%%cuda {name}: found {unknown[0]!r}; allowed: {', '.join(CELL_OPTIONS)}")
    is_header = "--header" in options
    LIVE_SOURCES[f"{name}.{'cuh' if is_header else 'cu'}"] = cell
    remark = remark_on_header(name) if is_header else remark_on_kernel(name, cell, "--draft" in options)
    if remark:
        print(f"%%cuda {line.strip()}: {remark}")


def remark_on_kernel(name: str, text: str, is_draft: bool) -> str:
    """Why no launch would run this text, or none of the package's; "" where all is right."""
    defined = kernels_of(text)
    if name not in defined:
        found = f"the text defines {', '.join(defined) or 'no kernel'}, and a launch of {name} looks for {name}"
        return f"{found}; nothing launches it{suggestion(name, 'cu')}"
    if is_draft or name in package_files("cu"):
        return ""
    hint = suggestion(name, "cu") or "; --draft says that only this notebook does"
    return f"no kernel of the package has this name, so nothing in it launches the text{hint}"


def remark_on_header(name: str) -> str:
    """That no other file includes this header, or ""."""
    folder = resources.files("rvllm.kernels")
    texts = {f"{n}.{kind}": folder / f"{n}.{kind}" for kind in ("cu", "cuh") for n in package_files(kind)}
    sources = {file: path.read_text(encoding="utf-8") for file, path in texts.items()} | LIVE_SOURCES
    include = re.compile(rf'#\s*include\s*"{name}\.cuh"')
    if any(include.search(without_comments(text)) for file, text in sources.items() if file != f"{name}.cuh"):
        return ""
    return f"no kernel includes {name}.cuh so far, so nothing reads the text{suggestion(name, 'cuh')}"


def kernels_of(text: str) -> list[str]:
    """Names of the kernels that a source text defines: the last name before a parameter list."""
    heads = re.findall(r"\b__global__\b([^;{]*)\{", without_comments(text))
    return [names[-1] for head in heads if (names := re.findall(r"(\w+)\s*\(", head))]


def package_files(kind: str) -> list[str]:
    """Names of the package's kernel files of one kind, "cu" or "cuh", less their endings."""
    files = (file.name.rpartition(".") for file in resources.files("rvllm.kernels").iterdir())
    return sorted(name for name, _, ending in files if ending == kind)


def suggestion(name: str, kind: str) -> str:
    """The name that was probably meant, as the end of a remark, or ""."""
    other = {"cu": "cuh", "cuh": "cu"}[kind]
    if name in package_files(other):
        return f"; {name} is a header, it needs --header" if kind == "cu" else f"; {name} is a kernel, not a header"
    close = [n for n in difflib.get_close_matches(name, package_files(kind), 1) if n != name]
    return f"; did you mean {close[0]}?" if close else ""


def kernels_run_on(rt: Runtime) -> None:
    """Print where kernels run, and on the emulator why no GPU is used."""
    print(f"kernels run on: {rt.name}")
    if not rt.is_cuda:
        print(f"no GPU: {cuda_available().reason}. Timings against a card's limits are skipped.")


def both_orders(rt: Runtime, run: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """Run with threads in order and, on the emulator, reversed; AssertionError unless the results are equal."""
    first = run()
    if not rt.is_cuda:
        rt.reverse = True
        try:
            assert np.array_equal(first, run(), equal_nan=True), "the result depends on the order of the threads"
        finally:
            rt.reverse = False
    return first


def counts(run: Callable[[Runtime], object]) -> Counters:
    """What the last launch of `run(runtime)` does to memory, counted by the emulator in check mode."""
    watched = Runtime("emulator", "check")
    watched.counting = True
    run(watched)
    assert watched.counters is not None
    return watched.counters


def read_rate(rt: Runtime, megabytes: int = 512) -> float:
    """GB/s at which a card copies memory, bytes read and written: the limit that kernels are held against."""
    source = rt.zeros(megabytes * 250_000)
    target = rt.zeros(megabytes * 250_000)

    def copy() -> None:
        target[...] = source

    return 2 * source.nbytes / rt.milliseconds(copy) / 1e6


def scaled(full: Value, small: Value) -> Value:
    """`full` for readers, `small` where the tests run the notebook (RVLLM_NOTEBOOK_SCALE=small)."""
    return small if os.environ.get("RVLLM_NOTEBOOK_SCALE") == "small" else full


def median_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Median wall-clock time of a call, after one call that does not count."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows in columns; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [all(_is_number(text) for text in column) for column in zip(*cells, strict=True)] or [False] * len(header)
    for row in [list(header), *cells]:
        padded = (t.rjust(w) if n else t.ljust(w) for t, w, n in zip(row, widths, numeric, strict=True))
        print("  ".join(padded).rstrip())


def _cell(value: object) -> str:
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else _grouped(value)


def _grouped(value: object) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:,.0f}" if is_number else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


def show_error(call: Callable[[], object], hide: str = "") -> None:
    """Run something that should fail and print the error's name and message, less the text `hide` (a folder's name)."""
    try:
        call()
    except Exception as error:
        message = str(error).replace(hide, "") if hide else str(error)
        print(textwrap.fill(f"{type(error).__name__}: {message}", 110, subsequent_indent="    "))
    else:
        print("no error")


def check(exercise: str, test: Callable[[], object]) -> None:
    """Run an exercise's test and print "solved", or "not solved yet" and why. Never raises: it may stay open."""
    try:
        test()
    except NotImplementedError:
        print(f"{exercise}: not solved yet")
    except Exception as error:
        print(f"{exercise}: not solved yet; {type(error).__name__}: {str(error)[:500]}")
    else:
        print(f"{exercise}: solved")


def show(figure: Any, alt: str) -> None:
    """Display a matplotlib figure as PNG with a text for those who can't see it, and close it."""
    from IPython.display import display
    from matplotlib import pyplot

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100, bbox_inches="tight")
    pyplot.close(figure)
    display({"image/png": png.getvalue(), "text/plain": alt}, raw=True, metadata={"image/png": {"alt": alt}})
