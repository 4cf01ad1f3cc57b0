"""What an engine did, step by step: recorded by `LLM(..., trace=True)`, drawn by `rvllm.plots`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rvllm.engine import Engine
    from rvllm.scheduler import Schedule


@dataclass(frozen=True)
class StepRecord:
    """One step. Labels are "request", or "request.answer" where a request has several. Times in seconds.

    computed: {label: (first position, number of tokens)}.   prompts: {label: tokens of the prompt}.
    block_tables: {label: blocks}.   cached_blocks: blocks that the prefix cache has entries of.
    waiting, preempted: labels of those that wait while it runs, and of those that gave their blocks back for it.
    """

    start: float
    end: float
    computed: dict[str, tuple[int, int]]
    prompts: dict[str, int]
    block_tables: dict[str, list[int]]
    cached_blocks: list[int]
    waiting: list[str]
    preempted: list[str]


class Trace:
    """The records of all steps of an engine, from its construction on. It grows with every step."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[StepRecord] = []
        self.num_blocks = engine.scheduler.pool.num_blocks
        self._scheduler, self._begin = engine.scheduler, time.perf_counter()
        engine.on_step = self._record

    def _record(self, schedule: Schedule, start: float) -> None:
        counted = zip(schedule.sequences, schedule.num_new_tokens, strict=True)
        self.steps.append(
            StepRecord(
                start=start - self._begin,
                end=time.perf_counter() - self._begin,
                computed={_label(s): (s.num_computed_tokens, n) for s, n in counted},
                prompts={_label(s): s.num_prompt_tokens for s in schedule.sequences},
                block_tables={_label(s): list(s.block_table) for s in self._scheduler.running},
                cached_blocks=[block for block in range(self.num_blocks) if self._scheduler.prefix_cache.holds(block)],
                waiting=[_label(s) for s in self._scheduler.waiting],
                preempted=[_label(s) for s in schedule.preempted],
            )
        )


def _label(answer: Any) -> str:
    request = answer.request
    return f"{request.request_id}.{answer.output.index}" if request.params.n > 1 else str(request.request_id)
