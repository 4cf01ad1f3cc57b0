"""The command line: `rvllm generate`, `chat`, `info`, `doctor` and `bench`.

What was asked for goes to stdout and everything else to stderr, so that `rvllm generate ... > file` holds the
text alone. Exit codes: 0 done; 2 a problem with the input or the machine; 130 ended by Ctrl-C; 141 the reader
of the pipe went away; from `doctor`, 1 when even the CPU path does not work.

Modules that take long to load are imported by the subcommand that needs them: `rvllm --help` answers at once.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib
import io
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rvllm.errors import RvllmError

if TYPE_CHECKING:
    from rvllm import LLM, RequestOutput, SamplingParams
    from rvllm.bench import Subject, Traffic, Workload
    from rvllm.gguf import GGUFFile

# The byte-order marks that text on stdin may begin with; UTF-32's go first, since UTF-16's are their beginnings.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
EXIT_DOCTOR_FAILED = 1
EXIT_PROBLEM = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

MODEL_HELP = "a path, a known model (smollm2-135m, smollm2-360m), or owner/repo/file.gguf on the hub"
CHAT_HELP = "/exit or Ctrl-D ends, /clear forgets the conversation, Ctrl-C stops an answer"


class InputError(RvllmError):
    """The command line or stdin holds something that cannot be read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own) and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks is shown as `?`; it does not end the answer.
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _run(argv)
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        _say("")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except (RvllmError, OSError, MemoryError) as error:
        if os.environ.get("RVLLM_DEBUG"):
            traceback.print_exc()
        _say(f"rvllm: {_message(error)}")
        return EXIT_PROBLEM
    finally:
        _settle_stdout()


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:  # how argparse ends after --help, or after a mistake that it has told
        return int(end.code or 0)
    return int(arguments.run(arguments))


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"out of memory; a smaller --max-model-len or --batch or a smaller model needs less {error}".rstrip()
    return str(error)


def _say(text: str) -> None:
    if sys.stderr is not None:  # closed: `print` would take stdout instead
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _settle_stdout() -> None:
    """Where stdout takes no more (closed pipe, full disk), drop the rest: the flush at exit would complain about it."""
    try:
        print(end="", flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# The arguments.


class _ShowVersion(argparse.Action):
    """Looks the version up when it is asked for; argparse's own action wants the text beforehand."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            version = metadata.version("rvllm")
        except metadata.PackageNotFoundError:
            version = "(run from its source, not installed)"
        print(f"rvllm {version}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    summary = "Generate text with a language model from a GGUF file."
    parser = argparse.ArgumentParser(prog="rvllm", description=summary)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and end")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands.add_parser("generate", help="continue a text"))
    _add_chat(commands.add_parser("chat", help="talk with the model"))
    info = commands.add_parser("info", help="show what is in a model file")
    _add_info(info)
    doctor = commands.add_parser("doctor", help="show what works on this machine, and what mends the rest")
    doctor.set_defaults(run=_doctor)
    _add_bench(commands.add_parser("bench", help="measure speed and memory"))
    return parser


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_info)
    parser.description = "Show what is in a model file and, for a device, what the model takes there."
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add = parser.add_argument_group("memory on a device").add_argument
    add("--device", help="auto, cpu, cuda, cuda:N or emulator: print weights, workspace, cache and context")
    add(
        "--memory",
        type=_byte_count,
        metavar="SIZE",
        help="as if so much were free, such as 15GB; the device may be absent",
    )
    add("--max-model-len", type=int, metavar="N", help="tokens of context (default: the model's own, or what fits)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="sequences in a step (default: %(default)s)")
    _add_variant_options(add)


def _byte_count(text: str) -> int:
    """15GB, 16 GiB, 512MB or 8e9 as bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if not match or not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a size such as 15GB, 16GiB, 512MB or 8e9")
    return int(number * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate, chat=False)
    parser.description = "Continue PROMPT; the text goes to stdout."
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="the text; - reads it from stdin, less one newline at its end")
    add("--stats", action="store_true", help="show times and token counts on stderr")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", dest="chat", action="store_false", help="take it as it is (the default)")
    form.add_argument(
        "--chat", action="store_true", help="take it as a chat message, in the file's default chat template"
    )
    _add_engine_options(parser)
    _add_sampling_options(parser, max_tokens=128)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_chat)
    parser.description = f"A conversation: {CHAT_HELP}."
    add = parser.add_argument
    add("--system", metavar="TEXT", help="the system message; by default the chat format's own")
    add("--stats", action="store_true", help="show times and token counts after each answer, on stderr")
    _add_engine_options(parser)
    _add_sampling_options(parser, max_tokens=512)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_bench)
    parser.description = "Measure speed and memory. A table goes to stdout; what it means is in notebook 13."
    model = parser.add_mutually_exclusive_group().add_argument
    model("--model", default="smollm2-135m", help=f"{MODEL_HELP} (default: %(default)s)")
    model("--random-weights", metavar="SIZE", help="a model of random weights instead: 360M, 135M, small or tiny")
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or emulator (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all numbers there, each single sample among them")
    add("--repeats", type=int, metavar="N", help="runs that count, after a warm-up (default: 5; with --requests 1)")
    _add_variant_options(add)
    add = parser.add_argument_group("batches of equal requests (the default)").add_argument
    add("--batch", metavar="N,N,...", help="how many run together (default: 1,4,8)")
    add("--prompt-tokens", type=int, metavar="N", help="(default: 128)")
    add("--generated-tokens", type=int, metavar="N", help="(default: 64)")
    add = parser.add_argument_group("requests of random lengths that arrive over time").add_argument
    add("--requests", type=int, metavar="N", help="how many")
    add("--rate", metavar="R", help="arrivals per second; inf, the default: all at once")
    add("--seed", type=int, metavar="N", help="of lengths, contents and times (default: 0)")
    add("--prompt-lengths", metavar="A..B", help="tokens of a prompt (default: 100..1024)")
    add("--output-lengths", metavar="A..B", help="tokens of an answer (default: 100..1024)")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--model", default="smollm2-135m", help=f"{MODEL_HELP} (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or emulator (default: %(default)s)")
    add("--max-model-len", type=int, metavar="N", help="tokens of context (default: the model's own)")
    _add_variant_options(add)


def _add_variant_options(add: Any) -> None:
    names = "f32, workspace, quantised, paged_attention, fused or graph"
    about = f"which model of part IV runs on a GPU: {names} (default: the fastest)"
    add("--variant", type=_variant, metavar="NAME", help=about)
    add("--exact", action="store_true", help="products as accurate as float32's at any batch size, slower")


def _variant(name: str) -> str:
    """One of the names in `rvllm.variants`, which loads slowly: it is imported where the option was given alone."""
    from rvllm.variants import NAMES

    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(NAMES)})")
    return name


def _add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="(default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default: the likeliest token")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest; 0: among all")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample among the likeliest that sum to P")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop what is below P times the likeliest")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    from rvllm import SamplingParams

    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
    )


def _load(arguments: argparse.Namespace) -> LLM:
    from rvllm import LLM

    # One text at a time: a cache for one context, and not for as many as fit.
    return LLM(
        model=arguments.model,
        device=arguments.device,
        variant=arguments.variant,
        exact=arguments.exact,
        max_model_len=arguments.max_model_len,
        max_num_seqs=1,
    )


# generate


def _generate(arguments: argparse.Namespace) -> int:
    prompt = _read_prompt(arguments.prompt)
    params = _sampling_params(arguments)  # before the model is loaded: a wrong value is told at once
    with _load(arguments) as llm:
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) if arguments.chat else None
        stream = llm.stream(prompt if ids is None else ids, params)
        finished = _show(stream)
        print(flush=True)
        if arguments.stats:
            _show_stats(stream.output)
    return 0 if finished else EXIT_INTERRUPTED


def _read_prompt(argument: str) -> str:
    """The prompt itself, or for `-` all of stdin less one newline at its end, as a shell's `$(...)`."""
    if argument != "-":
        # Bytes of an argument that are no text arrive as lone surrogates, which UTF-8 does not allow.
        data, encoding = _without_mark(argument.encode("utf-8", "surrogatepass"))
        return _decode(data, "the prompt", encoding)
    if sys.stdin is None:
        raise InputError("stdin is closed, there is no prompt to read from it")
    data, encoding = _without_mark(sys.stdin.buffer.read())
    return _decode(data, "the prompt on stdin", encoding).removesuffix("\n").removesuffix("\r")


def _without_mark(data: bytes) -> tuple[bytes, str]:
    """The beginning of a text less its byte-order mark, and the encoding that the mark tells: UTF-8 without one."""
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return data[len(mark) :], encoding
    return data, "utf-8"


def _decode(data: bytes, what: str, encoding: str) -> str:
    """The text of some bytes; InputError where they are none. UTF-16 without a mark is told by its NULs."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not valid {encoding.upper()}, from byte {error.start} on") from error
    if "\0" in text:
        found = f"{what} holds NUL characters, as UTF-16 without a byte-order mark would"
        raise InputError(f"{found}; allowed: UTF-8, or UTF-16 that begins with its mark")
    return text


def _show(stream: Any) -> bool:
    """Print the pieces as they come. False where Ctrl-C cut them short; what was printed until then stays."""
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        return False
    finally:
        stream.close()
    return True


def _show_stats(output: RequestOutput) -> None:
    metrics = output.metrics
    first, rate = metrics.time_to_first_token, metrics.decode_tokens_per_second
    reason = output.outputs[0].finish_reason
    _say(
        f"prompt {metrics.num_prompt_tokens} tokens, first token after {f'{first:.2f} s' if first else '-'}; "
        f"{metrics.num_generated_tokens} tokens generated, {f'{rate:.1f}' if rate else '-'} tokens/s; "
        f"ended by {'Ctrl-C' if reason == 'abort' else reason}"
    )


# chat


def _chat(arguments: argparse.Namespace) -> int:
    params = _sampling_params(arguments)
    with _load(arguments) as llm:
        _say(CHAT_HELP)
        Conversation(llm, params, arguments.system, arguments.stats).run()
    return 0


class Conversation:
    """The messages so far, and the loop that adds to them. After every turn they end with an answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, stats: bool = False) -> None:
        self.llm = llm
        self.params = params
        self.stats = stats
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)
        self._lines = Lines()

    def run(self) -> None:
        """Read and answer until the user ends it: /exit, Ctrl-D, or Ctrl-C twice with no line in between."""
        interrupts = 0
        while interrupts < 2:
            try:
                line = self._lines.read()
            except EOFError:
                break
            except InputError as error:
                _say(f"rvllm: {error}")
                continue
            except KeyboardInterrupt:
                interrupts += 1
                _say("\nCtrl-C again ends" if interrupts < 2 else "")
                continue
            if line == "/exit":
                break
            interrupts = 0 if self.turn(line) else 1

    def turn(self, line: str) -> bool:
        """Deal with one line of the user. False where Ctrl-C stopped the answer."""
        if line == "/clear":
            self.messages = list(self.start)
            _say("the conversation is forgotten")
        elif line.startswith("/"):
            _say(CHAT_HELP)
        elif line:
            return self.answer(line)
        return True

    def answer(self, text: str) -> bool:
        """Stream an answer to `text` and keep both. A message that cannot be answered is not kept."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            stream = self.llm.stream(self.llm.tokenizer.encode_chat(messages), self.params)
            finished = _show(stream)
        except RvllmError as error:
            _say(f"rvllm: {error}\nyour message was not kept; /clear forgets the conversation and makes room")
            return True
        except KeyboardInterrupt:  # before there was anything to show
            _say("\nstopped")
            return False
        print(flush=True)
        self._keep(messages, stream.output, finished)
        return finished

    def _keep(self, messages: list[dict[str, str]], output: RequestOutput, finished: bool) -> None:
        answer = output.outputs[0]
        if answer.text or finished:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        if not finished:
            _say("stopped; the conversation goes on" if answer.text else "stopped; your message was not kept")
        elif answer.finish_reason == "length":
            _say(f"the answer was cut after {len(answer.token_ids)} tokens{self._limit(output)}")
        if self.stats:
            _show_stats(output)

    def _limit(self, output: RequestOutput) -> str:
        if len(output.outputs[0].token_ids) == self.params.max_tokens:
            return " (--max-tokens)"
        return ": the model's context is full; /clear forgets the conversation and makes room"


class Lines:
    """The lines of stdin, one by one, less the white space around them: in UTF-8, or as a byte-order mark says."""

    def __init__(self) -> None:
        self._encoding: str | None = None  # known from the first line on

    def read(self) -> str:
        """The next line; EOFError after the last one, InputError for one that is no text."""
        if sys.stdin is None:
            raise EOFError
        if sys.stdin.isatty() and sys.stdout.isatty():
            return _ask_line()
        data = sys.stdin.buffer.readline()
        if not data:
            raise EOFError
        if self._encoding is None:
            data, self._encoding = _without_mark(data)
        return _decode(self._whole(data, self._encoding), "the line on stdin", self._encoding).strip()

    @staticmethod
    def _whole(data: bytes, encoding: str) -> bytes:
        """The line to its end: the byte 0a, which `readline` looks for, may also be a part of another character."""
        newline = "\n".encode(encoding)
        if len(newline) == 1:
            return data
        while len(data) % len(newline) or not data.endswith(newline):
            more = sys.stdin.buffer.read(1) if len(data) % len(newline) else sys.stdin.buffer.readline()
            if not more:
                break
            data += more
        return data


def _ask_line() -> str:
    with contextlib.suppress(ImportError):  # Windows has no readline
        importlib.import_module("readline")  # its import alone gives `input` a history and arrow keys
    try:
        return input("> ").strip()
    except UnicodeDecodeError as error:
        raise InputError("this line is not text in the terminal's encoding") from error


# info


def _info(arguments: argparse.Namespace) -> int:
    from rvllm.gguf import GGUFFile
    from rvllm.hub import resolve
    from rvllm.tokenizer import chat_templates

    file = GGUFFile(resolve(arguments.model))
    print(f"{file.path}\n{_bytes(file.size)}, GGUF version {file.version}, alignment {file.alignment}")
    print(f"\n{len(file.metadata)} metadata keys")
    width = max((len(key) for key in file.metadata), default=0)
    for key, value in file.metadata.items():
        print(f"  {_plain(key):{width}}  {_shorten(value)}")
    if templates := chat_templates(file.metadata):
        names = (f"{_plain(name)} (used)" if name == "default" else _plain(name) for name in templates)
        print(f"\nchat templates: {', '.join(names)}")
    print(f"\n{len(file.tensors)} tensors")
    _print_table(
        (_plain(tensor.name), " x ".join(map(str, tensor.shape)), tensor.type_name, _bytes(tensor.nbytes))
        for tensor in file.tensors.values()
    )
    print("\nby type")
    _print_table(_totals(file.tensors.values()))
    if arguments.device or arguments.memory:
        _show_memory(arguments, file)
    return 0


def _show_memory(arguments: argparse.Namespace, file: GGUFFile) -> None:
    """The sum by which LLM would make its cache: weights, workspace, blocks, and the context that results."""
    from rvllm.cpu_model import read_config
    from rvllm.device import DeviceError, resolve_device
    from rvllm.half_cache import PAGE
    from rvllm.memory import Wish, multiprocessors, plan_memory
    from rvllm.variants import choose_variant

    try:
        device = resolve_device(arguments.device or "auto", must_work=arguments.memory is None)
    except DeviceError as error:
        raise InputError(f"{error}; with --memory the sum needs no device") from error
    variant, remark = choose_variant(arguments.variant, device, file, PAGE)
    limits = {"max_model_len": arguments.max_model_len, "max_num_seqs": arguments.max_num_seqs}
    wish = Wish(variant, device, read_config(file), file.tensors, arguments.exact, **limits)
    plan = plan_memory(replace(wish, multiprocessors=multiprocessors(device)), arguments.memory)
    print(f"\nmemory on {device}, variant {variant}; free: {plan.free_text}")
    print("\n".join(f"  {note}" for note in (remark, plan.remark) if note) or "  all that was asked for fits")
    _print_table(plan.rows())


def _totals(tensors: Iterable[Any]) -> Iterator[tuple[str, str, str]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.type_name] += 1
        sizes[tensor.type_name] += tensor.nbytes
    for name, size in sizes.most_common():
        yield name, f"{counts[name]} tensors", _bytes(size)
    yield "all", f"{counts.total()} tensors", _bytes(sizes.total())


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell; the last one, a size, to the right."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for *cells, last in table:
        left = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=False))
        print(f"  {left}  {last:>{widths[-1]}}")


def _shorten(value: Any, width: int = 72) -> str:
    """One line for a metadata value: of a long text or array its length and its beginning."""
    if isinstance(value, str):
        text = _plain(value)
        return text if len(text) <= width else f"({len(value)} characters) {text[:width]}..."
    if hasattr(value, "__len__"):
        few = ", ".join(repr(_scalar(item)) for item in value[:6])
        return f"[{len(value)}] {few[:width]}{', ...' if len(value) > 6 or len(few) > width else ''}"
    return str(value)


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _plain(text: str) -> str:
    """The text with control characters escaped: a file's strings must not steer the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _doctor(_: argparse.Namespace) -> int:
    from rvllm.doctor import report

    return 0 if report() else EXIT_DOCTOR_FAILED


# bench


BATCH_OPTIONS = ("batch", "prompt_tokens", "generated_tokens")
TRAFFIC_OPTIONS = ("rate", "seed", "prompt_lengths", "output_lengths")


def _bench(arguments: argparse.Namespace) -> int:
    from rvllm import bench

    plan = _bench_plan(arguments)
    if arguments.json:
        bench.check_writable(arguments.json)
    subject = _bench_subject(arguments)
    if isinstance(plan, bench.Traffic):
        record = bench.serve_traffic(subject, plan, arguments.device, _say)
        text = bench.traffic_table(record)
    else:
        record = bench.sweep(subject, arguments.device, plan, _say)
        text = bench.sweep_table(record)
    if arguments.json:
        bench.write_record(record, arguments.json)
    print(text)
    return 0


def _bench_plan(arguments: argparse.Namespace) -> Workload | Traffic:
    """What to run; options of the other mode are refused, not ignored."""
    from rvllm import bench

    is_traffic = arguments.requests is not None
    foreign = BATCH_OPTIONS if is_traffic else TRAFFIC_OPTIONS
    if wrong := [name for name in foreign if getattr(arguments, name) is not None]:
        option = f"--{wrong[0].replace('_', '-')}"
        raise InputError(f"{option} {'does not go' if is_traffic else 'goes only'} together with --requests")
    names = ("repeats", *(TRAFFIC_OPTIONS if is_traffic else BATCH_OPTIONS))
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    parsers = {
        "batch": bench.parse_batches,
        "rate": bench.parse_rate,
        "prompt_lengths": bench.parse_lengths,
        "output_lengths": bench.parse_lengths,
    }
    settings: dict[str, Any] = {name: parsers.get(name, int)(value) for name, value in given.items()}
    if is_traffic:
        return bench.Traffic(arguments.requests, **settings)
    if "batch" in settings:
        settings["batches"] = settings.pop("batch")
    return bench.Workload(**settings)


def _bench_subject(arguments: argparse.Namespace) -> Subject:
    from rvllm.bench import subject_of
    from rvllm.hub import resolve
    from rvllm.random_weights import random_weights

    own = {"variant": arguments.variant, "exact": arguments.exact}
    if arguments.random_weights is None:
        return subject_of(resolve(arguments.model), **own)
    return subject_of(*random_weights(arguments.random_weights), **own)
