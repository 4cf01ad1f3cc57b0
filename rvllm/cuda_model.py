"""The Llama on a device, line by line beside the NumPy model: kernels, cuBLAS and the paged cache.

Generated from notebooks/10_cuda_llama.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvllm.blas import linear, scores, weighted_values
from rvllm.cpu_model import RotaryEmbedding, load_vector, read_config, read_rotary
from rvllm.gguf import GGUFFile
from rvllm.kv_cache import DeviceKVCache
from rvllm.ops import (
    embedding,
    last_row,
    mask_add,
    residual_add,
    rmsnorm,
    rope,
    silu_mul,
    softmax,
    transpose_axes12,
)
from rvllm.quants import dequantize
from rvllm.runtime import Array, Runtime
from rvllm.step import Step

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """Some sequences of a step, padded to [B, T], on the device. Notebook 10, section 3.

    sequences: which of the step's, on the host.   tokens: int [B, T], index of each token in the step, padding
    repeats the last one.   real: bool [B, T].   The rest is on the device: token_ids, slot_mapping int32 [B · T] (slot
    -1 for padding), positions [B, T], block_tables, seq_lens, last [B], cos and sin [B · T, d/2].
    """

    sequences: Ints
    tokens: Ints
    real: NDArray[np.bool_]
    longest: int
    token_ids: Array
    slot_mapping: Array
    positions: Array
    block_tables: Array
    seq_lens: Array
    last: Array
    cos: Array
    sin: Array


def make_batch(rt: Runtime, step: Step, sequences: Ints, rotary: RotaryEmbedding) -> Batch:
    """Pad some sequences of a step to the longest of them and upload what the kernels need."""
    starts, counts = step.query_start_loc[sequences], np.diff(step.query_start_loc)[sequences]
    offsets = np.arange(counts.max())[None, :]
    real = offsets < counts[:, None]
    tokens = starts[:, None] + np.minimum(offsets, counts[:, None] - 1)
    phases = rotary.phases(step.positions[tokens.reshape(-1)])[:, 0]
    arrays: dict[str, Any] = {
        "token_ids": step.token_ids[tokens].reshape(-1),
        "slot_mapping": np.where(real, step.slot_mapping[tokens], -1).reshape(-1),
        "positions": step.positions[tokens],
        "block_tables": step.block_tables[sequences],
        "seq_lens": step.seq_lens[sequences],
        "last": counts - 1,
    }
    uploaded = {name: rt.upload(array.astype(np.int32)) for name, array in arrays.items()}
    turns = {"cos": rt.upload(phases.real), "sin": rt.upload(phases.imag)}
    return Batch(sequences, tokens, real, int(arrays["seq_lens"].max()), **uploaded, **turns)


def split_step(step: Step) -> list[Ints]:
    """Sequences with one new token, and those with more: padding one kind to the other would waste the step."""
    counts = np.diff(step.query_start_loc)
    parts = [np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)]
    return [part.astype(np.int32) for part in parts if part.size]


class Weights:
    """A file's tensors, dequantised to float32 and uploaded."""

    def __init__(self, rt: Runtime, file: GGUFFile) -> None:
        self._rt, self._file = rt, file

    def matrix(self, name: str) -> Array:
        """A matrix [out, in], as the file has it."""
        return self._rt.upload(dequantize(self._file.raw(name), self._file.tensors[name].type))

    def vector(self, name: str) -> Array:
        """A norm's weight."""
        return self._rt.upload(load_vector(self._file, name))


class Layer:
    """The weights of one block. Matrices stay apart here: each has its own product, as in the original."""

    def __init__(self, weights: Weights, index: int) -> None:
        def name(part: str) -> str:
            return f"blk.{index}.{part}.weight"

        self.attn_norm = weights.vector(name("attn_norm"))
        self.attn_q, self.attn_k, self.attn_v = (weights.matrix(name(f"attn_{x}")) for x in "qkv")
        self.attn_output = weights.matrix(name("attn_output"))
        self.ffn_norm = weights.vector(name("ffn_norm"))
        self.ffn_gate, self.ffn_up = weights.matrix(name("ffn_gate")), weights.matrix(name("ffn_up"))
        self.ffn_down = weights.matrix(name("ffn_down"))


class CudaModel:
    """The Llama on a device: `CpuModel` line by line, each line a kernel or a cuBLAS call. Notebook 10, section 4.

    `forward` runs one Step over a DeviceKVCache. Float32 throughout.
    Raises ConfigError for a file that is not a llama model this engine can run, DeviceMemoryError.
    """

    def __init__(self, file: GGUFFile, rt: Runtime) -> None:
        self.config = read_config(file)
        self.heads = (self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim)
        self.rotary = read_rotary(file, self.config)
        self.rt, weights = rt, Weights(rt, file)
        self.layers = [Layer(weights, i) for i in range(self.config.num_hidden_layers)]
        self.output_norm = weights.vector("output_norm.weight")
        self.token_embd = weights.matrix("token_embd.weight")
        self.output = weights.matrix("output.weight") if "output.weight" in file.tensors else self.token_embd

    def forward(self, step: Step, cache: DeviceKVCache, all_positions: bool = False) -> NDArray[np.float32]:
        """Logits float32 [B, V] of each sequence's last token, or [n, V] of all tokens of the step, in NumPy."""
        rows = len(step.token_ids) if all_positions else step.num_seqs
        logits = np.empty((rows, self.config.vocab_size), np.float32)
        for sequences in split_step(step):
            batch = make_batch(self.rt, step, sequences, self.rotary)
            x = self.embed(batch)
            for layer in range(self.config.num_hidden_layers):
                self.block(layer, x, batch, cache)
            if all_positions:
                logits[batch.tokens[batch.real]] = self.rt.download(self.head(x))[batch.real.reshape(-1)]
            else:
                B, T = batch.tokens.shape
                last = last_row(self.rt, x.reshape(B, T, -1), batch.last)
                logits[sequences] = self.rt.download(self.head(last))
        return logits

    def embed(self, batch: Batch) -> Array:
        """The residual stream's first value, [B · T, D]."""
        return embedding(self.rt, self.token_embd, batch.token_ids)

    def block(self, layer: int, x: Array, batch: Batch, cache: DeviceKVCache) -> None:
        """One transformer block, in place on x [B · T, D]."""
        rt, weights, eps = self.rt, self.layers[layer], self.config.rms_norm_eps
        residual_add(rt, x, self.attention(layer, rmsnorm(rt, x, weights.attn_norm, eps), batch, cache))
        h = rmsnorm(rt, x, weights.ffn_norm, eps)
        h = silu_mul(rt, linear(rt, h, weights.ffn_gate), linear(rt, h, weights.ffn_up))
        residual_add(rt, x, linear(rt, h, weights.ffn_down))

    def attention(self, layer: int, x: Array, batch: Batch, cache: DeviceKVCache) -> Array:
        """Project, turn, store, attend for all sequences at once, project back: [B · T, D] -> [B · T, D]."""
        rt, weights, (H, K, d) = self.rt, self.layers[layer], self.heads
        B, T = batch.tokens.shape
        q = linear(rt, x, weights.attn_q).reshape(B * T, H, d)
        k = linear(rt, x, weights.attn_k).reshape(B * T, K, d)
        v = linear(rt, x, weights.attn_v).reshape(B * T, K, d)
        rope(rt, q, batch.cos, batch.sin)
        rope(rt, k, batch.cos, batch.sin)
        cache.write(layer, k, v, batch)
        out = self.attend(q.reshape(B, T, H, d), *cache.read(layer, batch), batch)
        return linear(rt, out.reshape(B * T, H * d), weights.attn_output)

    def attend(self, q: Array, keys: Array, values: Array, batch: Batch) -> Array:
        """q [B, T, H, d], keys and values [B, K, S, d] -> [B, T, H, d]; the G heads of a KV head become rows."""
        rt, (B, T, H, d), (_, K, S, _) = self.rt, q.shape, keys.shape
        rows = transpose_axes12(rt, q).reshape(B * K, H // K * T, d)
        p = scores(rt, rows, keys.reshape(B * K, S, d), d**-0.5).reshape(B, H, T, S)
        mask_add(rt, p, batch.positions)
        softmax(rt, p)
        out = weighted_values(rt, p.reshape(B * K, H // K * T, S), values.reshape(B * K, S, d))
        return transpose_axes12(rt, out.reshape(B, H, T, d))

    def head(self, x: Array) -> Array:
        """Final norm and the projection to logits: [n, D] -> [n, V]."""
        return linear(self.rt, rmsnorm(self.rt, x, self.output_norm, self.config.rms_norm_eps), self.output)
