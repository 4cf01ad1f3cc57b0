"""Choosing tokens on the device: arg-max, and what the kernel that draws has to know of each sequence.

Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rvllm.ops import ShapeError, expect
from rvllm.runtime import Array, Runtime
from rvllm.sampling import SamplingState, needs_adjusting, single

Words = NDArray[np.uint32]
MAX_VOCAB = 300_000  # the integer masses of so many tokens add up below 2**63
THREADS = 1024


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox 4x32-10, as in philox.cuh: a counter of four words under a key of two -> four words, all of 32 bits."""
    x, y, z, w = counter
    k0, k1 = key
    mask = 2**32 - 1
    for _ in range(10):
        high, low = 0xCD9E8D57 * z, 0xD2511F53 * x
        x, y, z, w = high >> 32 ^ y ^ k0, high & mask, low >> 32 ^ w ^ k1, low & mask
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return [x, y, z, w]


def uniform(seed: Sequence[int], counter: int) -> float:
    """The number of [0, 1) that `sample` draws for (seed, counter), bit for bit: a multiple of 2**-53.

    seed: two words of 32 bits, as `seed_words` gives them.   counter: which draw of this seed, 0 to 2**31 - 1.
    """
    high, low, _, _ = philox([int(counter), 0, 0, 0], [int(word) for word in seed])
    return float((high << 32 | low) >> 11) * 2.0**-53


def seed_words(state: SamplingState) -> Words:
    """A sequence's seed on the device, uint32 [2]: from its seed and index; where it has none, from its own entropy.

    The state's generator was created from the same SeedSequence and keeps it; nothing is drawn from it here.
    """
    return np.asarray(state.rng.bit_generator.seed_seq.generate_state(2), np.uint32)


def needs_host(state: SamplingState) -> bool:
    """Whether this sequence's next token must be chosen by rvllm.sampling.sample, on the host.

    That is so for log probabilities, logit bias, penalties, and as long as `min_tokens` holds back the end. It may
    change from True to False as the output grows, never back.
    """
    return state.params.logprobs is not None or needs_adjusting(state)


def packed_parameters(state: SamplingState) -> Words:
    """What `sample` must know of a sequence but its counter, uint32 [6]: see SamplingArrays for the order."""
    p = state.params
    floats = np.array([single(p.temperature), single(p.top_p), single(p.min_p)]).view(np.uint32)
    top_k = np.uint32(min(max(p.top_k, 0), 2**31 - 1))
    return np.array([floats[0], top_k, floats[1], floats[2], *seed_words(state)], np.uint32)


class SamplingArrays:
    """The inputs of `sample` in fixed places on the device, for steps of up to `max_rows` sequences.

    Notebook 15, section 6.

    words: uint32 [7, max_rows], one array, so that one copy of what `fill` returns sets all. The others are views of
    it: temperature, top_p, min_p float32 [max_rows]; top_k, counters int32 [max_rows]; seeds uint32 [max_rows, 2].
    """

    def __init__(self, rt: Runtime, max_rows: int) -> None:
        self._rt, self.max_rows = rt, max_rows
        self.words: Array = rt.zeros((7, max_rows), np.uint32)
        self.temperature, self.top_k = self.words[0].view(np.float32), self.words[1].view(np.int32)
        self.top_p, self.min_p = self.words[2].view(np.float32), self.words[3].view(np.float32)
        self.seeds: Array = self.words[4:6].reshape(max_rows, 2)
        self.counters: Array = self.words[6].view(np.int32)
        self._known: dict[int, tuple[SamplingState, Words]] = {}  # by id(state); the entry keeps the state alive

    def fill(self, states: Sequence[SamplingState | None], counters: Sequence[int] | None = None) -> Words:
        """Host values for `words`, uint32 [7, max_rows]: row i is for states[i], the others have temperature 0.

        states: None for a row that wants no token.   counters: which draw of its seed each row takes; by default the
        number of tokens that the sequence has put out. ShapeError for more states than rows.
        """
        if len(states) > self.max_rows:
            raise ShapeError(f"sampling: {len(states)} sequences; allowed: up to {self.max_rows}")
        host = np.zeros((7, self.max_rows), np.uint32)
        rows = [i for i, state in enumerate(states) if state is not None]
        wanted = [state for state in states if state is not None]
        known = {id(s): self._known.get(id(s)) or (s, packed_parameters(s)) for s in wanted}
        self._known = known  # those that have left are forgotten
        if wanted:
            packed = np.array([known[id(s)][1] for s in wanted])
            host[:4, rows] = packed[:, :4].T
            host[4:6].reshape(self.max_rows, 2)[rows] = packed[:, 4:]
            host[6, rows] = [len(s.output_token_ids) for s in wanted] if counters is None else np.take(counters, rows)
        return host

    def upload(self, host: Words) -> None:
        """Copy what `fill` returned to the device."""
        if self._rt.is_cuda:
            with self._rt.on_device():
                self.words.set(host)
        else:
            self._rt.submit(partial(np.copyto, self.words, host.copy()))


def sample(
    rt: Runtime, logits: Array, num_rows: Array, arrays: SamplingArrays, sampled: Array, threads: int = THREADS
) -> None:
    """Draw a token for every row of positive temperature: float32 [rows, V] -> int32 sampled [rows].

    num_rows: int32 on the device, its first element is the number of rows in use. Other rows, and those of temperature
    0, are left as they are; -1 says that a row has no finite maximum. threads: a power of two from 32 to 1024.
    """
    _check("sample", logits, sampled)
    if logits.shape[0] > arrays.max_rows:
        raise ShapeError(f"sample: {logits.shape[0]} rows of logits; allowed: up to {arrays.max_rows}")
    a = arrays
    arguments = [a.temperature, a.top_k, a.top_p, a.min_p, a.seeds, a.counters, sampled]
    rt.launch("sample", logits.shape[0], threads, [logits, logits.shape[1], num_rows, *arguments])


def argmax(rt: Runtime, logits: Array, num_rows: Array, sampled: Array, threads: int = THREADS) -> None:
    """The id of each row's largest logit, the lowest one of equals: float32 [rows, V] -> int32 sampled [rows].

    num_rows: as for `sample`; -1 says that a row has no finite maximum. threads: a multiple of 32 up to 1024.
    """
    _check("argmax", logits, sampled)
    rt.launch("argmax", logits.shape[0], threads, [logits, logits.shape[1], num_rows, sampled])


def _check(op: str, logits: Array, sampled: Array) -> None:
    expect(op, logits=(logits, (None, None)))
    rows, vocab = logits.shape
    expect(op, sampled=(sampled, (rows,)))
    if not 1 <= vocab <= MAX_VOCAB:
        raise ShapeError(f"{op}: rows of {vocab:,} logits; allowed: 1 to {MAX_VOCAB:,}")
