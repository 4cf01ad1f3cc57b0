"""The Llama in NumPy: float32, several sequences in a step, over any cache of keys and values.

Generated from notebooks/03_numpy_llama.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from rvllm.config import ConfigError, LlamaConfig
from rvllm.gguf import GGUFFile
from rvllm.quants import TensorTypeError, dequantize
from rvllm.step import Step

Floats = NDArray[np.float32]
Phases = NDArray[np.complex64]


def rmsnorm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Divide each row by its root mean square, then scale: float32 [n, D], [D] -> [n, D].

    Notebook 03, section 3.
    """
    D = x.shape[-1]
    scale = np.sqrt(D / (np.vecdot(x, x) + D * eps))  # 1 / sqrt(mean square + eps), with D multiplied through
    return x * scale[:, None] * weight


def linear(x: Floats, weight: Floats) -> Floats:
    """y = x Wᵀ with the weight as the file has it, [out, in]: float32 [n, in] -> [n, out]."""
    return x @ weight.T


class RotaryEmbedding:
    """The angles of RoPE: pair i of a head turns by position · theta^(-2i/d). Notebook 03, section 4.

    `freq_factors` [d/2] divides the frequencies, as `rope_freqs.weight` of Llama 3.1 asks for.
    """

    def __init__(self, head_dim: int, theta: float, freq_factors: Floats | None = None) -> None:
        inv_freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        self.inv_freq = inv_freq if freq_factors is None else inv_freq / freq_factors

    def phases(self, positions: NDArray[np.int32]) -> Phases:
        """cos + i sin of every angle, complex64 [n, 1, d/2]; float64 inside, so that late positions stay exact."""
        return np.exp(1j * positions[:, None] * self.inv_freq)[:, None, :].astype(np.complex64)


def rope(x: Floats, phases: Phases) -> Floats:
    """Turn the pairs (2i, 2i+1) of every head: float32 [n, heads, d] -> the same shape, a new array.

    A pair is a complex number, and turning it is multiplying with a number of length 1.
    """
    return (x.view(np.complex64) * phases).view(np.float32)


def half_split_rows(weight: Floats, num_heads: int) -> Floats:
    """Rows of W_q or W_k from the file's order (pairs adjacent) to Hugging Face's (pair i is rows i and i + d/2).

    Pass the heads that the matrix really has: H for W_q, K for W_k.
    """
    return weight.reshape(num_heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def adjacent_rows(weight: Floats, num_heads: int) -> Floats:
    """The way back: what llama.cpp's converter does to W_q and W_k of a Llama."""
    return weight.reshape(num_heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


QUERY_TILE = 256  # queries at a time: keeps the scores of a long prompt small


def attend(q: Floats, k: Floats, v: Floats) -> Floats:
    """Causal attention of one sequence. Notebook 03, section 5.

    q [T, H, d]: the last T of S tokens; k, v [S, K, d]: all S. Query t sees keys 0 to S - T + t. Returns [T, H, d].
    """
    first = len(k) - len(q)  # position of query 0
    if len(q) <= QUERY_TILE:
        return attend_tile(q, k, v, first)
    parts = []
    for t in range(0, len(q), QUERY_TILE):
        seen = first + t + QUERY_TILE  # keys beyond are in the future of the whole tile
        parts.append(attend_tile(q[t : t + QUERY_TILE], k[:seen], v[:seen], first + t))
    return np.concatenate(parts)


def attend_tile(q: Floats, k: Floats, v: Floats, first: int) -> Floats:
    """A tile of queries whose first one stands at position `first`.

    The G query heads of a KV head become rows.
    """
    (T, H, d), (S, K, _) = q.shape, k.shape
    rows = (q * d**-0.5).reshape(T, K, H // K, d).transpose(1, 2, 0, 3).reshape(K, -1, d)  # [K, G·T, d]
    scores = rows @ k.transpose(1, 2, 0)  # [K, G·T, S]
    if T > 1:
        hidden = np.arange(S) > first + np.arange(T)[:, None]
        np.copyto(scores.reshape(K, -1, T, S), np.float32(-np.inf), where=hidden)
    out = softmax(scores) @ v.transpose(1, 0, 2)  # [K, G·T, d]
    return out.reshape(K, H // K, T, d).transpose(2, 0, 1, 3).reshape(T, H, d)


def softmax(scores: Floats) -> Floats:
    """Along the last axis, in place; the maximum comes off first, so that no exponent overflows."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return scores


def silu_mul(gate_up: Floats) -> Floats:
    """silu(gate) · up with gate and up side by side: float32 [n, 2F] -> [n, F]. Notebook 03, section 6."""
    F = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :F], gate_up[:, F:]
    with np.errstate(over="ignore"):  # exp(-gate) may be inf; gate / inf is the right answer, 0
        out = np.exp(-gate)
    out += 1
    np.divide(gate, out, out=out)
    out *= up
    return out


class KVCache(Protocol):
    """What a model asks of a cache of keys and values. Notebook 03, section 7."""

    block_size: int

    def write(self, layer: int, k: Floats, v: Floats, step: Step) -> None:
        """Store the step's keys and values, [n, K, d] each, in the step's slots."""

    def read(self, layer: int, step: Step) -> Iterable[tuple[Floats, Floats]]:
        """Keys and values of each sequence of the step, [S, K, d] each, those just written included."""


class DenseKVCache:
    """One row of `max_len` positions for each sequence: a paged cache whose block is a whole sequence.

    keys, values: float32 [L, num_seqs · max_len, K, d]. The block table of the sequence in row r is [r].
    Memory: 2 · L · num_seqs · max_len · K · d · 4 bytes, taken from the system only as positions are written.
    """

    def __init__(self, config: LlamaConfig, num_seqs: int, max_len: int) -> None:
        self.block_size = max_len
        shape = (config.num_hidden_layers, num_seqs * max_len, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def write(self, layer: int, k: Floats, v: Floats, step: Step) -> None:
        """Store k and v, [n, K, d]: slot = row · max_len + position."""
        self.keys[layer][step.slot_mapping] = k
        self.values[layer][step.slot_mapping] = v

    def read(self, layer: int, step: Step) -> Iterable[tuple[Floats, Floats]]:
        """Views of [S, K, d], no copy."""
        for row, length in zip(step.block_tables[:, 0].tolist(), step.seq_lens.tolist(), strict=True):
            own = slice(row * self.block_size, row * self.block_size + length)
            yield self.keys[layer, own], self.values[layer, own]


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a llama file must hold, apart from `output.weight`."""
    D, F, d = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, D),
        "output_norm.weight": (D,),
    }
    block = {
        "attn_norm": (D,),
        "attn_q": (q_size, D),
        "attn_k": (kv_size, D),
        "attn_v": (kv_size, D),
        "attn_output": (D, q_size),
        "ffn_norm": (D,),
        "ffn_gate": (F, D),
        "ffn_up": (F, D),
        "ffn_down": (D, F),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def check_tensors(file: GGUFFile, config: LlamaConfig) -> None:
    """ConfigError for a tensor that is missing, of another shape, or that this model would silently ignore."""
    blocks = min(config.num_hidden_layers, len(file.tensors))  # enough to find one missing; a file may say 2^64
    expected = expected_shapes(replace(config, num_hidden_layers=blocks))
    optional = {"output.weight": expected["token_embd.weight"], "rope_freqs.weight": (config.head_dim // 2,)}
    for name in expected:
        if name not in file.tensors:
            raise ConfigError(
                f"{file.path}: tensor {name}: missing; a llama of {config.num_hidden_layers} blocks needs it"
            )
    for name, info in file.tensors.items():
        allowed = (expected | optional).get(name)
        if allowed is None:
            raise ConfigError(f"{file.path}: tensor {name}: not part of a llama model; it would be ignored")
        if info.shape != allowed:
            raise ConfigError(f"{file.path}: tensor {name}: found shape {info.shape}; allowed: {allowed}")
    for type_, name in {info.type: name for name, info in file.tensors.items()}.items():
        try:
            dequantize(np.zeros(GGML_QUANT_SIZES[type_][1], np.uint8), type_)  # one block: is there a decoder?
        except TensorTypeError as error:
            raise TensorTypeError(f"{file.path}: tensor {name}: {error}") from None


def read_config(file: GGUFFile) -> LlamaConfig:
    """The file's hyper-parameters, with all its tensors checked against them."""
    try:
        config = LlamaConfig.from_metadata(file.metadata)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    check_tensors(file, config)
    return config


def load_vector(file: GGUFFile, name: str) -> Floats:
    """A small tensor as float32."""
    return dequantize(file.raw(name), file.tensors[name].type)


def read_rotary(file: GGUFFile, config: LlamaConfig) -> RotaryEmbedding:
    """RoPE with the file's own frequency factors, if it has them."""
    factors = load_vector(file, "rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
    if factors is not None and not np.all((factors > 0) & np.isfinite(factors)):
        raise ConfigError(f"{file.path}: tensor rope_freqs.weight: found {factors}; allowed: positive numbers")
    return RotaryEmbedding(config.head_dim, config.rope_theta, factors)


class MatrixLoader:
    """Dequantises matrices on all cores; NumPy lets go of Python's lock while it works."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, self._pool = file, ThreadPoolExecutor(os.cpu_count())
        self._jobs: list[Future[Floats]] = []

    def stack(self, *names: str) -> Floats:
        """Matrices on top of each other, float32 [sum of out, in], stored column after column (section 8 says why)."""
        infos = [self._file.tensors[name] for name in names]
        weight = np.empty((sum(i.shape[0] for i in infos), infos[0].shape[1]), np.float32, order="F")
        start = 0
        for info in infos:
            part = weight[start : start + info.shape[0]]
            self._jobs.append(self._pool.submit(dequantize, self._file.raw(info.name), info.type, part))
            start += info.shape[0]
        return weight

    def wait(self) -> None:
        """Return when every matrix is filled; raise what a worker raised."""
        try:
            for job in self._jobs:
                job.result()
        finally:
            self._pool.shutdown(cancel_futures=True)


class Layer:
    """The weights of one block: q, k, v stacked in one matrix, gate and up in another (one large matmul each)."""

    def __init__(self, file: GGUFFile, loader: MatrixLoader, index: int) -> None:
        def name(part: str) -> str:
            return f"blk.{index}.{part}.weight"

        self.attn_norm = load_vector(file, name("attn_norm"))
        self.qkv = loader.stack(name("attn_q"), name("attn_k"), name("attn_v"))
        self.attn_output = loader.stack(name("attn_output"))
        self.ffn_norm = load_vector(file, name("ffn_norm"))
        self.gate_up = loader.stack(name("ffn_gate"), name("ffn_up"))
        self.ffn_down = loader.stack(name("ffn_down"))


class CpuModel:
    """The Llama in NumPy, float32 throughout. Notebook 03, section 7.

    `forward` runs one Step over any cache with `write` and `read`. `embed`, `block` and `head` are its stages.
    Raises ConfigError for a file that is not a llama model this engine can run, TensorTypeError for unknown weights.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.config = read_config(file)
        self.heads = (self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim)
        self._file, loader = file, MatrixLoader(file)
        self.rotary = read_rotary(file, self.config)
        self.layers = [Layer(file, loader, i) for i in range(self.config.num_hidden_layers)]
        self.output_norm = load_vector(file, "output_norm.weight")
        tied = "output.weight" not in file.tensors
        self.output = loader.stack("token_embd.weight" if tied else "output.weight")
        loader.wait()

    def forward(self, step: Step, cache: KVCache, all_positions: bool = False) -> Floats:
        """Logits float32 [B, V] of each sequence's last token, or [n, V] of all tokens of the step."""
        x, phases = self.embed(step), self.rotary.phases(step.positions)
        for layer in range(self.config.num_hidden_layers):
            x = self.block(layer, x, phases, step, cache)
        return self.head(x if all_positions else x[step.last_token_indices])

    def embed(self, step: Step) -> Floats:
        """The residual stream's first value, [n, D]: only the rows needed leave their packed form in the file."""
        rows = self._file.raw("token_embd.weight")[step.token_ids]
        return dequantize(rows, self._file.tensors["token_embd.weight"].type)

    def block(self, layer: int, x: Floats, phases: Phases, step: Step, cache: KVCache) -> Floats:
        """One transformer block, [n, D] -> [n, D]."""
        weights, eps = self.layers[layer], self.config.rms_norm_eps
        x = x + self.attention(layer, rmsnorm(x, weights.attn_norm, eps), phases, step, cache)
        h = linear(rmsnorm(x, weights.ffn_norm, eps), weights.gate_up)
        return x + linear(silu_mul(h), weights.ffn_down)

    def attention(self, layer: int, x: Floats, phases: Phases, step: Step, cache: KVCache) -> Floats:
        """Project, turn, store, attend sequence by sequence, project back: [n, D] -> [n, D]."""
        weights, (H, K, d) = self.layers[layer], self.heads
        qkv = linear(x, weights.qkv).reshape(len(x), H + 2 * K, d)
        turned = rope(qkv[:, : H + K], phases)
        q, k, v = turned[:, :H], turned[:, H:], qkv[:, H + K :]
        cache.write(layer, k, v, step)
        borders = step.query_start_loc.tolist()
        per_sequence = zip(pairwise(borders), cache.read(layer, step), strict=True)
        parts = [attend(q[start:end], keys, values) for (start, end), (keys, values) in per_sequence]
        out = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return linear(out.reshape(len(x), H * d), weights.attn_output)

    def head(self, x: Floats) -> Floats:
        """Final norm and the projection to logits: [n, D] -> [n, V]."""
        return linear(rmsnorm(x, self.output_norm, self.config.rms_norm_eps), self.output)
