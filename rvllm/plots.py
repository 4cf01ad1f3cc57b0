"""Figures, drawn from recorded data alone: nothing here measures, and nothing here is typed in.

A record is what `rvllm bench --json` writes, as a dict. Every series says what was measured, by whom, on which card
and when; every title is a finding, computed from the records that the figure shows.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rvllm.figure_style import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION, PlotError, new_figure
from rvllm.trace_plots import block_pool as block_pool  # pictures of traces, from here too
from rvllm.trace_plots import timeline as timeline
from rvllm.trace_plots import tokens_computed as tokens_computed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]
Point = tuple[float, float]

RECORDED = Path(__file__).with_name("recorded")  # the folder of what was measured, a part of the package

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))


# Style, shared by all figures


def new_axes(width: float = 6.8, height: float = 4.0) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, in inches."""
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    return figure, axes


def set_title(axes: Axes, finding: str) -> None:
    """The finding above the figure, in lines that fit."""
    axes.set_title(textwrap.fill(finding, 72), fontsize=10, loc="left")


def legend_below(figure: Figure, axes: Axes) -> None:
    """One line for each series, below the axes: labels that name their source are long."""
    handles, labels = axes.get_legend_handles_labels()
    wrapped = [textwrap.fill(label, 108, subsequent_indent="    ") for label in labels]
    figure.legend(handles, wrapped, loc="outside lower left", fontsize=7.5, frameon=False, handlelength=4)


def alt_text(figure: Figure) -> str:
    """What a figure shows, for those who can't see it: the axes, the finding, the series."""
    axes = figure.axes[0]
    finding = axes.get_title(loc="left").replace("\n", " ")
    series = "; ".join(axes.get_legend_handles_labels()[1])
    return f"{axes.get_ylabel()} against {axes.get_xlabel()}. {finding}. Series: {series}."


def save_png(figure: Figure, path: Path, data_sha256: str) -> None:
    """Write a PNG that carries the hash of the data it was drawn from; the same figure gives the same bytes."""
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None, "Data-SHA256": data_sha256})


# Recorded data


def load(source: str | Path | Record) -> Record:
    """A record: as it is, from a path, or by its name among the recorded data that the package carries."""
    if isinstance(source, dict):
        return source
    path = source if isinstance(source, Path) else RECORDED / source
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise PlotError(f"recorded data {path}: can't be read ({error})") from error


def short_name(record: Record) -> str:
    """The engine with what tells its records apart: version, variant, type of the weights."""
    version = next((v.split()[0] for k, v in record["versions"].items() if k == record["engine"].lower()), "")
    variant = record.get("variant") or ""
    detail = "" if record["engine"] == "rvllm" else record["model"]["type"]
    return " ".join(filter(None, [record["engine"], "" if record["engine"] == "rvllm" else version, detail, variant]))


def origin(record: Record) -> str:
    """Card, date, and who measured."""
    return f"{record['card']}, {record.get('date') or 'no date'}, by {record.get('measured_by', 'this project')}"


def series_label(record: Record) -> str:
    """What a legend says of a record."""
    model = f", {record['model']['name']} {record['model']['type']}" if record["engine"] == "rvllm" else ""
    return f"{short_name(record)}{model} ({origin(record)})"


def points(record: Record, key: str, scale: float = 1.0) -> list[Point]:
    """(batch, value) of the rows that have a value, by batch; the row with texts is another measurement."""
    rows = [row for row in record["rows"] if row.get(key) is not None and not row.get("text")]
    return sorted((row["batch"], row[key] * scale) for row in rows)


# Benchmarks: one value against the batch size

ENGINE_COLOURS = {
    "rvllm": BLUE,
    "rvllm (Rust, original)": BLACK,
    "llama.cpp": GREEN,
    "vLLM": VERMILION,
    "transformers": PURPLE,
}


def styles(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A colour for each engine, a line style for each of its records, a marker for each series."""
    seen: dict[str, int] = {}
    result = []
    for i, record in enumerate(records):
        engine = record["engine"]
        seen[engine] = seen.get(engine, -1) + 1
        dash = DASHES[seen[engine] % len(DASHES)]
        result.append(
            {
                "color": ENGINE_COLOURS.get(engine, ORANGE),
                "linestyle": dash,
                "marker": MARKERS[i % len(MARKERS)],
                "markersize": 5,
                "linewidth": 1.5,
            }
        )
    return result


def against_batch(
    records: Sequence[Record], key: str, unit: str, finding: str, scale: float = 1.0, floors: bool = False
) -> Figure:
    """Draw one key of all records against the batch size, both axes in powers; dotted, the floors of a step."""
    drawn = [(record, style) for record, style in zip(records, styles(records), strict=True) if points(record, key)]
    if not drawn:
        raise PlotError(f"no record has {key}")
    figure, axes = new_axes(height=3.7 + 0.17 * len(drawn))
    for record, style in drawn:
        axes.plot(*zip(*points(record, key, scale), strict=True), label=series_label(record), **style)
    for record, style in drawn:
        if floors and (floor := step_floor(record)):
            label = f"floor of {short_name(record)}: its bytes at the card's measured rate ({origin(record)})"
            axes.plot(*zip(*floor, strict=True), label=label, **style | {"linestyle": ":", "linewidth": 2.5})
    finish_axes(axes, [batch for record, _ in drawn for batch, _ in points(record, key)], unit)
    set_title(axes, finding)
    legend_below(figure, axes)
    return figure


def finish_axes(axes: Axes, batches: Iterable[float], unit: str) -> None:
    """Powers on both axes, written as plain numbers, with the batch sizes that were measured below."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted(set(batches))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.minorticks_off()
    axes.set_xlabel("sequences together (batch size)", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)


@dataclass(frozen=True)
class Value:
    """One number of a record, with where it stands."""

    record: Record
    batch: float
    value: float


def values(records: Iterable[Record], key: str, scale: float = 1.0) -> list[Value]:
    """All numbers of a key."""
    found = [Value(record, *point) for record in records for point in points(record, key, scale)]
    if not found:
        raise PlotError(f"no record has {key}")
    return found


def at_smallest_batch(found: list[Value]) -> list[Value]:
    """Those at the smallest batch size that occurs."""
    smallest = min(v.batch for v in found)
    return [v for v in found if v.batch == smallest]


def own(found: Iterable[Value], card: str) -> list[Value]:
    """Those of this engine on a card."""
    return [v for v in found if v.record["engine"] == "rvllm" and v.record["card"] == card]


def beside_own(best: Value, found: list[Value], unit: str, pick: Callable[..., Value]) -> str:
    """A value with its unit, and behind it this engine's own on the same card, if that is another."""
    mine = own(found, best.record["card"])
    chosen = pick(mine, key=lambda v: v.value) if mine else best
    text = f"{number(best.value)} {unit} at batch {best.batch}"
    if chosen.record is best.record:
        return text
    return f"{text}; {short_name(chosen.record)}: {number(chosen.value)} at batch {chosen.batch}"


def number(value: float) -> str:
    """Three digits, or a whole number."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def throughput_finding(records: Sequence[Record]) -> str:
    """Who generates most tokens per second."""
    found = values(records, "total_tok_s")
    best = max(found, key=lambda v: v.value)
    return f"{short_name(best.record)} reaches {beside_own(best, found, 'tokens/s', max)}"


def throughput(records: Sequence[Record]) -> Figure:
    """Tokens per second of all sequences together, prompts included in the time."""
    return against_batch(records, "total_tok_s", "generated tokens per second", throughput_finding(records))


def step_floor(record: Record) -> list[Point]:
    """(batch, ms) that reading a step's bytes takes at the card's measured rate."""
    rows = [r for r in record["rows"] if r.get("bandwidth_share") and not r.get("text")]
    return sorted((r["batch"], r["decode_ms_per_step"] * r["bandwidth_share"]) for r in rows)


def step_time_finding(records: Sequence[Record]) -> str:
    """How far a step is from its floor; without a floor, whose step is the shortest."""
    if any(map(step_floor, records)):
        share = at_smallest_batch(values(records, "bandwidth_share"))[0]
        name = short_name(share.record)
        return f"At batch {share.batch}, reading its bytes is {share.value:.1%} of what a step of {name} takes"
    best = min(at_smallest_batch(values(records, "decode_ms_per_step")), key=lambda v: v.value)
    return f"Shortest step at batch {best.batch}: {short_name(best.record)}, {number(best.value)} ms"


def step_time(records: Sequence[Record]) -> Figure:
    """Milliseconds of a decode step, and dotted the time that reading its bytes takes."""
    finding = step_time_finding(records)
    return against_batch(records, "decode_ms_per_step", "ms for a decode step", finding, floors=True)


def first_token_finding(records: Sequence[Record]) -> str:
    """Who answers first."""
    found = at_smallest_batch(values(records, "first_token_ms"))
    best = min(found, key=lambda v: v.value)
    return f"First token: {short_name(best.record)} after {beside_own(best, found, 'ms', min)}"


def first_token(records: Sequence[Record]) -> Figure:
    """Milliseconds until all sequences of a batch have their first token."""
    return against_batch(records, "first_token_ms", "ms to the first token of all", first_token_finding(records))


def bandwidth_share_finding(records: Sequence[Record]) -> str:
    """The best share of the card's rate, and the worst."""
    found = values(records, "bandwidth_share", 100)
    ends = [max(found, key=lambda v: v.value), min(found, key=lambda v: v.value)]
    best, worst = (f"{number(v.value)} % ({short_name(v.record)}, batch {v.batch})" for v in ends)
    return f"A step uses between {worst} and {best} of the rate at which memory can be read"


def bandwidth_share(records: Sequence[Record]) -> Figure:
    """Bytes that a step must read, per second, as a share of the rate at which the card was seen to read."""
    unit = "% of the card's measured read rate"
    return against_batch(records, "bandwidth_share", unit, bandwidth_share_finding(records), 100)


def memory_finding(records: Sequence[Record]) -> str:
    """How memory grows with the batch, where it is largest."""
    found = values(records, "peak_memory_bytes", 1e-9)
    most = max(found, key=lambda v: v.value)
    least = min((v for v in found if v.record is most.record), key=lambda v: v.batch)
    growth = f"{number(least.value)} GB at batch {least.batch}, {number(most.value)} GB at batch {most.batch}"
    return f"Peak memory of {short_name(most.record)} on {most.record['card']}: {growth}"


def memory(records: Sequence[Record]) -> Figure:
    """Peak memory: weights, cache and workspace."""
    return against_batch(records, "peak_memory_bytes", "GB at the peak", memory_finding(records), 1e-9)


def roofline(cards: dict[str, tuple[float, float]], work: dict[int, tuple[float, float]]) -> Figure:
    """Steps a second that each card allows at most, against the batch; a bend where arithmetic takes over.

    cards: name -> (bytes a second, operations a second).   work: batch -> (bytes, operations) of a step.
    """
    figure, axes = new_axes()
    for i, (card, (rate, peak)) in enumerate(cards.items()):
        for j, kind in enumerate(("memory", "arithmetic")):
            limit = (rate, peak)[j]
            sequences = [batch * limit / work[batch][j] for batch in work]
            line = axes.plot(list(work), sequences, ("-", "--")[j], label=f"{card}: what its {kind} allows")[0]
            line.set(color=(VERMILION, BLUE)[i % 2], marker=MARKERS[2 * i + j])
    finish_axes(axes, work, "tokens a second, at most")
    set_title(axes, "The lower of a card's two lines is its roof")
    legend_below(figure, axes)
    return figure


# One step taken apart (notebook 14)


STEP_PARTS = {  # operations whose names begin so
    "card: products with weights": ("linear",),
    "card: attention, in pieces": ("scores", "mask_add", "softmax", "weighted_values", "transpose_axes12"),
    "card: cache, write and gather": ("kv_write", "kv_gather"),
    "card: norms, rope, additions": ("rmsnorm", "rope", "residual_add", "silu_mul", "embedding", "last_row"),
}


def step_parts(profile: Record) -> dict[str, float]:
    """Milliseconds of each part of a profiled step, in order; what nothing else explains is waiting for launches."""
    operations = profile["operations"]
    card = {
        part: sum(op["device_us"] for op in operations if op["name"].startswith(names)) / 1e3
        for part, names in STEP_PARTS.items()
    }
    host = {"host: prepare and upload": profile["prepare_ms"], "host: logits down": profile["download_ms"]}
    waits = profile["wall_ms"] - sum(card.values()) - sum(host.values())
    return {**card, "card waits for launches": waits, **host, "host: choose the token": profile["sample_ms"]}


def waterfall_finding(records: Sequence[Record]) -> str:
    """How much of a step the card works."""
    profile = records[0]["profiles"][0]
    parts = step_parts(profile)
    work = sum(ms for part, ms in parts.items() if part.startswith("card:"))
    total = sum(parts.values())
    return f"At batch {profile['batch']} the card works for {number(work)} of a step's {number(total)} ms"


def waterfall(records: Sequence[Record]) -> Figure:
    """Where the milliseconds of one decode step go, a panel for each profile; dotted: reading the step's bytes."""
    record = records[0]
    figure = new_figure(7.6, 3.6)
    panels = figure.subplots(1, len(record["profiles"]), sharey=True, squeeze=False)[0]
    for axes, profile in zip(panels, record["profiles"], strict=True):
        draw_waterfall(axes, profile)
        floor_ms = profile["bytes_per_step"] / record["read_gb_s"] / 1e6
        label = f"dotted: reading the step's bytes at the measured rate; {series_label(record)}"
        axes.axvline(floor_ms, color=BLACK, linestyle=":", label=label)
    panels[0].set_ylabel("part of the step", fontsize=8)
    figure.suptitle(waterfall_finding(records), fontsize=10)
    legend_below(figure, panels[0])
    return figure


def draw_waterfall(axes: Axes, profile: Record) -> None:
    """Each part begins where the one above it ends."""
    left, parts = 0.0, step_parts(profile)
    for row, (part, ms) in enumerate(parts.items()):
        colour, hatch = (BLUE, "") if part.startswith("card:") else (ORANGE, "///")
        axes.barh(row, ms, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        axes.text(left + max(ms, 0), row, f" {ms:.2f}", va="center", fontsize=7)
        left += ms
    axes.set(xlim=(0, left * 1.2), xlabel="ms")
    axes.set_yticks(range(len(parts)), list(parts))
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.tick_params(labelsize=8)
    axes.set_title(f"batch {profile['batch']}: {left:.1f} ms", fontsize=9)


@dataclass(frozen=True)
class Recorded:
    """A figure of figures/: how it is drawn, the sentence that says what it shows, and from which files."""

    draw: Callable[[Sequence[Record]], Figure]
    finding: Callable[[Sequence[Record]], str]
    files: tuple[str, ...]


# Sweeps at SmolLM2-360M's shape: the original on a T4, and others on an H200.
COMPARED = (
    "t4_original.json",
    "h200_transformers_float16_eager.json",
    "h200_llama.cpp_q8_0.json",
    "h200_llama.cpp_f16.json",
    "h200_vllm_bf16_in_process.json",
    "h200_rvllm_f32.json",
    "h200_rvllm_graph.json",
)
OWN = ("h200_rvllm_graph.json", "h200_rvllm_f32.json", "cpu_rvllm.json")
# The original's first-token times are those of one prompt, as its totals show (notebook 13, section 3).
COMPARED_FIRST = tuple(name for name in COMPARED if name != "t4_original.json")
BENCH_FIGURES = {
    "throughput": Recorded(throughput, throughput_finding, COMPARED),
    "step_time": Recorded(step_time, step_time_finding, COMPARED),
    "first_token": Recorded(first_token, first_token_finding, COMPARED_FIRST),
    "bandwidth_share": Recorded(bandwidth_share, bandwidth_share_finding, OWN),
    "memory": Recorded(memory, memory_finding, OWN),
    "waterfall": Recorded(waterfall, waterfall_finding, ("h200_profile_f32.json",)),
}
