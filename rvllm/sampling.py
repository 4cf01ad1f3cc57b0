"""Sampling parameters, one sampler for a whole batch, and stop texts.

Generated from notebooks/04_generate.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvllm.errors import RvllmError

Floats = NDArray[np.floating[Any]]
MAX_NUMBER = 1e300


class ParameterError(RvllmError):
    """A sampling parameter out of its range: which one, what was given, what is allowed.

    Notebook 04, section 2.
    """


def _check(name: str, value: Any, ok: bool, allowed: str) -> None:
    if not ok:
        shown = (
            "a number of thousands of digits" if isinstance(value, int) and value.bit_length() > 4096 else repr(value)
        )
        raise ParameterError(f"{name}: found {shown}; allowed: {allowed}")


def _is_int(value: Any, low: int, high: float = float("inf")) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(low <= value <= high)


def _is_number(value: Any, low: float, high: float = float("inf")) -> bool:
    is_real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    value = float(value) if isinstance(value, np.floating) else value  # a float16 would overflow when compared
    return is_real and bool(low <= value <= min(high, MAX_NUMBER))  # false for NaN and infinity


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of one request are chosen and when it ends. Notebook 04, section 2.

    temperature: 0 = greedy (lowest id wins a tie).  top_k: 0 or -1 = off.  top_p: 1 = off.  min_p: 0 = off.
    These are rounded to float32, so that every device chooses alike. top_p keeps the fewest of the likeliest tokens
    whose probabilities reach it, where a sum that falls short by less than a millionth of top_p (2**-20) has reached
    it: [.5, .3, .2] at .8 keeps two. min_p keeps what is exactly at its border.
    seed: the same seed draws the same random numbers whatever else runs; None = different every time.
    max_tokens: None = up to the model's context.  n: answers per prompt.
    stop: texts that end the answer and are not part of it. A special token in one is that token; one that is a
    special token and nothing else counts among the ids.  stop_token_ids: ids that end the answer.
    ignore_eos: go on past the model's own end tokens.  min_tokens: no end before so many tokens.
    logprobs: None, or how many of the likeliest tokens to report beside the chosen one, from the model's own
    distribution, before every filter.
    repetition_penalty (on prompt and output), presence_penalty, frequency_penalty (on output), logit_bias {id: bias}.
    Raises ParameterError.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        self._check_choice()
        self._check_length()
        self._check_penalties()
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        bias = None if self.logit_bias is None else {int(i): float(b) for i, b in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)  # a copy: what was checked can't change

    def _check_choice(self) -> None:
        _check(
            "temperature",
            self.temperature,
            _is_number(self.temperature, 0),
            "0 (greedy) or a positive number",
        )
        _check("top_k", self.top_k, _is_int(self.top_k, -1), "an integer of at least 1, or 0 or -1 for off")
        _check("top_p", self.top_p, _is_number(self.top_p, 0, 1) and self.top_p > 0, "a number above 0, up to 1")
        _check("min_p", self.min_p, _is_number(self.min_p, 0, 1), "a number from 0 to 1")
        _check("seed", self.seed, self.seed is None or _is_int(self.seed, 0, 2**64 - 1), "None or 0 to 2**64 - 1")
        _check(
            "logprobs",
            self.logprobs,
            self.logprobs is None or _is_int(self.logprobs, 0, 20),
            "None or 0 to 20",
        )

    def _check_length(self) -> None:
        limit, stops, ids = self.max_tokens, self.stop, self.stop_token_ids
        _check("max_tokens", limit, limit is None or _is_int(limit, 1), "an integer of at least 1, or None")
        most = float("inf") if limit is None else limit
        _check("min_tokens", self.min_tokens, _is_int(self.min_tokens, 0, most), "0 to max_tokens")
        _check("n", self.n, _is_int(self.n, 1, 64), "1 to 64")
        _check("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")
        texts = (stops,) if isinstance(stops, str) else stops
        is_texts = isinstance(texts, (list, tuple)) and all(isinstance(s, str) and s for s in texts)
        _check("stop", stops, is_texts, "a text, or a list of texts, none of them empty")
        is_ids = isinstance(ids, (list, tuple)) and all(_is_int(i, 0) for i in ids)
        _check("stop_token_ids", ids, is_ids, "a list of token ids")

    def _check_penalties(self) -> None:
        repetition, bias = self.repetition_penalty, self.logit_bias
        _check("repetition_penalty", repetition, _is_number(repetition, 0.01, 100), "a number from 0.01 to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), _is_number(getattr(self, name), -2, 2), "a number from -2 to 2")
        entries = {} if bias is None else bias
        good = isinstance(entries, Mapping) and all(
            _is_int(i, 0) and _is_number(b, -100, 100) for i, b in entries.items()
        )
        _check("logit_bias", bias, good, "None or {token id: number from -100 to 100}")

    def check_vocab(self, vocab_size: int) -> None:
        """ParameterError for an id that the vocabulary does not have: known only once the model is."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or {})):
            for token_id in ids:
                _check(name, token_id, token_id < vocab_size, f"ids from 0 to {vocab_size - 1}")


@dataclass
class SamplingState:
    """What sampling must remember of one sequence: parameters, its own random numbers, the tokens so far.

    Every sequence draws from its own generator, one number a token: its company in the batch can't change its draws.
    end_ids: ids that would end it, held back until `min_tokens`.   index: which of the `n` answers this is.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int] = ()
    end_ids: frozenset[int] = frozenset()
    index: int = 0
    output_token_ids: list[int] = field(default_factory=list)

    @cached_property
    def rng(self) -> Any:
        """The generator, made when somebody draws: arg-max never does, and making one takes tens of microseconds."""
        seed = self.params.seed
        return np.random.default_rng(None if seed is None else [int(seed), self.index])

    def rewind(self) -> None:
        """Take back numbers that were drawn for a token which never came out, as when a step failed after sampling."""
        self.__dict__.pop("rng", None)
        self.rng.random(len(self.output_token_ids))


@dataclass(frozen=True)
class Sampled:
    """The choice for one sequence.

    logprobs: {token id: natural log of its probability}, the chosen one included.
    """

    token_id: int
    logprobs: dict[int, float] | None = None


def adjust(logits: Floats, state: SamplingState) -> None:
    """Apply one sequence's bias, penalties and minimum length to its row of logits, in place: [V]."""
    p, output = state.params, state.output_token_ids
    for token_id, bias in (p.logit_bias or {}).items():
        logits[token_id] += bias
    if p.repetition_penalty != 1:
        seen = np.unique(np.array([*state.prompt_token_ids, *output], np.int64))
        score = logits[seen]
        logits[seen] = np.where(score > 0, score / p.repetition_penalty, score * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and output:
        seen, counts = np.unique(np.array(output, np.int64), return_counts=True)
        logits[seen] -= p.presence_penalty + p.frequency_penalty * counts
    if len(output) < p.min_tokens and 0 < len(state.end_ids) < len(logits):
        logits[list(state.end_ids)] = -np.inf


def needs_adjusting(state: SamplingState) -> bool:
    """Whether `adjust` would change anything for this sequence now."""
    p = state.params
    penalised = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
    return bool(p.logit_bias or penalised or len(state.output_token_ids) < p.min_tokens)


REACHED = 1 - 2.0**-20  # the part of top_p at which it counts as reached: rounding must not ask for one token more


def single(value: float) -> np.float32:
    """A parameter as every device takes it: in float32, where what is positive stays positive and finite."""
    limits = np.finfo(np.float32)
    return np.float32(np.clip(value, limits.tiny, limits.max) if value > 0 else 0)


def column(params: Sequence[SamplingParams], name: str) -> NDArray[np.float32]:
    """One parameter of every row, float32 [B, 1]."""
    return np.array([[single(getattr(p, name))] for p in params])


def masses(logits: Floats, temperature: Floats) -> NDArray[np.int64]:
    """How likely tokens are, the likeliest of each row 2**44: logits [B, V] over temperatures [B, 1] -> int64 [B, V].

    exp((logit - largest) / temperature) in float32, as on a GPU, then cut to integers: these add up to the same sum in
    any order, on any device. A token less likely than 2**-44 times the likeliest has none, and is never drawn.
    """
    unit = np.float32(2.0 ** min(44, 63 - logits.shape[1].bit_length()))  # sums of a huge vocabulary must fit as well
    with np.errstate(over="ignore"):  # a temperature near 0 sends all but the best to -inf: that is its meaning
        shifted = (logits - logits.max(axis=1, keepdims=True)).astype(np.float32) / temperature
    return (np.exp(shifted.astype(np.float64)).astype(np.float32) * unit).astype(np.int64)


def keep_counts(sorted_logits: Floats, params: Sequence[SamplingParams]) -> NDArray[np.int64]:
    """How many of the likeliest tokens each row keeps, int64 [B]: the least of what top-k, top-p and min-p allow.

    sorted_logits [B, V]: descending. All three filters keep the likeliest n tokens, only their n differs: top-k names
    it, top-p takes the fewest whose probabilities, rescaled to what top-k left, reach p, min-p takes those of at
    least min_p times the first. At least one token always stays.
    """
    vocab_size = sorted_logits.shape[1]
    top_k = np.array([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params])
    temperature, top_p = column(params, "temperature"), column(params, "top_p").astype(np.float64)
    running = np.cumsum(masses(sorted_logits, temperature), axis=1)
    total = np.take_along_axis(running, top_k[:, None] - 1, axis=1)
    target = np.ceil(top_p * REACHED * total).astype(np.int64)
    by_top_p = np.where(top_p[:, 0] < 1, (running < target).sum(axis=1) + 1, vocab_size)
    with np.errstate(divide="ignore", over="ignore"):  # min_p 0 gives -inf
        log_min_p = np.log(column(params, "min_p").astype(np.float64))
        lowest = (sorted_logits[:, :1] + temperature * log_min_p).astype(np.float32)
    by_min_p = (sorted_logits >= lowest).sum(axis=1)
    return np.minimum(np.minimum(top_k, by_top_p), by_min_p)


def keep_largest(values: Floats, sorted_values: Floats, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask [B, V] of the `counts` largest values of each row; among equals the lower id stays."""
    threshold = np.take_along_axis(sorted_values, counts[:, None] - 1, axis=1)  # each row's value at its own count
    above, equal = values > threshold, values == threshold
    room = counts[:, None] - above.sum(axis=1, keepdims=True)
    return above | (equal & (np.cumsum(equal, axis=1) <= room))


class LogitsError(RvllmError):
    """A model gave logits that choose nothing: NaN, plus infinity, or minus infinity alone.

    rows: those of the logits that do, where it was `sample` that found them.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = rows


def draw(logits: Floats, states: Sequence[SamplingState]) -> NDArray[np.int64]:
    """One token for each row by temperature, then top-k, top-p, min-p, then chance: [B, V] -> int64 [B]."""
    params = [s.params for s in states]
    kept = masses(logits, column(params, "temperature"))
    if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
        ordered = -np.sort(-logits, axis=1)  # logits, not masses: a high temperature makes those equal
        kept *= keep_largest(logits, ordered, keep_counts(ordered, params))
    running = np.cumsum(kept, axis=1)
    total = running[:, -1:]
    level = (np.array([[s.rng.random()] for s in states]) * total).astype(np.int64)
    level = np.minimum(level, total - 1)  # rounding must not carry it to the very end
    return (running <= level).sum(axis=1)  # tokens whose running sum has not passed the level: the count is the id


def sample(logits: NDArray[np.float32], states: Sequence[SamplingState]) -> list[Sampled]:
    """Choose the next token of every sequence: float32 [B, V], one state a row. Notebook 04, section 5.

    Order: logit bias, penalties, minimum length; then arg-max where the temperature is 0 (the lowest id wins a tie);
    else temperature, top-k, top-p, min-p, one draw. Raises LogitsError for rows without a finite maximum.
    """
    largest = logits.max(axis=1)  # NaN if there is any in the row
    if not np.isfinite(largest).all():
        rows = np.flatnonzero(~np.isfinite(largest)).tolist()
        found = "NaN" if np.isnan(largest[rows[0]]) else largest[rows[0]]
        raise LogitsError(f"logits of sequence {rows[0]}: the largest is {found}, which chooses nothing", rows)
    adjusted = logits
    if changed := [i for i, s in enumerate(states) if needs_adjusting(s)]:
        adjusted = logits.copy()
        for i in changed:
            adjust(adjusted[i], states[i])
    chosen = adjusted.argmax(axis=1)
    if random := [i for i, s in enumerate(states) if s.params.temperature > 0]:
        chosen[random] = draw(adjusted[random], [states[i] for i in random])
    return [Sampled(int(t), logprobs(logits[i], int(t), states[i].params)) for i, t in enumerate(chosen)]


def logprobs(logits: NDArray[np.float32], token_id: int, params: SamplingParams) -> dict[int, float] | None:
    """Log-probabilities of the chosen and the `params.logprobs` likeliest tokens of one row [V]; None if not asked.

    Taken from the model's own logits, before bias, temperature and filters; entries of -inf are left out.
    """
    if params.logprobs is None:
        return None
    wide = logits.astype(np.float64)
    log_total = np.log(np.exp(wide - wide.max()).sum()) + wide.max()
    likeliest = np.argsort(-wide, kind="stable")[: params.logprobs]
    return {int(i): min(0.0, float(wide[i] - log_total)) for i in (token_id, *likeliest) if np.isfinite(wide[i])}


SHOWN, FIRST, LATER = "s", "f", "l"  # a character that is shown; the first, a later one of a token that is not


class StopBuffer:
    """Holds text back while it may be the beginning of a stop text. Notebook 04, section 6.

    `push` returns what is safe to show; `stopped` turns true once a stop text is complete (it is not shown, and of
    several the one that is complete first counts). `finish` returns what was held when the answer ends otherwise.
    A stop text contains the whole of a hidden token, or none of it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self.stopped = tuple(stop), False
        self._held, self._kinds = "", ""  # characters, and for each of them SHOWN, FIRST or LATER

    def push(self, text: str, hidden: bool = False) -> str:
        """Add text; get the part that can no longer belong to a stop text.

        hidden: the text spells a token that is not shown.
        """
        self._held += text
        self._kinds += (FIRST + LATER * len(text))[: len(text)] if hidden else SHOWN * len(text)
        found = [(i + len(s), i) for s in self.stop if (i := self._find(s)) >= 0]
        if found:
            self.stopped = True
            shown, _ = self._take(min(found)[1]), self.finish()
            return shown
        keep = max(map(self._overlap, self.stop), default=0)
        return self._take(len(self._held) - keep)

    def finish(self) -> str:
        """What is left once no more text can come."""
        return self._take(len(self._held))

    def _find(self, stop: str) -> int:
        """Where a stop text begins in what is held, or -1."""
        begin = self._held.find(stop)
        while begin >= 0 and not (self._is_border(begin) and self._is_border(begin + len(stop))):
            begin = self._held.find(stop, begin + 1)
        return begin

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of what is held that a stop text begins with."""
        held = self._held
        longest = min(len(held), len(stop) - 1)
        ends = (n for n in range(longest, 0, -1) if held.endswith(stop[:n]))
        return next((n for n in ends if self._is_border(len(held) - n)), 0)

    def _is_border(self, place: int) -> bool:
        """Whether a stop text may begin or end there: not inside a hidden token."""
        return self._kinds[place : place + 1] != LATER

    def _take(self, count: int) -> str:
        """Let go of the first `count` characters; returns those that are shown."""
        taken, kinds = self._held[:count], self._kinds[:count]
        self._held, self._kinds = self._held[count:], self._kinds[count:]
        return "".join(c for c, kind in zip(taken, kinds, strict=True) if kind == SHOWN)
