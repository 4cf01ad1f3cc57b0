"""Engine traces as data and as pictures: what a cell, a block and a bar stand for; the drawing itself is looked at."""

import io
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rvllm import trace_plots as plots
from rvllm.figure_style import PlotError
from rvllm.llm import LLM
from rvllm.sampling import SamplingParams
from rvllm.trace import StepRecord
from rvllm.trace_plots import Block, Cell
from tests import toy


def record(computed, prompts=None, tables=None, cached=(), waiting=(), preempted=(), start=0.0):
    prompts = prompts or dict.fromkeys(computed, 6)
    tables = dict.fromkeys(computed, ()) if tables is None else tables
    tables = {label: list(table) for label, table in tables.items()}
    return StepRecord(start, start + 0.01, computed, prompts, tables, list(cached), list(waiting), list(preempted))


def trace_of(*steps, num_blocks=4):
    return SimpleNamespace(steps=list(steps), num_blocks=num_blocks)


def generate(path, lengths, max_tokens, shared=0, n=1, **options):
    """A run of the toy model on random prompts whose first `shared` tokens are the same."""
    rng = np.random.default_rng(0)
    start = rng.integers(3, 300, shared).tolist()
    prompts = [start + rng.integers(3, 300, length).tolist() for length in lengths]
    llm = LLM(path, device="cpu", block_size=4, trace=True, **options)
    llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n, temperature=n - 1, seed=1))
    return llm


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture(scope="module")
def runs(path):
    """Tight with preemptions, shared beginnings, several answers, chunks."""
    return {
        "tight": generate(path, [6, 9, 5, 7], 11, num_blocks=9, max_num_batched_tokens=16),
        "shared": generate(path, [5, 3, 7, 2], 6, shared=16, num_blocks=40, max_num_batched_tokens=24),
        "answers": generate(path, [13, 6], 5, n=3, num_blocks=24, max_num_batched_tokens=8),
        "chunks": generate(path, [5, 20, 3], 4, num_blocks=24, max_num_batched_tokens=8, enable_prefix_caching=False),
    }


# Cells ----------------------------------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_then_its_answer():
    steps = [record({"0": (0, 4)}, waiting=["1"]), record({"0": (4, 2), "1": (0, 1)}), record({"0": (6, 1)})]
    assert plots.cells(steps) == [
        Cell(0, "1", "waiting"),
        Cell(0, "0", "prefill", prompt=4),
        Cell(1, "0", "prefill", prompt=2),
        Cell(1, "1", "prefill", prompt=1),
        Cell(2, "0", "decode", answer=1),
    ]


def test_preempted_then_computed_again_behind_cached_tokens():
    steps = [
        record({"0": (0, 6)}),
        record({"0": (6, 1)}),
        record({"0": (7, 1)}),
        record({}, waiting=["0"], preempted=["0"]),
        record({"1": (0, 1)}, waiting=["0"]),
        record({"0": (4, 3)}),
        record({"0": (7, 2)}),
        record({"0": (9, 1)}),
    ]
    mine = [cell for cell in plots.cells(steps) if cell.label == "0"]
    assert [cell.kind for cell in mine[3:]] == ["preempted", "waiting", "again", "again", "decode"]
    assert mine[5:7] == [Cell(5, "0", "again", again=3, cached=4), Cell(6, "0", "again", again=1, answer=1)]
    assert plots.sums(mine) == {"0": {"prefill": 6, "again": 4, "decode": 4, "cached": 4}}


def test_a_prompt_preempted_half_way_continues_where_it_was_new():
    steps = [record({"0": (0, 3)}), record({}, waiting=["0"], preempted=["0"]), record({"0": (0, 6)})]
    assert plots.cells(steps)[-1] == Cell(2, "0", "again", prompt=3, again=3)


def test_tokens_found_at_the_first_start():
    assert plots.cells([record({"0": (4, 2)})]) == [Cell(0, "0", "prefill", prompt=2, cached=4)]


def test_a_failed_step_lets_everybody_start_over_without_a_word():
    steps = [record({"0": (0, 6)}), record({"0": (6, 1)}), record({"0": (4, 4)})]
    assert plots.cells(steps)[-1] == Cell(2, "0", "again", again=3, answer=1, cached=4)


def test_who_holds_blocks_and_computes_nothing_waits():
    assert plots.cells([record({}, tables={"0": [1]})]) == [Cell(0, "0", "waiting")]


def test_labels_in_the_order_of_their_numbers():
    steps = [record({"10": (0, 1), "2.1": (0, 1)}), record({"2.0": (0, 1)}, waiting=["3"])]
    assert plots.labels(steps) == ["2.0", "2.1", "3", "10"]


@pytest.mark.parametrize("name", ["tight", "shared", "answers", "chunks"])
def test_cells_agree_with_what_the_engine_counted(runs, name):
    metrics, trace = runs[name].engine.metrics, runs[name].trace
    found = plots.cells(trace.steps)
    assert sum(cell.computed for cell in found) == metrics.num_computed_tokens
    assert sum(cell.cached for cell in found) == metrics.num_cached_tokens
    assert sum(cell.kind == "preempted" for cell in found) == metrics.num_preemptions
    assert len({(cell.step, cell.label) for cell in found}) == len(found)
    for own in plots.sums(found).values():  # the last token of an answer is never computed
        assert own["prefill"] > 0 and own["decode"] > 0
    assert (metrics.num_preemptions > 0) == (name == "tight")


# Blocks ---------------------------------------------------------------------------------------------------------------


def test_owners_former_owners_and_what_can_be_found():
    steps = [
        record({}, tables={"0": [0, 1], "1": [0, 2]}),
        record({}, tables={"1": [0, 2]}, cached=[0, 1]),
        record({}, tables={}, cached=[0]),
    ]
    free = Block()
    assert plots.blocks(steps, 4) == [
        [Block(("0", "1")), Block(("0",)), Block(("1",)), free],
        [Block(("1",), findable=True), Block((), True, ("0",)), Block(("1",)), free],
        [Block((), True, ("1",)), Block((), False, ("0",)), Block((), False, ("1",)), free],
    ]


def test_blocks_agree_with_the_tables(runs):
    trace = runs["answers"].trace
    for step, row in zip(trace.steps, plots.blocks(trace.steps, trace.num_blocks), strict=True):
        assert sum(len(block.owners) for block in row) == sum(map(len, step.block_tables.values()))


def test_a_long_trace_is_thinned_around_its_preemptions():
    steps = [record({"0": (0, 1)}, preempted=["1"] if i in (3, 77) else []) for i in range(200)]
    chosen = plots._thinned(steps)
    assert len(chosen) == plots.MAX_ROWS and chosen == sorted(set(chosen)) and {3, 77} <= set(chosen)
    assert max(b - a for a, b in itertools.pairwise(chosen)) <= 6
    assert plots._thinned(steps[:7]) == list(range(7))
    assert len(plots._thinned([record({}, preempted=["0"])] * 100)) == plots.MAX_ROWS


def test_a_large_pool_shows_what_is_used():
    assert plots._columns([[Block()] * 48]) == 48
    assert plots._columns([[Block(("0",))] * 5 + [Block()] * 95]) == 5


# Drawing --------------------------------------------------------------------------------------------------------------


def test_boxes_that_touch_are_one():
    boxes = [(2.0, 0, 1.0, 1), (1.0, 0, 1.0, 1), (4.0, 0, 1.0, 1), (3.0, 1, 1.0, 1)]
    assert plots._joined(boxes) == [(1.0, 0, 2.0, 1), (4.0, 0, 1.0, 1), (3.0, 1, 1.0, 1)]


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (40, 1), (41, 2), (100, 5), (201, 10), (5000, 200)])
def test_round_distances_between_names(number, expected):
    assert plots._every(number, 40) == expected


def draw(trace, what):
    if what == "block_pool":
        return plots.block_pool(trace)
    return plots.tokens_computed({"one": trace}) if what == "tokens" else plots.timeline(trace, by=what)


def png(figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100, bbox_inches="tight")
    return data.getvalue()


@pytest.mark.parametrize("what", ["step", "time", "block_pool", "tokens"])
def test_the_same_trace_gives_the_same_png(runs, what):
    from matplotlib._pylab_helpers import Gcf

    trace, before = runs["tight"].trace, dict(Gcf.figs)
    first = png(draw(trace, what))
    assert first == png(draw(trace, what))
    assert 5_000 < len(first) < 100_000
    assert Gcf.figs == before


def test_titles_say_the_numbers(runs):
    steps = [record({"0": (0, 6), "1": (4, 2)}), record({"0": (6, 1)}, waiting=["1"], preempted=["1"])]
    title = plots.timeline(trace_of(*steps)).get_suptitle()
    assert title == "2 requests in 2 steps: 9 tokens computed, 4 found in the prefix cache, 1 preemption"
    title = plots.timeline(trace_of(*steps), steps=range(1, 2)).get_suptitle()
    assert title == "2 requests in 1 step: 1 token computed, 1 preemption"
    steps = [record({}, tables={"0": [0, 1], "1": [0]}), record({}, tables={"0": [0]})]
    assert plots.block_pool(trace_of(*steps)).get_suptitle() == (
        "Pool of 4 blocks in 2 steps: 2 in use at most, 1 shared at most"
    )
    assert "1 of 2 steps: 1 in use" in plots.block_pool(trace_of(*steps), steps=[1]).get_suptitle()
    assert plots.timeline(runs["answers"].trace).get_suptitle().startswith("6 answers in ")


def test_cells_show_their_tokens():
    trace = trace_of(record({"0": (4, 2), "1": (0, 33)}, prompts={"0": 6, "1": 33}), record({"0": (6, 1)}))
    grid, foot = plots.timeline(trace).axes
    assert sorted(text.get_text() for text in grid.texts) == ["+4", "2", "33"]
    assert [text.get_text() for text in foot.texts] == ["35", "1"]


def test_shared_blocks_name_their_owners():
    steps = [record({}, tables={"0": [0], "1": [0]}), record({}, tables={str(i): [0] for i in range(9)})]
    (axes,) = plots.block_pool(trace_of(*steps, num_blocks=24)).axes
    assert [text.get_text() for text in axes.texts] == ["0", "1", "×9"]


def test_hundreds_of_steps_and_requests_have_no_numbers():
    steps = [record({str(i): (k, 1) for i in range(60)}, prompts={str(i): 9 for i in range(60)}) for k in range(99)]
    assert not plots.timeline(trace_of(*steps)).axes[0].texts


# Errors ---------------------------------------------------------------------------------------------------------------


def test_wrong_choices_are_named(runs):
    trace = runs["chunks"].trace
    last = len(trace.steps) - 1
    with pytest.raises(PlotError, match="by: found 'day'; allowed: 'step', 'time'"):
        plots.timeline(trace, by="day")
    for steps in ([last + 1], [-1]):
        with pytest.raises(PlotError, match=rf"steps: found \[{steps[0]}\]; allowed: 0 to {last}"):
            plots.block_pool(trace, steps=steps)
    with pytest.raises(PlotError, match="steps: found none"):
        plots.timeline(trace, steps=range(0))
    with pytest.raises(PlotError, match="traces: found none"):
        plots.tokens_computed({})


@pytest.mark.parametrize("what", ["step", "time", "block_pool", "tokens"])
def test_an_empty_trace_is_refused(what):
    with pytest.raises(PlotError, match="holds no steps"):
        draw(trace_of(), what)


@pytest.mark.parametrize("what", ["step", "block_pool", "tokens"])
def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, what):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"pip install 'rvllm\[notebooks\]'"):
        draw(trace_of(record({"0": (0, 6)})), what)
