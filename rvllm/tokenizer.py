"""Text to ids and back by the rules in a GGUF file: byte-level BPE, chat template, decoding piece by piece.

Generated from notebooks/02_tokenizer.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

import codecs
import datetime
import functools
import json
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, SecurityError
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from rvllm.errors import RvllmError

Messages = Sequence[Mapping[str, Any]]


class TokenizerError(RvllmError):
    """A vocabulary that can't be used, or text and ids that don't belong to it. Notebook 02, section 2."""


class ChatTemplateError(RvllmError):
    """A chat template that is missing, broken, forbidden, or that refused the conversation.

    Notebook 02, section 6.
    """


def byte_alphabet() -> dict[int, str]:
    """The printable stand-in of each byte: itself where printable, else the next free code point from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type


# What ordinary text is made of: white space, printable ASCII, and the UTF-8 of the first planes. Not in it: control
# characters, bytes that UTF-8 never has, and those that begin characters of planes which are all but unused.
ORDINARY_BYTES = {9, 10, 13, *range(32, 127), *range(0x80, 0xC0), *range(0xC2, 0xF1)}


def lacking_bytes(tokens: Sequence[str]) -> bytes:
    """The bytes that no token stands for: what cannot be spelled is dropped."""
    known = set(tokens)
    return bytes(sorted(byte for byte, character in byte_alphabet().items() if character not in known))


def shown_bytes(data: Iterable[int]) -> str:
    """Bytes for a message: 41 'A', 0a, ...; of many the first eight."""
    shown = [f"{b:02x} {chr(b)!r}" if 32 < b < 127 else f"{b:02x}" for b in sorted(data)]
    return ", ".join(shown[:8]) + (f", ... ({len(shown)} of 256)" if len(shown) > 8 else "")


def token_bytes(text: str, token_type: int) -> bytes:
    """The bytes that a token stands for.

    Special tokens are written as they are, the others in byte characters.
    """
    if token_type == BYTE and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
        return bytes([int(text[3:5], 16)])
    if token_type in (CONTROL, USER_DEFINED, UNKNOWN):
        return text.encode()
    return b"".join(bytes([BYTE_OF[c]]) if c in BYTE_OF else c.encode() for c in text)


def read_vocab(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types, checked: TokenizerError for another kind, duplicates, or lists of unequal length."""
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model: found {kind!r}; allowed: 'gpt2' (byte-level BPE)")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise TokenizerError("tokenizer.ggml.tokens: found no list of strings; it must hold the vocabulary")
    if len(set(tokens)) != len(tokens):
        twice = next(t for t in tokens if tokens.count(t) > 1)
        raise TokenizerError(f"tokenizer.ggml.tokens: found {twice!r} twice; every token must be unique")
    for key in ("token_type", "scores"):
        values = metadata.get(f"tokenizer.ggml.{key}", [NORMAL] * len(tokens))
        if not isinstance(values, (list, np.ndarray)) or len(values) != len(tokens):
            raise TokenizerError(f"tokenizer.ggml.{key}: must have one entry for each of the {len(tokens)} tokens")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    wrong = next((t for t in types if not isinstance(t, (int, np.integer)) or isinstance(t, bool)), None)
    if wrong is not None:
        raise TokenizerError(
            f"tokenizer.ggml.token_type: found {wrong!r}; allowed: integers from 1 (normal) to 6 (byte)"
        )
    return tokens, [int(t) for t in types]


def read_merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merge rules, best first.

    A rule that leads out of the vocabulary would make the library panic: an error here.
    """
    lines = metadata.get("tokenizer.ggml.merges", [])
    merges = []
    for rank, line in enumerate(lines if isinstance(lines, list) else [None]):
        cut = line.find(" ", 1) if isinstance(line, str) else -1  # from index 1: the left part may be a space itself
        left, right = (line[:cut], line[cut + 1 :]) if cut > 0 else ("", "")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise TokenizerError(
                f"tokenizer.ggml.merges[{rank}]: found {line!r}; both parts and their union must be tokens"
            )
        merges.append((left, right))
    return merges


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}
# Other names that llama.cpp gives to the same splitting.
SAME_AS = {
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "gpt-2": "phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code mpt olmo jais trillion gigachat "
    "modern-bert exaone4 roberta-bpe",
    "llama-bpe": "llama3 llama-v3 falcon3 pixtral lfm2 midm-2.0 dbrx smaug-bpe chatglm-bpe glm4",
    "qwen2": "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2",
}
SPLIT_OF = {name: name for name in SPLITS} | {alias: name for name, names in SAME_AS.items() for alias in names.split()}
# Here a word that is in the vocabulary as a whole is taken whole, even if no merges lead to it.
IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0"}


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Cut text into words, pass after pass, then spell each word in byte characters.

    Notebook 02, section 4.
    """
    if name not in SPLIT_OF:
        raise TokenizerError(f"tokenizer.ggml.pre: found {name!r}; allowed: {', '.join(sorted(SPLIT_OF))}")
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[SPLIT_OF[name]]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


EOG_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<EOT>",
)


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """A switch such as `tokenizer.ggml.add_bos_token`: a bool; neither 0 nor "false" will do."""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise TokenizerError(f"tokenizer.ggml.{name}: found {value!r}; allowed: true or false")
    return value


def special_id(metadata: Mapping[str, Any], name: str, n_tokens: int) -> int | None:
    """An id such as `tokenizer.ggml.eos_token_id`, or None where the file has none."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < n_tokens:
        raise TokenizerError(f"tokenizer.ggml.{name}_token_id: found {value!r}; allowed: 0 to {n_tokens - 1}")
    return value


def end_of_generation(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> frozenset[int]:
    """Every id that ends an answer: what the file names, and the well-known end texts among its special tokens."""
    named = (special_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom"))
    by_text = {i for i, text in enumerate(tokens) if text in EOG_TEXTS and types[i] in (CONTROL, USER_DEFINED)}
    return frozenset(by_text | {i for i in named if i is not None})


MAX_TURNS = 100_000
MAX_REPEAT = 1_000_000


class CountedRange:
    """What `range(...)` gives inside a template: all loops of one rendering together may take MAX_TURNS turns."""

    def __init__(self, turns_left: list[int], *args: int) -> None:
        self._turns_left, self._numbers = turns_left, range(*args)
        if len(self._numbers) > turns_left[0]:
            raise SecurityError(f"more than {MAX_TURNS:,} turns of its loops")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        part = self._numbers[index]
        if isinstance(part, range):
            return CountedRange(self._turns_left, part.start, part.stop, part.step)
        return part

    def __iter__(self) -> Iterator[int]:
        for number in self._numbers:
            self._turns_left[0] -= 1
            if self._turns_left[0] < 0:
                raise SecurityError(f"more than {MAX_TURNS:,} turns of its loops")
            yield number


def check_widths(*values: Any) -> None:
    """SecurityError for an integer above MAX_REPEAT: as a width it would pad a text without end."""
    if any(isinstance(value, int) and value > MAX_REPEAT for value in values):
        raise SecurityError(f"a width of more than {MAX_REPEAT:,}")


def check_format(text: str, values: Any) -> None:
    """The same for the widths in a format text, and for those that `*` takes from the values."""
    check_widths(*map(int, re.findall(r"[0-9]+", text)))
    if "*" in text:
        check_widths(*(values if isinstance(values, tuple) else [values]))


def widths_checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's whose arguments, all but the value in front of it, may not be too large."""

    @functools.wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        check_widths(*args, *kwargs.values())
        return function(value, *args, **kwargs)

    return checked


def percent_format(text: Any, *args: Any, **kwargs: Any) -> str:
    """The filter `format`: `"%s" | format(x)`."""
    if args and kwargs:
        raise TypeError("format takes values by place or by name, not both")
    check_format(str(text), args)
    return str(text) % (kwargs or args)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` as Hugging Face defines it: plain JSON, with no regard to HTML."""
    check_widths(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# Methods that pad a text, or bytes, up to a length that they are given.
PADDING = {"ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes"}


class CheckedFormatter(SandboxedFormatter):
    """`str.format` by the sandbox's rules for attributes, with checked widths."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        """One `{...}`; widths that other fields give are filled in by now."""
        check_format(format_spec, ())
        return super().format_field(value, format_spec)


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`, around what the model itself says: trainers mark it so. No effect."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block's content; what it sets stays inside."""
        line = next(parser.stream).lineno
        try:
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        except jinja2.TemplateSyntaxError as error:
            message = error.message or ""
            if "'endgeneration'" not in message or "It began" in message:
                raise
            parser.fail(f"{message} It began in line {line}.", error.lineno)
        return jinja2.nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox with what Hugging Face gives to templates, and bounds on what makes texts without end.

    A template is a stranger's data, not a program of ours.
    """

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
        for name in ("center", "indent", "batch", "slice", "round", "wordwrap"):
            self.filters[name] = widths_checked(self.filters[name])
        self.filters |= {"tojson": to_json, "format": percent_format}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Allow numbers to be multiplied, texts and lists up to MAX_REPEAT; powers and widths within bounds."""
        sizes = [len(x) for x in (left, right) if isinstance(x, (str, list, tuple))]
        times = [x for x in (left, right) if isinstance(x, int)]
        if operator == "%" and isinstance(left, str):
            check_format(left, right)
        if operator == "**" and len(times) == 2 and left.bit_length() * right > 4096:
            raise SecurityError("a power of more than 4096 bits")
        if operator == "*" and (
            (sizes and times and sizes[0] * times[0] > MAX_REPEAT) or max(times, default=0) > 2**64
        ):
            raise SecurityError(f"a product of more than {MAX_REPEAT:,} elements")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, one that pads only up to MAX_REPEAT."""
        if getattr(function, "__name__", None) in PADDING:
            check_widths(*args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's rules, and nothing of a class: `dict.update(message, ...)` would get around them."""
        is_safe = super().is_safe_attribute(obj, attr, value) and attr not in ("format", "format_map")
        return is_safe and (not isinstance(obj, type) or attr == "fromkeys")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's own `format` and `format_map` in place of a text's; None for any other attribute."""
        text, name = getattr(value, "__self__", None), getattr(value, "__name__", None)
        if not isinstance(value, types.BuiltinMethodType) or not isinstance(text, str):
            return None
        formatter = CheckedFormatter(self)
        if name == "format":
            return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)
        return (lambda values: formatter.vformat(text, (), values)) if name == "format_map" else None


def _refuse(message: str) -> None:
    raise ChatTemplateError(f"the model's chat template refuses this conversation: {message}")


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A file's chat templates by name, as they stand there. The one without a name is "default", and comes first."""
    key = "tokenizer.chat_template"
    default = {"default": metadata[key]} if key in metadata else {}
    return default | {
        name.removeprefix(f"{key}."): source
        for name, source in metadata.items()
        if name.startswith(f"{key}.") and name.removeprefix(f"{key}.") not in default
    }


class ChatTemplate:
    """The Jinja2 template of a model file, rendered in a sandbox. Notebook 02, section 6."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        self.source = source
        self._constants = special_texts  # bos_token, eos_token, ...: templates use these names
        try:
            self._template = Sandbox().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the model's chat template, line {error.lineno}: {error.message}") from None
        except Exception as error:  # nesting too deep, numbers too long: whatever a hostile source provokes
            raise ChatTemplateError(f"the model's chat template can't be read: {_one_line(error)}") from None

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """The conversation as one text. ChatTemplateError if the template breaks, refuses, or tries to escape."""
        turns_left = [MAX_TURNS]
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        values |= {"tools": None, "documents": None}
        try:
            return self._template.render(self._constants, **values, range=lambda *args: CountedRange(turns_left, *args))
        except ChatTemplateError:
            raise
        except SecurityError as error:
            raise ChatTemplateError(f"the model's chat template was stopped: {error}") from None
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template failed: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


MAX_DEPTH = 32


class Mask:
    """Hides special-token texts inside messages while the template runs, one rare character for each.

    After rendering, every special text still in sight was written by the template itself. A part of a content that
    could complete a marker together with its neighbours is hidden as well. The stand-ins are ideographs that occur
    in neither messages nor template: printable, so that a template that prints a whole list does not escape them. JSON
    may write them as escapes, and does not change them otherwise.
    """

    def __init__(self, special_texts: Sequence[str], messages: Messages, template: str) -> None:
        texts = [template, *self._texts(messages)]
        used = set().union(*texts)
        free = (chr(c) for c in range(0x20000, 0x2A6D0) if chr(c) not in used)
        self._free = (c for c in free if not any(self._escape(c) in text for text in texts))
        self._specials = sorted(special_texts, key=len, reverse=True)
        self._covers: dict[str, str] = {}

    def cover(self, value: Any, is_content: bool = False) -> Any:
        """The same messages with every special text replaced by its stand-in."""
        if isinstance(value, str):
            for text in self._specials:
                value = value.replace(text, self._cover_of(text)) if text in value else value
            return self._cover_edges(value) if is_content else value
        if isinstance(value, Mapping):
            return {
                self.cover(key) if isinstance(key, str) else key: self.cover(item, key == "content")
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.cover(item, is_content) for item in value]
        return value

    def uncover(self, text: str) -> str:
        """Put the special texts back, now as ordinary text."""
        for hidden, cover in self._covers.items():
            text = text.replace(self._escape(cover), self._escape(hidden))
        return text.translate({ord(cover): hidden for hidden, cover in self._covers.items()})

    def _cover_of(self, text: str) -> str:
        if text not in self._covers:
            cover = next(self._free, None)
            if cover is None:
                raise ChatTemplateError(
                    "messages: they use every rare ideograph there is; allowed: all but a few dozen"
                )
            self._covers[text] = cover
        return self._covers[text]

    def _cover_edges(self, content: str) -> str:
        """Hide what could be a part of a marker, also where the template strips the white space around it."""
        core = content.strip()
        start = content.index(core)
        covered = content[:start] + self._cover_parts(core) + content[start + len(core) :]
        return self._cover_parts(covered)

    def _cover_parts(self, content: str) -> str:
        """Hide an end that a special text begins with, a beginning that one ends with, and the inside of one."""
        if content and any(content in text for text in self._specials):
            return self._cover_of(content)
        for text in self._specials:
            for n in range(len(text) - 1, 0, -1):
                if content.endswith(text[:n]):
                    content = content[: len(content) - n] + self._cover_of(text[:n])
                if content.startswith(text[-n:]):
                    content = self._cover_of(text[-n:]) + content[n:]
        return content

    @staticmethod
    def _escape(text: str) -> str:
        """The text in ASCII, as `tojson` writes it where it is told to."""
        return json.dumps(text)[1:-1]

    def _texts(self, value: Any, depth: int = 0) -> Iterator[str]:
        if depth > MAX_DEPTH:
            raise ChatTemplateError(f"messages: nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, str):
            yield value
        items = [*value, *value.values()] if isinstance(value, Mapping) else value
        for item in items if isinstance(items, (list, tuple)) else []:
            yield from self._texts(item, depth + 1)


def check_messages(messages: Any) -> Messages:
    """Messages as a list of {"role": str, "content": str}; ChatTemplateError says which one is not.

    One that calls tools may do without a content.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ChatTemplateError(f"messages: found {messages!r}; allowed: a list of one or more messages")
    for i, message in enumerate(messages):
        fields = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if fields[0] and fields[1:] == [None] and message.get("tool_calls"):
            fields.pop()
        if not all(isinstance(field, str) for field in fields):
            raise ChatTemplateError(f"messages[{i}]: found {message!r}; allowed: {{'role': str, 'content': str}}")
    return messages


def check_text(text: Any) -> None:
    """TokenizerError unless this is a str that has a UTF-8 form."""
    if not isinstance(text, str):
        raise TokenizerError(f"text: found {type(text).__name__}; allowed: str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"lone surrogate {text[error.start]!r} at {error.start}"
        raise TokenizerError(f"text: {found}; not a character") from None


def build_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], pre: str
) -> tokenizers.Tokenizer:
    """A byte-level BPE of the `tokenizers` library out of the file's own lists."""
    vocab = {text: i for i, text in enumerate(tokens)}
    bpe = models.BPE(vocab, read_merges(metadata, vocab), ignore_merges=pre in IGNORE_MERGES)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    always = [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens(always)  # found in any text; CONTROL tokens are cut out before, and only where wanted
    return tokenizer


class Tokenizer:
    """Text to ids and back, by the rules in a GGUF file's metadata. Notebook 02, section 5.

    tokens: the vocabulary; pre: name of the word splitting; bos_id, eos_id: int or None; add_bos, add_eos: whether
    `encode` adds them; eog_ids: every id that ends an answer; special_ids: text -> id of special tokens.
    Warns of a vocabulary that lacks bytes of ordinary text, and once when a text loses a byte.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.tokens, types = read_vocab(metadata)
        self.pre = self._pre_name(metadata)
        self.bos_id = special_id(metadata, "bos", len(self.tokens))
        self.eos_id = special_id(metadata, "eos", len(self.tokens))
        self.add_bos = flag(metadata, "add_bos_token", self.pre in IGNORE_MERGES)
        self.add_eos = flag(metadata, "add_eos_token", False)
        if (self.add_bos and self.bos_id is None) or (self.add_eos and self.eos_id is None):
            raise TokenizerError("tokenizer.ggml.add_bos_token / add_eos_token: set, but the file names no such token")
        self.eog_ids = end_of_generation(metadata, self.tokens, types)
        self.special_ids = {t: i for i, t in enumerate(self.tokens) if t and types[i] in (CONTROL, UNKNOWN)}
        longest_first = sorted(map(re.escape, self.special_ids), key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(longest_first) or '(?!)'})")  # (?!) matches nothing
        self._bpe = build_bpe(metadata, self.tokens, types, self.pre)
        self._bytes = [token_bytes(t, kind) for t, kind in zip(self.tokens, types, strict=True)]
        self._lacking = lacking_bytes(self.tokens)
        if lost := bytes(ORDINARY_BYTES.intersection(self._lacking)):
            warnings.warn(f"the vocabulary lacks bytes of ordinary text: {shown_bytes(lost)}", stacklevel=2)
        self._templates = chat_templates(metadata)

    def encode(self, text: str, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Ids of a text. `parse_special`: a special token's text becomes that token, else it is ordinary text.

        `add_special`: put BOS in front where the file asks for it and the text does not already begin with it (EOS
        at the end likewise). A byte that the vocabulary lacks is dropped, as in llama.cpp and transformers.
        """
        check_text(text)
        ids = self._encode_pieces(text) if parse_special else self._encode_text(text)
        return self._with_bos_and_eos(ids) if add_special else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. TokenizerError for an id out of range."""
        return b"".join(self.token_bytes(i, skip_special) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes of one token; none for a special token unless `skip_special` is off."""
        if not 0 <= token_id < len(self.tokens):
            raise TokenizerError(f"token id: found {token_id}; allowed: 0 to {len(self.tokens) - 1}")
        hidden = skip_special and self.tokens[token_id] in self.special_ids
        return b"" if hidden else self._bytes[token_id]

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it."""
        return self.chat_template.render(check_messages(messages), add_generation_prompt)

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Ids of a conversation. Special tokens come from the template alone: what people typed is ordinary text.

        `parse_special` lifts that, for those who want to write special tokens in a message.
        """
        if parse_special:
            return self.encode(self.render_chat(messages, add_generation_prompt))
        mask = Mask(list(self.special_ids), check_messages(messages), self.chat_template.source)
        rendered = self.render_chat(mask.cover(messages), add_generation_prompt)
        check_text(rendered)
        return self._with_bos_and_eos(self._encode_pieces(rendered, mask.uncover))

    def _encode_pieces(self, text: str, uncover: Callable[[str], str] = str) -> list[int]:
        """Special texts become their tokens; what lies between is uncovered and encoded as ordinary text."""
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            special = self.special_ids.get(piece)
            ids += self._encode_text(uncover(piece)) if special is None else [special]
        return ids

    def _encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text; a warning if bytes are dropped, for the first such text."""
        ids: list[int] = self._bpe.encode(text).ids
        data = text.encode() if self._lacking else b""
        found = set(data).intersection(self._lacking)
        if found and (count := len(data) - sum(len(self._bytes[i]) for i in ids)):
            said = f"{count} of {len(data)} bytes of this text have no token and are dropped: {shown_bytes(found)}"
            warnings.warn(f"{said}. This is said once", stacklevel=4)
            self._lacking = b""
        return ids

    def _with_bos_and_eos(self, ids: list[int]) -> list[int]:
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The file's template, read when it is first needed; ChatTemplateError if there is none, or a broken one."""
        source = self._templates.get("default")
        if source is None:
            others = ", ".join(map(repr, self._templates))
            found = f"the file has no default one, only {others}" if others else "the file has none"
            raise ChatTemplateError(f"tokenizer.chat_template: {found}; send plain text instead of a chat")
        if not isinstance(source, str):
            raise ChatTemplateError(f"tokenizer.chat_template: found {source!r}; allowed: a text")
        constants = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        return ChatTemplate(source, {name: "" if i is None else self.tokens[i] for name, i in constants.items()})

    @staticmethod
    def _pre_name(metadata: Mapping[str, Any]) -> str:
        if "tokenizer.ggml.pre" not in metadata:
            warnings.warn("tokenizer.ggml.pre is missing: using 'default'; the text may be cut wrongly", stacklevel=3)
        return str(metadata.get("tokenizer.ggml.pre", "default"))


class IncrementalDecoder:
    """Ids in, text out, never half a character. Notebook 02, section 7.

    `push` returns what has become certain, often "" or several characters. `finish` shows what is left of an
    unfinished character as U+FFFD, so that the pieces join to exactly what `Tokenizer.decode` gives.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip_special))

    def finish(self) -> str:
        """The rest: "" or U+FFFD."""
        return self._utf8.decode(b"", final=True)
