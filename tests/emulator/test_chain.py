"""Kernels that start before the one before them has ended: what they must not touch yet, and what they may."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rvllm.emulator import Chain, EmulatorError, LaunchConfigError

from .conftest import bug_line, load

N = 64


class Links:
    """Launches of tests/emulator/kernels/chain.cu in one chain, forwards or backwards."""

    def __init__(self, reverse: bool) -> None:
        self.chain, self.reverse = Chain(), reverse
        self.a, self.b, self.c = (np.full(N, value, np.float32) for value in (1, 2, 3))

    def __call__(self, kernel: str, x: np.ndarray, out: np.ndarray, dependent: bool = True, grid: int = 2) -> None:
        options: dict[str, Any] = {"chain": self.chain, "dependent": dependent, "reverse": self.reverse}
        load("chain").launch(kernel, grid, N // 2, [x, out], **options)


@pytest.fixture(params=[False, True], ids=["in order", "reversed"])
def links(request: pytest.FixtureRequest) -> Links:
    return Links(request.param)


def refused(links: Links, kernel: str, x: np.ndarray, out: np.ndarray, kind: str, *words: str) -> EmulatorError:
    """The report of a dependent launch: kind, kernel, line and words."""
    with pytest.raises(EmulatorError) as caught:
        links(kernel, x, out)
    error = caught.value
    assert (error.kind, error.kernel) == (kind, kernel)
    if kind != "no wait":
        assert (error.file, error.line) == ("chain.cu", bug_line("chain", kernel))
        assert error.block and error.thread
    for word in words:
        assert word in str(error)
    return error


def test_reads_what_the_kernel_before_writes(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    error = refused(links, "reads_early", links.b, links.c, "early read", "argument 0 `x`", "early_link comes before")
    assert "writes there" in error.detail and "lets this kernel start" not in error.detail


def test_the_first_of_a_chain_starts_when_all_has_ended(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    links("reads_early", links.b, links.c, dependent=False)
    links("writes_early", links.a, links.b, dependent=False)


def test_what_is_older_than_the_chain_may_be_read(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    links("early_link", links.b, links.c, dependent=False)
    links("reads_early", links.b, links.a)
    assert links.a.tolist() == [3] * N


def test_writes_what_the_kernel_before_reads(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    refused(links, "writes_early", links.c, links.a, "early write", "argument 1 `out`", "early_link", "reads there")


def test_writes_what_the_kernel_before_writes(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    refused(links, "writes_early", links.c, links.b, "early write", "`out`", "early_link comes before and writes there")


def test_atomics_read_and_write(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    refused(links, "adds_early", links.c, links.a, "early write", "atomic update", "early_link")


def test_two_may_read_the_same_at_once(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    links("reads_early", links.a, links.c)
    assert links.c.tolist() == [2] * N


@pytest.mark.parametrize("between", ["early_link", "late_link", "silent_link"])
def test_two_kernels_back(links: Links, between: str) -> None:
    """The one between has waited before it let this one start, or it has not."""
    other = np.zeros(N, np.float32)
    links("early_link", links.a, links.b, dependent=False)
    links(between, links.a, other)
    if between == "early_link":
        words = "early_link comes before", "early_link lets this kernel start before it has waited"
        refused(links, "reads_early", links.b, links.c, "early read", *words)
    else:
        links("reads_early", links.b, links.c)


def test_many_kernels_back(links: Links) -> None:
    first, rest = np.zeros(N, np.float32), [np.zeros(N, np.float32) for _ in range(5)]
    links("early_link", links.a, first, dependent=False)
    for before, after in pairwise(rest):
        links("early_link", before, after)
    refused(links, "reads_early", first, links.c, "early read", "lets this kernel start")


def test_a_later_write_does_not_hide_an_earlier_one(links: Links) -> None:
    """In a block that has waited the kernel writes what another block of it reads early."""
    links("early_link", links.a, links.b, dependent=False)
    refused(links, "reads_early", links.b, links.b, "early read", "early_link")


def test_never_waits(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    refused(links, "never_waits", links.a, links.c, "no wait", "may end before early_link")
    links("never_waits", links.a, links.c, dependent=False)


@pytest.mark.parametrize("kernel", ["idle_block_returns", "one_waits_for_all", "one_waits_for_a_warp"])
def test_ways_to_wait(links: Links, kernel: str) -> None:
    links("early_link", links.a, links.b, dependent=False)
    links(kernel, links.b, links.c)
    assert links.c[: N // 2].tolist() == [3] * (N // 2)


def test_a_thread_that_has_not_waited_itself(links: Links) -> None:
    links("early_link", links.a, links.b, dependent=False)
    refused(links, "one_waits_alone", links.b, links.c, "early read", "early_link")


def test_unsettled_bytes_are_no_numbers(links: Links) -> None:
    links("early_link", links.a, links.b[: N // 2], dependent=False, grid=1)
    links("unsettled", links.b, links.c)
    assert np.isnan(links.c[: N // 2]).all() and links.c[N // 2 :].tolist() == [2] * (N // 2)
    links("unsettled", links.b, links.c, dependent=False)
    assert links.c.tolist() == [2] * N


def test_views_of_the_same_memory(links: Links) -> None:
    memory = np.zeros(4 * N, np.float32)
    links("early_link", links.a, memory[N : 2 * N], dependent=False)
    links("reads_early", memory[2 * N : 3 * N], links.c)
    links("early_link", links.a, memory[N : 2 * N], dependent=False)
    refused(links, "reads_early", memory.reshape(2, -1)[0, 2:][N - 3 : 2 * N - 3], links.c, "early read")


def test_neighbouring_halfs(links: Links) -> None:
    memory = np.zeros(2 * N, np.float16)
    links("half_words", np.ones(2 * N, np.float16), memory, dependent=False)  # writes the even ones
    links("half_words", memory, np.zeros(2 * N, np.float16))  # reads the odd ones


def test_memory_of_others_is_forgotten(links: Links) -> None:
    links("early_link", links.a, np.zeros(N, np.float32), dependent=False)
    gc.collect()
    assert len(links.chain._marks) == 1


def test_fast_mode_has_no_chains() -> None:
    x = np.zeros(N, np.float32)
    with pytest.raises(LaunchConfigError, match="check"):
        load("chain", "fast").launch("early_link", 2, N // 2, [x, x], chain=Chain())
