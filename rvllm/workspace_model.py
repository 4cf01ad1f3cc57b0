"""The model of notebook 10 with fixed arrays: nothing is allocated or sent in a step.

Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rvllm.blas import Matrix, T, gemm
from rvllm.config import LlamaConfig
from rvllm.cuda_model import Layer, Weights
from rvllm.gguf import GGUFFile
from rvllm.ops import THREADS
from rvllm.program import Program
from rvllm.runtime import Array, Runtime
from rvllm.step import Step
from rvllm.step_inputs import Limits
from rvllm.step_model import StepModel, bucket


class Batch(SimpleNamespace):
    """The fixed arrays of a model, cut to the n tokens of a step's shape: each token is a row. Notebook 15, section 7.

    n, context: sizes, both buckets.   x, h, y [n, D]: residual stream, input and output of a part.   q, attended
    [n, H · d], k, v [n, K · d], gate, up, act [n, F].   keys, values, scores: room for n x context.
    token_ids, slot_mapping, seq_lens [n], tables [n, max_blocks] int32, cos, sin [n, d/2]: see prepare_step.cu.
    """


INTEGERS = ("token_ids", "slot_mapping", "seq_lens", "tables")


def row_sizes(config: LlamaConfig, max_blocks: int, context: int) -> dict[str, int]:
    """Elements of a Batch's arrays for each token."""
    H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    D, F = config.hidden_size, config.intermediate_size
    inputs = {"token_ids": 1, "slot_mapping": 1, "seq_lens": 1, "tables": max_blocks, "cos": d // 2, "sin": d // 2}
    projections = {"q": H * d, "k": K * d, "v": K * d, "attended": H * d, "gate": F, "up": F, "act": F}
    gathered = {"keys": K * context * d, "values": K * context * d, "scores": H * context}
    return {"x": D, "h": D, "y": D, **inputs, **projections, **gathered}


def first(array: Array, *shape: int) -> Array:
    """The first elements of an array, as a view of another shape."""
    return array.reshape(-1)[: int(np.prod(shape))].reshape(shape)


# As in rvllm.ops, but with a place for the result, and not before the program runs.


def add_norm(program: Program, x: Array, gain: Array, out: Array, eps: float) -> None:
    """RMSNorm of each row: [n, D] -> [n, D]."""
    program.add("rmsnorm", len(x), THREADS, [x, gain, out, x.shape[1], eps])


def add_residual(program: Program, x: Array, y: Array) -> None:
    """x += y."""
    program.add_for_each("residual_add", x.size, [x, y, x.size])


def add_gather(program: Program, storage: Array, batch: Batch, out: Array) -> None:
    """Every token's context: [num_blocks, block_size, K, d] -> [n · K, S, d], zeros past its end."""
    _, block_size, K, d = storage.shape
    kernel, per_thread = ("kv_gather4", 4) if d % 4 == 0 else ("kv_gather", 1)
    sizes = [batch.n, batch.context, K, d, block_size, batch.tables.shape[1]]
    program.add_for_each(kernel, out.size // per_thread, [storage, batch.tables, batch.seq_lens, out, *sizes])


class WorkspaceModel(StepModel):
    """The model of notebook 10, with nothing allocated or sent in a step: `CudaModel` line by line, every line a launch
    with fixed arrays. Notebook 15, section 7.

    Decode gains. Prefill loses: each token of a prompt is a row that gathers its whole context for itself.
    exact: makes no difference, everything is float32. Raises ConfigError, DeviceMemoryError.
    """

    def __init__(self, file: GGUFFile, rt: Runtime, cache: Any, limits: Limits, exact: bool = False) -> None:
        super().__init__(file, rt, cache, limits)
        self.heads = (self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim)
        self.exact = exact
        self.longest = limits.max_blocks * cache.block_size
        self.read_weights(file)
        self.make_arrays()
        rt.synchronize()  # steps run on a stream of their own, and must find all of this

    @classmethod
    def limits_for(
        cls,
        config: LlamaConfig,
        free_bytes: int,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int = 16,
    ) -> Limits:
        """What is asked for, with fewer tokens and sequences if the workspace would take over a quarter of the memory.

        The gather alone takes 8 · S · K · d bytes a token: 21 MB for 8,192 positions of the 360M model.
        """
        max_blocks = -(-max_model_len // block_size)
        bytes_per_token = 4 * sum(row_sizes(config, max_blocks, max_blocks * block_size).values())
        tokens = min(max_num_tokens, max(1, free_bytes // 4 // bytes_per_token))
        return Limits(tokens, min(max_num_seqs, tokens), max_blocks)

    def read_weights(self, file: GGUFFile) -> None:
        """All of them, as float32."""
        weights = Weights(self.rt, file)
        self.layers: list[Any] = [Layer(weights, i) for i in range(self.config.num_hidden_layers)]
        self.output_norm = weights.vector("output_norm.weight")
        self.token_embd: Any = weights.matrix("token_embd.weight")
        self.output: Any = weights.matrix("output.weight") if "output.weight" in file.tensors else self.token_embd

    def make_arrays(self) -> None:
        """The workspace. Zeros, since idle rows take part in some products and must stay finite."""
        N, B = self.limits.max_num_tokens, self.limits.max_num_seqs
        sizes = self.row_sizes()
        dtypes = {name: np.int32 if name in INTEGERS else np.float32 for name in sizes}
        self.arrays = {name: self.rt.zeros((N, size), dtypes[name]) for name, size in sizes.items()}
        self.last, self.last_normed = (self.rt.zeros((B, self.config.hidden_size)) for _ in range(2))

    def row_sizes(self) -> dict[str, int]:
        """Elements of the workspace's arrays for each token."""
        return row_sizes(self.config, self.limits.max_blocks, self.longest)

    def shape_of(self, step: Step) -> tuple[Any, ...]:
        """Buckets of tokens, rows and context."""
        tokens = min(bucket(len(step.token_ids)), self.limits.max_num_tokens)
        context = min(max(16, bucket(int(step.seq_lens.max()))), self.longest)
        return tokens, min(bucket(step.num_seqs), self.limits.max_num_seqs), context

    def cut(self, shape: tuple[Any, ...]) -> Batch:
        """The part of the workspace that a step of this shape uses."""
        n, _, context = shape
        return Batch(n=n, context=context, **{name: array[:n] for name, array in self.arrays.items()})

    def build(self, shape: tuple[Any, ...]) -> Program:
        """Embedding, blocks, logits and choice."""
        program, batch = Program(self.rt, shape[1]), self.cut(shape)
        self.prepare(program, batch)
        self.embed(program, batch)
        for layer in range(self.config.num_hidden_layers):
            self.block(program, layer, batch)
        program.begin_head()
        self.head(program, batch, shape[1])
        return program

    def prepare(self, program: Program, batch: Batch) -> None:
        """What the other kernels want to know of each token, from what the device has of the step."""
        inputs, sizes = self.inputs, [self.limits.max_blocks, self.cache.block_size, self.config.head_dim // 2]
        found = [inputs.token_ids, self.chosen, inputs.positions, inputs.owners, inputs.block_tables, self.rope]
        made = [batch.token_ids, batch.slot_mapping, batch.seq_lens, batch.tables, batch.cos, batch.sin]
        program.add("prepare_step", batch.n, 64, [*found, inputs.counts, *sizes, *made])

    def embed(self, program: Program, batch: Batch) -> None:
        """The residual stream's first value, x."""
        V, D = self.token_embd.shape
        arguments = [self.token_embd, batch.token_ids, batch.x, batch.n, D, V]
        program.add_for_each("embedding", batch.x.size, arguments)

    def block(self, program: Program, layer: int, batch: Batch) -> None:
        """One transformer block, in place on x."""
        weights, eps = self.layers[layer], self.config.rms_norm_eps
        add_norm(program, batch.x, weights.attn_norm, batch.h, eps)
        self.attention(program, layer, batch)
        add_residual(program, batch.x, batch.y)
        add_norm(program, batch.x, weights.ffn_norm, batch.h, eps)
        self.linear(program, batch.h, weights.ffn_gate, batch.gate)
        self.linear(program, batch.h, weights.ffn_up, batch.up)
        program.add_for_each("silu_mul", batch.act.size, [batch.gate, batch.up, batch.act, batch.act.size])
        self.linear(program, batch.act, weights.ffn_down, batch.y)
        add_residual(program, batch.x, batch.y)

    def attention(self, program: Program, layer: int, batch: Batch) -> None:
        """Project, turn, store, attend, project back: h -> y."""
        weights, (H, K, d), n = self.layers[layer], self.heads, batch.n
        self.linear(program, batch.h, weights.attn_q, batch.q)
        self.linear(program, batch.h, weights.attn_k, batch.k)
        self.linear(program, batch.h, weights.attn_v, batch.v)
        for x, heads in ((batch.q, H), (batch.k, K)):
            program.add_for_each("rope", x.size // 2, [x, batch.cos, batch.sin, n, heads, d // 2])
        storage = [self.cache.keys[layer], self.cache.values[layer]]
        program.add_for_each("kv_write", batch.k.size, [batch.k, batch.v, *storage, batch.slot_mapping, n, K * d])
        self.attend(program, layer, batch)
        self.linear(program, batch.attended, weights.attn_output, batch.y)

    def attend(self, program: Program, layer: int, batch: Batch) -> None:
        """q [n, H · d] over its own context -> attended: the G heads of a KV head are neighbours, a matrix as it is."""
        (H, K, d), n, S = self.heads, batch.n, batch.context
        G = H // K
        keys, values = first(batch.keys, n * K, S, d), first(batch.values, n * K, S, d)
        p = first(batch.scores, n * K, G, S)
        add_gather(program, self.cache.keys[layer], batch, keys)
        add_gather(program, self.cache.values[layer], batch, values)
        q, out = Matrix(batch.q, d, stride=G * d), Matrix(batch.attended, d, stride=G * d)
        k, v, weights = Matrix(keys, d, T, S * d), Matrix(values, d, stride=S * d), Matrix(p, S, stride=G * S)
        program.call(lambda: gemm(self.rt, S, G, d, d**-0.5, k, q, weights, n * K))
        program.add_for_each("mask_add", p.size, [p, self.inputs.positions, n, H, 1, S])
        program.add("softmax", n * H, THREADS, [p, S])
        program.call(lambda: gemm(self.rt, d, G, S, 1.0, v, weights, out, n * K))

    def head(self, program: Program, batch: Batch, num_rows: int) -> None:
        """Logits of the rows that are wanted, the likeliest token of each, and one position further."""
        inputs, (D, V), B = self.inputs, (self.config.hidden_size, self.config.vocab_size), num_rows
        last, normed, logits = self.last[:B], self.last_normed[:B], self.logits[:B]
        program.add_for_each("embedding", B * D, [batch.x, inputs.rows, last, B, D, batch.n])  # rows of x
        add_norm(program, last, self.output_norm, normed, self.config.rms_norm_eps)
        self.linear(program, normed, self.output, logits)
        program.add("argmax", B, 1024, [logits, V, inputs.counts[1:], self.chosen])
        self.add_advance(program, B)

    def linear(self, program: Program, x: Array, weight: Any, y: Array) -> None:
        """y = x Wᵀ: [n, in], [out, in] -> [n, out]."""
        (n, n_in), n_out = x.shape, len(weight)
        matrices = Matrix(weight, n_in, T), Matrix(x, n_in), Matrix(y, n_out)
        program.call(lambda: gemm(self.rt, n_out, n, n_in, 1.0, *matrices))
