"""Paged and dense cache hold the same numbers; the device's cache does what NumPy's does. NaN marks unused cells."""

from types import SimpleNamespace

import numpy as np
import pytest

from rvllm.block_pool import BlockPool, blocks_needed, grow_table
from rvllm.cpu_model import CpuModel, DenseKVCache
from rvllm.gguf import GGUFFile
from rvllm.kv_cache import DeviceKVCache, PagedKVCache, bytes_per_block, storage_shape
from rvllm.step import make_step
from tests import toy

BLOCK_SIZES = [1, 2, 3, 4, 16, 64]
# New tokens of each of four sequences, step by step: prefills of several lengths beside decodes.
SCHEDULE = [[5, 1, 0, 17], [1, 0, 3, 1], [28, 1, 1, 1], [1, 14, 13, 0], [3, 1, 0, 14], [1, 1, 1, 1]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> CpuModel:
    return CpuModel(GGUFFile(toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")))


def nan_paged(model: CpuModel, num_blocks: int, block_size: int) -> PagedKVCache:
    """A cache in which whatever was not written poisons what reads it."""
    cache = PagedKVCache(model.config, num_blocks, block_size)
    cache.keys[:], cache.values[:] = np.nan, np.nan
    return cache


def shuffled_pool(num_blocks: int, block_size: int, seed: int = 0) -> BlockPool:
    """A pool that hands out its blocks in no order."""
    pool = BlockPool(num_blocks, block_size)
    pool.allocate(num_blocks)
    for block in np.random.default_rng(seed).permutation(num_blocks).tolist():
        pool.release([block])
    return pool


# NumPy's paged cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("all_positions", [False, True])
def test_paged_equals_dense_bit_for_bit(model, block_size, all_positions):
    """Mixed steps, shuffled tables that grow as they must, block borders crossed in prefill and in decode."""
    ids = np.random.default_rng(1).integers(0, 300, (4, 64)).tolist()
    pool = shuffled_pool(4 * blocks_needed(64, block_size), block_size)
    paged, dense = nan_paged(model, pool.num_blocks, block_size), DenseKVCache(model.config, 4, 64)
    tables, done = [[] for _ in ids], [0] * 4
    for counts in SCHEDULE:
        who = [i for i, count in enumerate(counts) if count]
        for i in who:
            grow_table(pool, tables[i], done[i] + counts[i])
        new, computed = [ids[i][done[i] : done[i] + counts[i]] for i in who], [done[i] for i in who]
        step = make_step(new, computed, [tables[i] for i in who], block_size)
        expected = model.forward(make_step(new, computed, [[3 - i] for i in who], 64), dense, all_positions)
        assert np.array_equal(model.forward(step, paged, all_positions), expected)
        for i in who:
            done[i] += counts[i]
        for layer in range(toy.LAYERS):
            for (k, v), length in zip(paged.read(layer, step), step.seq_lens, strict=True):
                assert k.shape == v.shape == (length, toy.K, toy.HEAD)
    assert np.isfinite(paged.keys[:, :, :, 0, 0]).sum() == sum(done) * toy.LAYERS, "each token's cell, and no other"
    assert np.isfinite(paged.values[:, :, :, 0, 0]).sum() == sum(done) * toy.LAYERS


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_c48_prompts_that_end_at_a_block_border(model, block_size, length):
    """C48: greedy with 20 new tokens equals the dense cache; ceil(tokens in the cache / block) blocks are held."""
    prompt = np.random.default_rng(length).integers(0, 300, length).tolist()
    pool = shuffled_pool(blocks_needed(length + 19, block_size), block_size)  # the last token is never computed
    paged, dense = nan_paged(model, pool.num_blocks, block_size), DenseKVCache(model.config, 1, 64)
    table, computed, new = [], 0, prompt
    for _ in range(20):
        grow_table(pool, table, computed + len(new))
        logits = model.forward(make_step([new], [computed], [table], block_size), paged)
        assert np.array_equal(logits, model.forward(make_step([new], [computed], [[0]], 64), dense))
        computed += len(new)
        assert len(table) == pool.num_blocks - pool.num_free == -(-computed // block_size)
        new = [int(logits.argmax())]
    assert pool.num_free == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_c54_chunks_of_seven_one_and_three(model, block_size):
    """C54: 7, then 1, then 3 tokens give the logits of 11 at once, and 11 cells a layer are written."""
    ids, table = list(range(10, 21)), shuffled_pool(11, block_size, seed=2).allocate(blocks_needed(11, block_size))
    whole = model.forward(make_step([ids], [0], [table], block_size), nan_paged(model, 11, block_size))
    cache, done = nan_paged(model, 11, block_size), 0
    for count in (7, 1, 3):
        logits = model.forward(make_step([ids[done : done + count]], [done], [table], block_size), cache)
        done += count
    assert np.abs(logits - whole).max() <= 1e-4
    for layer in range(toy.LAYERS):
        assert np.isfinite(cache.keys[layer, :, :, 0, 0]).sum() == 11


def test_two_sequences_share_their_first_blocks(model):
    """The same blocks in two tables: what one prompt wrote serves both continuations."""
    prompt, tails = list(range(40, 48)), [[1, 2, 3], [9]]
    cache = nan_paged(model, 5, 4)
    model.forward(make_step([prompt], [0], [[2, 0]], 4), cache)
    logits = model.forward(make_step(tails, [8, 8], [[2, 0, 4], [2, 0, 1]], 4), cache)
    for row, tail in enumerate(tails):
        alone = model.forward(make_step([prompt + tail], [0], [[0]], 16), DenseKVCache(model.config, 1, 16))
        assert np.abs(logits[row] - alone[0]).max() <= 1e-4


def test_sizes(model):
    assert storage_shape(model.config, 7, 16) == (toy.LAYERS, 7, 16, toy.K, toy.HEAD)
    cache = PagedKVCache(model.config, 7, 16)
    assert 7 * bytes_per_block(model.config, 16) == cache.keys.nbytes + cache.values.nbytes


# The cache on a device ------------------------------------------------------------------------------------------------


def device_cache(rt, layers, num_blocks, block_size, heads, head_dim) -> DeviceKVCache:
    config = SimpleNamespace(num_hidden_layers=layers, num_key_value_heads=heads, head_dim=head_dim)
    cache = DeviceKVCache(rt, config, num_blocks, block_size)
    for storage in (cache.keys, cache.values):
        assert len(storage) == layers
        for layer, array in enumerate(storage):
            assert array.shape == (num_blocks, block_size, heads, head_dim)
            storage[layer] = rt.upload(np.full(array.shape, np.nan, np.float32))
    return cache


def batch(rt, slots, tables, seq_lens):
    arrays = {"slot_mapping": slots, "block_tables": tables, "seq_lens": seq_lens}
    uploaded = {name: rt.upload(np.array(array, np.int32)) for name, array in arrays.items()}
    return SimpleNamespace(**uploaded, longest=int(max(seq_lens)))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (2, 16), (3, 7)])
def test_device_cache_against_numpy(rt, block_size, heads, head_dim):
    """Three padded sequences in shuffled blocks: padding is not stored, reading gives zeros past each end."""
    rng = np.random.default_rng(block_size)
    lengths, T = [5, 1, 18], 18
    width = blocks_needed(T, block_size)
    tables = rng.permutation(3 * width + 2)[: 3 * width].reshape(3, width)
    slots = np.full((3, T), -1)
    for b, length in enumerate(lengths):
        for t in range(length):
            slots[b, t] = tables[b, t // block_size] * block_size + t % block_size
    cache = device_cache(rt, 2, 3 * width + 2, block_size, heads, head_dim)
    k, v = rng.standard_normal((2, 3 * T, heads, head_dim), np.float32)
    own = batch(rt, slots.reshape(-1), tables, lengths)
    cache.write(1, rt.upload(k), rt.upload(v), own)
    assert np.isnan(rt.download(cache.keys[0])).all(), "another layer"
    for storage, new, got in zip((cache.keys, cache.values), (k, v), cache.read(1, own), strict=True):
        cells = rt.download(storage[1]).reshape(-1, heads, head_dim)
        for slot, cell in enumerate(cells):
            place = np.flatnonzero(slots.reshape(-1) == slot)
            assert np.array_equal(cell, new[place[0]]) if place.size else np.isnan(cell).all()
        rows = rt.download(got)
        assert rows.shape == (3, heads, T, head_dim)
        for b, length in enumerate(lengths):
            assert np.array_equal(rows[b, :, :length], new[b * T : b * T + length].swapaxes(0, 1))
            assert (rows[b, :, length:] == 0).all()


def test_device_cache_beside_the_paged_one(rt):
    """Steps that append to what is there, B = 1 and 2: the same cells, the same rows."""
    rng = np.random.default_rng(0)
    config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=2, head_dim=6)
    paged, cache = PagedKVCache(config, 6, 4), device_cache(rt, 1, 6, 4, 2, 6)
    paged.keys[:], paged.values[:] = np.nan, np.nan
    tables = [[5, 0, 3], [2, 4]]
    for counts, computed in (([9], [0]), ([1, 1], [9, 0]), ([2, 2], [10, 1])):
        step = make_step([[0] * n for n in counts], computed, tables[: len(counts)], 4)
        k, v = rng.standard_normal((2, sum(counts), 2, 6), np.float32)
        paged.write(0, k, v, step)
        own = batch(rt, step.slot_mapping, step.block_tables, step.seq_lens)
        cache.write(0, rt.upload(k), rt.upload(v), own)
        assert np.array_equal(rt.download(cache.keys[0]), paged.keys[0], equal_nan=True)
        assert np.array_equal(rt.download(cache.values[0]), paged.values[0], equal_nan=True)
        got = [rt.download(array) for array in cache.read(0, own)]
        for b, pair in enumerate(paged.read(0, step)):
            for ours, theirs in zip(got, pair, strict=True):
                assert np.array_equal(ours[b, :, : len(theirs)].swapaxes(0, 1), theirs)


def test_padding_alone_writes_nothing(rt):
    cache = device_cache(rt, 1, 2, 3, 1, 4)
    k = rt.upload(np.ones((5, 1, 4), np.float32))
    cache.write(0, k, k, batch(rt, [-1] * 5, [[0]], [1]))
    assert np.isnan(rt.download(cache.keys[0])).all()
    assert np.isnan(rt.download(cache.values[0])).all()
