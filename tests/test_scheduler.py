"""The scheduler alone, without a model: a stand-in fills the cache, and an independent account checks every read.

The account knows of each cache slot which history (the tokens up to and including its own) was written there last.
Sharing of the wrong block, use of a block that was freed, or sharing before the block is computed all end in a slot
that holds another history than the sequence that reads it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rvllm import prefix_cache
from rvllm.block_pool import BlockPool
from rvllm.prefix_cache import PrefixCache
from rvllm.scheduler import InvariantError, Schedule, Scheduler, Sequence, Status, check_invariants

CACHES = pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
RUBBISH = -1  # what a step that failed leaves in the slots that it was to write


class World:
    """A scheduler, the sequences in it, and the account of what the cache holds. Every step is checked."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        caching: bool = False,
        seed: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        cache = PrefixCache(self.pool) if caching else None
        self.scheduler = Scheduler(self.pool, max_num_seqs, max_num_batched_tokens, cache)
        self.random = random.Random(seed)
        self.slots: dict[int, int] = {}  # cache slot -> history
        self.histories: dict[tuple[int, int], int] = {}  # (history before, token) -> history
        self.own: dict[Sequence, list[int]] = {}  # of each unfinished sequence, oldest first: its history by position
        self.goals: dict[Sequence, int] = {}
        self.deadlines: dict[Sequence, int] = {}
        self.num_steps = self.num_ids = 0

    def add(self, prompt: list[int], num_new: int = 4) -> Sequence:
        """A sequence that ends `num_new` tokens after its prompt, or where the pool ends."""
        sequence = Sequence(self.num_ids, prompt)
        self.num_ids += 1
        self.scheduler.add(sequence)
        self.goals[sequence] = min(len(prompt) + num_new, self.scheduler.max_num_tokens)
        self.own[sequence] = []
        self._extend_history(sequence)
        self._set_deadlines([sequence])
        return sequence

    def step(self, choose: Callable[[Sequence], int] | None = None) -> Schedule | None:
        """One step; every sequence whose last known token it computes gets a new one, and leaves at its goal."""
        schedule = self._schedule()
        if schedule is None:
            return None
        self._forward(schedule)
        self.scheduler.update(schedule)
        for sequence in schedule.sequences:
            if sequence.num_uncomputed_tokens == 0:
                if len(sequence.token_ids) >= self.goals[sequence]:
                    self.finish(sequence)
                else:
                    sequence.token_ids.append(choose(sequence) if choose else self.random.randrange(2))
                    self._extend_history(sequence)
        check_invariants(self.scheduler)
        assert all(self.num_steps <= self.deadlines[sequence] for sequence in self.own), "a sequence starves"
        return schedule

    def failing_step(self) -> None:
        """A step whose forward pass fails half way: everything that runs starts over."""
        schedule = self._schedule()
        if schedule is not None:
            self.slots |= dict.fromkeys(schedule.step.slot_mapping.tolist(), RUBBISH)
            self.scheduler.restart()
            self._set_deadlines(list(self.own))
            check_invariants(self.scheduler)

    def finish(self, sequence: Sequence) -> None:
        """At its end, or as an abort."""
        self.scheduler.finish(sequence)
        assert sequence.status is Status.FINISHED
        assert not sequence.block_table
        self.own.pop(sequence, None)

    def drain(self) -> None:
        """Run to the end: the deadlines bound it. Then nothing may be left."""
        while self.own:
            assert self.step() is not None
        assert self.scheduler.schedule() is None
        self.check_empty()

    def check_empty(self) -> None:
        check_invariants(self.scheduler)
        assert self.pool.num_free == self.pool.num_blocks
        assert self.pool.ref_counts == [0] * self.pool.num_blocks
        assert (self.scheduler.running, list(self.scheduler.waiting)) == ([], [])

    def _extend_history(self, sequence: Sequence) -> None:
        own = self.own[sequence]
        for token in sequence.token_ids[len(own) :]:
            before = own[-1] if own else 0
            own.append(self.histories.setdefault((before, token), len(self.histories) + 1))

    def _set_deadlines(self, sequences: list[Sequence]) -> None:
        """The step in which each of them must be done at the latest, whoever may come after it.

        The oldest gets at least one token in every step and is never preempted: it is done after as many steps as it
        has tokens, and then so is the next one, even if that got nothing before. Only a failed step throws computed
        tokens away: then the clocks start again.
        """
        steps = dict(zip(self.own, accumulate(self.goals[sequence] for sequence in self.own), strict=True))
        self.deadlines |= {sequence: self.num_steps + steps[sequence] for sequence in sequences}

    def _schedule(self) -> Schedule | None:
        """The next step, compared with what it promises and with a plain construction of its arrays."""
        scheduler, running = self.scheduler, list(self.scheduler.running)
        waited = list(scheduler.waiting)
        schedule = scheduler.schedule()
        self.num_steps += 1
        if schedule is None:
            assert not self.own
            return None
        sequences, counts = schedule.sequences, schedule.num_new_tokens
        budget = scheduler.max_num_batched_tokens - sum(counts)
        assert budget >= 0
        assert 1 <= len(sequences) == len(counts) <= scheduler.max_num_seqs
        assert sequences == list(self.own)[: len(sequences)], "first come, first served"
        assert schedule.preempted == running[::-1][: len(schedule.preempted)], "the youngest first"
        assert running[:1] in ([], sequences[:1]), "the oldest goes on"
        for sequence, count in zip(sequences, counts, strict=True):
            left_out = sequence.num_uncomputed_tokens - count
            assert count >= 1
            assert left_out == 0 or (left_out > 0 and budget == 0 and sequence is sequences[-1])
        idle = list(self.own)[len(sequences) :]
        if idle and budget and len(sequences) < scheduler.max_num_seqs and not schedule.preempted:
            assert idle[0] in waited
            assert -(-len(idle[0].token_ids) // self.pool.block_size) > self.pool.num_free, "it could have been started"
        self._check_arrays(schedule)
        return schedule

    def _check_arrays(self, schedule: Schedule) -> None:
        size, step = self.pool.block_size, schedule.step
        tokens, positions, slots, starts, lengths = [], [], [], [0], []
        for sequence, count in zip(schedule.sequences, schedule.num_new_tokens, strict=True):
            first = sequence.num_computed_tokens
            for position in range(first, first + count):
                tokens.append(sequence.token_ids[position])
                positions.append(position)
                slots.append(sequence.block_table[position // size] * size + position % size)
            starts.append(starts[-1] + count)
            lengths.append(first + count)
        arrays = (step.token_ids, step.positions, step.slot_mapping, step.query_start_loc, step.seq_lens)
        assert [a.tolist() for a in arrays] == [tokens, positions, slots, starts, lengths]
        tables = [list(s.block_table) for s in schedule.sequences]
        width = max(map(len, tables))
        assert step.block_tables.tolist() == [table + [0] * (width - len(table)) for table in tables]
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        assert all(self.pool.ref_counts[slot // size] == 1 for slot in slots), "a shared block is written to"

    def _forward(self, schedule: Schedule) -> None:
        """What a model does, seen from the cache: write all new tokens; then each sequence reads all of its own."""
        size, step = self.pool.block_size, schedule.step
        bounds = step.query_start_loc.tolist()
        slots, positions = step.slot_mapping.tolist(), step.positions.tolist()
        for row, sequence in enumerate(schedule.sequences):
            for i in range(bounds[row], bounds[row + 1]):
                self.slots[slots[i]] = self.own[sequence][positions[i]]
        for row, sequence in enumerate(schedule.sequences):
            length, table = int(step.seq_lens[row]), step.block_tables[row].tolist()
            read = [self.slots.get(table[p // size] * size + p % size) for p in range(length)]
            assert read == self.own[sequence][:length], f"sequence {sequence.seq_id} reads another one's cache"


def tables(world: World) -> list[int]:
    """How many blocks each running sequence holds."""
    return [len(s.block_table) for s in world.scheduler.running]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


# Order and budget -----------------------------------------------------------------------------------------------------


def test_decode_and_chunks_share_a_step():
    """One token for each that decodes, what is left of the budget for the prompt that is being read."""
    world = World(40, max_num_batched_tokens=10)
    a, b, c = world.add(prompt(4)), world.add(prompt(16)), world.add(prompt(3))
    found = [world.step() for _ in range(4)]
    assert [s.num_new_tokens for s in found] == [[4, 6], [1, 9], [1, 1, 3], [1, 1, 1]]
    assert [s.sequences for s in found] == [[a, b], [a, b], [a, b, c], [a, b, c]]


def test_the_first_in_the_queue_is_not_overtaken():
    """The short one would fit; but then the long one could wait for ever."""
    world = World(8)
    first, long, short = world.add(prompt(16), 2), world.add(prompt(20), 1), world.add(prompt(1), 1)
    assert world.step().sequences == [first]
    assert list(world.scheduler.waiting) == [long, short]
    world.drain()


def test_max_num_seqs_is_kept():
    world = World(40, max_num_seqs=2)
    sequences = [world.add(prompt(2), 3) for _ in range(5)]
    assert world.step().sequences == sequences[:2]
    world.finish(sequences[0])
    assert world.step().sequences == sequences[1:3]


def test_a_budget_smaller_than_the_batch_serves_the_oldest():
    world = World(40, max_num_batched_tokens=2)
    sequences = [world.add([i], 3) for i in range(3)]
    assert world.step().sequences == sequences[:2]
    assert world.step().sequences == sequences[:2]
    world.scheduler.max_num_batched_tokens = 3
    assert world.step().sequences == sequences
    world.scheduler.max_num_batched_tokens = 1
    assert world.step().sequences == sequences[:1]
    world.drain()


@CACHES
def test_nobody_starves_while_others_keep_coming(caching):
    """The pool holds one long sequence alone: it gets its turn though short ones arrive in every step."""
    world = World(8, block_size=2, caching=caching)
    for i in range(3):
        world.add(prompt(3, 10 * i), 2)
    long = world.add(prompt(10, 50), 6)
    deadline = world.deadlines[long]
    assert deadline == 5 + 5 + 5 + 16
    while long in world.own:
        world.add([world.num_steps], 3)
        world.step()
    assert world.num_steps <= deadline
    world.drain()


def test_nothing_to_do_is_none():
    world = World(4)
    assert world.scheduler.schedule() is None
    world.add([1], 0)
    world.drain()


def test_lost_blocks_are_not_waited_for():
    """Nobody will give these blocks back: an error, not a loop."""
    world = World(2)
    world.pool.allocate(2)
    world.scheduler.add(Sequence(0, [1]))
    with pytest.raises(InvariantError, match="1 sequences wait and nobody runs"):
        world.scheduler.schedule()


# Blocks ---------------------------------------------------------------------------------------------------------------


@CACHES
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32])
@pytest.mark.parametrize("budget", [7, 100])
def test_c48_blocks_held(block_size, length, budget, caching):
    """C48: as many as the tokens in the cache fill, after each of 20 new tokens, in a pool that just holds them."""
    world = World(-(-(length + 20) // block_size), block_size, max_num_batched_tokens=budget, caching=caching)
    sequence = world.add(prompt(length), 20)
    computed = []
    while sequence.status is not Status.FINISHED:
        world.step()
        if sequence.status is Status.RUNNING:
            computed.append(sequence.num_computed_tokens)
            assert len(sequence.block_table) == -(-computed[-1] // block_size)
            assert world.pool.num_free == world.pool.num_blocks - len(sequence.block_table)
    assert [n for n in computed if n >= length] == list(range(length, length + 20))
    assert sequence.num_preemptions == 0
    assert len(sequence.token_ids) == length + 20


@CACHES
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_c48_no_free_block(block_size, caching):
    """C48: filling the block's last place goes through; only the token after it needs a block, and preempts."""
    world = World(3, block_size, caching=caching)
    sequences = [world.add(prompt(max(block_size - 1, 1), 50 * i), block_size + 1) for i in range(3)]
    assert world.step().sequences == sequences
    if block_size > 1:
        assert world.pool.num_free == 0
        assert world.step().preempted == []
    assert (tables(world), world.pool.num_free) == ([1, 1, 1], 0)
    assert [s.num_computed_tokens for s in sequences] == [block_size] * 3
    schedule = world.step()
    assert (schedule.sequences, schedule.preempted) == (sequences[:1], sequences[:0:-1])
    assert (tables(world), sequences[0].num_computed_tokens) == ([2], block_size + 1)
    world.drain()


def test_blocks_are_taken_chunk_by_chunk():
    world = World(10, max_num_batched_tokens=5)
    world.add(prompt(18), 3)
    held = [tables(world) for _ in range(4) if world.step()]
    assert held == [[2], [3], [4], [5]]


@pytest.mark.parametrize("length", [0, 65, 1000])
def test_c49_what_can_never_fit_is_refused(length):
    world = World(4, block_size=16)
    with pytest.raises(ValueError, match=f"{length} tokens; allowed: 1 to 64"):
        world.scheduler.add(Sequence(0, prompt(length)))
    world.check_empty()


@CACHES
def test_c49_the_whole_pool_can_be_used(caching):
    world = World(4, block_size=16, caching=caching)
    exact, growing = world.add(prompt(64), 9), world.add(prompt(60, 100), 100)
    world.drain()
    assert [len(s.token_ids) for s in (exact, growing)] == [64, 64]


def test_admission_wants_blocks_for_the_whole_prompt():
    """Though it takes only the first chunk's: started earlier it would be the first to be preempted."""
    world = World(5, max_num_batched_tokens=4)
    world.add(prompt(4), 8)
    waiting = world.add(prompt(16, 50), 1)
    world.step()
    assert world.pool.num_free == 4
    world.step()  # the first takes its second block: 3 are left
    assert waiting.status is Status.WAITING
    world.drain()
    assert waiting.num_preemptions == 0


# Preemption -----------------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_waits_first():
    world = World(6, block_size=2)
    sequences = [world.add(prompt(2, 10 * i), 6) for i in range(3)]
    late = world.add(prompt(2, 90), 1)
    world.scheduler.max_num_seqs = 3
    world.step()
    world.step()  # all three take their second block
    assert (tables(world), world.pool.num_free) == ([2, 2, 2], 0)
    world.step()
    schedule = world.step()
    assert schedule.preempted == [sequences[2]]
    assert schedule.sequences == sequences[:2]
    assert list(world.scheduler.waiting) == [sequences[2], late]
    assert len(sequences[2].token_ids) == 2 + 3  # what it has said is kept
    assert (sequences[2].num_preemptions, world.scheduler.num_preemptions) == (1, 1)
    world.drain()


def test_one_that_needs_a_block_itself_gives_way_to_older_ones():
    """Nobody is younger: it gives its own blocks back, and the older one has its token all the same."""
    world = World(4, block_size=2)
    old, young = world.add(prompt(1), 7), world.add(prompt(4, 50), 3)
    world.step()
    world.step()  # old 2 tokens in 1 block, young 5 tokens wanted 3 blocks
    assert world.pool.num_free == 0
    schedule = world.step()
    assert (schedule.sequences, schedule.preempted) == ([old], [young])
    world.drain()


@CACHES
def test_who_is_preempted_for_a_step_does_not_come_back_in_it(caching):
    world = World(4, block_size=2, caching=caching)
    world.add(prompt(2), 5)
    world.add(prompt(2, 50), 5)
    seen = 0
    while world.own:
        schedule = world.step()
        seen += bool(schedule.preempted)
        assert not set(schedule.preempted) & set(schedule.sequences)
    assert seen


@CACHES
def test_restart_keeps_the_order_and_the_tokens(caching):
    world = World(20, caching=caching, max_num_batched_tokens=12)
    sequences = [world.add(prompt(5, 10 * i), 4) for i in range(4)]
    world.step()
    world.step()
    said = [list(s.token_ids) for s in sequences]
    world.failing_step()
    assert world.scheduler.running == []
    assert list(world.scheduler.waiting) == sequences
    assert [s.token_ids for s in sequences] == said
    assert world.pool.num_free == 20
    world.drain()


# Ends -----------------------------------------------------------------------------------------------------------------


@CACHES
@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("which", [0, 1, 2])
def test_c65_abort_at_any_moment(steps, which, caching):
    """C65: waiting, between the chunks of its prompt, decoding, preempted: its blocks come back at once."""
    world = World(7, block_size=2, max_num_seqs=2, max_num_batched_tokens=4, caching=caching)
    sequences = [world.add([0] * 6 + [i], 6) for i in range(3)]
    for _ in range(steps):
        world.step()
    others = {b for s in world.scheduler.running if s is not sequences[which] for b in s.block_table}
    world.finish(sequences[which])
    world.finish(sequences[which])
    check_invariants(world.scheduler)
    assert world.pool.num_free == 7 - len(others)
    world.drain()


def test_blocks_of_a_finished_one_serve_the_next_step():
    world = World(2, block_size=2)
    first, second = world.add(prompt(3), 0), world.add(prompt(4, 50), 0)
    assert [world.step().sequences for _ in range(2)] == [[first], [second]]
    world.check_empty()


# With a prefix cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)])
def test_c44_at_least_one_token_is_computed(length, cached):
    """C44: a second copy of a prompt finds all full blocks but one that holds its last token."""
    world = World(10, block_size=16, caching=True)
    for expected in (0, cached, cached):
        sequence = world.add(prompt(length), 1)
        schedule = world.step()
        assert (sequence.num_cached_tokens, schedule.num_new_tokens) == (expected, [length - expected])
        world.drain()
    assert world.scheduler.num_cached_tokens == 2 * cached


def test_c44_two_copies_in_one_batch_do_not_share():
    """C44: when the second starts, nothing of the first is computed. A third one finds it."""
    world = World(10, block_size=4, caching=True)
    copies = [world.add(prompt(9), 3) for _ in range(2)]
    world.step()
    assert [s.num_cached_tokens for s in copies] == [0, 0]
    assert not set(copies[0].block_table) & set(copies[1].block_table)
    third = world.add(prompt(9), 3)
    world.step()
    assert third.num_cached_tokens == 8
    assert third.block_table[:2] == copies[0].block_table[:2]
    world.drain()


def test_running_ones_share_by_reference_count():
    world = World(10, caching=True)
    first = world.add(prompt(9), 9)
    world.step()
    others = [world.add([*prompt(8), 50 + i], 9) for i in range(2)]
    world.step()
    assert [world.pool.ref_counts[b] for b in first.block_table] == [3, 3, 1]
    world.finish(first)
    assert [world.pool.ref_counts[b] for b in others[0].block_table] == [2, 2, 1]
    world.drain()


def test_a_prompt_in_chunks_is_found_as_far_as_it_is_computed():
    world = World(20, max_num_seqs=9, max_num_batched_tokens=6, caching=True)
    world.add(prompt(20), 1)
    world.step()
    world.scheduler.max_num_batched_tokens = 40
    second = world.add(prompt(20), 1)
    world.step()
    assert second.num_cached_tokens == 4  # of six computed tokens one block is full
    world.drain()


def test_c51_a_block_is_not_found_without_its_history():
    """C51: the same block X after A and after B."""
    a, b, x = prompt(4, 10), prompt(4, 20), prompt(4, 30)
    world = World(10, caching=True)
    world.add([*a, *x, 1], 1)
    world.drain()
    other, moved, same = world.add([*b, *x, 1], 1), world.add([*x, 1], 1), world.add([*a, *x, 2], 1)
    world.drain()
    assert [s.num_cached_tokens for s in (other, moved, same)] == [0, 0, 8]


@pytest.mark.parametrize("keys", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_c51_collisions_change_nothing(monkeypatch, keys, seed):
    """C51: a hash with few values. Every read is still checked, and something is still found."""
    real = prefix_cache.block_key
    monkeypatch.setattr(prefix_cache, "block_key", lambda parent, ids: bytes([real(parent, ids)[0] % keys]))
    rng = random.Random(seed)
    world = World(12, block_size=2, caching=True, seed=seed)
    for _ in range(400):
        if len(world.own) < 6:
            world.add(rng.choices([0, 1], k=rng.randint(1, 8)), rng.randint(0, 5))
        world.step()
    assert world.scheduler.num_cached_tokens > 0
    world.drain()


def test_hits_that_are_in_use_need_no_free_block():
    """5 blocks wanted, 4 of them shared with one that runs: one free block is enough."""
    world = World(6, caching=True)
    world.add(prompt(17), 3)
    world.step()
    assert world.pool.num_free == 1
    second = world.add([*prompt(16), 50], 3)
    world.step()
    assert (second.status, second.num_cached_tokens, world.pool.num_free) == (Status.RUNNING, 16, 0)
    world.drain()


def test_hits_that_are_free_are_not_counted_twice():
    """A cached block that nobody uses is one of the free ones: 4 hits and 3 new ones do not fit in 6."""
    world = World(9, caching=True)
    world.add(prompt(17), 0)
    world.drain()
    world.add(prompt(12, 50), 1)
    world.step()
    assert world.pool.num_free == 6
    waiting = world.add([*prompt(16), *prompt(9, 80)], 0)
    world.step()
    assert waiting.status is Status.WAITING
    world.step()
    assert (waiting.status, waiting.num_cached_tokens) == (Status.FINISHED, 16)
    world.check_empty()


def test_a_preempted_sequence_meets_its_own_old_blocks():
    """Its first blocks were not needed by others: what they hold is not computed again."""
    world = World(6, block_size=2, caching=True)
    old, young = world.add(prompt(4), 6), world.add(prompt(5, 50), 6)
    held: list[int] = []
    for _ in range(4):
        held = list(young.block_table) or held
        world.step()
    assert (young.status, young.num_preemptions, young.num_computed_tokens) == (Status.WAITING, 1, 0)
    while young.status is Status.WAITING:
        world.step()
    assert old.status is Status.FINISHED
    assert young.num_cached_tokens >= 2
    assert young.block_table[0] == held[0]
    world.drain()


def test_a_failed_step_leaves_nothing_to_be_found():
    world = World(10, caching=True)
    sequence = world.add(prompt(9), 1)
    world.failing_step()
    assert len(world.scheduler.prefix_cache) == 0
    world.step()
    assert sequence.num_cached_tokens == 0
    world.drain()


def test_a_failed_step_keeps_what_was_computed_before():
    world = World(10, max_num_batched_tokens=8, caching=True)
    sequence = world.add(prompt(15), 1)
    world.step()
    world.failing_step()
    world.step()
    assert sequence.num_cached_tokens == 8
    world.drain()


# The checks themselves ------------------------------------------------------------------------------------------------


def busy() -> World:
    """Three run (two of them decode, sharing a block; one is in its prompt) and one waits."""
    world = World(12, max_num_seqs=3, max_num_batched_tokens=9, caching=True)
    world.add(prompt(5), 9)
    world.step()
    world.add([*prompt(4), 60], 9)
    world.step()
    world.add(prompt(12, 70), 9)
    world.add(prompt(3, 90), 9)
    world.step()
    assert [len(world.scheduler.running), len(world.scheduler.waiting)] == [3, 1]
    assert max(world.pool.ref_counts) == 2
    check_invariants(world.scheduler)
    return world


def owned_too_often(s: Scheduler) -> None:
    s.pool.ref_counts[s.running[0].block_table[0]] += 1


def owned_too_rarely(s: Scheduler) -> None:
    s.pool.ref_counts[s.running[0].block_table[0]] -= 1


def freed_while_owned(s: Scheduler) -> None:
    s.pool._free[s.running[0].block_table[0]] = None


def lost(s: Scheduler) -> None:
    s.pool._free.popitem()


def swapped_with_a_free_one(s: Scheduler) -> None:
    s.pool._free.popitem()
    s.pool._free[s.running[0].block_table[0]] = None


def twice_in_a_table(s: Scheduler) -> None:
    table = s.running[0].block_table
    s.pool.ref_counts[table[0]] += 1
    s.pool.release([table[1]])
    table[1] = table[0]


def a_block_too_many(s: Scheduler) -> None:
    s.running[0].block_table.extend(s.pool.allocate())


def a_block_too_few(s: Scheduler) -> None:
    s.pool.release([s.running[0].block_table.pop()])


def too_much_computed(s: Scheduler) -> None:
    s.running[0].num_computed_tokens += 1


def too_little_computed(s: Scheduler) -> None:
    s.running[0].num_computed_tokens -= 1


def out_of_order(s: Scheduler) -> None:
    s.running[0], s.running[1] = s.running[1], s.running[0]


def overtaken(s: Scheduler) -> None:
    s.waiting[0].seq_id = 0


def one_too_many(s: Scheduler) -> None:
    s.max_num_seqs = 2


def waits_with_blocks(s: Scheduler) -> None:
    s.waiting[0].block_table = array("i", s.pool.allocate())


def waits_with_tokens(s: Scheduler) -> None:
    s.waiting[0].num_computed_tokens = 1


def runs_as_waiting(s: Scheduler) -> None:
    s.running[0].status = Status.WAITING


def waits_as_finished(s: Scheduler) -> None:
    s.waiting[0].status = Status.FINISHED


BREAKAGES = [
    (owned_too_often, "a block is owned as often as its reference count says"),
    (owned_too_rarely, "a block is owned as often as its reference count says"),
    (freed_while_owned, "the blocks without owner are the free ones"),
    (lost, "the blocks without owner are the free ones"),
    (swapped_with_a_free_one, "the blocks without owner are the free ones"),
    (twice_in_a_table, "no table holds a block twice"),
    (a_block_too_many, "a table has the blocks that the computed tokens fill"),
    (a_block_too_few, "a table has the blocks that the computed tokens fill"),
    (too_much_computed, "something is left to compute in each"),
    (too_little_computed, "all but the last running sequence decode"),
    (out_of_order, "running first, then waiting, is the order of arrival"),
    (overtaken, "running first, then waiting, is the order of arrival"),
    (one_too_many, "no more than max_num_seqs run"),
    (waits_with_blocks, "who waits holds nothing"),
    (waits_with_tokens, "who waits holds nothing"),
    (runs_as_waiting, "every sequence is where its status says"),
    (waits_as_finished, "every sequence is where its status says"),
]


@pytest.mark.parametrize(("breakage", "rule"), BREAKAGES, ids=[f.__name__ for f, _ in BREAKAGES])
def test_every_rule_fires(breakage, rule):
    world = busy()
    breakage(world.scheduler)
    with pytest.raises(InvariantError, match=rule):
        check_invariants(world.scheduler)


# Random workloads -----------------------------------------------------------------------------------------------------


class Workload(RuleBasedStateMachine):
    """Adds, steps, failed steps and aborts in any order, in pools of any size. Few tokens, so that prompts collide."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        caching=st.booleans(),
        seed=st.integers(0, 99),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, caching, seed):
        self.world = World(num_blocks, block_size, max_num_seqs, budget, caching, seed)
        self.gone: list[Sequence] = []

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30), num_new=st.integers(0, 12))
    def add(self, prompt, num_new):
        self.world.add(prompt[: self.world.scheduler.max_num_tokens], num_new)

    @rule(length=st.integers(1, 60), num_new=st.integers(1, 12))
    def add_zeros(self, length, num_new):
        """Prompts that share as much as their lengths allow."""
        self.world.add([0] * min(length, self.world.scheduler.max_num_tokens), num_new)

    @precondition(lambda self: self.world.own)
    @rule(pick=st.integers(0, 99), cut=st.integers(0, 3))
    def add_a_continuation(self, pick, cut):
        """What a sequence says so far, as in a conversation."""
        ids = list(self.world.own)[pick % len(self.world.own)].token_ids
        self.world.add(ids[: max(1, len(ids) - cut)], 3)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.world.step()

    @rule()
    def failing_step(self):
        self.world.failing_step()

    @precondition(lambda self: self.world.own)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick):
        sequence = list(self.world.own)[pick % len(self.world.own)]
        self.world.finish(sequence)
        self.gone.append(sequence)

    @precondition(lambda self: self.gone)
    @rule()
    def abort_again(self):
        self.world.finish(self.gone[-1])

    @invariant()
    def books_agree(self):
        if hasattr(self, "world"):
            check_invariants(self.world.scheduler)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


Workload.TestCase.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWorkload = Workload.TestCase


@CACHES
@pytest.mark.parametrize("budget", [1, 7, 100])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 60), (2, 31), (5, 20), (16, 12)])
def test_a_thousand_steps(block_size, num_blocks, budget, caching):
    """Longer than hypothesis goes: a pool that is always too small, with arrivals, aborts and failures all the time."""
    rng = random.Random(block_size + budget)
    world = World(num_blocks, block_size, rng.choice([4, 12]), budget, caching)
    for _ in range(1000):
        if len(world.own) < 14 and rng.random() < 0.4:
            world.add([0] * rng.randint(0, 30) + rng.choices([0, 1], k=rng.randint(1, 20)), rng.randint(0, 12))
        if world.own and rng.random() < 0.02:
            world.finish(rng.choice(list(world.own)))
        if rng.random() < 0.01:
            world.failing_step()
        else:
            world.step()
    assert world.scheduler.num_preemptions >= 5
    assert (world.scheduler.num_cached_tokens > 0) == caching
    world.drain()
