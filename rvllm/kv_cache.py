"""The paged storage of keys and values, in NumPy and on a device.

Generated from notebooks/09_paged_kv_cache.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rvllm.block_pool import blocks_needed
from rvllm.config import LlamaConfig
from rvllm.ops import kv_gather, kv_write
from rvllm.runtime import Array, Runtime
from rvllm.step import Step

Floats = NDArray[np.float32]


def storage_shape(config: LlamaConfig, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int]:
    """[L, num_blocks, block_size, K, d], once for keys and once for values."""
    return (config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)


def bytes_per_block(config: LlamaConfig, block_size: int) -> int:
    """Keys and values of a block in all layers, in bytes of float32."""
    return 2 * 4 * int(np.prod(storage_shape(config, 1, block_size)))


class PagedKVCache:
    """Keys and values in blocks, in NumPy: same interface as the dense cache of notebook 03. Notebook 09, section 4.

    keys, values: float32 [L, num_blocks, block_size, K, d].
    """

    def __init__(self, config: LlamaConfig, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        shape = storage_shape(config, num_blocks, block_size)
        self.keys, self.values = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def write(self, layer: int, k: Floats, v: Floats, step: Step) -> None:
        """Store k and v, [n, K, d]: slot = block · block_size + offset."""
        for storage, new in ((self.keys, k), (self.values, v)):
            storage[layer].reshape(-1, *new.shape[1:])[step.slot_mapping] = new

    def read(self, layer: int, step: Step) -> Iterable[tuple[Floats, Floats]]:
        """Keys and values of each sequence, [S, K, d]: copies, gathered block by block."""
        for blocks, length in zip(step.block_tables, step.seq_lens, strict=True):
            own = blocks[: blocks_needed(length, self.block_size)]
            k, v = (s[layer, own].reshape(-1, *s.shape[3:])[:length] for s in (self.keys, self.values))
            yield k, v


class PaddedBatch(Protocol):
    """What the device cache reads of a batch of B sequences, each padded to T new tokens: arrays on the device."""

    @property
    def slot_mapping(self) -> Array:
        """int32 [B · T], -1 for padding."""

    @property
    def block_tables(self) -> Array:
        """int32 [B, blocks]."""

    @property
    def seq_lens(self) -> Array:
        """int32 [B]."""

    @property
    def longest(self) -> int:
        """The largest of seq_lens, on the host."""


class DeviceKVCache:
    """Keys and values in blocks on a device, line by line beside `PagedKVCache`. Notebook 09, section 5.

    keys, values: one array [num_blocks, block_size, K, d] a layer, float32.
    """

    def __init__(self, rt: Runtime, config: LlamaConfig, num_blocks: int, block_size: int) -> None:
        self.rt, self.block_size = rt, block_size
        layers, *shape = storage_shape(config, num_blocks, block_size)
        self.keys = [rt.empty(tuple(shape)) for _ in range(layers)]
        self.values = [rt.empty(tuple(shape)) for _ in range(layers)]

    def write(self, layer: int, k: Array, v: Array, batch: PaddedBatch) -> None:
        """Store k and v, [B · T, K, d]; padding is left out."""
        kv_write(self.rt, k, v, self.keys[layer], self.values[layer], batch.slot_mapping)

    def read(self, layer: int, batch: PaddedBatch) -> tuple[Array, Array]:
        """Keys and values of all sequences, [B, K, longest, d] each, zeros past a sequence's end."""
        k, v = (
            kv_gather(self.rt, s[layer], batch.block_tables, batch.seq_lens, batch.longest)
            for s in (self.keys, self.values)
        )
        return k, v
