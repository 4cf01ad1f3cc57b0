"""Exact counts for access patterns whose cost is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rvllm.emulator import Counters, LaunchConfigError

from .conftest import load

X = np.ones(4096, np.float32)


def count(kernel: str, *args: Any, block: int = 32, grid: int = 1, **options: Any) -> Counters:
    module = load("patterns")
    module.launch(kernel, grid, block, list(args), count=True, **options)
    assert module.counters
    return module.counters


def y() -> np.ndarray:
    return np.zeros(1024, np.float32)


@pytest.mark.parametrize("stride,sectors", [(0, 1), (1, 4), (2, 8), (4, 16), (8, 32), (32, 32)])
def test_coalescing(stride: int, sectors: int) -> None:
    c = count("read_stride", X, y(), stride)
    assert (c.global_reads, c.global_read_bytes, c.global_writes, c.global_write_bytes) == (32, 128, 32, 128)
    assert c.global_requests == 2 and c.sectors == sectors + 4  # + 4 of the write
    assert c.sectors_per_request == (sectors + 4) / 2
    assert c.sector_efficiency == 256 / (32 * (sectors + 4))


def test_vector_reads() -> None:
    c = count("read_vector", X, y(), 1)
    assert (c.global_reads, c.global_read_bytes, c.sectors) == (32, 512, 16 + 4)


def test_a_misplaced_view_costs_no_extra_sector_of_its_own() -> None:
    # Sectors count from the start of the argument.
    assert count("read_stride", X[3:], y(), 1).sectors == 4 + 4


@pytest.mark.parametrize("reverse", [False, True])
def test_loops_group_the_nth_execution_of_each_lane(reverse: bool) -> None:
    c = count("read_loop", X, y(), 1000, block=64, grid=2, reverse=reverse)
    assert c.global_reads == 2 * 1000
    # Each warp reads 15 full rows of 32; 1000 = 31 * 32 + 8, so one warp reads 16 rows, the other 15 and 8
    # floats.
    assert c.global_requests == 2 * (32 + 2) and c.sectors == 2 * (31 * 4 + 1 + 2 * 4)


def test_partial_warps() -> None:
    c = count("read_half_warp", X, y(), 0, block=64)
    assert (c.global_reads, c.global_requests, c.sectors) == (32, 4, 8)


@pytest.mark.parametrize("stride,conflicts", [(0, 0), (1, 0), (2, 1), (4, 3), (31, 0), (32, 31), (16, 15)])
def test_bank_conflicts(stride: int, conflicts: int) -> None:
    c = count("shared_stride", y(), stride)
    assert (c.shared_writes, c.shared_write_bytes) == (1024, 4096)
    assert (c.shared_reads, c.shared_read_bytes) == (32, 128)
    assert (c.shared_requests, c.bank_conflicts) == (33, conflicts)


def test_vectors_of_16_bytes_are_served_8_lanes_at_a_time() -> None:
    c = count("shared_vector", y())
    assert (c.shared_requests, c.shared_read_bytes, c.bank_conflicts) == (2, 512, 0)


@pytest.mark.parametrize("kernel,conflicts", [("transpose_plain", 32 * 31), ("transpose_padded", 0)])
def test_padding_removes_bank_conflicts(kernel: str, conflicts: int) -> None:
    c = count(kernel, X, y())
    assert (c.bank_conflicts, c.shared_requests, c.global_requests, c.sectors) == (conflicts, 64, 64, 64 * 4)


def test_meetings() -> None:
    c = count("meet", y(), block=64, grid=3)
    assert (c.barriers, c.warp_collectives, c.atomics) == (3, 3 * 2 * 3, 3 * 64)


def test_more_than_the_table_holds() -> None:
    c = count("long_loop", X, y(), 40000)
    assert c.global_reads == 32 * 40000
    assert c.ungrouped == 32 * (40000 - 32768) + 32
    assert c.global_requests == 32768


def test_counters_belong_to_the_last_launch() -> None:
    module = load("patterns")
    count("read_stride", X, y(), 1)
    module.launch("read_stride", 1, 32, [X, y(), 1])
    assert module.counters is None
    with pytest.raises(LaunchConfigError, match="check"):
        load("patterns", "fast").launch("read_stride", 1, 32, [X, y(), 1], count=True)
