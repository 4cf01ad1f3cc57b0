"""How attention over the block table is cut up and launched.

Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rvllm.config import LlamaConfig
from rvllm.program import Program
from rvllm.runtime import Array
from rvllm.step_inputs import StepInputs

LONG = 512  # tokens of a context from which on several pages under way pay


@dataclass(frozen=True)
class AttentionShape:
    """Warps of a block, pages that each has under way, blocks that an SM must have room for; parts of a context."""

    warps: int
    prefetch: int
    blocks_per_sm: int
    splits: int = 1


def attention_shape(num_tokens: int, config: LlamaConfig, context: int, multiprocessors: int) -> AttentionShape:
    """The shape for so many tokens, the longest with this context. Measured on an H200 with heads of 64.

    Few tokens need the warps of large blocks, many fill the card with small ones; long contexts several pages a warp.
    """
    splits = attention_splits(num_tokens, config.num_key_value_heads, context, multiprocessors)
    if config.head_dim > 64 or num_tokens <= 8:
        return AttentionShape(12, 1, 1, splits)
    if num_tokens > 128:
        return AttentionShape(4, 1, 4)
    if num_tokens >= 32 and context >= LONG:
        return AttentionShape(4, 2, 2, splits)
    return AttentionShape(8, 1, 2, splits) if num_tokens < 64 else AttentionShape(4, 1, 2)


def attention_splits(num_tokens: int, kv_heads: int, context: int, multiprocessors: int) -> int:
    """Blocks that share the context of a token and KV head: as many as fill the card, each with 256 tokens or more."""
    fill = max(1, 2 * multiprocessors // (num_tokens * kv_heads))
    splits = min(fill, max(1, context // 256), 8)
    return 1 << (splits.bit_length() - 1)


@dataclass(frozen=True)
class Attention:
    """What paged_attention is launched with: who asks (rows, how many, on the device), from where, to where.

    qkv: float32 or float16 [N, (H + 2K) · d].   every_token: rows are all tokens of the step, in order.
    out: float16 [N, H · d], or twice the rows with hi_lo.   parts: room for the parts of split contexts.
    """

    qkv: Array
    rows: Array
    num_rows: Array
    every_token: bool
    hi_lo: bool
    out: Array
    parts: Array

    def add(
        self,
        program: Program,
        num_rows: int,
        pages: Array,
        inputs: StepInputs,
        config: LlamaConfig,
        shape: AttentionShape,
    ) -> None:
        """Each row and KV head over its blocks, in `shape.splits` parts; num_rows: what the grid is made for."""
        H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        is_half = self.qkv.dtype.itemsize == 2
        qkv = self.qkv.view("float32") if is_half else self.qkv  # the kernel's parameter is a pointer to float
        arguments = [qkv, pages, self.rows, self.num_rows, inputs.positions, inputs.owners, inputs.computed]
        arguments += [inputs.block_tables, inputs.limits.max_blocks, self.out, self.parts]
        sizes: dict[str, Any] = {"HEAD_DIM": d, "KV_HEADS": K, "GROUP": H // K, "HI_LO": int(self.hi_lo)}
        kinds: dict[str, Any] = {"WARPS": shape.warps, "PREFETCH": shape.prefetch}
        kinds["BLOCKS_PER_SM"] = shape.blocks_per_sm
        kinds |= {"QKV_TYPE": "half" if is_half else "float", "EVERY_TOKEN": int(self.every_token)}
        program.add("paged_attention", (num_rows, K, shape.splits), 32 * shape.warps, arguments, **sizes, **kinds)
        if shape.splits > 1:
            merged = [self.parts, self.rows, self.num_rows, self.out]
            program.add("attention_merge", (num_rows, K), H // K * d, merged, **sizes, SPLITS=shape.splits)
