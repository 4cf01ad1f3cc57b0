"""How fast is it: equal batches, arriving requests, memory, and the share of what the card could do.

Generated from notebooks/13_benchmarks.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import datetime
import gc
import hashlib
import inspect
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module, metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rvllm.block_pool import blocks_needed
from rvllm.config import LlamaConfig
from rvllm.device import describe_device, device_index, gpu_memory, resolve_device
from rvllm.engine import EngineMetrics
from rvllm.errors import RvllmError
from rvllm.fast_model import WIDE
from rvllm.gguf import GGUFFile
from rvllm.half_cache import PAGE, HalfKVCache, half_bytes_per_block
from rvllm.kv_cache import bytes_per_block
from rvllm.llm import LLM
from rvllm.runtime import Runtime
from rvllm.sampling import SamplingParams
from rvllm.tokenizer import Tokenizer
from rvllm.variants import PACKED, choose_variant

Record = dict[str, Any]
Clock = Callable[[], float]
Progress = Callable[[str], None]


class BenchError(RvllmError):
    """A benchmark that can't be run as asked: what was found, what is allowed."""


def require(name: str, value: int, least: int) -> None:
    """BenchError unless the value is at least `least`."""
    if value < least:
        raise BenchError(f"{name}: found {value}; allowed: {least} or more")


@dataclass(frozen=True)
class Workload:
    """Prompts that start together, greedy, all answers of the same length. Notebook 13, section 2.

    batches: how many sequences run together, one measurement for each number.
    prompt_tokens, generated_tokens: of each sequence.   repeats: runs that count, after one that warms up.
    Raises BenchError.
    """

    batches: tuple[int, ...] = (1, 4, 8)
    prompt_tokens: int = 128
    generated_tokens: int = 64
    repeats: int = 5

    def __post_init__(self) -> None:
        if not self.batches:
            raise BenchError("batch: found none; allowed: one number or more")
        for batch in self.batches:
            require("batch", batch, 1)
        require("prompt tokens", self.prompt_tokens, 1)
        require("generated tokens", self.generated_tokens, 2)  # a decode step is what the second one adds
        require("repeats", self.repeats, 1)

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def mean_context(self) -> int:
        """Tokens in the cache at a decode step, its own included: the mean over the steps of an answer."""
        return self.prompt_tokens + self.generated_tokens // 2


def parse_batches(text: str) -> tuple[int, ...]:
    """`1,4,8` as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BenchError(f"batch: found {text!r}; allowed: whole numbers with commas, such as 1,4,8") from None


def random_prompts(batch: int, n_tokens: int, vocab_size: int) -> list[list[int]]:
    """Token ids, the same at every call, and different in each sequence: [batch][n_tokens]."""
    return np.random.default_rng(0).integers(vocab_size, size=(batch, n_tokens)).tolist()


def text_prompts(tokenizer: Tokenizer, batch: int, n_tokens: int) -> list[str]:
    """Numbers written out, a different place to start in each text; each is `n_tokens` long, or little less."""
    texts = []
    for start in range(batch):
        text = " ".join(str(number) for number in range(start, start + n_tokens))
        ids = tokenizer.encode(text)[:n_tokens]
        while len(tokenizer.encode(text := tokenizer.decode(ids))) > n_tokens:  # a cut word may take more tokens
            ids.pop()
        texts.append(text)
    return texts


@dataclass
class Samples:
    """Milliseconds of every run, wall clock. Notebook 13, section 3.

    first_token_ms: until all sequences have one token.   total_ms: until they have all their tokens.
    host_loop_ms: a loop of Python that is always the same, before each: how fast the host was just then.
    """

    first_token_ms: list[float]
    total_ms: list[float]
    host_loop_ms: list[float] = field(default_factory=list)


def host_loop_ms(clock: Clock = time.perf_counter) -> float:
    """Milliseconds that 100,000 turns of an empty loop take."""
    start = clock()
    for _ in range(100_000):
        pass
    return (clock() - start) * 1e3


def take_samples(
    llm: Any, prompts: Sequence[Any], n_tokens: int, repeats: int, clock: Clock = time.perf_counter
) -> Samples:
    """Generate 1 token and then `n_tokens` for every prompt, `repeats` times in turns.

    The clock runs from prompts in the host's memory to token ids in the host's memory.
    """

    def milliseconds(count: int) -> float:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        start = clock()
        outputs = llm.generate(prompts, params)
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        elapsed = clock() - start
        if counts != {count}:
            raise BenchError(f"generated tokens: found answers of {sorted(counts)}; allowed: {count} each")
        return elapsed * 1e3

    samples = Samples([], [])
    for _ in range(repeats):
        samples.host_loop_ms.append(host_loop_ms(clock))
        samples.first_token_ms.append(milliseconds(1))
        samples.total_ms.append(milliseconds(n_tokens))
    return samples


def speeds(batch: int, prompt_tokens: int, generated_tokens: int, samples: Samples) -> Record:
    """The speeds that follow from the medians. Notebook 13, section 3.

    A decode step takes what the tokens after the first added, divided by their number; None where a run was too short
    for that to be above the noise.
    """
    first, total = statistics.median(samples.first_token_ms), statistics.median(samples.total_ms)
    step = (total - first) / (generated_tokens - 1) if total > first else None
    return {
        "batch": batch,
        "total_tok_s": batch * generated_tokens / total * 1e3,
        "tok_s_per_request": generated_tokens / total * 1e3,
        "decode_tok_s": batch / step * 1e3 if step else None,
        "decode_ms_per_step": step,
        "first_token_ms": first,
        "prefill_tok_s": batch * prompt_tokens / first * 1e3,
    }


def spread(samples: Record) -> float:
    """(largest - smallest) / median of the whole runs: what a repetition may differ by."""
    total = samples["total_ms"]
    return (max(total) - min(total)) / statistics.median(total)


def weight_bytes(model: Any, batch: int = 1) -> int:
    """Bytes of weights that a decode step reads: those of the layers, the last norm and the output matrix.

    An embedding table of its own does not count: a step looks up a few of its rows. The fast model reads packed tiles,
    or for many sequences its copies in half precision.
    """
    values = [(name, value) for layer in model.layers for name, value in vars(layer).items()] + [("", model.output)]
    if batch > WIDE and getattr(model, "can_be_wide", False):
        arrays = [value for name, value in values if name.endswith("_norm")] + [model.half_output]
        arrays += [array for layer in model.half_layers for array in vars(layer).values()]
    else:
        arrays = [getattr(value, "tiles", value) for _, value in values]
    distinct = {
        id(array): array for array in [*arrays, getattr(model, "output_norm", None)] if hasattr(array, "nbytes")
    }
    return sum(array.nbytes for array in distinct.values())


def bytes_per_step(model: Any, batch: int, context: int) -> int:
    """Bytes that a decode step of `batch` sequences must read: the weights once, and all keys and values.

    `context`: tokens of each sequence in the cache. What a model copies on top of that is its own affair.
    """
    has_halfs = isinstance(getattr(model, "cache", None), HalfKVCache)
    per_token = half_bytes_per_block(model.config) // PAGE if has_halfs else bytes_per_block(model.config, block_size=1)
    return weight_bytes(model, batch) + batch * context * per_token


def read_bandwidth(device: str, n_bytes: int = 1 << 30) -> float:
    """Bytes per second at which a device reads a large array: measured, the better of two ways.

    A product with a vector reads its matrix once; on a GPU a sum is tried as well. Memory: `n_bytes`.
    """
    shape = (n_bytes // 4 // 4096, 4096)
    if device.startswith("cuda"):
        rt = Runtime(device)
        matrix, vector = rt.zeros(shape), rt.zeros(shape[1])
        seconds = min(rt.milliseconds(lambda: matrix @ vector), rt.milliseconds(lambda: matrix.sum())) / 1e3
    else:
        matrix, vector = np.ones(shape, np.float32), np.ones(shape[1], np.float32)
        seconds = min(seconds_of(lambda: matrix @ vector) for _ in range(7))
    return matrix.nbytes / seconds


def seconds_of(call: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memory_in_use(device: str) -> int | None:
    """Bytes: on a GPU all that the card has given out, else this process's own memory, files it maps left out.

    None where the system does not tell (it is read from /proc).
    """
    if device.startswith("cuda"):
        free, total = gpu_memory(device)
        return total - free
    with suppress(OSError):
        if match := re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(match[1]) * 1024
    return None


def release_memory(device: str) -> None:
    """Give back what nobody holds any more; CuPy keeps it for later otherwise."""
    gc.unfreeze()  # a model that holds itself, through its programs, would stay for ever
    gc.collect()
    if device.startswith("cuda"):
        cupy = import_module("cupy")
        with cupy.cuda.Device(device_index(device)):
            cupy.get_default_memory_pool().free_all_blocks()


class PeakMemory:
    """The most memory in use inside a `with` block, less `base`, in `bytes`. Notebook 13, section 5.

    A thread looks every few milliseconds, which costs time: measure one or the other.
    """

    def __init__(self, device: str, base: int = 0) -> None:
        self.device, self.base, self.bytes = device, base, None if memory_in_use(device) is None else 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(0.003):
            self._look()

    def _look(self) -> None:
        if self.bytes is not None:
            self.bytes = max(self.bytes, (memory_in_use(self.device) or 0) - self.base)


@dataclass(frozen=True)
class Subject:
    """The model that is measured: its file, and what a record says about it."""

    path: Path
    name: str
    type: str
    sha256: str
    variant: str | None = None
    exact: bool = False

    def check_context(self, wanted: int) -> None:
        """BenchError if the model's context is shorter than prompt and answer."""
        limit = LlamaConfig.from_metadata(GGUFFile(self.path).metadata).max_position_embeddings
        if wanted > limit:
            raise BenchError(f"prompt and generated tokens: found {wanted} together; allowed: {limit}, the context")

    def variant_on(self, device: str) -> str:
        """The variant that an LLM on this device runs; ParameterError as from LLM."""
        return choose_variant(self.variant, device, GGUFFile(self.path), PAGE)[0]


def subject_of(path: Path, random_name: str | None = None, variant: str | None = None, exact: bool = False) -> Subject:
    """Describe a model file. `random_name`: what to call a file of random weights, whose hash says nothing.

    variant, exact: which model runs it, as for LLM.
    """
    file = GGUFFile(path)
    sizes: dict[str, int] = {}
    for info in file.tensors.values():
        sizes[info.type_name] = sizes.get(info.type_name, 0) + info.nbytes
    main = max(sizes, key=lambda name: sizes[name])
    if random_name:
        return Subject(path, random_name, main, "random", variant, exact)
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Subject(path, path.stem.removesuffix(f".{main}"), main, digest, variant, exact)


def about(subject: Subject, device: str) -> Record:
    """What a record begins with: who was measured, on what, when, with what."""
    variant = subject.variant_on(device)
    type_ = subject.type if variant in PACKED or subject.type == "F32" else f"{subject.type} as float32"
    return {
        "engine": "rvllm",
        "device": device,
        "card": describe_device(device),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": versions(device),
        "model": {"name": subject.name, "type": type_, "sha256": subject.sha256},
        "variant": variant,
        "exact": subject.exact,
    }


def versions(device: str) -> dict[str, str]:
    """Of Python and of the packages that the speed depends on; CUDA's as 13000 for 13.0."""
    found = {"python": platform.python_version()}
    for name in ("rvllm", "numpy", "gguf", "tokenizers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if device.startswith("cuda"):
        cupy = import_module("cupy")
        runtime = cupy.cuda.runtime
        found |= {"cupy": cupy.__version__, "cuda": str(runtime.runtimeGetVersion())}
        found["driver_cuda"] = str(runtime.driverGetVersion())
    return found


def commit() -> str | None:
    """The checkout's commit, with `-dirty` behind it where files differ from it; None outside a checkout."""
    package = Path(inspect.getfile(RvllmError))
    git = ["git", "-C", str(package.parent)]
    tracked = [*git, "ls-files", "--error-unmatch", package.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(tracked, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, check=True, text=True).stdout.strip()
    return None


def measure_batch(llm: LLM, workload: Workload, batch: int, as_text: bool, bandwidth: float, base: int) -> Record:
    """One row of the record: a warm-up, which shows the memory, then the runs that count."""
    length, count = workload.prompt_tokens, workload.generated_tokens
    ids = random_prompts(batch, length, llm.config.vocab_size)
    prompts = text_prompts(llm.tokenizer, batch, length) if as_text else ids
    with PeakMemory(llm.device, base) as memory:
        take_samples(llm, prompts, count, repeats=1)
    before = replace(llm.engine.metrics)
    samples = take_samples(llm, prompts, count, workload.repeats)
    row = speeds(batch, length, count, samples)
    moved, step_ms = bytes_per_step(llm.engine.model, batch, workload.mean_context), row["decode_ms_per_step"]
    row |= {
        "peak_memory_bytes": memory.bytes,
        "bytes_per_step": moved,
        "bandwidth_share": moved / step_ms * 1e3 / bandwidth if step_ms else None,
        "host_ms_per_step": per_step_ms(before, llm.engine.metrics),
        "samples": asdict(samples),
    }
    return row | ({"text": True} if as_text else {})


def per_step_ms(before: EngineMetrics, after: EngineMetrics) -> float:
    """Milliseconds of host work for each step between two readings of an engine's metrics."""
    return (after.host_seconds - before.host_seconds) / (after.num_steps - before.num_steps) * 1e3


def open_llm(
    subject: Subject,
    device: str,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int | None = None,
    max_num_batched_tokens: int = 16_384,
) -> LLM:
    """The LLM of every benchmark, made here alone. Nothing may be remembered from one repeat to the next.

    What it has loaded is frozen: Python's collector would walk over the whole vocabulary in the middle of a step.
    """
    llm = LLM(
        subject.path,
        device,
        subject.variant,
        subject.exact,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    gc.collect()
    gc.freeze()
    return llm


def sweep(
    subject: Subject, device: str = "auto", workload: Workload | None = None, progress: Progress = lambda _text: None
) -> Record:
    """Measure every batch size; the last row has the largest batch once more, with texts. Notebook 13, section 6.

    Each batch size gets an LLM of its own, so that its memory is what serving that many needs.
    Raises BenchError, DeviceError, or what the model file gives cause for, before anything is measured.
    """
    workload, device = workload or Workload(), resolve_device(device)
    subject.check_context(workload.max_model_len)
    subject.variant_on(device)
    progress(f"measuring how fast {describe_device(device)} reads memory")
    bandwidth = read_bandwidth(device)
    release_memory(device)
    base = memory_in_use(device)
    cases = [*((batch, False) for batch in workload.batches), (max(workload.batches), True)]
    rows = []
    for batch, as_text in cases:
        # Room for just these, and all prompts in one step: then two runs differ by decode steps alone.
        num_blocks = batch * blocks_needed(workload.max_model_len, 16)
        budget = batch * workload.prompt_tokens
        with open_llm(subject, device, workload.max_model_len, batch, num_blocks, budget) as llm:
            rows.append(measure_batch(llm, workload, batch, as_text, bandwidth, base or 0))
        del llm
        release_memory(device)
        progress(f"batch {batch}{' (text)' if as_text else ''}: {rows[-1]['total_tok_s']:,.1f} tokens/s")
    lengths = {"prompt_tokens": workload.prompt_tokens, "generated_tokens": workload.generated_tokens}
    return about(subject, device) | lengths | {"rows": rows}


COLUMNS: tuple[tuple[str, str, Callable[[Record], Any], str], ...] = (
    ("", "batch", lambda row: f"{row['batch']}{' text' if row.get('text') else ''}", ""),
    ("total", "tok/s", lambda row: row["total_tok_s"], ",.1f"),
    ("each", "tok/s", lambda row: row["tok_s_per_request"], ",.1f"),
    ("spread", "%", lambda row: spread(row["samples"]) * 100, ".1f"),
    ("decode", "tok/s", lambda row: row["decode_tok_s"], ",.1f"),
    ("step", "ms", lambda row: row["decode_ms_per_step"], ",.2f"),
    ("first", "ms", lambda row: row["first_token_ms"], ",.1f"),
    ("prefill", "tok/s", lambda row: row["prefill_tok_s"], ",.0f"),
    ("peak", "MB", lambda row: per_million(row["peak_memory_bytes"]), ",.0f"),
    ("reads", "MB", lambda row: per_million(row["bytes_per_step"]), ",.0f"),
    ("of peak", "%", lambda row: per_million(row["bandwidth_share"], 0.01), ".1f"),
    ("host", "ms", lambda row: row["host_ms_per_step"], ".2f"),
)


def per_million(value: float | None, unit: float = 1e6) -> float | None:
    """The value in units of `unit`; None stays None."""
    return None if value is None else value / unit


def heading(record: Record) -> str:
    """One line: the model, the card, the day."""
    model = record["model"]
    weights = "random weights" if model["sha256"] == "random" else "its own weights"
    variant = f"{record['variant']}{', exact' if record.get('exact') else ''}"
    return f"{model['name']}, {model['type']}, {weights}; {record['card']}; {variant}; {record['date']}"


def sweep_table(record: Record) -> str:
    """A sweep as lines of text, numbers under two lines of headings."""
    cells = [[top for top, _, _, _ in COLUMNS], [unit for _, unit, _, _ in COLUMNS]]
    for row in record["rows"]:
        values = [(value(row), form) for _, _, value, form in COLUMNS]
        cells.append(["-" if value is None else format(value, form) for value, form in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    what = f"prompts of {record['prompt_tokens']} tokens, {record['generated_tokens']} generated"
    return "\n".join([f"{heading(record)}; {what}", *(line.rstrip() for line in lines)])


def traffic_table(record: Record) -> str:
    """A run with arriving requests as lines of text."""
    repeats = record.get("repeats", 1)  # older records have one run
    lines = [
        heading(record),
        f"{record['requests']} requests at {record['rate']} per second, seed {record['seed']}: "
        f"{record['total_prompt_tokens']:,} tokens of prompts, {record['total_output_tokens']:,} of answers, "
        f"{record['seconds']:,.2f} s" + (f", the median of {repeats} runs" if repeats > 1 else ""),
        f"output                 {record['output_tok_s']:,.1f} tok/s",
    ]
    for name, key in (("time to first token", "first_token_ms"), ("between two tokens", "inter_token_ms")):
        times = [f"{p} {'-' if ms is None else format(ms, ',.1f')} ms" for p, ms in record[key].items()]
        lines.append(f"{name:22} {', '.join(times)}")
    return "\n".join(lines)


def check_writable(path: Path) -> None:
    """BenchError if a file can't be written, found out before there are results to lose."""
    path = path.resolve()  # a link may point to what does not exist yet
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            os.remove(path)
    except OSError as error:
        raise BenchError(f"{path}: can't be written ({error.strerror})") from error


def write_record(record: Record, path: Path) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Traffic:
    """Requests of random length that arrive one by one. Notebook 13, section 9.

    rate: arrivals per second, as a Poisson process; infinity: all at once.   seed: of lengths, ids and times.
    prompt_lengths, output_lengths: (shortest, longest), both included; the defaults are nano-vllm's.
    repeats: runs that count, after one that warms up.   Raises BenchError.
    """

    requests: int
    rate: float = math.inf
    seed: int = 0
    repeats: int = 1
    prompt_lengths: tuple[int, int] = (100, 1024)
    output_lengths: tuple[int, int] = (100, 1024)

    def __post_init__(self) -> None:
        require("requests", self.requests, 1)
        require("repeats", self.repeats, 1)
        if not self.rate >= 1e-6:
            raise BenchError(f"rate: found {self.rate}; allowed: 0.000001 requests per second or more, or inf")
        for name, (shortest, longest) in (("prompt", self.prompt_lengths), ("output", self.output_lengths)):
            require(f"{name} lengths", shortest, 1)
            require(f"{name} lengths, the longest", longest, shortest)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and the longest answer."""
        return self.prompt_lengths[1] + self.output_lengths[1]


def parse_rate(text: str) -> float:
    """Requests per second, or `inf`."""
    try:
        return float(text)
    except ValueError:
        raise BenchError(f"rate: found {text!r}; allowed: requests per second, or inf") from None


def parse_lengths(text: str) -> tuple[int, int]:
    """`100..1024` as numbers; a single number is both ends."""
    match = re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", text)
    if match is None:
        raise BenchError(f"lengths: found {text!r}; allowed: SHORTEST..LONGEST, such as 100..1024")
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True)
class Arrival:
    """A request to come: seconds after the start, what it says, and how long an answer it wants."""

    at: float
    prompt_token_ids: list[int]
    output_tokens: int


def make_arrivals(traffic: Traffic, vocab_size: int) -> list[Arrival]:
    """The requests in order of their arrival; the same seed gives the same ones.

    Lengths and ids are drawn as nano-vllm's benchmark draws them, so that totals can be compared with its own.
    """
    rng = random.Random(traffic.seed)
    largest = min(vocab_size - 1, 10_000)
    prompts = [
        [rng.randint(0, largest) for _ in range(rng.randint(*traffic.prompt_lengths))] for _ in range(traffic.requests)
    ]
    lengths = [rng.randint(*traffic.output_lengths) for _ in prompts]
    at, arrivals = 0.0, []
    for prompt, length in zip(prompts, lengths, strict=True):
        at += 0.0 if math.isinf(traffic.rate) else rng.expovariate(traffic.rate)
        arrivals.append(Arrival(at, prompt, length))
    return arrivals


@dataclass
class Served:
    """A request that was sent to an engine: how late it came in (a step was running), and the engine's request."""

    late: float
    request: Any

    @property
    def first_token_seconds(self) -> float:
        """From the moment it arrived, waiting for the step to end included."""
        return float(self.late + self.request.metrics.time_to_first_token)


def serve(
    engine: Any,
    arrivals: Iterable[Arrival],
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Served], float]:
    """Feed requests to an engine as they arrive and run it until all are answered. Notebook 13, section 9.

    Returns the requests, and the seconds from the start to the last token.
    """
    waiting, served, start = deque(arrivals), [], clock()
    while waiting or engine.has_unfinished_requests:
        now = clock() - start
        while waiting and waiting[0].at <= now:
            arrival = waiting.popleft()
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            late = clock() - start - arrival.at
            served.append(Served(late, engine.add_request(arrival.prompt_token_ids, params)))
        if engine.has_unfinished_requests:
            engine.step()
        elif waiting:
            sleep(max(0.0, waiting[0].at - (clock() - start)))
    return served, clock() - start


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Milliseconds that 50, 90 and 99 of a hundred stay below; None where there is nothing to count."""
    return {f"p{q}": float(np.percentile(seconds, q)) * 1e3 if len(seconds) else None for q in (50, 90, 99)}


def summary(served: Sequence[Served], seconds: float) -> Record:
    """Output tokens per second, and percentiles of the times to the first token and between tokens."""
    metrics = [s.request.metrics for s in served]
    tokens = sum(m.num_generated_tokens for m in metrics)
    first = [s.first_token_seconds for s in served]
    return {
        "total_prompt_tokens": sum(m.num_prompt_tokens for m in metrics),
        "total_output_tokens": tokens,
        "seconds": seconds,
        "output_tok_s": tokens / seconds,
        "first_token_ms": percentiles(first),
        "inter_token_ms": percentiles([t for m in metrics for t in m.inter_token_times]),
        "samples": {"first_token_ms": [t * 1e3 for t in first]},
    }


def serve_traffic(
    subject: Subject, traffic: Traffic, device: str = "auto", progress: Progress = lambda _text: None
) -> Record:
    """Measure an engine under arriving requests: the median run, after a warm-up by the same ones, all at once.

    Raises as `sweep` does.
    """
    device = resolve_device(device)
    subject.check_context(traffic.max_model_len)
    release_memory(device)
    with open_llm(subject, device, traffic.max_model_len, min(traffic.requests, 256)) as llm:
        arrivals = make_arrivals(traffic, llm.config.vocab_size)
        progress("warming up")
        serve(llm.engine, [replace(arrival, at=0.0) for arrival in arrivals])
        runs = []
        for number in range(traffic.repeats):
            progress(f"serving {traffic.requests} requests, run {number + 1} of {traffic.repeats}")
            runs.append(serve(llm.engine, arrivals))
    served, seconds = sorted(runs, key=lambda run: run[1])[len(runs) // 2]
    asked = asdict(traffic) | {"rate": "inf" if math.isinf(traffic.rate) else traffic.rate}  # JSON has no infinity
    record = about(subject, device) | asked | summary(served, seconds)
    record["samples"]["seconds"] = [seconds for _, seconds in runs]
    return record
