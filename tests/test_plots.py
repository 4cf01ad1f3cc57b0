"""Figures: every series names its source, titles are computed, PNGs are stable and carry the hash of their data."""

from __future__ import annotations

import builtins
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rvllm import plots
from tools import figures, readme

OURS = {
    "engine": "rvllm",
    "device": "cuda",
    "card": "NVIDIA H200",
    "date": "2026-12-01",
    "versions": {"numpy": "2"},
    "model": {"name": "SmolLM2-360M", "type": "Q8_0 as float32", "sha256": "random"},
    "variant": "f32",
    "rows": [
        {
            "batch": batch,
            "total_tok_s": 50.0 * batch,
            "decode_ms_per_step": 20.0,
            "first_token_ms": 25.0,
            "bandwidth_share": 0.02,
            "peak_memory_bytes": 2_000_000_000 + batch,
        }
        for batch in (1, 4)
    ],
}
PEER = copy.deepcopy(OURS) | {"engine": "vLLM", "versions": {"vllm": "0.22.0"}, "date": None, "measured_by": "somebody"}
for row in PEER["rows"]:
    row |= {"total_tok_s": row["total_tok_s"] * 10, "first_token_ms": 5.0}
    del row["bandwidth_share"], row["peak_memory_bytes"]


@pytest.fixture
def both() -> list[dict[str, Any]]:
    return [copy.deepcopy(PEER), copy.deepcopy(OURS)]


@pytest.mark.parametrize("name", plots.BENCH_FIGURES)
def test_every_series_names_source_card_and_date(name: str) -> None:
    recorded = plots.BENCH_FIGURES[name]
    records = [plots.load(file) for file in recorded.files]
    for drawn in (records, [*records, copy.deepcopy(PEER), copy.deepcopy(OURS)]):
        axes = recorded.draw(drawn).axes[0]
        origins = [plots.origin(record) for record in drawn]
        assert axes.lines
        for line in axes.lines:
            assert any(origin in line.get_label() for origin in origins), line.get_label()
    for record in records:
        assert record["card"] and ("date" in record) and (record["date"] or record["source"])


@pytest.mark.parametrize("draw", [plots.bandwidth_share, plots.memory, plots.step_time])
def test_our_own_series_name_source_card_and_date(draw: Any, both: list[dict[str, Any]]) -> None:
    for line in draw(both[1:]).axes[0].lines:
        assert "(NVIDIA H200, 2026-12-01, by this project)" in line.get_label()


def test_figures_and_readme_are_of_todays_data() -> None:
    assert figures.main(["--check"]) == 0
    assert readme.main(["--check"]) == 0


def test_a_figure_of_other_data_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for folder in (tmp_path, tmp_path / "data"):
        folder.mkdir(exist_ok=True)
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    monkeypatch.setattr(plots, "RECORDED", tmp_path / "data")
    recorded = plots.Recorded(plots.throughput, plots.throughput_finding, ("a.json",))
    monkeypatch.setattr(plots, "BENCH_FIGURES", {"throughput": recorded})
    (tmp_path / "data" / "a.json").write_text(json.dumps(OURS))
    assert figures.main(["--check"]) == 1
    assert figures.main([]) == 0
    assert figures.main(["--check"]) == 0
    (tmp_path / "data" / "a.json").write_text(json.dumps(OURS | {"date": "2026-12-02"}))
    assert figures.main(["--check"]) == 1
    assert "throughput.png: not drawn from the data" in capsys.readouterr().out


def test_the_same_figure_gives_the_same_bytes(both: list[dict[str, Any]], tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plots.save_png(plots.step_time(both), tmp_path / name, "0" * 64)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert dict(figures.text_chunks((tmp_path / "a.png").read_bytes())) == {"Data-SHA256": "0" * 64}


def test_titles_follow_the_data(both: list[dict[str, Any]]) -> None:
    assert plots.throughput_finding(both).endswith("reaches 2,000 tokens/s at batch 4; rvllm f32: 200 at batch 4")
    assert plots.throughput_finding(both[1:]) == "rvllm f32 reaches 200 tokens/s at batch 4"
    assert "is 2.0% of what a step of rvllm f32 takes" in plots.step_time_finding(both)
    assert plots.step_time_finding(both[:1]).startswith("Shortest step at batch 1: vLLM 0.22.0")
    assert plots.first_token_finding(both).endswith("after 5 ms at batch 1; rvllm f32: 25 at batch 1")
    both[0]["rows"][0]["first_token_ms"] = 50
    assert plots.first_token_finding(both) == "First token: rvllm f32 after 25 ms at batch 1"
    assert "2 GB at batch 1" in plots.memory_finding(both)
    assert "2 % (rvllm f32, batch 1)" in plots.bandwidth_share_finding(both)


def test_the_floor_is_the_share_of_a_step(both: list[dict[str, Any]]) -> None:
    assert plots.step_floor(both[1]) == [(1, pytest.approx(0.4)), (4, pytest.approx(0.4))]
    assert plots.step_floor(both[0]) == []
    labels = [line.get_label() for line in plots.step_time(both).axes[0].lines]
    assert [label.startswith("floor of rvllm f32") for label in labels] == [False, False, True]


def test_the_row_with_texts_is_left_out(both: list[dict[str, Any]]) -> None:
    both[1]["rows"].append(both[1]["rows"][1] | {"text": True, "total_tok_s": 1.0})
    assert plots.points(both[1], "total_tok_s") == [(1, 50.0), (4, 200.0)]


def test_series_differ_in_marker_and_colour_or_line(both: list[dict[str, Any]]) -> None:
    styles = plots.styles([*both, *both, *both])
    assert len({style["marker"] for style in styles}) == 6
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == 6


def test_alt_text_has_finding_axes_and_series(both: list[dict[str, Any]]) -> None:
    text = plots.alt_text(plots.throughput(both))
    assert text.startswith("generated tokens per second against sequences together (batch size). vLLM 0.22.0")
    assert "by somebody" in text and "no date" in text and "\n" not in text


def test_no_data_and_no_matplotlib_are_named(both: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(plots.PlotError, match="no record has peak_memory_bytes"):
        plots.memory(both[:1])
    with pytest.raises(plots.PlotError, match="can't be read"):
        plots.load(Path("/no/such.json"))
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(plots.PlotError, match="pip install"):
        plots.new_axes()


def test_the_roof_is_the_lower_of_two_lines() -> None:
    work = {1: (100.0, 10.0), 4: (100.0, 40.0)}
    figure = plots.roofline({"card": (1000.0, 50.0)}, work)
    memory, arithmetic = figure.axes[0].lines
    assert list(memory.get_ydata()) == [10, 40]
    assert list(arithmetic.get_ydata()) == [5, 5]
    assert "memory" in memory.get_label() and "arithmetic" in arithmetic.get_label()


def test_parts_of_a_step_add_up_to_it() -> None:
    profile = plots.load("h200_profile_f32.json")["profiles"][0]
    parts = plots.step_parts(profile)
    assert sum(parts.values()) == pytest.approx(profile["wall_ms"] + profile["sample_ms"])
    work = sum(ms for part, ms in parts.items() if part.startswith("card:"))
    assert work == pytest.approx(sum(op["device_us"] for op in profile["operations"]) / 1e3)
    assert parts["card waits for launches"] < profile["launching_ms"] < profile["wall_ms"]
