"""Models of real shapes with random weights, for benchmarks of models that are not at hand.

A step takes the same time whatever the weights are. The tokenizer is the default model's own, which
is fetched if it is not in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from rvllm import hub
from rvllm.cache import cached
from rvllm.errors import RvllmError
from rvllm.gguf import GGUFFile

BLOCK, BLOCK_BYTES = 32, 34  # of Q8_0: a float16 scale, then 32 weights of one byte
WEIGHT_STD = 127 / np.sqrt(3)  # of whole numbers from -127 to 127, all equally likely
FORMAT = 1  # raise it when the file's content changes: cached files of older versions are then left alone


class RandomWeightsError(RvllmError):
    """A shape that this module does not know."""


@dataclass(frozen=True)
class Shape:
    """Width, FFN width, layers, query heads, KV heads: D, F, L, H, K; the vocabulary is the tokenizer's."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int

    @property
    def head_dim(self) -> int:
        """d."""
        return self.hidden_size // self.num_attention_heads


SHAPES = {
    "360M": Shape(960, 2560, 32, 15, 5),
    "135M": Shape(576, 1536, 30, 9, 3),
    "tiny": Shape(64, 128, 2, 4, 2),
    "small": Shape(192, 160, 2, 3, 1),  # heads of 64, as part IV's kernels want them
}


def random_weights(name: str) -> tuple[Path, str]:
    """A GGUF file with the shapes of SmolLM2 `name` in Q8_0, written once into the cache; and what to call it.

    name: 360M, 135M, tiny (2 layers of width 64), or small (2 of width 192).   Raises RandomWeightsError, CacheError,
    and what fetching the default model may raise: its tokenizer is needed.
    """
    if name not in SHAPES:
        raise RandomWeightsError(f"random weights: found {name!r}; allowed: {', '.join(SHAPES)}")
    title = name if name in ("tiny", "small") else f"SmolLM2-{name}"
    source, shape = GGUFFile(hub.resolve(hub.SMOLLM2_135M.name)), SHAPES[name]
    key = (FORMAT, shape, hub.SMOLLM2_135M.sha256)
    path = cached("random_weights", key, ".gguf", lambda new, _: write(new, title, shape, source), Path)
    return path, title


def write(path: Path, title: str, shape: Shape, tokenizer: GGUFFile) -> None:
    """Write the file; `tokenizer` is the one whose tokenizer it gets."""
    writer = GGUFWriter(path, "llama")
    writer.add_name(f"{title}, random weights")
    vocab_size = len(tokenizer.metadata["tokenizer.ggml.tokens"])
    for key, value in hyper_parameters(shape, vocab_size).items():
        add(writer, f"llama.{key}", value)
    for key, value in tokenizer.metadata.items():
        if key.startswith("tokenizer."):
            add(writer, key, value)
    add_tensors(writer, shape, vocab_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hyper_parameters(shape: Shape, vocab_size: int) -> dict[str, int | float]:
    """Those of SmolLM2, less their prefix `llama.`."""
    return {
        "block_count": shape.num_hidden_layers,
        "context_length": 8192,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": shape.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 100_000.0,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": vocab_size,
    }


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """One metadata key, of the type usual for a Python value."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    types = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }
    writer.add_key_value(key, value, types[type(value)])


def add_tensors(writer: GGUFWriter, shape: Shape, vocab_size: int) -> None:
    """All tensors of a llama with a tied output matrix: random matrices, norms of ones."""
    D, F, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
    block = {
        "attn_q": (D, D),
        "attn_k": (kv, D),
        "attn_v": (kv, D),
        "attn_output": (D, D),
        "ffn_gate": (F, D),
        "ffn_up": (F, D),
        "ffn_down": (D, F),
    }
    rng = np.random.default_rng(0)
    matrix = partial(writer.add_tensor, raw_dtype=GGMLQuantizationType.Q8_0)
    matrix("token_embd.weight", random_q8_0(rng, vocab_size, D))
    writer.add_tensor("output_norm.weight", np.ones(D, np.float32))
    for layer in range(shape.num_hidden_layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(D, np.float32))
        for name, (rows, columns) in block.items():
            matrix(f"blk.{layer}.{name}.weight", random_q8_0(rng, rows, columns))


def random_q8_0(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """A random matrix as packed bytes, uint8 [rows, columns / 32 · 34], scaled so that logits stay moderate."""
    blocks = np.empty((rows, columns // BLOCK, BLOCK_BYTES), np.uint8)
    scale = np.array(0.7 / np.sqrt(columns) / WEIGHT_STD, "<f2")
    blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    blocks[..., 2:] = rng.integers(-127, 128, (rows, columns // BLOCK, BLOCK), np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)
