"""The model that a GPU runs by default: graphs of fused kernels, and products of halfs for wide steps.

Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvllm.attention_shapes import Attention, AttentionShape, attention_shape
from rvllm.graph_model import GraphModel
from rvllm.graphs import GraphProgram
from rvllm.half_cache import HalfKVCache
from rvllm.half_gemm import HalfGemm
from rvllm.ops import blocks_for
from rvllm.program import Program
from rvllm.runtime import Array, Runtime
from rvllm.step import Step
from rvllm.step_inputs import Limits
from rvllm.step_model import bucket
from rvllm.tiles import Tiles
from rvllm.transfers import Uplink

Ints = NDArray[np.int32]
WIDE = 64  # a step of more tokens takes products of halfs
QUERY_TILE = 64  # tokens of a prompt that a block of prefill_attention takes


class Queries:
    """How the attention of a wide step is shared out, on the device. Notebook 20, section 5.

    One new token of a sequence: paged_attention, rows [num_rows].   Several: prefill_attention, in tiles
    [num_tiles, 2] of up to 64 consecutive tokens, {first, number}.
    """

    def __init__(self, rt: Runtime, limits: Limits) -> None:
        B, T = limits.row_capacity, limits.capacity // QUERY_TILE + limits.row_capacity
        device = rt.zeros(2 + B + 2 * T, np.int32)
        self.num_rows, self.num_tiles, self.rows, self.tiles = (
            device[:1],
            device[1:2],
            device[2 : 2 + B],
            device[2 + B :],
        )
        self._rows_end = 2 + B
        self._known = np.zeros(0, np.int32)
        self._uplink = Uplink(rt, device)

    def put(self, step: Step) -> None:
        """Make the device have this step's; nothing is sent where it is as before."""
        rows, tiles = single_tokens(step), query_tiles(step)
        values = np.zeros(self._rows_end + 2 * len(tiles), np.int32)
        values[:2] = len(rows), len(tiles)
        values[2 : 2 + len(rows)] = rows
        values[self._rows_end :] = tiles.reshape(-1)
        if not np.array_equal(values, self._known):
            self._uplink.send(values)
            self._known = values


def single_tokens(step: Step) -> Ints:
    """The tokens of sequences that have one new token each, those with the longest contexts first.

    Their blocks are started first, so that short ones fill the card while the last long ones end.
    """
    starts = step.query_start_loc
    single = np.flatnonzero(np.diff(starts) == 1)
    return starts[single[np.argsort(-step.seq_lens[single], kind="stable")]]


def query_tiles(step: Step) -> Ints:
    """First token and number of tokens, int32 [T, 2], of every tile of a sequence with several new tokens."""
    tiles = [
        (first, min(QUERY_TILE, end - first))
        for start, end in zip(step.query_start_loc[:-1].tolist(), step.query_start_loc[1:].tolist(), strict=True)
        if end - start > 1
        for first in range(start, end, QUERY_TILE)
    ]
    return np.array(tiles, np.int32).reshape(-1, 2)


def half_matrix(rt: Runtime, tiles: Tiles) -> Array:
    """The matrix as halfs, float16 [16 · row tiles, columns]."""
    out = rt.empty((16 * tiles.row_tiles, tiles.columns), np.float16)
    grid = blocks_for(out.size)
    rt.launch(
        "tiles_to_half", grid, 256, [tiles.data, out, tiles.row_tiles, tiles.k_blocks], defines={"TILE": tiles.kind}
    )
    return out


class HalfLayer:
    """A block's matrices as halfs, beside the tiles: twice the bytes, for steps that use a weight hundreds of times."""

    def __init__(self, rt: Runtime, layer: Any) -> None:
        self.qkv, self.attn_output, self.gate_up, self.ffn_down = (
            half_matrix(rt, tiles) for tiles in (layer.qkv, layer.attn_output, layer.gate_up, layer.ffn_down)
        )


class FastModel(GraphModel):
    """Steps of up to 64 tokens as GraphModel; wider ones, prompts above all, as products of halfs. Notebook 20.

    exact: all steps go through the packed weights, with hi/lo activations.
    """

    def __init__(self, file: Any, rt: Runtime, cache: HalfKVCache, limits: Limits, exact: bool = False) -> None:
        super().__init__(file, rt, cache, limits, exact)
        # As halfs a matrix has whole tiles of 16 rows; a vocabulary that is no multiple keeps to the packed weights.
        self.can_be_wide = not exact and self.config.vocab_size % 16 == 0
        if not self.can_be_wide:
            return
        self.half_layers = [HalfLayer(rt, layer) for layer in self.layers]
        self.half_output = half_matrix(rt, self.output)
        self.gemm, self.queries = HalfGemm(rt), Queries(rt, limits)
        N = limits.capacity
        self.half_qkv = rt.zeros((N, self.half_layers[0].qkv.shape[0]), np.float16)
        self.half_gate_up = rt.zeros((N, 2 * self.config.intermediate_size), np.float16)
        rt.synchronize()

    def shape_of(self, step: Step) -> tuple[Any, ...]:
        """As GraphModel's; of a wide step tokens, rows, single tokens, tiles of prompts, and the shape of attention.

        With prompts there are two numbers of rows only, 16 or the capacity: fewer graphs.
        """
        if not self.can_be_wide or len(step.token_ids) <= WIDE:
            return super().shape_of(step)
        counts = np.diff(step.query_start_loc)
        tiles = int(np.where(counts > 1, -(-counts // QUERY_TILE), 0).sum())
        rows = bucket(step.num_seqs) if not tiles or step.num_seqs <= 16 else self.limits.row_capacity
        rows = max(rows, 16)
        singles = rows if (counts == 1).any() else 0
        longest = int(step.seq_lens.max())
        attention = attention_shape(bucket(singles), self.config, longest, self.multiprocessors) if singles else None
        return bucket(len(step.token_ids)), rows, singles, bucket(tiles) if tiles else 0, attention

    def send_more(self, step: Step) -> None:
        """Send what the step's program needs beyond StepInputs."""
        if self.can_be_wide and len(step.token_ids) > WIDE:
            self.queries.put(step)

    def build(self, shape: tuple[Any, ...]) -> Any:
        """The launches of a wide step: four products a layer, small kernels between them."""
        if len(shape) == 3:
            return super().build(shape)
        num_tokens, num_rows, singles, tiles, attention = shape
        num_tokens, num_rows = min(num_tokens, self.limits.capacity), min(num_rows, self.limits.row_capacity)
        program = Program(self.rt, num_rows)
        self.add_embedding(program, num_tokens, hi_lo=False)
        for index in range(len(self.layers)):
            self.add_wide_layer(program, index, num_tokens, singles, tiles, attention)
        program.begin_head()
        self.add_wide_head(program, num_rows)
        return GraphProgram(self.rt, program, self.dependent)

    def add_wide_layer(
        self,
        program: Program,
        index: int,
        num_tokens: int,
        singles: int,
        tiles: int,
        attention: AttentionShape | None,
    ) -> None:
        """One transformer block on num_tokens rows; x += in the products themselves."""
        w, layer, half, n = self.workspace, self.layers[index], self.half_layers[index], num_tokens
        F = self.config.intermediate_size
        hidden, attended, activations = w.hidden[:n], w.attended[:n], w.activations[:n]
        x, qkv, gate_up = w.x[:n], self.half_qkv[:n], self.half_gate_up[:n]
        if index:  # the embedding has left `hidden` for the first layer
            self.add_norm(program, layer.attn_norm, n)
        program.call(partial(self.gemm, hidden, half.qkv, qkv))
        if tiles:
            self.add_rope(program, index, n)
            self.add_prompt_attention(program, index, tiles)
        if attention:
            queries, rope = self.queries, None if tiles else self.rope
            single = Attention(self.half_qkv, queries.rows, queries.num_rows, False, False, w.attended, w.parts, rope)
            single.add(program, singles, self.cache.pages[index], self.inputs, self.config, attention)
        program.call(partial(self.gemm, attended, half.attn_output, x, 1.0, True))
        self.add_norm(program, layer.ffn_norm, n)
        program.call(partial(self.gemm, hidden, half.gate_up, gate_up, 1 / 16))
        program.add_for_each("silu_mul_half", n * F // 8, [gate_up, activations, self.inputs.counts, F])
        program.call(partial(self.gemm, activations, half.ffn_down, x, 16.0, True))

    def add_norm(self, program: Program, gain: Array, num_tokens: int) -> None:
        """hidden = norm of x, as halfs."""
        w, inputs = self.workspace, self.inputs
        arguments = [w.x, gain, inputs.rows, inputs.counts, w.hidden, self.eps]
        program.add("rmsnorm_half", num_tokens, 128, arguments, WIDTH=self.config.hidden_size, GATHER=0)

    def add_rope(self, program: Program, index: int, num_tokens: int) -> None:
        """Turn Q and K, store K and V."""
        inputs, pages = self.inputs, self.cache.pages[index]
        arguments = [self.half_qkv, self.rope, pages, inputs.positions, inputs.owners, inputs.block_tables]
        grid = (blocks_for(self.half_qkv.shape[1] // 8, 8), -(-num_tokens // 16))
        program.add(
            "rope_and_store", grid, 128, [*arguments, inputs.counts, self.limits.max_blocks], **self.group_sizes
        )

    def add_prompt_attention(self, program: Program, index: int, tiles: int) -> None:
        """Prompts in tiles of queries."""
        w, inputs, queries, pages = self.workspace, self.inputs, self.queries, self.cache.pages[index]
        arguments = [self.half_qkv, pages, queries.tiles, queries.num_tiles, inputs.positions, inputs.owners]
        arguments += [inputs.block_tables, w.attended, self.limits.max_blocks]
        grid = (self.config.num_attention_heads, tiles)
        program.add("prefill_attention", grid, 128, arguments, **self.group_sizes)

    def add_wide_head(self, program: Program, num_rows: int) -> None:
        """The last norm of the rows that are wanted, their logits, the likeliest token of each."""
        w, inputs = self.workspace, self.inputs
        arguments = [w.x, self.output_norm, inputs.rows, inputs.counts[1:], w.hidden, self.eps]
        program.add("rmsnorm_half", num_rows, 128, arguments, WIDTH=self.config.hidden_size, GATHER=1)
        program.call(partial(self.gemm, w.hidden[:num_rows], self.half_output, self.logits[:num_rows]))
        arguments = [self.logits, self.config.vocab_size, inputs.counts[1:], self.chosen]
        program.add("argmax", num_rows, 1024, arguments)
        self.add_advance(program, num_rows)

    @property
    def group_sizes(self) -> dict[str, int]:
        """What the attention kernels must know of the heads."""
        K = self.config.num_key_value_heads
        return {"HEAD_DIM": self.config.head_dim, "KV_HEADS": K, "GROUP": self.config.num_attention_heads // K}
