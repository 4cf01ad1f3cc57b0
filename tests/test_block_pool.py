"""The block pool beside a model of a few lists; who is handed out when; counts at the borders of blocks (C48)."""

import copy

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rvllm.block_pool import BlockPool, OutOfBlocksError, blocks_needed, grow_table
from rvllm.errors import RvllmError


def in_order(pool: BlockPool) -> list[int]:
    """The free blocks in the order in which they would be handed out."""
    probe = copy.copy(pool)
    probe._free, probe.ref_counts, probe.on_reuse = pool._free.copy(), list(pool.ref_counts), lambda _block: None
    return probe.allocate(probe.num_free)


class PoolMachine(RuleBasedStateMachine):
    """`free` is the queue, `users` counts each block's users, `tables` are sequences that hold blocks."""

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.pool = BlockPool(num_blocks, block_size)
        self.free, self.users = list(range(num_blocks)), [0] * num_blocks
        self.tables: list[list[int]] = []
        self.reused: list[int] = []
        self.expected_reuse: list[int] = []
        self.pool.on_reuse = self.note

    def note(self, block):
        assert self.pool.ref_counts[block] == 0, "called before the block is handed out"
        self.reused.append(block)

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        self.expected_reuse += taken
        for block in taken:
            self.users[block] = 1
        return taken

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        if count > len(self.free):
            with pytest.raises(OutOfBlocksError, match=f"{count} cache blocks wanted, {len(self.free)} of"):
                self.pool.allocate(count)
        else:
            table = self.pool.allocate(count)
            assert table == self.take(count)
            self.tables.append(table)

    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.share(block)
        self.users[block] += 1
        self.free = [b for b in self.free if b != block]
        self.tables.append([block])

    @rule(data=st.data())
    def share_a_table(self, data):
        """A second sequence with the same blocks, as parallel answers to one prompt have."""
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            for block in table:
                self.pool.share(block)
                self.users[block] += 1
            self.tables.append(list(table))

    @rule(data=st.data())
    def release(self, data):
        if self.tables:
            table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.pool.release(table)
            for block in reversed(table):
                self.users[block] -= 1
                if self.users[block] == 0:
                    self.free.append(block)

    @rule(data=st.data())
    def release_what_nobody_uses(self, data):
        if self.free:
            with pytest.raises(ValueError, match="more often than taken"):
                self.pool.release([data.draw(st.sampled_from(self.free))])

    @rule(data=st.data(), num_tokens=st.integers(0, 30))
    def grow(self, data, num_tokens):
        if not self.tables:
            return
        table = data.draw(st.sampled_from(self.tables))
        before = list(table)
        missing = max(0, (num_tokens + self.pool.block_size - 1) // self.pool.block_size - len(table))
        if missing > len(self.free):
            with pytest.raises(OutOfBlocksError):
                grow_table(self.pool, table, num_tokens)
            assert table == before
        else:
            grow_table(self.pool, table, num_tokens)
            assert table == before + self.take(missing)

    @invariant()
    def agrees(self):
        assert self.pool.ref_counts == self.users
        assert self.pool.num_free == len(self.free) == sum(count == 0 for count in self.users)
        assert in_order(self.pool) == self.free
        assert self.reused == self.expected_reuse
        assert sum(map(len, self.tables)) == sum(self.users)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_what_was_free_longest_goes_first_and_a_tables_end_before_its_start():
    pool = BlockPool(5, 16)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release([1, 3])
    pool.release([0, 2])
    assert pool.allocate(5) == [4, 3, 1, 2, 0]


def test_a_shared_block_leaves_the_queue_without_on_reuse_and_survives_its_first_release():
    pool, reused = BlockPool(3, 16), []
    (block,) = pool.allocate()
    pool.on_reuse = reused.append
    pool.release([block])
    pool.share(block)
    pool.share(block)
    assert (pool.num_free, pool.ref_counts[block], reused) == (2, 2, [])
    pool.release([block])
    assert pool.num_free == 2
    assert block not in pool.allocate(2)
    pool.release([block])
    assert pool.allocate() == [block]
    assert reused == [1, 2, block]


def test_all_or_none():
    pool, reused = BlockPool(3, 16), []
    pool.on_reuse = reused.append
    table = [0]
    pool.share(0)
    with pytest.raises(OutOfBlocksError, match="3 cache blocks wanted, 2 of 3 are free"):
        pool.allocate(3)
    with pytest.raises(RvllmError):
        grow_table(pool, table, 4 * 16)
    assert (pool.num_free, pool.ref_counts, table, reused) == (2, [1, 0, 0], [0], [])
    grow_table(pool, table, 3 * 16)
    assert table == [0, 1, 2]


@pytest.mark.parametrize("blocks", [[2], [0], [1, 1], [1, 2]])
def test_double_release_is_refused_and_the_queue_has_no_twins(blocks):
    pool = BlockPool(3, 16)
    pool.release(pool.allocate(2)[:1])
    with pytest.raises(ValueError, match="released more often"):
        pool.release(blocks)
    assert pool.num_free == sum(count == 0 for count in pool.ref_counts)
    assert len(set(in_order(pool))) == pool.num_free


@pytest.mark.parametrize("size", [(0, 16), (-1, 16), (4, 0), (4, -3)])
def test_a_pool_has_blocks(size):
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(*size)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3), (48, 3), (49, 4)]
)
def test_c48_blocks_needed(tokens, blocks):
    """C48: a full block is no reason for another one, the token after it is."""
    assert blocks_needed(tokens, 16) == blocks
    assert blocks_needed(tokens, 1) == tokens
    assert blocks_needed(tokens, 64) == min(tokens, 1)


def test_c48_at_a_full_pool_15_to_16_goes_through_and_16_to_17_does_not():
    pool, table = BlockPool(1, 16), []
    for tokens in (15, 16, 16):
        grow_table(pool, table, tokens)
    with pytest.raises(OutOfBlocksError):
        grow_table(pool, table, 17)
    assert table == [0]


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_c48_a_table_grows_token_by_token_as_it_would_at_once(block_size):
    pool, table = BlockPool(100, block_size), []
    for tokens in range(35):
        grow_table(pool, table, tokens)
        assert len(table) == -(-tokens // block_size)
    grow_table(pool, table, 3)
    assert table == list(range(-(-34 // block_size))), "a table never shrinks"
