"""What a step computes, in fixed arrays on the device, which keep themselves up to date.

Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rvllm.errors import RvllmError
from rvllm.runtime import Array, Runtime
from rvllm.step import Step
from rvllm.transfers import Mailbox

Ints = NDArray[np.int32]


class StepTooLargeError(RvllmError):
    """A step that does not fit the fixed arrays of a model: what was found, what is allowed."""


@dataclass(frozen=True)
class Limits:
    """What the fixed arrays are made for: tokens and sequences of a step, cache blocks of a sequence."""

    max_num_tokens: int
    max_num_seqs: int
    max_blocks: int

    @property
    def capacity(self) -> int:
        """Tokens that arrays have room for: whole groups of 32, so that kernels may look at idle ones."""
        return -(-self.max_num_tokens // 32) * 32

    @property
    def row_capacity(self) -> int:
        """Sequences that arrays have room for, likewise."""
        return -(-self.max_num_seqs // 32) * 32

    def check(self, step: Step) -> None:
        """StepTooLargeError unless the step fits."""
        found = (len(step.token_ids), step.num_seqs, step.block_tables.shape[1])
        allowed = (self.max_num_tokens, self.max_num_seqs, self.max_blocks)
        if any(f > a for f, a in zip(found, allowed, strict=True)):
            names = "tokens, sequences, blocks of a sequence"
            raise StepTooLargeError(f"a step of {found} {names}; allowed: {allowed}")


FIELDS = ("token_ids", "positions", "owners", "rows", "computed")


class StepInputs:
    """What a step computes, in fixed arrays on the device, which keep themselves up to date. Notebook 15, section 5.

    All int32, N and B the capacities:
    counts [3]: tokens, rows, turn (see deliver.cuh).   token_ids [N]: an id, or ~i for the token that was chosen for
    row i of the step before.   positions, owners [N]: of each token its position and the row of its sequence in
    block_tables.   rows [B]: tokens whose logits are wanted.   computed [B]: tokens of a sequence in the cache before
    this step.   block_tables [B, max_blocks].
    After a step the device adds 1 to the first B positions and computed by itself. Where every sequence decoded, that
    and ~i are right for the next step: `put` finds nothing that differs from what the device has, and sends nothing.
    """

    def __init__(self, rt: Runtime, limits: Limits) -> None:
        N, B = limits.capacity, limits.row_capacity
        self.limits, self.turn, self.num_uploads = limits, 0, 0  # turn: how many steps were started
        self.counts = rt.zeros(3, np.int32)
        self.token_ids, self.positions, self.owners = (rt.zeros(N, np.int32) for _ in range(3))
        self.rows, self.computed = (rt.zeros(B, np.int32) for _ in range(2))
        self.block_tables = rt.zeros(B * limits.max_blocks, np.int32)
        # What the device has, if that is certain.
        self._known: dict[str, Ints] = {name: np.zeros(0, np.int32) for name in FIELDS}
        self._certain = True
        self._tables = np.zeros((B, limits.max_blocks), np.int32)
        self._mailbox = Mailbox(rt, 4 + 3 * N + 2 * B + 2 * B * limits.max_blocks, self._arguments())

    def _arguments(self) -> list[Array]:
        return [self.counts, *(getattr(self, name) for name in FIELDS), self.block_tables]

    def put(self, step: Step, chosen: Ints) -> None:
        """Make the device have this step. `chosen`: tokens that the device chose last, as far as the host knows them.

        A token that the device has at hand is asked for by ~row, whoever it was chosen for.
        """
        self.limits.check(step)
        n, B = len(step.token_ids), step.num_seqs
        counts = np.diff(step.query_start_loc)
        wanted = {
            "token_ids": at_hand(step.token_ids, chosen[:B]),
            "positions": step.positions,
            "owners": np.repeat(np.arange(B, dtype=np.int32), counts),
            "rows": step.last_token_indices,
            "computed": step.seq_lens - counts,
        }
        mine = self._tables[:B, : step.block_tables.shape[1]]
        changed = np.flatnonzero(mine != step.block_tables)
        same = self._certain and all(np.array_equal(self._known[name], wanted[name]) for name in FIELDS)
        if changed.size or not same:
            self._send(n, B, wanted, changed, step.block_tables)
            mine[...] = step.block_tables
            self._known, self._certain = {name: values.copy() for name, values in wanted.items()}, True

    def _send(self, n: int, B: int, wanted: dict[str, Ints], changed: NDArray[np.intp], tables: Ints) -> None:
        row, column = np.divmod(changed, max(1, tables.shape[1]))
        pairs = np.stack([row * self.limits.max_blocks + column, tables[row, column]], axis=1)
        head = np.array([n, B, self.turn, len(changed)])
        self._mailbox.send(np.concatenate([head, *wanted.values(), pairs.reshape(-1)]))
        self.num_uploads += 1

    def advance(self, step: Step) -> None:
        """The step was started: remember what it makes of the arrays."""
        self.turn += 1
        self._known["positions"][: step.num_seqs] += 1
        self._known["computed"][: step.num_seqs] += 1

    def put_rows(self, rows: Ints) -> None:
        """Other tokens whose logits are wanted, of the same step; afterwards the next step is sent in full."""
        known, nothing = self._known, np.zeros(0, np.intp)
        computed = np.resize(known["computed"], len(rows))
        self._send(
            len(known["token_ids"]), len(rows), {**known, "rows": rows, "computed": computed}, nothing, self._tables
        )
        self._certain = False


def at_hand(token_ids: Ints, chosen: Ints) -> Ints:
    """The ids, where row i was chosen the i-th: ~i instead."""
    ids, n = token_ids.copy(), min(len(token_ids), len(chosen))
    same = np.flatnonzero(ids[:n] == chosen[:n])
    ids[same] = ~same
    return ids
