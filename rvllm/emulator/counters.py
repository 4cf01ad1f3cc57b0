"""What a launch did to memory, in numbers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

SECTOR_BYTES = 32


@dataclass(frozen=True)
class Counters:
    """Counts over all threads of one launch in check mode with `count=True`.

    A request is one memory instruction executed by the lanes of one warp together. Fields of bytes say so;
    all others are plain counts. The order of the fields is that of `struct Counters` in cuda/runtime.h.
    """

    global_reads: int
    global_read_bytes: int
    global_writes: int
    global_write_bytes: int
    global_requests: int
    sectors: int  # of 32 bytes, summed over requests; 32 floats in a row: 4, each in another sector: 32
    shared_reads: int
    shared_read_bytes: int
    shared_writes: int
    shared_write_bytes: int
    shared_requests: int
    bank_conflicts: int  # wavefronts beyond the first; 32 lanes in one bank, all different words: 31
    atomics: int  # atomic updates, global or shared; each is also counted as a write
    barriers: int  # completed, per block
    warp_collectives: int  # completed, per warp: shuffles, votes, __syncwarp
    ungrouped: int  # accesses that were counted but not assigned to requests, because a warp made too many

    @property
    def sectors_per_request(self) -> float:
        """32-byte sectors that an average global request touches; nan if there was none."""
        return self.sectors / self.global_requests if self.global_requests else float("nan")

    @property
    def sector_efficiency(self) -> float:
        """Bytes asked for per byte of the touched sectors; above 1 if lanes ask for the same bytes."""
        moved = self.sectors * SECTOR_BYTES
        return (self.global_read_bytes + self.global_write_bytes) / moved if moved else float("nan")


def read_counters(address: int) -> Counters:
    """The counters of the launch just ended, from the runtime's struct at `address`."""
    names = [field.name for field in fields(Counters)]
    values = (ctypes.c_uint64 * len(names)).from_address(address)
    return Counters(**dict(zip(names, values, strict=True)))
