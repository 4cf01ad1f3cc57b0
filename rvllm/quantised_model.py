"""The workspace model on packed weights: its matrices stay as they are in the file.

Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rvllm.cpu_model import load_vector
from rvllm.gguf import GGUFFile
from rvllm.program import Program
from rvllm.runtime import Array, Runtime
from rvllm.tile_shapes import MAX_WARPS
from rvllm.tiles import Tiles, read_tiles
from rvllm.workspace_model import Batch, WorkspaceModel, first

# What activations are multiplied by before they become halfs, which end at 65,504, and below 2**-14 lose digits.
NORMED = 16.0  # fits 4,094; RMSNorm leaves at most sqrt(D) times its gain, some hundreds
ATTENDED = 16.0  # a mean of values, which are sums of normed activations: no larger than those
GATED = 1.0  # silu(gate) · up is a product: thousands were seen (section 5)


@dataclass(frozen=True)
class Weight:
    """A matrix in tiles, and the power of two that its activations are multiplied by on their way to halfs."""

    tiles: Tiles
    factor: float


class QuantisedLayer:
    """The weights of one block, as `rvllm.cuda_model.Layer`, packed as in the file. Notebook 16, section 6."""

    def __init__(self, file: GGUFFile, rt: Runtime, index: int) -> None:
        def matrix(part: str, factor: float) -> Weight:
            return Weight(read_tiles(rt, file, f"blk.{index}.{part}.weight"), factor)

        def vector(part: str) -> Array:
            return rt.upload(load_vector(file, f"blk.{index}.{part}.weight"))

        self.attn_norm, self.ffn_norm = vector("attn_norm"), vector("ffn_norm")
        self.attn_q, self.attn_k, self.attn_v = (matrix(f"attn_{x}", NORMED) for x in "qkv")
        self.attn_output = matrix("attn_output", ATTENDED)
        self.ffn_gate, self.ffn_up = matrix("ffn_gate", NORMED), matrix("ffn_up", NORMED)
        self.ffn_down = matrix("ffn_down", GATED)


def warps_for(k_blocks: int) -> int:
    """Warps of a product's block: some three k-blocks for each, so that their loads are under way together."""
    return max(1, min(MAX_WARPS, k_blocks // 3))


class QuantisedModel(WorkspaceModel):
    """`WorkspaceModel` with weights packed as in the file, and products on the tensor cores. Notebook 16, section 6.

    Activations are hi/lo halfs: as accurate as float32, and nearly free for up to 4 tokens. exact: makes no difference.
    Raises TileError, ConfigError, DeviceMemoryError.
    """

    first_kernel = "prepare_step"  # of a step: the one that begins its turn (deliver.cuh)

    def read_weights(self, file: GGUFFile) -> None:
        """All matrices as tiles."""
        self.layers = [self.read_layer(file, i) for i in range(self.config.num_hidden_layers)]
        self.output_norm = self.rt.upload(load_vector(file, "output_norm.weight"))
        self.token_embd = Weight(read_tiles(self.rt, file, "token_embd.weight"), NORMED)
        tied = "output.weight" not in file.tensors
        self.output = self.token_embd if tied else Weight(read_tiles(self.rt, file, "output.weight"), NORMED)

    def read_layer(self, file: GGUFFile, index: int) -> Any:
        """The weights of one block."""
        return QuantisedLayer(file, self.rt, index)

    def make_arrays(self) -> None:
        """The workspace, and room for two rows of halfs a token."""
        super().make_arrays()
        (H, _, d), config = self.heads, self.config
        widest = max(config.hidden_size, H * d, config.intermediate_size)
        self.halfs = self.rt.zeros(2 * max(self.limits.max_num_tokens, self.limits.max_num_seqs) * widest, np.float16)

    def embed(self, program: Program, batch: Batch) -> None:
        """The residual stream's first value, x."""
        inputs, tiles, V = self.inputs, self.token_embd.tiles, self.config.vocab_size
        arguments = [tiles.data, inputs.token_ids, self.chosen, inputs.counts, batch.x, tiles.columns, V]
        is_first = int(self.first_kernel == "embedding_tiles")
        program.add_for_each("embedding_tiles", batch.x.size, arguments, TILE=tiles.kind, FIRST=is_first)

    def linear(self, program: Program, x: Array, weight: Any, y: Array) -> None:
        """y = x Wᵀ, by way of hi/lo halfs: [n, in], [out, in] -> [n, out]."""
        (n, n_in), halfs = x.shape, first(self.halfs, 2 * len(x), x.shape[1])
        arguments = [x, halfs, self.rows_in_use(program), n_in, weight.factor]
        program.add_for_each("activations", n * n_in // 4, arguments, HI_LO=1)
        self.product(program, halfs, weight, y)

    def product(self, program: Program, halfs: Array, weight: Weight, y: Array) -> None:
        """y = W activations / factor; the activations are hi/lo halfs, [2n, in]."""
        tiles = weight.tiles
        warps, groups = warps_for(tiles.k_blocks), -(-len(halfs) // 8)
        arguments = [tiles.data, halfs, y, self.rows_in_use(program), tiles.rows, 1 / weight.factor]
        sizes = {"K_BLOCKS": tiles.k_blocks, "WARPS": warps, "HI_LO": 1}
        program.add("quantised_product", (tiles.row_tiles, groups), 32 * warps, arguments, TILE=tiles.kind, **sizes)

    def rows_in_use(self, program: Program) -> Array:
        """Where the device has the number of rows of what is being added: tokens, or in the head sequences."""
        return self.inputs.counts[1:] if program.head_at else self.inputs.counts
