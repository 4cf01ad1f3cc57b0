"""What the notebooks share: timing, tables, pictures with a text, exercises, errors shown without a traceback.

`%load_ext rvllm.notebook` puts nothing into the reader's namespace; each notebook imports what it uses.
"""

from __future__ import annotations

import io
import os
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rvllm.device import cuda_available
from rvllm.emulator import Counters
from rvllm.runtime import LIVE_SOURCES, Runtime

Value = TypeVar("Value")


def load_ipython_extension(ipython: Any) -> None:
    """Called by `%load_ext rvllm.notebook`: makes `%%cuda` known."""
    ipython.register_magic_function(cuda_cell, magic_kind="cell", magic_name="cuda")
    # tqdm, imported by huggingface_hub, complains where ipywidgets is missing. rvllm draws no widgets.
    warnings.filterwarnings("ignore", message="IProgress not found")


def cuda_cell(line: str, cell: str) -> None:
    """`%%cuda NAME [--draft] [--header]`: the cell's text is the source of kernel NAME from now on.

    The runtime looks here before it looks into the package, so an edit takes effect at the next launch. `--draft`
    only matters to the exporter: such a kernel lives in its notebook alone.
    """
    name, *options = line.split()
    LIVE_SOURCES[f"{name}.{'cuh' if '--header' in options else 'cu'}"] = cell


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
