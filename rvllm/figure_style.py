"""What all pictures share: colours, and a figure that belongs to nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rvllm.errors import RvllmError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito: its colours stay apart for colour-blind readers. In print, markers and hatches do.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, YELLOW = "#0072B2", "#D55E00", "#CC79A7", "#F0E442"


class PlotError(RvllmError):
    """A picture that can't be drawn: no matplotlib, no data, or a choice that does not exist."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches, 100 dots each; pyplot knows nothing of it. PlotError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("pictures need matplotlib, which is not installed: pip install 'rvllm[notebooks]'") from error
    return Figure(figsize=(width, height), dpi=100, layout="constrained")
