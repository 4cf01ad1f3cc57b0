"""A step loop in which host and device work at the same time.

Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import time
from itertools import chain, islice
from typing import Any

from rvllm.device_engine import DeviceEngine, Flight
from rvllm.device_sampling import needs_host
from rvllm.engine import Request


class OverlappedEngine(DeviceEngine):
    """A step loop in which host and device work at the same time: the device is always one step ahead.

    While the device computes a step, the host hands out the tokens of the step before, and schedules the next one. It
    does not know yet which tokens that one begins with, but it knows how many: a placeholder, ~row, keeps the place of
    the token that is chosen in that row of the step in flight, and the device looks it up.
    What is known too late:
    - that an answer ended. It is in the next step already; what that one says of it is thrown away. Its blocks are
      free at once: whoever gets them writes in a later step, and the device keeps the order.
    - that an answer's logits choose nothing. The device reads the -1 that stands for its token as token 0, and that is
      thrown away likewise. Where a step fails as a whole, what is in flight is dropped and everybody starts over.
    """

    _flight: Flight | None = None  # the step that was started and not handed out

    def _step(self) -> list[Request]:
        """Start a step, then hand out the one before; finished requests thus come out one call later."""
        before, wait = self._flight, self._next_needs_host()
        if wait and before is None:
            return super()._step()
        times = [time.perf_counter()]
        schedule = None if wait else self.scheduler.schedule()
        times.append(time.perf_counter())
        flight = self._start(schedule) if schedule else None
        answers, sampled = before.land() if before else ([], [])
        times += [time.perf_counter()] * 2  # the device samples too, in the same time
        if schedule:
            self.on_step(schedule, times[0])
        if before:
            self.scheduler.publish(before.schedule)  # what is counted by now was computed up to `before`
        finished = self._hand_out(answers, sampled)
        if flight:
            self._keep_places(flight)
        self._flight = flight
        times.append(time.perf_counter())
        self.metrics.count_step(len(schedule.step.token_ids) if schedule else 0, times, self.scheduler)
        return finished

    def _keep_places(self, flight: Flight) -> None:
        """Count the step in flight, and let each of its answers grow by a placeholder.

        One whose last token is coming gets none: with nothing left to compute, it is not scheduled again.
        """
        self.scheduler.advance(flight.schedule)
        for row, answer in zip(flight.rows, flight.answers, strict=True):
            is_last = len(answer.output.token_ids) + 1 >= answer.max_tokens
            if answer.output.finish_reason is None and not is_last:
                answer.token_ids.append(~row)

    def _next_needs_host(self) -> bool:
        """Whether somebody who may be in the next step has to be sampled on the host: it needs all tokens known."""
        scheduler = self.scheduler
        room = scheduler.max_num_seqs - len(scheduler.running)
        candidates: Any = chain(scheduler.running, islice(scheduler.waiting, room))
        return any(needs_host(answer.state) for answer in candidates)

    def _start_over(self) -> None:
        self._flight = None
        super()._start_over()
