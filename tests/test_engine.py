"""The engine on the toy model: the same text whatever the company, aborts and faults at any moment, metrics, progress.

Unused cache cells hold NaN: whoever reads what it did not write has NaN logits, which sampling refuses.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import rvllm.engine
from rvllm import emulator, prefix_cache
from rvllm.cpu_model import DenseKVCache
from rvllm.engine import EngineMetrics, PromptError, Request
from rvllm.llm import LLM, TextStream
from rvllm.outputs import CompletionOutput, RequestOutput
from rvllm.sampling import LogitsError, ParameterError, SamplingParams
from rvllm.scheduler import check_invariants
from rvllm.step import make_step
from rvllm.trace import StepRecord
from tests import toy
from tests.test_llm import Script
from tests.test_oracle import NEAR_TIE, ORACLE, same_up_to_near_ties

DEVICE = os.environ.get("RVLLM_TEST_DEVICE", "emulator")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
HOT = {"temperature": 0.8, "seed": 3}
Job = tuple[int, list[int], SamplingParams]  # arrives before this step, prompt, parameters


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture(scope="module")
def make(path) -> Callable[..., LLM]:
    """An LLM on the CPU with NaN in its cache."""

    def make_llm(**options) -> LLM:
        llm = LLM(path, device="cpu", **options)
        llm.engine.cache.keys[:], llm.engine.cache.values[:] = np.nan, np.nan
        return llm

    return make_llm


@pytest.fixture(scope="module")
def alone(make) -> Callable[..., CompletionOutput]:
    """What a request says by itself, in one go, without a prefix cache."""
    llm = make(num_blocks=16, enable_prefix_caching=False)
    known: dict = {}

    def answer(prompt, params: SamplingParams = GREEDY) -> CompletionOutput:
        key = repr((prompt, params))
        if key not in known:
            known[key] = llm.generate(prompt, params)[0].outputs[0]
        return known[key]

    return answer


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def serve(llm: LLM, jobs: list[Job]) -> list[Request]:
    """Run jobs to their end, each added before the step of its arrival; the books are checked after every step."""
    engine = llm.engine
    requests: list[Request] = []
    finished: list[Request] = []
    for step in itertools.count():
        requests += [engine.add_request(prompt, params) for arrival, prompt, params in jobs if arrival == step]
        finished += engine.step()
        check_invariants(engine.scheduler)
        if len(requests) == len(jobs) and not engine.has_unfinished_requests:
            break
    assert sorted(r.request_id for r in finished) == sorted(r.request_id for r in requests)
    check_empty(llm)
    return requests


def check_empty(llm: LLM) -> None:
    """Nothing is left of any request."""
    scheduler = llm.engine.scheduler
    check_invariants(scheduler)
    assert (scheduler.running, list(scheduler.waiting), llm.engine.requests) == ([], [], {})
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert not any(scheduler.pool.ref_counts)


# What every engine must stand; tests/test_device_engine.py calls these too --------------------------------------------


def leave_streams_half_way(llm: LLM) -> tuple[str, TextStream]:
    """Of three streams one is closed and one just dropped: the text of the third, and the one that was closed."""
    keep, close, drop = (llm.stream(ids(6, seed), LONG) for seed in range(3))
    text = next(keep) + next(keep)
    next(close)
    close.close()
    next(drop)
    del drop
    return text + "".join(keep), close


LOSSES = ((2, LONG), (0, SamplingParams(max_tokens=1)), (0, LONG))  # steps before it is lost, what it asked for


def lose_a_stream(llm: LLM, monkeypatch, method: str, steps: int, params: SamplingParams) -> TextStream:
    """A stream dies in this method of the model, where garbage is collected; the other stream."""
    lost, kept = llm.stream(ids(9, 1), params), llm.stream(ids(6), LONG)
    lost.itself = lost
    for _ in range(steps):
        llm.engine.step()
    del lost
    with monkeypatch.context() as patch:
        real = getattr(llm.engine.model, method)
        patch.setattr(llm.engine.model, method, lambda *args: (gc.collect(), real(*args))[1])
        llm.engine.step()
    return kept


def twice_and_together(llm: LLM, prompt: list[int]) -> list[RequestOutput]:
    """The same prompt twice, then two copies in one batch."""
    return [llm.generate(prompt, GREEDY)[0] for _ in range(2)] + llm.generate([prompt] * 2, GREEDY)


def check_conversation(llm: LLM) -> None:
    """Each turn computes what is new, in blocks of 4."""
    said = ids(10)
    for turn in range(4):
        result = llm.generate(said, GREEDY)[0]
        assert result.metrics.num_cached_tokens == (turn > 0) * ((len(said) - 4) // 4 * 4)
        said = [*said, *result.outputs[0].token_ids, *ids(3, turn)]


def computed_in(steps: list[StepRecord], metrics: EngineMetrics, block_size: int) -> dict[str, int]:
    """How far each label got. Its records follow one another, and begin anew, at a block's border, once preempted."""
    assert len(steps) == metrics.num_steps
    assert sum(n for s in steps for _, n in s.computed.values()) == metrics.num_computed_tokens
    assert all(a.start < a.end <= b.start for a, b in itertools.pairwise(steps))
    done: dict[str, int] = {}
    for step in steps:
        done |= dict.fromkeys(step.preempted, 0)
        for label, (first, n) in step.computed.items():
            assert first == done.get(label, 0) or (done.get(label, 0) == 0 and first % block_size == 0)
            done[label] = first + n
            assert len(step.block_tables[label]) == -(-done[label] // block_size)
    return done


# The same text whatever the company -----------------------------------------------------------------------------------


def crowd(count: int = 64) -> list[Job]:
    """Requests of 1 to 60 prompt tokens and up to 20 new ones, some with the same beginning, greedy and seeded."""
    rng = np.random.default_rng(5)
    beginnings, jobs = [ids(30, seed) for seed in range(3)], []
    for i in range(count):
        own = rng.integers(3, 300, rng.integers(1, 31)).tolist()
        prompt = beginnings[i % 3][: rng.integers(16, 31)] + own if i % 2 else own
        params = SamplingParams(max_tokens=int(rng.integers(1, 21)), ignore_eos=True, logprobs=2)
        if i % 3 == 2:
            params = replace(params, temperature=0.8, top_k=40, seed=i, repetition_penalty=1.1)
        jobs.append((int(rng.integers(0, 40)), prompt, params))
    return jobs


CROWD = sorted(crowd(), key=lambda job: job[0])
LONGEST = max(len(prompt) + params.max_tokens for _, prompt, params in CROWD)


def same_answer(got: CompletionOutput, expected: CompletionOutput) -> None:
    """Ids, text and reason equal, log-probabilities up to the order of summation."""
    assert (got.token_ids, got.text, got.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
    for ours, theirs in zip(got.logprobs or [], expected.logprobs or [], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def settings() -> list[tuple[float, int, int, bool]]:
    """Pools from barely enough for the longest to plenty, beside chunks, block sizes and the prefix cache.

    All 90 pass and take 100 s: here every pair of values meets, and chunks of one token, the slowest, come twice.
    """
    found = [(2.5, 4, 1, True), (1.0, 16, 1, False)]
    for (i, room), (j, block_size), caching in itertools.product(
        enumerate([1.0, 2.5, 20.0]), enumerate([1, 4, 16]), [False, True]
    ):
        found.append((room, block_size, [7, 16, 64, 512][(i + j + 2 * caching) % 4], caching))
    return found


@pytest.mark.parametrize(("room", "block_size", "budget", "caching"), settings())
def test_64_requests_say_what_each_says_alone(make, alone, room, block_size, budget, caching):
    llm = make(
        num_blocks=-(-int(LONGEST * room) // block_size),
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    requests = serve(llm, CROWD)
    for request, (_, prompt, params) in zip(requests, CROWD, strict=True):
        same_answer(request.output.outputs[0], alone(prompt, params))
    metrics = llm.engine.metrics
    assert metrics.num_preemptions > 0 or room == 20 or budget == 1
    assert (metrics.num_cached_tokens > 0) == caching
    of_requests = [request.output.metrics for request in requests]
    assert metrics.num_preemptions == sum(m.num_preemptions for m in of_requests)
    assert metrics.num_cached_tokens == sum(m.num_cached_tokens for m in of_requests)
    assert metrics.num_generated_tokens == sum(m.num_generated_tokens for m in of_requests)


def test_the_choices_above_are_no_near_ties(alone):
    """What that test stands on: each greedy choice is ahead by more than float32 can err."""
    gaps = []
    for _, prompt, params in CROWD:
        if params.temperature == 0:
            best = [sorted(entries.values()) for entries in alone(prompt, params).logprobs]
            gaps += [values[-1] - values[-2] for values in best]
    assert len(gaps) > 300
    assert min(gaps) > 1e-3


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [7, 60])
def test_n_answers_in_company(make, alone, caching, num_blocks):
    llm = make(block_size=4, num_blocks=num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=12)
    several = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=15, ignore_eos=True)
    requests = serve(llm, [(0, ids(9), several), (2, ids(11), several), (2, ids(9), GREEDY)])
    expected = LLM.generate(make(), [ids(9), ids(11), ids(9)], [several, several, GREEDY])
    assert [r.output.outputs for r in requests] == [r.outputs for r in expected]
    assert len({tuple(out.token_ids) for out in requests[0].output.outputs}) == 4
    assert (llm.engine.metrics.num_preemptions > 0) == (num_blocks == 7)


@pytest.mark.parametrize("block_size", [1, 16])
def test_c48_as_without_paging(make, block_size):
    """C48: prompts that end at, before and after a block, 20 new tokens, beside one dense cache."""
    llm = make(block_size=block_size)
    prompts = [ids(length, length) for length in (15, 16, 17, 31, 32)]
    results = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        cache, tokens = DenseKVCache(llm.config, 1, 64), list(prompt)
        for done in (0, *range(len(prompt), len(prompt) + 19)):
            step = make_step([tokens[done:]], [done], [[0]], 64)
            tokens.append(int(llm.engine.model.forward(step, cache)[0].argmax()))
        assert result.outputs[0].token_ids == tokens[len(prompt) :]


@pytest.mark.parametrize("device", [DEVICE])
def test_on_a_device(make, path, device):
    """Preemption and the prefix cache with the other model and its cache."""
    works, reason = emulator.available("fast")
    if device == "emulator" and not works:
        pytest.skip(reason)
    prompts = [ids(9), ids(9), [*ids(8), 5], ids(3, 1)]
    expected = make().generate(prompts, GREEDY)
    llm = LLM(path, device=device, block_size=4, num_blocks=9, max_num_batched_tokens=11)
    results = llm.generate(prompts, GREEDY)
    assert [r.outputs for r in results] == [r.outputs for r in expected]
    assert llm.engine.metrics.num_preemptions > 0
    assert llm.engine.metrics.num_cached_tokens > 0
    check_empty(llm)


@pytest.mark.real_model
@pytest.mark.parametrize("caching", [False, True])
def test_the_real_model_in_company(model_path, caching):
    """Cases that the oracle recorded, in a pool for one or two of them, in chunks; and one seeded, beside itself."""
    cases = {case["name"]: case for case in json.loads((ORACLE / "greedy.json").read_text(encoding="utf-8"))["cases"]}
    names = ["c_code", "water", "list_planets", "chat_capital", "water", "chat_hi"]
    greedy, seeded = (SamplingParams(max_tokens=8, ignore_eos=True, **more) for more in ({}, HOT))
    with LLM(model_path, "cpu", num_blocks=5, max_num_batched_tokens=40, enable_prefix_caching=caching) as llm:
        prompts = [cases[name]["ids"] for name in names]
        single = llm.generate(prompts[2], seeded)[0].outputs[0]
        jobs = [(i, prompt, greedy) for i, prompt in enumerate(prompts)]
        *requests, hot = serve(llm, [*jobs, (6, prompts[2], seeded)])
        for name, request in zip(names, requests, strict=True):
            recorded = {key: values[:8] for key, values in cases[name]["float64"].items() if key in ("ids", "margins")}
            assert min(recorded["margins"]) > NEAR_TIE
            same_up_to_near_ties(request.output.outputs[0].token_ids, recorded, name)
        assert hot.output.outputs[0].token_ids == single.token_ids
        assert llm.engine.metrics.num_preemptions > 0
        assert (llm.engine.metrics.num_cached_tokens > 0) == caching


# Preempted at any moment ----------------------------------------------------------------------------------------------

KINDS = {
    "greedy": SamplingParams(max_tokens=9, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.2, seed=4, top_p=0.9),
    "logprobs": SamplingParams(max_tokens=9, ignore_eos=True, logprobs=3),
    "penalties": SamplingParams(
        max_tokens=9, ignore_eos=True, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5
    ),
    "bias": SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={70: 3.0, 80: -5.0}),
    "several": SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=1, n=3),
    "min_tokens": SamplingParams(max_tokens=9, min_tokens=6, stop_token_ids=list(range(3, 200))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_after_any_step(make, kind, caching):
    llm, params = make(block_size=4, enable_prefix_caching=caching, max_num_batched_tokens=9), KINDS[kind]
    expected = llm.generate(ids(14), params)[0].outputs
    assert max(len(out.token_ids) for out in expected) >= 7
    for steps in range(1, 12):
        request = llm.engine.add_request(ids(14), params)
        for _ in range(steps):
            llm.engine.step()
        llm.engine.scheduler.restart()
        assert request.output.metrics.num_preemptions >= (not request.finished)
        while not request.finished:
            llm.engine.step()
        for ours, theirs in zip(request.output.outputs, expected, strict=True):
            same_answer(ours, theirs)
        check_empty(llm)


@pytest.mark.parametrize(
    ("said", "stop", "text"), [("foo END bar", "END", "foo "), ("foo ENx", "END", "foo ENx"), ("é👩‍🚀", "!", "é👩‍🚀")]
)
def test_preempted_while_text_is_held_back(path, said, stop, text):
    """The beginning of a stop text, or of a character: what is held is not lost, nor shown twice."""
    llm = LLM(path)
    spelled = [i for letter in said.encode("utf-8") for i in byte_token(llm, letter)]
    llm.engine.model = Script(llm.config, spelled, 1)
    params = SamplingParams(stop=stop, max_tokens=len(spelled))
    for steps in range(1, len(spelled) + 1):
        stream = llm.stream([5], params)
        for _ in range(steps):
            llm.engine.step()
        llm.engine.scheduler.restart()
        assert text.startswith(stream.output.text)
        assert "".join(stream) == text
        check_empty(llm)


def byte_token(llm: LLM, byte: int) -> list[int]:
    return [llm.tokenizer.tokens.index(toy.byte_alphabet()[byte])]


# Aborts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_c65_abort_after_any_step(make, alone, which, caching):
    """C65: waiting, between chunks, decoding, finished; then again. Two run at a time, in chunks of 5."""
    llm = make(block_size=4, num_blocks=11, max_num_seqs=2, max_num_batched_tokens=5, enable_prefix_caching=caching)
    prompts, reasons = [ids(11), ids(11), [*ids(8), 7]], set()
    for steps in range(0, 40, 1 if which == 0 else 2):
        requests = [llm.engine.add_request(prompt, GREEDY) for prompt in prompts]
        for _ in range(steps):
            llm.engine.step()
        victim = requests.pop(which)
        finished = victim.finished
        shown = victim.output.text
        assert llm.engine.abort_request(victim.request_id) is not finished
        assert llm.engine.abort_request(victim.request_id) is False
        reasons.add(victim.output.outputs[0].finish_reason)
        assert victim.output.outputs[0].finish_reason == ("length" if finished else "abort")
        assert victim.output.text == shown
        assert victim.finished
        check_invariants(llm.engine.scheduler)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        others = [prompt for i, prompt in enumerate(prompts) if i != which]
        assert [r.output.outputs[0] for r in requests] == [alone(prompt) for prompt in others]
        check_empty(llm)
    assert reasons == {"abort", "length"}


@pytest.mark.parametrize("unknown", [-1, 10**9, None, "0"])
def test_c65_an_unknown_id_is_false(make, unknown):
    assert make().engine.abort_request(unknown) is False


def test_c65_answers_that_were_done_keep_their_reason(path):
    llm = LLM(path)
    b = llm.tokenizer.encode("B")
    params = SamplingParams(n=3, temperature=1, seed=0, stop_token_ids=list(range(3, 150)), max_tokens=40)
    request = llm.engine.add_request(b, params)
    while sum(out.finish_reason is not None for out in request.output.outputs) != 1:
        llm.engine.step()
    assert llm.engine.abort_request(request.request_id)
    assert sorted(out.finish_reason for out in request.output.outputs) == ["abort", "abort", "stop"]
    check_empty(llm)


@pytest.mark.parametrize("caching", [False, True])
def test_c65_streams_left_half_way_free_their_blocks(make, alone, caching):
    """Closed, or just dropped, in a pool where they are preempted too."""
    llm = make(block_size=4, num_blocks=17, enable_prefix_caching=caching)
    text, closed = leave_streams_half_way(llm)
    assert text == alone(ids(6, 0), LONG).text
    assert "".join(closed) != alone(ids(6, 1), LONG).text
    check_empty(llm)


def test_c65_a_stream_collected_in_the_middle_of_a_step(make, alone, monkeypatch):
    """A stream in a reference cycle dies when the garbage collector runs: perhaps while a step computes for it."""
    for steps, params in LOSSES:
        llm = make(block_size=4)
        kept = lose_a_stream(llm, monkeypatch, "forward", steps, params)
        assert len(llm.engine.requests) == 1
        assert "".join(kept) == alone(ids(6), LONG).text
        check_empty(llm)


def test_close_ends_what_runs(make):
    llm = make()
    stream = llm.stream(ids(5), LONG)
    request = llm.engine.add_request(ids(3), LONG)
    seen, scheduler = next(stream), llm.engine.scheduler
    llm.close()
    assert (stream.output.outputs[0].finish_reason, request.output.outputs[0].finish_reason) == ("abort", "abort")
    assert seen + "".join(stream) == stream.output.text
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


# Faults ---------------------------------------------------------------------------------------------------------------


class Fault(Exception):
    """Something unexpected."""


def fail_once(monkeypatch, owner, name: str, error: type[BaseException], after: bool, calls: int = 1) -> None:
    """Let the call number `calls` of `owner.name` raise, before or after its work."""
    real, left = getattr(owner, name), [calls]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            raise error
        result = real(*args, **kwargs)
        if left[0] == 0:
            raise error
        return result

    monkeypatch.setattr(owner, name, failing)


PLACES = {
    "before forward": lambda llm: (llm.engine.model, "forward", False),
    "after forward": lambda llm: (llm.engine.model, "forward", True),
    "before sampling": lambda llm: (rvllm.engine, "sample", False),
    "after sampling": lambda llm: (rvllm.engine, "sample", True),
    "on_step": lambda llm: (llm.engine, "on_step", False),
    "before publishing": lambda llm: (llm.engine.scheduler.prefix_cache, "publish", False),
    "after publishing": lambda llm: (llm.engine.scheduler.prefix_cache, "publish", True),
    "before handing out": lambda llm: (rvllm.engine.Answer, "append", False),
    "after the first was handed out": lambda llm: (rvllm.engine.Answer, "append", True),
}


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("caching", [False, True])
def test_a_fault_ends_generate_and_nothing_else(make, alone, monkeypatch, place, error, caching):
    """Ctrl-C during generate, say: streams that are open go on with the text that they would have had anyway."""
    llm = make(block_size=4, num_blocks=60, enable_prefix_caching=caching)
    kinds = [GREEDY, SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)]
    streams = [llm.stream(ids(6, 1), params) for params in kinds]
    texts = [next(stream) for stream in streams]
    with monkeypatch.context() as patch:
        owner, name, after = PLACES[place](llm)
        fail_once(patch, owner, name, error, after)
        with pytest.raises(error):
            llm.generate([ids(5), ids(7)], GREEDY)
    assert len(llm.engine.requests) == 2
    check_invariants(llm.engine.scheduler)
    assert llm.generate(ids(5), GREEDY)[0].outputs[0] == alone(ids(5))
    texts = [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)]
    assert texts == [alone(ids(6, 1), params).text for params in kinds]
    check_empty(llm)


@pytest.mark.parametrize("calls", range(1, 8))
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt, MemoryError])
def test_a_fault_in_a_stream_ends_that_stream(make, alone, monkeypatch, calls, error):
    llm = make(block_size=4, max_num_batched_tokens=5)
    hit, other = llm.stream(ids(9, 1), LONG), llm.stream(ids(6), LONG)
    with monkeypatch.context() as patch:
        fail_once(patch, llm.engine.model, "forward", error, True, calls)
        with pytest.raises(error):
            list(hit)
    assert hit.output.outputs[0].finish_reason == "abort"
    assert list(hit) == []
    assert "".join(other) == alone(ids(6), LONG).text
    check_empty(llm)


def test_what_a_failed_step_wrote_is_not_trusted(make, alone):
    """The cache is full of NaN after the fault; a prefix cache that knew of those blocks would find them."""
    llm = make(block_size=4)
    stream = llm.stream(ids(13), LONG)
    forward = llm.engine.model.forward

    def spoil(step, cache):
        forward(step, cache)
        for storage in (cache.keys, cache.values):
            storage.reshape(storage.shape[0], -1, *storage.shape[3:])[:, step.slot_mapping] = np.nan
        raise Fault

    for _ in range(3):
        llm.engine.model.forward = spoil
        with pytest.raises(Fault):
            llm.generate(ids(13), GREEDY)
        llm.engine.model.forward = forward
        llm.engine.step()
    assert "".join(stream) == alone(ids(13), LONG).text


def test_damaged_logits_end_only_the_call_that_met_them(make, alone):
    llm = make()
    forward = llm.engine.model.forward
    llm.engine.model.forward = lambda step, cache: forward(step, cache) * np.float32("nan")
    assert all(isinstance(output.error, LogitsError) for output in llm.generate([ids(3), ids(4)], GREEDY))
    check_empty(llm)
    llm.engine.model.forward = forward
    assert llm.generate(ids(3), GREEDY)[0].outputs[0] == alone(ids(3))


@pytest.mark.parametrize("prompt", [np.array(5), np.array("a"), np.zeros((0, 3), int), [[1], 2], {1, 2}, 1.5], ids=repr)
def test_c40_odd_prompts_are_named_errors(make, alone, prompt):
    """C40: beside a good one, which goes on."""
    llm = make()
    bad, good = llm.generate([prompt, ids(3)], GREEDY)
    assert isinstance(bad.error, PromptError)
    assert good.outputs[0] == alone(ids(3))
    check_empty(llm)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], GREEDY, PromptError),
        ([300], GREEDY, PromptError),
        (ids(300), GREEDY, PromptError),
        ([5], SamplingParams(stop_token_ids=[10**9]), ParameterError),
        ([5], SamplingParams(logit_bias={300: 1.0}, n=3), ParameterError),
    ],
)
def test_c84_a_refused_request_leaves_nothing_behind(make, alone, prompt, params, error):
    """C84: on entry, while another one runs."""
    llm = make()
    good = llm.engine.add_request(ids(4), GREEDY)
    llm.engine.step()
    with pytest.raises(error):
        llm.engine.add_request(prompt, params)
    assert list(llm.engine.requests) == [good.request_id]
    while not good.finished:
        llm.engine.step()
    assert good.output.outputs[0] == alone(ids(4))
    check_empty(llm)


# Limits ---------------------------------------------------------------------------------------------------------------


def test_c49_a_small_pool_is_the_limit(make):
    """C49: 4 blocks of 16 tokens. What can never fit is refused with the limit that holds; the rest ends there."""
    llm = make(block_size=16, num_blocks=4)
    assert llm.max_model_len == 64
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    for length in (64, 65, 1000):
        with pytest.raises(PromptError, match=f"found {length} tokens; allowed: at most 63, to leave room"):
            llm.generate(ids(length), long)
    refused, *others = llm.generate([ids(65), ids(60), ids(63), ids(1), ids(60, 1)], long)
    assert isinstance(refused.error, PromptError)
    assert [len(r.outputs[0].token_ids) for r in others] == [4, 1, 63, 4]
    assert {r.outputs[0].finish_reason for r in others} == {"length"}
    check_empty(llm)


@pytest.mark.parametrize(
    ("num_blocks", "wanted", "limit"), [(4, 50, 50), (4, 200, 64), (100, None, 256), (1, None, 16)]
)
def test_the_smallest_limit_holds(make, num_blocks, wanted, limit):
    assert make(num_blocks=num_blocks, max_model_len=wanted).max_model_len == limit


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True])
def test_wrong_sizes_of_the_pool_are_named(path, name, value):
    with pytest.raises(ParameterError, match=f"{name}: found {value!r}; allowed: an integer of at least 1"):
        LLM(path, **{name: value})


# Prefix cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_a_prefix_hit_saves_what_it_should(tmp_path, block_size):
    """512 shared tokens and 16 own ones: at most 17 tokens and a block are computed for the second prompt."""
    path = toy.write(tmp_path / "long.gguf", toy.metadata(llama__context_length=1024))
    one = SamplingParams(max_tokens=1)
    llm, off = (LLM(path, device="cpu", block_size=block_size, enable_prefix_caching=on) for on in (True, False))
    prompts = [[*ids(512), *ids(16, seed)] for seed in (1, 2)]
    results, computed = [], []
    for prompt in prompts:
        before = llm.engine.metrics.num_computed_tokens
        results.append(llm.generate(prompt, one)[0])
        computed.append(llm.engine.metrics.num_computed_tokens - before)
    assert computed[0] == 528
    assert computed[1] == 528 - 512 // block_size * block_size <= 17 + block_size
    assert [r.metrics.num_cached_tokens for r in results] == [0, 528 - computed[1]]
    assert [r.outputs for r in results] == [r.outputs for r in off.generate(prompts, one)]


@pytest.mark.parametrize(("length", "cached"), [(31, 16), (32, 16), (33, 32)])
def test_c44_a_prompt_that_is_cached_in_full(make, alone, length, cached):
    """C44: twice, then two copies in one batch, one of which meets the other's old blocks."""
    results = twice_and_together(make(block_size=16), ids(length))
    assert [r.outputs[0] for r in results] == [alone(ids(length))] * 4
    assert [r.metrics.num_cached_tokens for r in results] == [0, cached, cached, cached]
    fresh = make(block_size=16).generate([ids(length)] * 2, GREEDY)
    assert [r.outputs[0] for r in fresh] == [alone(ids(length))] * 2
    assert [r.metrics.num_cached_tokens for r in fresh] == [0, 0]


@pytest.mark.parametrize("constant", [False, True])
def test_c51_another_beginning_is_not_shared(make, alone, monkeypatch, constant):
    """C51: A + X, then B + X; also with a hash that is always the same."""
    if constant:
        monkeypatch.setattr(prefix_cache, "block_key", lambda _parent, _ids: b"")
    llm = make(block_size=4)
    a, b, x = ids(4, 1), ids(4, 2), ids(8, 3)
    cached = []
    for prompt in ([*a, *x], [*b, *x], x, [*a, *x]):
        result = llm.generate(prompt, GREEDY)[0]
        assert result.outputs[0] == alone(prompt)
        cached.append(result.metrics.num_cached_tokens)
    assert cached == [0, 0, 0, 4 if constant else 8]


def test_a_conversation_computes_only_what_is_new(make):
    check_conversation(make(block_size=4))


# Streams and generate together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [19, 100])
def test_generate_while_streams_are_half_read(make, alone, num_blocks):
    """What generate's steps add to a stream comes out of it afterwards; the small pool preempts."""
    llm = make(block_size=4, num_blocks=num_blocks)
    streams = [llm.stream(ids(7, seed), LONG) for seed in (1, 2)]
    texts = [next(stream) for stream in streams]
    for seed in (3, 4):
        assert llm.generate([ids(5, seed)] * 2, GREEDY)[1].outputs[0] == alone(ids(5, seed))
        texts = [text + next(stream) for text, stream in zip(texts, streams, strict=True)]
    assert all(stream.output.text == text for text, stream in zip(texts, streams, strict=True))
    texts = [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)]
    assert texts == [alone(ids(7, seed), LONG).text for seed in (1, 2)]
    assert (llm.engine.metrics.num_preemptions > 0) == (num_blocks == 19)
    check_empty(llm)


def test_a_stream_that_was_driven_to_its_end_by_others(make, alone):
    llm = make()
    stream = llm.stream(ids(4), GREEDY)
    llm.generate(ids(5), LONG)
    assert stream.output.outputs[0] == alone(ids(4))
    assert list(stream) == [alone(ids(4)).text]


def test_requests_added_to_the_engine_go_along_with_generate(make, alone):
    llm = make()
    request = llm.engine.add_request(ids(4), GREEDY, prompt="from elsewhere")
    llm.generate(ids(5), LONG)
    assert request.output.outputs[0] == alone(ids(4))
    assert request.output.prompt == "from elsewhere"
    assert llm.engine.step() == []


# Metrics --------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that only the model's forward pass moves: by one second."""

    def __init__(self, llm: LLM, monkeypatch) -> None:
        self.now, forward = 100.0, llm.engine.model.forward

        def slow(step, cache):
            self.now += 1
            return forward(step, cache)

        llm.engine.model.forward = slow
        monkeypatch.setattr(rvllm.engine.time, "perf_counter", lambda: self.now)


def test_times_of_a_request(make, monkeypatch):
    """10 tokens in chunks of 4 make three steps to the first token; a step for each further one."""
    llm = make(max_num_batched_tokens=4)
    Clock(llm, monkeypatch)
    metrics = llm.generate(ids(10), SamplingParams(max_tokens=5, ignore_eos=True))[0].metrics
    assert (metrics.time_to_first_token, metrics.total_time) == (3, 7)
    assert metrics.inter_token_times == [1, 1, 1, 1]
    assert metrics.decode_tokens_per_second == 1
    assert (llm.engine.metrics.forward_seconds, llm.engine.metrics.host_seconds) == (7, 0)


def test_waiting_and_preemption_count_as_time(make, monkeypatch):
    llm = make(max_num_seqs=1)
    Clock(llm, monkeypatch)
    first, second = (llm.engine.add_request(ids(4), SamplingParams(max_tokens=3, ignore_eos=True)) for _ in range(2))
    llm.engine.step()
    llm.engine.scheduler.restart()
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, llm.engine.model, "forward", Fault, True)
        with pytest.raises(Fault):
            llm.engine.step()
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert (first.output.metrics.time_to_first_token, first.output.metrics.inter_token_times) == (1, [2, 1])
    assert (second.output.metrics.time_to_first_token, second.output.metrics.inter_token_times) == (5, [1, 1])
    assert [r.output.metrics.num_preemptions for r in (first, second)] == [2, 0]


@pytest.mark.parametrize("n", [1, 3])
def test_counts_of_a_request(make, n):
    params = SamplingParams(max_tokens=7, n=n, temperature=1.0, seed=0, ignore_eos=True)
    metrics = make().generate(ids(9), params)[0].metrics
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (9, 7 * n)
    assert len(metrics.inter_token_times) == 7 * n - n
    assert all(t > 0 for t in metrics.inter_token_times)
    assert 0 < metrics.time_to_first_token < metrics.total_time
    assert (metrics.num_preemptions, metrics.num_cached_tokens) == (0, 0)


def test_a_request_that_got_no_token_has_no_first_time(make):
    llm = make()
    request = llm.engine.add_request(ids(4), GREEDY)
    llm.engine.abort_request(request.request_id)
    assert request.output.metrics.time_to_first_token is None
    assert request.output.metrics.inter_token_times == []


def test_sums_of_the_engine(make):
    llm = make(block_size=4, enable_prefix_caching=False)
    llm.generate([ids(9), ids(5), ids(1)], [replace(GREEDY, max_tokens=n) for n in (1, 4, 6)])
    metrics = llm.engine.metrics
    assert (metrics.num_steps, metrics.num_generated_tokens) == (6, 11)
    assert metrics.num_computed_tokens == 15 + 11 - 3  # an answer's last token is not computed
    assert (metrics.num_cached_tokens, metrics.num_preemptions) == (0, 0)
    parts = [metrics.schedule_seconds, metrics.sample_seconds, metrics.output_seconds]
    assert all(seconds > 0 for seconds in (*parts, metrics.forward_seconds))
    assert metrics.host_seconds == pytest.approx(sum(parts))


# Progress -------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_progress_without_a_terminal(make, capfd):
    make().generate([ids(3), ids(4)], GREEDY)
    assert capfd.readouterr() == ("", "")


def test_progress_on_a_terminal(make, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    make().generate([ids(3), [], ids(4)], GREEDY)
    shown = sys.stderr.getvalue()
    assert "2/2" in shown  # one of three was refused
    assert "request" in shown
    assert " tokens/s" in shown


def test_progress_can_be_switched_off(make, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    make().generate([ids(3), ids(4)], GREEDY, use_tqdm=False)
    assert sys.stderr.getvalue() == ""


def test_progress_where_there_is_no_stderr(make, monkeypatch):
    """As in a Windows program without a console."""
    monkeypatch.setattr(sys, "stderr", None)
    assert len(make().generate([ids(3), ids(4)], GREEDY)) == 2


# Trace ----------------------------------------------------------------------------------------------------------------


def test_a_trace_accounts_for_every_token_computed(make, alone):
    """Each label's records follow one another, and begin anew, at a block's border, after a preemption."""
    llm = make(block_size=4, num_blocks=11, max_num_batched_tokens=9, trace=True)
    results = llm.generate([ids(9), ids(9, 1), ids(6, 2)], GREEDY)
    steps, metrics = llm.trace.steps, llm.engine.metrics
    assert [r.outputs[0] for r in results] == [alone(ids(9)), alone(ids(9, 1)), alone(ids(6, 2))]
    assert sum(len(s.preempted) for s in steps) == metrics.num_preemptions > 0
    assert steps[0].prompts == {"0": 9}
    assert steps[0].waiting == ["1", "2"]
    assert computed_in(steps, metrics, block_size=4) == {"0": 9 + 11, "1": 9 + 11, "2": 6 + 11}
