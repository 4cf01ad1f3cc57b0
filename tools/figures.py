"""Draw figures/*.png from rvllm/recorded/*.json: python tools/figures.py [--check]

Each PNG carries the SHA-256 of the data it was drawn from; --check compares it with today's data and draws nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

from rvllm import plots

FIGURES = Path(__file__).resolve().parents[1] / "figures"


def data_sha256(names: tuple[str, ...]) -> str:
    """One hash over the names and contents of several files of rvllm/recorded."""
    digest = hashlib.sha256()
    for name in names:
        content = (plots.RECORDED / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def text_chunks(png: bytes) -> Iterator[tuple[str, str]]:
    """The texts that a PNG carries: chunks `tEXt`, a key and a value with a zero byte between."""
    position = 8
    while position < len(png):
        length, kind = struct.unpack_from(">I4s", png, position)
        if kind == b"tEXt":
            key, _, value = png[position + 8 : position + 8 + length].partition(b"\0")
            yield key.decode("latin-1"), value.decode("latin-1")
        position += length + 12


def is_current(name: str, figure: plots.Recorded) -> bool:
    """Whether a figure was drawn from the data that is there now."""
    path = FIGURES / f"{name}.png"
    return path.is_file() and dict(text_chunks(path.read_bytes())).get("Data-SHA256") == data_sha256(figure.files)


def draw(name: str, figure: plots.Recorded) -> None:
    """Draw one figure."""
    records = [plots.load(file) for file in figure.files]
    plots.save_png(figure.draw(records), FIGURES / f"{name}.png", data_sha256(figure.files))


def main(argv: list[str] | None = None) -> int:
    """Draw all figures, or with --check name those that are not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 if a figure is not of today's data")
    arguments = parser.parse_args(argv)
    if not arguments.check:
        for name, figure in plots.BENCH_FIGURES.items():
            draw(name, figure)
    stale = [name for name, figure in plots.BENCH_FIGURES.items() if not is_current(name, figure)]
    for name in stale:
        print(f"figures/{name}.png: not drawn from the data in rvllm/recorded; run: python tools/figures.py")
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
