"""The sampler against slow formulas, its parameters against everything people write there, and stop texts."""

import json
import math
import warnings
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.sampling import LogitsError, ParameterError, SamplingParams, SamplingState, StopBuffer, sample

HUGE = 10**400
NOT_NUMBERS = ["x", "1", None, [], True, 1j, math.nan, np.array([1.0]), np.float32("nan"), b"1"]
NOT_INTEGERS = ["x", "3", [], 2.5, 1.0, True, math.nan, math.inf, np.array([1]), np.float64(3)]

finite = st.integers(-240, 240).map(lambda x: x / 8) | st.sampled_from([0.0, 1.0, -1.0])  # ties, or clear gaps
rows = st.lists(finite, min_size=1, max_size=12).map(lambda row: np.array(row, np.float32))


def one(logits, prompt=(), output=(), index=0, end_ids=(), **params):
    """The choice for a single row."""
    state = SamplingState(SamplingParams(**params), prompt, frozenset(end_ids), index, list(output))
    return sample(np.array([logits], np.float32), [state])[0]


def short(value) -> str:
    """A readable name for a test's parameter."""
    return repr(value)[:20]


def many(logits, draws, **params) -> list[int]:
    """Tokens drawn one after the other from the same logits."""
    state = SamplingState(SamplingParams(seed=7, **params))
    logits = np.array([logits], np.float32)
    return [sample(logits, [state])[0].token_id for _ in range(draws)]


# Parameters -----------------------------------------------------------------------------------------------------------

BAD_BIAS = [{1: "x"}, {1: 101}, {1: math.nan}, {1: None}, {1: HUGE}, {1: -math.inf}]
REFUSED = {
    "temperature": [*NOT_NUMBERS, -1, -1e-9, math.inf, -math.inf, HUGE, np.float32("inf"), np.float64("inf")],
    "top_k": [*NOT_INTEGERS, None, -2, -HUGE],
    "top_p": [*NOT_NUMBERS, 0, -0.1, 1.0001, math.inf, HUGE, np.float32(0)],
    "min_p": [*NOT_NUMBERS, -0.1, 1.0001, math.inf, HUGE],
    "seed": [*NOT_INTEGERS, -1, 2**64, 2**70, HUGE],
    "max_tokens": [*NOT_INTEGERS, 0, -1, -HUGE],
    "n": [*NOT_INTEGERS, None, 0, -1, 65, HUGE],
    "stop": [5, None, "", [""], ["a", ""], [5], ["a", None], b"x", [b"x"], {"a"}, {"a": 1}, iter("ab")],
    "stop_token_ids": [5, None, "12", [-1], ["1"], [1.0], [None], [True], {1}, {1: 2}],
    "ignore_eos": ["x", None, 0, 1, np.True_],
    "min_tokens": [*NOT_INTEGERS, None, -1, 129, HUGE],
    "logprobs": [*NOT_INTEGERS, -1, 21, HUGE],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, math.inf, HUGE, np.float32("inf"), 0.009, 101, 5e-324, 1e39, 1e300],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1, math.inf, HUGE],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1, -math.inf, -HUGE],
    "logit_bias": [5, "x", [1], [(1, 2)], {"1": 1}, {-1: 1}, {1.0: 1}, {True: 1}, *BAD_BIAS],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values], ids=short
)
def test_c41_c57_c84_wrong_parameters_are_named(name, value):
    with pytest.raises(ParameterError, match=rf"{name}: found .*allowed: "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "seed", "n", "logprobs", "top_p"])
def test_a_number_too_long_to_print_is_named(name):
    """Python refuses to write an integer of 5,000 digits; the error must not fail for that."""
    with pytest.raises(ParameterError, match=f"{name}: found"):
        SamplingParams(**{name: 10**5000})


ACCEPTED = {
    "temperature": [0, 1, 0.0, 1e-8, 1e300, 5e-324, np.float32(0.7), np.float16(0.5), np.float64(2), np.int64(1)],
    "top_k": [0, -1, 1, 10**9, 2**63, HUGE, np.int64(5), np.uint8(3)],
    "top_p": [1, 1e-9, 5e-324, 0.5, np.float32(0.9)],
    "min_p": [0, 1, 0.05, np.float16(0.1)],
    "seed": [None, 0, 2**64 - 1, np.uint64(2**64 - 1), np.int32(3)],
    "max_tokens": [None, 1, HUGE, np.int64(3)],
    "n": [1, 64, np.int64(2)],
    "stop": ["END", ["a", "b"], ("a",), (), []],
    "stop_token_ids": [[], (1, 2), [np.int64(1)]],
    "ignore_eos": [True, False],
    "min_tokens": [0, 128, np.int64(5)],
    "logprobs": [None, 0, 20, np.int64(2)],
    "repetition_penalty": [1, 1.1, 0.5, np.float32(1.1)],
    "presence_penalty": [-2, 2, 0.0, np.float32(0.5)],
    "frequency_penalty": [-2, 2, np.float16(0.5)],
    "logit_bias": [None, {}, {0: 1}, {2: -100, 1: 100.0}, {np.int64(1): np.float32(1.5)}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values], ids=short
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_what_is_accepted_also_works(name, value, temperature):
    """C57, C59: the extremes and NumPy's numbers too, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = one([1, 3, 2], prompt=[0], output=[1, 1], **({"temperature": temperature} | {name: value}))
    assert result.token_id in range(3)


def test_every_parameter_is_tried():
    assert set(REFUSED) == set(ACCEPTED) == set(SamplingParams.__dataclass_fields__)


def test_parameters_are_frozen_and_keep_no_list_of_the_caller():
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("")
    ids.append(-1)
    bias[10**9] = math.nan
    assert (params.stop, params.stop_token_ids, dict(params.logit_bias)) == (("a",), (1,), {1: 2.0})
    assert SamplingParams(stop="END").stop == ("END",)
    with pytest.raises(AttributeError):
        params.n = 2


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ParameterError, match="min_tokens: found 4"):
        SamplingParams(max_tokens=3, min_tokens=4)
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


@pytest.mark.parametrize("params", [{"stop_token_ids": [10**9]}, {"stop_token_ids": [3]}, {"logit_bias": {3: 1.0}}])
def test_c84_ids_beyond_the_vocabulary(params):
    with pytest.raises(ParameterError, match="allowed: ids from 0 to 2"):
        SamplingParams(**params).check_vocab(3)
    SamplingParams(**params).check_vocab(10**9 + 1)


# Choosing -------------------------------------------------------------------------------------------------------------


def slow_distribution(logits, temperature, top_k, top_p, min_p) -> dict[int, float]:
    """Token -> probability, filter after filter, as the documentation puts it."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    best = logits[order[0]]
    weights = {i: math.exp((logits[i] - best) / temperature) for i in order}

    def normalised(kept):
        total = math.fsum(weights[i] for i in kept)
        return {i: weights[i] / total for i in kept}

    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        probs, total, kept = normalised(order), 0.0, []
        for i in order:
            kept.append(i)
            total += probs[i]
            if total >= top_p:
                break
        order = kept
    probs = normalised(order)
    return normalised([i for i in order if probs[i] >= min_p * probs[order[0]]])


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 3, 5, 100]),
        "top_p": st.sampled_from([1.0, 0.9, 0.65, 0.3, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.03, 0.21, 0.77, 1.0]),
    }
)


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9), filters, st.integers(0, 99))
@settings(deadline=None)
def test_filters_against_a_slow_implementation(logits, params, seed):
    """One uniform number decides: walking the slow distribution with it, in id order, must end at the same token."""
    expected = slow_distribution([float(x) for x in logits], **params)
    level = np.random.default_rng([seed, 0]).random()
    got = one(logits, seed=seed, **params).token_id
    assert got in expected
    mass = 0.0
    for i in sorted(expected):
        low, mass = mass, mass + expected[i]
        if low + 1e-9 < level < mass - 1e-9:
            assert got == i


@given(rows, filters)
@settings(deadline=None)
def test_c57_greedy_takes_the_first_of_the_best(logits, params):
    best = int(np.argmax(logits))
    assert one(logits, **params | {"temperature": 0}).token_id == best
    assert one(logits, **params | {"top_k": 1}).token_id == best  # even with ties
    assert one(logits, **params | {"top_p": 5e-324}).token_id == best
    assert logits[one(logits, **params | {"min_p": 1.0}).token_id] == logits[best]


@pytest.mark.parametrize("temperature", [1e-8, 1e-300, 5e-324])
def test_c57_a_tiny_temperature_is_nearly_greedy(temperature):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(many([1, 3, 2.999, -np.inf], 50, temperature=temperature)) == {1}


def test_c57_a_batch_mixes_greedy_and_random_rows():
    logits = np.tile(np.array([[0, 1, 0.5, 0.9]], np.float32), (40, 1))
    before = logits.copy()
    states = [SamplingState(SamplingParams(temperature=i % 2, seed=i)) for i in range(40)]
    chosen = [s.token_id for s in sample(logits, states)]
    assert set(chosen[::2]) == {1}
    assert len(set(chosen[1::2])) == 4
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("top_k", [2, 3])
def test_among_equals_the_lower_id_stays(top_k):
    drawn = set(many([0, 1, 1, 1, 1], 200, temperature=1, top_k=top_k))
    assert drawn == set(range(1, top_k + 1))


def chi_square(logits, draws, params) -> tuple[float, int]:
    expected = slow_distribution(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params)
    counts = Counter(many(logits, draws, **{"temperature": 1.0} | params))
    assert set(counts) <= set(expected)
    return sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items()), len(expected) - 1


@pytest.mark.parametrize("top_k", [0, -1, 5, 3, HUGE], ids=short)
def test_c59_top_k_off_or_beyond_the_vocabulary(top_k):
    statistic, freedom = chi_square([0.0, 1.0, -0.5], 1000, {"top_k": top_k})
    assert (freedom, statistic < 20) == (2, True)  # chance above 20: 5e-5, and the seed is fixed


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.1, "temperature": 2.0},
    ],
)
def test_frequencies_fit_the_distribution(params):
    statistic, freedom = chi_square([0.0, 1.0, -0.5, 2.0, 1.0, 0.3, -2.0], 2000, params)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_masked_tokens_are_never_drawn():
    assert set(many([-np.inf, 0, -np.inf, 0, -np.inf], 200, temperature=2)) == {1, 3}


# Seeds ----------------------------------------------------------------------------------------------------------------


def run(seeds, steps=30, temperature=1.0) -> list[list[int]]:
    """Tokens of several sequences computed together."""
    rng = np.random.default_rng(0)
    states = [SamplingState(SamplingParams(temperature=temperature, seed=s), index=i) for s, i in seeds]
    logits = [np.tile(rng.standard_normal((1, 50)).astype(np.float32), (len(states), 1)) for _ in range(steps)]
    return [list(row) for row in zip(*([s.token_id for s in sample(x, states)] for x in logits), strict=True)]


def test_the_same_seed_gives_the_same_tokens_in_any_company():
    alone = run([(5, 0)])[0]
    assert alone == run([(5, 0)])[0] == run([(1, 0), (None, 0), (5, 0), (9, 3)])[2]
    assert run([(2**64 - 1, 0)]) == run([(np.uint64(2**64 - 1), 0)])


def test_another_seed_or_index_gives_other_tokens():
    results = run([(5, 0), (6, 0), (5, 1), (None, 0), (None, 0), (0, 5)])
    assert len({tuple(r) for r in results}) == 6


# Penalties ------------------------------------------------------------------------------------------------------------


def slow_adjusted(logits, prompt, output, p) -> list[float]:
    values = [float(x) for x in logits]
    for i, bias in (p.logit_bias or {}).items():
        values[i] += bias
    for i in set(prompt) | set(output):
        values[i] = values[i] / p.repetition_penalty if values[i] > 0 else values[i] * p.repetition_penalty
    for i, count in Counter(output).items():
        values[i] -= p.presence_penalty + p.frequency_penalty * count
    return values


@given(
    st.lists(st.integers(-40, 40).map(lambda x: x / 4), min_size=6, max_size=6),
    st.lists(st.integers(0, 5), max_size=5),
    st.lists(st.integers(0, 5), max_size=8),
    st.sampled_from([1.0, 1.3, 0.7, 5.0]),
    st.sampled_from([0.0, 0.5, -1.5, 2.0]),
    st.sampled_from([0.0, 0.25, -0.75, 2.0]),
    st.dictionaries(st.integers(0, 5), st.sampled_from([-100.0, -1.5, 0.5, 3.0, 100.0]), max_size=3),
)
@settings(deadline=None)
def test_penalties_against_slow_formulas(logits, prompt, output, repetition, presence, frequency, bias):
    names = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    names["logit_bias"] = bias
    values = slow_adjusted(logits, prompt, output, SamplingParams(**names))
    greedy = one(logits, prompt, output, **names)
    assert values[greedy.token_id] >= max(values) - 1e-4
    drawn = one(logits, prompt, output, temperature=1.0, seed=3, logprobs=2, **names)
    plain = np.array(values, np.float32)
    if np.abs(plain - np.array(values)).max() < 1e-9:
        assert drawn.token_id == one(plain, temperature=1.0, seed=3).token_id
    assert drawn.logprobs.items() >= one(logits, logprobs=1).logprobs.items()  # of the model itself, no penalty in it


@given(
    rows,
    st.sampled_from([0, 1e-300, 0.5, 1, 1e300]),
    st.sampled_from([0.01, 0.5, 2, 100]),
    st.sampled_from([0, -100, 100]),
    filters,
)
@settings(deadline=None)
def test_no_accepted_parameter_breaks_the_numbers(logits, temperature, repetition, bias, params):
    """Extreme, but inside their documented ranges: a token comes out, and no warning."""
    everything = range(len(logits))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params |= {"temperature": temperature, "repetition_penalty": repetition, "logit_bias": {0: bias}}
        result = one(logits, everything, everything, presence_penalty=-2, frequency_penalty=2, logprobs=20, **params)
    assert result.token_id in everything
    assert all(math.isfinite(x) for x in result.logprobs.values())


def test_an_unseen_token_is_not_penalised_and_zero_stays_zero():
    assert one([0.0, -0.5], prompt=[0], repetition_penalty=100).token_id == 0
    assert one([2.0, 1.5], prompt=[0], repetition_penalty=2).token_id == 1


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("length", "expected"), [(0, {1}), (2, {1}), (3, {0})])
def test_min_tokens_holds_end_tokens_back(length, expected, temperature):
    settings_ = {"min_tokens": 3, "end_ids": [0, 2], "temperature": temperature, "seed": 1}
    assert {one([100, 0, 50], output=[1] * length, **settings_).token_id} == expected
    assert one([100, 0, 50], output=[1] * length, logit_bias={0: 100}, **settings_).token_id in expected


def test_min_tokens_where_every_token_is_an_end():
    """Nothing else is left to choose: whatever comes, it is a token or a named error, not a warning about NaN."""
    for temperature in (0, 1):
        with warnings.catch_warnings(), suppress(LogitsError):
            warnings.simplefilter("error")
            assert one([1, 2], min_tokens=1, end_ids=[0, 1], temperature=temperature).token_id in (0, 1)


# Log-probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 1, "top_k": 1}, {"temperature": 2, "seed": 1}])
def test_c62_logprobs_go_through_strict_json(params):
    logits = [0.5, -np.inf, 2.0, -np.inf, 1e4, -3e38]
    result = one(logits, logprobs=5, **params)
    assert result.logprobs[result.token_id] <= 0
    assert set(result.logprobs) == {0, 2, 4, 5}
    assert json.loads(json.dumps(result.logprobs, allow_nan=False))
    assert all(type(i) is int and type(x) is float for i, x in result.logprobs.items())


@given(rows, st.integers(0, 20), st.booleans())
@settings(deadline=None)
def test_logprobs_are_the_log_softmax_of_the_model(logits, count, random):
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    result = one(logits, logprobs=count, temperature=int(random), logit_bias={0: 50.0})
    likeliest = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert set(result.logprobs) == {result.token_id, *likeliest}
    for i, value in result.logprobs.items():
        assert value == pytest.approx(expected[i], abs=1e-9)
        assert value <= 0


def test_logprobs_only_where_asked_for():
    assert one([1, 2, 3]).logprobs is None
    assert set(one([1, 2, 3], logprobs=0).logprobs) == {2}


# Damaged logits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("place", [(0, 0), (1, 2), (1, 0)])
def test_nan_is_an_error(place, temperature):
    logits = np.zeros((2, 3), np.float32)
    logits[place] = np.nan
    with pytest.raises(LogitsError, match="NaN"):
        sample(logits, [SamplingState(SamplingParams(temperature=temperature))] * 2)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("row", "best"), [([0, np.inf, 0], 1), ([0, np.inf, -np.inf], 1), ([-np.inf] * 3, None), ([3e38, 3e38, -3e38], 0)]
)
def test_infinite_logits_are_handled_or_named(row, best, temperature):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result = one(row, temperature=temperature, top_k=1, logprobs=2)
        except LogitsError:
            assert max(row) != 3e38
            return
    assert result.token_id == best
    assert all(math.isfinite(x) for x in result.logprobs.values())


# Stop texts -----------------------------------------------------------------------------------------------------------


def shown(pieces, stop) -> tuple[str, bool, list[str]]:
    """All that a buffer lets through, whether it stopped, and what was shown after each piece."""
    buffer, text, history = StopBuffer(stop), "", []
    for piece in pieces:
        text += buffer.push(piece)
        history.append(text)
        if buffer.stopped:
            return text + buffer.finish(), True, history
    return text + buffer.finish(), False, history


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped", "first"),
    [
        (["foo", " EN", "D bar"], "END", "foo ", True, ["foo", "foo ", "foo "]),
        (["foo", " EN", "D bar"], "ENX", "foo END bar", False, ["foo", "foo ", "foo END bar"]),
        (["foo", " EN"], "END", "foo EN", False, ["foo", "foo "]),
        (["END"], "END", "", True, [""]),
        (["aaab"], "aab", "a", True, ["a"]),
        (["a", "a", "a", "b"], "aab", "a", True, ["", "", "a", "a"]),
        (["x\n", "\n", "y"], "\n\n", "x", True, ["x", "x"]),
        (["", "", ""], "END", "", False, ["", "", ""]),
        (["👩‍", "🚀!"], "🚀", "👩‍", True, ["👩‍", "👩‍"]),
    ],
)
def test_c31_stop_texts_across_tokens(pieces, stop, text, stopped, first):
    got, ended, history = shown(pieces, SamplingParams(stop=stop).stop)
    assert (got, ended, history) == (text, stopped, first)


def test_c31_of_two_stops_the_one_that_begins_first_counts():
    assert shown(["a--b++"], ("++", "--"))[0] == "a"
    assert shown(["aEND"], ("ND", "END"))[0] == "a"


few = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(few, stops, st.data())
@settings(deadline=None, max_examples=400)
def test_c31_any_split_shows_the_same_and_never_a_part_of_a_stop(text, stop, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    got, ended, history = shown(pieces, stop)
    assert (got, ended) == shown([text], stop)[:2] == shown(text, stop)[:2]
    assert text.startswith(got)
    assert not any(s in got for s in stop)
    assert ended == any(s in text for s in stop)
    assert not ended or text[len(got) :].startswith(tuple(stop))
    assert ended or got == text
    assert all(got.startswith(part) for part in history)
    if len(stop) == 1:
        assert got == text.split(stop[0])[0]


@given(few, stops)
@settings(deadline=None)
def test_c31_no_more_is_held_than_needed(text, stop):
    """Without a stop in it, what is held back is the longest end of the text that begins a stop."""
    if any(s in text for s in stop):
        return
    history = shown([text], stop)[2]
    begins = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stop)]
    assert history == [text[: len(text) - max(begins, default=0)]]


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped"),
    [
        (["ab", ("<|x|>",), "user"], "<|x|>user", "ab", True),
        (["ab", ("<|x|>",), "us", "er"], "<|x|>user", "ab", True),
        (["ab", ("<|x|>",), "useless"], "<|x|>user", "abuseless", False),
        (["ab", ("<|x|>",)], "b<|x|>", "a", True),
        (["ab", ("<|x|>",), "cd"], "b<|x|>c", "a", True),
        (["a", ("<|x|>",), ("<|y|>",), "b"], "<|x|><|y|>", "a", True),
        (["a", ("<|x|>",), ("<|x|>",), "b"], "<|x|>b", "a", True),
        (["a<|x|>b"], "<|x|>b", "a", True),
        (["a<|x", "|>b"], "<|x|>b", "a", True),
        (["a", ("<|x|>",), "b<|x|>c"], "<|x|>c", "ab", True),
        (["a<b", ("<|x|>",), "c"], "<", "a", True),
        (["a", ("<|x|>",), "b"], "<", "ab", False),
        (["a", ("<|x|>",), "b"], "x", "ab", False),
        (["a", ("<|x|>",), "b"], ">b", "ab", False),
        (["a", ("<|x|>",), "b"], "a<", "ab", False),
        (["a", ("<|x|>",), "b"], "ab", "ab", False),
        (["a", ("<|x|>",), "b"], "<|x|>", "a", True),
        (["a", ("<",), "b"], "<", "a", True),
        (["a", ("",), "b"], "ab", "", True),
    ],
)
def test_c88_hidden_tokens_in_stop_texts(pieces, stop, text, stopped):
    """A stop text holds the whole of a token that is not shown, or none of it; the token never comes out."""
    buffer, got = StopBuffer([stop]), ""
    for piece in pieces:
        got += buffer.push(*piece, hidden=True) if isinstance(piece, tuple) else buffer.push(piece)
        if buffer.stopped:
            break
    assert (got + buffer.finish(), buffer.stopped) == (text, stopped)


hidden_or_not = st.lists(st.tuples(st.sampled_from(["a", "ab", "<a>", "<b>", "b"]), st.booleans()), max_size=8)


@given(hidden_or_not, st.lists(st.text("ab<>", min_size=1, max_size=5), min_size=1, max_size=3))
@settings(deadline=None, max_examples=300)
def test_c88_every_stop_text_between_borders_is_found_and_no_other(pieces, stop):
    """Against a search of the whole text, piece by piece."""
    spelled, shown_at, borders = "", [], {0}
    end, begin = None, None
    for text, hidden in pieces:
        shown_at += [not hidden] * len(text)
        borders |= {len(spelled) + n for n in ([len(text)] if hidden else range(1, len(text) + 1))}
        spelled += text
        places = [(i + len(s), i) for s in stop for i in borders if spelled[i:].startswith(s)]
        matches = [place for place in places if place[0] in borders]
        if matches:
            end, begin = min(matches)
            break
    buffer, got = StopBuffer(stop), ""
    for text, hidden in pieces:
        got += buffer.push(text, hidden)
        if buffer.stopped:
            break
    assert buffer.stopped == (end is not None)
    expected = "".join(c for c, shown in zip(spelled[:begin], shown_at[:begin], strict=True) if shown)
    assert got + buffer.finish() == expected
