"""A seeded bug for every check: each must fire, and name kind, line, block and thread. And no false alarm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rvllm.emulator import EmulatorError

from .conftest import bug_line, load

X = np.arange(1, 65, dtype=np.float32)
READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False
BOTH, CHECK = ("fast", "check"), ("check",)

# file, kernel, modes, kind, block, thread, what differs from grid=1, block=64, n=64, x=X
Case = tuple[str, str, tuple[str, ...], str, tuple[int, int, int], tuple[int, int, int], dict[str, Any]]
CASES: list[Case] = [
    ("memory", "read_past_end", CHECK, "out of bounds", (1, 0, 0), (0, 0, 0), {"grid": 2}),
    ("memory", "write_past_end", CHECK, "out of bounds", (1, 0, 0), (0, 0, 0), {"grid": 2}),
    ("memory", "read_before_start", CHECK, "out of bounds", (0, 0, 0), (0, 0, 0), {}),
    ("memory", "atomic_past_end", CHECK, "out of bounds", (0, 0, 0), (5, 0, 0), {}),
    ("memory", "static_shared_index", CHECK, "out of bounds", (0, 0, 0), (32, 0, 0), {}),
    ("memory", "static_shared_pointer", CHECK, "out of bounds", (0, 0, 0), (1, 0, 0), {"n": 0}),
    ("memory", "dynamic_shared_index", CHECK, "out of bounds", (0, 0, 0), (32, 0, 0), {"shared": 128}),
    (
        "memory",
        "dynamic_shared_before",
        CHECK,
        "out of bounds",
        (0, 0, 0),
        (0, 0, 0),
        {"shared": 256, "n": 2},
    ),
    ("memory", "misaligned_vector", CHECK, "misaligned access", (0, 0, 0), (1, 0, 0), {"block": 32}),
    ("memory", "unset_shared", CHECK, "unset shared memory", (0, 0, 0), (63, 0, 0), {}),
    ("memory", "null_pointer", BOTH, "null pointer", (0, 0, 0), (0, 0, 0), {"x": None}),
    ("memory", "wild_pointer", CHECK, "out of bounds", (0, 0, 0), (0, 0, 0), {}),
    ("memory", "wild_pointer", ("fast",), "invalid address", (0, 0, 0), (0, 0, 0), {}),
    ("memory", "read_only", CHECK, "read-only array", (0, 0, 0), (0, 0, 0), {"x": READ_ONLY}),
    ("memory", "through_ldg", CHECK, "out of bounds", (0, 0, 0), (60, 0, 0), {"n": 4}),
    ("memory", "in_helper", CHECK, "out of bounds", (0, 0, 0), (60, 0, 0), {"n": 4}),
    ("races", "no_barrier", CHECK, "shared memory race", (0, 0, 0), (0, 0, 0), {}),
    ("races", "tree_without_barrier", CHECK, "shared memory race", (0, 0, 0), (1, 0, 0), {}),
    ("races", "no_syncwarp", CHECK, "shared memory race", (0, 0, 0), (16, 0, 0), {}),
    ("races", "between_blocks", CHECK, "global memory race", (1, 0, 0), (0, 0, 0), {"grid": 2}),
    ("races", "within_block", CHECK, "global memory race", (0, 0, 0), (1, 0, 0), {}),
    ("races", "plain_read_of_atomic", CHECK, "global memory race", (0, 0, 0), (1, 0, 0), {"block": 32}),
    ("races", "bytes", CHECK, "shared memory race", (0, 0, 0), (1, 0, 0), {}),
    ("control", "return_before_barrier", BOTH, "barrier divergence", (0, 0, 0), (60, 0, 0), {"n": 60}),
    ("control", "barrier_after_return", BOTH, "barrier divergence", (0, 0, 0), (4, 0, 0), {"n": 4}),
    ("control", "two_barriers", BOTH, "barrier divergence", (0, 0, 0), (32, 0, 0), {"n": 32}),
    ("control", "divergent_shuffle", BOTH, "warp divergence", (0, 0, 0), (0, 0, 0), {"n": 20}),
    ("control", "shuffle_of_partial_warp", BOTH, "warp divergence", (0, 0, 0), (32, 0, 0), {"block": 48}),
    ("control", "different_masks", BOTH, "warp divergence", (0, 0, 0), (31, 0, 0), {"block": 32}),
    ("control", "not_in_own_mask", BOTH, "warp divergence", (0, 0, 0), (16, 0, 0), {"block": 32}),
    ("control", "endless", BOTH, "timeout", (0, 0, 0), (0, 0, 0), {"timeout": 0.05}),
    ("control", "endless_spin", BOTH, "timeout", (0, 0, 0), (0, 0, 0), {"timeout": 0.05}),
    ("control", "stack_overflow", BOTH, "stack overflow", (0, 0, 0), (0, 0, 0), {"n": 40000}),
    ("control", "division_by_zero", BOTH, "division by zero", (0, 0, 0), (0, 0, 0), {"n": 0}),
    ("control", "assertion", BOTH, "assertion", (0, 0, 0), (7, 0, 0), {}),
    ("control", "trap", BOTH, "trap", (0, 0, 0), (0, 2, 0), {"grid": (2, 3), "block": (1, 4, 2)}),
]
EACH = [(mode, *case) for case in CASES for mode in case[2]]


def stop(file: str, kernel: str, mode: str = "check", **options: Any) -> EmulatorError:
    """Runs a kernel that must be stopped; returns the error."""
    given: dict[str, Any] = {"grid": 1, "block": 64, "n": 64, "x": X} | options
    args = [given.pop("x"), np.zeros(64, np.float32), given.pop("n")]
    with pytest.raises(EmulatorError) as caught:
        load(f"bugs_{file}", mode).launch(kernel, given.pop("grid"), given.pop("block"), args, **given)
    return caught.value


@pytest.mark.parametrize("mode,file,kernel,modes,kind,block,thread,options", EACH)
def test_bug(
    mode: str,
    file: str,
    kernel: str,
    modes: tuple[str, ...],
    kind: str,
    block: tuple[int, int, int],
    thread: tuple[int, int, int],
    options: dict[str, Any],
) -> None:
    error = stop(file, kernel, mode, **options)
    where = (error.kind, error.file, error.line, error.block, error.thread)
    line = bug_line(f"bugs_{file}", kernel)
    assert where == (kind, f"bugs_{file}.cu", line, block, thread), error
    assert error.kernel == kernel and str(error).startswith(f"bugs_{file}.cu:{error.line}: {kernel}: {kind}")


@pytest.mark.parametrize("mode,file,kernel,modes,kind,block,thread,options", EACH)
def test_bug_is_found_in_reverse_order_too(
    mode: str, file: str, kernel: str, modes: Any, kind: str, block: Any, thread: Any, options: dict[str, Any]
) -> None:
    assert stop(file, kernel, mode, reverse=True, **options).kind in (kind, "unset shared memory")


@pytest.mark.parametrize(
    "file,kernel,options,text",
    [
        (
            "memory",
            "read_past_end",
            {"grid": 2},
            "4-byte read, 0 bytes past the end of argument 0 `x` (256 bytes)",
        ),
        ("memory", "read_before_start", {}, "4-byte read, 4 bytes before argument 0 `x` (256 bytes)"),
        ("memory", "atomic_past_end", {}, "4-byte atomic update, 0 bytes past the end of argument 1 `y`"),
        ("memory", "static_shared_index", {}, "index 32 of an array of fixed size"),
        (
            "memory",
            "dynamic_shared_index",
            {"shared": 128},
            "offset 128 of 128 bytes of dynamic shared memory",
        ),
        (
            "memory",
            "dynamic_shared_before",
            {"shared": 256, "n": 2},
            "offset -8 of 256 bytes of dynamic shared",
        ),
        ("memory", "static_shared_pointer", {"n": 0}, "past the end of static shared memory"),
        ("memory", "misaligned_vector", {"block": 32}, "16-byte read"),
        ("memory", "read_only", {"x": READ_ONLY}, "4-byte write to argument 0 `x`"),
        (
            "races",
            "between_blocks",
            {"grid": 2},
            "conflicts with the write at line 36 by block 0 thread (0,0,0)",
        ),
        (
            "control",
            "return_before_barrier",
            {"n": 60},
            "this thread returned while 60 of 64 threads wait at line",
        ),
        ("control", "divergent_shuffle", {"n": 20}, "waits for lanes ffffffff, only 000fffff arrived"),
        (
            "control",
            "shuffle_of_partial_warp",
            {"block": 48},
            "lane 0 reads from lane 16, which takes no part",
        ),
        ("control", "endless", {}, "endless loop"),
    ],
)
def test_detail(file: str, kernel: str, options: dict[str, Any], text: str) -> None:
    assert text in stop(file, kernel, **options).detail


def test_race_names_both_lines() -> None:
    error = stop("races", "no_barrier")
    assert error.line and error.other_line == error.line + 1


def test_report_in_the_middle_leaves_no_trace() -> None:
    for _ in range(3):
        stop("control", "two_barriers", n=32)
        y = np.zeros(64, np.float32)
        load("correct").launch("tree", 1, 64, [X, y, 64])
        assert y[0] == X.sum()


CORRECT = {
    "tree": 2080,
    "warp_tree": 2080,
    "shuffle_tree": 2080,
    "reused_shared": 192,
    "halves": 3,
    "bytes_of_vectors": 1,
    "unaligned_struct": 0,
    "warps_leave_early": 4,
    "independent_blocks": 65,
    "atomic_sum": 2080 * 3,
    "local_array": 136,
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kernel", CORRECT)
def test_no_false_alarm(kernel: str, reverse: bool) -> None:
    y = np.zeros(64, np.float32)
    grid = 3 if kernel in ("independent_blocks", "atomic_sum") else 1
    load("correct").launch(kernel, grid, 64, [X, y, 0], shared=64, reverse=reverse)
    assert y[0] == CORRECT[kernel]


def test_races_can_be_allowed() -> None:
    y = np.zeros(64, np.float32)
    with pytest.raises(EmulatorError, match="global memory race"):
        load("correct").launch("last_block", 4, 64, [X, y.copy(), 0])
    load("correct").launch("last_block", 4, 64, [X, y, 0], races=False)
    assert y[62] == 1 + 2 + 3 + 4


def test_bounds_are_those_of_the_view() -> None:
    x, y = np.zeros(1000, np.float32), np.zeros(64, np.float32)
    with pytest.raises(EmulatorError) as caught:
        load("bugs_memory").launch("through_ldg", 1, 64, [x[100:164], y, 4])
    assert caught.value.thread == (60, 0, 0)
    load("bugs_memory").launch("through_ldg", 1, 64, [x[100:168], y, 4])


def test_reports_are_deterministic() -> None:
    messages = {str(stop("races", "tree_without_barrier")) for _ in range(5)}
    assert len(messages) == 1
