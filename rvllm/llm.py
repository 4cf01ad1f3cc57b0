"""LLM: the public face. For now over a plain loop; the engine of notebook 11 will take the loop's place.

The life of a request: `_admit` checks prompt and parameters and makes a `Request`; its answers become `Sequence`s;
`_run` computes their prompts, then one token for all running sequences a step, until each has met its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvllm import hub
from rvllm.block_pool import BlockPool, blocks_needed, grow_table
from rvllm.cpu_model import CpuModel, DenseKVCache
from rvllm.cuda_model import CudaModel
from rvllm.device import resolve_device
from rvllm.errors import RvllmError
from rvllm.gguf import GGUFFile
from rvllm.kv_cache import DeviceKVCache
from rvllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from rvllm.runtime import Runtime
from rvllm.sampling import ParameterError, Sampled, SamplingParams, SamplingState, StopBuffer, sample
from rvllm.step import make_step
from rvllm.tokenizer import IncrementalDecoder, Messages, Tokenizer

Prompt = str | SequenceOf[int]
BLOCK_SIZE = 16  # of the paged cache on a device


class PromptError(RvllmError):
    """A prompt that can't be run: what was found, what is allowed."""


class ClosedError(RvllmError):
    """An LLM that has let go of its weights was asked for something."""


class Request:
    """A prompt that was checked, its parameters, and the clock that started when it was accepted."""

    def __init__(self, prompt: str | None, token_ids: list[int], params: SamplingParams) -> None:
        self.prompt, self.token_ids, self.params = prompt, token_ids, params
        self.metrics = RequestMetrics(num_prompt_tokens=len(token_ids))
        self._start = time.perf_counter()

    def count_token(self) -> None:
        """A token has come out: note the time."""
        self.metrics.total_time = time.perf_counter() - self._start
        self.metrics.num_generated_tokens += 1
        if self.metrics.time_to_first_token is None:
            self.metrics.time_to_first_token = self.metrics.total_time


class Sequence:
    """One answer in the making: its sampling state, its text, and when it must end."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer, max_model_len: int) -> None:
        params = request.params
        room = max_model_len - len(request.token_ids)
        self.max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eog_ids)
        self.request = request
        self.output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        # One list of ids for both: what sampling remembers is what comes out.
        self.state = SamplingState(params, request.token_ids, end_ids, index, self.output.token_ids)
        self._decoder, self._stop = IncrementalDecoder(tokenizer), StopBuffer(params.stop)

    def append(self, sampled: Sampled) -> str:
        """Take the next token; return the text that may be shown now, and set `finish_reason` if this was the end."""
        self.request.count_token()
        self.output.token_ids.append(sampled.token_id)
        if self.output.logprobs is not None and sampled.logprobs is not None:
            self.output.logprobs.append(sampled.logprobs)
        ended = sampled.token_id in self.state.end_ids
        piece = "" if ended else self._show(self._decoder.push(sampled.token_id))
        if self._stop.stopped or ended:
            self.output.finish_reason = "stop"
        elif len(self.output.token_ids) >= self.max_tokens:
            self.output.finish_reason = "length"
        if self.output.finish_reason and not self._stop.stopped:
            piece += self._show(self._decoder.finish()) + self._stop.finish()
        self.output.text += piece
        return piece

    def _show(self, text: str) -> str:
        """Text that can't be the beginning of a stop text; before `min_tokens` stop texts are not looked for."""
        early = len(self.output.token_ids) < self.request.params.min_tokens
        return text if early or self._stop.stopped else self._stop.push(text)


class TextStream:
    """Iterator over the pieces of one answer as they come; `output` is what there is so far.

    Close it to stop.
    """

    def __init__(self, request: Request, sequence: Sequence, events: Iterator[tuple[Sequence, str]]) -> None:
        self._request, self._sequence, self._events = request, sequence, events

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._events)[1]

    def close(self) -> None:
        """Stop generating. What came so far stays in `output`."""
        close_events = getattr(self._events, "close", None)
        if close_events is not None:
            close_events()
        self._sequence.output.finish_reason = self._sequence.output.finish_reason or "abort"

    @property
    def output(self) -> RequestOutput:
        """The request with its answer so far; `finish_reason` is None while it runs."""
        return RequestOutput(
            self._request.prompt, self._request.token_ids, [self._sequence.output], self._request.metrics
        )


class LLM:
    """A model ready to generate.

    model: `smollm2-135m`, `smollm2-360m`, a path to a GGUF file, or `owner/repo/file.gguf` on the Hugging Face hub.
    device: "auto" (a GPU where one works, else the CPU), "cpu", "cuda", "cuda:1", or "emulator" (slow: for looking).
    max_model_len: most tokens of a prompt and its answer together; the model's own limit if None.
    max_num_seqs: answers computed at the same time.   max_num_batched_tokens: prompt tokens computed at a time.
    Raises FileNotFoundError or an RvllmError that names what is wrong with the file, the model or the machine.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
    ) -> None:
        self.device = resolve_device(device)
        file = GGUFFile(hub.resolve(model))
        self.tokenizer = Tokenizer(file.metadata)
        self.model: Any = CpuModel(file) if self.device == "cpu" else CudaModel(file, Runtime(self.device, "fast"))
        self.config = self.model.config
        self.max_model_len = self._limit(max_model_len)
        self.max_num_seqs = _at_least_one("max_num_seqs", max_num_seqs)
        self.max_num_batched_tokens = _at_least_one("max_num_batched_tokens", max_num_batched_tokens)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the weights; requests are refused from now on."""
        self.__dict__.pop("model", None)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        parse_special: bool = True,
    ) -> list[RequestOutput]:
        """Complete one or several prompts, each a text or a list of token ids; the order is kept.

        `parse_special`: a special token written in a text prompt becomes that token. A single bad prompt raises;
        among several it gets its own `error` and the others go on.
        """
        if not _is_several(prompts):
            return self._complete([self._admit(prompts, self._one(params), parse_special)])
        every = self._for_each(params, len(prompts))
        return self._complete([self._try_admit(p, q, parse_special) for p, q in zip(prompts, every, strict=True)])

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> list[RequestOutput]:
        """Answer a conversation, [{"role": ..., "content": ...}, ...].

        Special tokens in the contents are plain text.
        """
        return self.generate(self.tokenizer.encode_chat(messages), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, parse_special: bool = True) -> TextStream:
        """Complete one prompt and hand over the text piece by piece. `SamplingParams.n` must be 1."""
        params = self._one(params)
        if params.n != 1:
            raise ParameterError(f"n: found {params.n}; allowed: 1 where the answer is streamed")
        request = self._admit(prompt, params, parse_special)
        sequence = Sequence(request, 0, self.tokenizer, self.max_model_len)
        return TextStream(request, sequence, self._run([sequence]))

    def _limit(self, wanted: int | None) -> int:
        limit = self.config.max_position_embeddings
        if wanted is not None and not 2 <= _at_least_one("max_model_len", wanted) <= limit:
            raise ParameterError(f"max_model_len: found {wanted}; allowed: 2 to {limit}, the model's context")
        return limit if wanted is None else int(wanted)

    def _one(self, params: Any) -> SamplingParams:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"params: found {type(params).__name__}; allowed: one SamplingParams")
        return params

    def _for_each(self, params: Any, count: int) -> SequenceOf[Any]:
        if params is None or isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, (list, tuple)) or len(params) != count:
            raise ParameterError(f"params: allowed is one SamplingParams, or a list of {count}, one for each prompt")
        return params

    def _try_admit(self, prompt: Any, params: Any, parse_special: bool) -> Request | RequestOutput:
        try:
            return self._admit(prompt, self._one(params), parse_special)
        except RvllmError as error:
            return RequestOutput(prompt if isinstance(prompt, str) else None, error=error)

    def _admit(self, prompt: Any, params: SamplingParams, parse_special: bool) -> Request:
        """Check everything that could fail later; nothing is computed for a request that breaks a rule."""
        if not hasattr(self, "model"):
            raise ClosedError("this LLM is closed; make a new one")
        params.check_vocab(self.config.vocab_size)
        is_text = isinstance(prompt, str)
        ids = self.tokenizer.encode(prompt, parse_special) if is_text else self._check_ids(prompt)
        if not ids:
            raise PromptError("prompt: found no tokens; allowed: at least one token (this model adds none by itself)")
        if len(ids) >= self.max_model_len:
            most = self.max_model_len - 1
            raise PromptError(f"prompt: found {len(ids)} tokens; allowed: at most {most}, to leave room for an answer")
        return Request(prompt if is_text else None, ids, params)

    def _check_ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, (list, tuple, np.ndarray)):
            raise PromptError(f"prompt: found {type(prompt).__name__}; allowed: a text or a list of token ids")
        for token_id in prompt:
            is_int = isinstance(token_id, (int, np.integer)) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < self.config.vocab_size:
                raise PromptError(
                    f"prompt: found the token id {token_id!r}; allowed: 0 to {self.config.vocab_size - 1}"
                )
        return [int(i) for i in prompt]

    def _complete(self, requests: SequenceOf[Request | RequestOutput]) -> list[RequestOutput]:
        """Run all that were admitted; put refusals back in their places."""
        answers = {
            id(r): [Sequence(r, i, self.tokenizer, self.max_model_len) for i in range(r.params.n)]
            for r in requests
            if isinstance(r, Request)
        }
        for _ in self._run([s for group in answers.values() for s in group]):
            pass
        return [
            RequestOutput(r.prompt, r.token_ids, [s.output for s in answers[id(r)]], r.metrics)
            if isinstance(r, Request)
            else r
            for r in requests
        ]

    def _run(self, sequences: list[Sequence]) -> Iterator[tuple[Sequence, str]]:
        """Generate for all sequences, `max_num_seqs` at a time; yields each piece of text as it is certain."""
        for start in range(0, len(sequences), self.max_num_seqs):
            yield from self._run_together(sequences[start : start + self.max_num_seqs])

    def _run_together(self, sequences: list[Sequence]) -> Iterator[tuple[Sequence, str]]:
        cache, tables = self._new_cache([len(s.request.token_ids) + s.max_tokens for s in sequences])
        running = dict(enumerate(sequences))  # place in `tables` -> sequence
        logits = np.concatenate([self._prefill(s, tables[i], cache) for i, s in running.items()])
        while running:
            for sequence, sampled in zip(
                running.values(), sample(logits, [s.state for s in running.values()]), strict=True
            ):
                if piece := sequence.append(sampled):
                    yield sequence, piece
            running = {row: s for row, s in running.items() if s.output.finish_reason is None}
            if running:
                logits = self._decode(running, tables, cache)

    def _new_cache(self, lengths: list[int]) -> tuple[Any, list[list[int]]]:
        """A cache with room for sequences of these lengths, and their block tables."""
        if self.device == "cpu":
            return DenseKVCache(self.config, len(lengths), max(lengths)), [[row] for row in range(len(lengths))]
        pool = BlockPool(sum(blocks_needed(n, BLOCK_SIZE) for n in lengths), BLOCK_SIZE)
        tables: list[list[int]] = [[] for _ in lengths]
        for table, length in zip(tables, lengths, strict=True):
            grow_table(pool, table, length)
        return DeviceKVCache(self.model.rt, self.config, pool.num_blocks, BLOCK_SIZE), tables

    def _prefill(self, sequence: Sequence, table: list[int], cache: Any) -> NDArray[np.float32]:
        """Compute a prompt in chunks; logits [1, V] of its last token."""
        ids, chunk = sequence.request.token_ids, self.max_num_batched_tokens
        for start in range(0, len(ids), chunk):
            step = make_step([ids[start : start + chunk]], [start], [table], cache.block_size)
            logits = self.model.forward(step, cache)
        return logits

    def _decode(self, running: Mapping[int, Sequence], tables: list[list[int]], cache: Any) -> NDArray[np.float32]:
        """One new token for each running sequence; logits [B, V].

        The newest token is not in the cache yet.
        """
        newest = [s.output.token_ids[-1:] for s in running.values()]
        computed = [len(s.request.token_ids) + len(s.output.token_ids) - 1 for s in running.values()]
        step = make_step(newest, computed, [tables[i] for i in running], cache.block_size)
        return self.model.forward(step, cache)


def _is_several(prompts: Any) -> bool:
    """A list of prompts, as opposed to one prompt: a text, ids, or something that will be refused as a prompt."""
    several = isinstance(prompts, (list, tuple))
    return several and not (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))


def _at_least_one(name: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ParameterError(f"{name}: found {value!r}; allowed: an integer of at least 1")
    return int(value)
