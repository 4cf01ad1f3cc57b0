"""Write the generated part of README.md from recorded data: python tools/readme.py [--check]"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- part1:begin -->\n", "<!-- part1:end -->\n"


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


def generated(readme: str, record: dict[str, Any]) -> str:
    """README with the part between the markers made anew."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}{part1_table(record)}{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Rewrite README.md, or with --check say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if README.md is not current")
    arguments = parser.parse_args(argv)
    path = ROOT / "README.md"
    record = json.loads((ROOT / "figures" / "data" / "part1_cpu.json").read_text(encoding="utf-8"))
    old = path.read_text(encoding="utf-8")
    new = generated(old, record)
    if arguments.check and new != old:
        print("README.md: its generated part is not current; run: python tools/readme.py")
        return 1
    if not arguments.check:
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
