"""The fused model as one launch a step.

Generated from notebooks/19_cuda_graphs.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from typing import Any

from rvllm.fused_model import FusedModel
from rvllm.graphs import GraphProgram


class GraphModel(FusedModel):
    """The five kernels a layer as one launch a step. Notebook 19, section 5."""

    def build(self, shape: tuple[Any, ...]) -> Any:
        """The same launches, recorded."""
        return GraphProgram(self.rt, super().build(shape), self.dependent)

    @property
    def dependent(self) -> bool:
        """Whether kernels may start before those in front of them have ended; the emulator checks if they could."""
        return self.rt.compute_capability >= 90 if self.rt.is_cuda else self.rt.chain is not None
