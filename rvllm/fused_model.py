"""The Llama in five kernels a layer, and the embedding, logits and choice around them.

Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rvllm.attention_shapes import Attention, AttentionShape, attention_shape
from rvllm.cpu_model import load_vector
from rvllm.gguf import GGUFFile
from rvllm.half_cache import HalfKVCache
from rvllm.program import Program
from rvllm.runtime import Array, Runtime
from rvllm.step import Step
from rvllm.step_inputs import Limits
from rvllm.step_model import StepModel, bucket
from rvllm.tile_shapes import Columns, columns_for, head_shape, is_hi_lo, shape_for
from rvllm.tiles import Tiles, read_tiles


class FusedLayer:
    """The weights of one block, as the five kernels want them: Q, K and V one below the other, gate and up mixed."""

    def __init__(self, file: GGUFFile, rt: Runtime, index: int) -> None:
        def names(*parts: str) -> list[str]:
            return [f"blk.{index}.{part}.weight" for part in parts]

        self.qkv = read_tiles(rt, file, *names("attn_q", "attn_k", "attn_v"))
        self.attn_output = read_tiles(rt, file, *names("attn_output"))
        self.gate_up = read_tiles(rt, file, *names("ffn_gate", "ffn_up"), interleaved=True)
        self.ffn_down = read_tiles(rt, file, *names("ffn_down"))
        self.attn_norm, self.ffn_norm = (rt.upload(load_vector(file, n)) for n in names("attn_norm", "ffn_norm"))


class Workspace:
    """What the kernels of a step pass on to each other, N tokens, B rows. Notebook 18, section 3.

    x float32 [N, D]: the residual stream.   hidden, attended float16 [2N, D], activations [2N, F]: two rows a token
    with hi/lo.   qkv float32 [N, (H + 2K) d].   squares float32 [D/16, N], rms [2, N]: see norm.cuh.
    best_value, best_index [SMs, B]: what lm_head's blocks found.   parts: of attention that is split.
    """

    def __init__(self, rt: Runtime, config: Any, limits: Limits, blocks: int) -> None:
        N, B, D, F = limits.capacity, limits.row_capacity, config.hidden_size, config.intermediate_size
        H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.x, self.qkv = rt.zeros((N, D)), rt.zeros((N, (H + 2 * K) * d))
        self.hidden, self.attended = rt.zeros((2 * N, D), np.float16), rt.zeros((2 * N, H * d), np.float16)
        self.activations = rt.zeros((2 * N, F), np.float16)
        self.squares, self.rms = rt.zeros((D // 16, N)), rt.zeros((2, N))
        self.best_value, self.best_index = rt.zeros((blocks, B)), rt.zeros((blocks, B), np.int32)
        self.every_token = rt.upload(np.arange(N, dtype=np.int32))
        # Only as many tokens as leave the card empty are split: two blocks for each multiprocessor at most.
        self.parts = rt.zeros((2 * blocks + 8 * K) * (H // K) * (d + 2))


class FusedModel(StepModel):
    """The Llama in five kernels a layer on packed weights, over a cache of halfs. Notebook 18, section 8.

    exact: every product with hi/lo activations; else only those of up to 4 tokens, where it costs nothing.
    Raises TileError, ConfigError, DeviceMemoryError.
    """

    def __init__(self, file: GGUFFile, rt: Runtime, cache: HalfKVCache, limits: Limits, exact: bool = False) -> None:
        super().__init__(file, rt, cache, limits)
        self.exact, self.multiprocessors = exact, rt.multiprocessors
        self.layers = [FusedLayer(file, rt, i) for i in range(self.config.num_hidden_layers)]
        self.output_norm = rt.upload(load_vector(file, "output_norm.weight"))
        self.token_embd = read_tiles(rt, file, "token_embd.weight")
        tied = "output.weight" not in file.tensors
        self.output = self.token_embd if tied else read_tiles(rt, file, "output.weight")
        self.workspace = Workspace(rt, self.config, limits, self.multiprocessors)
        rt.synchronize()  # weights were copied on another stream

    def shape_of(self, step: Step) -> tuple[Any, ...]:
        """Buckets of tokens and rows, and the shape of attention for the longest context."""
        tokens = min(bucket(len(step.token_ids)), self.limits.capacity)
        rows, longest = min(bucket(step.num_seqs), self.limits.row_capacity), int(step.seq_lens.max())
        return tokens, rows, attention_shape(tokens, self.config, longest, self.multiprocessors)

    def build(self, shape: tuple[Any, ...]) -> Program:
        """Embedding, five kernels a layer, logits and choice."""
        num_tokens, num_rows, attention = shape
        program = Program(self.rt, num_rows)
        columns = columns_for(num_tokens, is_hi_lo(num_tokens, self.exact))
        self.add_embedding(program, num_tokens, columns.hi_lo)
        for index in range(len(self.layers)):
            self.add_layer(program, index, num_tokens, attention, columns)
        program.begin_head()
        self.add_head(program, num_rows, columns)
        return program

    def add_embedding(self, program: Program, num_tokens: int, hi_lo: bool) -> None:
        """Look up the tokens, known ones and those that the device chose."""
        w, inputs = self.workspace, self.inputs
        first_norm = self.layers[0].attn_norm
        arguments = [self.token_embd.data, inputs.token_ids, self.chosen, first_norm, self.eps, inputs.counts]
        arguments += [self.limits.capacity, w.x, w.hidden, w.squares, w.rms[0]]
        sizes = {"WIDTH": self.config.hidden_size, "VOCAB": self.config.vocab_size, "HI_LO": int(hi_lo)}
        program.add("embed_tokens", num_tokens, 256, arguments, TILE=self.token_embd.kind, **sizes)

    def add_layer(
        self, program: Program, index: int, num_tokens: int, attention: AttentionShape, columns: Columns
    ) -> None:
        """One transformer block. rms[0] belongs to the FFN's norm, or the embedding; rms[1] to attention's."""
        w, layer = self.workspace, self.layers[index]
        following = self.layers[index + 1].attn_norm if index + 1 < len(self.layers) else self.output_norm
        self.add_qkv(program, index, num_tokens, columns)
        every = Attention(w.qkv, w.every_token, self.inputs.counts, True, columns.hi_lo, w.attended, w.parts)
        every.add(program, num_tokens, self.cache.pages[index], self.inputs, self.config, attention)
        self.add_residual(
            program, "output", layer.attn_output, w.attended, 1.0, layer.ffn_norm, w.rms[1], num_tokens, columns
        )
        self.add_gate_up(program, layer.gate_up, num_tokens, columns)
        self.add_residual(
            program, "down", layer.ffn_down, w.activations, 16.0, following, w.rms[0], num_tokens, columns
        )

    def add_qkv(self, program: Program, index: int, num_tokens: int, columns: Columns) -> None:
        """Norm, Q, K and V, RoPE, and the cache."""
        w, inputs, tiles = self.workspace, self.inputs, self.layers[index].qkv
        arguments = [tiles.data, w.hidden, w.squares, self.limits.capacity, self.eps, w.rms[0], w.rms[1]]
        arguments += [self.rope, inputs.counts, inputs.positions, inputs.owners, inputs.block_tables]
        arguments += [self.limits.max_blocks, w.qkv, self.cache.pages[index]]
        self._add_product(program, "qkv", "qkv", tiles, arguments, num_tokens, columns, **self.head_sizes)

    def add_residual(
        self,
        program: Program,
        kernel: str,
        tiles: Tiles,
        activations: Array,
        factor: float,
        gain: Array,
        rms: Array,
        num_tokens: int,
        columns: Columns,
    ) -> None:
        """x += W activations, and what the norm with this gain needs."""
        w = self.workspace
        arguments = [tiles.data, activations, factor, gain, rms, self.inputs.counts, self.limits.capacity]
        arguments += [w.x, w.hidden, w.squares]
        sizes = {"IN_WIDTH": tiles.columns}
        self._add_product(program, "residual_product", kernel, tiles, arguments, num_tokens, columns, **sizes)

    def add_gate_up(self, program: Program, tiles: Tiles, num_tokens: int, columns: Columns) -> None:
        """Norm, gate and up, SiLU."""
        w = self.workspace
        arguments = [tiles.data, w.hidden, w.squares, self.limits.capacity, self.eps, w.rms[1], w.rms[0]]
        arguments += [self.inputs.counts, w.activations]
        sizes = {"FFN_WIDTH": self.config.intermediate_size}
        self._add_product(program, "gate_up", "gate_up", tiles, arguments, num_tokens, columns, **sizes)

    def add_head(self, program: Program, num_rows: int, columns: Columns) -> None:
        """Logits of the rows that are wanted, the likeliest token of each, and one position further."""
        w, inputs, blocks = self.workspace, self.inputs, self.multiprocessors
        shape = head_shape(self.output.k_blocks, num_rows, columns.hi_lo, self.rt.max_shared)
        arguments = [self.output.data, w.hidden, w.squares, self.limits.capacity, self.eps, w.rms[0]]
        arguments += [inputs.counts, inputs.rows, self.logits, w.best_value, w.best_index, self.limits.row_capacity]
        sizes = {"WIDTH": self.output.columns, "VOCAB": self.config.vocab_size, "ROW_TILES": shape.row_tiles}
        sizes |= {"WARPS": shape.warps, "CHUNK": shape.chunk}
        sizes |= {"COLUMN_TILES": shape.columns.tiles, "HI_LO": int(columns.hi_lo)}
        grid = (blocks, -(-num_rows // shape.columns.tokens))
        program.add("lm_head", grid, 32 * shape.warps, arguments, shape.shared, TILE=self.output.kind, **sizes)
        arguments = [w.best_value, w.best_index, blocks, self.limits.row_capacity, inputs.counts, self.chosen]
        arguments += [inputs.positions, inputs.computed, self.delivery.delivered]
        program.add("choose", num_rows, 128, arguments)

    @property
    def eps(self) -> float:
        """Of RMSNorm."""
        return self.config.rms_norm_eps

    @property
    def head_sizes(self) -> Mapping[str, int]:
        """What the QKV kernel must know of the heads."""
        config = self.config
        query_rows = config.num_attention_heads * config.head_dim
        return {"QUERY_ROWS": query_rows, "KV_HEADS": config.num_key_value_heads, "HEAD_DIM": config.head_dim}

    def _add_product(
        self,
        program: Program,
        name: str,
        kernel: str,
        tiles: Tiles,
        arguments: list[Any],
        num_tokens: int,
        columns: Columns,
        **sizes: int,
    ) -> None:
        shape = shape_for(kernel, tiles.k_blocks, columns, num_tokens)
        grid = (-(-tiles.row_tiles // shape.row_tiles), -(-num_tokens // columns.tokens))
        sizes |= {"COLUMN_TILES": columns.tiles, "HI_LO": int(columns.hi_lo), "EARLY": int(shape.early)}
        sizes |= {"ROW_TILES": shape.row_tiles, "WARPS": shape.warps, "BLOCKS_PER_WARP": shape.blocks_per_warp}
        sizes["WIDTH"] = self.config.hidden_size
        program.add(name, grid, 32 * shape.warps, arguments, TILE=tiles.kind, **sizes)
