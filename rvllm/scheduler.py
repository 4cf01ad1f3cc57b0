"""Who computes what in the next step: continuous batching, chunked prefill, preemption by recomputation.

Generated from notebooks/11_continuous_batching.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol

from rvllm.block_pool import BlockPool, blocks_needed, grow_table
from rvllm.errors import RvllmError
from rvllm.step import Step, make_step


class Status(Enum):
    """Where a sequence is. A preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, and how far they are computed: all that the scheduler knows of an answer. Notebook 11, section 3.

    token_ids: the prompt and what has been generated.
    num_computed_tokens: those whose keys and values are in the cache, always the first ones. Between two steps at least
    one token is not computed: of a sequence that decodes exactly one, the newest. It counts in no block yet.
    block_table: cache blocks in order; an array of ints, so that NumPy reads it in one piece.
    num_cached_tokens: tokens that the prefix cache saved it, in all its starts.   prefix: belongs to the prefix cache.
    """

    def __init__(self, seq_id: int, prompt_token_ids: list[int]) -> None:
        self.seq_id, self.token_ids, self.num_prompt_tokens = seq_id, list(prompt_token_ids), len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_table = array("i")
        self.prefix: list[Any] = []
        self.status = Status.WAITING
        self.num_cached_tokens = self.num_preemptions = 0

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that are known and still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens


class PrefixCache(Protocol):
    """What the scheduler asks of a prefix cache; `holds` is for those who watch."""

    def match(self, sequence: Sequence) -> list[Any]:
        """Entries, each with a `.block`, that hold the first full blocks of `sequence.token_ids`; never all tokens."""

    def publish(self, sequence: Sequence) -> None:
        """Full blocks of `sequence` whose keys and values are computed may be found from now on."""

    def withdraw(self, sequence: Sequence) -> None:
        """What the blocks of `sequence` hold is not to be trusted: they may not be found."""

    def holds(self, block: int) -> bool:
        """Whether this block can be found."""


class NoPrefixCache:
    """Finds nothing and keeps nothing. Notebook 12 writes the other one."""

    def match(self, _sequence: Sequence) -> list[Any]:
        """Nothing."""
        return []

    def publish(self, _sequence: Sequence) -> None:
        """Nothing."""

    def withdraw(self, _sequence: Sequence) -> None:
        """Nothing."""

    def holds(self, _block: int) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class Schedule:
    """What one step computes: `num_new_tokens[i]` tokens of `sequences[i]`; `step` is the same for the model.

    `preempted`: sequences that had to give their blocks back for it.
    """

    sequences: list[Sequence]
    num_new_tokens: list[int]
    preempted: list[Sequence]
    step: Step

    @property
    def sampled_rows(self) -> list[int]:
        """Sequences whose last known token this step computes: they get a next one. Ask before they are counted."""
        counted = zip(self.sequences, self.num_new_tokens, strict=True)
        return [row for row, (sequence, n) in enumerate(counted) if sequence.num_uncomputed_tokens == n]


class InvariantError(RvllmError):
    """The scheduler's books do not agree: a fault in the engine."""


class Scheduler:
    """Decides which tokens the next step computes, and which cache blocks they go to. Notebook 11, section 4.

    First come, first served, and nobody overtakes. `running` and then `waiting` hold the sequences in the order in
    which they came, preempted ones included, hence:
    - the oldest gets its tokens and its blocks in every step, so it ends, and so does whoever is oldest then;
    - of the running sequences only the last can have more than one token to compute, since nobody is admitted
      behind an unfinished prompt: all others decode, one token each, and a long prompt gets what they leave.
    A step computes at most `max_num_batched_tokens` tokens of at most `max_num_seqs` sequences.
    """

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.pool = pool
        self.prefix_cache = NoPrefixCache() if prefix_cache is None else prefix_cache
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = self.num_cached_tokens = 0  # since the beginning

    @property
    def max_num_tokens(self) -> int:
        """How long a sequence can get when it has the whole pool. Longer ones would wait for ever: `add` refuses."""
        return self.pool.num_blocks * self.pool.block_size

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. It must never grow beyond `max_num_tokens`."""
        if not 1 <= len(sequence.token_ids) <= self.max_num_tokens:
            raise ValueError(f"{len(sequence.token_ids)} tokens; allowed: 1 to {self.max_num_tokens}")
        self.waiting.append(sequence)

    def schedule(self) -> Schedule | None:
        """The next step, with its blocks; None if nothing is left to compute. Follow it with `update` or `restart`."""
        preempted: list[Sequence] = []
        counts = self._continue_running(preempted)
        self._admit_waiting(counts)  # never one that was preempted just now: its blocks went to somebody
        if self.waiting and not self.running:
            raise InvariantError(f"{len(self.waiting)} sequences wait and nobody runs: blocks are lost")
        sequences = [s for s, count in zip(self.running, counts, strict=False) if count]  # 0: its last token is coming
        if not sequences:
            return None
        counts = [count for count in counts if count]
        computed, tables = [s.num_computed_tokens for s in sequences], [s.block_table for s in sequences]
        new_token_ids = [s.token_ids[i : i + n] for s, i, n in zip(sequences, computed, counts, strict=True)]
        return Schedule(sequences, counts, preempted, make_step(new_token_ids, computed, tables, self.pool.block_size))

    def update(self, schedule: Schedule) -> None:
        """The step was computed."""
        self.advance(schedule)
        self.publish(schedule)

    def advance(self, schedule: Schedule) -> None:
        """Count the step's tokens."""
        for sequence, count in zip(schedule.sequences, schedule.num_new_tokens, strict=True):
            sequence.num_computed_tokens += count

    def publish(self, schedule: Schedule) -> None:
        """The tokens counted so far are computed, and known: only now may others find the full blocks."""
        for sequence in schedule.sequences:
            if sequence.status is Status.RUNNING:
                self.prefix_cache.publish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, at its end or because it was aborted; wherever it is, its blocks come back."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self._release(sequence)
        sequence.status = Status.FINISHED

    def restart(self) -> None:
        """A step failed half way: nobody trusts what it wrote, and all running sequences start over."""
        while self.running:
            self._preempt(self.running.pop())

    def _continue_running(self, preempted: list[Sequence]) -> list[int]:
        """Tokens for the running sequences, from the oldest on, until the budget is spent: how many for each."""
        counts: list[int] = []
        budget = self.max_num_batched_tokens
        while budget and len(counts) < len(self.running):
            sequence = self.running[len(counts)]
            count = min(sequence.num_uncomputed_tokens, budget)
            num_tokens = sequence.num_computed_tokens + count
            covered = len(sequence.block_table) * self.pool.block_size
            if num_tokens > covered and not self._make_room(sequence, num_tokens, preempted):
                break
            counts.append(count)
            budget -= count
        return counts

    def _make_room(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Blocks for `num_tokens` tokens, at the cost of the youngest; False if the youngest is `sequence` itself."""
        while blocks_needed(num_tokens, self.pool.block_size) - len(sequence.block_table) > self.pool.num_free:
            youngest = self.running.pop()
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is sequence:
                return False
        grow_table(self.pool, sequence.block_table, num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give all blocks back and wait, first in the queue; the tokens are kept and computed again later."""
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def _admit_waiting(self, counts: list[int]) -> None:
        """Start waiting sequences with the budget that is left; `counts` grows with `running`."""
        budget = self.max_num_batched_tokens - sum(counts)
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self._take_blocks(sequence):
                break
            count = min(sequence.num_uncomputed_tokens, budget)
            grow_table(self.pool, sequence.block_table, sequence.num_computed_tokens + count)
            sequence.status = Status.RUNNING
            self.running.append(self.waiting.popleft())
            counts.append(count)
            budget -= count

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Share the cached blocks of a sequence's beginning, if the rest of its tokens finds free blocks too.

        Blocks for its whole prompt must be free, though it takes them chunk by chunk: one that is admitted too early
        would be the first to be preempted. A cached block that nobody uses counts among the free ones.
        """
        entries = self.prefix_cache.match(sequence)
        in_use = sum(self.pool.ref_counts[entry.block] > 0 for entry in entries)
        if blocks_needed(len(sequence.token_ids), self.pool.block_size) - in_use > self.pool.num_free:
            return False
        for entry in entries:
            self.pool.share(entry.block)
            sequence.block_table.append(entry.block)
        sequence.prefix = entries
        sequence.num_computed_tokens = len(entries) * self.pool.block_size
        sequence.num_cached_tokens += sequence.num_computed_tokens
        self.num_cached_tokens += sequence.num_computed_tokens
        return True

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table, sequence.prefix = array("i"), []


def check_invariants(scheduler: Scheduler, complete: Collection[Sequence] = ()) -> None:
    """Compare the scheduler's books with each other, between two steps; InvariantError names what does not agree.

    complete: sequences with nothing left to compute, since their last token is coming (part IV).
    """
    pool, running, waiting = scheduler.pool, scheduler.running, scheduler.waiting
    owners = [0] * pool.num_blocks
    for sequence in running:
        for block in sequence.block_table:
            owners[block] += 1
    faults = {
        "a block is owned as often as its reference count says": owners == pool.ref_counts,
        "the blocks without owner are the free ones": sorted(pool.free_blocks)
        == [block for block, users in enumerate(owners) if users == 0],
        "no table holds a block twice": all(len(set(s.block_table)) == len(s.block_table) for s in running),
        "a table has the blocks that the computed tokens fill": all(
            len(s.block_table) == blocks_needed(s.num_computed_tokens, pool.block_size) for s in running
        ),
        "something is left to compute in each": all(
            (s.num_uncomputed_tokens == 0) == (s in complete) and s.num_uncomputed_tokens >= 0 for s in running
        ),
        "all but the last running sequence decode": all(s.num_uncomputed_tokens <= 1 for s in running[:-1]),
        "running first, then waiting, is the order of arrival": _ascending([s.seq_id for s in [*running, *waiting]]),
        "no more than max_num_seqs run": len(running) <= scheduler.max_num_seqs,
        "who waits holds nothing": not any(s.block_table or s.num_computed_tokens for s in waiting),
        "every sequence is where its status says": all(s.status is Status.RUNNING for s in running)
        and all(s.status is Status.WAITING for s in waiting),
    }
    if broken := [rule for rule, holds in faults.items() if not holds]:
        raise InvariantError(f"broken: {'; '.join(broken)}")


def _ascending(numbers: list[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))
