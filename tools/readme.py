"""Write the generated part of README.md from recorded data: python tools/readme.py [--check]"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rvllm import plots

ROOT = Path(__file__).resolve().parents[1]
PART1 = "<!-- part1:begin -->\n", "<!-- part1:end -->\n"
PART2 = "<!-- part2:begin -->\n", "<!-- part2:end -->\n"
PART3 = "<!-- part3:begin -->\n", "<!-- part3:end -->\n"
BENCH = "<!-- bench:begin -->\n", "<!-- bench:end -->\n"
PART4 = "<!-- part4:begin -->\n", "<!-- part4:end -->\n"
SHOWN = ("throughput", "step_time")  # of the figures, those that matter most


def part1_table(record: dict[str, Any]) -> str:
    """The CPU measurements of part I as a Markdown table."""
    step = record["decode_ms"]["step"]
    prompt = record["prefill_ms"]["128"]
    quickest = min(ms for name, ms in record["decode_ms"].items() if name != "step")
    rows = [
        ("decode, one sequence", f"{step:.1f} ms a token, {1000 / step:.0f} tokens/s"),
        (
            "its matrices alone, fastest layout",
            f"{quickest:.1f} ms; the step takes {record['decode_ratio']:.2f} times that",
        ),
        (
            "weights read in a step",
            f"{record['bytes_per_step'] / 1e6:.0f} MB, {record['bandwidth_share']:.0%} of one huge product's rate",
        ),
        ("prompt of 128 tokens", f"{prompt:.0f} ms in one pass, {128_000 / prompt:.0f} tokens/s"),
        ("opening the file", f"{record['open_ms']:.0f} ms"),
        ("from an empty process to the first token", f"{record['first_token_s']:.1f} s"),
        ("peak anonymous memory", f"{record['peak_anonymous_bytes'] / 1e6:.0f} MB"),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    source = f"{record['model']['name']} ({record['model']['type']}) on {record['card']}, {record['date']}; {versions}."
    return "\n".join([source, "", "| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows), ""])


def part2_table(record: dict[str, Any]) -> str:
    """The GPU measurements of part II as a Markdown table."""
    versions = record["versions"]
    model, cupy = record["model"], versions["cupy"]
    source = f"{model['name']} ({model['type']}) on {record['card']}, {record['date']}; CuPy {cupy}. "
    source += f"Prompts of {record['prompt_tokens']} tokens."
    head = "| sequences | decode, ms a step | decode, tokens/s | prefill, ms | prefill, tokens/s |"
    rows = [
        f"| {row['batch']} | {row['decode_ms_per_step']:.1f} | {row['decode_tok_s']:,.0f} "
        f"| {row['prefill_ms']:.1f} | {row['prefill_tok_s']:,.0f} |"
        for row in record["rows"]
    ]
    return "\n".join([source, "", head, "|--:|--:|--:|--:|--:|", *rows, ""])


def part3_table(records: list[dict[str, Any]]) -> str:
    """What the engine costs and what it saves, a column for each device."""
    model = records[0]["model"]
    source = "; ".join(f"{record['card']}, {record['date']}" for record in records)
    rows = [[name, *(value(record) for record in records)] for name, value in PART3_ROWS.items()]
    lines = [f"| | {' | '.join(record['device'] for record in records)} |", "|---|" + "--:|" * len(records)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"{model['name']} ({model['type']}); {source}.", "", *lines, ""])


def host_step(record: dict[str, Any], key: str) -> str:
    """Milliseconds of a part of the host's work at the largest number of sequences."""
    return f"{record['host_step'][-1][key]:.2f} ms"


def prefix_hit(record: dict[str, Any]) -> str:
    """First token without and with the longest shared beginning that was measured."""
    hit = record["prefix_hit"][-1]
    times = [f"{hit[turn]['first_token_ms']:,.0f} ms" for turn in ("first", "second")]
    counts = [f"{hit[turn]['computed_tokens']:,}" for turn in ("first", "second")]
    return f"{counts[0]} tokens: {times[0]}; {counts[1]}: {times[1]}"


PART3_ROWS = {
    "scheduling a step of 256 sequences": lambda record: host_step(record, "schedule_ms"),
    "all of the host's work in it, but for the search of the vocabulary": lambda record: host_step(record, "host_ms"),
    "first token of a prompt, and of the next one with the same beginning": prefix_hit,
    **{
        f"32 requests, {name}": lambda record, name=name: f"{record['together']['output_tok_s'][name]:,.0f} tokens/s"
        for name in ("one after the other", "in groups of 8", "all at once")
    },
}


def bench_block() -> str:
    """The figures that matter most, and the table behind them."""
    images = []
    for name in SHOWN:
        figure = plots.BENCH_FIGURES[name]
        finding = figure.finding([plots.load(file) for file in figure.files])
        images += [f"![{finding}](figures/{name}.png)", "", f"{finding}.", ""]
    return "\n".join([*images, bench_table([plots.load(file) for file in plots.COMPARED])])


def bench_table(records: list[dict[str, Any]]) -> str:
    """Total tokens per second, and milliseconds of a decode step, of every engine at every batch size."""
    batches = sorted({row["batch"] for record in records for row in record["rows"]})
    head = " | ".join(f"{plots.short_name(record)}, {record['card']}" for record in records)
    lines = [f"| batch | {head} |", "|--:|" + "--:|" * len(records)]
    for batch in batches:
        cells = " | ".join(bench_cell(record, batch) for record in records)
        lines.append(f"| {batch} | {cells} |")
    sources = [f"{plots.short_name(record)}: {plots.origin(record)}; {record_source(record)}" for record in records]
    about = "Tokens generated a second, all sequences together, and in brackets ms for a decode step:"
    return "\n".join([about, "", *lines, "", *(f"- {source}" for source in sources), ""])


def bench_cell(record: dict[str, Any], batch: int) -> str:
    """`678 (30.1)`; a dash where a batch size was not measured."""
    total, step = (dict(plots.points(record, key)).get(batch) for key in ("total_tok_s", "decode_ms_per_step"))
    return "-" if total is None or step is None else f"{total:,.0f} ({step:.3g})"


def record_source(record: dict[str, Any]) -> str:
    """How a record came about: as it says itself, else by `rvllm bench`."""
    return ", ".join(filter(None, [record.get("how", "`rvllm bench`"), record.get("source")]))


def part4_table(sweeps: list[dict[str, Any]], requests: list[dict[str, Any]]) -> str:
    """What the fast path reaches: a column for each sweep and the run with requests that belongs to it."""
    rows = [[f"decode, {count(batch, 'sequence')}", *speeds(sweeps, batch)] for batch in (1, 8, 32, 64, 256)]
    for batch in (1, 32, 256):
        times = [f"{dict(plots.points(sweep, 'first_token_ms'))[batch]:.1f} ms" for sweep in sweeps]
        rows.append([f"first tokens of {count(batch, 'prompt')} of {sweeps[0]['prompt_tokens']} tokens", *times])
    lengths = "{:,} to {:,}".format(*requests[0]["output_lengths"])
    about = f"{requests[0]['requests']} requests of {lengths} random tokens, all at once"
    rows.append([about, *(f"{record['output_tok_s']:,.0f} tokens/s" for record in requests)])
    head = [f"{record['card']}, {record['date']}{', again' * (number > 0)}" for number, record in enumerate(sweeps)]
    lines = [f"| | {' | '.join(head)} |", "|---|" + "--:|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, ""])


def speeds(sweeps: list[dict[str, Any]], batch: int) -> list[str]:
    """Decoded tokens per second in each sweep."""
    return [f"{dict(plots.points(sweep, 'decode_tok_s'))[batch]:,.0f} tokens/s" for sweep in sweeps]


def count(number: int, noun: str) -> str:
    """`1 prompt`, `32 prompts`."""
    return f"{number} {noun}{'s' * (number > 1)}"


def generated(readme: str, begin: str, end: str, text: str) -> str:
    """README with the part between two markers made anew."""
    before, rest = readme.split(begin)
    return f"{before}{begin}{text}{end}{rest.split(end)[1]}"


def main(argv: list[str] | None = None) -> int:
    """Rewrite README.md, or with --check say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if README.md is not current")
    arguments = parser.parse_args(argv)
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = generated(old, *PART1, part1_table(plots.load("part1_cpu.json")))
    new = generated(new, *PART2, part2_table(plots.load("part2_h200.json")))
    new = generated(new, *PART3, part3_table([plots.load("part3_cpu.json"), plots.load("part3_h200.json")]))
    new = generated(new, *BENCH, bench_block())
    runs = ("", "_again")
    sweeps = [plots.load(f"h200_rvllm_graph{run}.json") for run in runs]
    new = generated(
        new, *PART4, part4_table(sweeps, [plots.load(f"h200_rvllm_graph_requests{run}.json") for run in runs])
    )
    if arguments.check and new != old:
        print("README.md: its generated part is not current; run: python tools/readme.py")
        return 1
    if not arguments.check:
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
