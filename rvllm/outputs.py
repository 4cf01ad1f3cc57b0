"""What a request gives back: the texts, why they ended, and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from rvllm.errors import RvllmError


@dataclass
class CompletionOutput:
    """One answer. `finish_reason`: "stop" (end token or stop text), "length" (limit reached), "abort", "error" (its
    request failed on the way; `text` is what came before), None (running).

    logprobs: one dict {token id: log-probability} for each token, or None where not asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] | None = None


@dataclass
class RequestMetrics:
    """What a request took. Times in seconds since it was accepted; the counts sum over all its answers.

    inter_token_times: from each token of an answer to the next one.   num_cached_tokens: tokens that the prefix cache
    had, in all starts.   num_preemptions: how often an answer lost its blocks and was computed again.
    """

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    time_to_first_token: float | None = None
    total_time: float = 0.0
    inter_token_times: list[float] = field(default_factory=list, repr=False)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Speed after the first token; None where there was no second one."""
        if self.time_to_first_token is None or not self.inter_token_times:
            return None
        return len(self.inter_token_times) / max(self.total_time - self.time_to_first_token, 1e-9)


class RequestOutput:
    """A request and its answers.

    prompt: the text, or None where token ids were given.   prompt_token_ids: what the model read.
    outputs: `SamplingParams.n` answers.   error: why the request was refused, or failed on the way, or None. Then
    `text` raises it, so that neither is mistaken for an answer; so does `outputs` where a refused request has none.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: Sequence[int] = (),
        outputs: Sequence[CompletionOutput] = (),
        metrics: RequestMetrics | None = None,
        error: RvllmError | None = None,
    ) -> None:
        self.prompt, self.prompt_token_ids, self.error = prompt, list(prompt_token_ids), error
        self.metrics = metrics or RequestMetrics(num_prompt_tokens=len(self.prompt_token_ids))
        self._outputs = list(outputs)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The answers, in order; raises `error` if the request was refused."""
        if not self._outputs:
            self.raise_error()
        return self._outputs

    @property
    def text(self) -> str:
        """The first answer's text; raises `error` if there is one."""
        self.raise_error()
        return self._outputs[0].text

    def raise_error(self) -> None:
        """Raise `error`, a copy of it, if there is one."""
        if self.error is not None:
            raise copy(self.error)  # itself, it would keep the frames that it goes through for as long as this output

    def __repr__(self) -> str:
        what = f"error={self.error!r}" if self.error else f"outputs={self._outputs!r}"
        return f"RequestOutput(prompt={self.prompt!r}, {what})"
