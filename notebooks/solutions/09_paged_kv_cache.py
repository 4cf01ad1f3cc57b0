"""Solutions to the exercises of notebook 09."""

from rvllm.block_pool import BlockPool


def owner_of(slot: int, block_tables: list[list[int]], block_size: int) -> tuple[int, int] | None:
    """(index of the sequence, position of the token)."""
    block, offset = divmod(slot, block_size)
    for sequence, table in enumerate(block_tables):
        if block in table:
            return sequence, table.index(block) * block_size + offset
    return None


# A block's number counts blocks, not rows: it has to be multiplied by the block size.
COPY = r"""
extern "C" __global__ void copy_rows(const float* storage, const int* block_table, float* out, int S, int row,
                                     int block_size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= S * row) return;
    int s = i / row;
    int slot = block_table[s / block_size] * block_size + s % block_size;
    out[i] = storage[slot * row + i % row];
}
"""


def own_last_block(pool: BlockPool, table: list[int]) -> tuple[list[int], tuple[int, int] | None]:
    """The table to use from now on, and what to copy."""
    last = table[-1]
    if pool.ref_counts[last] == 1:
        return table, None
    (fresh,) = pool.allocate()
    pool.release([last])
    return [*table[:-1], fresh], (last, fresh)
