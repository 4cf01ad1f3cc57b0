"""Solutions to the exercises of notebook 03."""

import numpy as np

from rvllm.config import LlamaConfig


def layernorm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """float32 [n, D] -> [n, D]."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + eps) * weight + bias


def cache_bytes_per_token(config: LlamaConfig) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def hidden_keys(T: int, S: int, first: int, window: int) -> np.ndarray:
    """bool [T, S]."""
    query, key = first + np.arange(T)[:, None], np.arange(S)
    return (key > query) | (key <= query - window)
