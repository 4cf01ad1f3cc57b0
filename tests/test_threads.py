"""Several threads on one LLM: each gets what it would get alone, whatever the others do."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rvllm.llm import LLM, ClosedError
from rvllm.overlapped_engine import OverlappedEngine
from rvllm.sampling import LogitsError, SamplingParams
from tests import toy
from tests.fast_toy import FastShape, write_fast_toy
from tests.test_device_engine import new_llm
from tests.test_engine import GREEDY, LONG, Fault, check_empty, ids, same_answer
from tests.test_failed_requests import BAD_PROMPT, fragile
from tests.threads import in_threads, join, start

SEEDED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
TWO = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=3, n=2)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hello"}]
Answer = Callable[..., Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, device="cpu", block_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(path: Path) -> Answer:
    """All answers of a request by itself; computed once, before threads ask for it."""
    llm, known, lock = LLM(path, device="cpu", enable_prefix_caching=False), {}, threading.Lock()

    def answers(prompt: Any, params: SamplingParams) -> Any:
        with lock:
            key = repr((prompt, params))
            if key not in known:
                known[key] = llm.generate(prompt, params)[0].outputs
            return known[key]

    return answers


# Whatever a thread may do with an LLM. Each checks what it got. -------------------------------------------------------


def same(output: Any, expected: Any) -> None:
    for ours, theirs in zip(output.outputs, expected, strict=True):
        same_answer(ours, theirs)


def one(llm: LLM, alone: Answer, seed: int) -> None:
    same(llm.generate(ids(5 + seed, seed), SEEDED)[0], alone(ids(5 + seed, seed), SEEDED))


def several(llm: LLM, alone: Answer, seed: int) -> None:
    jobs = [(ids(3 + seed, seed), GREEDY), (ids(9, seed), TWO), (ids(4), SEEDED)]
    outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    for output, (prompt, params) in zip(outputs, jobs, strict=True):
        same(output, alone(prompt, params))


def chat(llm: LLM, alone: Answer, _seed: int) -> None:
    same(llm.chat(MESSAGES, GREEDY)[0], alone(llm.tokenizer.encode_chat(MESSAGES), GREEDY))


def stream(llm: LLM, alone: Answer, seed: int) -> None:
    expected = alone(ids(6, seed), SEEDED)
    pieces = llm.stream(ids(6, seed), SEEDED)
    assert "".join(pieces) == expected[0].text
    same(pieces.output, expected)


def close_midway(llm: LLM, alone: Answer, seed: int) -> None:
    pieces = llm.stream(ids(8, seed), LONG)
    text = next(pieces) + next(pieces)
    pieces.close()
    out = pieces.output.outputs[0]
    assert out.finish_reason == "abort"
    assert text + "".join(pieces) == out.text
    expected = alone(ids(8, seed), LONG)[0].token_ids
    assert out.token_ids == expected[: len(out.token_ids)]


def drop_midway(llm: LLM, _alone: Answer, seed: int) -> None:
    pieces = llm.stream(ids(8, seed), LONG)
    pieces.itself = pieces  # type: ignore[attr-defined]  # some thread's garbage collection ends it
    next(pieces)
    del pieces
    if seed % 2:
        gc.collect()


def refused(llm: LLM, alone: Answer, seed: int) -> None:
    good, bad = llm.generate([ids(3, seed), [300]], GREEDY)
    same(good, alone(ids(3, seed), GREEDY))
    assert bad.error is not None


DEEDS = [one, several, chat, stream, close_midway, drop_midway, refused]


def busy(llm: LLM, alone: Answer, seed: int, count: int) -> Counter[str]:
    """One thread's work: `count` requests of all kinds."""
    rng, done = random.Random(seed), Counter[str]()
    for _ in range(count):
        deed = rng.choice(DEEDS)
        deed(llm, alone, rng.randrange(4))
        done[deed.__name__] += 1
    return done


@pytest.mark.parametrize("num_blocks", [24, 1000])
def test_eight_threads_with_twenty_requests_each(path: Path, alone: Answer, num_blocks: int) -> None:
    """In the small pool they also preempt each other."""
    with LLM(path, device="cpu", block_size=4, num_blocks=num_blocks, max_num_batched_tokens=32) as llm:
        done = in_threads([lambda seed=seed: busy(llm, alone, seed, 20) for seed in range(8)])
        assert sum((each for each in done), Counter()).total() == 160
        gc.collect()
        check_empty(llm)


def test_c85_two_threads_ten_times_two_hundred_tokens(path: Path, alone: Answer) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    def ten_times(llm: LLM, seed: int) -> None:
        for _ in range(10):
            same(llm.generate(ids(5, seed), params)[0], alone(ids(5, seed), params))

    with LLM(path, device="cpu") as llm:
        in_threads([lambda: ten_times(llm, 1), lambda: ten_times(llm, 2)])
        check_empty(llm)


def test_c85_a_lock_of_ones_own(llm: LLM, alone: Answer) -> None:
    lock = threading.Lock()

    def work(seed: int) -> None:
        for deed in (one, several, stream):
            with lock:
                deed(llm, alone, seed)

    in_threads([lambda seed=seed: work(seed) for seed in range(4)])
    check_empty(llm)


def test_a_stream_may_go_from_thread_to_thread(llm: LLM, alone: Answer) -> None:
    """And several may read it at once: each piece comes to one of them."""
    expected, pieces = alone(ids(6), LONG)[0].text, llm.stream(ids(6), LONG)
    text = next(pieces)
    text += "".join(in_threads([lambda: next(pieces)]))
    got = in_threads([lambda: list(pieces)] * 3)
    assert sorted(text + "".join(piece for pieces in got for piece in pieces)) == sorted(expected)
    check_empty(llm)


def test_two_threads_on_the_overlapped_engine(path: Path, alone: Answer) -> None:
    """The device is a step ahead of both; greedy, since the device draws by other numbers."""
    llm = new_llm(path, OverlappedEngine, block_size=4)
    prompts = [ids(4 + i, i) for i in range(6)]

    def work(own: list[list[int]]) -> None:
        for prompt in own:
            assert llm.generate(prompt, GREEDY)[0].outputs == alone(prompt, GREEDY)
            close_midway(llm, alone, 1)

    in_threads([lambda: work(prompts[::2]), lambda: work(prompts[1::2])])
    check_empty(llm)


def test_two_threads_on_the_fast_path(tmp_path: Path) -> None:
    """Variant graph, on the emulator."""
    path = write_fast_toy(tmp_path / "fast.gguf", FastShape(layers=2, H=2, K=1, F=96), seed=7)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [ids(4 + i, i) for i in range(4)]
    with LLM(path, "emulator", "graph", num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        expected = [llm.generate(prompt, params)[0].outputs for prompt in prompts]

        def work(numbers: range) -> None:
            for i in numbers:
                assert llm.generate(prompts[i], params)[0].outputs == expected[i]
                pieces = llm.stream(prompts[i], LONG)
                next(pieces)
                pieces.close()

        in_threads([lambda: work(range(0, 4, 2)), lambda: work(range(1, 4, 2))])
        check_empty(llm)


# Errors: whose are they? ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_a_step_that_fails_is_the_error_of_who_ran_it(llm: LLM, alone: Answer, error: type[BaseException]) -> None:
    """Every seventh step fails, in whatever thread: so many calls fail, and the others do not notice."""
    forward, calls, raised = llm.engine.model.forward, [0], []

    def failing(step: Any, cache: Any) -> Any:
        calls[0] += 1
        if calls[0] % 7 == 0:
            raised.append(calls[0])
            raise error
        return forward(step, cache)

    llm.engine.model.forward = failing  # type: ignore[method-assign]

    def work(seed: int) -> int:
        errors = 0
        for i in range(6):
            try:
                several(llm, alone, (seed + i) % 4)
            except error:
                errors += 1
        return errors

    errors = in_threads([lambda seed=seed: work(seed) for seed in range(4)])
    assert sum(errors) == len(raised) > 0
    check_empty(llm)


def test_an_interrupt_of_one_thread_is_its_own(llm: LLM, alone: Answer) -> None:
    """Whenever this thread runs a step it is interrupted; the other threads go on, and so do their requests."""
    forward, victim = llm.engine.model.forward, "the interrupted one"

    def interrupted(step: Any, cache: Any) -> Any:
        if threading.current_thread().name == victim:
            raise KeyboardInterrupt
        return forward(step, cache)

    llm.engine.model.forward = interrupted  # type: ignore[method-assign]
    results: list[Any] = [None] * 4
    threads = [start(lambda: llm.generate([ids(5), ids(6)], LONG), results, 0, victim)]
    threads += [start(lambda i=i: llm.generate(ids(5, i), LONG), results, i) for i in (1, 2, 3)]
    join(threads)
    assert isinstance(results[0], KeyboardInterrupt)
    for i in (1, 2, 3):
        same(results[i][0], alone(ids(5, i), LONG))
    check_empty(llm)


def test_a_failed_request_is_an_error_in_its_own_thread(path: Path, alone: Answer) -> None:
    llm = fragile(LLM(path, device="cpu", block_size=4))

    def bad() -> None:
        for _ in range(5):
            with pytest.raises(LogitsError):
                llm.generate(BAD_PROMPT, GREEDY)
            with pytest.raises(LogitsError):
                list(llm.stream(BAD_PROMPT, GREEDY))

    def good(seed: int) -> None:
        for _ in range(3):
            same(llm.generate(ids(6, seed), LONG)[0], alone(ids(6, seed), LONG))

    in_threads([bad, bad, lambda: good(0), lambda: good(4)])
    check_empty(llm)


# Closing --------------------------------------------------------------------------------------------------------------


def test_closing_ends_all_threads(path: Path) -> None:
    """Those that generate get ClosedError, streams end; each has begun before."""
    llm = LLM(path, device="cpu", block_size=4, max_num_seqs=3)  # some wait in the queue
    weights, begun = weakref.ref(llm.engine.model), threading.Semaphore(0)

    def generate_for_ever() -> None:
        while True:
            llm.generate([ids(5), ids(6)], ENDLESS)
            begun.release()

    def stream_for_ever() -> str:
        while True:
            pieces = llm.stream(ids(5), ENDLESS)
            text = next(pieces, "")  # closed before it began?
            begun.release()
            text += "".join(pieces)
            out = pieces.output.outputs[0]
            if out.finish_reason == "abort":
                assert text == out.text
                return text
            assert out.finish_reason == "length"

    results: list[Any] = [None] * 6
    works = [generate_for_ever, stream_for_ever] * 3
    threads = [start(work, results, i) for i, work in enumerate(works)]
    for _ in range(8):
        begun.acquire()
    llm.close()
    join(threads)
    for i, result in enumerate(results):
        assert isinstance(result, ClosedError) or (i % 2 and isinstance(result, str)), result
    assert any(isinstance(result, ClosedError) for result in results)
    gc.collect()
    assert weights() is None
    for call in (lambda: llm.generate("a"), lambda: llm.engine, lambda: llm.max_model_len):
        assert isinstance(in_threads([call], raise_errors=False)[0], ClosedError)


def test_close_does_not_wait_for_who_runs_on_and_on(path: Path) -> None:
    """The generating thread asks for its next step at once; close is in line before that."""
    llm = LLM(path, device="cpu")
    engine, closing, result = llm.engine, threading.Event(), [None]
    forward = engine.model.forward

    def slow(step: Any, cache: Any) -> Any:
        if engine.metrics.num_steps == 3:
            closing.set()
            while not len(llm._turns._line) > 1:  # until close stands there
                threading.Event().wait(0.001)
        return forward(step, cache)

    engine.model.forward = slow
    thread = start(lambda: llm.generate(ids(5), ENDLESS), result, 0)
    closing.wait()
    llm.close()
    join([thread])
    assert isinstance(result[0], ClosedError)
    assert engine.metrics.num_steps == 4


# Any moment -----------------------------------------------------------------------------------------------------------


def test_a_stream_collected_while_another_thread_is_in_a_step(llm: LLM, alone: Answer) -> None:
    """The collection may not wait for the step, since the step may wait for what the collecting thread holds."""
    lost, forward = llm.stream(ids(9, 1), LONG), llm.engine.model.forward
    inside, collected = threading.Event(), threading.Event()

    def waiting(step: Any, cache: Any) -> Any:
        inside.set()
        collected.wait()
        return forward(step, cache)

    llm.engine.model.forward = waiting  # type: ignore[method-assign]
    results: list[Any] = [None]
    thread = start(lambda: llm.generate(ids(5), GREEDY), results, 0)
    inside.wait()
    request = weakref.ref(lost)
    del lost
    gc.collect()
    assert request() is None
    collected.set()
    join([thread])
    same(results[0][0], alone(ids(5), GREEDY))
    check_empty(llm)


@pytest.mark.parametrize("what", ["close the stream", "close the LLM", "add a request"])
def test_calls_from_the_middle_of_a_step(llm: LLM, alone: Answer, what: str) -> None:
    """`on_step` runs in a step: what it asks for takes effect, at the step's end at the latest."""
    stream, other, added = llm.stream(ids(5), LONG), llm.stream(ids(6), GREEDY), []

    def meddle(_schedule: Any, _start: float) -> None:
        llm.engine.on_step = lambda _schedule, _start: None
        if what == "close the stream":
            stream.close()
        elif what == "close the LLM":
            llm.close()
        else:
            added.append(llm.stream(ids(7), GREEDY))

    llm.engine.on_step = meddle
    text = "".join(other)
    if what == "close the LLM":
        assert [s.output.outputs[0].finish_reason for s in (stream, other)] == ["abort", "abort"]
        return
    assert text == alone(ids(6), GREEDY)[0].text
    if what == "add a request":
        assert "".join(added[0]) == alone(ids(7), GREEDY)[0].text
        assert "".join(stream) == alone(ids(5), LONG)[0].text
    else:
        assert stream.output.outputs[0].finish_reason == "abort"
    check_empty(llm)
