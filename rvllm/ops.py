"""Thin Python wrappers of the kernels, one each: they check shapes and compute the grid.

Generated from notebooks/05_first_kernels.ipynb, notebooks/06_elementwise_kernels.ipynb,
notebooks/07_reductions.ipynb, notebooks/09_paged_kv_cache.ipynb; edit there, then run: python tools/nb.py
export
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rvllm.errors import RvllmError
from rvllm.runtime import Array, Runtime

THREADS = 256  # of a block, where nothing asks for another number


class ShapeError(RvllmError):
    """Arrays that don't fit each other: a kernel would read or write past their ends. Notebook 05, section 6."""


def expect(op: str, **shapes: tuple[Array, Sequence[int | None]]) -> None:
    """Compare each array's shape with the one wanted (None = any size); ShapeError names the first that differs."""
    for name, (array, wanted) in shapes.items():
        same = len(array.shape) == len(wanted)
        if not same or any(w is not None and w != n for w, n in zip(wanted, array.shape, strict=True)):
            shown = tuple("*" if w is None else w for w in wanted)
            raise ShapeError(f"{op}: {name} has shape {tuple(array.shape)}; allowed: {shown}")


def blocks_for(n: int, threads: int = THREADS) -> int:
    """How many blocks of `threads` threads cover n elements (at least one: a grid must not be empty)."""
    if n >= 2**31:
        raise ShapeError(f"{n:,} elements; allowed: fewer than 2**31, kernels count in 32 bits. Take smaller chunks")
    return max(1, -(-n // threads))


def launch_for_each(rt: Runtime, kernel: str, n: int, args: Sequence[Any]) -> None:
    """Start a kernel with a thread for each of n elements. Without elements there is nothing to start."""
    if n:
        rt.launch(kernel, blocks_for(n), THREADS, args)


def embedding(rt: Runtime, table: Array, token_ids: Array) -> Array:
    """Rows of a table: float32 [V, D], int32 [n] -> [n, D]. Ids must be in range. Notebook 05, section 6."""
    expect("embedding", table=(table, (None, None)), token_ids=(token_ids, (None,)))
    (n,), (V, D) = token_ids.shape, table.shape
    if n and not V:
        raise ShapeError(f"embedding: {n} tokens, and a table without rows; allowed: at least one row")
    out = rt.empty((n, D))
    launch_for_each(rt, "embedding", n * D, [table, token_ids, out, n, D, V])
    return out


def residual_add(rt: Runtime, x: Array, y: Array) -> None:
    """x += y, in place: float32 of equal shape. Notebook 05, section 7."""
    expect("residual_add", y=(y, x.shape))
    launch_for_each(rt, "residual_add", x.size, [x, y, x.size])


def rope(rt: Runtime, x: Array, cos: Array, sin: Array) -> None:
    """Turn the pairs (2i, 2i+1), in place: x [n, heads, d], cos and sin [n, d/2], float32. Notebook 06, section 3."""
    expect("rope", x=(x, (None, None, None)))
    n, heads, d = x.shape
    if d % 2:
        raise ShapeError(f"rope: x has heads of {d}; allowed: an even size, since pairs are turned")
    expect("rope", cos=(cos, (n, d // 2)), sin=(sin, (n, d // 2)))
    launch_for_each(rt, "rope", x.size // 2, [x, cos, sin, n, heads, d // 2])


def silu_mul(rt: Runtime, gate: Array, up: Array) -> Array:
    """silu(gate) · up: float32 of equal shape -> a new array. Notebook 06, section 4."""
    expect("silu_mul", up=(up, gate.shape))
    out = rt.empty(gate.shape)
    launch_for_each(rt, "silu_mul", gate.size, [gate, up, out, gate.size])
    return out


def mask_add(rt: Runtime, scores: Array, positions: Array) -> None:
    """Add minus infinity where a key lies after its query, in place: scores [B, H, T, S], positions int32 [B, T].

    Notebook 06, section 5.
    """
    expect("mask_add", scores=(scores, (None,) * 4))
    B, H, T, S = scores.shape
    expect("mask_add", positions=(positions, (B, T)))
    launch_for_each(rt, "mask_add", scores.size, [scores, positions, B, H, T, S])


def last_row(rt: Runtime, x: Array, last: Array) -> Array:
    """Row last[b] of each sequence: float32 [B, T, D], int32 [B] -> [B, D]. Notebook 06, section 6."""
    expect("last_row", x=(x, (None,) * 3))
    B, T, D = x.shape
    expect("last_row", last=(last, (B,)))
    if B and not T:
        raise ShapeError(f"last_row: x has shape {tuple(x.shape)}; allowed: at least one row for each sequence")
    out = rt.empty((B, D))
    launch_for_each(rt, "last_row", B * D, [x, last, out, B, T, D])
    return out


def transpose_axes12(rt: Runtime, x: Array) -> Array:
    """Swap the middle axes: float32 [B, T, H, d] -> [B, H, T, d], a new array. Notebook 06, section 7."""
    expect("transpose_axes12", x=(x, (None,) * 4))
    B, T, H, d = x.shape
    out = rt.empty((B, H, T, d))
    launch_for_each(rt, "transpose_axes12", x.size, [x, out, B, T, H, d])
    return out


def rmsnorm(rt: Runtime, x: Array, weight: Array, eps: float) -> Array:
    """Normalise each row: float32 [n, D], [D] -> [n, D]. Notebook 07, section 3."""
    expect("rmsnorm", x=(x, (None, None)))
    n, D = x.shape
    expect("rmsnorm", weight=(weight, (D,)))
    out = rt.empty((n, D))
    if out.size:
        rt.launch("rmsnorm", n, THREADS, [x, weight, out, D, eps])
    return out


def softmax(rt: Runtime, x: Array) -> None:
    """Along the last axis, in place: float32 [..., S]. A row needs one finite value. Notebook 07, section 4."""
    if not x.shape:
        raise ShapeError("softmax: x is a single number; allowed: rows, an array of at least one axis")
    if x.size:
        S = x.shape[-1]
        rt.launch("softmax", x.size // S, THREADS, [x, S])


def kv_write(rt: Runtime, k: Array, v: Array, keys: Array, values: Array, slot_mapping: Array) -> None:
    """Store new keys and values in their slots: k, v [n, K, d] -> keys, values [num_blocks, block_size, K, d].

    slot_mapping: int32 [n]; -1 marks padding, which is not stored. Notebook 09, section 4.
    """
    expect("kv_write", k=(k, (None,) * 3))
    n, K, d = k.shape
    expect("kv_write", v=(v, k.shape), keys=(keys, (None, None, K, d)), values=(values, keys.shape))
    expect("kv_write", slot_mapping=(slot_mapping, (n,)))
    launch_for_each(rt, "kv_write", k.size, [k, v, keys, values, slot_mapping, n, K * d])


def kv_gather(rt: Runtime, storage: Array, block_tables: Array, seq_lens: Array, longest: int) -> Array:
    """Collect each sequence's rows: [num_blocks, block_size, K, d] -> [B, K, longest, d], zeros past seq_lens[b].

    block_tables: int32 [B, blocks]; seq_lens: int32 [B]. Notebook 09, section 5.
    """
    expect("kv_gather", storage=(storage, (None,) * 4), block_tables=(block_tables, (None, None)))
    (B, width), (_, block_size, K, d) = block_tables.shape, storage.shape
    expect("kv_gather", seq_lens=(seq_lens, (B,)))
    if not 0 <= longest <= width * block_size:
        raise ShapeError(f"kv_gather: {longest} positions; allowed: the {width * block_size} of {width} blocks")
    out = rt.empty((B, K, longest, d))
    kernel, per_thread = ("kv_gather4", 4) if d % 4 == 0 else ("kv_gather", 1)
    sizes = [B, longest, K, d, block_size, width]
    launch_for_each(rt, kernel, out.size // per_thread, [storage, block_tables, seq_lens, out, *sizes])
    return out
