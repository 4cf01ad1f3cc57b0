"""LLM: the public face over the engine.

It finds the model, tokenizes, puts requests into the `Engine` and drives its steps until they have met their end.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from tqdm import tqdm

from rvllm import hub
from rvllm.block_pool import BlockPool
from rvllm.config import LlamaConfig
from rvllm.cpu_model import read_config
from rvllm.device import resolve_device
from rvllm.engine import Engine, Request
from rvllm.errors import RvllmError
from rvllm.gguf import GGUFFile
from rvllm.memory import (
    MAX_SLOTS,
    MemoryBudgetError,
    Plan,
    Wish,
    context_of,
    multiprocessors,
    plan_memory,
    require_at_least_one,
)
from rvllm.outputs import RequestOutput
from rvllm.prefix_cache import PrefixCache
from rvllm.runtime import DeviceMemoryError
from rvllm.sampling import ParameterError, SamplingParams
from rvllm.scheduler import Scheduler
from rvllm.tokenizer import Messages, Tokenizer
from rvllm.trace import Trace
from rvllm.turns import Turns
from rvllm.variants import Runner, Sizes, choose_variant, make_runner

Prompt = str | SequenceOf[int]
Found = TypeVar("Found")


class ClosedError(RvllmError):
    """An LLM that has let go of its weights was asked for something."""


class TextStream:
    """Iterator over the pieces of one answer as they come; `output` is what there is so far.

    Each `next` runs steps of the engine where it finds nothing new; they advance every other request too. Close it to
    stop. It ends where the LLM is closed, and raises the error of a request that fails, once, after what came before.
    """

    def __init__(self, llm: LLM, request: Request) -> None:
        self._request, self._shown, self._told = request, 0, False
        self._llm: LLM | None = llm  # until the request has met its end

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            while (piece := self._next_piece()) is None:
                pass
        except BaseException:
            self.close()
            raise
        if piece:
            return piece
        if not self._told:
            self._told = True
            self.output.raise_error()
        raise StopIteration

    def _next_piece(self) -> str | None:
        llm = self._llm
        return self._take() or "" if llm is None else llm._look_or_step(self._take)

    def _take(self) -> str | None:
        """Text that was not shown yet: empty at the end, None where more is to come."""
        answer, start = self._request.answers[0].output, self._shown
        self._shown = len(answer.text)
        if answer.finish_reason is not None:
            self._llm = None
        elif start == self._shown:
            return None
        return answer.text[start : self._shown]

    def close(self) -> None:
        """Stop generating and free the cache blocks. What came so far stays in `output`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm._abort([self._request])

    def __del__(self) -> None:
        # In any thread and at any moment, the middle of a step included: nothing here may wait.
        if self._llm is not None:
            self._llm._dropped.append(self._request)

    @property
    def output(self) -> RequestOutput:
        """The request with its answer so far; `finish_reason` is None while it runs."""
        return self._request.output


class LLM:
    """A model ready to generate.

    model: `smollm2-135m`, `smollm2-360m`, a path to a GGUF file, or `owner/repo/file.gguf` on the Hugging Face hub.
    device: "auto" (a GPU where one works, else the CPU), "cpu", "cuda", "cuda:1", or "emulator" (slow: for looking).
    variant: which of part IV's models runs on a GPU, see `rvllm.variants`; None: the fast one where it covers the
    file, else, with a warning, the plain one.   exact: products as accurate as float32's at any batch size, slower.
    block_size: tokens of a cache block.   num_blocks: of the KV cache; None: by free memory (`rvllm.memory`).
    max_model_len: most tokens of a prompt and its answer together; None: the model's own limit or, with a warning, as
    many as memory allows. A given num_blocks lowers it too.
    max_num_seqs: sequences computed in the same step.   max_num_batched_tokens: tokens computed in a step; a longer
    prompt is computed in chunks.   enable_prefix_caching: a beginning that was computed in an earlier step is not
    computed again; prompts that start in the same step do not find each other's.
    trace: record every step in `trace`, for `rvllm.plots`.
    Any number of threads may use one LLM, each as if it were alone: they take turns, step by step, every step advances
    the requests of all, and an error or Ctrl-C in one thread ends its own requests only. (`engine` itself is for one
    thread.) After `close` every call raises ClosedError, one that waits in another thread included; streams end.
    Raises FileNotFoundError or an RvllmError that names what is wrong with the file, the model or the machine.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        device: str = "auto",
        variant: str | None = None,
        exact: bool = False,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        trace: bool = False,
    ) -> None:
        limits = {"block_size": block_size, "max_num_seqs": max_num_seqs}
        limits |= {"max_num_batched_tokens": max_num_batched_tokens}
        limits |= {} if num_blocks is None else {"num_blocks": num_blocks}
        for name, value in limits.items():
            require_at_least_one(name, value)
        self.device = resolve_device(device)
        file = GGUFFile(hub.resolve(model))
        self.tokenizer = Tokenizer(file.metadata)
        self.config: LlamaConfig = read_config(file)
        self.variant, remark = choose_variant(variant, self.device, file, block_size)
        if remark:
            warnings.warn(remark, stacklevel=2)
        wanted_len = context_of(self.config, max_model_len)
        if num_blocks is not None and not 2 <= num_blocks * block_size < MAX_SLOTS:
            found = f"num_blocks: found {num_blocks} of {block_size} tokens"
            raise ParameterError(f"{found}; allowed: room for 2 at least, and for fewer than {MAX_SLOTS}")
        limits |= {} if max_model_len is None else {"max_model_len": wanted_len}
        own = {name: int(value) for name, value in limits.items()}  # NumPy's integers would overflow
        own["multiprocessors"] = multiprocessors(self.device)
        plan = plan_memory(Wish(self.variant, self.device, self.config, file.tensors, exact, **own))
        if plan.remark:
            warnings.warn(plan.remark, stacklevel=2)
        runner = _runner(plan, file)
        pool = BlockPool(plan.num_blocks, block_size)
        prefix_cache = PrefixCache(pool) if enable_prefix_caching else None
        scheduler = Scheduler(pool, runner.max_num_seqs, runner.max_num_batched_tokens, prefix_cache)
        vocab_size = self.config.vocab_size
        length = plan.max_model_len if plan.remark else wanted_len
        engine = runner.engine(runner.model, runner.cache, self.tokenizer, scheduler, vocab_size, length)
        self._engine: Engine | None = engine
        self._trace = Trace(engine) if trace else None
        self._turns = Turns()
        self._streams: WeakValueDictionary[int, TextStream] = WeakValueDictionary()  # by request id, while they run
        self._dropped = deque[Request]()

    def __enter__(self) -> LLM:
        self._open_engine()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The loop itself, for one thread and nobody else's requests at the same time."""
        if self._dropped:
            self._turns.run(self._abort_dropped)
        return self._open_engine()

    @property
    def trace(self) -> Trace | None:
        """The record of every step, where it was asked for."""
        self._open_engine()
        return self._trace

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._open_engine().max_model_len

    def close(self) -> None:
        """Stop what runs, in whatever thread, and let go of weights and cache; ClosedError for who comes later."""
        self._turns.run(self._close)

    def _close(self) -> None:
        engine, self._engine, self._trace = self._engine, None, None
        if engine is None:
            return
        for request_id in list(engine.requests):
            engine.abort_request(request_id)
        del engine
        gc.collect()  # a model's launches refer to it and it to them: their memory would stay until the next collection

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        parse_special: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one or several prompts, each a text or a list of token ids; the order is kept.

        `parse_special`: a special token written in a text prompt becomes that token. A single prompt that is refused or
        fails raises; among several it gets its own `error` and the others go on. `use_tqdm`: progress on a terminal.
        """
        self._open_engine()
        several = _is_several(prompts)
        every = self._for_each(params, len(prompts)) if several else [params]
        entries: list[Request | RequestOutput] = []
        try:
            for prompt, own in zip(prompts if several else [prompts], every, strict=True):
                entries.append(self._entry(prompt, own, parse_special, several))
            self._run([entry for entry in entries if isinstance(entry, Request)], use_tqdm)
        finally:  # an error or Ctrl-C takes all of them out
            self._abort([entry for entry in entries if isinstance(entry, Request)])
        outputs = [entry.output if isinstance(entry, Request) else entry for entry in entries]
        if not several:
            outputs[0].raise_error()
        return outputs

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> list[RequestOutput]:
        """Answer a conversation, [{"role": ..., "content": ...}, ...].

        Special tokens in the contents are plain text.
        """
        self._open_engine()
        return self.generate(self.tokenizer.encode_chat(messages), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, parse_special: bool = True) -> TextStream:
        """Complete one prompt and hand over the text piece by piece. `SamplingParams.n` must be 1."""
        self._open_engine()
        params = _one(params)
        if params.n != 1:
            raise ParameterError(f"n: found {params.n}; allowed: 1 where the answer is streamed")
        request = self._add(prompt, params, parse_special)
        stream = self._streams[request.request_id] = TextStream(self, request)
        return stream

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise ClosedError("this LLM is closed; make a new one")
        return self._engine

    def _for_each(self, params: Any, count: int) -> SequenceOf[Any]:
        if params is None or isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, (list, tuple)) or len(params) != count:
            raise ParameterError(f"params: allowed is one SamplingParams, or a list of {count}, one for each prompt")
        return params

    def _entry(self, prompt: Any, params: Any, parse_special: bool, several: bool) -> Request | RequestOutput:
        """A request in the engine; among several, a refused one is an output that holds its error."""
        try:
            return self._add(prompt, _one(params), parse_special)
        except RvllmError as error:
            if not several or isinstance(error, ClosedError):
                raise
            # Without the traceback, which would keep the engine.
            return RequestOutput(prompt if isinstance(prompt, str) else None, error=error.with_traceback(None))

    def _add(self, prompt: Any, params: SamplingParams, parse_special: bool) -> Request:
        text = prompt if isinstance(prompt, str) else None
        token_ids = prompt if text is None else self.tokenizer.encode(text, parse_special)
        return self._turns.run(lambda: self._open_engine().add_request(token_ids, params, text))

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Run steps until these requests have met their end; others in the engine go along."""
        left, start, done = list(requests), time.perf_counter(), False
        with tqdm(total=len(left), unit="request", disable=None if use_tqdm and sys.stderr else True) as bar:
            while not done:
                done = bool(self._look_or_step(lambda: _all_finished(left)))
                if not bar.disable:  # on a terminal
                    tokens = sum(request.metrics.num_generated_tokens for request in requests)
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                    bar.update(sum(request.finished for request in requests) - bar.n)
        if any(answer.output.finish_reason == "abort" for request in requests for answer in request.answers):
            self._open_engine()  # somebody has closed it meanwhile

    def _look_or_step(self, look: Callable[[], Found | None]) -> Found | None:
        """One turn: what `look` finds, or else finds after a step. None if there is nothing yet."""

        def turn() -> Found | None:
            found = look()
            if found is None:
                self._step()
                found = look()
            return found

        return self._turns.run(turn)

    def _step(self) -> None:
        """In a turn: a step, for the requests of all threads. Streams whose request has ended let go of this LLM."""
        engine = self._open_engine()
        self._abort_dropped()
        for request in engine.step():
            if (stream := self._streams.pop(request.request_id, None)) is not None:
                stream._llm = None

    def _abort(self, requests: list[Request]) -> None:
        """Take out those of the requests that have not met their end."""
        running = [request for request in requests if not request.finished]
        if running:
            self._turns.run(lambda: self._abort_in_turn(running))

    def _abort_in_turn(self, requests: list[Request]) -> None:
        if self._engine is not None:  # closing has taken them out already
            for request in requests:
                self._engine.abort_request(request.request_id)

    def _abort_dropped(self) -> None:
        """In a turn: take out what streams have left behind that nobody refers to any more."""
        while self._dropped:
            self._abort_in_turn([self._dropped.popleft()])


def _all_finished(left: list[Request]) -> bool | None:
    """True if all requests have met their end, else None. `left` shrinks: a look costs little, however many wait."""
    while left and left[-1].finished:
        left.pop()
    return None if left else True


def _runner(plan: Plan, file: GGUFFile) -> Runner:
    """The model with its cache. MemoryBudgetError, with the sum, where memory runs out all the same."""
    wish, sizes = plan.wish, Sizes(plan.wish.block_size, plan.num_blocks, plan.limits)
    try:
        return make_runner(wish.variant, wish.device, file, sizes, wish.exact)
    except (MemoryError, DeviceMemoryError) as error:
        raise MemoryBudgetError(f"no room on {wish.device} ({error or 'the system gives none'}): {plan}") from error


def _one(params: Any) -> SamplingParams:
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ParameterError(f"params: found {type(params).__name__}; allowed: one SamplingParams")
    return params


def _is_several(prompts: Any) -> bool:
    """A list of prompts, as opposed to one prompt: a text, ids, or something that will be refused as a prompt."""
    several = isinstance(prompts, (list, tuple))
    return several and not (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
