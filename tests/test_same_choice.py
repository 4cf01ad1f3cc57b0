"""Host and device choose alike: the same kept tokens and the same draws, at every border that can be hit exactly.

The kernel runs in the emulator's check mode; its random number is taken from the seed itself, so that a test can say
which number is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rvllm import sampling
from rvllm.device_sampling import SamplingArrays, argmax, sample
from rvllm.runtime import LIVE_SOURCES, Runtime
from rvllm.sampling import LogitsError, SamplingParams, SamplingState, column, keep_counts, masses

# philox.cuh with the two words of the seed as the 53 bits drawn: high word first.
NUMBER_IS_SEED = """#pragma once
__device__ inline double uniform(const unsigned* seed, unsigned) {
    unsigned long long whole = (unsigned long long)seed[0] << 32 | seed[1];
    return (double)(whole >> 11) * 0x1p-53;
}
"""
LAST = 1 - 2.0**-53


@pytest.fixture
def rt(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A device that draws what its seeds say."""
    monkeypatch.setitem(LIVE_SOURCES, "philox.cuh", NUMBER_IS_SEED)
    return Runtime("emulator")


class Number:
    """A generator whose next number is known."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


def choices(
    rt: Runtime, logits: np.ndarray, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> tuple[list[int], list[int]]:
    """The tokens of host and device, row by row, for these random numbers, cut to multiples of 2**-53."""
    states = [SamplingState(p) for p in params]
    arrays, count = SamplingArrays(rt, len(states)), rt.upload(np.array([len(states)], np.int32))
    words = arrays.fill(states)
    whole = np.array([int(number * 2**53) << 11 for number in numbers], np.uint64)
    seeds = np.stack([whole >> np.uint64(32), whole & np.uint64(2**32 - 1)], axis=1)
    words[4:6].reshape(-1, 2)[:] = seeds
    arrays.upload(words)
    chosen = rt.zeros(len(states), np.int32)
    sample(rt, rt.upload(logits), count, arrays, chosen, threads=64)
    for state, number in zip(states, numbers, strict=True):
        state.rng = Number(math.floor(number * 2**53) * 2.0**-53)
    return sampling.draw(logits, states).tolist(), rt.download(chosen).tolist()


def kept(rt: Runtime, probabilities: Sequence[float], **params: Any) -> tuple[set[int], set[int]]:
    """What host and device can draw, by numbers from 0 to just below 1."""
    numbers = [*(k / 256 for k in range(256)), LAST]
    logits = np.tile(np.log(np.array(probabilities)).astype(np.float32), (len(numbers), 1))
    host, device = choices(rt, logits, [SamplingParams(**{"temperature": 1.0} | params)] * len(numbers), numbers)
    return set(host), set(device)


@pytest.mark.parametrize(
    ("probabilities", "params", "tokens"),
    [
        ([0.5, 0.3, 0.2], {"top_p": 0.8}, 2),
        ([0.5, 0.3, 0.2], {"top_p": 0.5}, 1),
        ([0.5, 0.3, 0.2], {"top_p": 0.81}, 3),
        ([0.5, 0.25, 0.125, 0.125], {"top_p": 0.75}, 2),
        ([0.5, 0.25, 0.125, 0.125], {"top_p": 0.875}, 3),
        ([0.5, 0.25, 0.125, 0.125], {"top_p": 0.876}, 4),
        ([0.125] * 8, {"top_p": 0.625}, 5),
        ([0.1] * 10, {"top_p": 0.3}, 3),
        ([0.1] * 10, {"top_p": 0.7}, 7),
        ([0.1] * 10, {"top_p": 0.9}, 9),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.7, "top_k": 4}, 2),
        ([0.4, 0.2, 0.2, 0.2], {"top_p": 0.75, "top_k": 3}, 2),
        ([0.5, 0.25, 0.125, 0.125], {"min_p": 0.5}, 2),
        ([0.5, 0.25, 0.125, 0.125], {"min_p": 0.25}, 4),
        ([0.5, 0.25, 0.125, 0.125], {"min_p": 0.25, "top_p": 0.875}, 3),
        ([0.5, 0.25, 0.125, 0.125], {"min_p": 0.25, "top_p": 0.875, "top_k": 2}, 2),
        ([0.4, 0.4, 0.2], {"min_p": 1.0}, 2),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 1 - 1e-9}, 4),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 1e-300}, 1),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.9, "temperature": 1e-300}, 1),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.75, "temperature": 1e300}, 3),
        ([0.4, 0.3, 0.2, 0.1], {"min_p": 1.0, "temperature": 1e30}, 1),
        ([1.0], {"top_p": 0.3, "min_p": 0.9, "top_k": 7}, 1),
    ],
)
def test_borders(rt: Runtime, probabilities: list[float], params: dict[str, Any], tokens: int) -> None:
    host, device = kept(rt, probabilities, **params)
    assert host == device == set(range(tokens))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 10, 33, 100])
def test_numbers_at_the_border_of_two_tokens(rt: Runtime, n: int) -> None:
    """Equal tokens: k/n is the first number of token k, up to what a multiple of 2**-53 can hold."""
    numbers = [0.0, LAST, *(k / n for k in range(n)), *(math.nextafter(k / n, 0) for k in range(1, n))]
    host, device = choices(rt, np.zeros((len(numbers), n), np.float32), [SamplingParams(1.0)] * len(numbers), numbers)
    assert host == device
    assert host[:2] == [0, n - 1]
    if n & n - 1 == 0:
        assert host[2:] == [*range(n), *range(n - 1)]


RULES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.5, 2.0, 0.7, 1e-30, 1e30, 5e-324, 1e300]),
        "top_k": st.sampled_from([0, -1, 1, 2, 5, 10**12]),
        "top_p": st.sampled_from([1.0, 1 - 1e-9, 1 - 2.0**-20, 0.9, 0.8, 0.75, 0.5, 0.3, 0.125, 1e-9, 5e-324]),
        "min_p": st.sampled_from([0.0, 1e-300, 0.1, 0.25, 0.3, 0.5, 1.0]),
    }
)
NUMBERS = st.one_of(
    st.sampled_from([0.0, 2.0**-53, 0.5, 0.75, LAST]),
    st.integers(0, 2**53 - 1).map(lambda k: k * 2.0**-53),
    st.tuples(st.integers(0, 9), st.just(10)).map(lambda pair: pair[0] / pair[1]),
)
VOCABULARIES = st.sampled_from([1, 2, 3, 7, 31, 65, 130])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_exact_probabilities_choose_alike(rt: Runtime, data: st.DataObject) -> None:
    """Powers of two and ties, whatever the parameters and the numbers."""
    vocab = data.draw(VOCABULARIES)
    params = [SamplingParams(**data.draw(RULES)) for _ in range(4)]
    numbers = [data.draw(NUMBERS) for _ in params]
    powers = np.array(data.draw(st.lists(st.integers(-12, 0), min_size=4 * vocab, max_size=4 * vocab)))
    logits = (powers * math.log(2)).astype(np.float32).reshape(4, vocab)
    host, device = choices(rt, logits, params, numbers)
    assert host == device, (logits.tolist(), params, numbers)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VOCABULARIES, st.lists(st.tuples(RULES, NUMBERS), min_size=4, max_size=4), st.integers(0, 2**32))
def test_random_logits_choose_alike(rt: Runtime, vocab: int, rows: list[tuple[Any, float]], seed: int) -> None:
    """Unless a sum lies within 2**-22 of what it is compared with."""
    logits = np.random.default_rng(seed).standard_normal((4, vocab), dtype=np.float32) * np.float32(5)
    params, numbers = [SamplingParams(**rule) for rule, _ in rows], [number for _, number in rows]
    host, device = choices(rt, logits, params, numbers)
    for row in np.flatnonzero(np.array(host) != device):
        assert is_at_a_border(logits[row], params[row], numbers[row]), (params[row], numbers[row])


def is_at_a_border(logits: np.ndarray, params: SamplingParams, number: float) -> bool:
    """Whether an exponential's last digit may decide: how many tokens top-p keeps, or which one is drawn."""
    ordered = -np.sort(-logits[None], axis=1)
    running = np.cumsum(masses(ordered, column([params], "temperature")), axis=1)[0]
    whole = running[(params.top_k if 0 < params.top_k < len(logits) else len(logits)) - 1]
    close_to_p = np.abs(running / whole - params.top_p * sampling.REACHED) < 2.0**-22
    kept = masses(logits[None], column([params], "temperature"))
    kept *= sampling.keep_largest(logits[None], ordered, keep_counts(ordered, [params]))
    drawn = np.cumsum(kept) / kept.sum()
    return bool(close_to_p.any() or (np.abs(drawn - number) < 2.0**-22).any())


@pytest.mark.parametrize("place", [0, 1, 31, 32, 63, 64, 99])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_logit_is_found_wherever_it_is(rt: Runtime, place: int, bad: float) -> None:
    """LogitsError on both sides, greedy or not; the row beside it is chosen as ever."""
    logits = np.zeros((2, 100), np.float32)
    logits[0, place], logits[1, 5] = bad, 1
    for params in (SamplingParams(), SamplingParams(1.0, top_k=1), SamplingParams(1.0, top_p=0.5, min_p=0.1)):
        states = [SamplingState(params)] * 2
        with pytest.raises(LogitsError, match="sequence 0"):
            sampling.sample(logits, states)
        chosen, count = rt.zeros(2, np.int32), rt.upload(np.array([2], np.int32))
        arrays = SamplingArrays(rt, 2)
        arrays.upload(arrays.fill(states))
        argmax(rt, rt.upload(logits), count, chosen, threads=64)
        sample(rt, rt.upload(logits), count, arrays, chosen, threads=64)
        tokens = rt.download(chosen)
        assert tokens[0] == -1 and tokens[1] >= 0
