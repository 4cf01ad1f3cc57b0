"""The command line as a user has it: processes, signals, pipes, and a terminal."""

import fcntl
import importlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import rvllm as rvllm_package
from rvllm import cli
from rvllm.cli import Conversation
from rvllm.errors import RvllmError
from rvllm.variants import NAMES
from tests import toy
from tests.fast_toy import FastShape, write_fast_toy

ROOT = Path(cli.__file__).parents[1]
COMMAND = [sys.executable, "-m", "rvllm"]
PROMPT = "The capital of France is"
ENDLESS = "1 1 1 1 1 1 1 1"  # a greedy answer goes on like this until it may not


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Unbuffered output, as containers like to set it, would hide what the flush at exit has to say.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return {**inherited, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **extra}


def rvllm(*arguments: str, stdin: bytes | None = None, **extra: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment(**extra),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        check=False,
    )


def assert_refused(done: subprocess.CompletedProcess[bytes], words: str) -> None:
    """Exit code 2, nothing on stdout, one message without a traceback."""
    stderr = done.stderr.decode()
    assert done.returncode == 2, stderr
    assert done.stdout == b""
    assert "Traceback" not in stderr
    assert words in stderr


# Without a model


def test_help_loads_nothing_that_takes_long():
    code = "import sys; from rvllm import cli\ntry: cli.main(['--help'])\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert "generate" in done.stdout
    loaded = set(done.stderr.split())
    assert "rvllm.cli" in loaded
    assert not loaded & {"numpy", "gguf", "tokenizers", "jinja2", "huggingface_hub", "tqdm", "cupy"}


def test_version():
    assert re.fullmatch(rb"rvllm \S.*\n", rvllm("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["frobnicate"], "invalid choice"),
        (["generate"], "required: PROMPT"),
        (["generate", "x", "--max-tokens", "many"], "invalid int value"),
        (["generate", "x", "--frobnicate"], "unrecognized arguments"),
        (["generate", "x", "--raw", "--chat"], "not allowed with"),
        (["generate", "x", "--temperature", "-1"], "rvllm: temperature"),
        (["generate", "x", "--temperature", "nan"], "rvllm: temperature"),
        (["generate", "x", "--top-p", "1.5"], "rvllm: top_p"),
        (["generate", "x", "--max-tokens", "-1"], "rvllm: max_tokens"),
        (["generate", "x", "--stop", ""], "rvllm: stop"),
        (["generate", "x", "--device", "gpu"], "rvllm: there is no device 'gpu'"),
        (["generate", "x", "--device", "tpu"], "rvllm: there is no device 'tpu'"),
        (["generate", "x", "--variant", "fastest"], "invalid choice: 'fastest' (choose from f32, workspace, quantised"),
        (["chat", "--variant", ""], "invalid choice: '' (choose from f32"),
        (["generate", "x", "--variant"], "expected one argument"),
        (["generate", "x", "--exact", "yes"], "unrecognized arguments: yes"),
        (["generate", "x", "--model", "smollm"], "did you mean smollm2-"),
        (["generate", "x", "--model", "./missing.gguf"], "rvllm: no model file missing.gguf"),
        (["generate", "x", "--model", "."], "is a folder"),
        (["chat", "--model", "./missing.gguf"], "rvllm: no model file"),
        (["info", "./missing.gguf"], "rvllm: no model file"),
        (["info", "/dev/null"], "neither a file"),
    ],
)
def test_what_is_wrong_is_told_in_words(capsys, arguments, words):
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert words in output.err


@pytest.fixture(scope="module")
def fast_toy(tmp_path_factory) -> str:
    return str(write_fast_toy(tmp_path_factory.mktemp("cli") / "fast.gguf", FastShape(layers=1, H=1, F=32)))


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_help_names_every_variant(capsys, command):
    assert cli.main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(NAMES[:-1])} or {NAMES[-1]} (default:" in shown
    assert "--exact" in shown


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_variant_reaches_the_model(monkeypatch, capsys, fast_toy, command):
    made, real = [], rvllm_package.LLM
    monkeypatch.setattr(rvllm_package, "LLM", lambda **options: made.append(real(**options)) or made[-1])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"hello\n"), isatty=lambda: False))
    options = ["--model", fast_toy, "--device", "emulator", "--max-model-len", "64", "--max-tokens", "3"]
    texts = []
    for own in ([], ["--variant", "graph"], ["--variant", "fused", "--exact"]):
        assert cli.main([command, *(["hello"] if command == "generate" else []), *options, *own]) == 0
        texts.append(capsys.readouterr().out)
        sys.stdin.buffer.seek(0)
    assert [llm.variant for llm in made] == ["f32", "graph", "fused"]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_a_variant_that_does_not_fit_is_told(capsys, tmp_path, command, device):
    path = toy.write(tmp_path / "toy.gguf")
    assert cli.main([*command, "--model", str(path), "--device", device, "--variant", "graph"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("rvllm: variant: found 'graph'")


def test_what_is_wrong_leaves_no_traceback():
    assert_refused(rvllm("generate", "x", "--model", "./missing.gguf"), "rvllm: no model file missing.gguf")


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><html>", b"version https://git-lfs.github.com/spec/v1\n", b""])
def test_a_file_that_is_no_model(tmp_path, capsys, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    for arguments in (["info", str(path)], ["generate", "x", "--model", str(path)]):
        assert cli.main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith(f"rvllm: {path}")


def test_a_prompt_that_is_no_text():
    assert_refused(rvllm("generate", os.fsdecode(b"caf\xe9")), "the prompt is not valid UTF-8, from byte 3 on")
    assert_refused(rvllm("generate", "-", stdin=b"ab\xff"), "the prompt on stdin is not valid UTF-8, from byte 2 on")


@pytest.mark.parametrize(("data", "prompt"), [("é", "é"), ("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("", "")])
def test_one_newline_at_the_end_of_stdin_is_not_part_of_the_prompt(monkeypatch, data, prompt):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data.encode())))
    assert cli._read_prompt("-") == prompt


ENCODINGS = ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


def marked(text: str, encoding: str) -> bytes:
    return f"\ufeff{text}".encode(encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        ("Hello é 世 🚀", "Hello é 世 🚀"),
        ("a\r\n", "a"),
        ("a\nb\n\n", "a\nb\n"),
        ("Ċਊ\n", "Ċਊ"),
        ("", ""),
        ("\ufeffa", "\ufeffa"),
    ],
)
def test_c96_a_byte_order_mark_tells_the_encoding_and_is_dropped(monkeypatch, encoding, data, prompt):
    """Only the first one is a mark. (U+010A and U+0A0A have the byte of a newline in them.)"""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(marked(data, encoding))))
    assert cli._read_prompt("-") == prompt


def test_c96_a_mark_in_an_argument_is_dropped():
    assert cli._read_prompt("\ufeffHello") == "Hello"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "Hello".encode("utf-16-le"),
            "holds NUL characters, as UTF-16 without a byte-order mark would; allowed: UTF-8",
        ),
        ("Hello\n".encode("utf-16-be"), "holds NUL characters"),
        ("Hello".encode("utf-32-le"), "holds NUL characters"),
        ("é\n".encode("utf-16-le"), "is not valid UTF-8"),
        (b"a\0b", "holds NUL characters"),
        (marked("a\0b", "utf-16-le"), "holds NUL characters"),
        (b"\xff\xfea\0b", "is not valid UTF-16-LE, from byte 2 on"),
        (b"\xff\xfe\x00\xd8a\0", "is not valid UTF-16-LE, from byte 0 on"),
        (b"\xef\xbb\xbfa\xff", "is not valid UTF-8, from byte 1 on"),
        ("a\ud800".encode("utf-8", "surrogatepass"), "is not valid UTF-8, from byte 1 on"),
    ],
)
def test_c96_what_is_no_text_on_stdin_is_told(monkeypatch, capsys, data, message):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))
    assert cli.main(["generate", "-"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"rvllm: the prompt on stdin {message}")


def entered(monkeypatch, capsys, data: bytes) -> tuple[list[str], str]:
    """The messages that a chat gets from these bytes on stdin, and what it says about them."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))
    llm = Scripted(*([["A"]] * 9))
    Conversation(llm, SimpleNamespace(max_tokens=9), None).run()
    return [messages[-1]["content"] for messages in llm.asked], capsys.readouterr().err


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n"])
def test_c96_a_chat_in_any_unicode_encoding(monkeypatch, capsys, encoding, newline, last):
    lines = ["Hi é 世 🚀", "", "Ċਊ", "/clear", "bye"]
    data = marked(newline.join(lines) + last, encoding)
    assert entered(monkeypatch, capsys, data) == (["Hi é 世 🚀", "Ċਊ", "bye"], "the conversation is forgotten\n")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\nnot read\n"])
def test_c96_a_mark_before_exit_ends(monkeypatch, capsys, encoding, end):
    assert entered(monkeypatch, capsys, marked("/exit" + end, encoding)) == ([], "")


def test_c96_a_chat_in_utf_16_without_a_mark_is_told(monkeypatch, capsys):
    asked, told = entered(monkeypatch, capsys, "Hi\n".encode("utf-16-be") + b"yes\n")
    assert asked == ["yes"]
    assert told.startswith("rvllm: the line on stdin holds NUL characters, as UTF-16 without a byte-order mark would")


def test_c96_a_line_that_is_no_text_stops_no_other(monkeypatch, capsys):
    for data in (b"\xef\xbb\xbfa\xff\nb\n", b"\xff\xfe\x00\xd8\n\0b\0\n\0"):
        asked, told = entered(monkeypatch, capsys, data)
        assert asked == ["b"]
        assert re.match(r"rvllm: the line on stdin is not valid UTF-(8|16-LE), from byte [01] on", told)


@pytest.mark.parametrize(
    ("templates", "line"),
    [
        ({"": "D"}, "chat templates: default (used)"),
        ({"": "D", ".tool_use": "T", ".rag": "R"}, "chat templates: default (used), tool_use, rag"),
        ({".tool\x1buse": "T"}, r"chat templates: tool\x1buse"),
        ({}, None),
    ],
)
def test_c100_info_names_the_chat_templates(tmp_path, capsys, templates, line):
    keys = {f"tokenizer__chat_template{name}": source for name, source in templates.items()}
    path = toy.write(tmp_path / "toy.gguf", toy.metadata(**{"tokenizer__chat_template": None} | keys))
    assert cli.main(["info", str(path)]) == 0
    shown = [text for text in capsys.readouterr().out.splitlines() if text.startswith("chat templates")]
    assert shown == ([] if line is None else [line])


def test_the_traceback_is_there_for_those_who_want_it():
    stderr = rvllm("info", "nope", RVLLM_DEBUG="1").stderr.decode()
    assert "Traceback" in stderr
    assert "rvllm: no model is called 'nope'" in stderr


def test_out_of_memory_is_told(monkeypatch, capsys):
    def fail(_arguments):
        raise MemoryError

    monkeypatch.setattr(cli, "_doctor", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("rvllm: out of memory")


def test_doctor_fails_where_a_package_of_the_cpu_path_does_not_load(monkeypatch, capsys):
    import_module = importlib.import_module

    def fail(name, *package):
        if name == "tokenizers":
            raise ImportError("libfoo.so: cannot open shared object file")
        return import_module(name, *package)

    monkeypatch.setattr(importlib, "import_module", fail)
    assert cli.main(["doctor"]) == cli.EXIT_DOCTOR_FAILED
    report = capsys.readouterr().out
    assert "--  tokenizers (ImportError: libfoo.so: cannot open" in report
    assert "to mend it: python -m pip install --force-reinstall tokenizers" in report
    assert "The CPU path does not work" in report


def test_doctor_names_the_blas_and_its_threads(capsys):
    assert cli.main(["doctor"]) == 0
    assert re.search(r"^ok  BLAS \S+ \S*, (\d+ threads|number of threads unknown) on", capsys.readouterr().out, re.M)


def test_strings_of_a_file_do_not_steer_the_terminal():
    assert cli._shorten("a\x1b[2Jb\n") == "a\\x1b[2Jb\\n"
    assert cli._shorten(["\x1b[2J"]) == "[1] '\\x1b[2J'"


def test_long_values_are_shortened():
    assert cli._shorten("x" * 1000) == f"(1000 characters) {'x' * 72}..."
    assert cli._shorten(list(range(49152))) == "[49152] 0, 1, 2, 3, 4, 5, ..."
    assert cli._shorten([]) == "[0] "
    assert cli._shorten(True) == "True"


# A conversation, with a model that is told what to say


class Scripted:
    """An LLM whose streams are given beforehand: a list of pieces, where an exception is raised in its place."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.tokenizer = SimpleNamespace(encode_chat=lambda messages: self.asked.append(messages) or [1])

    def stream(self, _ids, _params):
        return ScriptedStream(self.answers.pop(0))


class ScriptedStream:
    def __init__(self, script):
        self.script, self.text, self.tokens = script, "", []

    def __iter__(self):
        for piece in self.script:
            if isinstance(piece, BaseException):
                raise piece
            self.text += piece
            self.tokens.append(0)
            yield piece

    def close(self):
        pass

    @property
    def output(self):
        reason = "length" if self.text.endswith("...") else "stop"
        return SimpleNamespace(outputs=[SimpleNamespace(text=self.text, token_ids=self.tokens, finish_reason=reason)])


def converse(monkeypatch, lines, *answers, system=None, max_tokens=9):
    """A conversation in which the user enters `lines`; an exception among them is raised in place of a line."""
    script = [*lines, EOFError()]

    def read_line(_lines):
        line = script.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(cli.Lines, "read", read_line)
    llm = Scripted(*answers)
    conversation = Conversation(llm, SimpleNamespace(max_tokens=max_tokens), system)
    conversation.run()
    return conversation, llm, script


def contents(messages):
    return [message["content"] for message in messages]


def test_a_conversation_grows_by_question_and_answer(monkeypatch, capsys):
    conversation, llm, _ = converse(monkeypatch, ["a", "", "b"], ["A1", "A2"], ["B"], system="s")
    assert [contents(messages) for messages in llm.asked] == [["s", "a"], ["s", "a", "A1A2", "b"]]
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert capsys.readouterr().out == "A1A2\nB\n"


def test_commands(monkeypatch, capsys):
    conversation, llm, rest = converse(
        monkeypatch, ["a", "/clear", "/what", "b", "/exit", "c"], ["A"], ["B"], system="s"
    )
    assert contents(llm.asked[1]) == ["s", "b"]
    assert contents(conversation.messages) == ["s", "b", "B"]
    assert rest[0] == "c"
    assert "forgotten" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(monkeypatch, capsys):
    conversation, llm, _ = converse(monkeypatch, ["a", "b"], ["A1", KeyboardInterrupt()], ["B"])
    assert contents(llm.asked[1]) == ["a", "A1", "b"]
    assert contents(conversation.messages) == ["a", "A1", "b", "B"]
    assert "stopped" in capsys.readouterr().err


def test_ctrl_c_before_the_first_piece_drops_the_question_and_says_so(monkeypatch, capsys):
    conversation, _, _ = converse(monkeypatch, ["a", "b"], [KeyboardInterrupt()], ["B"])
    assert contents(conversation.messages) == ["b", "B"]
    assert "your message was not kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([KeyboardInterrupt(), KeyboardInterrupt(), "x"], 2),  # twice at the prompt
        ([KeyboardInterrupt(), "a", KeyboardInterrupt(), "/exit"], 1),  # a line in between begins anew
        (["stop me", KeyboardInterrupt(), "x"], 2),  # the answer, then the prompt
    ],
)
def test_ctrl_c_twice_in_a_row_ends(monkeypatch, lines, left):
    answer = [KeyboardInterrupt()] if lines[0] == "stop me" else ["A"]
    _, _, rest = converse(monkeypatch, lines, answer)
    assert len(rest) == left


def test_a_message_without_room_is_told_and_nothing_is_dropped(monkeypatch, capsys):
    conversation, llm, _ = converse(monkeypatch, ["a", "b", "c"], ["A"], [RvllmError("too long")], ["C"])
    assert contents(llm.asked[2]) == ["a", "A", "c"]
    assert contents(conversation.messages) == ["a", "A", "c", "C"]
    stderr = capsys.readouterr().err
    assert "rvllm: too long" in stderr
    assert "your message was not kept" in stderr


def test_an_answer_that_is_cut_says_by_what(monkeypatch, capsys):
    converse(monkeypatch, ["a", "b"], ["A", "..."], ["B..."], max_tokens=2)
    stderr = capsys.readouterr().err
    assert "cut after 2 tokens (--max-tokens)" in stderr
    assert "cut after 1 tokens: the model's context is full" in stderr


# With the real model


@pytest.fixture(scope="module")
def model(model_path) -> tuple[str, str]:
    return "--model", str(model_path)


@pytest.mark.real_model
def test_generate_streams_to_stdout_and_the_rest_to_stderr(model):
    done = rvllm("generate", PROMPT, *model, "--max-tokens", "4", "--stats")
    assert done.returncode == 0
    assert done.stdout.decode().startswith(" Paris")
    assert re.fullmatch(
        r"prompt 5 tokens, first token after \d+\.\d\d s; 4 tokens generated, \d+\.\d tokens/s; ended by length\n",
        done.stderr.decode(),
    )


@pytest.mark.real_model
def test_without_stats_stderr_is_empty_and_stop_ends_before_its_text(model):
    done = rvllm("generate", PROMPT, *model, "--max-tokens", "8", "--stop", ".")
    assert (done.returncode, done.stdout, done.stderr) == (0, b" Paris\n", b"")


@pytest.mark.real_model
def test_the_prompt_may_come_from_stdin(model):
    done = rvllm("generate", "-", *model, "--max-tokens", "1", stdin=PROMPT.encode() + b"\n")
    assert done.stdout == b" Paris\n"


@pytest.mark.real_model
def test_chat_format(model):
    done = rvllm("generate", "What is the capital of France?", *model, "--chat")
    assert done.stdout == b"The capital of France is Paris.\n"


@pytest.mark.real_model
def test_the_same_seed_gives_the_same_text(model):
    flags = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01", "--max-tokens", "4"]
    first, again, other = (rvllm("generate", PROMPT, *model, *flags, "--seed", seed).stdout for seed in "778")
    assert first == again
    assert first != other


@pytest.mark.real_model
def test_a_prompt_longer_than_the_context_is_told(model):
    assert_refused(rvllm("generate", PROMPT, *model, "--max-model-len", "4"), "rvllm: prompt: found 5 tokens")
    assert_refused(rvllm("generate", "", *model), "rvllm: prompt: found no tokens")


@pytest.mark.real_model
def test_an_encoding_that_lacks_a_character_does_not_end_the_answer(model):
    done = rvllm("generate", "1 2 3 4", *model, "--max-tokens", "2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    prompt = "Café, naïve, déjà vu, café, naïve, déjà vu, café, na"
    done = rvllm("generate", prompt, *model, "--max-tokens", "4", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"?" in done.stdout


@pytest.mark.real_model
def test_ctrl_c_ends_with_what_was_generated(model):
    child = subprocess.Popen(
        [*COMMAND, "generate", ENDLESS, *model, "--max-tokens", "6000", "--stats"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_ctrl_c,
    )
    hold_a_page(child.stdout.fileno())
    begin = child.stdout.read(10)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate()
    text = (begin + stdout).decode()
    assert child.returncode == 130
    assert text.startswith(" 1 1 1")
    assert text.endswith("\n")
    assert b"Traceback" not in stderr
    assert stderr.endswith(b"ended by Ctrl-C\n")


def heed_ctrl_c() -> None:
    """For a child: a shell without job control starts what runs in the background with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def hold_a_page(pipe: int) -> None:
    """Make a pipe so small that who writes more than 4,096 bytes waits for the reader: neither can run ahead."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # of Linux
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)


def read_and_leave(count: int, *arguments: str) -> tuple[int, bytes, bytes]:
    """Exit code, the first bytes of stdout, and stderr, of a process whose reader takes `count` bytes and goes away."""
    reader, writer = os.pipe()
    hold_a_page(writer)
    if not count:
        os.close(reader)
    child = subprocess.Popen([*COMMAND, *arguments], env=environment(), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    taken = os.read(reader, count) if count else b""
    if count:
        os.close(reader)
    _, stderr = child.communicate()
    return child.returncode, taken, stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor"], ["generate", "--help"]])
def test_a_reader_that_is_gone_from_the_start(arguments):
    assert read_and_leave(0, *arguments) == (141, b"", b"")


@pytest.mark.real_model
def test_a_reader_that_goes_away_ends_it_quietly(model):
    code, text, stderr = read_and_leave(5, "generate", ENDLESS, *model, "--max-tokens", "6000")
    assert (code, stderr) == (141, b"") and b" 1 1 1".startswith(text)
    assert read_and_leave(5, "info", model[1]) == (141, model[1][:5].encode(), b"")


def test_a_full_disk_is_told_once():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, "doctor"], env=environment(), stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr == b"rvllm: [Errno 28] No space left on device\n"


@pytest.mark.real_model
def test_info_shows_metadata_tensors_and_totals(model):
    done = rvllm("info", model[1])
    text = done.stdout.decode()
    assert done.stderr == b""
    assert re.search(r"^  general\.architecture +llama$", text, re.MULTILINE)
    assert re.search(r"^  tokenizer\.ggml\.tokens +\[49152\] '<\|endoftext\|>', .*\.\.\.$", text, re.MULTILINE)
    assert re.search(r"^  token_embd\.weight +49152 x 576 +Q8_0 +30\.1 MB$", text, re.MULTILINE)
    assert re.search(r"^  Q4_1 +210 tensors +66\.4 MB$", text, re.MULTILINE)
    assert re.search(r"^  all +272 tensors +96\.6 MB$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.real_model
def test_chat_over_a_pipe_answers_each_line(model):
    done = rvllm("chat", *model, "--max-tokens", "8", stdin=b"What is the capital of France?\n\nAnd of Italy?\n")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0
    assert lines[0] == "The capital of France is Paris."
    assert len(lines) == 2
    assert "Traceback" not in done.stderr.decode()


class Terminal:
    """A child process on a pseudo-terminal: type, and wait for what it shows."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            heed_ctrl_c()
            os.execvpe(command[0], command, environment(TERM="dumb"))
        self.shown = ""

    def expect(self, text: str, seconds: float = 600) -> None:
        """Wait until `text` appears after what earlier calls have found."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"no {text!r} in {self.shown!r}"
            if select.select([self.file], [], [], 0.1)[0]:
                self.shown += os.read(self.file, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def exit_code(self, seconds: float = 600) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.file)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"it did not end; shown last: {self.shown!r}")


@pytest.mark.real_model
def test_chat_on_a_terminal(model):
    terminal = Terminal([*COMMAND, "chat", *model, "--max-tokens", "1000"])
    terminal.expect("> ")
    terminal.type("What is the capital of France?\n")
    terminal.expect("capital of France is Paris.")
    terminal.expect("> ")
    terminal.type("Tell me a long story about a fox.\n")
    terminal.expect("fox.")  # the echo
    terminal.expect("fox")  # the answer has begun
    terminal.type("\x03")
    terminal.expect("stopped; the conversation goes on")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
