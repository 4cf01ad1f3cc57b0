"""How attention over the block table is cut up and launched.

Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rvllm.config import LlamaConfig
from rvllm.program import Program
from rvllm.runtime import Array
from rvllm.step_inputs import StepInputs

LONG = 512  # tokens of a context from which on it pays to give each more warps


@dataclass(frozen=True)
class AttentionShape:
    """Warps of a block, pages that each has under way, blocks that an SM must have room for; parts of a context."""

    warps: int
    prefetch: int
    blocks_per_sm: int
    splits: int = 1


# Measured on an H200 with heads of 64, in steps of the 360M model: up to so many tokens, the shape.
SHORT_CONTEXTS = (
    (4, AttentionShape(12, 1, 1)),
    (16, AttentionShape(8, 2, 1)),
    (32, AttentionShape(6, 1, 2)),
    (64, AttentionShape(4, 2, 2)),
    (128, AttentionShape(4, 1, 2)),
)
LONG_CONTEXTS = ((8, AttentionShape(12, 1, 1)),)


def attention_shape(num_tokens: int, config: LlamaConfig, context: int, multiprocessors: int) -> AttentionShape:
    """The shape for so many tokens, the longest with this context.

    Few tokens need the warps of large blocks, many fill the card with small ones. Long contexts differ in length, and
    everybody waits for the longest: more warps share it.
    """
    is_long = context >= LONG
    table = LONG_CONTEXTS if is_long else SHORT_CONTEXTS
    most = AttentionShape(8, 1, 2) if is_long else AttentionShape(4, 1, 4)
    shape = next((shape for limit, shape in table if num_tokens <= limit), most)
    if config.head_dim > 64:  # a block's shared memory, warps x group x head size floats, ends at 48 KB
        shape = AttentionShape(12 if config.num_attention_heads < 8 * config.num_key_value_heads else 8, 1, 1)
    return replace(shape, splits=attention_splits(num_tokens, config.num_key_value_heads, context, multiprocessors))


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
    rope: None where q and k are turned and stored already; else float32 [positions, d/2, 2], and the kernel turns them
    and stores k and v: for steps in which every sequence has one token.
    """

    qkv: Array
    rows: Array
    num_rows: Array
    every_token: bool
    hi_lo: bool
    out: Array
    parts: Array
    rope: Array | None = None

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
        rope = self.parts if self.rope is None else self.rope  # some array: the kernel then has no use for it
        arguments += [inputs.block_tables, inputs.limits.max_blocks, rope, self.out, self.parts]
        sizes: dict[str, Any] = {"HEAD_DIM": d, "KV_HEADS": K, "GROUP": H // K, "HI_LO": int(self.hi_lo)}
        kinds: dict[str, Any] = {"WARPS": shape.warps, "PREFETCH": shape.prefetch}
        kinds |= {"BLOCKS_PER_SM": shape.blocks_per_sm, "RAW_QKV": int(self.rope is not None)}
        kinds |= {"QKV_TYPE": "half" if is_half else "float", "EVERY_TOKEN": int(self.every_token)}
        program.add("paged_attention", (num_rows, K, shape.splits), 32 * shape.warps, arguments, **sizes, **kinds)
        if shape.splits > 1:
            merged = [self.parts, self.rows, self.num_rows, self.out]
            program.add("attention_merge", (num_rows, K), H // K * d, merged, **sizes, SPLITS=shape.splits)
