"""Text to ids and back: against recorded ids of two other programs, the library's own splittings, and broken files."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from rvllm.gguf import GGUFFile
from rvllm.tokenizer import (
    BYTE,
    BYTE_OF,
    CONTROL,
    IGNORE_MERGES,
    NORMAL,
    SPLIT_OF,
    UNKNOWN,
    USER_DEFINED,
    IncrementalDecoder,
    Tokenizer,
    TokenizerError,
    byte_alphabet,
    pre_tokenizer,
    read_merges,
)
from tests import toy

ORACLE = json.loads((Path(__file__).parent / "data/oracle/tokenization.json").read_text(encoding="utf-8"))
CASES = [case for case in ORACLE["cases"] if case["text"] is not None]
MISSING = bytes.fromhex("".join(ORACLE["bytes_without_a_token"]))
END = "<|im_end|>"

characters = st.characters(exclude_categories=["Cs"])
nasty = st.sampled_from(["a", " ", "  ", "\n", "\r\n", "12", "'s", "é", "👩‍🚀", "中", "\x00", "\ufffd", "<|", "|>"])
texts = st.lists(st.text(characters, max_size=8) | nasty | st.sampled_from(toy.SPECIAL), max_size=8).map("".join)


def tokenizer(**changes) -> Tokenizer:
    return Tokenizer(toy.metadata(**changes))


def extended(*extra: tuple[str, int], **changes) -> Tokenizer:
    """The toy with tokens of given types behind its 300."""
    tokens, _ = toy.vocabulary()
    types = [CONTROL] * 3 + [NORMAL] * 297
    return tokenizer(
        tokenizer__ggml__tokens=[*tokens, *(text for text, _ in extra)],
        tokenizer__ggml__token_type=[*types, *(kind for _, kind in extra)],
        **changes,
    )


def pieces(name: str, text: str) -> list[str]:
    """A text's words as readable text."""
    words = [word for word, _ in pre_tokenizer(name).pre_tokenize_str(text)]
    return [bytes(BYTE_OF[c] for c in word).decode() for word in words]


def stream(tok: Tokenizer, ids, skip_special=True) -> list[str]:
    decoder = IncrementalDecoder(tok, skip_special)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@pytest.fixture(scope="module")
def smol(model_path) -> Tokenizer:
    return Tokenizer(GGUFFile(model_path).metadata)


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return tokenizer()


# Recorded ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*have no token and are dropped")
@pytest.mark.real_model
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['n']}-{case['group']}")
def test_ids_equal_the_recorded_ones(smol, case):
    """C21, C29 among 175 texts; where the two programs differ (a byte without a token), Hugging Face's ids count."""
    for parse_special, field in ((True, "ids"), (False, "ids_no_special")):
        ids = smol.encode(case["text"], parse_special)
        assert ids == case.get(f"hf_{field}", case[field])
        kept = bytes(b for b in case["text"].encode() if b not in MISSING)
        assert smol.decode(ids, skip_special=False) == kept.decode("utf-8", "replace")
        assert (kept == case["text"].encode()) == case["detok_equals_input"]


def test_the_recording_covers_both_kinds_of_agreement():
    agree = [(c["hf_agrees"], c["hf_agrees_no_special"]) for c in CASES]
    assert (len(CASES), agree.count((True, True)), agree.count((False, False))) == (175, 172, 3)


@pytest.mark.real_model
def test_facts_of_the_default_model(smol):
    """C24: SmolLM2 adds nothing to a prompt. C34: its end tokens come from the file."""
    assert (smol.pre, smol.bos_id, smol.eos_id, smol.add_bos, smol.add_eos) == ("smollm", 1, 2, False, False)
    assert smol.eog_ids == {0, 2}
    assert smol.encode("hi") == smol.encode("hi", add_special=False)
    assert sorted(smol.special_ids.values()) == list(range(17))
    covered = {token[0] for token in map(smol.token_bytes, range(17, len(smol.tokens))) if len(token) == 1}
    assert covered == set(range(256)) - set(MISSING)


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("Total: 1234 items", ["Total", ":", " ", "1", "2", "3", "4", " items"]),
        (" 007", [" ", "0", "0", "7"]),
        ("x2y", ["x", "2", "y"]),
        ("3.14", ["3", ".", "1", "4"]),
    ],
)
def test_c21_smollm_cuts_every_digit_alone(smol, text, split):
    assert [smol.decode([i]) for i in smol.encode(text)] == split


@pytest.mark.real_model
@pytest.mark.parametrize("text", ["２０２４", "½", "Ⅷ", "x²"])
def test_c21_every_kind_of_number_is_cut(smol, text):
    assert smol.encode(text) == [i for character in text for i in smol.encode(character)]


@pytest.mark.real_model
@pytest.mark.parametrize(
    "parts", [["a ", END, " b"], ["a", END, "b"], [" ", END], [END, END], ["<|im_end"], ["<|IM_END|>"], ["<", END, ">"]]
)
def test_c29_words_beside_a_special_token_keep_their_spaces(smol, parts):
    expected = [i for part in parts for i in ([2] if part == END else smol.encode(part, parse_special=False))]
    assert smol.encode("".join(parts)) == expected
    assert 2 not in smol.encode("".join(parts), parse_special=False)


# Splitting into words -------------------------------------------------------------------------------------------------

SAME = {
    "smollm": "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "gpt-2": "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code mpt olmo jais trillion "
    "gigachat modern-bert exaone4 roberta-bpe",
    "llama-bpe": "llama-bpe llama3 llama-v3 falcon3 pixtral lfm2 midm-2.0 dbrx smaug-bpe chatglm-bpe glm4",
    "qwen2": "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2",
    "default": "default",
}
SPLITS = {
    "Total: 1234 items": {
        "smollm": ["Total", ":", " ", "1", "2", "3", "4", " items"],
        "gpt-2": ["Total", ":", " 1234", " items"],
        "llama-bpe": ["Total", ":", " ", "123", "4", " items"],
        "qwen2": ["Total", ":", " ", "1", "2", "3", "4", " items"],
        "default": ["Total", ":", " ", "123", "4", " items"],
    },
    "I'LL, don't": {
        "smollm": ["I", "'", "LL", ",", " don", "'t"],
        "gpt-2": ["I", "'", "LL", ",", " don", "'t"],
        "llama-bpe": ["I", "'LL", ",", " don", "'t"],
        "qwen2": ["I", "'LL", ",", " don", "'t"],
        "default": ["I", "'", "LL", ",", " don", "'", "t"],
    },
    "a.b  c": {
        "smollm": ["a", ".", "b", " ", " c"],
        "gpt-2": ["a", ".", "b", " ", " c"],
        "llama-bpe": ["a", ".b", " ", " c"],
        "qwen2": ["a", ".b", " ", " c"],
        "default": ["a", ".", "b", " ", " c"],
    },
    "x!!\n\ny \n z\n": {
        "smollm": ["x", "!!", "\n", "\n", "y", " \n", " z", "\n"],
        "gpt-2": ["x", "!!", "\n", "\n", "y", " \n", " z", "\n"],
        "llama-bpe": ["x", "!!\n\n", "y", " \n", " z", "\n"],
        "qwen2": ["x", "!!\n\n", "y", " \n", " z", "\n"],
        "default": ["x", "!!", "\n", "\n", "y", " \n", " z", "\n"],
    },
    "$5+12345678": {
        "smollm": ["$", "5", "+", *"12345678"],
        "gpt-2": ["$", "5", "+", "12345678"],
        "llama-bpe": ["$", "5", "+", "123", "456", "78"],
        "qwen2": ["$", "5", "+", *"12345678"],
        "default": ["$", "5", "+", "123", "456", "78"],
    },
}


@pytest.mark.parametrize("text", SPLITS)
@pytest.mark.parametrize("name", SAME)
def test_c22_known_splits(name, text):
    for alias in SAME[name].split():
        assert pieces(alias, text) == SPLITS[text][name]


def test_c22_the_table_of_names_is_complete():
    assert set(SPLIT_OF) == {alias for names in SAME.values() for alias in names.split()}


@given(texts)
@example("  1½ \u2028\u00a0x'S 's\x1c")
def test_gpt2_and_smollm_split_like_the_library(text):
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    assert pre_tokenizer("gpt-2").pre_tokenize_str(text) == own.pre_tokenize_str(text)
    both = pre_tokenizers.Sequence([digits, own])
    assert pre_tokenizer("smollm").pre_tokenize_str(text) == both.pre_tokenize_str(text)


@given(texts, st.sampled_from(sorted(SAME)))
def test_no_splitting_loses_text(text, name):
    words = [word for word, _ in pre_tokenizer(name).pre_tokenize_str(text)]
    assert bytes(BYTE_OF[c] for c in "".join(words)) == text.encode()


@pytest.mark.parametrize("name", ["not-a-real-name", "", "GPT-2", 5, ["gpt-2"]])
def test_c22_an_unknown_name_is_an_error_with_the_known_ones(name):
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre.*gpt-2.*llama-bpe.*qwen2.*smollm"):
        tokenizer(tokenizer__ggml__pre=name)


@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("value", [0, 1, "false", "0", "", [False], np.array([False]), 0.0])
def test_c100_a_flag_that_is_no_flag(key, value):
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key}: found .*; allowed: true or false"):
        tokenizer(**{f"tokenizer__ggml__{key}": value})


@pytest.mark.parametrize("value", [["gpt2", "x"], np.array(["gpt2", "gpt2"]), np.array(["gpt2"]), np.array([]), 2])
def test_c100_a_kind_that_is_no_text(value):
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model: found"):
        tokenizer(tokenizer__ggml__model=value)


@pytest.mark.parametrize("types", [[True] * 300, [1.0] * 300, np.ones(300), np.ones(300, bool), ["1"] * 300])
def test_c100_token_types_that_are_no_integers(types):
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.token_type: found"):
        tokenizer(tokenizer__ggml__token_type=types)


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
@pytest.mark.parametrize("value", [True, 1.0, "1", [1], np.array([1]), -1, 300])
def test_c100_ids_that_are_no_ids(name, value):
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{name}_token_id: found .*; allowed: 0 to 299"):
        tokenizer(**{f"tokenizer__ggml__{name}_token_id": value})


def test_c100_keys_that_are_not_read_may_hold_anything():
    other = {"padding_token_id": -1, "unknown_token_id": -1, "add_space_prefix": 5, "a_new_key": [1]}
    changed = tokenizer(**{f"tokenizer__ggml__{key}": value for key, value in other.items()})
    assert changed.encode("abc<|im_end|>") == tokenizer().encode("abc<|im_end|>")


def test_c22_a_missing_name_warns():
    with pytest.warns(UserWarning, match="tokenizer.ggml.pre is missing"):
        assert tokenizer(tokenizer__ggml__pre=None).pre == "default"


@pytest.mark.parametrize("pre", sorted(SPLIT_OF))
def test_c23_whole_words_that_merges_cannot_build(pre):
    whole = extended(("Ġabc", NORMAL), tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=False)
    assert (whole.encode(" abc") == [300]) == (pre in IGNORE_MERGES)
    assert whole.decode(whole.encode(" abc")) == " abc"
    lookup_first = ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0"]
    assert (pre in IGNORE_MERGES) == (pre in lookup_first)


# BOS, EOS, end of generation ------------------------------------------------------------------------------------------


def test_c24_bos_is_added_once():
    bos = tokenizer(tokenizer__ggml__add_bos_token=True)
    assert bos.encode("b") == bos.encode("<|im_start|>b") == [1, *bos.encode("b", add_special=False)]
    assert bos.encode("") == [1]
    assert bos.encode("<|im_start|>b", parse_special=False)[0] == 1
    assert bos.encode("<|im_start|>b", parse_special=False).count(1) == 1
    assert bos.decode(bos.encode("<|im_start|>b", parse_special=False)) == "<|im_start|>b"


def test_c26_a_bos_that_was_typed_stays(tok):
    assert tok.encode("<|im_start|>b") == [1, *tok.encode("b")]
    assert tok.decode(tok.encode("<|im_start|>b", parse_special=False)) == "<|im_start|>b"


def test_eos_is_added_once():
    eos = tokenizer(tokenizer__ggml__add_eos_token=True)
    assert eos.encode("b") == [*eos.encode("b", add_special=False), 2]
    assert eos.encode("b<|im_end|>") == eos.encode("b")


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_bos_is_the_default_of_the_llama3_family(pre):
    assert tokenizer(tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=None).add_bos == (pre == "llama-bpe")


@pytest.mark.parametrize("which", ["bos", "eos"])
def test_adding_a_token_that_the_file_does_not_name(which):
    changes = {f"tokenizer__ggml__add_{which}_token": True, f"tokenizer__ggml__{which}_token_id": None}
    with pytest.raises(TokenizerError, match="names no such token"):
        tokenizer(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer__ggml__eos_token_id": 7}, {7, 0, 2}),
        ({"tokenizer__ggml__eos_token_id": None}, {0, 2}),
        ({"tokenizer__ggml__eot_token_id": 8, "tokenizer__ggml__eom_token_id": 9}, {0, 2, 8, 9}),
        ({"tokenizer__ggml__eos_token_id": 7, "tokenizer__ggml__token_type": [NORMAL] * 300}, {7}),
        ({"tokenizer__ggml__eos_token_id": None, "tokenizer__ggml__token_type": [NORMAL] * 300}, set()),
    ],
)
def test_c33_c34_end_tokens_come_from_the_file(changes, expected):
    """A key of the file, or a well-known text of a special token; never a constant."""
    assert tokenizer(**changes).eog_ids == expected


# Kinds of tokens ------------------------------------------------------------------------------------------------------


def test_user_defined_tokens_are_found_always_and_shown():
    tok = extended(("<think>", USER_DEFINED), ("<unk>", UNKNOWN))
    assert tok.encode("a<think>b", False) == tok.encode("a<think>b", True)
    assert 300 in tok.encode("a<think>b", False)
    assert (301 in tok.encode("<unk>", True), 301 in tok.encode("<unk>", False)) == (True, False)
    assert (tok.decode([300, 301]), tok.decode([300, 301], skip_special=False)) == ("<think>", "<think><unk>")


def test_user_defined_token_inside_special_text_that_is_not_parsed():
    tok = extended(("<|x<u>|>", CONTROL), ("<u>", USER_DEFINED))
    assert tok.encode("<|x<u>|>", True) == [300]
    assert tok.encode("<|x<u>|>", False) == [*tok.encode("<|x", False), 301, *tok.encode("|>", False)]


def test_the_longest_special_token_wins():
    tok = extended(("<s", CONTROL), ("<s>", CONTROL), ("<s>>", CONTROL))
    assert tok.encode("<s>>") == [302]
    assert tok.encode("<s>") == [301]
    assert tok.encode("<s") == [300]


def test_byte_tokens_and_odd_letters_decode():
    tok = extended(("<0xE4>", BYTE), ("<0xb8>", BYTE), ("<0xAD>", BYTE), ("<0xZZ>", BYTE), ("中", NORMAL))
    assert tok.decode([300, 301, 302]) == "中"
    assert tok.decode([303, 304]) == "<0xZZ>中"


def test_an_empty_special_token_does_no_harm():
    """Some files pad their vocabulary; text "" must not be found between all characters."""
    tok = extended(("", CONTROL))
    assert tok.encode("ab") == tokenizer().encode("ab")
    plain = tokenizer().encode_chat([{"role": "user", "content": "ab"}])
    assert tok.encode_chat([{"role": "user", "content": "ab"}]) == plain


def lacking(*missing: str | bytes) -> Tokenizer:
    """A toy tokenizer without these bytes: their tokens are taken by others, and their merges are gone."""
    characters = {
        byte_alphabet()[byte] for item in missing for byte in (item.encode() if isinstance(item, str) else item)
    }
    tokens, merges = toy.vocabulary()
    tokens = [f"<unused {i}>" if i > 2 and characters & set(t) else t for i, t in enumerate(tokens)]
    return tokenizer(
        tokenizer__ggml__tokens=tokens, tokenizer__ggml__merges=[m for m in merges if not characters & set(m)]
    )


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (b"q", "71 'q'"),
        (b" ", "20"),
        (b"\n", "0a"),
        (b"\xf0", "f0"),
        (b"\x80\xc2", "80, c2"),
        (bytes(range(256)), "09, 0a, 0d, 20, 21 '!', .*, ... .209 of 256."),
    ],
)
def test_a_vocabulary_that_lacks_ordinary_bytes_is_told_at_load(missing, told):
    with pytest.warns(UserWarning, match=f"the vocabulary lacks bytes of ordinary text: {told}$") as caught:
        lacking(missing)
    assert len(caught) == 1


@pytest.mark.parametrize("missing", [b"", b"\x00\x04\x7f", b"\xc0\xc1\xf5\xff", b"\xf1\xf2\xf3\xf4"])
def test_a_vocabulary_that_lacks_only_rare_bytes_is_not_told_at_load(missing):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lacking(missing).encode("abc é 世 🚀\t\r\n~") == tokenizer().encode("abc é 世 🚀\t\r\n~")


@pytest.mark.real_model
def test_the_default_model_loads_without_a_word(model_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tok = Tokenizer(GGUFFile(model_path).metadata)
        tok.encode("all that is usual: é 世 🚀 \t\n<|im_end|>")
    with pytest.warns(UserWarning, match=r"1 of 3 bytes of this text have no token and are dropped: 04\."):
        assert tok.decode(tok.encode("-\x04-")) == "--"


@pytest.mark.parametrize(
    "encode",
    [
        lambda tok, text: tok.encode(text),
        lambda tok, text: tok.encode(text, parse_special=False),
        lambda tok, text: tok.encode_chat([{"role": "user", "content": text}]),
    ],
    ids=["encode", "plain", "chat"],
)
def test_dropped_bytes_are_told_once(encode):
    tok = lacking(b"\x04\xf1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode(tok, "nothing lost")
    with pytest.warns(
        UserWarning, match=r"2 of \d+ bytes of this text have no token and are dropped: 04\. .*once"
    ) as told:
        first = encode(tok, "A\x04B\x04")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encode(tok, "A\x04B\x04") == first == encode(tok, "AB")


def test_a_token_that_holds_a_byte_loses_nothing():
    """The byte alone has no token, yet nothing is dropped where a special or a user-defined token has it."""
    tokens, merges = toy.vocabulary()
    tokens[tokens.index(byte_alphabet()[4])] = "<\x04>"
    types = [CONTROL] * 3 + [NORMAL] * 297
    types[tokens.index("<\x04>")] = USER_DEFINED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tok = tokenizer(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types)
        assert tok.decode(tok.encode("a<\x04>b<|im_end|>"), skip_special=False) == "a<\x04>b<|im_end|>"
    with pytest.warns(UserWarning, match="1 of 3 bytes"):
        assert tok.decode(tok.encode("a\x04b")) == "ab"


# Round trips ----------------------------------------------------------------------------------------------------------


@given(texts, st.booleans(), st.sampled_from(["smollm", "gpt-2", "llama-bpe", "qwen2", "default"]))
@settings(deadline=None)
def test_c30_text_comes_back(text, parse_special, pre):
    tok = TOYS[pre]
    ids = tok.encode(text, parse_special)
    assert tok.decode(ids, skip_special=False) == text
    shown = tok.decode(ids)
    hidden = text
    for special in toy.SPECIAL if parse_special else ():
        hidden = hidden.replace(special, "\ue000")
    assert shown == hidden.replace("\ue000", "") or "\ue000" in text


@given(texts)
@settings(deadline=None)
def test_c30_pieces_join_and_hold_no_half_character(text):
    tok = TOYS["smollm"]
    parts = stream(tok, tok.encode(text), skip_special=False)
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, 299) | st.integers(127, 258), max_size=30), st.booleans())
def test_c30_pieces_of_random_ids_join_to_the_decode(ids, skip_special):
    tok = TOYS["smollm"]
    assert "".join(stream(tok, ids, skip_special)) == tok.decode(ids, skip_special)


@pytest.mark.real_model
@given(texts)
@settings(deadline=None, max_examples=50)
def test_real_vocabulary_round_trip(smol, text):
    ids = smol.encode(text)
    kept = bytes(b for b in text.encode() if b not in MISSING).decode("utf-8", "replace")
    assert smol.decode(ids, skip_special=False) == "".join(stream(smol, ids, skip_special=False)) == kept


@pytest.mark.real_model
@pytest.mark.parametrize("text", ["ok 👩‍🚀 né 中文", "👩‍🚀" * 5, "🇩🇪 ﷽ \U0010ffff"])
def test_c30_emoji_in_streams(smol, text):
    """Cut anywhere, whole characters come at once, and the unfinished one is shown as one U+FFFD by `finish` alone."""
    ids = smol.encode(text)
    assert len(ids) > len(text.split())
    for cut in range(len(ids) + 1):
        *parts, last = stream(smol, ids[:cut])
        data = b"".join(smol.token_bytes(i) for i in ids[:cut])
        assert "".join(parts) == data.decode("utf-8", "ignore")
        assert "".join(parts) + last == smol.decode(ids[:cut]) == data.decode("utf-8", "replace")
        assert last in ("", "\ufffd")


def test_c30_a_character_comes_with_its_last_byte(tok):
    ids = tok.encode("é€😀")
    assert stream(tok, ids) == ["", "é", "", "", "€", "", "", "", "😀", ""]
    assert stream(tok, [*ids[-4:-1], *tok.encode("a")])[-2] == "\ufffda"


@pytest.mark.parametrize("token_id", [-1, 300, 10**9, 10**400])
def test_ids_out_of_range(tok, token_id):
    with pytest.raises(TokenizerError, match=r"token id: found .*allowed: 0 to 299"):
        tok.decode([token_id])
    with pytest.raises(TokenizerError, match="token id"):
        IncrementalDecoder(tok).push(token_id)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc", b"bytes", None, 5, ["a"]])
def test_what_is_no_text_is_refused(tok, text):
    with pytest.raises(TokenizerError, match=r"text: "):
        tok.encode(text)


def test_numpy_ids_decode(tok):
    ids = tok.encode("hello")
    assert tok.decode(np.array(ids, np.int32)) == "hello"
    assert tok.decode(iter(ids)) == "hello"


def test_a_long_text_takes_linear_time(tok):
    text = "ab" * 50_000 + " " * 50_000 + "!" * 50_000
    assert tok.decode(tok.encode(text)) == text


# Broken files ---------------------------------------------------------------------------------------------------------

TOKENS, MERGES = toy.vocabulary()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "found None; allowed: 'gpt2'"),
        ("model", "llama", "found 'llama'"),
        ("tokens", None, "found no list of strings"),
        ("tokens", [], "found no list of strings"),
        ("tokens", ["a", 5], "found no list of strings"),
        ("tokens", "abc", "found no list of strings"),
        ("tokens", [*TOKENS[:-1], TOKENS[0]], r"'<\|endoftext\|>' twice"),
        ("token_type", [1], "one entry for each of the 300"),
        ("token_type", [1] * 301, "one entry for each"),
        ("token_type", 1, "one entry for each"),
        ("token_type", "x" * 300, "one entry for each"),
        ("token_type", ["x"] * 300, "x"),
        ("token_type", [float("nan")] * 300, "nan"),
        ("token_type", np.ones(299, np.int32), "one entry for each"),
        ("scores", [1.0], "one entry for each"),
        ("scores", {}, "one entry for each"),
        ("merges", "a b", r"\[0\]"),
        ("merges", [5], r"\[0\]: found 5"),
        ("merges", ["a b", "ab"], r"\[1\]: found 'ab'"),
        ("merges", [""], r"\[0\]: found ''"),
        ("merges", [" "], r"\[0\]: found ' '"),
        ("merges", ["a "], r"\[0\]: found 'a '"),
        ("merges", ["a b c"], r"\[0\]: found 'a b c'"),
        ("merges", ["z z"], r"\[0\]: found 'z z'; both parts and their union must be tokens"),
        ("merges", ["中 a"], r"\[0\]: found '中 a'"),
        ("eos_token_id", 300, "found 300; allowed: 0 to 299"),
        ("eos_token_id", -1, "found -1"),
        ("bos_token_id", 2.0, "found 2.0"),
        ("bos_token_id", True, "found True"),
        ("eot_token_id", "2", "found '2'"),
        ("eom_token_id", 2**32 - 1, "found 4294967295"),
    ],
)
def test_broken_vocabularies_are_named(key, value, message):
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key}.*{message}"):
        tokenizer(**{f"tokenizer__ggml__{key}": value})


def test_merges_are_cut_at_the_first_space_after_the_first_character():
    vocab = {text: i for i, text in enumerate(["a", "b", " ", " a", "ab", "  "])}
    lines = {"tokenizer.ggml.merges": ["a b", "  a", "   "]}
    assert read_merges(lines, vocab) == [("a", "b"), (" ", "a"), (" ", " ")]


def test_a_vocabulary_without_merges_types_and_scores():
    tok = tokenizer(tokenizer__ggml__merges=None, tokenizer__ggml__token_type=None)
    assert tok.decode(tok.encode("hello")) == "hello"
    assert len(tok.encode("hello")) == 5
    assert tok.special_ids == {}


def test_byte_alphabet_is_one_to_one_and_printable():
    alphabet = byte_alphabet()
    assert sorted(alphabet) == list(range(256))
    assert len(set(alphabet.values())) == 256
    assert all(c.isprintable() and not c.isspace() for c in alphabet.values())
    assert (alphabet[32], alphabet[10], alphabet[0], alphabet[ord("a")]) == ("Ġ", "Ċ", "Ā", "a")


TOYS = {name: tokenizer(tokenizer__ggml__pre=name, tokenizer__ggml__add_bos_token=False) for name in SAME}
