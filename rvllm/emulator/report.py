"""Turns the runtime's report about a stopped run into an `EmulatorError`."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

from rvllm.emulator.build import SHIM_FILES
from rvllm.emulator.chain import Chain
from rvllm.emulator.errors import EmulatorError


class Report(ctypes.Structure):
    """`struct Report` of cuda/faults.cpp."""

    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("text", ctypes.c_char * 512),
        ("file", ctypes.c_char * 256),
        ("line", ctypes.c_int),
        ("has_thread", ctypes.c_int),
        ("block", ctypes.c_uint * 3),
        ("thread", ctypes.c_uint * 3),
        ("pc_count", ctypes.c_size_t),
        ("pc_offsets", ctypes.c_size_t * 16),
        ("other_pc_offset", ctypes.c_size_t),
    ]


def make_error(
    report: Report, library: Path, kernel: str, names: list[str], chain: Chain | None = None
) -> EmulatorError:
    """The error for a report; looks code addresses up in the debug information of `library`.

    `names` are those of the kernel's parameters; `chain` has those of the launches before.
    """
    file, line = (report.file.decode(), report.line) if report.line else look_up(library, _pcs(report))
    _, other_line = look_up(library, [report.other_pc_offset])
    text = report.text.decode(errors="replace").replace("{other}", f"line {other_line}")
    x, y = tuple(report.block), tuple(report.thread)
    return EmulatorError(
        report.kind.decode(),
        _with_launches(_with_names(text, names), chain),
        kernel=kernel,
        file=Path(file).name if file else None,
        line=line,
        other_line=other_line,
        block=(x[0], x[1], x[2]) if report.has_thread else None,
        thread=(y[0], y[1], y[2]) if report.has_thread else None,
    )


def _with_names(text: str, names: list[str]) -> str:
    """The text with `out` added to "argument 2"."""

    def named(match: re.Match[str]) -> str:
        index = int(match[1])
        return f"{match[0]} `{names[index]}`" if index < len(names) else match[0]

    return re.sub(r"argument (\d+)", named, text)


def _with_launches(text: str, chain: Chain | None) -> str:
    """The text with kernels' names for the numbers of launches."""
    if chain is None:
        return text
    numbered = re.sub(r"{launch (\d+)}", lambda match: f"{chain.names[int(match[1])]}", text)
    return numbered.replace("{previous}", chain.names[-2])


def check_waits(chain: Chain, dependent: bool, waits: bool, kernel: str, file: str) -> None:
    """EmulatorError for a dependent launch that may end before the one before it: in no block has a thread waited."""
    if dependent and not waits:
        before = chain.names[-2]
        detail = f"no thread calls wait_for_previous_kernel(): it may end before {before}, and so may all behind it"
        raise EmulatorError("no wait", detail, kernel=kernel, file=file)


def _pcs(report: Report) -> list[int]:
    return list(report.pc_offsets)[: report.pc_count]


def look_up(library: Path, return_addresses: list[int]) -> tuple[str | None, int | None]:
    """File and line of the first call that belongs to the kernel source, or (None, None).

    The calls are given by their return addresses, as offsets in the library, the innermost first. addr2line,
    which comes with every g++, names the innermost inlined function first, too. The shim's own are passed
    over: a load in __ldg belongs to the line that called __ldg.
    """
    program = shutil.which("addr2line")
    addresses = [hex(address - 1) for address in return_addresses if address]
    if not addresses or not program:
        return None, None
    command = [program, "-i", "-e", str(library), *addresses]
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    for frame in printed.splitlines():
        match = re.match(r"(.+):(\d+)(?: |$)", frame)
        if match and int(match[2]) and Path(match[1]).name not in SHIM_FILES:
            return match[1], int(match[2])
    return None, None
