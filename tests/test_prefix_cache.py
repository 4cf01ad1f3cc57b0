"""The prefix cache by itself, beside a plain account of what each block holds; then under the scheduler.

Tokens are a few small numbers, so that beginnings collide. In all of it `history` is a tuple of tokens from the first
one on: what a block holds is right for a sequence only if its whole history is.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rvllm import prefix_cache
from rvllm.block_pool import BlockPool, grow_table
from rvllm.prefix_cache import Entry, PrefixCache, block_key
from rvllm.scheduler import NoPrefixCache, Scheduler, Sequence, check_invariants

SIZE = 4


class Cache:
    """A pool and a prefix cache, used as the scheduler uses them, sequence by sequence."""

    def __init__(self, num_blocks: int = 8, block_size: int = SIZE) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = PrefixCache(self.pool)

    def start(self, tokens: list[int], use_hits: bool = True) -> Sequence:
        """Blocks for all tokens, shared ones first. Nothing is computed yet beyond those."""
        sequence = Sequence(0, tokens)
        sequence.prefix = self.cache.match(sequence) if use_hits else []
        for entry in sequence.prefix:
            self.pool.share(entry.block)
            sequence.block_table.append(entry.block)
        sequence.num_computed_tokens = len(sequence.prefix) * self.pool.block_size
        grow_table(self.pool, sequence.block_table, len(tokens))
        return sequence

    def compute(self, sequence: Sequence, upto: int | None = None) -> Sequence:
        sequence.num_computed_tokens = len(sequence.token_ids) if upto is None else upto
        self.cache.publish(sequence)
        check_books(self.cache)
        return sequence

    def end(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)

    def remember(self, tokens: list[int]) -> list[int]:
        """Compute a sequence and let it end; its blocks."""
        sequence = self.compute(self.start(tokens))
        self.end(sequence)
        return list(sequence.block_table)

    def found(self, tokens: list[int]) -> list[int]:
        """Blocks that a prompt of these tokens and one more would share."""
        return [entry.block for entry in self.cache.match(Sequence(0, [*tokens, 0]))]


def check_books(cache: PrefixCache) -> None:
    """Both dicts hold the same entries, each under its own key and its own block."""
    entries, of_block = cache._entries, cache._of_block
    assert all(entry.key == key for key, entry in entries.items())
    assert all(entry.block == block for block, entry in of_block.items())
    assert {id(entry) for entry in entries.values()} == {id(entry) for entry in of_block.values()}
    assert len(entries) == len(of_block) == len(cache)
    assert all(cache.holds(block) for block in of_block)


def history(entry: Entry) -> tuple[int, ...]:
    return (history(entry.parent) if entry.parent else ()) + entry.token_ids


def ids(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


# Keys -----------------------------------------------------------------------------------------------------------------


def test_a_key_depends_on_all_that_came_before():
    parents = [b"", block_key(b"", (1, 2)), block_key(b"", (2, 1))]
    blocks = [(1, 2), (2, 1), (1,), (1, 2, 0), (258,), (2, 1 << 16)]
    assert len({block_key(parent, block) for parent in parents for block in blocks}) == len(parents) * len(blocks)
    assert block_key(parents[1], (3, 4)) == block_key(block_key(b"", (1, 2)), (3, 4))


# What is found --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 14))
def test_full_blocks_but_never_all_tokens(length):
    c = Cache()
    blocks = c.remember(ids(13))
    entries = c.cache.match(Sequence(0, ids(length)))
    assert [entry.block for entry in entries] == blocks[: (length - 1) // SIZE]
    assert [history(entry) for entry in entries] == [tuple(ids(n)) for n in range(SIZE, length, SIZE)]


def test_block_size_one():
    c = Cache(block_size=1)
    blocks = c.remember(ids(5))
    assert c.found(ids(4)) == blocks[:4]
    assert [e.block for e in c.cache.match(Sequence(0, ids(4)))] == blocks[:3]
    assert c.cache.match(Sequence(0, [0])) == []


def test_the_search_ends_at_the_first_difference():
    c = Cache()
    blocks = c.remember(ids(12))
    assert c.found([*ids(4), 99, *ids(7, 5)]) == blocks[:1]
    assert c.found([99, *ids(11, 1)]) == []
    assert c.found(ids(8, 4)) == []  # the same tokens, but not from the beginning


def test_only_what_is_computed_is_published():
    c = Cache()
    sequence = c.start(ids(13))
    found = []
    for computed in (0, 3, 4, 7, 11, 12, 13):
        c.compute(sequence, computed)
        found.append(len(c.found(ids(13))))
    assert found == [0, 0, 1, 1, 2, 3, 3]
    c.compute(sequence)
    assert len(c.cache) == 3  # a second time changes nothing


def test_a_block_in_use_and_a_free_one_are_found_alike():
    c = Cache()
    running = c.compute(c.start(ids(9)))
    while_in_use = c.found(ids(8))
    c.end(running)
    assert c.found(ids(8)) == while_in_use == running.block_table[:2].tolist()
    assert c.pool.num_free == 8
    again = c.start(ids(9))
    assert (again.num_computed_tokens, c.pool.num_free) == (8, 5)
    assert [c.pool.ref_counts[b] for b in again.block_table] == [1, 1, 1]
    also = c.start(ids(9))
    assert [c.pool.ref_counts[b] for b in also.block_table] == [2, 2, 1]
    assert c.pool.num_free == 4
    c.end(again)
    assert c.pool.num_free == 5
    c.end(also)
    assert c.pool.num_free == 8


def test_what_was_generated_is_found_too():
    """The next turn of a conversation."""
    c = Cache()
    sequence = c.start(ids(6))
    c.compute(sequence)
    for token in ids(5, 50):
        sequence.token_ids.append(token)
        grow_table(c.pool, sequence.block_table, len(sequence.token_ids))
        c.compute(sequence)
    c.end(sequence)
    assert len(c.found([*ids(6), *ids(5, 50), 99])) == 2


def test_switched_off():
    pool = BlockPool(8, SIZE)
    scheduler = Scheduler(pool, 4, 64)
    assert isinstance(scheduler.prefix_cache, NoPrefixCache)
    for seq_id in range(2):
        sequence = Sequence(seq_id, ids(9))
        scheduler.add(sequence)
        schedule = scheduler.schedule()
        assert schedule.num_new_tokens == [9]
        scheduler.update(schedule)
        scheduler.finish(sequence)
    assert scheduler.num_cached_tokens == 0
    assert not any(map(scheduler.prefix_cache.holds, range(8)))


def test_switched_on_although_it_is_empty():
    """An empty cache has length 0, and is a cache all the same."""
    pool = BlockPool(8, SIZE)
    cache = PrefixCache(pool)
    assert Scheduler(pool, 4, 64, cache).prefix_cache is cache


# Two blocks with the same history -------------------------------------------------------------------------------------


def test_two_identical_prompts_computed_side_by_side():
    """The first to be published stays; the other's owner keeps its block to itself, and builds on the first."""
    c = Cache()
    one, two = c.start(ids(9)), c.start(ids(9))
    c.compute(two, 8)
    c.compute(one, 8)
    assert c.found(ids(8)) == two.block_table[:2].tolist()
    assert one.prefix == two.prefix
    assert [c.cache.holds(b) for b in one.block_table] == [False, False, False]
    one.token_ids += ids(4, 9)
    grow_table(c.pool, one.block_table, 13)
    c.compute(one, 12)
    assert c.found(ids(12)) == [*two.block_table[:2], one.block_table[2]]
    c.end(two)
    assert c.found(ids(12)) == [*two.block_table[:2], one.block_table[2]]


def test_a_duplicate_whose_original_went_takes_its_place():
    """`two` builds on a block that it does not own; once that is handed out anew, its own is entered instead."""
    c = Cache(num_blocks=6)
    one, two = c.start(ids(5)), c.start(ids(13), use_hits=False)
    c.compute(one)
    c.compute(two, 4)
    c.end(one)
    c.end(c.start(ids(1, 90)))  # takes one's second block
    evicting = c.start(ids(5, 90))
    assert c.found(ids(4)) == []
    c.compute(two)
    assert c.found(ids(12)) == two.block_table[:3].tolist()
    c.end(two)
    c.end(evicting)
    assert c.remember(ids(13))[:3] == two.block_table[:3].tolist()


# Eviction -------------------------------------------------------------------------------------------------------------


def test_the_longest_unused_goes_first_and_of_a_sequence_the_end():
    c = Cache(num_blocks=6)
    a, b = c.remember(ids(9)), c.remember(ids(9, 50))
    assert sorted(a + b) == list(range(6))
    order = []
    for _ in range(6):
        order += c.pool.allocate()
        check_books(c.cache)
        assert not c.cache.holds(order[-1])
    assert order == [*a[::-1], *b[::-1]]
    assert len(c.cache) == 0


def test_a_hit_is_a_use():
    c = Cache(num_blocks=4)
    a, b = c.remember(ids(5))[:1], c.remember(ids(5, 50))[:1]
    c.end(c.start(ids(5)))
    c.pool.allocate(3)
    assert (c.found(ids(4)), c.found(ids(4, 50))) == (a, [])
    assert b != a


def test_a_search_is_no_use():
    c = Cache(num_blocks=4)
    c.remember(ids(5)), c.remember(ids(5, 50))
    c.found(ids(4))
    c.pool.allocate(3)
    assert (len(c.found(ids(4))), len(c.found(ids(4, 50)))) == (0, 1)


def without_first_block(c: Cache, tokens: list[int]) -> list[int]:
    """Compute tokens, then let the first block alone be handed out anew: those after it are out of reach."""
    blocks = c.remember(tokens)
    for block in blocks:
        c.pool.share(block)
    c.pool.release(blocks[:1])  # as if somebody still used those after it
    c.pool.allocate(c.pool.num_free)
    assert not c.cache.holds(blocks[0])
    assert c.found(tokens) == []
    return blocks


def test_children_of_an_evicted_block_are_not_found():
    c = Cache()
    blocks = without_first_block(c, ids(12))
    check_books(c.cache)
    assert [c.cache.holds(b) for b in blocks[1:]] == [True, True]  # entries are there, but no way leads to them
    assert c.found(ids(12)) == []


def test_children_are_healed_when_the_beginning_is_published_again():
    """Computed anew, the beginning is found again, with the new blocks: an old child has another parent."""
    c = Cache()
    old = without_first_block(c, ids(12))
    c.pool.release([b for b in range(8) if b not in old[1:]])
    new = c.compute(c.start(ids(13)))
    assert c.found(ids(12)) == new.block_table[:3].tolist()
    assert [c.cache.holds(b) for b in old[1:]] == [False, False]
    c.pool.release(old[1:])
    c.pool.allocate(c.pool.num_free)  # the old children are handed out: that must not touch the new ones
    check_books(c.cache)
    assert c.found(ids(12)) == new.block_table[:3].tolist()


def test_a_new_beginning_does_not_adopt_old_children():
    """Only the first block is published again. What hangs below was another entry's, and is left alone."""
    c = Cache()
    old = without_first_block(c, ids(12))
    c.pool.release([b for b in range(8) if b not in old[1:]])
    new = c.compute(c.start(ids(5)))
    assert c.found(ids(12)) == new.block_table[:1].tolist()


def test_an_entry_of_its_own_may_go_out_of_reach_below_a_running_sequence():
    """`two` published its second block below the first block of `one`, which is handed out anew meanwhile."""
    c = Cache(num_blocks=8)
    one, two = c.start(ids(4)), c.start(ids(13), use_hits=False)
    c.compute(one)
    c.compute(two, 8)
    assert c.found(ids(8)) == [one.block_table[0], two.block_table[1]]
    c.end(one)
    taken = c.pool.allocate(c.pool.num_free)
    assert one.block_table[0] in taken
    assert c.found(ids(8)) == []
    c.compute(two)
    assert c.found(ids(12)) == two.block_table[:3].tolist()
    c.pool.release(taken)
    three = c.compute(c.start(ids(13)))
    assert c.found(ids(12)) == three.block_table[:3].tolist()
    c.end(two)
    assert c.found(ids(12)) == three.block_table[:3].tolist()
    check_books(c.cache)


# Collisions -----------------------------------------------------------------------------------------------------------


def test_c51_the_same_block_after_another_beginning():
    c = Cache()
    x = ids(4, 60)
    c.remember([*ids(4), *x])
    assert c.found([*ids(4, 20), *x]) == []
    assert c.found(x) == []
    assert len(c.found([*ids(4), *x])) == 2


def test_c51_with_a_constant_key_tokens_decide(monkeypatch):
    monkeypatch.setattr(prefix_cache, "block_key", lambda _parent, _ids: b"always")
    c = Cache()
    blocks = c.remember(ids(8))
    assert c.found(ids(8)) == blocks[:1]  # the second one's key is taken by the first
    assert c.found(ids(8, 4)) == []
    assert c.found([*ids(4), *ids(4)]) == blocks[:1]
    c.remember(ids(8, 50))
    assert (c.found(ids(8)), c.found(ids(8, 50))) == (blocks[:1], [])
    c.pool.allocate(8)
    c.pool.release(range(8))
    assert c.found(c.remember(ids(4, 50)) and ids(4, 50))


# Random use -----------------------------------------------------------------------------------------------------------


class RandomUse(RuleBasedStateMachine):
    """Starts, chunks, ends in any order; `content` says what each block really holds."""

    @initialize(num_blocks=st.integers(1, 10), block_size=st.integers(1, 3))
    def begin(self, num_blocks, block_size):
        self.c = Cache(num_blocks, block_size)
        self.content: dict[int, tuple[int, ...]] = {}  # block -> history up to its end, once it is computed
        self.alive: list[Sequence] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, tokens):
        self.check_hits(tokens)
        size, pool = self.c.pool.block_size, self.c.pool
        hits = self.c.cache.match(Sequence(0, tokens))
        needed = -(-len(tokens) // size) - sum(pool.ref_counts[e.block] > 0 for e in hits)
        if needed <= pool.num_free:
            sequence = self.c.start(tokens)
            self.alive.append(sequence)
            for block in sequence.block_table[len(sequence.prefix) :]:
                assert not self.c.cache.holds(block)
                self.content.pop(block, None)

    @precondition(lambda self: self.alive)
    @rule(pick=st.integers(0, 99), count=st.integers(1, 7))
    def compute(self, pick, count):
        size, sequence = self.c.pool.block_size, self.alive[pick % len(self.alive)]
        done = min(len(sequence.token_ids), sequence.num_computed_tokens + count)
        for index in range(sequence.num_computed_tokens // size, done // size):
            self.content[sequence.block_table[index]] = tuple(sequence.token_ids[: (index + 1) * size])
        self.c.compute(sequence, done)
        assert len(sequence.prefix) <= done // size
        if all(self.c.cache._entries.get(entry.key) is entry for entry in sequence.prefix):
            found = self.c.cache.match(Sequence(0, [*sequence.token_ids[:done], 0]))
            assert found[: len(sequence.prefix)] == sequence.prefix, "published, but not found"

    @precondition(lambda self: self.alive)
    @rule(pick=st.integers(0, 99))
    def end(self, pick):
        self.c.end(self.alive.pop(pick % len(self.alive)))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def check_hits(self, tokens):
        size = self.c.pool.block_size
        entries = self.c.cache.match(Sequence(0, tokens))
        assert len(entries) * size < len(tokens)
        for index, entry in enumerate(entries):
            assert self.content[entry.block] == tuple(tokens[: (index + 1) * size]) == history(entry)

    @invariant()
    def books(self):
        if hasattr(self, "c"):
            check_books(self.c.cache)
            assert len(self.c.cache) <= self.c.pool.num_blocks

    def teardown(self):
        if hasattr(self, "c"):
            for sequence in self.alive:
                self.c.end(sequence)
            assert self.c.pool.num_free == self.c.pool.num_blocks
            self.c.pool.allocate(self.c.pool.num_blocks)
            assert (len(self.c.cache), self.c.cache._of_block) == (0, {})


RandomUse.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRandomUse = RandomUse.TestCase


@pytest.mark.parametrize("keys", [2, 3, 7])
def test_random_use_with_colliding_keys(monkeypatch, keys):
    """Most searches meet a key that belongs to something else."""
    monkeypatch.setattr(prefix_cache, "block_key", lambda parent, ids: bytes([block_key(parent, ids)[0] % keys]))
    for seed in range(30):
        rng, machine = random.Random(seed), RandomUse()
        machine.begin(rng.randint(1, 10), rng.randint(1, 3))
        for _ in range(60):
            if machine.alive and rng.random() < 0.6:
                if rng.random() < 0.5:
                    machine.compute(rng.randrange(99), 5)
                else:
                    machine.end(rng.randrange(99))
            else:
                machine.start(rng.choices([0, 1], k=rng.randint(1, 14)))
            machine.books()
        machine.teardown()


# Under the scheduler --------------------------------------------------------------------------------------------------


class Served:
    """A scheduler with a prefix cache; `run` serves one sequence from its start to its end."""

    def __init__(self, num_blocks: int, block_size: int, budget: int = 2048) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, 8, budget, PrefixCache(self.pool))
        self.count = 0

    def add(self, tokens: list[int]) -> Sequence:
        self.count += 1
        sequence = Sequence(self.count, tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> int:
        """Everybody gets token 7; how many tokens were computed."""
        schedule = self.scheduler.schedule()
        self.scheduler.update(schedule)
        for sequence in schedule.sequences:
            if sequence.num_uncomputed_tokens == 0:
                sequence.token_ids.append(7)
        check_invariants(self.scheduler)
        return sum(schedule.num_new_tokens)

    def run(self, tokens: list[int], steps: int = 1) -> int:
        sequence = self.add(tokens)
        computed = sum(self.step() for _ in range(steps))
        self.scheduler.finish(sequence)
        return computed


@pytest.mark.parametrize("block_size", [1, 16, 32, 100])
def test_a_hit_saves_what_it_should(block_size):
    """512 shared tokens and 16 own ones: the second one computes its own, and at most a block's worth of the others."""
    served = Served(600 // block_size + 20, block_size)
    shared = ids(512)
    assert served.run([*shared, *ids(16, 1000)]) == 528
    computed = served.run([*shared, *ids(16, 2000)])
    assert computed == 16 + 512 % block_size
    assert computed <= 17 + block_size


def test_one_that_starts_later_shares_with_one_that_runs():
    served = Served(20, SIZE, budget=9)
    first = served.add(ids(30))
    assert [served.step(), served.step()] == [9, 9]
    served.scheduler.finish(first)  # aborted in the middle of its prompt: what is computed stays
    assert served.run(ids(30)) == 9
    assert served.scheduler.num_cached_tokens == 16


def test_what_running_ones_need_is_evicted():
    """A full pool of cached blocks is a pool of free blocks."""
    served = Served(4, SIZE)
    served.run(ids(16))
    assert (len(served.scheduler.prefix_cache), served.pool.num_free) == (4, 4)
    assert served.run(ids(15, 50), steps=2) == 16
    assert served.run(ids(16)) == 16
    assert served.scheduler.num_cached_tokens == 0


@pytest.mark.parametrize("length", [15, 16, 17])
def test_an_answer_is_the_beginning_of_the_next_prompt(length):
    served = Served(30, 16)
    sequence = served.add(ids(length))
    for _ in range(40):
        served.step()
    said = list(sequence.token_ids)
    served.scheduler.finish(sequence)
    full = (len(said) - 1) // 16 * 16  # the newest token was never computed
    assert served.run([*said, *ids(5, 90)]) == len(said) + 5 - full
