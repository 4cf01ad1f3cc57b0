"""How the products of the fused model are cut into blocks, warps and groups of tokens.

Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WARPS = 16
MAX_K_BLOCKS = 256  # a warp then keeps 16 tiles of a row in registers


@dataclass(frozen=True)
class Columns:
    """How the tokens of a step lie on the columns of the tensor cores: a group of 8 `tiles` columns at a time.

    hi_lo: a token takes two columns, and its products are as accurate as float32's.
    """

    tiles: int
    hi_lo: bool

    @property
    def tokens(self) -> int:
        """Tokens of a group."""
        return 8 * self.tiles // (2 if self.hi_lo else 1)


def is_hi_lo(num_tokens: int, exact: bool) -> bool:
    """Whether a step's activations are split. Up to 4 tokens leave half of 8 columns empty: it costs nothing there."""
    return exact or num_tokens <= 4


def columns_for(num_tokens: int, hi_lo: bool, most: int = 4) -> Columns:
    """The columns that so many tokens need, up to `most` tiles of 8: more tokens take several groups."""
    wanted = num_tokens * (2 if hi_lo else 1)
    tiles = next((n for n in (1, 2, 4) if wanted <= 8 * n), 8)
    return Columns(min(tiles, most), hi_lo)


@dataclass(frozen=True)
class Shape:
    """How a product is cut up: row tiles of a block, its warps, and the k-blocks of a warp."""

    row_tiles: int
    warps: int
    blocks_per_warp: int
    early: bool  # whether the next kernel may take its place on the card before this one has its inputs


# Measured on an H200 with the 360M model: (kernel, k-blocks, tokens of a group) -> (row tiles, warps, blocks a warp).
MEASURED = {("qkv", 30, 16): (1, 6, 5), ("gate_up", 30, 16): (2, 6, 5), ("output", 30, 32): (1, 15, 2)}


def shape_for(kernel: str, k_blocks: int, columns: Columns, num_tokens: int) -> Shape:
    """The cut of one of the products: "qkv", "output", "gate_up" or "down"."""
    groups = -(-num_tokens // columns.tokens)
    crowded = columns.tiles >= 4 and not columns.hi_lo
    early = kernel in ("down", "gate_up") if groups > 1 else not (crowded and kernel == "gate_up")
    if groups == 1 and (kernel, k_blocks, columns.tokens) in MEASURED:
        return Shape(*MEASURED[kernel, k_blocks, columns.tokens], early)
    row_tiles = 2 if kernel == "gate_up" else 1
    if crowded and (kernel == "gate_up" or (kernel == "qkv" and groups > 1)):
        row_tiles += 1  # a fragment of activations then serves more products
    per_warp = next(
        (n for n in range(min(3, k_blocks), MAX_WARPS + 1) if k_blocks % n == 0 and k_blocks // n <= MAX_WARPS),
        -(-k_blocks // MAX_WARPS),
    )
    return Shape(row_tiles, -(-k_blocks // per_warp), per_warp, early)


@dataclass(frozen=True)
class HeadShape:
    """How the logits are computed: columns of a group, warps of a block, row tiles of a warp, k-blocks of a chunk."""

    columns: Columns
    warps: int
    row_tiles: int
    chunk: int
    shared: int


def head_bytes(k_blocks: int, tiles: int = 1) -> int:
    """Shared memory that lm_head needs for `tiles` groups of 8 columns: activations, and room for the rest."""
    row_bytes = k_blocks * 64 + (0 if k_blocks % 2 else 64)
    return tiles * 8 * row_bytes + 8192


def head_shape(k_blocks: int, num_rows: int, hi_lo: bool, max_shared: int) -> HeadShape:
    """The shape of lm_head: as many columns as their activations fit into shared memory."""
    columns = columns_for(num_rows, hi_lo, 8)
    while columns.tiles > 1 and head_bytes(k_blocks, columns.tiles) > max_shared:
        columns = Columns(columns.tiles // 2, columns.hi_lo)
    row_tiles = 2 if columns.tiles == 4 and not columns.hi_lo else 1
    most = {1: 5, 2: 5, 4: 2 if row_tiles == 2 else 3, 8: 3}[columns.tiles]
    chunk = next(n for n in range(most, 0, -1) if k_blocks % n == 0)
    warps = 8 if columns.tiles == 8 else 12  # fewer warps have more registers each
    return HeadShape(columns, warps, row_tiles, chunk, head_bytes(k_blocks, columns.tiles) - 8192)
