"""rvllm: a course and an engine in one. Notebooks 00 to 20 build an LLM inference engine, step by step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rvllm.llm import LLM
    from rvllm.outputs import RequestOutput
    from rvllm.sampling import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_HOME = {"LLM": "rvllm.llm", "RequestOutput": "rvllm.outputs", "SamplingParams": "rvllm.sampling"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use: `rvllm --help` stays quick, `rvllm doctor` starts where NumPy is broken."""
    if name not in _HOME:
        raise AttributeError(f"module 'rvllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
