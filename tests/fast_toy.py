"""Small models that the fast path covers: heads of 64 or 128, widths in multiples of 32, packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type

from rvllm.tokenizer import CONTROL, NORMAL
from tests import toy


@dataclass(frozen=True)
class FastShape:
    """Layers, query heads, KV heads, head size, FFN width, context. The width is that of the heads together."""

    layers: int = 2
    H: int = 3
    K: int = 1
    d: int = 64
    F: int = 160
    context: int = 256

    @property
    def D(self) -> int:
        return self.H * self.d


DEFAULT = FastShape()


def write_fast_toy(
    path: Path, shape: FastShape = DEFAULT, type_: Type = Type.Q8_0, seed: int = 0, vocab: int = 304
) -> Path:
    """A model file with all matrices in one type; logits differ clearly between tokens."""
    rng = np.random.default_rng(seed)
    D, kv = shape.D, shape.K * shape.d

    def matrix(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(size / np.sqrt(columns))

    tensors = {"token_embd.weight": matrix(vocab, D, 4.0), "output_norm.weight": rng.uniform(0.5, 1.5, D).astype("f4")}
    for layer in range(shape.layers):
        b = f"blk.{layer}."
        tensors |= {
            b + "attn_norm.weight": rng.uniform(0.5, 1.5, D).astype(np.float32),
            b + "attn_q.weight": matrix(D, D),
            b + "attn_k.weight": matrix(kv, D),
            b + "attn_v.weight": matrix(kv, D),
            b + "attn_output.weight": matrix(D, D, 2.0),
            b + "ffn_norm.weight": rng.uniform(0.5, 1.5, D).astype(np.float32),
            b + "ffn_gate.weight": matrix(shape.F, D),
            b + "ffn_up.weight": matrix(shape.F, D),
            b + "ffn_down.weight": matrix(D, shape.F, 4.0),
        }
    tokens, merges = toy.vocabulary(vocab)
    sizes = {
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__merges": merges,
        "tokenizer__ggml__token_type": [CONTROL] * len(toy.SPECIAL) + [NORMAL] * (vocab - len(toy.SPECIAL)),
        "llama__block_count": shape.layers,
        "llama__context_length": shape.context,
        "llama__embedding_length": D,
        "llama__feed_forward_length": shape.F,
        "llama__attention__head_count": shape.H,
        "llama__attention__head_count_kv": shape.K,
        "llama__rope__dimension_count": shape.d,
    }
    types = {name: type_ for name, data in tensors.items() if data.ndim == 2}
    return toy.write(path, toy.metadata(**sizes), tensors, types)
