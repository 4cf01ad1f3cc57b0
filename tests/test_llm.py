"""The whole way from a prompt to a text, on a toy model: beside a naive reference, in batches, with bad requests."""

import gc
import math
import weakref

import numpy as np
import pytest

from rvllm.cpu_model import CpuModel, DenseKVCache
from rvllm.engine import PromptError
from rvllm.errors import RvllmError
from rvllm.llm import LLM, ClosedError
from rvllm.sampling import LogitsError, ParameterError, SamplingParams
from rvllm.step import make_step
from rvllm.testing import assert_close
from rvllm.tokenizer import CONTROL, NORMAL, USER_DEFINED, ChatTemplateError, TokenizerError
from tests import toy

PROMPTS = ["hello world", "a", "The quick brown fox", "né 中文 👩‍🚀", [5, 6, 7], "x" * 40, "zz", [299]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LONGER = SamplingParams(max_tokens=20, ignore_eos=True)
WHY = "float32 against float64"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture(scope="module")
def llm(path) -> LLM:
    return LLM(path, "cpu")


@pytest.fixture(scope="module")
def alone(llm):
    """Each prompt's greedy answer, computed by itself."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in PROMPTS]


def variant(tmp_path, **changes) -> LLM:
    return LLM(toy.write(tmp_path / "variant.gguf", toy.metadata(**changes)))


def answers(results) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


class Script:
    """A model whose logits are chosen: after k new tokens, the k-th id of its list is the best."""

    def __init__(self, config, ids, prompt_length: int) -> None:
        self.config, self.ids, self.prompt_length = config, ids, prompt_length

    def forward(self, step, _cache):
        logits = np.zeros((step.num_seqs, self.config.vocab_size), np.float32)
        for row, length in enumerate(step.seq_lens):
            if length >= self.prompt_length:
                logits[row, self.ids[min(length - self.prompt_length, len(self.ids) - 1)]] = 10
        return logits


@pytest.fixture
def scripted(path):
    """An LLM that says what it is told to, for prompts of one token."""

    def make(*said, path=path) -> LLM:
        llm = LLM(path)
        ids = [i for text in said for i in ([text] if isinstance(text, int) else llm.tokenizer.encode(text))]
        llm.engine.model = Script(llm.config, ids, 1)
        return llm

    return make


# A naive reference ----------------------------------------------------------------------------------------------------


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a file's W_q or W_k in Hugging Face's order: even rows of a head first, then the odd ones."""
    parts = [weight[h * toy.HEAD : (h + 1) * toy.HEAD] for h in range(heads)]
    return np.concatenate([rows for part in parts for rows in (part[0::2], part[1::2])])


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """RoPE of one head vector in Hugging Face's way: the halves are the pairs."""
    half = toy.HEAD // 2
    out = x.copy()
    for i in range(half):
        angle = position * 10_000.0 ** (-2 * i / toy.HEAD)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x * x)) + 1e-5) * weight


def naive_logits(ids) -> np.ndarray:
    """Logits of every position, float64 [n, V]: one token, one head, one key after the other."""
    w = {name: tensor.astype(np.float64) for name, tensor in toy.weights().items()}
    xs = [w["token_embd.weight"][i].copy() for i in ids]
    for layer in range(toy.LAYERS):
        b = {name.split(".")[2]: tensor for name, tensor in w.items() if name.startswith(f"blk.{layer}.")}
        wq, wk = unpermuted(b["attn_q"], toy.H), unpermuted(b["attn_k"], toy.K)
        keys, values = [], []
        for t, x in enumerate(xs):
            h = norm(x, b["attn_norm"])
            q, k, v = (wq @ h).reshape(toy.H, -1), (wk @ h).reshape(toy.K, -1), (b["attn_v"] @ h).reshape(toy.K, -1)
            keys.append([turned(head, t) for head in k])
            values.append(v)
            out = []
            for head in range(toy.H):
                own = head // (toy.H // toy.K)
                query = turned(q[head], t)
                scores = [math.exp(float(query @ keys[s][own]) / math.sqrt(toy.HEAD)) for s in range(t + 1)]
                out.append(sum(scores[s] * values[s][own] for s in range(t + 1)) / sum(scores))
            x = x + b["attn_output"] @ np.concatenate(out)
            h = norm(x, b["ffn_norm"])
            gate, up = b["ffn_gate"] @ h, b["ffn_up"] @ h
            xs[t] = x + b["ffn_down"] @ (gate / (1 + np.exp(-gate)) * up)
    return np.array([w["token_embd.weight"] @ norm(x, w["output_norm.weight"]) for x in xs])


@pytest.fixture(scope="module")
def sequences():
    """Token ids of four sequences, and the naive logits of all their positions."""
    rng = np.random.default_rng(1)
    ids = [[int(i) for i in rng.integers(0, 300, n)] for n in (40, 1, 17, 33)]
    return [(x, naive_logits(x)) for x in ids]


def nan_cache(model: CpuModel, rows: int, length: int) -> DenseKVCache:
    """A cache in which whatever was not written poisons what reads it."""
    cache = DenseKVCache(model.config, rows, length)
    cache.keys[:], cache.values[:] = np.nan, np.nan
    return cache


def test_prefill_and_decode_against_the_naive_reference(llm, sequences):
    ids, expected = sequences[0]
    cache = nan_cache(llm.engine.model, 3, 64)
    prefill = llm.engine.model.forward(make_step([ids[:20]], [0], [[1]], 64), cache, all_positions=True)
    assert_close(prefill, expected[:20], 2e-4, why=WHY)
    for t in range(20, 40):
        logits = llm.engine.model.forward(make_step([ids[t : t + 1]], [t], [[1]], 64), cache)
        assert_close(logits[0], expected[t], 2e-4, why=WHY, name=f"position {t}")
    assert np.isnan(cache.keys[:, :64]).all()
    assert np.isnan(cache.values[:, 128:]).all()


def test_mixed_steps_against_the_naive_reference(llm, sequences):
    """Prefills of several lengths and single decode tokens in one step, rows of the cache in any order."""
    cache, rows, done = nan_cache(llm.engine.model, 6, 50), [4, 0, 5, 2], [0, 0, 0, 0]
    for counts in ([5, 1, 0, 7], [1, 0, 3, 1], [30, 0, 1, 1], [1, 0, 13, 20], [3, 0, 0, 4]):
        who = [i for i, count in enumerate(counts) if count]
        new = [sequences[i][0][done[i] : done[i] + counts[i]] for i in who]
        step = make_step(new, [done[i] for i in who], [[rows[i]] for i in who], 50)
        logits = llm.engine.model.forward(step, cache)
        for i in who:
            done[i] += counts[i]
        assert list(step.seq_lens) == [done[i] for i in who]
        for row, i in enumerate(who):
            assert_close(logits[row], sequences[i][1][done[i] - 1], 2e-4, why=WHY, name=f"sequence {i}")
    assert done == [40, 1, 17, 33]


def test_c54_chunks_of_seven_one_and_three(llm):
    ids = list(range(10, 21))
    whole = llm.engine.model.forward(make_step([ids], [0], [[0]], 16), nan_cache(llm.engine.model, 1, 16))
    cache, done = nan_cache(llm.engine.model, 1, 16), 0
    for count in (7, 1, 3):
        step = make_step([ids[done : done + count]], [done], [[0]], 16)
        logits = llm.engine.model.forward(step, cache)
        done += count
    assert list(step.seq_lens) == [11]
    assert_close(logits, whole, 1e-4, why="another order of summation")
    for layer in range(toy.LAYERS):
        assert [bool(np.isnan(k).any()) for k in cache.keys[layer]] == [False] * 11 + [True] * 5


@pytest.mark.parametrize(
    ("new", "computed", "tables"), [([[]], [0], [[0]]), ([[1] * 9], [0], [[0]]), ([[1]], [8], [[0]])]
)
def test_a_step_that_does_not_fit_is_refused(new, computed, tables):
    with pytest.raises(ValueError, match="sequence 0"):
        make_step(new, computed, tables, 8)


def test_greedy_tokens_are_the_naive_arg_max(llm):
    ids = llm.tokenizer.encode("hello world")
    out = llm.generate("hello world", SamplingParams(max_tokens=5, ignore_eos=True, logprobs=3))[0].outputs[0]
    logits = naive_logits([*ids, *out.token_ids])[len(ids) - 1 : -1]
    assert out.token_ids == [int(i) for i in logits.argmax(axis=1)]
    for row, entries in zip(logits, out.logprobs, strict=True):
        expected = row - np.log(np.exp(row).sum())
        for i, value in entries.items():
            assert value == pytest.approx(expected[i], abs=1e-3)


# Batches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 512])
def test_c56_company_and_chunks_do_not_matter(path, alone, max_num_seqs, max_num_batched_tokens):
    """C56: equal up to near ties; this model has none. The order of the prompts is kept."""
    llm = LLM(path, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert [r.outputs[0] for r in llm.generate(PROMPTS, GREEDY)] == alone
    backwards = llm.generate(tuple(PROMPTS[::-1]), [GREEDY] * len(PROMPTS))
    assert [r.outputs[0] for r in backwards] == alone[::-1]
    assert [r.prompt for r in backwards] == [p if isinstance(p, str) else None for p in PROMPTS[::-1]]


def test_c56_gaps_are_no_near_ties(llm, alone):
    """What the test above stands on: the best two logits of its steps differ by more than float32 can err."""
    gaps = []
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        step = make_step([[*ids, *answer.token_ids]], [0], [[0]], 100)
        logits = llm.engine.model.forward(step, DenseKVCache(llm.config, 1, 100), all_positions=True)[len(ids) - 1 : -1]
        gaps += list(np.subtract(*np.sort(logits, axis=1)[:, :-3:-1].T))
    assert min(gaps) > 1e-3


@pytest.mark.parametrize("chunk", [1, 2, 39, 40, 41])
def test_chunked_prefill_of_any_size(path, alone, chunk):
    assert LLM(path, max_num_batched_tokens=chunk).generate("x" * 40, GREEDY)[0].outputs[0] == alone[5]


def test_seeds_ignore_the_company(llm):
    hot = [SamplingParams(temperature=1.5, seed=i, max_tokens=3 + i, ignore_eos=True) for i in range(8)]
    together = answers(llm.generate(PROMPTS, hot))
    assert together == [answers(llm.generate(p, q))[0] for p, q in zip(PROMPTS, hot, strict=True)]
    assert [len(ids) for ids in together] == list(range(3, 11))


@pytest.mark.parametrize("max_num_seqs", [1, 2, 32])
def test_n_answers_of_one_prompt(path, max_num_seqs):
    llm = LLM(path, max_num_seqs=max_num_seqs)
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
    first, second = llm.generate(["hello", "world"], params)
    assert [out.index for out in first.outputs] == [0, 1, 2]
    assert len({tuple(out.token_ids) for out in (*first.outputs, *second.outputs)}) == 6
    assert first.metrics.num_generated_tokens == 24
    assert first.outputs == LLM(path).generate("hello", params)[0].outputs
    single = SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
    assert llm.generate("hello", single)[0].outputs[0] == first.outputs[0]


def test_a_mixed_batch_of_parameters(llm, alone):
    mixed = [GREEDY, SamplingParams(temperature=1, seed=1), None, SamplingParams(max_tokens=1, logprobs=2)]
    results = llm.generate(PROMPTS[:4], mixed)
    assert results[0].outputs[0] == alone[0]
    assert results[3].outputs[0].token_ids == alone[3].token_ids[:1]
    assert [r.outputs[0].logprobs is None for r in results] == [True, True, True, False]


def test_metrics_count_and_tell_the_time(llm):
    metrics = llm.generate([5, 6, 7], GREEDY)[0].metrics
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (3, 12)
    assert 0 < metrics.time_to_first_token < metrics.total_time
    assert metrics.decode_tokens_per_second > 0
    assert llm.generate([5], SamplingParams(max_tokens=1))[0].metrics.decode_tokens_per_second is None


# Prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda x: np.array(x, np.uint8), lambda x: [np.int64(i) for i in x]]
)
def test_a_prompt_of_ids_may_be_any_sequence(llm, alone, make):
    assert [r.outputs[0] for r in llm.generate(make([5, 6, 7]), GREEDY)] == [alone[4]]
    assert llm.generate([make([5, 6, 7]), "a"], GREEDY)[0].outputs[0] == alone[4]
    assert list(llm.stream(make([5, 6, 7]), GREEDY)) == list(llm.stream([5, 6, 7], GREEDY))


def test_no_prompts_no_answers(llm):
    assert llm.generate([]) == []
    assert llm.generate((), []) == []


BAD_PROMPTS = [
    ("", PromptError, "found no tokens"),
    ([], PromptError, "found no tokens"),
    (None, PromptError, "found NoneType"),
    ([-1], PromptError, "token id -1; allowed: 0 to 299"),
    ([10**9], PromptError, "token id 1000000000"),
    ([300], PromptError, "token id 300"),
    (["a"], PromptError, "token id 'a'"),
    ([1, None], PromptError, "token id None"),
    ([1.0], PromptError, "token id 1.0"),
    ([True], PromptError, "token id True"),
    (5, PromptError, "found int"),
    ({"prompt": "a"}, PromptError, "found dict"),
    (b"abc", PromptError, "found bytes"),
    ("a\ud800", TokenizerError, "lone surrogate"),
    ([7] * 300, PromptError, "found 300 tokens"),
    (np.array([[1, 2]]), PromptError, "token id"),
    (np.array([0.5]), PromptError, "token id"),
]


@pytest.mark.parametrize(("prompt", "kind", "message"), BAD_PROMPTS, ids=lambda value: repr(value)[:30])
def test_c40_a_bad_prompt_stops_no_other(llm, alone, prompt, kind, message):
    first, bad, last = llm.generate(["hello world", prompt, "a"], GREEDY)
    assert [first.outputs[0], last.outputs[0]] == alone[:2]
    assert isinstance(bad.error, kind)
    assert message in str(bad.error)
    with pytest.raises(kind):
        _ = bad.outputs
    with pytest.raises(kind):
        _ = bad.text
    with pytest.raises(kind):
        llm.stream(prompt, GREEDY)
    assert llm.generate("a", GREEDY)[0].outputs[0] == alone[1]


@pytest.mark.parametrize("prompt", ["", None, [-1], [10**9], [300], 5, "a\ud800", [7] * 300, [1, "a"]], ids=repr)
def test_c40_a_single_bad_prompt_raises(llm, prompt):
    with pytest.raises(RvllmError, match=r"prompt|text"):
        llm.generate(prompt, GREEDY)


def test_c40_an_empty_prompt_runs_where_the_model_has_a_bos(tmp_path):
    llm = variant(tmp_path, tokenizer__ggml__add_bos_token=True)
    result = llm.generate("", GREEDY)[0]
    assert result.prompt_token_ids == [1]
    assert len(result.outputs[0].token_ids) == 12


def test_c27_parse_special_is_a_switch(llm):
    for parse_special, count in ((True, 1), (False, 0)):
        result = llm.generate("a<|im_end|>b", GREEDY, parse_special=parse_special)[0]
        assert result.prompt_token_ids.count(2) == count
        stream = llm.stream("a<|im_end|>b", GREEDY, parse_special=parse_special)
        assert stream.output.prompt_token_ids == result.prompt_token_ids


def test_chat_runs_the_template(llm, tmp_path):
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    result = llm.chat(messages, GREEDY)[0]
    assert result.prompt_token_ids == llm.tokenizer.encode_chat(messages)
    assert result.outputs == llm.generate(result.prompt_token_ids, GREEDY)[0].outputs
    with pytest.raises(ChatTemplateError, match="found 'hi'"):
        llm.chat("hi")
    with pytest.raises(ChatTemplateError, match="the file has none"):
        variant(tmp_path, tokenizer__chat_template=None).chat(messages)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_c41_exactly_so_many_tokens(llm, max_tokens):
    out = llm.generate("hello", SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (max_tokens, "length")


def test_c41_none_means_up_to_the_context(path):
    out = LLM(path, max_model_len=20).generate([5] * 4, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (16, "length")


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"), [(63, 10, 1), (60, 100, 4), (54, 10, 10), (1, None, 63), (60, 10**400, 4)]
)
def test_c42_c49_prompt_and_answer_fit_the_context(path, length, max_tokens, expected):
    out = LLM(path, max_model_len=64).generate([7] * length, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert (len(out[0].outputs[0].token_ids), out[0].outputs[0].finish_reason) == (expected, "length")


@pytest.mark.parametrize("length", [64, 65, 1000])
@pytest.mark.parametrize("max_tokens", [1, 10, None])
def test_c42_c49_a_prompt_without_room_for_an_answer_is_refused(path, alone, length, max_tokens):
    llm = LLM(path, max_model_len=64)
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(PromptError, match=f"found {length} tokens; allowed: at most 63"):
        llm.generate([7] * length, params)
    good, bad, short = llm.generate(["hello world", [7] * length, [7] * 63], [GREEDY, params, GREEDY])
    assert good.outputs[0] == alone[0]
    assert isinstance(bad.error, PromptError)
    assert len(short.outputs[0].token_ids) == 1


def test_c42_the_models_own_context_is_the_default(llm):
    assert llm.max_model_len == 256
    out = llm.generate([7] * 250, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (6, "length")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
        for value in (0, -1, "8", 2.0)
    ]
    + [("max_model_len", 1), ("max_model_len", 257), ("max_num_seqs", None), ("max_num_seqs", True)],
)
def test_wrong_limits_are_named(path, name, value):
    with pytest.raises(ParameterError, match=f"{name}: found"):
        LLM(path, **{name: value})


def test_what_limits_a_prompt_is_said(path):
    for options, limit in (({}, "the context is 256"), ({"num_blocks": 4, "block_size": 8}, "the KV cache holds 32")):
        with pytest.raises(PromptError, match=limit):
            LLM(path, **options).generate([7] * 300, GREEDY)
    with pytest.raises(ParameterError, match="num_blocks: found 1 of 1 tokens"):
        LLM(path, num_blocks=1, block_size=1)


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [2, 0])
def test_c33_every_end_token_ends(scripted, end):
    """<|im_end|> (2) is the file's EOS, <|endoftext|> (0) a well-known end text."""
    llm = scripted("ok", end, "more")
    out = llm.generate([5])[0].outputs[0]
    assert (out.text, out.finish_reason, out.token_ids[-1]) == ("ok", "stop", end)
    assert end not in out.token_ids[:-1]


def test_c33_an_unknown_token_ends_nothing(scripted):
    out = scripted("ok", 1, "more").generate([5], SamplingParams(max_tokens=10))[0].outputs[0]
    assert out.finish_reason == "length"
    assert out.text.startswith("okmore")


@pytest.mark.parametrize("end", [2, 0])
def test_c33_ignore_eos_goes_on(scripted, end):
    out = scripted("ok", end, "more", "!").generate([5], SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0]
    assert (out.finish_reason, len(out.token_ids)) == ("length", 9)
    assert out.text.startswith("okmore!")


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({"tokenizer__ggml__eos_token_id": 7}, {7, 2, 0}),
        ({"tokenizer__ggml__eos_token_id": None}, {2, 0}),
        ({"tokenizer__ggml__eos_token_id": None, "tokenizer__ggml__token_type": [NORMAL] * 300}, set()),
        (
            {"tokenizer__ggml__eot_token_id": 9, "tokenizer__ggml__token_type": [CONTROL] * 2 + [NORMAL] * 298},
            {9, 2, 0},
        ),
    ],
)
@pytest.mark.parametrize("token_id", [0, 2, 7, 9, 11])
def test_c34_the_end_token_comes_from_the_file(scripted, tmp_path, changes, ends, token_id):
    path = toy.write(tmp_path / "other.gguf", toy.metadata(**changes))
    out = scripted(50, token_id, 51, path=path).generate([5], SamplingParams(max_tokens=6))[0].outputs[0]
    reason, count = ("stop", 2) if token_id in ends else ("length", 6)
    assert (out.finish_reason, len(out.token_ids)) == (reason, count)


def test_stop_ids_end_and_are_not_shown(scripted):
    llm = scripted("A", "B", "C", "D")
    c = llm.tokenizer.encode("C")
    for ignore_eos in (True, False):
        out = llm.generate([5], SamplingParams(stop_token_ids=c, ignore_eos=ignore_eos))[0].outputs[0]
        assert (out.text, out.finish_reason, out.token_ids[-1:]) == ("AB", "stop", c)


@pytest.mark.parametrize(
    ("stop", "max_tokens", "text", "reason"),
    [
        ("END", 99, "foo ", "stop"),
        (["x", "D b"], 99, "foo EN", "stop"),
        ("ENX", 11, "foo END bar", "length"),
        ("END", 6, "foo EN", "length"),
        ("END", 7, "foo ", "stop"),
        ("f", 99, "", "stop"),
        ("bar!", 11, "foo END bar", "length"),
    ],
)
def test_c31_stop_texts_across_tokens(scripted, stop, max_tokens, text, reason):
    llm = scripted("foo", " EN", "D bar", ".")
    assert len(llm.tokenizer.encode("foo EN")) <= 6
    spelled = [i for c in "foo END bar" for i in llm.tokenizer.encode(c)]
    llm.engine.model.ids = [*spelled, *llm.tokenizer.encode(".")]
    params = SamplingParams(stop=stop, max_tokens=max_tokens)
    out = llm.generate([5], params)[0].outputs[0]
    assert (out.text, out.finish_reason) == (text, reason)
    stream = llm.stream([5], params)
    assert "".join(stream) == text
    assert stream.output.outputs[0] == out


def test_c31_held_text_is_shown_when_an_end_token_comes(scripted):
    out = scripted("foo", " EN", 2).generate([5], SamplingParams(stop="END"))[0].outputs[0]
    assert (out.text, out.finish_reason) == ("foo EN", "stop")


SPECIAL_STOPS = [  # what the model says (1 is <|im_start|>, 2 the end token <|im_end|>), stop texts, what is shown
    (["ab cd", 1, " ef"], "<|im_start|>", "ab cd"),
    (["ab cd", 1, " ef"], ["zz", "<|im_start|>"], "ab cd"),
    (["ab cd", 1, "user x"], "<|im_start|>user", "ab cd"),
    (["ab cd", 1, "us", "er", " x"], ["<|im_start|>user"], "ab cd"),
    (["ab cd", 1, " ef"], "cd<|im_start|>", "ab "),
    (["ab cd", 1, " ef"], "d<|im_start|> e", "ab c"),
    (["ab", 1, 1, " ef"], "<|im_start|><|im_start|> ", "ab"),
    (["ab cd", 2], "cd<|im_end|>", "ab "),
    (["ab <|im_", "start|>user"], "<|im_start|>user", "ab "),
]


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize(("said", "stop", "text"), SPECIAL_STOPS)
def test_c88_stop_texts_with_special_tokens(scripted, said, stop, text, logprobs):
    llm = scripted(*said)
    if "<|im_" in said[0]:  # spelled out by ordinary tokens
        llm.engine.model.ids = [i for part in said for i in llm.tokenizer.encode(part, parse_special=False)]
    params = SamplingParams(stop=stop, max_tokens=99, logprobs=logprobs)
    out = llm.generate([5], params)[0].outputs[0]
    assert (out.text, out.finish_reason) == (text, "stop")
    assert out.token_ids == llm.engine.model.ids[: len(out.token_ids)]
    assert logprobs is None or len(out.logprobs) == len(out.token_ids)
    stream = llm.stream([5], params)
    assert ("".join(stream), stream.output.outputs[0]) == (text, out)


@pytest.mark.parametrize(("stop", "ended"), [("<|im_end|>", True), ("b<|im_end|>", True), ("<|im_end|>x", False)])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_c88_an_end_token_as_a_stop_text_stops_although_end_tokens_are_ignored(scripted, stop, ended, ignore_eos):
    params = SamplingParams(stop=stop, ignore_eos=ignore_eos, max_tokens=9)
    out = scripted("ab", 2, "cd").generate([5], params)[0].outputs[0]
    if ended or not ignore_eos:
        assert (out.text, out.finish_reason, out.token_ids[-1]) == ("a" if stop[0] == "b" else "ab", "stop", 2)
    else:
        assert (out.text[:4], out.finish_reason) == ("abcd", "length")


def test_c88_a_user_defined_token_as_a_stop_text(scripted, tmp_path):
    types = [CONTROL] * 3 + [NORMAL] * 297
    types[299] = USER_DEFINED
    path = toy.write(tmp_path / "user.gguf", toy.metadata(tokenizer__ggml__token_type=types))
    llm = scripted("AB", 299, "C", path=path)
    out = llm.generate([5], SamplingParams(stop=llm.tokenizer.tokens[299]))[0].outputs[0]
    assert (out.text, out.finish_reason, out.token_ids[-1]) == ("AB", "stop", 299)


def test_c88_a_stop_text_that_is_one_special_token_counts_among_the_ids(scripted):
    """So, like them, it is held back until `min_tokens`, and an unfinished character before it is shown as such."""
    llm = scripted("A", 1, "B", "C")
    out = llm.generate([5], SamplingParams(stop="<|im_start|>", min_tokens=3, max_tokens=4))[0].outputs[0]
    assert 1 not in out.token_ids[:3]
    half = llm.tokenizer.encode("é")[:1]
    llm.engine.model.ids = [*half, 1]
    for params in (SamplingParams(stop="<|im_start|>"), SamplingParams(stop_token_ids=[1])):
        assert llm.generate([5], params)[0].outputs[0].text == "\ufffd"


def test_min_tokens_comes_before_every_end(scripted):
    """A stop text may be complete with the last of them; an end token, which is not text, comes after them."""
    llm = scripted("A", "B", "B", "C", "B", "C")
    b = llm.tokenizer.encode("B")

    def results(**stop):
        return [llm.generate([5], SamplingParams(min_tokens=n, max_tokens=6, **stop))[0].outputs[0] for n in range(6)]

    assert [out.text for out in results(stop="B")] == ["A", "A", "A", "AB", "ABBC", "ABBC"]
    assert [len(out.token_ids) for out in results(stop_token_ids=b)] == [2, 2, 3, 5, 5, 6]


def test_min_tokens_holds_the_end_token_back(scripted):
    llm = scripted("A", 2)
    ids = answers(llm.generate([5], SamplingParams(min_tokens=4)))[0]
    assert len(ids) == 5
    assert ids.index(2) == 4


@pytest.mark.parametrize("cut", range(1, 12))
def test_c30_an_answer_cut_inside_a_character(scripted, cut):
    llm = scripted("👩‍🚀")
    data = "👩‍🚀".encode()[:cut]
    stream = llm.stream([5], SamplingParams(max_tokens=cut))
    pieces = list(stream)
    assert "".join(pieces) == stream.output.text == data.decode("utf-8", "replace")
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert stream.output.outputs[0].finish_reason == "length"


def test_nan_logits_are_named(path):
    llm = LLM(path)
    llm.engine.model = Script(llm.config, [5], 1)
    forward = llm.engine.model.forward
    llm.engine.model.forward = lambda step, cache: forward(step, cache) * np.float32("nan")
    with pytest.raises(LogitsError, match="NaN"):
        llm.generate("a")
    for answer, prompt in zip(llm.generate(["a", "b"]), "ab", strict=True):
        assert isinstance(answer.error, LogitsError)
        assert f"prompt '{prompt}': the logits of token 1 hold NaN" in str(answer.error)


# Log-probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5])
def test_c62_one_entry_for_each_token(llm, count):
    params = SamplingParams(temperature=1, seed=3, top_k=1, logprobs=count, max_tokens=6, ignore_eos=True)
    out = llm.generate("hello", params)[0].outputs[0]
    assert len(out.logprobs) == len(out.token_ids) == 6
    for token_id, entries in zip(out.token_ids, out.logprobs, strict=True):
        assert len(entries) == max(count, 1)
        assert max(entries, key=entries.get) == token_id
        assert all(math.isfinite(x) and x <= 0 for x in entries.values())


# Bad parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"stop_token_ids": [10**9]}, {"logit_bias": {300: 1.0}}, {"stop_token_ids": [300]}])
def test_c84_a_bad_parameter_stops_no_other(llm, alone, bad):
    params = SamplingParams(**bad)
    first, refused, last = llm.generate(["hello world", "b", "a"], [GREEDY, params, GREEDY])
    assert [first.outputs[0], last.outputs[0]] == alone[:2]
    assert isinstance(refused.error, ParameterError)
    assert (refused.prompt, "allowed: ids from 0 to 299" in str(refused.error)) == ("b", True)
    for run in (llm.generate, llm.stream):
        with pytest.raises(ParameterError):
            run("b", params)
    assert llm.generate("a", GREEDY)[0].outputs[0] == alone[1]


@pytest.mark.parametrize("params", [[], [GREEDY], [GREEDY] * 3, "greedy", {"max_tokens": 3}, 5, iter([GREEDY] * 2)])
def test_c84_wrong_lists_of_parameters(llm, params):
    with pytest.raises(ParameterError, match=r"params: .*allowed"):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize("params", [[GREEDY], "greedy", {"max_tokens": 3}, 5])
def test_c84_a_single_prompt_takes_single_parameters(llm, params):
    for run in (llm.generate, llm.stream):
        with pytest.raises(ParameterError, match="params"):
            run("a", params)


def test_c84_something_else_in_the_list_is_that_requests_error(llm, alone):
    good, bad = llm.generate(["a", "b"], [GREEDY, {"max_tokens": 3}])
    assert good.outputs[0] == alone[1]
    assert isinstance(bad.error, ParameterError)


def test_errors_of_a_result_show_in_its_repr(llm):
    bad = llm.generate(["", "a"], GREEDY)[0]
    assert "found no tokens" in repr(bad)
    assert bad.metrics.num_generated_tokens == 0


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(PROMPTS)))
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_gives_what_generate_gives(llm, index, temperature):
    params = SamplingParams(temperature=temperature, seed=index, max_tokens=25, logprobs=1, stop=["\x00", "zz"])
    expected = llm.generate(PROMPTS[index], params)[0]
    stream = llm.stream(PROMPTS[index], params)
    assert stream.output.outputs[0].finish_reason is None
    pieces = list(stream)
    assert "" not in pieces
    assert "".join(pieces) == expected.text
    assert stream.output.outputs == expected.outputs
    assert stream.output.prompt_token_ids == expected.prompt_token_ids
    assert list(stream) == []


def test_c65_a_stream_closed_half_way(llm, alone):
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    stream = llm.stream("hello world", long)
    seen = next(stream) + next(stream)
    stream.close()
    assert (stream.output.text, stream.output.outputs[0].finish_reason) == (seen, "abort")
    assert list(stream) == []
    stream.close()
    assert stream.output.outputs[0].finish_reason == "abort"
    assert llm.generate(PROMPTS, GREEDY)[0].outputs[0] == alone[0]


def test_c65_a_stream_closed_before_and_after(llm):
    before = llm.stream("hello world", GREEDY)
    before.close()
    assert (before.output.text, before.output.outputs[0].finish_reason, list(before)) == ("", "abort", [])
    after = llm.stream("hello world", GREEDY)
    text = "".join(after)
    after.close()
    assert (after.output.text, after.output.outputs[0].finish_reason) == (text, "length")


def test_two_streams_at_once(llm):
    params = SamplingParams(temperature=1, seed=1, max_tokens=20, ignore_eos=True)
    one, two = llm.stream("hello", params), llm.stream("world", params)
    texts = ["", ""]
    for i, stream in [(0, one), (1, two)] * 30:
        texts[i] += next(stream, "")
    assert texts == [llm.generate(p, params)[0].text for p in ("hello", "world")]


def test_a_stream_has_one_answer(llm):
    with pytest.raises(ParameterError, match="n: found 2; allowed: 1"):
        llm.stream("a", SamplingParams(n=2))


# Closing --------------------------------------------------------------------------------------------------------------


def test_sizes_beyond_all_bounds_are_named(path):
    for options in ({"num_blocks": 10**20}, {"block_size": 10**20}, {"num_blocks": 2**20, "block_size": 2**20}):
        with pytest.raises(ParameterError, match="found"):
            LLM(path, **options)


def test_decode_speed_counts_gaps_between_tokens_of_an_answer(llm):
    one = llm.generate("a", SamplingParams(max_tokens=1, n=8, temperature=1))[0].metrics
    assert (one.num_generated_tokens, one.decode_tokens_per_second) == (8, None)


def test_close_may_be_called_twice(path):
    with LLM(path) as llm:
        assert llm.generate("a", GREEDY)[0].text is not None
        llm.close()
    llm.close()


CALLS = {
    "engine": lambda llm: llm.engine,
    "trace": lambda llm: llm.trace,
    "max_model_len": lambda llm: llm.max_model_len,
    "with": lambda llm: llm.__enter__(),
    "generate": lambda llm: llm.generate("a", GREEDY),
    "generate nothing": lambda llm: llm.generate([]),
    "generate something odd": lambda llm: llm.generate(["a", None], 5),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}]),
    "chat about something odd": lambda llm: llm.chat(None),
    "stream": lambda llm: llm.stream("a"),
    "stream something odd": lambda llm: llm.stream("a", SamplingParams(n=2)),
}


@pytest.mark.parametrize("call", CALLS)
def test_c93_a_closed_llm_says_so(path, call):
    llm = LLM(path, trace=True)
    llm.close()
    with pytest.raises(ClosedError, match="closed"):
        CALLS[call](llm)


BOUND = {  # what somebody may still refer to when an LLM goes
    "a stream before its first piece": lambda llm: llm.stream("a", GREEDY),
    "a half-read stream": lambda llm: (stream := llm.stream("a", GREEDY), next(stream)),
    "a stream read to its end": lambda llm: (stream := llm.stream("a", GREEDY), list(stream)),
    "a stream that others drove to its end": lambda llm: (llm.stream("a", GREEDY), llm.generate("b", LONGER)),
    "a closed stream": lambda llm: (stream := llm.stream("a", GREEDY), next(stream), stream.close()),
    "answers": lambda llm: llm.generate(["a", "b"], GREEDY),
    "a refused request": lambda llm: llm.generate(["a", "", [300], None], GREEDY),
    "a failed request": lambda llm: (damage(llm), llm.generate(["a", "b"], GREEDY)),
    "a failed stream": lambda llm: (damage(llm), stream := llm.stream("a", GREEDY), error_of(lambda: next(stream))),
    "a request": lambda llm: llm.engine.add_request([5], GREEDY),
    "the trace": lambda llm: (llm.generate("a", GREEDY), llm.trace),
    "an error": lambda llm: error_of(lambda: llm.generate("")),
}


def error_of(call) -> str:
    with pytest.raises(RvllmError) as caught:
        call()
    return str(caught.value)


def damage(llm: LLM) -> None:
    forward = llm.engine.model.forward
    llm.engine.model.forward = lambda step, cache: forward(step, cache) * np.float32("nan")


def parts(llm: LLM) -> list[weakref.ref]:
    engine = llm.engine
    return [weakref.ref(x) for x in (engine, engine.model, engine.cache, engine.model.layers[0])]


@pytest.mark.parametrize("what", BOUND)
def test_c93_nothing_keeps_the_weights_of_a_closed_llm(path, what):
    llm = LLM(path, device="cpu", trace=True)
    alive = parts(llm)
    bound = BOUND[what](llm)
    llm.close()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
    assert bound is not None


@pytest.mark.parametrize("what", [what for what in BOUND if "half" not in what and "before" not in what])
def test_c93_only_what_goes_on_keeps_an_llm_that_nobody_closed(path, what):
    """A stream that is still to be read needs the engine: that one alone may keep it."""
    llm = LLM(path, device="cpu", trace=True)
    alive = parts(llm)
    bound = BOUND[what](llm)
    del llm
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
    assert bound is not None


def test_c93_a_stream_goes_on_without_its_llm(path, alone):
    stream = LLM(path).stream("hello world", GREEDY)
    gc.collect()
    assert "".join(stream) == alone[0].text


def test_c93_a_half_read_stream_ends_with_its_llm(path):
    llm = LLM(path)
    finished, half = llm.stream("hello world", GREEDY), llm.stream("hello world", LONGER)
    text, seen = "".join(finished), next(half)
    llm.close()
    assert seen + "".join(half) == half.output.text
    out = half.output.outputs[0]
    assert (out.token_ids, out.finish_reason) == (finished.output.outputs[0].token_ids, "abort")
    assert (finished.output.text, finished.output.outputs[0].finish_reason) == (text, "length")
    assert (list(half), list(finished)) == ([], [])
    half.close()
