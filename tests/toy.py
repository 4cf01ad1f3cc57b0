"""A small Llama in a GGUF file, written by the official package: the input of most tests.

2 layers, width 64, 4 query heads on 2 KV heads, head size 16, FFN 128, 300 tokens: the 256 byte characters, merges
on top, then the special tokens `<|endoftext|>` (0), `<|im_start|>` (1) and `<|im_end|>` (2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from rvllm.tokenizer import CONTROL, NORMAL, byte_alphabet

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LAYERS, D, H, K, HEAD, F = 2, 64, 4, 2, 16, 128
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary(size: int = 300) -> tuple[list[str], list[str]]:
    """Tokens and merges: every byte, then two-letter merges until the vocabulary is full."""
    alphabet = list(byte_alphabet().values())
    tokens, merges = [*SPECIAL, *alphabet], []
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    for left in ["Ġ", *letters]:
        for right in letters:
            if len(tokens) == size:
                return tokens, merges
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    raise ValueError(f"a toy vocabulary has no {size} tokens")


def metadata(**changes: Any) -> dict[str, Any]:
    """The toy's metadata; `changes` replace keys (dots written as two underscores), None removes one."""
    tokens, merges = vocabulary()
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": D,
        "llama.feed_forward_length": F,
        "llama.attention.head_count": H,
        "llama.attention.head_count_kv": K,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


def weights(seed: int = 0, vocab_size: int = 300) -> dict[str, np.ndarray]:
    """Random float32 tensors of a toy model, scaled so that logits differ clearly."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))

    tensors = {"token_embd.weight": matrix(vocab_size, D), "output_norm.weight": np.ones(D, np.float32)}
    for layer in range(LAYERS):
        b = f"blk.{layer}."
        tensors |= {
            b + "attn_norm.weight": rng.uniform(0.5, 1.5, D).astype(np.float32),
            b + "attn_q.weight": matrix(H * HEAD, D),
            b + "attn_k.weight": matrix(K * HEAD, D),
            b + "attn_v.weight": matrix(K * HEAD, D),
            b + "attn_output.weight": matrix(D, H * HEAD) * 4,
            b + "ffn_norm.weight": rng.uniform(0.5, 1.5, D).astype(np.float32),
            b + "ffn_gate.weight": matrix(F, D),
            b + "ffn_up.weight": matrix(F, D),
            b + "ffn_down.weight": matrix(D, F) * 4,
        }
    return tensors


def write(
    path: Path,
    meta: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    types: Mapping[str, Type] | None = None,
    value_types: Mapping[str, gguf.GGUFValueType] | None = None,
) -> Path:
    """Write a toy model. `types` quantises single tensors, `value_types` forces the type of single keys."""
    meta = metadata() if meta is None else meta
    writer = gguf.GGUFWriter(path, meta.get("general.architecture", "llama"))
    for key, value in meta.items():
        if key != "general.architecture":
            add_key(writer, key, value, (value_types or {}).get(key))
    for name, data in (weights() if tensors is None else tensors).items():
        type_ = (types or {}).get(name)
        packed = data if type_ is None else gguf.quants.quantize(data, type_)
        writer.add_tensor(name, packed, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any, value_type: gguf.GGUFValueType | None) -> None:
    """One key of the type given, or of the type usual for a Python value."""
    usual: Sequence[tuple[type, gguf.GGUFValueType]] = (
        (bool, gguf.GGUFValueType.BOOL),
        (int, gguf.GGUFValueType.UINT32),
        (float, gguf.GGUFValueType.FLOAT32),
        (str, gguf.GGUFValueType.STRING),
        (list, gguf.GGUFValueType.ARRAY),
    )
    kind = value_type or next(t for python, t in usual if isinstance(value, python))
    writer.add_key_value(key, value, kind)
