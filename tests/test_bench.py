"""`rvllm bench`: figures from known samples, arrivals, the engine's loop on a toy engine, records, errors."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rvllm import bench, cli, random_weights, variants
from rvllm.bench import BenchError, Samples, Traffic, Workload
from rvllm.cpu_model import CpuModel
from rvllm.engine import EngineMetrics
from rvllm.errors import RvllmError
from rvllm.gguf import GGUFFile
from rvllm.llm import LLM
from rvllm.sampling import ParameterError
from tests import toy
from tests.fast_toy import DEFAULT, FastShape, write_fast_toy

RECORD_KEYS = {"engine", "device", "card", "date", "commit", "versions", "model", "variant", "exact"}
RECORD_KEYS |= {"prompt_tokens", "generated_tokens", "rows"}
ROW_KEYS = {"batch", "total_tok_s", "tok_s_per_request", "decode_tok_s", "decode_ms_per_step", "first_token_ms"}
ROW_KEYS |= {"prefill_tok_s", "peak_memory_bytes", "bytes_per_step", "bandwidth_share", "host_ms_per_step", "samples"}


@pytest.fixture(scope="module")
def toy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("bench") / "toy.gguf")


@pytest.fixture(scope="module")
def fast_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Q8_0 file that all variants cover. Its rows fill all tiles: on the device it has the bytes of the file."""
    return write_fast_toy(tmp_path_factory.mktemp("bench") / "fast.gguf")


@pytest.fixture
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e10)


class FakeClock:
    """Time that passes only where somebody lets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeLLM:
    """Answers in a known time: `first` seconds for the first token, `step` for each further one."""

    def __init__(self, clock: FakeClock, first: list[float], step: float, short: bool = False) -> None:
        self.clock, self.first, self.step, self.short = clock, first, step, short

    def generate(self, prompts: list[Any], params: Any) -> list[Any]:
        assert params.ignore_eos
        self.clock.now += self.first[0] + self.step * (params.max_tokens - 1)
        if params.max_tokens > 1:
            self.first = self.first[1:] or self.first
        ids = [0] * (params.max_tokens - self.short)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for _ in prompts]


# Speeds


def test_samples_are_first_token_and_whole_run_in_turns() -> None:
    clock = FakeClock()
    samples = bench.take_samples(FakeLLM(clock, [0.03, 0.05, 0.04], 0.01), [[1], [2]], 11, 3, clock)
    assert samples.first_token_ms == pytest.approx([30, 50, 40])
    assert samples.total_ms == pytest.approx([130, 150, 140])


def test_speeds_follow_from_medians() -> None:
    samples = Samples(first_token_ms=[30.0, 28.0, 90.0], total_ms=[660.0, 700.0, 640.0])
    row = bench.speeds(4, 128, 64, samples)
    assert row["decode_ms_per_step"] == pytest.approx((660 - 30) / 63)
    assert row["decode_tok_s"] == pytest.approx(400)
    assert row["total_tok_s"] == pytest.approx(4 * 64 / 0.66)
    assert row["tok_s_per_request"] == pytest.approx(64 / 0.66)
    assert row["prefill_tok_s"] == pytest.approx(4 * 128 / 0.03)
    assert bench.spread({"total_ms": samples.total_ms}) == pytest.approx(60 / 660)


def test_a_run_below_the_noise_has_no_decode_speed() -> None:
    row = bench.speeds(1, 8, 2, Samples([5.0], [4.0]))
    assert row["decode_ms_per_step"] is None and row["decode_tok_s"] is None


def test_answers_that_end_early_are_an_error() -> None:
    clock = FakeClock()
    with pytest.raises(BenchError, match="generated tokens: found answers of"):
        bench.take_samples(FakeLLM(clock, [0.1], 0.1, short=True), [[1]], 4, 1, clock)


def test_prompts_are_the_same_every_time_and_differ_among_each_other() -> None:
    first = bench.random_prompts(3, 20, 300)
    assert first == bench.random_prompts(3, 20, 300)
    assert len({tuple(p) for p in first}) == 3 and {len(p) for p in first} == {20}


def test_text_prompts_are_not_longer_than_asked(toy_path: Path) -> None:
    tokenizer = LLM(toy_path, device="cpu").tokenizer
    texts = bench.text_prompts(tokenizer, 3, 25)
    assert len(set(texts)) == 3
    assert all(20 <= len(tokenizer.encode(text)) <= 25 for text in texts)


# Bytes and memory


def test_weight_bytes_are_those_of_the_file_as_float32(toy_path: Path) -> None:
    file = GGUFFile(toy_path)
    model = CpuModel(file)
    assert bench.weight_bytes(model) == 4 * sum(math.prod(t.shape) for t in file.tensors.values())
    kv = 2 * toy.LAYERS * toy.K * toy.HEAD * 4
    assert bench.bytes_per_step(model, batch=3, context=10) == bench.weight_bytes(model) + 30 * kv


def test_a_tied_matrix_counts_once_and_a_table_of_its_own_not_at_all() -> None:
    matrix, table, norm = np.zeros((10, 4), np.float32), np.zeros((10, 4), np.float32), np.zeros(4, np.float32)
    layer = SimpleNamespace(weight=np.zeros((4, 4), np.float32), name="no array")
    tied = SimpleNamespace(layers=[layer, layer], token_embd=matrix, output=matrix, output_norm=norm)
    untied = SimpleNamespace(layers=[layer], token_embd=table, output=matrix, output_norm=norm)
    assert bench.weight_bytes(tied) == bench.weight_bytes(untied) == 160 + 64 + 16


def open_variant(path: Path, variant: str, exact: bool = False) -> LLM:
    sizes = {"num_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    return LLM(path, device="emulator", variant=variant, exact=exact, max_model_len=32, **sizes)


@pytest.mark.parametrize("batch", [1, 64, 65, 256])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("variant", variants.NAMES)
def test_weight_bytes_of_a_variant(fast_path: Path, variant: str, exact: bool, batch: int) -> None:
    """Packed as in the file, or float32, or in wide steps of the fast model halfs. Norms are float32 in all of them."""
    tensors = GGUFFile(fast_path).tensors.values()
    matrices, vectors = ([t for t in tensors if (len(t.shape) == 2) == is_matrix] for is_matrix in (True, False))
    elements, norms = sum(math.prod(t.shape) for t in matrices), sum(t.nbytes for t in vectors)
    packed = sum(t.nbytes for t in matrices) if variant in variants.PACKED else 4 * elements
    is_wide = variant == "graph" and not exact and batch > 64
    with open_variant(fast_path, variant, exact) as llm:
        assert bench.weight_bytes(llm.engine.model, batch) == (2 * elements if is_wide else packed) + norms


def test_a_table_of_its_own_does_not_count_on_the_fast_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untied output matrix, here as large as the table: the same bytes as with one for both."""
    tied = write_fast_toy(tmp_path / "tied.gguf", FastShape(layers=1, H=1, F=32))
    real = toy.write
    copy = {"output.weight": "token_embd.weight"}

    def untied(path: Path, meta: Any, tensors: Any, types: Any) -> Path:
        return real(
            path, meta, *(values | {new: values[old] for new, old in copy.items()} for values in (tensors, types))
        )

    monkeypatch.setattr(toy, "write", untied)
    other = write_fast_toy(tmp_path / "untied.gguf", FastShape(layers=1, H=1, F=32))
    for variant in ("quantised", "graph"):
        with open_variant(tied, variant) as one, open_variant(other, variant) as two:
            for batch in (1, 65):
                sizes = [bench.weight_bytes(llm.engine.model, batch) for llm in (one, two)]
                assert sizes[0] == sizes[1]


@pytest.mark.parametrize("variant", variants.NAMES)
def test_keys_and_values_of_a_variant(fast_path: Path, variant: str) -> None:
    size = 2 if variant in variants.HALF_CACHE else 4
    with open_variant(fast_path, variant) as llm:
        model = llm.engine.model
        moved = bench.bytes_per_step(model, 3, 10) - bench.weight_bytes(model, 3)
        assert moved == 30 * 2 * DEFAULT.layers * DEFAULT.K * DEFAULT.d * size


def test_read_bandwidth_is_measured() -> None:
    assert 1e8 < bench.read_bandwidth("cpu", 1 << 24) < 1e13


@pytest.mark.skipif(bench.memory_in_use("cpu") is None, reason="no /proc")
def test_peak_memory_sees_what_was_given_back() -> None:
    before = bench.memory_in_use("cpu") or 0
    with bench.PeakMemory("cpu") as peak:
        array = np.ones(25_000_000, np.float32)
        for _ in range(20):
            array += 1
        del array
    assert peak.bytes is not None and peak.bytes - before > 80e6


def test_peak_memory_of_a_gpu_is_less_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1000, 1500, 4000])
    monkeypatch.setattr(bench, "memory_in_use", lambda device: next(readings, 3000))
    with bench.PeakMemory("cuda", base=1000) as peak:
        while next(readings, None) is not None:
            pass
    assert peak.bytes in (2000, 3000)


def test_host_time_per_step() -> None:
    def metrics(steps: int, seconds: float) -> EngineMetrics:
        times = {"schedule_seconds": seconds, "sample_seconds": seconds, "output_seconds": 2 * seconds}
        return EngineMetrics(num_steps=steps, forward_seconds=5 * steps, **times)

    assert bench.per_step_ms(metrics(10, 1.0), metrics(30, 1.01)) == pytest.approx(2.0)


# The record


@pytest.fixture(scope="module")
def record(toy_path: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "read_bandwidth", lambda device: 1e10)
        # Times of a toy may come out in the wrong order on a busy machine: the runs are real, their times are not.
        real = bench.take_samples

        def steady(*arguments: Any, **options: Any) -> Samples:
            repeats = len(real(*arguments, **options).total_ms)
            return Samples([5.0] * repeats, [15.0] * repeats, [1.0] * repeats)

        patch.setattr(bench, "take_samples", steady)
        workload = Workload(batches=(1, 3), prompt_tokens=8, generated_tokens=6, repeats=2)
        return bench.sweep(bench.subject_of(toy_path), "cpu", workload)


def test_a_record_has_the_agreed_keys(record: dict[str, Any], toy_path: Path) -> None:
    assert set(record) == RECORD_KEYS
    assert [set(row) for row in record["rows"]] == [ROW_KEYS, ROW_KEYS, ROW_KEYS | {"text"}]
    assert [row["batch"] for row in record["rows"]] == [1, 3, 3]
    assert record["engine"] == "rvllm" and record["variant"] == "numpy" and record["card"].startswith("cpu (")
    assert record["model"]["type"] == "F32" and len(record["model"]["sha256"]) == 64
    assert (record["prompt_tokens"], record["generated_tokens"]) == (8, 6)
    assert all(len(row["samples"][key]) == 2 for row in record["rows"] for key in ("first_token_ms", "total_ms"))
    assert record["commit"] is None or len(record["commit"].removesuffix("-dirty")) == 40


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("known_bandwidth", "unfrozen")
@pytest.mark.parametrize(
    ("variant", "exact", "type_"),
    [
        ("f32", False, "Q8_0 as float32"),
        ("workspace", True, "Q8_0 as float32"),
        ("quantised", False, "Q8_0"),
        ("graph", True, "Q8_0"),
    ],
)
def test_a_record_names_variant_exactness_and_type(fast_path: Path, variant: str, exact: bool, type_: str) -> None:
    subject = bench.subject_of(fast_path, None, variant, exact)
    found = bench.sweep(subject, "emulator", Workload((2,), prompt_tokens=4, generated_tokens=2, repeats=1))
    assert (found["variant"], found["exact"], found["model"]["type"]) == (variant, exact, type_)
    assert set(found) == RECORD_KEYS
    assert f"; {variant}{', exact' if exact else ''}; " in bench.sweep_table(found).splitlines()[0]
    traffic = Traffic(2, prompt_lengths=(3, 5), output_lengths=(2, 3), repeats=3)
    served = bench.serve_traffic(subject, traffic, "emulator")
    assert (served["variant"], served["exact"], served["model"]["type"]) == (variant, exact, type_)
    assert served["seconds"] == sorted(served["samples"]["seconds"])[1], "the median run"
    assert "the median of 3 runs" in bench.traffic_table(served)
    json.dumps([found, served], allow_nan=False)


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("variant", variants.NAMES)
def test_the_llm_is_the_one_that_the_record_names(fast_path: Path, variant: str) -> None:
    subject = bench.subject_of(fast_path, None, variant, True)
    with bench.open_llm(subject, "emulator", 32, 2, 4, 8) as llm:
        assert llm.variant == subject.variant_on("emulator") == variant
        assert getattr(llm.engine.model, "exact", True)


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("variant", variants.NAMES)
def test_nothing_stays_of_a_batch_for_the_next(fast_path: Path, variant: str) -> None:
    """Models may hold themselves, through their programs; and what was frozen is not looked at."""
    with bench.open_llm(bench.subject_of(fast_path, "toy", variant), "emulator", 32, 2, 4, 40) as llm:
        llm.generate([[5] * 4, [6] * 4])
        model = weakref.ref(llm.engine.model)
    del llm
    bench.release_memory("emulator")
    assert model() is None


def test_a_variant_that_can_not_be_is_told_before_anything_is_measured(
    toy_path: Path, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read_bandwidth", "open_llm"):
        monkeypatch.setattr(bench, name, lambda *_: pytest.fail("too late"))
    for path, device, variant in (
        (toy_path, "emulator", "graph"),
        (fast_path, "cpu", "graph"),
        (fast_path, "emulator", "x"),
    ):
        with pytest.raises(ParameterError, match="variant: found"):
            bench.sweep(bench.subject_of(path, "toy", variant), device, Workload(prompt_tokens=4, generated_tokens=2))


def test_share_is_bytes_over_time_over_bandwidth(record: dict[str, Any], toy_path: Path) -> None:
    model = CpuModel(GGUFFile(toy_path))
    for row in record["rows"][:2]:
        assert row["bytes_per_step"] == bench.bytes_per_step(model, row["batch"], 8 + 3)
        share = row["bytes_per_step"] / (row["decode_ms_per_step"] / 1e3) / 1e10
        assert row["bandwidth_share"] == pytest.approx(share)


def test_the_table_has_a_line_for_each_row(record: dict[str, Any]) -> None:
    lines = bench.sweep_table(record).splitlines()
    assert "prompts of 8 tokens, 6 generated" in lines[0]
    assert len(lines) == 1 + 2 + 3
    assert lines[3].split()[0] == "1" and lines[5].split()[:2] == ["3", "text"]
    assert float(lines[3].split()[-1]) >= 0


def test_a_record_survives_json(record: dict[str, Any], tmp_path: Path) -> None:
    bench.write_record(record, tmp_path / "record.json")
    assert json.loads((tmp_path / "record.json").read_text()) == record


# Arriving requests


def test_arrivals_are_seeded_and_poisson() -> None:
    traffic = Traffic(2000, rate=50.0, seed=3, prompt_lengths=(2, 9), output_lengths=(1, 4))
    arrivals = bench.make_arrivals(traffic, vocab_size=300)
    assert arrivals == bench.make_arrivals(traffic, vocab_size=300)
    other = Traffic(2000, rate=50.0, seed=4, prompt_lengths=(2, 9), output_lengths=(1, 4))
    assert arrivals != bench.make_arrivals(other, 300)
    gaps = np.diff([0.0, *(a.at for a in arrivals)])
    assert (
        gaps.min() > 0
        and gaps.mean() == pytest.approx(1 / 50, rel=0.1)
        and gaps.std() == pytest.approx(1 / 50, rel=0.1)
    )
    assert {len(a.prompt_token_ids) for a in arrivals} == set(range(2, 10))
    assert {a.output_tokens for a in arrivals} == set(range(1, 5))
    assert max(max(a.prompt_token_ids) for a in arrivals) == 299


def test_256_requests_are_those_of_nano_vllm() -> None:
    """The totals that rvllm/recorded/h200_vllm_requests.json names."""
    arrivals = bench.make_arrivals(Traffic(256), vocab_size=49_152)
    assert sum(len(a.prompt_token_ids) for a in arrivals) == 142_827
    assert sum(a.output_tokens for a in arrivals) == 133_966
    assert {a.at for a in arrivals} == {0.0}


@dataclass
class FakeRequest:
    wanted: int
    started: float
    metrics: Any = field(default_factory=lambda: None)

    def __post_init__(self) -> None:
        self.metrics = SimpleNamespace(
            num_prompt_tokens=5, num_generated_tokens=0, time_to_first_token=None, inter_token_times=[]
        )
        self.last = self.started


class FakeEngine:
    """Every step takes a tenth of a second and gives each running request a token."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.running = clock, []

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def add_request(self, prompt_token_ids: list[int], params: Any) -> FakeRequest:
        assert params.ignore_eos
        self.running.append(FakeRequest(params.max_tokens, self.clock()))
        return self.running[-1]

    def step(self) -> list[FakeRequest]:
        self.clock.now += 0.1
        for request in self.running:
            m = request.metrics
            if m.time_to_first_token is None:
                m.time_to_first_token = self.clock() - request.started
            else:
                m.inter_token_times.append(self.clock() - request.last)
            m.num_generated_tokens, request.last = m.num_generated_tokens + 1, self.clock()
        done = [r for r in self.running if r.metrics.num_generated_tokens == r.wanted]
        self.running = [r for r in self.running if r not in done]
        return done


def test_requests_are_served_as_they_arrive() -> None:
    clock = FakeClock()
    arrivals = [bench.Arrival(0.0, [1], 3), bench.Arrival(0.05, [2], 2), bench.Arrival(2.0, [3], 1)]
    served, seconds = bench.serve(FakeEngine(clock), arrivals, clock, clock.sleep)
    # The second one waits 0.05 s for the running step to end; for the third one the engine sleeps.
    assert [s.first_token_seconds for s in served] == pytest.approx([0.1, 0.15, 0.1])
    assert seconds == pytest.approx(2.1)
    result = bench.summary(served, seconds)
    assert result["total_output_tokens"] == 6 and result["output_tok_s"] == pytest.approx(6 / 2.1)
    assert result["first_token_ms"] == pytest.approx({"p50": 100, "p90": 140, "p99": 149})
    assert result["inter_token_ms"] == pytest.approx({"p50": 100, "p90": 100, "p99": 100})


def test_one_token_each_has_no_time_between_tokens() -> None:
    clock = FakeClock()
    served, seconds = bench.serve(FakeEngine(clock), [bench.Arrival(0.0, [1], 1)], clock, clock.sleep)
    result = bench.summary(served, seconds)
    assert result["inter_token_ms"] == {"p50": None, "p90": None, "p99": None}
    base = {"model": {"name": "m", "type": "F32", "sha256": "random"}, "card": "c", "variant": "v", "date": "d"}
    text = bench.traffic_table(base | {"requests": 1, "rate": "inf", "seed": 0} | result)
    assert "p99 - ms" in text and "10.0 tok/s" in text


# What can't be measured is told before anything is

SHORT = ["--prompt-lengths", "3", "--output-lengths", "2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "batch: found 0; allowed: 1 or more"),
        (["--batch", "1,x"], "batch: found '1,x'"),
        (["--batch", ""], "batch: found ''"),
        (["--prompt-tokens", "0"], "prompt tokens: found 0"),
        (["--generated-tokens", "1"], "generated tokens: found 1; allowed: 2 or more"),
        (["--repeats", "0"], "repeats: found 0"),
        (["--repeats", "many"], "invalid int value"),
        (["--prompt-tokens", "250"], "found 314 together; allowed: 256, the context"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder/x.json: can't be written"),
        (["--json", "/"], "/: can't be written"),
        (["--device", "gpu"], "there is no device 'gpu'"),
        (["--variant", "fastest"], "argument --variant: invalid choice: 'fastest' (choose from f32, workspace,"),
        (["--variant", "graph", "--device", "cpu"], "variant: found 'graph'; allowed: None on the CPU"),
        (["--variant", "graph", "--device", "emulator"], "which does not cover this: heads of 16"),
        (["--requests", "1", "--variant", "graph", "--device", "cpu", *SHORT], "variant: found 'graph'; allowed: None"),
        (["--rate", "3"], "--rate goes only together with --requests"),
        (["--requests", "4", "--batch", "1"], "--batch does not go together with --requests"),
        (["--requests", "0"], "requests: found 0"),
        (["--requests", "4", "--rate", "0"], "rate: found 0.0"),
        (["--requests", "4", "--rate", "nan"], "rate: found nan"),
        (["--requests", "4", "--rate", "fast"], "rate: found 'fast'"),
        (["--requests", "4", "--prompt-lengths", "9..3"], "prompt lengths, the longest: found 3"),
        (["--requests", "4", "--prompt-lengths", "0..3"], "prompt lengths: found 0"),
        (["--requests", "4", "--output-lengths", "1-3"], "lengths: found '1-3'"),
        (["--requests", "4"], "found 2048 together; allowed: 256, the context"),
    ],
)
def test_what_is_wrong_is_told_in_words(
    toy_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--model", str(toy_path), *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and words in output.err, output.err


def test_unknown_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--random-weights", "7B"]) == 2
    assert "random weights: found '7B'; allowed: 360M, 135M, tiny" in capsys.readouterr().err
    assert cli.main(["bench", "--random-weights", "tiny", "--model", "x"]) == 2


def test_checking_leaves_no_file_and_no_change(tmp_path: Path) -> None:
    bench.check_writable(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").write_text("old")
    bench.check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


def test_the_command_prints_a_table_and_writes_the_record(
    toy_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e10)
    out = tmp_path / "record.json"
    options = ["--batch", "2", "--prompt-tokens", "5", "--generated-tokens", "3", "--repeats", "1", "--json", str(out)]
    assert cli.main(["bench", "--model", str(toy_path), "--device", "cpu", *options]) == 0
    output = capsys.readouterr()
    assert "tok/s" in output.out and "batch 2" not in output.out and "batch 2" in output.err
    assert json.loads(out.read_text())["rows"][0]["batch"] == 2


@pytest.mark.usefixtures("known_bandwidth", "unfrozen")
@pytest.mark.parametrize(
    "mode", [["--batch", "1", "--prompt-tokens", "5", "--generated-tokens", "2"], ["--requests", "2"]]
)
def test_the_command_takes_a_variant(
    fast_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: list[str]
) -> None:
    out = tmp_path / "record.json"
    options = ["--variant", "graph", "--exact", "--device", "emulator", "--json", str(out), *mode]
    options += SHORT if "--requests" in mode else ["--repeats", "1"]
    assert cli.main(["bench", "--model", str(fast_path), *options]) == 0
    assert "; graph, exact; " in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert (record["variant"], record["exact"], record["model"]["type"]) == ("graph", True, "Q8_0")


# Random weights


def test_random_weights_are_the_same_every_time(toy_path: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path in paths:
        random_weights.write(path, "tiny", random_weights.SHAPES["tiny"], GGUFFile(toy_path))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with LLM(paths[0], device="cpu") as llm:
        assert llm.config.hidden_size == 64 and llm.config.max_position_embeddings == 8192
        assert llm.generate([[1, 2, 3]])[0].outputs[0].token_ids
    assert bench.subject_of(paths[0], "tiny").type == "Q8_0"
    assert bench.subject_of(paths[0], "tiny").sha256 == "random"


def test_random_matrices_have_moderate_values() -> None:
    from gguf import GGMLQuantizationType

    from rvllm.quants import dequantize

    packed = random_weights.random_q8_0(np.random.default_rng(0), 64, 96)
    values = dequantize(packed, GGMLQuantizationType.Q8_0)
    assert values.shape == (64, 96)
    assert values.std() * np.sqrt(96) == pytest.approx(0.7, rel=0.05) and abs(values.mean()) < 0.01


@pytest.mark.real_model
def test_tiny_random_weights_run_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e10)
    options = ["--batch", "1,4", "--prompt-tokens", "8", "--generated-tokens", "4", "--repeats", "1"]
    assert cli.main(["bench", "--device", "cpu", "--random-weights", "tiny", *options]) == 0
    assert capsys.readouterr().out.startswith("tiny, Q8_0 as float32, random weights; cpu (")


def test_errors_are_rvllm_errors() -> None:
    assert issubclass(BenchError, RvllmError) and issubclass(random_weights.RandomWeightsError, RvllmError)
