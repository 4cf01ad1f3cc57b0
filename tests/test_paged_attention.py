"""Decode attention over the block table against float64 NumPy on the same half pages, in the emulator's check mode.

With RVLLM_TEST_DEVICE=cuda the same tests run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from rvllm.runtime import Runtime

KV_HEADS, PAGE = 2, 16
UNUSED = np.nan  # in cells that no token needs: whatever a sequence left there has no say
UNTOUCHED = 7.0
STARTS = [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (40, 1), (100, 1), (13, 5), (0, 3)]  # (cached, new tokens)
FLOAT_LIKE = 1e-6  # seen: 2e-7. Scores are off by some 2^-22 of themselves, exp2f and the float32 sums by as much
HALF_LIKE = 1e-3  # an output rounded to half is off by up to 2^-11


@dataclass
class Problem:
    """Host arrays of one launch."""

    d: int
    group: int
    qkv: np.ndarray  # float32 or half [N][(G + 2) K d]
    pages: np.ndarray  # half [blocks][2][K][16 d]
    tables: np.ndarray
    positions: np.ndarray
    owners: np.ndarray
    computed: np.ndarray
    rows: np.ndarray

    @property
    def width(self) -> int:
        return self.group * KV_HEADS * self.d

    def split_row(self, token: int) -> list[np.ndarray]:
        """Queries [K][G][d], keys [K][d] and values [K][d] of a token, float64."""
        shapes = (KV_HEADS, self.group, self.d), (KV_HEADS, self.d), (KV_HEADS, self.d)
        parts = np.split(self.qkv[token].astype(np.float64), [self.width, self.width + KV_HEADS * self.d])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def cached(self, owner: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [K][length][d] of a sequence's first tokens, float64."""
        blocks = self.pages[self.tables[owner, : -(-length // PAGE)]].astype(np.float64)
        keys = blocks[:, 0].reshape(-1, KV_HEADS, PAGE, self.d)
        values = blocks[:, 1].reshape(-1, KV_HEADS, self.d, PAGE).swapaxes(2, 3)
        found = [a.swapaxes(0, 1).reshape(KV_HEADS, -1, self.d)[:, :length] for a in (keys, values)]
        return found[0], found[1]

    def expected(self, token: int) -> np.ndarray:
        """One output row, float64 [K G d]."""
        q, own_key, own_value = self.split_row(token)
        keys, values = self.cached(self.owners[token], self.positions[token])
        keys = np.concatenate([keys, own_key[:, None]], axis=1)
        values = np.concatenate([values, own_value[:, None]], axis=1)
        scores = q @ keys.swapaxes(1, 2) / np.sqrt(self.d)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights / weights.sum(axis=-1, keepdims=True) @ values).ravel()


def problem(
    d: int, group: int, starts: list[tuple[int, int]] = STARTS, dtype: Any = np.float32, query_scale: float = 1.0
) -> Problem:
    """Sequences with `cached` tokens in shuffled blocks and some new ones; the pages already hold the new ones too."""
    rng = np.random.default_rng(d + group)
    owners = np.repeat(np.arange(len(starts)), [new for _, new in starts]).astype(np.int32)
    positions = np.concatenate([np.arange(old, old + new) for old, new in starts]).astype(np.int32)
    blocks_of = [-(-(old + new) // PAGE) for old, new in starts]
    tables = np.zeros((len(starts), max(blocks_of) + 2), np.int32)  # what is not needed names block 0, full of NaN
    free = list(rng.permutation(sum(blocks_of)) + 1)
    pages = np.full((sum(blocks_of) + 1, 2, KV_HEADS, PAGE * d), UNUSED, np.float16)
    pages[0] = np.nan
    for owner, ((old, new), count) in enumerate(zip(starts, blocks_of, strict=True)):
        tables[owner, :count] = [free.pop() for _ in range(count)]
        for position in range(old + new):
            page, cell = pages[tables[owner, position // PAGE]], position % PAGE
            page[0].reshape(KV_HEADS, PAGE, d)[:, cell] = rng.standard_normal((KV_HEADS, d))
            page[1].reshape(KV_HEADS, d, PAGE)[:, :, cell] = rng.standard_normal((KV_HEADS, d))
    qkv = rng.standard_normal((len(owners), (group + 2) * KV_HEADS * d))
    qkv[:, : group * KV_HEADS * d] *= query_scale
    computed = np.array([old for old, _ in starts], np.int32)
    rows = rng.permutation(len(owners))[: len(owners) - 3].astype(np.int32)
    return Problem(d, group, qkv.astype(dtype), pages, tables, positions, owners, computed, rows)


def attend(
    rt: Runtime,
    p: Problem,
    splits: int = 1,
    warps: int = 4,
    prefetch: int = 1,
    hi_lo: int = 1,
    rope: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output rows as float64 [N][K G d], and the halfs that they were made of. With `rope` p.pages are changed."""
    bucket = len(p.rows) + 2
    rows = np.append(p.rows, [1 << 30] * 2).astype(np.int32)  # a read through one of these would leave the array
    sizes = {"HEAD_DIM": p.d, "GROUP": p.group, "KV_HEADS": KV_HEADS, "HI_LO": hi_lo}
    tuning = {
        "WARPS": warps,
        "PREFETCH": prefetch,
        "BLOCKS_PER_SM": 1,
        "EVERY_TOKEN": 0,
        "QKV_TYPE": "float" if p.qkv.dtype == np.float32 else "half",
        "RAW_QKV": int(rope is not None),
    }
    out = rt.upload(np.full((len(p.owners), 1 + hi_lo, p.width), UNTOUCHED, np.float16))
    parts = rt.upload(np.full((bucket, KV_HEADS, splits, p.group * (p.d + 2)), np.nan, np.float32))
    chosen, count = rt.upload(rows), rt.upload(np.array([len(p.rows), 99], np.int32))
    host = (p.positions, p.owners, p.computed, p.tables)
    pages, angles = rt.upload(p.pages), parts if rope is None else rt.upload(rope)
    arguments = [
        *(rt.upload(p.qkv.view(np.float32)), pages, chosen, count),
        *(*map(rt.upload, host), p.tables.shape[1], angles, out, parts),
    ]
    rt.launch("paged_attention", (bucket, KV_HEADS, splits), 32 * warps, arguments, defines=sizes | tuning)
    if splits > 1:
        merge = (parts, chosen, count, out)
        rt.launch("attention_merge", (bucket, KV_HEADS), p.group * p.d, merge, defines=sizes | {"SPLITS": splits})
    if rope is not None:
        p.pages = rt.download(pages)
    halfs = rt.download(out)
    return halfs.astype(np.float64).sum(axis=1), halfs


def check(p: Problem, got: np.ndarray, halfs: np.ndarray, tolerance: float) -> None:
    """Chosen rows are right, as ||got - expected|| / ||expected||; the others were left alone."""
    for token in range(len(p.owners)):
        if token in p.rows:
            wanted = p.expected(token)
            error = np.linalg.norm(got[token] - wanted) / np.linalg.norm(wanted)
            assert error <= tolerance, f"token {token} at {p.positions[token]}: {error:.2e}"
        else:
            assert (halfs[token] == UNTOUCHED).all(), f"token {token} was not asked for"


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("d", [64, 128])
def test_paged_attention(rt: Runtime, d: int, group: int, splits: int) -> None:
    p = problem(d, group)
    check(p, *attend(rt, p, splits), FLOAT_LIKE)


@pytest.mark.parametrize("splits", [1, 3])
def test_order_of_threads_does_not_matter(rt: Runtime, splits: int) -> None:
    p = problem(64, 3)
    _, before = attend(rt, p, splits)
    rt.reverse = True
    try:
        _, after = attend(rt, p, splits)
    finally:
        rt.reverse = False
    assert np.array_equal(before, after)


@pytest.mark.parametrize(("warps", "prefetch"), [(2, 1), (2, 2), (2, 3), (8, 2)])
def test_pages_go_round_the_ring(rt: Runtime, warps: int, prefetch: int) -> None:
    """More pages than the ring has slots; some may be loaded early, some are this step's, some come with the wait."""
    p = problem(64, 3, [(150, 1), (140, 25), (130, 1), (0, 1)])
    p.rows = np.array([0, 1, 2, 14, 25, 26, 27], np.int32)
    check(p, *attend(rt, p, 1, warps, prefetch), FLOAT_LIKE)


@pytest.mark.parametrize(("dtype", "hi_lo", "tolerance"), [(np.float16, 0, HALF_LIKE), (np.float16, 1, FLOAT_LIKE)])
def test_queries_in_halfs(rt: Runtime, dtype: Any, hi_lo: int, tolerance: float) -> None:
    """As the prefill path has them."""
    p = problem(64, 3, dtype=dtype)
    check(p, *attend(rt, p, 2, prefetch=2, hi_lo=hi_lo), tolerance)


def test_plain_output_is_the_rounded_one(rt: Runtime) -> None:
    p = problem(64, 3)
    _, both = attend(rt, p)
    got, halfs = attend(rt, p, hi_lo=0)
    check(p, got, halfs, HALF_LIKE)
    assert np.array_equal(halfs[:, 0], both[:, 0])


@pytest.mark.parametrize("splits", [1, 4])
def test_scores_far_apart(rt: Runtime, splits: int) -> None:
    """Scores up to several hundred: one weight is nearly 1, the others vanish, nothing overflows."""
    p = problem(64, 3, query_scale=100.0)
    check(p, *attend(rt, p, splits), 1e-4)  # a score of 400 is off by up to 400 * 2^-22, and so is its weight


def test_a_first_token_is_its_own_value(rt: Runtime) -> None:
    p = problem(64, 3, [(0, 1), (0, 1), (0, 1), (0, 1)])
    got, _ = attend(rt, p)
    for token in p.rows:
        value = np.repeat(p.split_row(token)[2], 3, axis=0).ravel()
        assert np.abs(got[token] - value).max() <= 2.0**-20, "hi + lo keeps 22 bits"


@pytest.mark.parametrize(("d", "group", "dtype"), [(64, 3, np.float16), (128, 1, np.float16), (64, 2, np.float32)])
def test_turns_and_stores_its_own_token(rt: Runtime, d: int, group: int, dtype: Any) -> None:
    """RAW_QKV: as if queries and keys had been turned, and keys and values stored, by a kernel before this one."""
    p = problem(d, group, [(old, 1) for old in (0, 1, 15, 16, 40, 100)], dtype)
    phases = np.exp(1j * np.outer(np.arange(128), 100.0 ** -np.linspace(0, 1, d // 2)))
    rope = np.stack([phases.real, phases.imag], axis=-1).astype(np.float32)
    turned, before, after = replace(p, qkv=p.qkv.astype(np.float64)), p.pages.copy(), p.pages.copy()
    pairs = turned.qkv[:, : p.width + KV_HEADS * d].reshape(len(p.owners), -1, d).view(np.complex128)
    pairs *= phases[p.positions][:, None]
    for token in p.rows:
        _, key, value = turned.split_row(token)
        page, cell = after[p.tables[token, p.positions[token] // PAGE]], p.positions[token] % PAGE
        before_page = before[p.tables[token, p.positions[token] // PAGE]]
        page[0].reshape(KV_HEADS, PAGE, d)[:, cell], page[1].reshape(KV_HEADS, d, PAGE)[:, :, cell] = key, value
        before_page[0].reshape(KV_HEADS, PAGE, d)[:, cell] = UNUSED
        before_page[1].reshape(KV_HEADS, d, PAGE)[:, :, cell] = UNUSED
    p.pages = before  # what the cells held before does not matter
    got, halfs = attend(rt, p, rope=rope)
    check(turned, got, halfs, FLOAT_LIKE)
    np.testing.assert_allclose(p.pages.astype(np.float64), after, rtol=0, atol=2.0**-9, err_msg="as halfs")


def test_no_rows(rt: Runtime) -> None:
    p = problem(64, 3, [(20, 1), (3, 2)])
    p.rows = p.rows[:0]
    _, halfs = attend(rt, p, 2)
    assert (halfs == UNTOUCHED).all()
