"""The step loop for a model that chooses tokens on the device.

Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rvllm.device_sampling import needs_host, seed_words, uniform
from rvllm.engine import Engine, Model
from rvllm.sampling import Sampled, SamplingState
from rvllm.scheduler import Schedule
from rvllm.step import Step


class Ticket(Protocol):
    """A step that was given to the device."""

    def token_ids(self) -> NDArray[np.int32]:
        """Wait for the tokens chosen, int32 [B]; -1 in a wanted row: its logits have no finite maximum."""


class DeviceModel(Model, Protocol):
    """A model that can also choose tokens, on the device. Steps are computed in the order in which they started."""

    def start(self, step: Step, states: Sequence[SamplingState | None]) -> Ticket:
        """Begin a step and don't wait. `states[i]` says how sequence i's token is chosen; None: it wants none.

        A negative id in `step.token_ids` stands for a token that the host does not know yet: ~row is the one chosen
        in that row of the step started before. For the same reason a state's own count of tokens may be one behind:
        it is `step.seq_lens[i]` that says which of its random numbers sequence i draws.
        """


@dataclass(frozen=True)
class Flight:
    """A step on the device: `answers[i]` gets the token of row `rows[i]`."""

    schedule: Schedule
    rows: list[int]
    answers: list[Any]
    ticket: Ticket

    def land(self) -> tuple[list[Any], list[Sampled]]:
        """Wait for the tokens: the answers, and what each gets; -1 where its logits have no finite maximum."""
        token_ids = self.ticket.token_ids().tolist()
        return self.answers, [Sampled(token_ids[row]) for row in self.rows]


class DeviceNumbers:
    """Stands in for a sequence's generator where the host samples: it draws what the device would draw.

    So a seeded text does not depend on which steps the host had to sample for the sake of others.
    """

    def __init__(self, state: SamplingState) -> None:
        self._state, self.bit_generator = state, state.rng.bit_generator  # the seed is read from there

    def random(self) -> float:
        """The number for the next token, in [0, 1): the seed and the count of all tokens before it say which."""
        state = self._state
        return uniform(seed_words(state).tolist(), len(state.prompt_token_ids) + len(state.output_token_ids))


class DeviceEngine(Engine):
    """The step loop for a model that chooses tokens on the device: four bytes a sequence come back, not its logits.

    Steps with a sequence that asks for more than the device can do are sampled on the host, in `Engine`'s own way.
    Notebook 15, section 8.
    """

    model: DeviceModel

    def _compute(self, schedule: Schedule, times: list[float]) -> tuple[list[Any], list[Sampled]]:
        answers: list[Any] = [schedule.sequences[row] for row in schedule.sampled_rows]
        if any(needs_host(answer.state) for answer in answers):
            for answer in answers:
                answer.state.rng = DeviceNumbers(answer.state)
            return super()._compute(schedule, times)
        tokens = self._start(schedule).land()
        times += [time.perf_counter()] * 2  # the device samples too, in the same time
        return tokens

    def _start(self, schedule: Schedule) -> Flight:
        rows = schedule.sampled_rows
        answers: list[Any] = [schedule.sequences[row] for row in rows]
        states: list[SamplingState | None] = [None] * len(schedule.sequences)
        for row, answer in zip(rows, answers, strict=True):
            states[row] = answer.state
        return Flight(schedule, rows, answers, self.model.start(schedule.step, states))
