"""Pictures of what an engine did: `LLM(..., trace=True).trace`, step by step. Show one with `rvllm.notebook.show`.

What colours say, numbers, marks and hatches say too.
Import the pictures from `rvllm.plots`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rvllm.figure_style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW, PlotError, new_figure
from rvllm.trace import StepRecord, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OF_REQUESTS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE, VERMILION)  # in turn, by order of appearance
# Face, edge (which also colours the hatch), hatch and meaning of what happens to a request in a step.
KINDS: dict[str, tuple[str, str, str, str]] = {
    "prefill": (BLUE, "white", "", "prompt: tokens computed"),
    "decode": (ORANGE, "white", "", "answer: 1 token computed"),
    "again": (PURPLE, "white", "////", "starts over after a preemption: tokens computed"),
    "cached": ("#C5EBDD", GREEN, "", "+n: tokens found in the prefix cache"),
    "waiting": ("#F4F4F4", "#C4C4C4", "////", "waits"),
    "preempted": ("white", VERMILION, "", "preempted: gives its blocks back"),
}
WIDTH, POINTS = 9.0, 580.0  # of all pictures, in inches; of what is drawn beside the names of the rows
FOUND = 0.46  # part of a cell, from the top, for what the prefix cache had
SUMMED = {  # the kinds that tokens are counted by
    "cached": "found in the prefix cache",
    "prefill": "prompt, computed",
    "again": "computed again after a preemption",
    "decode": "answer, computed",
}
MAX_NAMES = 500  # in the block pool; of more cells only those that change hands are named
MAX_ROWS, MAX_COLUMNS = 40, 48  # of the block pool; of more it shows a choice


Box = tuple[float, float, float, float]  # left, top, width, height, in units of the axes


@dataclass(frozen=True)
class Note:
    """A number in the middle of a cell that is `room` wide, and the colour behind it."""

    x: float
    y: float
    text: str
    room: float
    ink: str = "black"
    ground: str = "white"


# The data behind the pictures -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What happens to one request in one step. `kind` is a key of KINDS.

    Tokens computed in it: `prompt` and `answer` for the first time, `again` after a preemption.
    cached: tokens that came from the prefix cache when the request started, or started over, in this step.
    """

    step: int
    label: str
    kind: str
    prompt: int = 0
    answer: int = 0
    again: int = 0
    cached: int = 0

    @property
    def computed(self) -> int:
        """All tokens computed."""
        return self.prompt + self.answer + self.again


@dataclass(frozen=True)
class Block:
    """One cache block in one step. findable: by the prefix cache.   former: who had it last, where nobody has it."""

    owners: tuple[str, ...] = ()
    findable: bool = False
    former: tuple[str, ...] = ()


def cells(steps: Sequence[StepRecord]) -> list[Cell]:
    """All cells of a trace, step by step. Give it all steps: what is cached, or done again, depends on those before."""
    found: list[Cell] = []
    reached: dict[str, int] = {}  # by label: tokens computed so far, or found, since it started
    best: dict[str, int] = {}  # the same before a preemption took them
    for index, step in enumerate(steps):
        for label in [*step.preempted, *step.waiting]:
            reached.pop(label, None)
        found += [Cell(index, label, "preempted") for label in step.preempted]
        idle = [*step.waiting, *(label for label in step.block_tables if label not in step.computed)]
        found += [Cell(index, label, "waiting") for label in idle if label not in step.preempted]
        for label, (start, count) in step.computed.items():
            found.append(_work(index, label, step, reached.get(label, 0), best.get(label, 0)))
            reached[label] = start + count
            best[label] = max(best.get(label, 0), start + count)
    return found


def _work(index: int, label: str, step: StepRecord, reached: int, best: int) -> Cell:
    start, count = step.computed[label]
    again = max(0, min(start + count, best) - start)
    prompt = max(0, min(start + count, step.prompts[label]) - start - again)
    kind = "again" if again else "prefill" if prompt else "decode"
    cached = start - reached if start >= reached else start  # behind: it started over without a word
    return Cell(index, label, kind, prompt, count - again - prompt, again, cached)


def labels(steps: Iterable[StepRecord]) -> list[str]:
    """Labels of all requests of these steps, in the order of their numbers."""
    every = {label for step in steps for label in [*step.computed, *step.waiting, *step.block_tables]}
    return sorted(every, key=lambda label: [int(part) for part in label.split(".")])


def blocks(steps: Sequence[StepRecord], num_blocks: int) -> list[list[Block]]:
    """Every block of the pool in every step: `blocks(...)[step][block]`."""
    rows: list[list[Block]] = []
    last: list[tuple[str, ...]] = [()] * num_blocks
    for step in steps:
        findable = set(step.cached_blocks)
        owners: list[tuple[str, ...]] = [()] * num_blocks
        for label, table in step.block_tables.items():
            for block in table:
                owners[block] += (label,)
        last = [now or before for now, before in zip(owners, last, strict=True)]
        rows.append([Block(o, b in findable, () if o else last[b]) for b, o in enumerate(owners)])
    return rows


def sums(of: Iterable[Cell]) -> dict[str, dict[str, int]]:
    """Tokens of each request: {label: {"prefill": first time, "again": ..., "decode": ..., "cached": ...}}."""
    total: dict[str, dict[str, int]] = {}
    for cell in of:
        own = total.setdefault(cell.label, {"prefill": 0, "again": 0, "decode": 0, "cached": 0})
        new = {"prefill": cell.prompt, "again": cell.again, "decode": cell.answer, "cached": cell.cached}
        for kind, count in new.items():
            own[kind] += count
    return total


# Timeline -------------------------------------------------------------------------------------------------------------


def timeline(trace: Trace, by: str = "step", steps: range | None = None) -> Figure:
    """Who computes how many tokens when, who waits, who is preempted; below, the tokens of each step.

    by: what goes to the right, "step" (all as wide) or "time" (as long as they took).   steps: only these.
    """
    if by not in ("step", "time"):
        raise PlotError(f"by: found {by!r}; allowed: 'step', 'time'")
    chosen = _chosen(trace, steps)
    shown = [cell for cell in cells(trace.steps) if cell.step in set(chosen)]
    names = labels(trace.steps[i] for i in chosen)
    height = min(0.3, max(0.05, 6 / len(names)))
    figure = new_figure(WIDTH, len(names) * height + 1.9)
    grid, foot = figure.subplots(2, 1, sharex=True, height_ratios=[len(names) * height, 0.6])
    spans = _spans(trace.steps, chosen, by)
    _draw_cells(grid, shown, names, spans, height * 72)
    _draw_foot(foot, shown, spans)
    _name_rows(grid, names)
    _name_columns(foot, chosen, by)
    used = {cell.kind for cell in shown} | {"cached" for cell in shown if cell.cached}
    swatches = {KINDS[kind][3]: _swatch(*KINDS[kind][:3]) for kind in KINDS if kind in used}
    if "preempted" in used:
        swatches[KINDS["preempted"][3]] = (_swatch(*KINDS["preempted"][:3]), _mark("x", VERMILION, 5))
    _legend(figure, swatches)
    figure.suptitle(_timeline_title(shown, names, len(chosen)), fontsize=10)
    return figure


def _spans(steps: Sequence[StepRecord], chosen: Sequence[int], by: str) -> dict[int, tuple[float, float]]:
    """Where a step begins and how wide it is: in columns, or in milliseconds."""
    if by == "step":
        return {i: (float(column), 1.0) for column, i in enumerate(chosen)}
    begin = steps[chosen[0]].start
    return {i: ((steps[i].start - begin) * 1e3, (steps[i].end - steps[i].start) * 1e3) for i in chosen}


def _draw_cells(
    axes: Axes, shown: Sequence[Cell], names: Sequence[str], spans: Mapping[int, tuple[float, float]], height: float
) -> None:
    """One row for each name, `height` points high; y goes down."""
    row_of = {name: row for row, name in enumerate(names)}
    axes.set(xlim=(0, _right(spans)), ylim=(len(names), 0))
    boxes: dict[str, list[Box]] = {kind: [] for kind in KINDS}
    for cell in shown:
        (left, width), row = spans[cell.step], row_of[cell.label]
        top = FOUND if cell.cached else 0.0
        boxes[cell.kind].append((left, row + top, width, 1 - top))
        if cell.cached:
            boxes["cached"].append((left, row, width, top))
    bordered = POINTS / len(spans) > 4 and height > 6
    for kind, rectangles in boxes.items():
        _add_boxes(axes, rectangles if bordered else _joined(rectangles), kind, bordered)
    _mark_preempted(axes, boxes["preempted"], height)
    for number in (_found_note, _computed_note) if height > 14 else ():
        notes = [number(cell, row_of[cell.label], *spans[cell.step]) for cell in shown]
        _write(axes, [note for note in notes if note], POINTS / _right(spans))


def _found_note(cell: Cell, row: int, left: float, width: float) -> Note | None:
    return Note(left + width / 2, row + FOUND / 2, f"+{cell.cached}", width) if cell.cached else None


def _computed_note(cell: Cell, row: int, left: float, width: float) -> Note | None:
    """A decoding cell has none: its number is always 1."""
    if not cell.computed or cell.kind == "decode":
        return None
    face, top = KINDS[cell.kind][0], FOUND if cell.cached else 0.0
    return Note(left + width / 2, row + (1 + top) / 2, str(cell.computed), width, _ink(face), face)


def _right(spans: Mapping[int, tuple[float, float]]) -> float:
    return max(left + width for left, width in spans.values())


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """Boxes that follow each other in a row as one."""
    joined: list[Box] = []
    for x, y, width, height in sorted(boxes, key=lambda box: (box[1], box[0])):
        last = joined[-1] if joined else None
        if last and last[1::2] == (y, height) and last[0] + last[2] == x:
            joined[-1] = (last[0], y, last[2] + width, height)
        else:
            joined.append((x, y, width, height))
    return joined


def _add_boxes(axes: Axes, rectangles: Sequence[Box], kind: str, bordered: bool) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    face, edge, hatch, _ = KINDS[kind]
    patches = [Rectangle((x, y), width, height) for x, y, width, height in rectangles]
    line = (1.6 if kind == "preempted" else 0.8) if bordered else 0.0
    on_top = 3 if kind == "preempted" else 1
    axes.add_collection(
        PatchCollection(patches, facecolor=face, edgecolor=edge, hatch=hatch or None, linewidth=line, zorder=on_top)
    )


def _mark_preempted(axes: Axes, rectangles: Sequence[Box], height: float) -> None:
    x = [left + width / 2 for left, _, width, _ in rectangles]
    y = [top + size / 2 for _, top, _, size in rectangles]
    axes.scatter(x, y, s=min(6.0, max(3.0, height * 0.5)) ** 2, marker="x", color=VERMILION, linewidth=1.5, zorder=4)


def _draw_foot(axes: Axes, shown: Sequence[Cell], spans: Mapping[int, tuple[float, float]]) -> None:
    totals = dict.fromkeys(spans, 0)
    for cell in shown:
        totals[cell.step] += cell.computed
    left, width = zip(*spans.values(), strict=True)
    axes.bar(left, list(totals.values()), width, align="edge", color="#8C8C8C", edgecolor="white", linewidth=0.4)
    top = max(totals.values())
    middle = {step: start + size / 2 for step, (start, size) in spans.items()}
    _write(
        axes, [Note(middle[i], n + top * 0.2, str(n), spans[i][1]) for i, n in totals.items()], POINTS / _right(spans)
    )
    axes.set(ylim=(0, top * 1.5), yticks=[0, top])
    axes.set_ylabel("tokens\nof step", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _timeline_title(shown: Sequence[Cell], names: Sequence[str], num_steps: int) -> str:
    computed, cached = sum(cell.computed for cell in shown), sum(cell.cached for cell in shown)
    preempted = sum(cell.kind == "preempted" for cell in shown)
    again = sum(cell.again for cell in shown)
    title = f"{_count(len(names), _what(names))} in {_count(num_steps, 'step')}: {_count(computed, 'token')} computed"
    title += f" ({again} of them again)" if again else ""
    title += f", {cached} found in the prefix cache" if cached else ""
    return title + (f", {_count(preempted, 'preemption')}" if preempted else "")


# Block pool -----------------------------------------------------------------------------------------------------------


def block_pool(trace: Trace, steps: Iterable[int] | None = None) -> Figure:
    """Who owns which cache block: a row for each step, a column for each block of the pool.

    steps: numbers of the steps to show; None: all, or a choice of very many: those that preempt, and some in between.
    """
    chosen = _chosen(trace, steps)
    if steps is None:
        chosen = _thinned(trace.steps)
    every = blocks(trace.steps, trace.num_blocks)
    rows = [every[i][: _columns(every)] for i in chosen]
    height = min(0.26, 9 / len(rows))
    figure = new_figure(WIDTH, len(rows) * height + 1.3)
    axes = figure.subplots()
    colours = {name: OF_REQUESTS[i % len(OF_REQUESTS)] for i, name in enumerate(labels(trace.steps))}
    _draw_pool(axes, rows, colours, height * 72)
    _name_pool(axes, trace, chosen, len(rows[0]))
    _pool_legend(figure, rows, len(rows[0]) < POINTS / 6)
    figure.suptitle(_pool_title(trace, chosen, every), fontsize=10)
    return figure


def _thinned(steps: Sequence[StepRecord]) -> list[int]:
    """At most MAX_ROWS step numbers: preempting steps first, the others at about equal distances."""
    important = [i for i, step in enumerate(steps) if step.preempted][: MAX_ROWS // 2]
    others = [i for i in range(len(steps)) if i not in set(important)]
    wanted = min(MAX_ROWS - len(important), len(others))
    return sorted([*important, *(others[i * len(others) // wanted] for i in range(wanted))])


def _columns(rows: Sequence[Sequence[Block]]) -> int:
    """All blocks of a small pool; of a large one those up to the last that is ever used."""
    touched = [b for row in rows for b, block in enumerate(row) if block.owners or block.findable]
    return len(rows[0]) if len(rows[0]) <= MAX_COLUMNS else max(touched, default=0) + 1


def _draw_pool(axes: Axes, rows: Sequence[Sequence[Block]], colours: Mapping[str, str], height: float) -> None:
    """Cells `height` points high; y goes down."""
    axes.set(xlim=(0, len(rows[0])), ylim=(len(rows), 0))
    room = POINTS / len(rows[0])
    grid = [(x, y, block) for y, row in enumerate(rows) for x, block in enumerate(row)]
    stripes = [((x + left, y, width, 1.0), face) for x, y, b in grid for left, width, face in _stripes(b, colours)]
    _add_frames(axes, [box for box, _ in stripes], [face for _, face in stripes], "none", 0.0)
    shared = [len(block.owners) > 1 for _, _, block in grid]
    for edge, width, wanted in (("#B0B0B0", 0.6, False), ("black", 1.3, True)):
        boxes = [(x, y, 1, 1) for (x, y, _), is_shared in zip(grid, shared, strict=True) if is_shared is wanted]
        _add_frames(axes, boxes, "none", edge, width if room > 6 else 0.0)
    dots = [(x + 0.5, y + 0.84) for x, y, block in grid if block.findable and room > 6]
    axes.scatter(
        [x for x, _ in dots], [y for _, y in dots], min(5.0, room * height / 60), "black", linewidth=0, zorder=4
    )
    crowded = len(grid) > MAX_NAMES
    for x, y, block in grid if height > 9 else []:
        if not (crowded and y and _same_names(block, rows[y - 1][x])):
            _name_block(axes, x, y, block, colours, room)


def _add_frames(axes: Axes, boxes: Sequence[Box], faces: Any, edge: str, line: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches = [Rectangle((x, y), width, height) for x, y, width, height in boxes]
    axes.add_collection(PatchCollection(patches, facecolor=faces, edgecolor=edge, linewidth=line))


def _stripes(block: Block, colours: Mapping[str, str]) -> list[tuple[float, float, str]]:
    """Left, width and colour: a stripe for each owner, a pale one for a free block whose content can be found."""
    if not block.owners and block.findable:
        return [(0.0, 1.0, _pale(colours[block.former[0]]) if block.former else "#EEEEEE")]
    share = 1 / max(1, len(block.owners))
    return [(i * share, share, colours[owner]) for i, owner in enumerate(block.owners)]


def _names(block: Block) -> tuple[str, ...]:
    """Who is named in a block: its owners, or the last one of a free block whose content can be found."""
    return block.owners or (block.former[:1] if block.findable else ())


def _same_names(one: Block, other: Block) -> bool:
    return _names(one) == _names(other) and bool(one.owners) is bool(other.owners)


def _name_block(axes: Axes, x: int, y: int, block: Block, colours: Mapping[str, str], room: float) -> None:
    """Each name in its stripe, or how many there are. Without room for either: nothing."""
    from matplotlib.patheffects import withStroke

    names, share = _names(block), 1 / max(1, len(_names(block)))
    size = min((_size(len(name), room * share) for name in names), default=8.0)
    if len(names) > 1 and size < 5:
        names, size, share = (f"×{len(names)}",), _size(3, room), 1.0
    for i, name in enumerate(names if size >= 5 else ()):
        ink = _ink(colours.get(name, "#FFFFFF")) if block.owners else "#555555"
        text = axes.text(x + (i + 0.5) * share, y + 0.47, name, fontsize=size, color=ink, ha="center", zorder=5)
        text.set(
            va="center_baseline", path_effects=[withStroke(linewidth=2.5, foreground="white")][: name not in colours]
        )


def _name_pool(axes: Axes, trace: Trace, chosen: Sequence[int], num_columns: int) -> None:
    preempted = [trace.steps[i].preempted for i in chosen]
    texts = [f"✕ {', '.join(who)} preempted   {i}" if who else str(i) for i, who in zip(chosen, preempted, strict=True)]
    axes.set_yticks([y + 0.5 for y in range(len(chosen))], texts, fontsize=7)
    for tick, who in zip(axes.get_yticklabels(), preempted, strict=True):
        tick.set_color(VERMILION if who else "black")
    columns = range(0, num_columns, _every(num_columns, MAX_COLUMNS if num_columns <= 100 else 30))
    axes.set_xticks([b + 0.5 for b in columns], [str(b) for b in columns], fontsize=7)
    axes.tick_params(length=0)
    axes.set_xlabel("block", fontsize=9)
    axes.set_ylabel("step", fontsize=9)


def _pool_legend(figure: Figure, rows: Sequence[Sequence[Block]], dotted: bool) -> None:
    every = [block for row in rows for block in row]
    entries = {"in use; colour and number: the request": _swatch(SKY, "#B0B0B0")}
    if any(len(block.owners) > 1 for block in every):
        entries["shared: several requests use it"] = _swatch("white", "black")
    if any(block.findable for block in every):
        dot = [_mark("o", "black", 3)] if dotted else []
        if dot:
            entries["dot: the prefix cache can find it"] = dot[0]
        entries["free, still findable; number: last user"] = (_swatch(_pale(SKY), "#B0B0B0"), *dot)
    _legend(figure, entries | {"free": _swatch("white", "#B0B0B0")})


def _pool_title(trace: Trace, chosen: Sequence[int], every: Sequence[Sequence[Block]]) -> str:
    span = range(min(chosen), max(chosen) + 1)
    most = max(sum(bool(block.owners) for block in every[i]) for i in span)
    shared = max(sum(len(block.owners) > 1 for block in every[i]) for i in span)
    preempted = sum(len(trace.steps[i].preempted) for i in span)
    few = f"{len(chosen)} of " if len(chosen) < len(trace.steps) else ""
    title = (
        f"Pool of {_count(trace.num_blocks, 'block')} in {few}{_count(len(trace.steps), 'step')}: {most} in use at most"
    )
    title += f", {shared} shared at most" if shared else ""
    return title + (f", {_count(preempted, 'preemption')}" if preempted else "")


# Tokens computed ------------------------------------------------------------------------------------------------------


def tokens_computed(traces: Mapping[str, Trace]) -> Figure:
    """Tokens that each request computed and those that it found in the prefix cache, a panel for each trace."""
    if not traces:
        raise PlotError("traces: found none; allowed: {name: trace}, at least one")
    tokens = {name: sums(cells([trace.steps[i] for i in _chosen(trace, None)])) for name, trace in traces.items()}
    names = labels(step for trace in traces.values() for step in trace.steps)
    height = min(0.24, 9 / len(names))
    figure = new_figure(WIDTH, max(0.8, height * len(names)) + 1.5)
    panels = figure.subplots(1, len(traces), sharex=True, sharey=True, squeeze=False)[0]
    longest = max(sum(of.values()) for own in tokens.values() for of in own.values())
    for axes, (name, own) in zip(panels, tokens.items(), strict=True):
        _draw_bars(axes, own, names, height * 72, POINTS / len(traces) / longest)
        total = {kind: sum(of[kind] for of in own.values()) for kind in SUMMED}
        found = f", {total['cached']} found in the cache" if total["cached"] else ""
        axes.set_title(f"{name}:\n{sum(total.values()) - total['cached']} tokens computed{found}", fontsize=9)
    _name_rows(panels[0], names)
    used = [kind for kind in SUMMED if any(of[kind] for own in tokens.values() for of in own.values())]
    _legend(figure, {SUMMED[kind]: _swatch(*KINDS[kind][:3]) for kind in used})
    figure.suptitle(f"Tokens of {_count(len(names), _what(names))}", fontsize=10)
    return figure


def _draw_bars(
    axes: Axes, own: Mapping[str, Mapping[str, int]], names: Sequence[str], height: float, scale: float
) -> None:
    """A bar for each name, `height` points high; a token is `scale` points long."""
    left = [0] * len(names)
    rows = [row + 0.5 for row in range(len(names))]
    for kind in SUMMED:
        face, edge, hatch, _ = KINDS[kind]
        width = [own[name][kind] if name in own else 0 for name in names]
        axes.barh(rows, width, 0.8, left=left, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.6)
        notes = [
            Note(x + n / 2, y, str(n), n, _ink(face), face) for x, y, n in zip(left, rows, width, strict=True) if n
        ]
        if height > 12:
            _write(axes, notes, scale)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set(ylim=(len(names), 0))
    axes.set_xlabel("tokens", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


# What the pictures share ----------------------------------------------------------------------------------------------


def _chosen(trace: Trace, steps: Iterable[int] | None) -> list[int]:
    """Numbers of the steps to draw; PlotError unless there are some and all exist."""
    if not trace.steps:
        raise PlotError("the trace holds no steps: generate something first")
    chosen = list(range(len(trace.steps)) if steps is None else steps)
    wrong = [i for i in chosen if not 0 <= i < len(trace.steps)]
    if wrong or not chosen:
        raise PlotError(f"steps: found {wrong or 'none'}; allowed: 0 to {len(trace.steps) - 1}")
    return chosen


def _write(axes: Axes, notes: Sequence[Note], scale: float) -> None:
    """Numbers in one size; those without room for the longest are left out. A unit of room is `scale` points wide."""
    from matplotlib.patheffects import withStroke

    longest = max((len(note.text) for note in notes), default=1)
    sizes = [_size(longest, note.room * scale) for note in notes]
    size = max(5.5, min(sizes, default=8.0))
    if 2 * sum(own >= size for own in sizes) < len(sizes):
        return  # a few numbers here and there say nothing
    for note, own in zip(notes, sizes, strict=True):
        if own >= size:
            text = axes.text(note.x, note.y, note.text, fontsize=size, color=note.ink, ha="center", zorder=5)
            text.set(va="center_baseline", path_effects=[withStroke(linewidth=2, foreground=note.ground)])


def _size(letters: int, room: float) -> float:
    """Font size at which so many digits fit into `room` points, at most 8."""
    return min(8.0, (room - 2) / (0.64 * letters))


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    every = _every(len(names), MAX_ROWS)
    axes.set_yticks([row + 0.5 for row in range(0, len(names), every)], names[::every], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("request.answer" if _what(names) == "answer" else "request", fontsize=9)


def _name_columns(axes: Axes, chosen: Sequence[int], by: str) -> None:
    if by == "step":
        every = _every(len(chosen), 40)
        axes.set_xticks([c + 0.5 for c in range(0, len(chosen), every)], [str(i) for i in chosen[::every]], fontsize=7)
    axes.set_xlabel("step" if by == "step" else "time, ms", fontsize=9)


def _every(number: int, most: int) -> int:
    """A round distance at which `number` things get `most` names at most."""
    return next(
        step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if number <= step * most
    )


def _what(names: Iterable[str]) -> str:
    return "answer" if any("." in name for name in names) else "request"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _swatch(face: str, edge: str, hatch: str = "") -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=face, edgecolor=edge, hatch=hatch or None)


def _mark(marker: str, colour: str, size: float) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=marker, color=colour, markersize=size, markeredgewidth=1.5, linewidth=0)


def _legend(figure: Figure, entries: Mapping[str, Any]) -> None:
    """`entries`: what a swatch, a mark or several of them on top of each other mean."""
    handles, meanings = list(entries.values()), list(entries)
    figure.legend(handles, meanings, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _pale(colour: str) -> str:
    return "#" + "".join(f"{(value + 4 * 255) // 5:02X}" for value in _rgb(colour))


def _ink(colour: str) -> str:
    """White on dark colours, black on light ones."""
    red, green, blue = _rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 125 else "black"
