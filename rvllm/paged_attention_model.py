"""The quantised model with attention that reads blocks through the block table.

Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rvllm.attention_shapes import Attention, attention_shape
from rvllm.config import LlamaConfig
from rvllm.cpu_model import load_vector
from rvllm.gguf import GGUFFile
from rvllm.program import Program
from rvllm.quantised_model import GATED, NORMED, QuantisedModel, Weight
from rvllm.runtime import Array, Runtime
from rvllm.step import Step
from rvllm.step_inputs import Limits
from rvllm.step_model import bucket
from rvllm.tiles import read_tiles
from rvllm.workspace_model import Batch


class PagedLayer:
    """The weights of one block, Q, K and V one below the other."""

    def __init__(self, file: GGUFFile, rt: Runtime, index: int) -> None:
        def matrix(factor: float, *parts: str) -> Weight:
            return Weight(read_tiles(rt, file, *(f"blk.{index}.{part}.weight" for part in parts)), factor)

        def vector(part: str) -> Array:
            return rt.upload(load_vector(file, f"blk.{index}.{part}.weight"))

        self.attn_norm, self.ffn_norm = vector("attn_norm"), vector("ffn_norm")
        self.qkv = matrix(NORMED, "attn_q", "attn_k", "attn_v")
        self.attn_output = matrix(1.0, "attn_output")  # attention writes halfs as they are
        self.ffn_gate, self.ffn_up = matrix(NORMED, "ffn_gate"), matrix(NORMED, "ffn_up")
        self.ffn_down = matrix(GATED, "ffn_down")


class PagedAttentionModel(QuantisedModel):
    """`QuantisedModel` whose attention reads the cache where it lies, over a cache of halfs. Notebook 17, section 8.

    No gather and no scores in memory: a token needs room for its activations alone, however long its context is. In a
    Batch there is `shape`, of attention, instead of `context`; qkv [n, (H + 2K) · d], and no inputs of its own.
    exact: makes no difference. Raises TileError, ConfigError, DeviceMemoryError.
    """

    first_kernel = "embedding_tiles"

    @classmethod
    def limits_for(
        cls,
        config: LlamaConfig,  # noqa: ARG003
        free_bytes: int,  # noqa: ARG003
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int = 16,
    ) -> Limits:
        """What is asked for: the workspace is small."""
        return Limits(max_num_tokens, max_num_seqs, -(-max_model_len // block_size))

    def read_layer(self, file: GGUFFile, index: int) -> Any:
        """The weights of one block."""
        return PagedLayer(file, self.rt, index)

    def row_sizes(self) -> dict[str, int]:
        """Elements of the workspace's arrays for each token."""
        (H, K, d), D, F = self.heads, self.config.hidden_size, self.config.intermediate_size
        return {"x": D, "h": D, "y": D, "gate": F, "up": F, "act": F, "qkv": (H + 2 * K) * d}

    def make_arrays(self) -> None:
        """The workspace, and what attention leaves: hi/lo halfs, or parts of a split."""
        super().make_arrays()
        rt, N, (H, K, d) = self.rt, self.limits.max_num_tokens, self.heads
        self.attended = rt.zeros((2 * N, H * d), np.float16)
        self.every_token = rt.upload(np.arange(N, dtype=np.int32))
        # Only as many tokens as leave the card empty are split: two blocks for each multiprocessor at most.
        self.parts = rt.zeros(2 * rt.multiprocessors * (H // K) * (d + 2))

    def shape_of(self, step: Step) -> tuple[Any, ...]:
        """Buckets of tokens and rows, and the shape of attention for the longest context."""
        tokens, longest = min(bucket(len(step.token_ids)), self.limits.max_num_tokens), int(step.seq_lens.max())
        rows = min(bucket(step.num_seqs), self.limits.max_num_seqs)
        return tokens, rows, attention_shape(tokens, self.config, longest, self.rt.multiprocessors)

    def cut(self, shape: tuple[Any, ...]) -> Batch:
        """The part of the workspace that a step of this shape uses."""
        n, _, attention = shape
        return Batch(n=n, shape=attention, **{name: array[:n] for name, array in self.arrays.items()})

    def prepare(self, program: Program, batch: Batch) -> None:
        """Nothing: the kernels read what the device has of the step, and the embedding begins the turn."""

    def attention(self, program: Program, layer: int, batch: Batch) -> None:
        """Project, turn and store, attend, project back: h -> y."""
        weights = self.layers[layer]
        self.linear(program, batch.h, weights.qkv, batch.qkv)
        self.turn_and_store(program, layer, batch)
        self.attend(program, layer, batch)
        self.product(program, self.attended[: 2 * batch.n], weights.attn_output, batch.y)

    def turn_and_store(self, program: Program, layer: int, batch: Batch) -> None:
        """RoPE, and the cache."""
        (H, K, d), inputs = self.heads, self.inputs
        arguments = [batch.qkv, self.rope, self.cache.pages[layer], inputs.positions, inputs.owners]
        arguments += [inputs.block_tables, inputs.counts, self.limits.max_blocks]
        sizes = {"QUERY_ROWS": H * d, "KV_HEADS": K, "HEAD_DIM": d}
        program.add_for_each("rope_and_write", batch.qkv.size // 2, arguments, **sizes)

    def attend(self, program: Program, layer: int, batch: Batch) -> None:
        """Each token and KV head over its blocks: qkv -> attended."""
        inputs = self.inputs
        every = Attention(batch.qkv, self.every_token, inputs.counts, True, True, self.attended, self.parts)
        every.add(program, batch.n, self.cache.pages[layer], inputs, self.config, batch.shape)
