"""Engines whose model chooses tokens on the device, beside the plain `Engine`: the same tokens, whatever happens.

The model here is as late as a device may be: a step is computed when somebody asks for its tokens, or when the next
but one starts, on a cache full of NaN, and in order. An engine that read a token too early would find a placeholder.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import rvllm.engine
from rvllm.device_engine import DeviceEngine, DeviceNumbers
from rvllm.device_sampling import needs_host, seed_words, uniform
from rvllm.engine import Answer, Engine, Request
from rvllm.llm import LLM
from rvllm.outputs import CompletionOutput
from rvllm.overlapped_engine import OverlappedEngine
from rvllm.sampling import SamplingParams, SamplingState, sample
from rvllm.scheduler import check_invariants
from rvllm.trace import Trace
from tests import toy
from tests.test_engine import (
    GREEDY,
    LONG,
    LOSSES,
    Fault,
    byte_token,
    check_conversation,
    check_empty,
    computed_in,
    fail_once,
    ids,
    leave_streams_half_way,
    lose_a_stream,
    same_answer,
    twice_and_together,
)
from tests.test_llm import Script

Job = tuple[int, list[int], SamplingParams]  # arrives before this step, prompt, parameters
SEEDED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)


# The stand-ins --------------------------------------------------------------------------------------------------------


class Number:
    """A generator that has one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


class LateTicket:
    """A step that was started: all that the device knows of it was copied when it started."""

    def __init__(self, model: LateModel, step, states: list[SamplingState | None]) -> None:
        self.model, self.step, self.chosen = model, replace(step, token_ids=step.token_ids.copy()), None
        self.states = [s and self._as_uploaded(s, int(n)) for s, n in zip(states, step.seq_lens, strict=True)]

    def _as_uploaded(self, state: SamplingState, length: int) -> SamplingState:
        assert not needs_host(state)
        own = SamplingState(replace(state.params, min_tokens=0), index=state.index)
        own.rng = Number(uniform(seed_words(state).tolist(), length))
        return own

    def token_ids(self) -> np.ndarray:
        while self.chosen is None:
            self.model.compute_next()
        return self.chosen


class LateModel:
    """`forward` of a host model, and `start`, which does nothing yet."""

    def __init__(self, model, cache) -> None:
        self.model, self.cache, self.config = model, cache, model.config
        self.late: deque[LateTicket] = deque()
        self.last: LateTicket | None = None
        self.num_started = self.num_forward = 0

    def start(self, step, states) -> LateTicket:
        assert len(states) == step.num_seqs
        previous, self.last = self.last, LateTicket(self, step, states)
        for row in ~step.token_ids[step.token_ids < 0]:
            assert previous.states[row] is not None, "a placeholder for a token that nobody chooses"
        self.late.append(self.last)
        self.last.previous = previous
        self.num_started += 1
        while len(self.late) > 2:
            self.compute_next()
        return self.last

    def forward(self, step, cache):
        while self.late:
            self.compute_next()
        assert (step.token_ids >= 0).all(), "a placeholder in a step of the host"
        self.num_forward += 1
        return self.model.forward(step, cache)

    def compute_next(self) -> None:
        ticket = self.late.popleft()
        token_ids = ticket.step.token_ids
        for i in np.flatnonzero(token_ids < 0):
            token_ids[i] = ticket.previous.chosen[~token_ids[i]]
        ticket.previous = None
        logits = self.model.forward(replace(ticket.step, token_ids=np.maximum(token_ids, 0)), self.cache)
        ticket.chosen = np.full(len(logits), -7, np.int32)
        starts = ticket.step.query_start_loc
        for row, state in enumerate(ticket.states):
            if state is not None:
                own = token_ids[starts[row] : starts[row + 1]]
                finite = np.isfinite(logits[row].max()) and own.min() >= 0
                ticket.chosen[row] = sample(logits[row : row + 1], [state])[0].token_id if finite else -1


class Reference(Engine):
    """`Engine` as it is, but with the device's random numbers."""

    def _compute(self, schedule, times):
        for answer in schedule.sequences:
            answer.state.rng = DeviceNumbers(answer.state)
        return super()._compute(schedule, times)


def with_engine(llm: LLM, kind: type[Engine]) -> LLM:
    old = llm.engine
    model = LateModel(old.model, old.cache) if issubclass(kind, DeviceEngine) else old.model
    llm._engine = kind(model, old.cache, llm.tokenizer, old.scheduler, old.vocab_size, old.max_model_len)
    return llm


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


def new_llm(path, kind: type[Engine], **options) -> LLM:
    llm = LLM(path, device="cpu", **options)
    llm.engine.cache.keys[:], llm.engine.cache.values[:] = np.nan, np.nan
    return with_engine(llm, kind)


@pytest.fixture(scope="module", params=[DeviceEngine, OverlappedEngine])
def make(request, path) -> Callable[..., LLM]:
    return lambda **options: new_llm(path, request.param, **options)


@pytest.fixture(scope="module")
def overlapped(path) -> Callable[..., LLM]:
    return lambda **options: new_llm(path, OverlappedEngine, **options)


@pytest.fixture(scope="module")
def alone(path) -> Callable[..., list[CompletionOutput]]:
    """What a request says by itself in the plain engine."""
    llm, known = new_llm(path, Reference, num_blocks=16, enable_prefix_caching=False), {}

    def answers(prompt, params: SamplingParams = GREEDY) -> list[CompletionOutput]:
        key = repr((prompt, params))
        if key not in known:
            known[key] = llm.generate(prompt, params)[0].outputs
        return known[key]

    return answers


# Books ----------------------------------------------------------------------------------------------------------------


def check(engine: Engine) -> None:
    """The scheduler's rules, placeholders counted as tokens, and: who has one, and that it names the right row."""
    flight = getattr(engine, "_flight", None)
    coming = {}
    if flight:
        alive = zip(flight.answers, flight.rows, strict=True)
        coming = {answer: row for answer, row in alive if answer.output.finish_reason is None}
    complete = [a for a in coming if len(a.output.token_ids) + 1 == a.max_tokens]
    check_invariants(engine.scheduler, complete)
    for answer in [*engine.scheduler.running, *engine.scheduler.waiting]:
        known = answer.request.prompt_token_ids + answer.output.token_ids
        expected = [~coming[answer]] if answer in coming and answer not in complete else []
        assert answer.token_ids == known + expected
        assert min(known) >= 0
        assert answer.output.finish_reason is None


def run(engine: Engine) -> list[Request]:
    finished = []
    while engine.has_unfinished_requests:
        finished += engine.step()
        check(engine)
    return finished


def serve(llm: LLM, jobs: list[Job]) -> list[Request]:
    """Run jobs to their end, each added before the step of its arrival; the books are checked after every step."""
    engine, requests, finished = llm.engine, [], []
    for step in range(max(job[0] for job in jobs) + 1):
        requests += [engine.add_request(prompt, params) for arrival, prompt, params in jobs if arrival == step]
        finished += engine.step()
        check(engine)
    finished += run(engine)
    assert sorted(r.request_id for r in finished) == sorted(r.request_id for r in requests)
    check_empty(llm)
    return requests


def same(requests: list[Request], expected: list[list[CompletionOutput]]) -> None:
    for request, answers in zip(requests, expected, strict=True):
        for ours, theirs in zip(request.output.outputs, answers, strict=True):
            same_answer(ours, theirs)


# The same text whatever the company -----------------------------------------------------------------------------------


def crowd(with_host: bool, count: int = 36) -> list[Job]:
    """Greedy and seeded requests, some with the same beginning; some end early; some ask for what the host must do."""
    rng = np.random.default_rng(5)
    beginnings, jobs = [ids(30, seed) for seed in range(3)], []
    for i in range(count):
        own = rng.integers(3, 300, rng.integers(1, 31)).tolist()
        prompt = beginnings[i % 3][: rng.integers(16, 31)] + own if i % 2 else own
        params = SamplingParams(max_tokens=int(rng.integers(1, 21)), ignore_eos=True)
        if i % 3 == 2:
            params = replace(params, temperature=0.8, top_k=40, top_p=0.95, seed=i, n=1 + i % 2)
        if i % 4 == 3:
            params = replace(params, stop_token_ids=list(range(3, 40)))
        if with_host and i % 7 == 0:
            params = replace(params, logprobs=2, repetition_penalty=1.1)
        if with_host and i % 7 == 3:
            params = replace(params, min_tokens=min(3, params.max_tokens))
        jobs.append((int(rng.integers(0, 30)), prompt, params))
    return sorted(jobs, key=lambda job: job[0])


LONGEST = max(len(prompt) + params.max_tokens for _, prompt, params in crowd(False))
SETTINGS = [  # pool, as a multiple of the longest request; block size; budget; seats; prefix cache
    (1.0, 1, 16, 8, True),
    (1.0, 16, 512, 64, False),
    (1.5, 4, 7, 5, True),
    (2.5, 4, 512, 64, True),
    (20.0, 16, 64, 64, True),
    (20.0, 4, 512, 3, False),
]


@pytest.mark.parametrize("with_host", [False, True])
@pytest.mark.parametrize(("room", "block_size", "budget", "seats", "caching"), SETTINGS)
def test_a_crowd_says_what_each_says_alone(make, alone, room, block_size, budget, seats, caching, with_host):
    llm = make(
        num_blocks=-(-int(LONGEST * room) // block_size),
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        enable_prefix_caching=caching,
    )
    jobs = crowd(with_host)
    requests = serve(llm, jobs)
    same(requests, [alone(prompt, params) for _, prompt, params in jobs])
    metrics, model = llm.engine.metrics, llm.engine.model
    assert metrics.num_preemptions > 0 or room == 20
    assert (metrics.num_cached_tokens > 0) == caching
    of_requests = [request.output.metrics for request in requests]
    assert metrics.num_preemptions == sum(m.num_preemptions for m in of_requests)
    assert metrics.num_cached_tokens == sum(m.num_cached_tokens for m in of_requests)
    assert metrics.num_generated_tokens == sum(m.num_generated_tokens for m in of_requests)
    assert metrics.num_steps == model.num_started + model.num_forward
    assert model.num_started > 0
    assert (model.num_forward > 0) == with_host


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [7, 60])
def test_n_answers_in_company(make, alone, caching, num_blocks):
    llm = make(block_size=4, num_blocks=num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=12)
    several = replace(SEEDED, n=4, max_tokens=15)
    requests = serve(llm, [(0, ids(9), several), (2, ids(11), several), (2, ids(9), GREEDY)])
    same(requests, [alone(ids(9), several), alone(ids(11), several), alone(ids(9))])
    assert len({tuple(out.token_ids) for out in requests[0].output.outputs}) == 4
    assert (llm.engine.metrics.num_preemptions > 0) == (num_blocks == 7)


def test_a_seeded_text_does_not_depend_on_who_needs_the_host(make, alone):
    """The host draws the numbers that the device would have drawn."""
    llm, host = make(), replace(GREEDY, max_tokens=3, logprobs=1)
    requests = serve(llm, [(0, ids(5), SEEDED), (2, ids(4), host), (7, ids(6), host)])
    same(requests, [alone(ids(5), SEEDED), alone(ids(4), host), alone(ids(6), host)])
    assert llm.engine.model.num_started > 3
    assert llm.engine.model.num_forward == 6


def test_random_lives(path, alone):
    """Arrivals, aborts, faults and preemption of everybody at any moment, in pools that are too small."""
    rng = random.Random(1)
    kinds = [GREEDY, SEEDED, replace(SEEDED, n=2), replace(GREEDY, stop_token_ids=list(range(3, 60)))]
    kinds += [replace(GREEDY, max_tokens=1), replace(GREEDY, min_tokens=2, logprobs=1)]
    prompts = [ids(length, length % 3) for length in (1, 4, 7, 8, 13, 20)]
    seen: Counter[str] = Counter()
    for life in range(24):
        llm = new_llm(
            path,
            OverlappedEngine if life % 4 else DeviceEngine,
            block_size=rng.choice([1, 3, 4]),
            num_blocks=rng.choice([33, 45, 60]),
            max_num_seqs=rng.choice([2, 5, 20]),
            max_num_batched_tokens=rng.choice([3, 9, 64]),
            enable_prefix_caching=rng.random() < 0.7,
        )
        requests = live(llm.engine, rng, prompts, kinds if life % 3 else kinds[:-1], seen)
        run(llm.engine)
        check_empty(llm)
        for request, prompt, params in requests:
            for ours, theirs in zip(request.output.outputs, alone(prompt, params), strict=True):
                if ours.finish_reason == "abort":
                    assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
                else:
                    same_answer(ours, theirs)
        seen["preempted"] += llm.engine.metrics.num_preemptions
    assert min(seen[event] for event in ("abort", "fault", "restart", "preempted")) > 10


def live(engine: Engine, rng: random.Random, prompts, kinds, seen: Counter[str]) -> list:
    requests = []
    for _ in range(40):
        event, share = rng.random(), rng.random()
        if event < 0.5 and len(engine.requests) < 12:
            prompt, params = rng.choice(prompts), rng.choice(kinds)
            requests.append((engine.add_request(prompt, params), prompt, params))
        if share < 0.05 and requests:
            seen["abort"] += engine.abort_request(rng.choice(requests)[0].request_id)
        elif share < 0.08:
            seen["restart"] += bool(engine.scheduler.running)
            engine.scheduler.restart()
        elif share < 0.12:
            with pytest.MonkeyPatch.context() as patch:
                owner, name = rng.choice([(LateModel, "start"), (LateTicket, "token_ids"), (Answer, "append")])
                fail_once(patch, owner, name, Fault, rng.random() < 0.5)
                try:
                    engine.step()
                except Fault:
                    seen["fault"] += 1
        engine.step()
        check(engine)
    return requests


# Overlap --------------------------------------------------------------------------------------------------------------


def test_texts_are_made_while_the_device_is_at_work(overlapped, monkeypatch):
    llm = overlapped()
    late, append = [], Answer.append
    monkeypatch.setattr(Answer, "append", lambda *args: (late.append(len(llm.engine.model.late)), append(*args))[1])
    llm.generate(ids(5), GREEDY)
    assert late == [1] * 11 + [0]  # with the last token nothing is left to compute


def test_an_end_by_length_is_known_beforehand(make):
    """No token is computed in vain, and an answer of one token comes out of one step."""
    llm = make(enable_prefix_caching=False)
    llm.generate([ids(9), ids(5), ids(1)], [replace(GREEDY, max_tokens=n) for n in (1, 4, 6)])
    metrics = llm.engine.metrics
    assert (metrics.num_steps, metrics.num_generated_tokens) == (6, 11)
    assert metrics.num_computed_tokens == 15 + 11 - 3


def test_an_end_by_a_token_costs_one_token_more(path, alone):
    said = alone(ids(5))[0].token_ids
    at = next(i for i in range(3, 12) if said[i] not in said[:i])
    computed = []
    for kind in (DeviceEngine, OverlappedEngine):
        llm = new_llm(path, kind, enable_prefix_caching=False)
        stop = replace(GREEDY, stop_token_ids=[said[at]])
        (result, *_), blocks = llm.generate([ids(5), ids(6)], [stop, GREEDY]), llm.engine.scheduler.pool.num_free
        assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == (said[: at + 1], "stop")
        assert blocks == llm.engine.scheduler.pool.num_blocks
        computed.append(llm.engine.metrics.num_computed_tokens)
    assert computed[1] == computed[0] + 1


def test_blocks_of_a_sequence_that_ended_unnoticed_serve_the_next_one(overlapped, alone):
    """One block is all there is: the newcomer's tokens go where the step in flight still writes."""
    said = alone(ids(5))[0].token_ids
    llm = overlapped(num_blocks=1, block_size=16)
    stop = replace(GREEDY, stop_token_ids=[said[2]], max_tokens=9)
    requests = serve(llm, [(0, ids(5), stop), (0, ids(6), replace(GREEDY, max_tokens=9)), (0, ids(5), stop)])
    same(requests, [alone(ids(5), stop), alone(ids(6), replace(GREEDY, max_tokens=9)), alone(ids(5), stop)])


def test_finished_requests_come_out_while_there_are_unfinished_ones(overlapped):
    engine = overlapped().engine
    request = engine.add_request(ids(3), replace(GREEDY, max_tokens=2))
    assert [engine.step() for _ in range(2)] == [[], []]
    assert engine.has_unfinished_requests
    assert engine.step() == [request]
    assert not engine.has_unfinished_requests
    assert engine.step() == []


@pytest.mark.parametrize(("length", "cached"), [(31, 16), (32, 16), (33, 32)])
def test_a_prompt_that_is_cached_in_full(make, alone, length, cached):
    results = twice_and_together(make(block_size=16), ids(length))
    assert [r.outputs for r in results] == [alone(ids(length))] * 4
    assert [r.metrics.num_cached_tokens for r in results] == [0, cached, cached, cached]


def test_a_conversation_computes_only_what_is_new(make):
    check_conversation(make(block_size=4))


# Preempted at any moment ----------------------------------------------------------------------------------------------

KINDS = {
    "greedy": SamplingParams(max_tokens=9, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.2, seed=4, top_p=0.9),
    "several": SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=1, n=3),
    "penalties": SamplingParams(max_tokens=9, ignore_eos=True, repetition_penalty=1.5, temperature=1.0, seed=2),
    "min_tokens": SamplingParams(max_tokens=9, min_tokens=6, stop_token_ids=list(range(3, 200))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_after_any_step(make, alone, kind, caching):
    llm, params = make(block_size=4, enable_prefix_caching=caching, max_num_batched_tokens=9), KINDS[kind]
    for steps in range(1 + caching, 13, 2):
        request = llm.engine.add_request(ids(14), params)
        for _ in range(steps):
            llm.engine.step()
        llm.engine.scheduler.restart()
        assert request.output.metrics.num_preemptions >= (not request.finished)
        run(llm.engine)
        same([request], [alone(ids(14), params)])
        check_empty(llm)


@pytest.mark.parametrize(
    ("said", "stop", "text"), [("foo END bar", "END", "foo "), ("foo ENx", "END", "foo ENx"), ("é👩‍🚀", "!", "é👩‍🚀")]
)
def test_stop_texts_while_text_is_held_back(make, said, stop, text):
    llm = make()
    spelled = [i for letter in said.encode("utf-8") for i in byte_token(llm, letter)]
    llm.engine.model.model = Script(llm.config, spelled, 1)
    params = SamplingParams(stop=stop, max_tokens=len(spelled))
    for steps in range(1, len(spelled) + 1):
        stream = llm.stream([5], params)
        for _ in range(steps):
            llm.engine.step()
        llm.engine.scheduler.restart()
        assert text.startswith(stream.output.text)
        assert "".join(stream) == text
        check_empty(llm)


@pytest.mark.parametrize(
    ("said", "stop", "ignore_eos", "text"),
    [
        ("ab cd<|im_start|> ef", "<|im_start|>", False, "ab cd"),
        ("ab cd<|im_start|>user", "<|im_start|>user", False, "ab cd"),
        ("ab cd<|im_start|> ef", "cd<|im_start|> e", False, "ab "),
        ("ab cd<|im_end|> ef", "<|im_end|>", True, "ab cd"),
    ],
)
def test_c88_stop_texts_with_special_tokens(make, said, stop, ignore_eos, text):
    llm = make()
    spelled = llm.tokenizer.encode(said)
    llm.engine.model.model = Script(llm.config, spelled, 1)
    params = SamplingParams(stop=stop, max_tokens=len(spelled) + 5, ignore_eos=ignore_eos)
    out = llm.generate([5], params)[0].outputs[0]
    assert (out.text, out.finish_reason) == (text, "stop")
    assert out.token_ids == spelled[: len(out.token_ids)]
    check_empty(llm)


# Aborts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_abort_after_any_step(make, alone, which, caching):
    """Waiting, between chunks, decoding, in flight, finished; then again. Two run at a time, in chunks of 5."""
    llm = make(block_size=4, num_blocks=11, max_num_seqs=2, max_num_batched_tokens=5, enable_prefix_caching=caching)
    prompts, reasons = [ids(11), ids(11), [*ids(8), 7]], set()
    for steps in range(which, 40, 3):
        requests = [llm.engine.add_request(prompt, GREEDY) for prompt in prompts]
        for _ in range(steps):
            llm.engine.step()
        victim = requests.pop(which)
        finished, shown = victim.finished, victim.output.text
        assert llm.engine.abort_request(victim.request_id) is not finished
        assert llm.engine.abort_request(victim.request_id) is False
        reasons.add(victim.output.outputs[0].finish_reason)
        check(llm.engine)
        run(llm.engine)
        assert victim.output.text == shown
        same(requests, [alone(prompt) for i, prompt in enumerate(prompts) if i != which])
        check_empty(llm)
    assert reasons == {"abort", "length"}


@pytest.mark.parametrize("caching", [False, True])
def test_streams_left_half_way_free_their_blocks(make, alone, caching):
    llm = make(block_size=4, num_blocks=17, enable_prefix_caching=caching)
    text, _ = leave_streams_half_way(llm)
    assert text == alone(ids(6, 0), LONG)[0].text
    check_empty(llm)


def test_a_stream_collected_in_the_middle_of_a_step(make, alone, monkeypatch):
    for steps, params in LOSSES:
        llm = make(block_size=4)
        kept = lose_a_stream(llm, monkeypatch, "start", steps, params)
        assert len(llm.engine.requests) == 1
        assert "".join(kept) == alone(ids(6), LONG)[0].text
        check_empty(llm)


# Faults ---------------------------------------------------------------------------------------------------------------

PLACES = {
    "before start": lambda llm: (llm.engine.model, "start", False),
    "after start": lambda llm: (llm.engine.model, "start", True),
    "before the tokens": lambda llm: (LateTicket, "token_ids", False),
    "after the tokens": lambda llm: (LateTicket, "token_ids", True),
    "on_step": lambda llm: (llm.engine, "on_step", False),
    "before publishing": lambda llm: (llm.engine.scheduler.prefix_cache, "publish", False),
    "after publishing": lambda llm: (llm.engine.scheduler.prefix_cache, "publish", True),
    "before handing out": lambda llm: (Answer, "append", False),
    "after the first was handed out": lambda llm: (Answer, "append", True),
}


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_ends_generate_and_nothing_else(make, alone, monkeypatch, place, calls):
    llm = make(block_size=4, num_blocks=60)
    kinds = [GREEDY, replace(SEEDED, max_tokens=20)]
    streams = [llm.stream(ids(6, 1), params) for params in kinds]
    texts = [next(stream) for stream in streams]
    with monkeypatch.context() as patch:
        owner, name, after = PLACES[place](llm)
        fail_once(patch, owner, name, KeyboardInterrupt, after, calls)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([ids(5), ids(7)], GREEDY)
    assert len(llm.engine.requests) == 2
    check(llm.engine)
    assert llm.generate(ids(5), GREEDY)[0].outputs == alone(ids(5))
    texts = [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)]
    assert texts == [alone(ids(6, 1), params)[0].text for params in kinds]
    check_empty(llm)


def test_damaged_logits_end_only_the_call_that_met_them(make, alone):
    llm = make()
    host = llm.engine.model.model
    llm.engine.model.model = Script(llm.config, [5], 1)
    llm.engine.model.model.forward = lambda step, cache: host.forward(step, cache) * np.float32("nan")
    for output in llm.generate([ids(3), ids(4)], GREEDY):
        assert "no finite maximum" in str(output.error)
    check_empty(llm)
    llm.engine.model.model = host
    assert llm.generate(ids(3), GREEDY)[0].outputs == alone(ids(3))


# Metrics and trace ----------------------------------------------------------------------------------------------------


def test_times(make, monkeypatch):
    """Starting and waiting are what the host sees of the forward pass; a clock that moves a second for each."""
    llm, now = make(max_num_batched_tokens=4), [100.0]

    def tick(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (now.__setitem__(0, now[0] + 1), real(*args))[1])

    tick(llm.engine.model, "start")
    tick(LateTicket, "token_ids")
    monkeypatch.setattr(rvllm.engine.time, "perf_counter", lambda: now[0])
    metrics = llm.generate(ids(10), SamplingParams(max_tokens=5, ignore_eos=True))[0].metrics
    assert (llm.engine.metrics.num_steps, llm.engine.metrics.host_seconds) == (7, 0)
    assert llm.engine.metrics.forward_seconds == 14
    assert metrics.total_time == 14
    assert metrics.inter_token_times in ([2, 2, 2, 2], [2, 2, 2, 1])  # nothing starts beside the last one
    assert sum(metrics.inter_token_times) + metrics.time_to_first_token == 14


def test_a_trace_accounts_for_every_token_computed(make, alone):
    llm = make(block_size=4, num_blocks=11, max_num_batched_tokens=9)
    trace = Trace(llm.engine)
    results = llm.generate([ids(9), ids(9, 1), ids(6, 2)], GREEDY)
    metrics = llm.engine.metrics
    assert [r.outputs for r in results] == [alone(ids(9)), alone(ids(9, 1)), alone(ids(6, 2))]
    assert metrics.num_preemptions > 0
    assert computed_in(trace.steps, metrics, block_size=4) == {"0": 9 + 11, "1": 9 + 11, "2": 6 + 11}
