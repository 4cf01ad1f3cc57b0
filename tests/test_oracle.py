"""The real 135M model against recorded outputs of a float64 program that shares no code with rvllm.

tests/data/oracle/: logits of six prompts, the residual stream after each block, 16 greedy continuations with the margin
of every choice, and the log-probability of every token of a text. llama.cpp on float32 weights gives the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rvllm import LLM, SamplingParams
from rvllm.cpu_model import CpuModel, DenseKVCache
from rvllm.step import Step, make_step
from rvllm.testing import assert_close

ORACLE = Path(__file__).parent / "data" / "oracle"
NEAR_TIE = 0.003  # float32 sums move logits by at most 8e-4; a choice closer than this may flip
pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def model(llm: LLM) -> CpuModel:
    return llm.engine.model


@pytest.fixture(scope="module")
def recorded() -> np.lib.npyio.NpzFile:
    return np.load(ORACLE / "logits.npz")


def new_sequence(model: CpuModel, ids: list[int]) -> tuple[Step, DenseKVCache]:
    cache = DenseKVCache(model.config, num_seqs=1, max_len=len(ids))
    return make_step([ids], [0], [[0]], cache.block_size), cache


@pytest.mark.parametrize("length", [1, 5, 17, 64, 129, 400])
def test_logits_of_the_last_token(model: CpuModel, recorded: np.lib.npyio.NpzFile, length: int) -> None:
    step, cache = new_sequence(model, recorded[f"ids_{length}"].tolist())
    logits = model.forward(step, cache)[0]
    print(assert_close(logits, recorded[f"ref64_{length}"], atol=2e-3, why="float32 against float64"))
    assert logits.argmax() == recorded[f"ref64_{length}"].argmax()


def test_residual_stream_after_every_block(model: CpuModel, recorded: np.lib.npyio.NpzFile) -> None:
    step, cache = new_sequence(model, recorded["ids_5"].tolist())
    expected = recorded["ref64_hidden_5"]
    x, phases = model.embed(step), model.rotary.phases(step.positions)
    assert_close(x[-1], expected[0], rtol=1e-6, name="embedding")
    for layer in range(model.config.num_hidden_layers):
        x = model.block(layer, x, phases, step, cache)
        scale = np.abs(expected[layer + 1]).max()
        assert_close(x[-1], expected[layer + 1], atol=1e-5 * scale, why="float32", name=f"block {layer}")
    assert np.abs(x).max() > 1000, "the first token's massive activations are part of what is tested"


def test_greedy_continuations(llm: LLM) -> None:
    cases = json.loads((ORACLE / "greedy.json").read_text(encoding="utf-8"))["cases"]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    outputs = llm.generate([case["ids"] for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        same_up_to_near_ties(output.outputs[0].token_ids, case["float64"], case["name"])


def same_up_to_near_ties(got: list[int], expected: dict, name: str) -> None:
    """Equal ids; after a choice whose float64 margin is below NEAR_TIE the texts may part."""
    for i, (ours, theirs) in enumerate(zip(got, expected["ids"], strict=True)):
        if ours != theirs:
            assert expected["margins"][i] < NEAR_TIE, f"{name}: token {i} is {ours}, expected {theirs}"
            return


def test_prompts_as_text_give_the_same_ids(llm: LLM) -> None:
    for case in json.loads((ORACLE / "greedy.json").read_text(encoding="utf-8"))["cases"]:
        assert llm.tokenizer.encode(case["text"]) == case["ids"], case["name"]


def test_stops_where_the_end_token_comes(llm: LLM) -> None:
    cases = json.loads((ORACLE / "greedy.json").read_text(encoding="utf-8"))["cases"]
    case = next(c for c in cases if c["name"] == "chat_hi")
    end = case["float64"]["first_eog_index"]
    answer = llm.chat(case["messages"], SamplingParams(max_tokens=48))[0].outputs[0]
    assert answer.token_ids == case["float64"]["ids"][: end + 1]
    assert answer.finish_reason == "stop"
    assert "<|" not in answer.text


def test_perplexity_of_a_text(model: CpuModel) -> None:
    text = json.loads((ORACLE / "perplexity.json").read_text(encoding="utf-8"))
    ids, expected = text["ids"], np.array(text["token_nll"]["float64_reference"])
    step, cache = new_sequence(model, ids)
    logits = model.forward(step, cache, all_positions=True)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    nll = np.log(np.exp(logits).sum(axis=1)) - np.take_along_axis(logits, np.array(ids[1:])[:, None], axis=1)[:, 0]
    assert_close(nll, expected, atol=2e-3, why="recorded with four decimals", name="negative log-likelihood")
    assert np.exp(nll.mean()) == pytest.approx(33.594, rel=1e-3)
