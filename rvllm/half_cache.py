"""Keys and values as halfs, in blocks that the tensor cores read as they lie.

Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import numpy as np

from rvllm.config import LlamaConfig
from rvllm.errors import RvllmError
from rvllm.runtime import Runtime

PAGE = 16  # tokens of a block


class BlockSizeError(RvllmError):
    """A block size that the kernels of the fast path are not written for."""


def half_bytes_per_block(config: LlamaConfig) -> int:
    """Keys and values of a block in all layers, in bytes."""
    return 2 * 2 * PAGE * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


class HalfKVCache:
    """Keys and values in blocks of 16 tokens, as the tensor cores read them. Notebook 17, section 3.

    pages: one array a layer, float16 [num_blocks, 2, K, 16 · d]: the keys of a block as [16, d], the values transposed,
    [d, 16]. Like those of notebook 09, cells that a sequence has not written may hold anything.
    """

    def __init__(self, rt: Runtime, config: LlamaConfig, num_blocks: int, block_size: int = PAGE) -> None:
        if block_size != PAGE:
            raise BlockSizeError(f"block_size: found {block_size}; allowed: {PAGE} on the fast path")
        self.block_size = block_size
        shape = (num_blocks, 2, config.num_key_value_heads, PAGE * config.head_dim)
        self.pages = [rt.empty(shape, np.float16) for _ in range(config.num_hidden_layers)]
