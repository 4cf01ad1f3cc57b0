"""A device that lags behind the host as far as it can: nothing runs before somebody waits.

On the emulator only. What the host changes too soon is found here every time; on a GPU, once in a while.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rvllm import LLM, SamplingParams, fast_model, transfers, variants
from rvllm.device_sampling import SamplingArrays
from rvllm.emulator import EmulatorError, HostBufferError
from rvllm.runtime import LIVE_SOURCES, Runtime, source_text
from rvllm.sampling import SamplingState
from rvllm.transfers import Delivery, Mailbox, Uplink
from tests.random_shapes import MODELS, Case, Run, Shape

SHAPE = Shape(1, 3, 1, 64, 96, 304, "Q8_0")
GREEDY, WARM = (SamplingState(SamplingParams(temperature=t, seed=5)) for t in (0, 0.8))


@pytest.fixture
def rt() -> Runtime:
    return Runtime("emulator", "fast", deferred=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPE.write(tmp_path_factory.mktemp("deferred") / "toy.gguf")


# The queue ------------------------------------------------------------------------------------------------------------


def test_nothing_runs_before_somebody_waits(rt: Runtime) -> None:
    done: list[int] = []
    for i in range(3):
        rt.submit(lambda i=i: done.append(i))
    first = rt.event()
    rt.submit(lambda: done.append(3))
    assert done == []
    first.synchronize()
    assert done == [0, 1, 2]
    first.synchronize()
    assert done == [0, 1, 2]
    rt.synchronize()
    assert done == [0, 1, 2, 3]


def test_launches_wait_for_a_download(rt: Runtime) -> None:
    x, y = rt.upload(np.ones(8, np.float32)), rt.upload(np.ones(8, np.float32))
    rt.launch("residual_add", 1, 32, [x, y, 8])
    rt.launch("residual_add", 1, 32, [y, x, 8])
    assert x.tolist() == [1] * 8
    assert rt.download(y).tolist() == [3] * 8 and x.tolist() == [2] * 8


def test_work_that_starts_work(rt: Runtime) -> None:
    done: list[int] = []
    rt.submit(lambda: (rt.submit(lambda: done.append(1)), done.append(2))[-1])
    rt.synchronize()
    assert done == [1, 2]


def test_an_error_comes_where_somebody_waits_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rt = Runtime("emulator", "check", deferred=True)
    monkeypatch.setitem(
        LIVE_SOURCES, "past_end.cu", 'extern "C" __global__ void past_end(float* x) { x[threadIdx.x] = 5; }'
    )
    x, short = rt.zeros(8), rt.zeros(4)
    rt.launch("past_end", 1, 8, [short])
    rt.launch("past_end", 1, 8, [x])
    with pytest.raises(EmulatorError, match="past_end"):
        rt.synchronize()
    assert rt.download(x).tolist() == [5] * 8


# Transfers ------------------------------------------------------------------------------------------------------------


def send_letter(box: Mailbox, value: int) -> None:
    box.send(np.array([1, 0, 0, 0, value, value, value], np.int32))


def mailbox(rt: Runtime) -> tuple[Mailbox, Any]:
    arrays = [rt.zeros(4, np.int32) for _ in range(7)]
    return Mailbox(rt, 16, arrays), arrays[1]


def test_a_letter_may_be_changed_after_it_was_sent(rt: Runtime) -> None:
    (box, token_ids), letter = mailbox(rt), np.array([1, 0, 0, 0, 5, 5, 5], np.int32)
    box.send(letter)
    letter[:] = 0
    assert rt.download(token_ids)[0] == 5


@pytest.mark.parametrize("under_way", [1, 3, 4])
def test_as_many_letters_as_there_are_turns(rt: Runtime, under_way: int) -> None:
    box, token_ids = mailbox(rt)
    for _ in range(3):
        for value in range(under_way):
            send_letter(box, value)
        assert rt.download(token_ids)[0] == under_way - 1


def test_one_letter_too_many(rt: Runtime) -> None:
    box, _ = mailbox(rt)
    for value in range(transfers.TURNS + 1):
        send_letter(box, value)
    with pytest.raises(HostBufferError, match="element 4 of 7 was 0 and is 4"):
        rt.synchronize()


def test_one_copy_too_many(rt: Runtime) -> None:
    target = rt.zeros(4, np.int32)
    uplink = Uplink(rt, target)
    for value in range(transfers.TURNS):
        uplink.send(np.full(3, value, np.int32))
    assert target.tolist() == [0] * 4
    assert rt.download(target).tolist() == [3, 3, 3, 0]
    for value in range(transfers.TURNS + 1):
        uplink.send(np.full(3, value, np.int32))
    with pytest.raises(HostBufferError):
        rt.synchronize()


def test_a_ticket_waits_for_its_own_step_only(rt: Runtime) -> None:
    delivery, none = Delivery(rt, 32), lambda _: None
    rt.submit(lambda: delivery.delivered[1].fill(7))
    first = delivery.ticket(1, 2, none)
    rt.submit(lambda: delivery.delivered[2].fill(8))
    second = delivery.ticket(2, 3, none)
    assert first.token_ids().tolist() == [7, 7] and delivery.delivered[2, 0] == 0
    assert second.token_ids().tolist() == [8, 8, 8]


def test_sampling_parameters_are_copied(rt: Runtime) -> None:
    arrays = SamplingArrays(rt, 2)
    host = arrays.fill([WARM])
    arrays.upload(host)
    expected = host.copy()
    host[:] = 0
    assert rt.download(arrays.words).tolist() == expected.tolist()


# Models ---------------------------------------------------------------------------------------------------------------


def steps(rt: Runtime, path: Path, variant: str, count: int) -> list[list[int]]:
    """Tokens of steps that are all started before the first one is waited for."""
    run = Run(rt, path, Case(variant, False, 12, 40, 4, 4, (0, 5, 30), (), 0))
    tickets = [run.model.start(run.step(counts), [GREEDY, WARM, GREEDY]) for counts in [(20, 3, 1), (1, 1, 9)][:count]]
    while len(tickets) < count:
        tickets.append(run.model.start(run.step((1, 1, 1)), [GREEDY, WARM, GREEDY]))
    return [ticket.token_ids().tolist() for ticket in tickets]


@pytest.mark.parametrize("variant", MODELS)
def test_the_same_tokens_however_late(rt: Runtime, path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_model, "WIDE", 12)
    assert steps(rt, path, variant, 3) == steps(Runtime("emulator", "fast"), path, variant, 3)


@pytest.mark.parametrize("deferred", [False, True])
def test_too_few_turns(path: Path, monkeypatch: pytest.MonkeyPatch, deferred: bool) -> None:
    """A buffer of the host written again too soon; or one of the device, which a device far ahead shows."""
    right = steps(Runtime("emulator", "fast"), path, "fused", 3)
    monkeypatch.setattr(transfers, "TURNS", 1)
    header = "deliver.cuh"
    monkeypatch.setitem(LIVE_SOURCES, header, source_text(header).replace("TURNS = 4", "TURNS = 1"))
    rt = Runtime("emulator", "fast", deferred=deferred)
    if deferred:
        with pytest.raises(HostBufferError):
            steps(rt, path, "fused", 3)
    else:
        assert steps(rt, path, "fused", 3) != right


@pytest.fixture
def texts(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """What an LLM on the graph variant answers, on an emulator that is deferred or not."""

    def run(deferred: bool) -> list[list[int]]:
        monkeypatch.setattr(variants, "Runtime", lambda device, mode: Runtime(device, mode, deferred=deferred))
        model = LLM(str(path), device="emulator", variant="graph", max_model_len=64)
        params = [SamplingParams(temperature=t, seed=3, max_tokens=6) for t in (0, 0.9, 0)]
        prompts = [[5, 9, 31, 8], [7] * 20, [40, 41]]
        outputs = model.generate(prompts, params)
        return [output.outputs[0].token_ids for output in outputs]

    return run


def test_the_engine_gives_the_same_texts(texts: Callable[..., list[list[int]]]) -> None:
    assert texts(True) == texts(False)


def test_the_engine_with_one_turn(texts: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "TURNS", 1)
    with pytest.raises(HostBufferError):
        texts(True)
