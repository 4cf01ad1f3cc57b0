"""The step loop: requests come in, a step runs, tokens and texts go out.

Generated from notebooks/11_continuous_batching.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import itertools
import reprlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rvllm.errors import RvllmError
from rvllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from rvllm.sampling import LogitsError, Sampled, SamplingParams, SamplingState, StopBuffer, sample
from rvllm.scheduler import Schedule, Scheduler, Sequence, Status
from rvllm.step import Step
from rvllm.tokenizer import IncrementalDecoder, Tokenizer


class PromptError(RvllmError):
    """A prompt that can't be run: what was found, what is allowed."""


class BusyError(RvllmError):
    """A step was asked for in the middle of another one, from `on_step` or by another thread."""


class Model(Protocol):
    """What the engine asks of a model: the NumPy one and the CUDA one have it in common."""

    def forward(self, step: Step, cache: Any) -> NDArray[np.float32]:
        """Logits [B, V] of the last token of each sequence of the step."""


class Answer(Sequence):
    """One answer in the making: a sequence, its sampling state, its text, and when it must end.

    Notebook 11, section 5.
    """

    def __init__(self, seq_id: int, request: Request, index: int, tokenizer: Tokenizer, max_model_len: int) -> None:
        super().__init__(seq_id, request.prompt_token_ids)
        params = request.params
        room = max_model_len - len(request.prompt_token_ids)
        self.max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        special = tokenizer.special_ids
        end_ids = {*params.stop_token_ids, *(special[text] for text in params.stop if text in special)}
        end_ids |= set() if params.ignore_eos else tokenizer.eog_ids
        self.request = request
        self.output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        # One list of ids for both: what sampling remembers is what comes out.
        self.state = SamplingState(params, request.prompt_token_ids, frozenset(end_ids), index, self.output.token_ids)
        self._tokenizer = tokenizer
        self._decoder, self._stop = IncrementalDecoder(tokenizer), StopBuffer(params.stop)
        self._last_token_time: float | None = None

    def append(self, sampled: Sampled, now: float) -> None:
        """Take the next token: add what may be shown to the text, and set `finish_reason` if this was the end."""
        output, token_id = self.output, sampled.token_id
        ended = token_id in self.state.end_ids
        num_tokens = len(output.token_ids) + 1
        piece = self._text_of(token_id, ended, num_tokens)
        self._last_token_time = self.request.count_token(now, self._last_token_time)
        place = self.num_prompt_tokens + len(output.token_ids)
        self.token_ids[place : place + 1] = [token_id]  # at the end, or in the place kept for it (part IV)
        output.token_ids.append(token_id)
        output.text += piece
        if output.logprobs is not None and sampled.logprobs is not None:
            output.logprobs.append(sampled.logprobs)
        if ended or self._stop.stopped:
            output.finish_reason = "stop"
        elif num_tokens >= self.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason and not self._stop.stopped:
            output.text += self._show(self._decoder.finish(), num_tokens) + self._stop.finish()

    def rewind(self) -> None:
        """Forget what did not come out: places kept for tokens, and random numbers."""
        del self.token_ids[self.num_prompt_tokens + len(self.output.token_ids) :]
        self.state.rewind()

    def _text_of(self, token_id: int, ended: bool, num_tokens: int) -> str:
        """What may be shown after this token. One that is not text only counts in the search for stop texts."""
        spelled = self._tokenizer.tokens[token_id]
        text = self._show(self._decoder.finish() if ended else self._decoder.push(token_id), num_tokens)
        if ended or spelled in self._tokenizer.special_ids:
            text += self._show(spelled, num_tokens, hidden=True)
        return text

    def _show(self, text: str, num_tokens: int, hidden: bool = False) -> str:
        """Text that can't be the beginning of a stop text; before `min_tokens` stop texts are not looked for."""
        params = self.request.params
        if not params.stop or num_tokens < params.min_tokens or self._stop.stopped:
            return "" if hidden else text
        return self._stop.push(text, hidden)


class Request:
    """A prompt that was checked, its parameters, and its answers, `params.n` of them. Notebook 11, section 5.

    error: why it failed on the way; None as long as it did not.
    """

    def __init__(
        self, request_id: int, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self.request_id, self.prompt, self.prompt_token_ids, self.params = request_id, prompt, prompt_token_ids, params
        self.metrics = RequestMetrics(num_prompt_tokens=len(prompt_token_ids))
        self._arrival_time = time.perf_counter()
        self.answers: list[Answer] = []
        self.error: RvllmError | None = None

    def __str__(self) -> str:
        """Its number and how it begins, for messages."""
        prompt = self.prompt_token_ids if self.prompt is None else self.prompt
        return f"request {self.request_id}, prompt {reprlib.repr(prompt)}"

    def count_token(self, now: float, before: float | None) -> float:
        """An answer gets a token now; `before` is when it got the last one, None for its first. Returns `now`."""
        metrics = self.metrics
        metrics.num_generated_tokens += 1
        metrics.total_time = now - self._arrival_time
        if metrics.time_to_first_token is None:
            metrics.time_to_first_token = metrics.total_time
        if before is not None:
            metrics.inter_token_times.append(now - before)
        return now

    @property
    def finished(self) -> bool:
        """Whether all answers have met their end."""
        return all(answer.output.finish_reason is not None for answer in self.answers)

    @property
    def output(self) -> RequestOutput:
        """The request with its answers so far; the `finish_reason` of those that go on is None."""
        self.metrics.num_cached_tokens = sum(answer.num_cached_tokens for answer in self.answers)
        self.metrics.num_preemptions = sum(answer.num_preemptions for answer in self.answers)
        answers = [answer.output for answer in self.answers]
        return RequestOutput(self.prompt, self.prompt_token_ids, answers, self.metrics, self.error)


@dataclass
class EngineMetrics:
    """Sums over all steps of an engine. Times in seconds; all but `forward_seconds` is work of the host.

    num_computed_tokens: tokens that went through the model.   num_cached_tokens: those that did not have to.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    schedule_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    output_seconds: float = 0.0

    @property
    def host_seconds(self) -> float:
        """Scheduling, sampling and output handling."""
        return self.schedule_seconds + self.sample_seconds + self.output_seconds

    def count_step(self, num_computed: int, times: list[float], scheduler: Scheduler) -> None:
        """Add a step of so many tokens; `times`: its beginning, and the ends of its four parts."""
        schedule_s, forward_s, sample_s, output_s = (b - a for a, b in itertools.pairwise(times))
        self.num_steps += num_computed > 0
        self.num_computed_tokens += num_computed
        self.num_cached_tokens = scheduler.num_cached_tokens
        self.num_preemptions = scheduler.num_preemptions
        self.schedule_seconds += schedule_s
        self.forward_seconds += forward_s
        self.sample_seconds += sample_s
        self.output_seconds += output_s


class Engine:
    """The step loop: schedule, forward, sample, hand out. Requests come and go between two steps.

    Notebook 11, section 6. It knows no device: `model` and `cache` belong to each other, and may be of any.
    Made for one thread; `LLM` shares it among several. `on_step(schedule, start)` is called when a step's tokens are
    chosen, before they count: a place to watch from.
    """

    def __init__(
        self,
        model: Model,
        cache: Any,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self.model, self.cache, self.tokenizer, self.scheduler = model, cache, tokenizer, scheduler
        self.vocab_size, self.max_model_len = vocab_size, min(max_model_len, scheduler.max_num_tokens)
        self._limit = "the context is" if self.max_model_len == max_model_len else "the KV cache holds"
        self.metrics = EngineMetrics()
        self.requests: dict[int, Request] = {}  # those that have not met their end
        self.on_step: Callable[[Schedule, float], None] = lambda _schedule, _start: None
        self._in_step, self._to_abort = False, list[int]()
        self._request_ids, self._seq_ids = itertools.count(), itertools.count()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step has something to do."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add_request(self, prompt_token_ids: Any, params: SamplingParams, prompt: str | None = None) -> Request:
        """Queue a request. Whatever could fail later is refused here: PromptError, ParameterError.

        prompt: the text that the ids were made from, for the output alone.
        """
        params.check_vocab(self.vocab_size)
        ids = check_prompt(prompt_token_ids, self.vocab_size, self.max_model_len, self._limit)
        request = Request(next(self._request_ids), prompt, ids, params)
        for index in range(params.n):
            answer = Answer(next(self._seq_ids), request, index, self.tokenizer, self.max_model_len)
            request.answers.append(answer)
            self.scheduler.add(answer)
        self.requests[request.request_id] = request
        return request

    def abort_request(self, request_id: int) -> bool:
        """Stop a request wherever it is and free its blocks. False for one that has met its end, or never was.

        In the middle of a step, from `on_step` or the garbage collector, it takes effect at the step's end.
        """
        if self._in_step:
            self._to_abort.append(request_id)
            return request_id in self.requests
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, "abort")
        return request is not None

    def step(self) -> list[Request]:
        """Compute one step; returns the requests that met their end in it.

        One whose own logits choose nothing is among them, with its `error`; the others do not notice. Where the step
        fails as a whole, its error comes out, and every running sequence starts over in the next step: what the cache
        holds of this one is unknown.
        """
        if self._in_step:
            raise BusyError("a step in the middle of a step; an Engine takes one step at a time, from one thread")
        self._in_step = True
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # the logits tell, and whose they are
                return self._step()
        except BaseException:
            self._start_over()
            raise
        finally:
            self._in_step = False
            while self._to_abort:
                self.abort_request(self._to_abort.pop())

    def _step(self) -> list[Request]:
        times = [time.perf_counter()]
        schedule = self.scheduler.schedule()
        if schedule is None:
            return []
        times.append(time.perf_counter())
        answers, sampled = self._compute(schedule, times)
        self.on_step(schedule, times[0])
        self.scheduler.update(schedule)
        finished = self._hand_out(answers, sampled)
        times.append(time.perf_counter())
        self.metrics.count_step(len(schedule.step.token_ids), times, self.scheduler)
        return finished

    def _compute(self, schedule: Schedule, times: list[float]) -> tuple[list[Any], list[Sampled]]:
        """The answers that get a token in this step, and their tokens; others wait for more chunks of their prompt.

        An id of -1 says that the answer's logits choose nothing. `times` gets the moments when logits and tokens are
        there.
        """
        logits = self.model.forward(schedule.step, self.cache)
        times.append(time.perf_counter())
        rows = schedule.sampled_rows
        answers: list[Any] = [schedule.sequences[row] for row in rows]
        chosen = logits if len(rows) == len(logits) else logits[rows]
        sampled = _sample_each(chosen, [answer.state for answer in answers]) if rows else []
        times.append(time.perf_counter())
        return answers, sampled

    def _start_over(self) -> None:
        answers: list[Any] = [*self.scheduler.running, *self.scheduler.waiting]
        for answer in answers:
            if answer.output.finish_reason is not None:  # it had met its end when the step failed
                self._take_out(answer)
            else:
                answer.rewind()
        self.scheduler.restart()

    def _hand_out(self, answers: list[Any], sampled: list[Sampled]) -> list[Request]:
        """Give every answer its token; take those out that met their end. Who had met it before gets none."""
        now, finished = time.perf_counter(), []
        for answer, token in zip(answers, sampled, strict=True):
            if answer.output.finish_reason is not None:
                continue
            if token.token_id < 0:
                answer.request.error = _logits_error(answer)
                self._end(answer.request, "error")
                finished.append(answer.request)
                continue
            answer.append(token, now)
            self.metrics.num_generated_tokens += 1
            if answer.output.finish_reason is not None and (request := self._take_out(answer)):
                finished.append(request)
        return finished

    def _end(self, request: Request, reason: str) -> None:
        """End all answers of a request that have not met their end."""
        for answer in request.answers:
            answer.output.finish_reason = answer.output.finish_reason or reason
        for answer in request.answers:
            if answer.status is not Status.FINISHED:
                self._take_out(answer)

    def _take_out(self, answer: Any) -> Request | None:
        """An answer has met its end; returns its request if that was the last of its answers."""
        if answer.output.finish_reason == "error":
            self.scheduler.prefix_cache.withdraw(answer)
        self.scheduler.finish(answer)
        return self.requests.pop(answer.request.request_id, None) if answer.request.finished else None


def _sample_each(logits: NDArray[np.float32], states: list[SamplingState]) -> list[Sampled]:
    """As `sample`, but a row that chooses nothing gets the id -1, and the others their tokens all the same."""
    try:
        return sample(logits, states)
    except LogitsError as error:
        damaged = set(error.rows)
    good = [row for row in range(len(states)) if row not in damaged]
    chosen = dict(zip(good, sample(logits[good], [states[row] for row in good]), strict=True))
    return [chosen.get(row, Sampled(-1)) for row in range(len(states))]


def _logits_error(answer: Answer) -> LogitsError:
    found = f"the logits of token {len(answer.output.token_ids) + 1} hold NaN or infinity, no finite maximum"
    return LogitsError(f"{answer.request}: {found}; its activations overflow, or weights or cache are damaged")


def check_prompt(token_ids: Any, vocab_size: int, max_model_len: int, limit: str = "the context is") -> list[int]:
    """Token ids of a prompt as a list of ints; PromptError unless they are ids and leave room for an answer."""
    if not isinstance(token_ids, (list, tuple, np.ndarray)) or getattr(token_ids, "shape", None) == ():
        raise PromptError(f"prompt: found {type(token_ids).__name__}; allowed: a text or a list of token ids")
    # Thousands of plain ids are checked as a whole; one by one, to name the wrong one, only where that fails.
    is_plain = set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size
    for token_id in [] if is_plain else token_ids:
        is_int = isinstance(token_id, (int, np.integer)) and not isinstance(token_id, bool)
        if not is_int or not 0 <= token_id < vocab_size:
            raise PromptError(f"prompt: found the token id {token_id!r}; allowed: 0 to {vocab_size - 1}")
    if len(token_ids) == 0:
        raise PromptError("prompt: found no tokens; allowed: at least one token (this model adds none by itself)")
    if len(token_ids) >= max_model_len:
        allowed = f"at most {max_model_len - 1}, to leave room for an answer: {limit} {max_model_len} tokens"
        raise PromptError(f"prompt: found {len(token_ids)} tokens; allowed: {allowed}")
    return list(token_ids) if is_plain else [int(i) for i in token_ids]
