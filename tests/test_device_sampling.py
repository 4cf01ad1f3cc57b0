"""Sampling on the device against rvllm.sampling's `draw`, given the same random numbers: token for token.

Both do the same arithmetic, float32 differences and quotients, integer masses and sums. Exponentials may differ in
their last digit: in the emulator hardly ever, on a GPU by up to 2**-23. So a number that falls within that of the
border between two tokens could choose the other one. The seeds here are fixed, and no row is such a case.

In the emulator's check mode blocks are small to save time; one test takes 1,024 threads. RVLLM_TEST_DEVICE=cuda: a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rvllm import sampling
from rvllm.device_sampling import SamplingArrays, argmax, needs_host, philox, sample, seed_words, uniform
from rvllm.ops import ShapeError
from rvllm.runtime import LIVE_SOURCES, Runtime
from rvllm.sampling import SamplingParams, SamplingState

UNTOUCHED = -7
NO_TOKEN = -1


class Fixed:
    """A generator whose next number is known."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


def state(**params: object) -> SamplingState:
    return SamplingState(SamplingParams(**{"temperature": 1.0, "seed": 1} | params))


def on_device(
    rt: Runtime, logits: np.ndarray, states: Sequence[SamplingState | None], counters: Sequence[int], threads: int = 64
) -> np.ndarray:
    """The kernel's tokens; UNTOUCHED where it wrote none."""
    arrays = SamplingArrays(rt, len(logits))
    arrays.upload(arrays.fill(states, counters))
    sampled = rt.upload(np.full(len(logits), UNTOUCHED, np.int32))
    sample(rt, rt.upload(logits), rt.upload(np.array([len(states)], np.int32)), arrays, sampled, threads)
    return rt.download(sampled)


def on_host(logits: np.ndarray, states: Sequence[SamplingState], counters: Sequence[int]) -> np.ndarray:
    """What `draw` makes of the same parameters and the same random numbers."""
    twins = [SamplingState(s.params, index=s.index) for s in states]
    for twin, s, counter in zip(twins, states, counters, strict=True):
        twin.rng = Fixed(uniform(seed_words(s), counter))
    return sampling.draw(logits, twins)


def assert_same(rt: Runtime, logits: np.ndarray, states: Sequence[SamplingState], threads: int = 64) -> None:
    counters = [7 * row for row in range(len(states))]
    got, expected = on_device(rt, logits, states, counters, threads), on_host(logits, states, counters)
    for row in np.flatnonzero(got != expected):
        pytest.fail(f"row {row}: {got[row]}, expected {expected[row]}; {states[row].params}")


def rows_of(kind: str, rows: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    logits = rng.standard_normal((rows, vocab), dtype=np.float32) * 4
    if kind == "ties":
        logits = np.round(logits / 2) * np.float32(2)  # has zeros of both signs
    if kind == "minus infinity":
        logits[:, 1:][rng.random((rows, vocab - 1)) < 0.5] = -np.inf
    if kind == "equal":
        logits[:] = -3.25
    if kind == "far from 0":
        logits = logits * np.float32(0.25) - np.float32(100)
    return logits


def mixed_states(rows: int, vocab: int, rng: np.random.Generator) -> list[SamplingState]:
    """Each filter on in about half of the rows, in all combinations."""

    def number(low: float, high: float, off: float) -> float:
        return float(np.float32(rng.uniform(low, high))) if rng.random() < 0.5 else off

    return [
        state(
            temperature=float(np.float32(np.exp(rng.uniform(-2, 2)))),
            top_k=int(rng.integers(1, vocab + 3)) if rng.random() < 0.5 else 0,
            top_p=number(0.01, 1, 1.0),
            min_p=number(0, 0.3, 0.0),
            seed=int(rng.integers(2**63)),
        )
        for _ in range(rows)
    ]


KINDS = ["normal", "ties", "minus infinity", "equal", "far from 0"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 300])
def test_same_token_as_on_the_host(device: Runtime, kind: str, vocab: int) -> None:
    rng = np.random.default_rng([vocab, len(kind)])
    assert_same(device, rows_of(kind, 40, vocab, rng), mixed_states(40, vocab, rng))


@pytest.mark.parametrize("threads", [32, 1024])
@pytest.mark.parametrize("vocab", [333, 2500])
def test_same_token_whatever_the_block_size(device: Runtime, threads: int, vocab: int) -> None:
    rng = np.random.default_rng(threads)
    assert_same(device, rows_of("ties", 3, vocab, rng), mixed_states(3, vocab, rng), threads)


@pytest.mark.parametrize("kind", KINDS)
def test_same_token_with_a_real_vocabulary(rt: Runtime, kind: str) -> None:
    runtime = rt if rt.is_cuda else Runtime("emulator", mode="fast")
    rng = np.random.default_rng(len(kind))
    states = [state(top_p=float(np.float32(0.9))), state(top_k=50, temperature=0.75), state(temperature=2.0)]
    assert_same(runtime, rows_of(kind, 3, 49_152, rng), states, 1024)


EXTREMES: list[dict[str, object]] = [
    {"temperature": 1e-6},
    {"temperature": 1e6},
    {"temperature": 1e-300},  # below float32: still not arg-max by another kernel
    {"temperature": 1e300},
    {"top_k": 1},
    {"top_k": 2**40},
    {"top_k": -1, "top_p": 1e-30},
    {"top_p": 1e-300},
    {"top_p": 1 - 2.0**-20},
    {"min_p": 1.0},
    {"min_p": 1.0, "temperature": 1e6},
    {"min_p": 1e-300},
    {"min_p": 1.0, "top_k": 1, "top_p": 1e-3},
    {"seed": 0},
    {"seed": 2**64 - 1},
]


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_parameters(device: Runtime, kind: str) -> None:
    states = [state(**params) for params in EXTREMES]
    for vocab in (1, 100):
        assert_same(device, rows_of(kind, len(states), vocab, np.random.default_rng(vocab)), states)


def test_extreme_logits(device: Runtime) -> None:
    huge = np.finfo(np.float32).max
    logits = np.array([[-huge, huge, huge], [-huge, -np.inf, -np.inf], [1e-45, 0, -1e-45], [0, -0.0, 0]], np.float32)
    assert_same(device, logits, [state(seed=s) for s in range(4)])
    assert_same(device, logits, [state(seed=s, top_k=2) for s in range(4)])
    assert_same(device, logits, [state(seed=s, top_p=0.5) for s in range(4)])


def test_among_equal_logits_the_lower_ids_stay(device: Runtime) -> None:
    logits = np.zeros((60, 100), np.float32)
    logits[:, :10] = -1
    for params in ({"top_k": 5}, {"top_p": 0.03, "temperature": 1e-3}):  # 3 of 90 equal ones are 0.033
        drawn = on_device(device, logits, [state(**params)] * 60, range(60))
        assert set(drawn.tolist()) == set(range(10, 10 + params.get("top_k", 3)))


# Filters and chance ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 7}, {"top_p": 0.75}, {"min_p": 0.125}, {"top_k": 12, "top_p": 0.875, "temperature": 1.5}]
)
def test_frequencies_are_the_probabilities(rt: Runtime, params: dict[str, float]) -> None:
    """Pearson's chi-square: its mean is the degrees of freedom f, its deviation sqrt(2 f); 4 deviations are allowed."""
    draws, row = 2000, np.random.default_rng(3).standard_normal((1, 23), dtype=np.float32) * 1.5
    s = state(**params)
    tokens = on_device(rt, np.repeat(row, draws, axis=0), [s] * draws, range(draws), threads=32)
    temperature = sampling.column([s.params], "temperature")
    ordered = -np.sort(-row, axis=1)
    counts = sampling.keep_counts(ordered, [s.params])
    kept = sampling.masses(row, temperature)[0] * sampling.keep_largest(row, ordered, counts)[0]
    expected = kept / kept.sum() * draws
    found = np.bincount(tokens, minlength=23)
    assert not found[expected == 0].any()
    large = expected >= 5  # the rarer ones are one class
    pairs = [*zip(found[large], expected[large], strict=True), (found[~large].sum(), expected[~large].sum())]
    statistic = sum((f - e) ** 2 / e for f, e in pairs if e > 0)
    freedom = sum(e > 0 for _, e in pairs) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_a_row_draws_the_same_in_any_company(device: Runtime) -> None:
    rng = np.random.default_rng(0)
    logits, states = rows_of("normal", 9, 300, rng), mixed_states(9, 300, rng)
    together = on_device(device, logits, states, range(9))
    order = rng.permutation(9)
    assert np.array_equal(on_device(device, logits[order], [states[i] for i in order], order), together[order])
    for i in range(9):
        assert on_device(device, logits[i : i + 1], [states[i]], [i])[0] == together[i]


# Random numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_its_authors_numbers(counter: list[int], key: list[int], expected: str) -> None:
    """The known answers that come with the Random123 library."""
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == expected


UNIFORM = """#include "philox.cuh"
extern "C" __global__ void numbers(const unsigned* seeds, const int* counters, unsigned long long* bits, int n) {
    int i = threadIdx.x;
    if (i < n) bits[i] = (unsigned long long)__double_as_longlong(uniform(seeds + 2 * i, counters[i]));
}
"""


def test_uniform_numbers_equal_pythons_bit_for_bit(device: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIVE_SOURCES, "numbers.cu", UNIFORM)
    rng = np.random.default_rng(0)
    seeds, counters = rng.integers(0, 2**32, (200, 2), np.uint32), rng.integers(0, 2**31, 200, np.int32)
    seeds[:2], counters[:3] = [[0, 0], [2**32 - 1, 2**32 - 1]], [0, 2**31 - 1, 1]
    bits = device.zeros(200, np.uint64)
    device.launch("numbers", 1, 224, [device.upload(seeds), device.upload(counters), bits, 200])
    got = device.download(bits).view(np.float64)
    expected = [uniform(s, c) for s, c in zip(seeds, counters, strict=True)]
    assert np.array_equal(got, expected)
    assert got.min() >= 0 and got.max() < 1 and abs(got.mean() - 0.5) < 0.1


def test_seeds() -> None:
    """From seed and index; without a seed different for every state, and nothing is drawn from its generator."""
    seeded = [SamplingState(SamplingParams(seed=5), index=i) for i in (0, 1, 0)]
    words = [tuple(seed_words(s)) for s in seeded]
    assert words[0] == words[2] != words[1]
    assert words[1] == tuple(np.random.SeedSequence([5, 1]).generate_state(2))
    unseeded = [SamplingState(SamplingParams()) for _ in range(20)]
    assert len({tuple(seed_words(s)) for s in unseeded}) == 20
    assert tuple(seed_words(unseeded[0])) == tuple(seed_words(unseeded[0]))
    assert seeded[0].rng.random() == SamplingState(SamplingParams(seed=5)).rng.random()


# Arrays ---------------------------------------------------------------------------------------------------------------


def test_arrays_hold_what_states_say(rt: Runtime) -> None:
    arrays = SamplingArrays(rt, 5)
    states = [state(temperature=0.5, top_k=-1, top_p=0.25, seed=9), None, state(temperature=0.0, top_k=3, min_p=0.5)]
    states[0].output_token_ids += [4, 4, 4]
    arrays.upload(arrays.fill(states))
    assert rt.download(arrays.temperature).tolist() == [0.5, 0, 0, 0, 0]
    assert rt.download(arrays.top_k).tolist() == [0, 0, 3, 0, 0]
    assert rt.download(arrays.top_p).tolist() == [0.25, 0, 1, 0, 0]
    assert rt.download(arrays.min_p).tolist() == [0, 0, 0.5, 0, 0]
    assert rt.download(arrays.counters).tolist() == [3, 0, 0, 0, 0]
    assert rt.download(arrays.seeds)[0].tolist() == seed_words(states[0]).tolist()
    assert not rt.download(arrays.seeds)[1].any()


def test_arrays_follow_states_to_other_rows(rt: Runtime) -> None:
    arrays, (a, b) = SamplingArrays(rt, 2), (state(seed=1), state(seed=2))
    first, second = arrays.fill([a, b], [10, 20]), arrays.fill([b, a], [21, 11])
    for word in (*range(4), 6):
        assert second[word].tolist() == ([21, 11] if word == 6 else first[word][::-1].tolist())
    assert np.array_equal(second[4:6].reshape(2, 2), first[4:6].reshape(2, 2)[::-1])
    assert arrays.fill([a])[0].tolist() == [first[0, 0], 0]
    assert not arrays.fill([]).any()


def test_which_rows_need_the_host() -> None:
    assert not needs_host(state(top_k=5, top_p=0.5, min_p=0.1))
    for params in ({"logprobs": 0}, {"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": -1}):
        assert needs_host(state(**params))
    assert needs_host(state(logit_bias={3: 1.0}))
    waiting = state(min_tokens=2)
    assert needs_host(waiting)
    waiting.output_token_ids += [1, 2]
    assert not needs_host(waiting)


# Rows that are left alone, and rows that choose nothing ---------------------------------------------------------------

NAN, INF = np.float32("nan"), np.float32("inf")
BAD = {
    "NaN first": [NAN, 1, 2],
    "NaN last": [0, 1, NAN],
    "negative NaN": [0, -NAN, INF],
    "infinity": [0, INF, 1],
    "minus infinity alone": [-INF, -INF, -INF],
}


@pytest.mark.parametrize("name", BAD)
def test_rows_without_a_finite_maximum(device: Runtime, name: str) -> None:
    logits = np.zeros((3, 70), np.float32)
    logits[1] = -INF
    logits[1, [0, 35, 69]] = BAD[name]
    assert on_device(device, logits, [state(top_k=1)] * 3, [0, 0, 0]).tolist() == [0, NO_TOKEN, 0]
    sampled = device.zeros(3, np.int32)
    argmax(device, device.upload(logits), device.upload(np.array([3], np.int32)), sampled, 64)
    assert device.download(sampled).tolist() == [0, NO_TOKEN, 0]


def test_rows_that_are_not_wanted_are_left_alone(device: Runtime) -> None:
    logits = rows_of("normal", 5, 50, np.random.default_rng(0))
    logits[2] = NAN
    got = on_device(device, logits, [state(top_k=1), state(temperature=0.0), None], [0, 0, 0])
    assert got.tolist() == [logits[0].argmax(), *[UNTOUCHED] * 4]


@pytest.mark.parametrize("threads", [32, 256, 1024])
@pytest.mark.parametrize("vocab", [1, 33, 300, 1025])
def test_argmax(device: Runtime, vocab: int, threads: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.concatenate([rows_of(kind, 2, vocab, rng) for kind in KINDS])
    logits[0, :] = [-0.0] * (vocab // 2) + [0.0] * (vocab - vocab // 2)
    sampled = device.upload(np.full(len(logits), UNTOUCHED, np.int32))
    used = len(logits) - 1
    argmax(device, device.upload(logits), device.upload(np.array([used], np.int32)), sampled, threads)
    assert np.array_equal(device.download(sampled), [*logits[:used].argmax(axis=1), UNTOUCHED])


def test_arrays_that_do_not_fit_are_named(rt: Runtime) -> None:
    arrays, count, two = SamplingArrays(rt, 2), rt.zeros(1, np.int32), rt.zeros(2, np.int32)
    with pytest.raises(ShapeError, match="sampled has shape"):
        sample(rt, rt.zeros((3, 5)), count, arrays, two)
    with pytest.raises(ShapeError, match="3 rows of logits; allowed: up to 2"):
        sample(rt, rt.zeros((3, 5)), count, arrays, rt.zeros(3, np.int32))
    with pytest.raises(ShapeError, match="300,001 logits; allowed: 1 to 300,000"):
        argmax(rt, rt.zeros((1, 300_001)), count, rt.zeros(1, np.int32))
    with pytest.raises(ShapeError, match="3 sequences; allowed: up to 2"):
        arrays.fill([None] * 3)
