"""A request whose own logits choose nothing ends alone, with an error that names it; others say what they say alone.

First with a NumPy model that damages the sequences it is told to, in every engine; then with weights that make one
token overflow, on the models themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from rvllm.device_engine import DeviceEngine
from rvllm.engine import BusyError, Engine
from rvllm.llm import LLM
from rvllm.outputs import RequestOutput
from rvllm.overlapped_engine import OverlappedEngine
from rvllm.sampling import LogitsError, SamplingParams
from rvllm.scheduler import Sequence, check_invariants
from tests import toy
from tests.fast_toy import FastShape
from tests.test_device_engine import LateModel, Reference, check, new_llm
from tests.test_engine import GREEDY, LONG, check_empty, ids, same_answer
from tests.test_fused_model import write

BAD = 220  # the token that damages whoever has it; no healthy text here has it
BAD_PROMPT = [*ids(5, 9), BAD, 7]
SEEDED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
WITH_HOST = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
COMPANY = [(ids(5), GREEDY), (ids(30, 1), SEEDED), (ids(7, 2), LONG), (ids(40, 3), GREEDY)]


class Fragile:
    """A host model in which one token damages its sequence: keys, values and logits, from there on.

    It finds its victims in the cache: what a damaged token left there is damage, as in a real model.
    """

    def __init__(self, model: Any, value: float = np.nan, bad: Collection[int] = (BAD,)) -> None:
        self.model, self.config, self.value, self.bad = model, model.config, value, bad

    def forward(self, step: Any, cache: Any) -> np.ndarray:
        logits = self.model.forward(step, cache)
        for storage in (cache.keys, cache.values):
            slots = storage.reshape(storage.shape[0], -1, *storage.shape[3:])
            slots[:, step.slot_mapping[np.isin(step.token_ids, self.bad)]] = np.nan
        for row in range(step.num_seqs):
            context = cache.keys[0, step.block_tables[row]].reshape(-1, *cache.keys.shape[3:])
            if not np.isfinite(context[: step.seq_lens[row]]).all():
                logits[row] = self.value
        return logits


def fragile(llm: LLM, **options: Any) -> LLM:
    engine = llm.engine
    if isinstance(engine.model, LateModel):
        engine.model.model = Fragile(engine.model.model, **options)
    else:
        engine.model = Fragile(engine.model, **options)
    return llm


def repair(llm: LLM) -> None:
    model = llm.engine.model
    (model.model if isinstance(model, LateModel) else model).bad = ()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture(scope="module", params=[Reference, DeviceEngine, OverlappedEngine])
def make(request: pytest.FixtureRequest, path: Path) -> Callable[..., LLM]:
    return lambda **options: new_llm(path, request.param, **options)


@pytest.fixture(scope="module")
def alone(path: Path) -> Callable[..., list[Any]]:
    llm = new_llm(path, Reference, num_blocks=16, enable_prefix_caching=False)
    return lambda prompt, params=GREEDY: llm.generate(prompt, params)[0].outputs


def check_failed(output: RequestOutput, words: str = "") -> None:
    assert isinstance(output.error, LogitsError)
    assert "NaN or infinity" in str(output.error) and words in str(output.error)
    assert "row" not in str(output.error) and "batch" not in str(output.error)
    with pytest.raises(LogitsError):
        _ = output.text


# In company -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "value"), [(0, np.nan), (2, np.inf), (4, -np.inf)])
@pytest.mark.parametrize("bad", [GREEDY, SEEDED, WITH_HOST], ids=["greedy", "seeded", "host"])
def test_one_of_several_fails(make, alone, place, value, bad) -> None:
    llm = fragile(make(block_size=4, max_num_batched_tokens=16), value=value)
    jobs = [*COMPANY[:place], (BAD_PROMPT, bad), *COMPANY[place:]]
    outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    failed = outputs.pop(place)
    check_failed(failed, f"request {place}, prompt [")
    assert [(out.token_ids, out.finish_reason) for out in failed.outputs] == [([], "error")]
    for output, (prompt, params) in zip(outputs, COMPANY, strict=True):
        assert output.error is None
        same_answer(output.outputs[0], alone(prompt, params)[0])
    check_empty(llm)


@pytest.mark.parametrize("budget", [3, 16])
@pytest.mark.parametrize("kind", ["greedy", "host"])
def test_whoever_drives(make, alone, budget, kind) -> None:
    """Two streams: the healthy one drives and notices nothing, the other one raises when it is read."""
    llm = fragile(make(block_size=4, max_num_batched_tokens=budget))
    healthy, faulty = llm.stream(ids(6), LONG), llm.stream(BAD_PROMPT, WITH_HOST if kind == "host" else GREEDY)
    text = "".join(next(healthy) for _ in range(8))
    assert faulty.output.outputs[0].finish_reason == "error"
    for _ in range(2):
        check_failed(faulty.output)
    with pytest.raises(LogitsError, match=r"request 1, prompt \["):
        next(faulty)
    assert list(faulty) == []
    faulty.close()
    assert text + "".join(healthy) == alone(ids(6), LONG)[0].text
    check_empty(llm)


def test_the_faulty_one_drives(make, alone) -> None:
    llm = fragile(make(block_size=4))
    healthy, faulty = llm.stream(ids(6), LONG), llm.stream(BAD_PROMPT, GREEDY)
    with pytest.raises(LogitsError):
        next(faulty)
    assert healthy.output.outputs[0].finish_reason is None
    with pytest.raises(LogitsError):
        llm.generate(BAD_PROMPT, GREEDY)
    assert "".join(healthy) == alone(ids(6), LONG)[0].text
    assert all(isinstance(output.error, LogitsError) for output in llm.generate([BAD_PROMPT] * 3, GREEDY))
    check_empty(llm)


def test_a_request_fails_after_some_text(make, alone) -> None:
    """What came before stays, and a stream gives it before the error."""
    llm = make(block_size=4)
    whole = alone(ids(6))[0]
    position = 5
    while whole.token_ids[position] in [*ids(6), *whole.token_ids[:position]]:
        position += 1
    llm = fragile(llm, bad=[whole.token_ids[position]])
    output = llm.generate([ids(6)], GREEDY)[0]
    check_failed(output, f"the logits of token {position + 2} ")
    out = output.outputs[0]
    assert (out.token_ids, out.finish_reason) == (whole.token_ids[: position + 1], "error")
    assert whole.text.startswith(out.text) and out.text
    stream, pieces = llm.stream(ids(6), GREEDY), []
    with pytest.raises(LogitsError):
        pieces.extend(stream)
    assert stream.output.outputs[0].text == out.text
    stream, pieces = llm.stream(ids(6), GREEDY), []
    llm.generate([ids(6)], GREEDY)  # drives it
    with pytest.raises(LogitsError):
        pieces += [next(stream) for _ in range(2)]
    check_empty(llm)


@pytest.mark.parametrize("seats", [2, 3, 256])
def test_answers_of_one_request_end_together(make, alone, seats) -> None:
    """Those that have met their end keep it; those that wait go too."""
    params = SamplingParams(max_tokens=20, n=4, temperature=1.5, seed=1, stop_token_ids=list(range(3, 60)))
    expected = alone(ids(6), params)
    lengths = sorted(len(out.token_ids) for out in expected)
    assert lengths[0] < lengths[-1]
    longest = next(out for out in expected if len(out.token_ids) == lengths[-1])
    others = {i for out in expected if out is not longest for i in out.token_ids}
    bad = next(i for i in longest.token_ids[lengths[0] :] if i not in others and i not in ids(6))
    llm = fragile(make(block_size=4, max_num_seqs=seats), bad=[bad])
    healthy = llm.stream(ids(9, 4), LONG)
    output = llm.generate([ids(6)], params)[0]
    check_failed(output)
    reasons = [out.finish_reason for out in output.outputs]
    assert "error" in reasons and set(reasons) <= {"error", "stop", "length"}
    for ours, theirs in zip(output.outputs, expected, strict=True):
        if ours.finish_reason != "error":
            assert ours.token_ids == theirs.token_ids
        assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
    assert "".join(healthy) == alone(ids(9, 4), LONG)[0].text
    check_empty(llm)


# What is left behind --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("at", [3, 17])
def test_nobody_finds_the_blocks_of_a_failed_request(make, alone, budget, at) -> None:
    """The prompt is computed in chunks, whose blocks could be found before anybody knew of the damage."""
    llm = fragile(make(block_size=4, num_blocks=60, max_num_batched_tokens=budget))
    prompt = ids(20, 5)
    prompt[at] = BAD
    healthy = llm.stream(ids(6), LONG)
    check_failed(llm.generate([prompt], GREEDY)[0])
    assert llm.engine.scheduler.prefix_cache.match(Sequence(0, [*prompt, 5])) == []
    repair(llm)
    assert llm.generate(prompt, GREEDY)[0].outputs == alone(prompt)
    assert "".join(healthy) == alone(ids(6), LONG)[0].text
    check_empty(llm)


def test_what_others_share_with_a_failed_request_stays_right(make, alone) -> None:
    """Its healthy beginning is that of two others: of one before it, which goes on, and of one after it."""
    llm = fragile(make(block_size=4))
    beginning = ids(16, 5)
    before = llm.stream([*beginning, 5], LONG)
    text = next(before)
    check_failed(llm.generate([[*beginning, BAD, 6]], GREEDY)[0])
    assert llm.generate([*beginning, 9], GREEDY)[0].outputs == alone([*beginning, 9])
    text += "".join(before)
    assert text == alone([*beginning, 5], LONG)[0].text
    assert llm.generate([*beginning, 11], GREEDY)[0].outputs == alone([*beginning, 11])
    check_empty(llm)


def test_preempted_and_failed(make, alone) -> None:
    """A pool in which somebody always makes room, and every third request fails."""
    llm = fragile(make(block_size=4, num_blocks=20, max_num_batched_tokens=9))
    prompts = [ids(4 + i, i) for i in range(9)]
    for prompt in prompts[::3]:
        prompt[2] = BAD
    requests = [llm.engine.add_request(prompt, LONG if i % 2 else GREEDY) for i, prompt in enumerate(prompts)]
    finished = []
    while llm.engine.has_unfinished_requests:
        finished += llm.engine.step()
        check(llm.engine)
    assert sorted(r.request_id for r in finished) == list(range(9))
    for i, request in enumerate(requests):
        if i % 3 == 0:
            check_failed(request.output)
        else:
            same_answer(request.output.outputs[0], alone(prompts[i], LONG if i % 2 else GREEDY)[0])
    metrics = llm.engine.metrics
    assert metrics.num_preemptions > 0
    assert metrics.num_generated_tokens == sum(request.metrics.num_generated_tokens for request in requests)
    check_empty(llm)


def test_a_step_that_fails_as_a_whole_beside_a_failed_request(make, alone, monkeypatch) -> None:
    """An interrupt while the failed one is taken out: it stays failed, the others start over."""
    llm = fragile(make(block_size=4))
    healthy = llm.stream(ids(6), LONG)
    with monkeypatch.context() as patch:
        real = llm.engine.scheduler.finish

        def interrupted(sequence: Any) -> None:
            patch.setattr(llm.engine.scheduler, "finish", real)
            raise KeyboardInterrupt

        patch.setattr(llm.engine.scheduler, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([BAD_PROMPT, ids(3)], GREEDY)
    check_invariants(llm.engine.scheduler)
    assert "".join(healthy) == alone(ids(6), LONG)[0].text
    check_empty(llm)


def test_a_step_in_the_middle_of_a_step_is_refused(make, alone) -> None:
    llm = make(block_size=4)
    request, refused = llm.engine.add_request(ids(6), GREEDY), []

    def meddle(_schedule: Any, _start: float) -> None:
        with pytest.raises(BusyError):
            llm.engine.step()
        refused.append(True)

    llm.engine.on_step = meddle
    while not request.finished:
        llm.engine.step()
    assert request.output.outputs == alone(ids(6))
    assert len(refused) >= 12


# Weights that make one token overflow ---------------------------------------------------------------------------------

SHAPE = FastShape(layers=2, H=2, K=1, F=96)
HOT = 77  # the token
VARIANTS = [None, "f32", "workspace", "fused", "graph"]
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
WARM = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, seed=5)


def overflowing(tensors: dict[str, np.ndarray]) -> None:
    """Only this token has something in the first place of the residual stream, where the feed-forward gain is huge."""
    tensors["token_embd.weight"][:, 0] = 0
    tensors["token_embd.weight"][HOT] = 0
    tensors["token_embd.weight"][HOT, 0] = 4
    for name, tensor in tensors.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            tensor[0] = 0
        if name.endswith("ffn_norm.weight"):
            tensor[0] = 1e30


@pytest.fixture(scope="module")
def hot_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hot") / "hot.gguf", SHAPE, Type.Q8_0, overflowing)


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def hot(request: pytest.FixtureRequest, hot_path: Path) -> Iterator[LLM]:
    """Each prompt in a few blocks of many: none is handed out twice."""
    device = "emulator" if request.param else "cpu"
    sizes: dict[str, Any] = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with LLM(hot_path, device, request.param, **sizes) as llm:
        yield llm


def test_an_overflow_is_its_own_requests_error(hot: LLM) -> None:
    good = [([5, 6, 7], SHORT), ([8] * 9, WARM)]
    expected = [hot.generate(prompt, params)[0].outputs for prompt, params in good]
    jobs = [good[0], ([9, HOT, 10], SHORT), good[1], ([HOT], WARM)]
    first, bad, last, warm = hot.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    assert [first.outputs, last.outputs] == expected
    for output, prompt in ((bad, f"[9, {HOT}, 10]"), (warm, f"[{HOT}]")):
        check_failed(output, f"prompt {prompt}: the logits of token 1 ")
    healthy, faulty = hot.stream(*good[0]), hot.stream([9, HOT, 10], SHORT)
    assert "".join(healthy) == expected[0][0].text
    with pytest.raises(LogitsError):
        next(faulty)
    with pytest.raises(LogitsError):
        hot.generate([HOT, 5], SHORT)
    check_empty(hot)


def test_an_engine_of_its_own(hot: LLM) -> None:
    """Whoever drives the engine himself gets the failed request among the finished ones, in the step that found it."""
    engine: Engine = hot.engine
    bad, good = engine.add_request([9, HOT, 10], SHORT), engine.add_request([5, 6, 7], SHORT)
    finished = []
    while not bad.finished:
        finished += engine.step()
    assert finished == [bad] and bad.error is not None
    while engine.has_unfinished_requests:
        finished += engine.step()
    assert finished == [bad, good] and good.error is None
    check_empty(hot)
