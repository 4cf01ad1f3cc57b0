"""Full blocks found again by a hash chain over the tokens that they hold: the same beginning is computed
once.

Generated from notebooks/12_prefix_caching.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Protocol

from rvllm.block_pool import BlockPool


@dataclass(frozen=True, eq=False)
class Entry:
    """A full block that may be found: `token_ids` are its own tokens, `parent` the entry of those before it.

    Entries are compared as objects, hence eq=False: those with the same parent have the same history.
    """

    key: bytes
    parent: Entry | None
    token_ids: tuple[int, ...]
    block: int


def block_key(parent_key: bytes, token_ids: tuple[int, ...]) -> bytes:
    """SHA-256 over the key of all that came before and the block's own token ids. Notebook 12, section 3."""
    return hashlib.sha256(parent_key + array("i", token_ids).tobytes()).digest()


class ComputedTokens(Protocol):
    """What the cache reads of a sequence; `prefix` is the cache's own note: entries with the
    history of its first full blocks, which may name blocks of another sequence."""

    token_ids: list[int]
    num_computed_tokens: int
    block_table: array[int]
    prefix: list[Entry]


class PrefixCache:
    """Full blocks of the pool, found by the tokens that they and all blocks before them hold. Notebook 12, section 4.

    A block keeps its entry from the moment it is published until the pool hands it out anew: whether somebody uses
    it or it waits among the free blocks makes no difference. The pool's queue is thus the LRU list.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._block_size = pool.block_size
        self._entries: dict[bytes, Entry] = {}
        self._of_block: dict[int, Entry] = {}
        pool.on_reuse = self._forget

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._entries)

    def holds(self, block: int) -> bool:
        """Whether this block can be found."""
        return block in self._of_block

    def match(self, sequence: ComputedTokens) -> list[Entry]:
        """Entries of the longest beginning of `sequence.token_ids` that is cached, in full blocks.

        At least one token is left over: its logits are needed, and the cache does not hold logits.
        """
        entries: list[Entry] = []
        parent = None
        for index in range((len(sequence.token_ids) - 1) // self._block_size):
            token_ids = self._tokens(sequence, index)
            entry = self._entries.get(block_key(parent.key if parent else b"", token_ids))
            if entry is None or not _same_history(entry, parent, token_ids):
                break
            entries.append(entry)
            parent = entry
        return entries

    def publish(self, sequence: ComputedTokens) -> None:
        """Let the full blocks of `sequence` be found. Its `num_computed_tokens` must be in the cache already.

        Of two blocks with the same history the first stays; the other one's owner keeps it to itself.
        """
        full = sequence.num_computed_tokens // self._block_size
        if len(sequence.prefix) < full:
            self._drop_lost(sequence.prefix)
        while (index := len(sequence.prefix)) < full:
            parent = sequence.prefix[-1] if index else None
            entry = self._enter(parent, self._tokens(sequence, index), sequence.block_table[index])
            if entry is None:
                return
            sequence.prefix.append(entry)

    def withdraw(self, sequence: ComputedTokens) -> None:
        """What the blocks of `sequence` hold is not to be trusted: none of them can be found any more."""
        for block in sequence.block_table:
            self._forget(block)

    def _drop_lost(self, prefix: list[Entry]) -> None:
        """Another's block that stood for one of this sequence's may be gone: its own are entered in its place."""
        lost = next((i for i, entry in enumerate(prefix) if not self._can_be_found(entry)), len(prefix))
        del prefix[lost:]

    def _enter(self, parent: Entry | None, token_ids: tuple[int, ...], block: int) -> Entry | None:
        """The entry for this history, a new one if there is none; None where a search could not get to it."""
        if not self._can_be_found(parent):
            return None
        key = block_key(parent.key if parent else b"", token_ids)
        known = self._entries.get(key)
        if known is None or not self._can_be_found(known.parent):  # out of reach, it makes way
            return self._add(Entry(key, parent, token_ids, block))
        return known if _same_history(known, parent, token_ids) else None  # two histories, one key

    def _add(self, entry: Entry) -> Entry:
        if replaced := self._entries.get(entry.key):
            del self._of_block[replaced.block]
        self._entries[entry.key] = self._of_block[entry.block] = entry
        return entry

    def _can_be_found(self, entry: Entry | None) -> bool:
        """A search starts at the first block and goes from entry to entry: those whose parent went are out of reach."""
        return entry is None or self._entries.get(entry.key) is entry

    def _forget(self, block: int) -> None:
        """A block that can't be found any more: the pool hands it out anew, or it was withdrawn."""
        if entry := self._of_block.pop(block, None):
            del self._entries[entry.key]

    def _tokens(self, sequence: ComputedTokens, index: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[index * self._block_size : (index + 1) * self._block_size])


def _same_history(entry: Entry, parent: Entry | None, token_ids: tuple[int, ...]) -> bool:
    """The key is a hash, and a hash proves nothing: compare what it stands for."""
    return entry.parent is parent and entry.token_ids == token_ids
