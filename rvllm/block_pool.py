"""Cache blocks by number: reference counts, who is next, block tables.

Generated from notebooks/09_paged_kv_cache.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableSequence

from rvllm.errors import RvllmError


class OutOfBlocksError(RvllmError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Cache blocks by number: who is in use, how often, and which to hand out next. Notebook 09, section 3.

    A block is free exactly when its reference count is 0. Free blocks wait in the order in which they became free,
    and the one that has waited longest is handed out first: what was used last stays readable longest, which the
    prefix cache will live on. `on_reuse` is called with a block's number just before it is handed out anew.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} positions; allowed: at least 1 each")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref_counts = [0] * num_blocks
        self.on_reuse: Callable[[int], None] = lambda _block: None
        self._free = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """Blocks that nobody uses; the first is the next to be handed out."""
        return list(self._free)

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` blocks, each with reference count 1; all or none: OutOfBlocksError if fewer are free."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} cache blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.on_reuse(block)
            self.ref_counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more user of a block, in use or free: a free one leaves the queue with its content intact."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block}; allowed: 0 to {self.num_blocks - 1}")
        self._free.pop(block, None)
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One user less of each block; those without users become free, the last of a table first.

        A sequence's later blocks are worth less to others than its first ones, so they are handed out earlier.
        """
        for block in reversed(list(blocks)):
            if self.ref_counts[block] < 1:
                raise ValueError(f"block {block} was released more often than taken")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks hold so many tokens. `num_tokens` counts tokens in the cache, not the pending one."""
    return -(-num_tokens // block_size)


def grow_table(pool: BlockPool, table: MutableSequence[int], num_tokens: int) -> None:
    """Append blocks to a table, in place, until it covers `num_tokens` tokens; OutOfBlocksError changes nothing."""
    missing = blocks_needed(num_tokens, pool.block_size) - len(table)
    if missing > 0:
        table.extend(pool.allocate(missing))
