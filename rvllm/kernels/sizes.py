"""What the kernels' results depend on: macros with what each may be, and the sizes of a step or model behind them.

Tests draw their sizes from here, and compile every kernel with every wrong value: a kernel, a macro or a
`static_assert` without an entry fails them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A number that a kernel cuts into pieces: it matters how much is left over, and on which side of an end it lies.

    residues: remainders modulo `modulus`.   ends: the last values of a kind; one more is another kind.
    """

    ends: tuple[int, ...] = ()
    modulus: int = 1
    residues: tuple[int, ...] = ()

    def values(self, least: int, most: int) -> list[int]:
        """From least to most: the ends and one past each, and the first two numbers of each remainder."""
        found = {n + past for n in self.ends for past in (0, 1)}
        found |= {least + (r - least) % self.modulus + i * self.modulus for r in self.residues for i in (0, 1)}
        return sorted(n for n in found if least <= n <= most)


SIZES: dict[str, Size] = {
    "elements": Size((1, 32, 256), 256, (0, 1, 255)),  # of an array, in blocks of 256 threads
    "tokens": Size((1, 4, 8, 16, 32, 64, 96), 16, (0, 1, 15)),  # of a step: groups of columns, tiles of tokens
    "rows": Size((1, 4, 8, 16, 32, 64, 96)),  # of a step, one for each sequence
    "context": Size((0, 16, 32, 64, 255, 511, 512), 16, (0, 1, 15)),  # in the cache: pages, stages, splits
    "chunk": Size((1, 16, 32, 64), 64, (0, 1, 63)),  # new tokens of a sequence: tiles of queries
    "kv_heads": Size((1, 2)),
    "group": Size((1, 7), 8, (0,)),  # query heads of a KV head; up to 8
    "k_blocks": Size((1, 16, 33, 151), 17, (0,)),  # of 32 columns: those without a divisor leave warps with less to do
    "ffn": Size((), 3, (0, 1, 2)),  # k-blocks: four row tiles each, and a block takes up to three
    "vocab": Size((), 16, (0, 1, 15)),  # row tiles
}


@dataclass(frozen=True)
class Macro:
    """good: a value that fits those of the kernel's other macros.   wrong: others, and what the compiler says then."""

    good: Any
    wrong: Mapping[Any, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """sizes: names in SIZES.   macros: those that the text leaves open.

    constants: {(in the text, instead): what the compiler says}.
    """

    sizes: tuple[str, ...] = ()
    macros: Mapping[str, Macro] = field(default_factory=dict)
    constants: Mapping[tuple[str, str], str] = field(default_factory=dict)


TILE = Macro("TileQ8_0")
FLAG = Macro(1)  # any number: 0 or not
K_BLOCKS_WIDE = {0: "WIDTH must be a multiple of 32", 48: "WIDTH must be a multiple of 32"}
WIDTH = Macro(96, K_BLOCKS_WIDE)
NO_HEADS = {0: "GROUP and KV_HEADS must be at least 1"}
HI_LO = Macro(1, {2: "HI_LO must be 0 or 1"})
IS_HI_LO = Macro(1, {2: "HI_LO"})  # a bool: the compiler knows by itself that 2 is none
THREADS = dict.fromkeys((0, 33), "WARPS must be 1 to 32")

ATTENTION_HEADS = {"HEAD_DIM": Macro(64), "KV_HEADS": Macro(2, NO_HEADS), "GROUP": Macro(3, NO_HEADS)}
PREFILL_HEADS = ATTENTION_HEADS | {
    "HEAD_DIM": Macro(
        128,
        {
            0: "",  # no stage has any size then: whatever the compiler says
            32: "HEAD_DIM must be a multiple of 64",
            96: "HEAD_DIM must be a multiple of 64",
            192: "HEAD_DIM must make a stage whole steps",
            256: "HEAD_DIM must make a stage whole steps",
        },
    )
}
PAGES = {"KV_HEADS": Macro(2, {0: "KV_HEADS must be at least 1"})}
PAIRS = {0: "HEAD_DIM must be a multiple of 2", 63: "HEAD_DIM must be a multiple of 2"}
QUERY_ROWS = Macro(192, {96: "QUERY_ROWS must be a multiple of HEAD_DIM"})
# A product of 3 k-blocks by 2 warps: one has a block less than it could.
PRODUCT = {
    "TILE": TILE,
    "COLUMN_TILES": Macro(2, dict.fromkeys((0, 17), "COLUMN_TILES must be 1 to 16")),
    "HI_LO": IS_HI_LO,
    "EARLY": FLAG,
    "WARPS": Macro(2, THREADS | {1: "WARPS * BLOCKS_PER_WARP must cover all k-blocks"}),
    "BLOCKS_PER_WARP": Macro(2, dict.fromkeys((0, 1), "WARPS * BLOCKS_PER_WARP must cover all k-blocks")),
}
NORMED_PRODUCT = PRODUCT | {
    "COLUMN_TILES": Macro(2, {0: "COLUMN_TILES must be 1 to 16", 3: "TOKENS must divide 32"}),
    "ROW_TILES": Macro(3, {0: "ROW_TILES must be at least 1"}),
    "WIDTH": WIDTH,
}

KERNELS: dict[str, Kernel] = {
    "activations": Kernel(("tokens",), {"HI_LO": HI_LO}),
    "advance": Kernel(("rows",)),
    "argmax": Kernel(("rows", "vocab")),
    "attention_merge": Kernel(
        ("context", "kv_heads", "group"),
        {
            "HEAD_DIM": Macro(64, {0: "HEAD_DIM must be even", 63: "HEAD_DIM must be even"}),
            "KV_HEADS": Macro(2, NO_HEADS),
            "GROUP": Macro(3, NO_HEADS | {17: "GROUP * HEAD_DIM must be at most 1,024"}),
            "HI_LO": HI_LO,
            "SPLITS": Macro(2, {0: "SPLITS must be at least 1"}),
        },
    ),
    "choose": Kernel(("rows",)),
    "embed_tokens": Kernel(
        ("tokens", "vocab", "k_blocks"),
        {"TILE": TILE, "WIDTH": WIDTH, "VOCAB": Macro(301, {0: "VOCAB must be at least 1"}), "HI_LO": IS_HI_LO},
    ),
    "embedding": Kernel(("elements",)),
    "embedding_tiles": Kernel(("tokens", "vocab", "k_blocks"), {"TILE": TILE, "FIRST": FLAG}),
    "gate_up": Kernel(
        ("tokens", "k_blocks", "ffn"),
        NORMED_PRODUCT | {"FFN_WIDTH": Macro(40, dict.fromkeys((0, 36), "FFN_WIDTH must be a multiple of 8"))},
    ),
    "kv_gather": Kernel(("elements", "context", "kv_heads")),
    "kv_gather4": Kernel(("elements", "context", "kv_heads")),
    "kv_write": Kernel(("elements", "kv_heads")),
    "last_row": Kernel(("elements",)),
    "lm_head": Kernel(
        ("rows", "vocab", "k_blocks"),
        {
            "TILE": TILE,
            "WIDTH": WIDTH,
            "VOCAB": Macro(301, dict.fromkeys((0, 1 << 23), "VOCAB must be 1 to 2^23 - 1")),
            "COLUMN_TILES": Macro(8, {0: "", 3: "TOKENS must divide 32"}),
            "HI_LO": Macro(0),
            "ROW_TILES": Macro(2, {0: "ROW_TILES must be at least 1"}),
            "WARPS": Macro(2, dict.fromkeys((0, 1, 33), "WARPS must be TOKENS / 32 to 32")),
            "CHUNK": Macro(3, {0: "", 2: "CHUNK must divide the k-blocks"}),
        },
    ),
    "mask_add": Kernel(("elements", "context")),
    "paged_attention": Kernel(
        ("tokens", "context", "kv_heads", "group"),
        {
            "HEAD_DIM": Macro(
                64,
                {
                    48: "HEAD_DIM must be a multiple of 32",
                    63: "HEAD_DIM must be a multiple of 2",
                    96: "32 * WARPS must be a multiple of HEAD_DIM",
                },
            ),
            "KV_HEADS": PAGES["KV_HEADS"],
            "GROUP": Macro(3, dict.fromkeys((0, 9), "GROUP must be 1 to 8")),
            "HI_LO": HI_LO,
            "WARPS": Macro(4, THREADS | {3: "32 * WARPS must be a multiple of HEAD_DIM"}),
            "PREFETCH": Macro(2, {0: "PREFETCH must be at least 1"}),
            "BLOCKS_PER_SM": Macro(1),
            "RAW_QKV": FLAG,
            "QKV_TYPE": Macro("half", {"double": "load_eight"}),
            "EVERY_TOKEN": FLAG,
        },
    ),
    "prefill_attention": Kernel(("chunk", "context", "kv_heads", "group"), PREFILL_HEADS),
    "prepare_step": Kernel(("tokens", "context")),
    "qkv": Kernel(
        ("tokens", "k_blocks", "kv_heads", "group", "context"),
        NORMED_PRODUCT
        | PAGES
        | {
            "QUERY_ROWS": QUERY_ROWS,
            "HEAD_DIM": Macro(64, PAIRS | {6: "the rows of Q, K and V must be a multiple of 16"}),
        },
    ),
    "quantised_product": Kernel(
        ("tokens", "k_blocks"),
        {
            "TILE": TILE,
            "K_BLOCKS": Macro(17, {0: "K_BLOCKS must be at least 1"}),
            "WARPS": Macro(5, THREADS),
            "HI_LO": Macro(1),
        },
    ),
    "receive": Kernel(("tokens", "rows", "context")),
    "redeliver": Kernel(("rows",)),
    "residual_add": Kernel(("elements",)),
    "residual_product": Kernel(
        ("tokens", "k_blocks", "ffn"),
        PRODUCT
        | {
            "ROW_TILES": Macro(1, dict.fromkeys((0, 2), "ROW_TILES must be 1")),
            "WIDTH": Macro(96, dict.fromkeys((0, 40), "WIDTH must be a multiple of 16")),
            "IN_WIDTH": Macro(96, dict.fromkeys((0, 48), "IN_WIDTH must be a multiple of 32")),
        },
    ),
    "rmsnorm": Kernel(("rows", "elements")),
    "rmsnorm_half": Kernel(
        ("tokens", "rows", "k_blocks"),
        {"WIDTH": Macro(96, dict.fromkeys((0, 30), "WIDTH must be a multiple of 4")), "GATHER": FLAG},
    ),
    "rope": Kernel(("elements",)),
    "rope_and_store": Kernel(
        ("tokens", "context", "kv_heads", "group"),
        ATTENTION_HEADS | {"HEAD_DIM": Macro(64, dict.fromkeys((0, 36), "HEAD_DIM must be a multiple of 8"))},
    ),
    "rope_and_write": Kernel(
        ("tokens", "context", "kv_heads", "group"),
        PAGES | {"QUERY_ROWS": QUERY_ROWS, "HEAD_DIM": Macro(64, PAIRS)},
    ),
    "sample": Kernel(
        ("rows", "vocab"), constants={("DIGIT_BITS = 11", "DIGIT_BITS = 10"): "digits must make up a rank"}
    ),
    "silu_mul": Kernel(("elements",)),
    "silu_mul_half": Kernel(("tokens", "ffn")),
    "softmax": Kernel(("elements", "context")),
    "tiles_to_half": Kernel(("k_blocks",), {"TILE": TILE}),
    "transpose_axes12": Kernel(("elements",)),
}
