"""What one forward pass computes: the new tokens of several sequences, laid end to end.

Generated from notebooks/03_numpy_llama.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Step:
    """What one forward pass computes: new tokens of one or more sequences, laid end to end. Notebook 03, section 7.

    All arrays are int32. B sequences, n tokens in all; sequence i owns tokens query_start_loc[i] to
    query_start_loc[i + 1].
    token_ids, positions, slot_mapping: [n]. The slot says where in the cache a token's K and V go.
    query_start_loc: [B + 1].   seq_lens: [B], tokens in the cache once this step has written its own.
    block_tables: [B, blocks of the longest], ids of the cache blocks of each sequence, padded with 0.
    """

    token_ids: Ints
    positions: Ints
    slot_mapping: Ints
    query_start_loc: Ints
    seq_lens: Ints
    block_tables: Ints

    @property
    def num_seqs(self) -> int:
        """B."""
        return len(self.seq_lens)

    @property
    def last_token_indices(self) -> Ints:
        """Index of each sequence's last token, int32 [B]: the only ones whose logits decide what comes next."""
        return self.query_start_loc[1:] - 1


def make_step(
    new_token_ids: Sequence[Sequence[int]],
    num_computed_tokens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
) -> Step:
    """The step that feeds `new_token_ids[i]` to sequence i, which has `num_computed_tokens[i]` tokens in the cache.

    `block_tables[i]` must already cover the new tokens; ValueError if it does not.
    """
    counts = np.fromiter(map(len, new_token_ids), np.int32)
    computed = np.fromiter(num_computed_tokens, np.int32)
    covered = np.fromiter(map(len, block_tables), np.int32) * block_size
    for i in np.flatnonzero((counts < 1) | (computed + counts > covered)).tolist():
        found = f"{computed[i]} + {counts[i]} tokens in {len(block_tables[i])} blocks of {block_size}"
        raise ValueError(f"sequence {i}: {found}")
    tables = np.zeros((len(counts), max(map(len, block_tables))), np.int32)
    for row, blocks in zip(tables, block_tables, strict=True):
        row[: len(blocks)] = blocks
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    owner = np.repeat(np.arange(len(counts)), counts)  # of each token, the sequence it belongs to
    positions = (np.arange(starts[-1]) - starts[owner] + computed[owner]).astype(np.int32)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    token_ids = np.fromiter(chain.from_iterable(new_token_ids), np.int32, starts[-1])
    return Step(token_ids, positions, slots, starts, computed + counts, tables)
