"""Solutions to the exercises of notebook 04."""

from collections.abc import Iterable, Iterator

import numpy as np


def top_k_logits(logits: np.ndarray, k: int) -> np.ndarray:
    """float32 [B, V] -> [B, V]."""
    threshold = np.partition(logits, -k, axis=1)[:, -k, None]
    return np.where(logits >= threshold, logits, -np.inf)


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    """Row i of the logits predicts token i + 1; the last row predicts nothing here."""
    shifted = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(np.exp(-log_probs[np.arange(len(ids) - 1), ids[1:]].mean()))


def first_sentence(pieces: Iterable[str]) -> Iterator[str]:
    """Pieces of text, cut after the first sentence."""
    shown = ""
    for piece in pieces:
        text = shown + piece
        ends = [i for mark in (". ", "! ", "? ") if (i := text.find(mark)) >= 0]
        if ends:
            yield text[len(shown) : min(ends) + 1]
            return
        yield piece
        shown = text
