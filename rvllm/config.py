"""Hyper-parameters of a Llama, read from GGUF metadata and checked.

Generated from notebooks/03_numpy_llama.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rvllm.errors import RvllmError


class ConfigError(RvllmError):
    """Hyper-parameters that are missing, contradict each other, or name a model this engine does not run."""


_REQUIRED = object()


class Keys:
    """Typed access to metadata.

    Files write the same count as u32, u64 or i32: any integer will do, a float will not.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """A count of at least 1; a list is allowed where all its entries agree (one per layer)."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            if len(set(value.tolist())) != 1:
                raise ConfigError(f"{key}: found {value.tolist()}; allowed: the same number for every layer")
            value = int(value[0])
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key}: found {value!r}; allowed: an integer of at least 1")
        return value

    def one_per_layer(self, key: str, layers: int) -> None:
        """Where a count is a list, it has an entry for each layer."""
        value = self._metadata.get(key)
        if isinstance(value, np.ndarray) and len(value) != layers:
            raise ConfigError(f"{key}: found {len(value)} entries; allowed: one for each of {layers} layers")

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigError(f"{key}: found {value!r}; allowed: a positive number")
        return float(value)

    def forbid(self, key: str, *harmless: Any) -> None:
        """A key whose presence would change the mathematics; only the harmless values pass; a bool is no number."""
        value = self._metadata.get(key)
        passes = (isinstance(value, (type(h), int)) and value == h for h in harmless)
        if value is not None and (isinstance(value, bool) or not any(passes)):
            raise ConfigError(f"{key}: found {value!r}; allowed: absent or {', '.join(map(repr, harmless))}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(key, default)
        if value is _REQUIRED:
            raise ConfigError(f"{key}: missing from the file; a llama model needs it")
        return value


@dataclass(frozen=True)
class LlamaConfig:
    """Hyper-parameters of a Llama, in vLLM's words and with the course's symbols. Notebook 03, section 2."""

    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # K
    head_dim: int  # d
    vocab_size: int  # V
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def group_size(self) -> int:
        """G = H / K: how many query heads share one head of keys and values."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> LlamaConfig:
        """Read and check a GGUF file's metadata.

        ConfigError names the key, the value found and those allowed.
        """
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture != "llama":
            raise ConfigError(f"general.architecture: found {architecture!r}; allowed: 'llama'")
        keys = Keys(metadata)
        cls._forbid_variants(keys)
        hidden, heads = keys.integer("llama.embedding_length"), keys.integer("llama.attention.head_count")
        tokens = metadata.get("tokenizer.ggml.tokens")
        config = cls(
            hidden_size=hidden,
            intermediate_size=keys.integer("llama.feed_forward_length"),
            num_hidden_layers=keys.integer("llama.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=keys.integer("llama.attention.head_count_kv", heads),
            head_dim=keys.integer("llama.attention.key_length", max(1, hidden // heads)),
            vocab_size=keys.integer("llama.vocab_size", len(tokens) if isinstance(tokens, list) else _REQUIRED),
            max_position_embeddings=keys.integer("llama.context_length"),
            rms_norm_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=keys.number("llama.rope.freq_base", 10_000.0),
        )
        config._check(keys, n_tokens=len(tokens) if isinstance(tokens, list) else config.vocab_size)
        return config

    @staticmethod
    def _forbid_variants(keys: Keys) -> None:
        keys.forbid("split.count", 0, 1)
        keys.forbid("llama.rope.scaling.type", "none")
        keys.forbid("llama.rope.scale_linear", 0.0, 1.0)
        keys.forbid("llama.rope.scaling.factor", 0.0, 1.0)
        keys.forbid("llama.expert_count", 0)
        keys.forbid("llama.attention.sliding_window", 0)

    def _check(self, keys: Keys, n_tokens: int) -> None:
        heads, kv_heads, d = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        keys.forbid("llama.attention.value_length", d)
        keys.forbid("llama.rope.dimension_count", d)
        for name in ("head_count", "head_count_kv"):
            keys.one_per_layer(f"llama.attention.{name}", self.num_hidden_layers)
        if heads % kv_heads:
            raise ConfigError(f"llama.attention.head_count: found {heads}; allowed: a multiple of {kv_heads} KV heads")
        if "llama.attention.key_length" not in keys._metadata and self.hidden_size % heads:
            raise ConfigError(f"llama.embedding_length: found {self.hidden_size}; allowed: a multiple of {heads} heads")
        if d % 2:
            raise ConfigError(f"llama.attention.key_length: found {d}; allowed: an even head size (RoPE turns pairs)")
        if n_tokens != self.vocab_size:
            raise ConfigError(
                f"llama.vocab_size: found {self.vocab_size}; allowed: the {n_tokens} tokens of the vocabulary"
            )
