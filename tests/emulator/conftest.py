"""Shared helpers of the emulator's tests: kernels by file, and the line of a seeded bug."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rvllm.emulator import Module, available

KERNELS = Path(__file__).parent / "kernels"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where nothing can be emulated, every test here is skipped with the reason."""
    works, reason = available()
    if not works:
        item.add_marker(pytest.mark.skip(reason=reason))


@functools.lru_cache
def load(file: str, mode: str = "check", portable: bool = False) -> Module:
    """The module of tests/emulator/kernels/FILE.cu; skips the test if the compiler cannot do the mode."""
    skip_unless_available(mode)
    return Module.from_file(KERNELS / f"{file}.cu", mode, portable=portable)


def compile_source(source: str, name: str, mode: str = "check", headers: dict[str, str] | None = None) -> Module:
    """A module from text; skips the test if the compiler cannot do the mode."""
    skip_unless_available(mode)
    return Module(source, name, mode, headers)


def skip_unless_available(mode: str) -> None:
    works, reason = available(mode)
    if not works:
        pytest.skip(reason)


def bug_line(file: str, kernel: str) -> int:
    """The line marked `// BUG` in the text of a kernel, or `// BUG kernel` anywhere in the file."""
    lines = (KERNELS / f"{file}.cu").read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if re.search(rf"\b{kernel}\(const float\* x", line))
    named = [i for i, line in enumerate(lines) if line.endswith(f"// BUG {kernel}")]
    return 1 + (named or [i for i in range(start, len(lines)) if lines[i].endswith("// BUG")])[0]


Run = Callable[..., None]


@pytest.fixture(params=["fast", "check", "fast-reverse", "check-reverse"])
def run(request: pytest.FixtureRequest) -> Run:
    """run(file, kernel, grid, block, args, ...) in either mode and either order."""
    mode, _, order = request.param.partition("-")

    def launch(file: str, kernel: str, grid: Any, block: Any, args: list[Any], **options: Any) -> None:
        load(file, mode).launch(kernel, grid, block, args, reverse=order == "reverse", **options)

    return launch
