"""How right the fast path is on the real 135M model: python tools/accuracy.py [--device cuda] [--json FILE]

Perplexity of the recorded text, how often the likeliest token is the CPU model's, the error of logits against the
recorded float64 ones, how many recorded greedy texts come out the same, and the largest halfs on the way: in both
modes, in one pass (products of halfs, or hi/lo), token by token, and in 8 and 32 equal rows.
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
from rvllm.step import Step, make_step

ORACLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "oracle"
PROMPTS = (1, 5, 17, 64, 129, 400)  # lengths, of which logits are recorded
ROWS = {"token_by_token": 1, "in_8_rows": 8, "in_32_rows": 32}
Logits = NDArray[np.float32]


def as_prompt(ids: list[int]) -> Step:
    """A step that computes a text from its beginning."""
    return make_step([ids], [0], [list(range(-(-len(ids) // 16)))], 16)


def in_one_pass(model: Any, ids: list[int], cache: Any = None) -> Logits:
    """Logits [n, V] of all tokens of a text as one prompt."""
    logits: Logits = model.forward(as_prompt(ids), cache, all_positions=True)
    return logits


def token_by_token(model: Any, ids: list[int], rows: int) -> Logits:
    """The same by decoding, in as many equal rows at once; of the last row."""
    blocks = -(-len(ids) // 16)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
    steps = ([[token]] * rows for token in ids)
    parts = [model.forward(make_step(new, [i] * rows, tables, 16))[-1] for i, new in enumerate(steps)]
    return np.stack(parts)


def scores(logits: Logits, reference: Logits, ids: list[int]) -> dict[str, float]:
    """Perplexity, agreement of the likeliest tokens, and the largest relative error of a row of logits."""
    n = len(logits)
    if n < 2:
        raise ValueError(f"tokens: found {n}; allowed: 2 or more, the first one is not predicted")
    wide = logits[: n - 1].astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(wide, np.array(ids[1:n])[:, None], axis=1)[:, 0]
    error = relative_error(logits, reference[:n])
    return {
        "perplexity": float(np.exp((np.log(np.exp(wide).sum(axis=1)) - chosen).mean())),
        "same_argmax": float((logits.argmax(axis=1) == reference[:n].argmax(axis=1)).mean()),
        "largest_error": float(error.max()),
        "mean_error": float(error.mean()),
        "tokens": n,
    }


def relative_error(values: Logits, expected: Logits) -> NDArray[np.float64]:
    """Length of the difference over that of the expected vector, of each row."""
    wide = expected.astype(np.float64)
    errors: NDArray[np.float64] = np.linalg.norm(values - wide, axis=-1) / np.linalg.norm(wide, axis=-1)
    return errors


def prompt_errors(model: Any, most: int) -> dict[str, float]:
    """Relative error of the last token's logits against float64, by length of the recorded prompt."""
    with np.load(ORACLE / "logits.npz") as recorded:
        cases = {n: (recorded[f"ids_{n}"].tolist(), recorded[f"ref64_{n}"]) for n in PROMPTS if n <= most}
    answers = {n: model.forward(as_prompt(ids))[0] for n, (ids, _) in cases.items()}
    return {str(n): float(relative_error(answers[n], expected)) for n, (_, expected) in cases.items()}


def half_arrays(model: Any) -> dict[str, Any]:
    """What a fused model passes on as halfs, which end at 65,504; of other models nothing."""
    workspace = getattr(model, "workspace", None)
    places = [(workspace, name) for name in ("hidden", "attended", "activations")]
    places += [(model, name) for name in ("half_qkv", "half_gate_up")]
    return {name: getattr(place, name) for place, name in places if hasattr(place, name)}


def largest_halfs(model: Any, ids: list[int]) -> dict[str, float]:
    """The largest absolute value that each array of halfs held after any launch of a prompt's step, and the cache's."""
    arrays, step = half_arrays(model), as_prompt(ids)
    if not arrays:
        return {}
    largest = dict.fromkeys(arrays, 0.0)
    with model.rt.on_device(), model.stream:
        for array in arrays.values():
            array[...] = 0  # what other steps left
        model.inputs.put(step, np.zeros(0, np.int32))
        model.send_more(step)
        program = model.program(step)
        for launch in getattr(program, "program", program).launches:
            launch()
            for name, array in arrays.items():
                largest[name] = max(largest[name], float(abs(array).max()))
        model.inputs.advance(step)
        return largest | {"pages": max(float(abs(pages).max()) for pages in model.cache.pages)}


def greedy_texts(llm: LLM) -> dict[str, Any]:
    """The recorded prompts in one batch, and each alone: how many answers are equal, and where and how others part.

    A margin is the float64 reference's lead of its choice over the next token, in logits.
    """
    cases = json.loads((ORACLE / "greedy.json").read_text(encoding="utf-8"))["cases"]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    prompts = [case["ids"] for case in cases]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    result: dict[str, Any] = {"texts": len(cases)}
    for name, answers in (("together", together), ("alone", alone)):
        partings = [parting(answer, case) for answer, case in zip(answers, cases, strict=True)]
        result[name] = {"equal": partings.count(None), "partings": [p for p in partings if p is not None]}
    return result


def parting(answer: list[int], case: dict[str, Any]) -> dict[str, Any] | None:
    """The first token that differs from the reference's, and its margin there; None if none does."""
    expected = case["float64"]
    for i, (ours, theirs) in enumerate(zip(answer, expected["ids"], strict=True)):
        if ours != theirs:
            return {"prompt": case["name"], "token": i, "margin": expected["margins"][i]}
    return None


def measure(llm: LLM, ids: list[int], tokens: int, reference: Logits, quick: bool) -> dict[str, Any]:
    """One mode of a variant. ids: the text; so many `tokens` of it one by one."""
    model = llm.engine.model
    result: dict[str, Any] = {"one_pass": scores(in_one_pass(model, ids), reference, ids)}
    for name, rows in ROWS.items():
        if rows <= (8 if quick else 32):
            result[name] = scores(token_by_token(model, ids[:tokens], rows), reference, ids)
    result["prompt_errors"] = prompt_errors(model, 5 if quick else max(PROMPTS))
    result["largest_halfs"] = {str(n): largest_halfs(model, ids[:n]) for n in sorted({1, min(16, len(ids)), len(ids)})}
    if not quick:
        result["greedy"] = greedy_texts(llm)
    return result


def main(argv: list[str] | None = None) -> None:
    """Measure the modes that were asked for; the numbers go to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variant", default="graph")
    parser.add_argument("--mode", choices=("fast", "exact", "both"), default="both")
    parser.add_argument("--tokens", type=int, default=300, help="of the text, token by token")
    parser.add_argument("--quick", action="store_true", help="a few tokens, no greedy texts; minutes on the emulator")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    path = hub.resolve("smollm2-135m")
    ids = json.loads((ORACLE / "perplexity.json").read_text(encoding="utf-8"))["ids"]
    tokens = arguments.tokens
    if arguments.quick:
        ids, tokens = ids[:5], min(2, tokens)
    cpu = CpuModel(GGUFFile(path))
    reference = in_one_pass(cpu, ids, PagedKVCache(cpu.config, -(-len(ids) // 16), 16))
    modes: dict[str, Any] = {"cpu": {"one_pass": scores(reference, reference, ids)}}
    sizes = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 32}
    sizes = sizes if arguments.quick else {"max_model_len": 2048, "max_num_seqs": 32}
    for mode in ("fast", "exact") if arguments.mode == "both" else (arguments.mode,):
        chosen: dict[str, Any] = {"variant": arguments.variant, "exact": mode == "exact", **sizes}
        with LLM(path, arguments.device, enable_prefix_caching=False, **chosen) as llm:
            modes[mode] = measure(llm, ids, tokens, reference, arguments.quick)
    record = about(subject_of(path, variant=arguments.variant), arguments.device) | {"modes": modes}
    print(json.dumps(modes, indent=1))
    if arguments.json:
        write_record(record, arguments.json)


if __name__ == "__main__":
    main()
