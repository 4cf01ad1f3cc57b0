"""LLM: the public face over the engine.

It finds the model, tokenizes, puts requests into the `Engine` and drives its steps until they have met their end.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Any

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
from rvllm.variants import Runner, Sizes, choose_variant, make_runner

Prompt = str | SequenceOf[int]


class ClosedError(RvllmError):
    """An LLM that has let go of its weights was asked for something."""


class TextStream:
    """Iterator over the pieces of one answer as they come; `output` is what there is so far.

    Each `next` runs steps of the engine, which advance every other request in it too. Close it to stop.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request, self._shown = engine, request, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        answer = self._request.answers[0].output
        try:
            while len(answer.text) == self._shown and answer.finish_reason is None:
                self._engine.step()
        except BaseException:
            self.close()
            raise
        piece = answer.text[self._shown :]
        if not piece:
            raise StopIteration
        self._shown += len(piece)
        return piece

    def close(self) -> None:
        """Stop generating and free the cache blocks. What came so far stays in `output`."""
        self._engine.abort_request(self._request.request_id)

    def __del__(self) -> None:
        self.close()

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
        self.engine = runner.engine(runner.model, runner.cache, self.tokenizer, scheduler, vocab_size, length)
        self.trace = Trace(self.engine) if trace else None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._open_engine().max_model_len

    def close(self) -> None:
        """Stop what runs and let go of weights and cache; requests are refused from now on."""
        engine = self.__dict__.pop("engine", None)
        for request_id in list(engine.requests) if engine else []:
            engine.abort_request(request_id)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        parse_special: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one or several prompts, each a text or a list of token ids; the order is kept.

        `parse_special`: a special token written in a text prompt becomes that token. A single bad prompt raises;
        among several it gets its own `error` and the others go on. `use_tqdm`: show progress on a terminal.
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
            for entry in entries:
                if isinstance(entry, Request):
                    self.engine.abort_request(entry.request_id)
        return [entry.output if isinstance(entry, Request) else entry for entry in entries]

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> list[RequestOutput]:
        """Answer a conversation, [{"role": ..., "content": ...}, ...].

        Special tokens in the contents are plain text.
        """
        return self.generate(self.tokenizer.encode_chat(messages), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, parse_special: bool = True) -> TextStream:
        """Complete one prompt and hand over the text piece by piece. `SamplingParams.n` must be 1."""
        params = _one(params)
        if params.n != 1:
            raise ParameterError(f"n: found {params.n}; allowed: 1 where the answer is streamed")
        return TextStream(self._open_engine(), self._add(prompt, params, parse_special))

    def _open_engine(self) -> Engine:
        if "engine" not in self.__dict__:
            raise ClosedError("this LLM is closed; make a new one")
        return self.engine

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
            return RequestOutput(prompt if isinstance(prompt, str) else None, error=error)

    def _add(self, prompt: Any, params: SamplingParams, parse_special: bool) -> Request:
        engine = self._open_engine()
        if not isinstance(prompt, str):
            return engine.add_request(prompt, params)
        return engine.add_request(self.tokenizer.encode(prompt, parse_special), params, prompt)

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Run steps until these requests have met their end; others in the engine go along."""
        missing = {request.request_id for request in requests}
        start = time.perf_counter()
        with tqdm(total=len(missing), unit="request", disable=None if use_tqdm and sys.stderr else True) as bar:
            while missing:
                done = missing.intersection(request.request_id for request in self.engine.step())
                missing -= done
                if not bar.disable:  # on a terminal
                    tokens = sum(request.metrics.num_generated_tokens for request in requests)
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                    bar.update(len(done))


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
