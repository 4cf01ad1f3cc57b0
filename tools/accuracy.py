"""How right the fast path is on the real 135M model: python tools/accuracy.py [--device cuda] [--json FILE]

Perplexity of the recorded text, how often the likeliest token is the CPU model's, and how many recorded greedy texts
come out the same: in both modes, in one pass (products of halfs, or hi/lo), token by token, and in 32 equal rows
(products of 32 columns).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvllm import LLM, SamplingParams, hub
from rvllm.bench import about, subject_of, write_record
from rvllm.cpu_model import CpuModel
from rvllm.gguf import GGUFFile
from rvllm.kv_cache import PagedKVCache
from rvllm.step import make_step

ORACLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "oracle"
Logits = NDArray[np.float32]


def in_one_pass(model: Any, ids: list[int], cache: Any = None) -> Logits:
    """Logits [n, V] of all tokens of a text as one prompt."""
    table = list(range(-(-len(ids) // 16)))
    logits: Logits = model.forward(make_step([ids], [0], [table], 16), cache, all_positions=True)
    return logits


def token_by_token(model: Any, ids: list[int], rows: int) -> Logits:
    """The same by decoding, in as many equal rows at once; of the last row."""
    blocks = -(-len(ids) // 16)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
    steps = ([[token]] * rows for token in ids)
    parts = [model.forward(make_step(new, [i] * rows, tables, 16), None)[-1] for i, new in enumerate(steps)]
    return np.stack(parts)


def scores(logits: Logits, reference: Logits, ids: list[int]) -> dict[str, float]:
    """Perplexity, agreement of the likeliest tokens, and the largest relative error of a row of logits."""
    n = len(logits)
    wide = logits[: n - 1].astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(wide, np.array(ids[1:n])[:, None], axis=1)[:, 0]
    error = np.linalg.norm(logits - reference[:n], axis=1) / np.linalg.norm(reference[:n], axis=1)
    return {
        "perplexity": float(np.exp((np.log(np.exp(wide).sum(axis=1)) - chosen).mean())),
        "same_argmax": float((logits.argmax(axis=1) == reference[:n].argmax(axis=1)).mean()),
        "largest_error": float(error.max()),
        "mean_error": float(error.mean()),
        "tokens": n,
    }


def greedy_texts(llm: LLM) -> dict[str, Any]:
    """The recorded prompts in one batch, and alone: how many answers are equal, and margins where others part.

    A margin is the float64 reference's lead of its choice over the next token, in logits.
    """
    cases = json.loads((ORACLE / "greedy.json").read_text(encoding="utf-8"))["cases"]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    prompts = [case["ids"] for case in cases]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    result: dict[str, Any] = {"texts": len(cases)}
    for name, answers in (("together", together), ("alone", alone)):
        margins = [parting(answer, case["float64"]) for answer, case in zip(answers, cases, strict=True)]
        result[name] = {"equal": margins.count(None), "margins": [m for m in margins if m is not None]}
    return result


def parting(answer: list[int], expected: dict[str, Any]) -> float | None:
    """The reference's margin at the first token that differs; None if none does."""
    pairs = zip(answer, expected["ids"], expected["margins"], strict=True)
    return next((margin for ours, theirs, margin in pairs if ours != theirs), None)


def main(argv: list[str] | None = None) -> None:
    """Measure both modes; the numbers go to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variant", default="graph")
    parser.add_argument("--tokens", type=int, default=300, help="of the text, token by token")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    path = hub.resolve("smollm2-135m")
    ids = json.loads((ORACLE / "perplexity.json").read_text(encoding="utf-8"))["ids"]
    cpu = CpuModel(GGUFFile(path))
    reference = in_one_pass(cpu, ids, PagedKVCache(cpu.config, -(-len(ids) // 16), 16))
    modes: dict[str, Any] = {"cpu": {"one_pass": scores(reference, reference, ids)}}
    shape: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 32, "enable_prefix_caching": False}
    for exact in (False, True):
        with LLM(path, arguments.device, variant=arguments.variant, exact=exact, **shape) as llm:
            model, part = llm.engine.model, ids[: arguments.tokens]
            modes["exact" if exact else "fast"] = {
                "one_pass": scores(in_one_pass(model, ids), reference, ids),
                "token_by_token": scores(token_by_token(model, part, 1), reference, ids),
                "in_32_rows": scores(token_by_token(model, part, 32), reference, ids),
                "greedy": greedy_texts(llm),
            }
    record = about(subject_of(path, variant=arguments.variant), arguments.device) | {"modes": modes}
    print(json.dumps(modes, indent=1))
    if arguments.json:
        write_record(record, arguments.json)


if __name__ == "__main__":
    main()
