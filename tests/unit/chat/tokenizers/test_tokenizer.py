from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from quire.chat.tokenizers import bpe
from quire.chat.tokenizers.pretokenizers import PRE_TOKENIZERS
from quire.chat.tokenizers.tokenizer import Splitter, Tokenizer
from quire.observe.errors import BadModelFile, BadRequest, Unsupported
from tests.unit.chat.toys import byte_level, sentencepiece

MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w")
PIECES = {
    "▁": -1.0,
    "a": -2.0,
    "b": -3.0,
    "aa": -4.0,
    "aaa": -4.5,
    "▁a": -5.0,
    "ab": -6.0,
    "s": -7.0,
    "/": -7.5,
    "</": -8.0,
    "s>": -9.0,
    ">": -9.5,
    "<": -9.7,
}


def plain(tokenizer: Tokenizer, text: str, **kwargs: Any) -> list[int]:
    return tokenizer.encode(text, **{"add_special": False, "parse_special": False, **kwargs})


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids]


def test_merges_apply_in_order():
    tokenizer = Tokenizer.from_gguf(byte_level(MERGES))
    assert texts(tokenizer, plain(tokenizer, "hello world")) == ["hello", " w", "o", "r", "l", "d"]


def test_special_tokens_only_when_asked():
    tokenizer = Tokenizer.from_gguf(byte_level(MERGES))
    text = "<|im_start|>hello<|im_end|>"
    assert plain(tokenizer, text, parse_special=True) == [0, *plain(tokenizer, "hello"), 1]
    assert not {0, 1, 2} & set(plain(tokenizer, text))
    assert tokenizer.decode(plain(tokenizer, text)) == text
    assert tokenizer.decode([0, *plain(tokenizer, "hello"), 1], skip_special=True) == "hello"
    assert tokenizer.is_special(0) and not tokenizer.is_special(5)


def test_merges_never_make_a_control_token():
    data = byte_level(("e n", "en d"))
    at = data["tokenizer.ggml.tokens"].index("end")
    data["tokenizer.ggml.token_type"][at] = 3
    tokenizer = Tokenizer.from_gguf(data)
    assert texts(tokenizer, plain(tokenizer, "end")) == ["en", "d"]
    assert plain(tokenizer, "end", parse_special=True) == [at]
    whole = Tokenizer.from_gguf(data | {"tokenizer.ggml.pre": "llama3"})  # where a word that is a token needs no merge
    assert at not in plain(whole, "end")


def test_the_order_of_the_vocabulary_does_not_matter():
    data = byte_level(MERGES)
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    swapped = data | {"tokenizer.ggml.tokens": tokens[:3] + tokens[:2:-1], "tokenizer.ggml.token_type": types}
    there, here = Tokenizer.from_gguf(data), Tokenizer.from_gguf(swapped)
    assert texts(here, plain(here, "hello world")) == texts(there, plain(there, "hello world"))


def test_sentencepiece_pieces_never_make_a_control_token():
    tokenizer = Tokenizer.from_gguf(sentencepiece({**PIECES}))
    assert 2 not in plain(tokenizer, "</s>")
    assert texts(tokenizer, plain(tokenizer, "</s>")) == [" ", "</", "s>"]
    assert plain(tokenizer, "</s>", parse_special=True) == [2]


def test_sentencepiece_pieces_never_make_a_byte_token():
    pieces = {p: -float(i) for i, p in enumerate(("<", "0", "x", "A", ">", "<0", "<0x", "0A", "0A>"))}
    tokenizer = Tokenizer.from_gguf(sentencepiece(pieces, add_space_prefix=False))
    assert texts(tokenizer, plain(tokenizer, "<0x0A>")) == ["<0x", "0A>"]


def test_user_defined_tokens_are_cut_out_first():
    tokenizer = Tokenizer.from_gguf(byte_level(MERGES, user_defined=("    ", "  ", "[TOOL]")))
    assert texts(tokenizer, plain(tokenizer, "hello      [TOOL]x")) == ["hello", "    ", "  ", "[TOOL]", "x"]


def test_begin_and_end_tokens():
    data = byte_level(MERGES) | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer.encode("hello", add_special=True, parse_special=False) == [0, *plain(tokenizer, "hello"), 1]
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.bos_id) == (True, True, 0)
    assert tokenizer.eos_ids == (1, 2)


def test_sentencepiece_prefers_the_best_score_and_falls_back_to_bytes():
    tokenizer = Tokenizer.from_gguf(sentencepiece(PIECES))
    assert texts(tokenizer, plain(tokenizer, "aaab")) == [" ", "aaa", "b"]
    assert tokenizer.add_bos and tokenizer.bos_id == 1 and tokenizer.eos_ids == (2,)
    ids = plain(tokenizer, "aé")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "aé"
    assert tokenizer.decode(ids, at_start=False) == " aé"


def test_sentencepiece_without_space_prefix():
    tokenizer = Tokenizer.from_gguf(sentencepiece(PIECES, add_space_prefix=False))
    assert texts(tokenizer, plain(tokenizer, "aa")) == ["aa"]
    assert tokenizer.decode(plain(tokenizer, " a")) == " a"


def naive_spm(pieces: dict[str, float], text: str) -> list[str]:
    """SentencePiece's rule, plainly: join the best-scored neighbours, the leftmost of equals, until none is left."""
    parts = list(text)
    while True:
        found = [(-pieces[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(st.text("ab ", max_size=24))
def test_sentencepiece_equals_the_naive_rule(text: str):
    pieces = {
        "▁": -1.0,
        "a": -2.0,
        "b": -3.0,
        "ab": -4.0,
        "ba": -4.1,
        "aa": -4.2,
        "▁a": -5.0,
        "▁ab": -5.5,
        "aab": -6.0,
        "▁▁": -3.5,
    }
    tokenizer = Tokenizer.from_gguf(sentencepiece(pieces, add_space_prefix=False))
    got = [tokenizer._vocab.tokens[i] for i in plain(tokenizer, text)]
    assert got == naive_spm(pieces, text.replace(" ", "▁"))


@given(st.text(max_size=40))
def test_any_text_survives(text: str):
    for tokenizer in TOKENIZERS:
        assert tokenizer.decode(plain(tokenizer, text)) == text
        parsed = tokenizer.encode(text, add_special=False, parse_special=True)
        assert tokenizer.decode(parsed) == text


TOKENIZERS = [
    Tokenizer.from_gguf(byte_level(MERGES, pre=name)) for name in ("gpt-2", "llama3", "deepseek-llm", "gpt-4o")
]


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(Unsupported, match=r"'mystery'.*supported:.*llama-bpe.*smollm"):
        Tokenizer.from_gguf(byte_level(pre="mystery"))
    for model in ("rwkv", "plamo2", "gemma4", "nonsense"):
        with pytest.raises(Unsupported, match=model):
            Tokenizer.from_gguf(byte_level() | {"tokenizer.ggml.model": model})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bos_token_id": 10**6}, r"bos_token_id is 1000000: the vocabulary has"),
        ({"eos_token_id": -1}, r"eos_token_id is -1"),
        ({"eos_token_id": "2"}, r"eos_token_id is a str"),
        ({"eot_token_id": 99999}, r"eot_token_id is 99999"),
        ({"merges": ["h e", "q zzz"]}, r"merges\[1\] is 'q zzz': no token is 'zzz'"),
        ({"merges": ["he"]}, r"merges\[0\] is 'he': two tokens with a space"),
        ({"merges": [" h"]}, r"merges\[0\]"),
        (
            {"merges": ["h e l", "he"]},
            r"merges\[0\] is 'h e l': no token is 'e l'",
        ),  # as many spaces as there should be
        ({"merges": ["h e\nl"]}, r"merges\[0\]"),
        ({"merges": ["h\ne"]}, r"merges\[0\]"),
        ({"merges": None}, r"merges is missing"),
        ({"merges": "h e"}, r"merges is a str"),
        ({"merges": [1, 2]}, r"merges\[0\] is a int"),
        ({"tokens": None}, r"tokens is missing"),
        ({"tokens": []}, r"tokens has 0 entries"),
        ({"tokens": ["a", "b"]}, r"token_type has \d+ entries, but tokenizer\.ggml\.tokens has 2"),
        ({"token_type": np.full(264, 9, np.int32)}, r"token_type\[0\] is 9"),
        ({"token_type": np.full(264, 1.5, np.float32)}, r"token_type is not an array of integers"),
        ({"token_type": np.ones((2, 132), np.int32)}, r"token_type is not an array"),
        ({"add_bos_token": True, "bos_token_id": None}, r"add_bos_token is set, but"),
        ({"add_bos_token": 7}, r"add_bos_token is a int"),
        ({"model": 5}, r"model is a int"),
        ({"model": None}, r"model is missing"),
        ({"pre": 5}, r"pre is a int"),
    ],
)
def test_hostile_byte_level_metadata(change: dict[str, Any], message: str):
    data = byte_level(MERGES)
    assert len(data["tokenizer.ggml.tokens"]) == 264
    for name, value in change.items():
        data[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(BadModelFile, match=message):
        Tokenizer.from_gguf(data)


def test_hostile_tokens():
    data = byte_level(MERGES)
    data["tokenizer.ggml.tokens"][200] = data["tokenizer.ggml.tokens"][100]
    with pytest.raises(BadModelFile, match=r"tokens\[200\] is .* again: token 100"):
        Tokenizer.from_gguf(data)
    data = byte_level(MERGES)
    data["tokenizer.ggml.tokens"][7] = "x" * 5000
    with pytest.raises(BadModelFile, match=r"tokens\[7\] has 5000 characters"):
        Tokenizer.from_gguf(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": np.zeros(3, np.float32)}, "scores has 3 entries"),
        ({"scores": np.full(259 + len(PIECES), np.nan, np.float32)}, r"scores\[0\] is not a finite number"),
        ({"bos_token_id": 5000}, "bos_token_id is 5000"),
    ],
)
def test_hostile_sentencepiece_metadata(change: dict[str, Any], message: str):
    data = sentencepiece(PIECES)
    for name, value in change.items():
        data[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(BadModelFile, match=message):
        Tokenizer.from_gguf(data)


def test_hostile_byte_tokens():
    data = sentencepiece(PIECES)
    data["tokenizer.ggml.tokens"][10] = "<0xZZ>"
    with pytest.raises(BadModelFile, match=r"tokens\[10\] is '<0xZZ>'"):
        Tokenizer.from_gguf(data)
    data["tokenizer.ggml.tokens"][10] = "<0x00>"
    with pytest.raises(BadModelFile, match="two byte tokens for one byte"):
        Tokenizer.from_gguf(data)


def test_empty_tokens_are_tolerated_and_never_made():
    data = byte_level(MERGES)
    data["tokenizer.ggml.tokens"] += ["", ""]
    data["tokenizer.ggml.token_type"] = np.append(data["tokenizer.ggml.token_type"], [1, 1]).astype(np.int32)
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer.token_bytes(265) == b""
    assert texts(tokenizer, plain(tokenizer, "hello")) == ["hello"]


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_tokens_that_are_not_utf8_keep_their_bytes(kind: int):
    odd = b"\xff\xfe!".decode("utf-8", "surrogateescape")
    for data in (byte_level(MERGES), sentencepiece(PIECES)):
        data["tokenizer.ggml.tokens"].append(odd)
        data["tokenizer.ggml.token_type"] = np.append(data["tokenizer.ggml.token_type"], kind).astype(np.int32)
        if "tokenizer.ggml.scores" in data:
            data["tokenizer.ggml.scores"] = np.append(data["tokenizer.ggml.scores"], 0).astype(np.float32)
        tokenizer = Tokenizer.from_gguf(data)
        assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"\xff\xfe!"
        assert tokenizer.token_text(tokenizer.vocab_size - 1) == "\ufffd\ufffd!"
        assert tokenizer.decode(plain(tokenizer, "aab", parse_special=True)) == "aab"
        assert (tokenizer.max_token_bytes or 0) > 2


def test_a_byte_the_vocabulary_lacks_is_refused_not_dropped():
    data = byte_level()
    at = data["tokenizer.ggml.tokens"].index("q")
    data["tokenizer.ggml.tokens"][at] = "QQ"
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer.decode(plain(tokenizer, "abc")) == "abc"
    with pytest.raises(BadRequest, match="byte 0x71"):
        plain(tokenizer, "aqb")


def test_bad_text_and_bad_ids():
    tokenizer = Tokenizer.from_gguf(byte_level())
    with pytest.raises(BadRequest, match="surrogate pair at character 1"):
        plain(tokenizer, "a\ud800b")
    for token in (-1, 10**6):
        for method in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_special):
            with pytest.raises(BadRequest, match="not in the vocabulary"):
                method(token)


def test_token_bytes_are_exact():
    tokenizer = Tokenizer.from_gguf(byte_level(("Ã ©",), user_defined=("日",)))
    assert sorted(tokenizer.token_bytes(i) for i in range(3, 259)) == [bytes([b]) for b in range(256)]
    assert tokenizer.token_bytes(259) == "é".encode()  # merged from its two bytes
    assert tokenizer.token_bytes(260) == "日".encode()  # user-defined: written as it is


def test_end_tokens_by_text_and_the_harmony_exception():
    data = byte_level()
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    data["tokenizer.ggml.tokens"] = [*tokens, "<|end|>"]
    data["tokenizer.ggml.token_type"] = np.append(types, 3).astype(np.int32)
    assert len(tokens) in Tokenizer.from_gguf(data).eos_ids
    data["tokenizer.ggml.tokens"] = [*tokens, "<|end|>", "<|return|>", "<|call|>"]
    data["tokenizer.ggml.token_type"] = np.append(types, [3, 3, 3]).astype(np.int32)
    assert Tokenizer.from_gguf(data).eos_ids == (1, 2, len(tokens) + 1, len(tokens) + 2)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000,
        "A" * 200_000,
        " " * 200_000 + "x",
        "1" * 200_000,
        "<|" * 100_000,
        "\n " * 100_000,
        "é" * 100_000,
        "你" * 65_000,
    ],
)
@pytest.mark.parametrize("name", ["smollm", "llama3", "deepseek-llm", "gpt-4o"])
def test_a_long_single_word_stays_bounded(name: str, text: str):
    tokenizer = Tokenizer.from_gguf(byte_level(("a a", "aa aa", "Ġ Ġ"), pre=name))
    start = time.process_time()
    ids = plain(tokenizer, text, parse_special=True)
    assert time.process_time() - start < 4  # seconds of CPU; a quadratic step would take a minute
    assert tokenizer.decode(ids) == text


def test_a_long_text_in_sentencepiece_stays_bounded():
    tokenizer = Tokenizer.from_gguf(sentencepiece(PIECES))
    start = time.process_time()
    ids = plain(tokenizer, "a" * 400_000)
    assert time.process_time() - start < 8
    assert tokenizer.decode(ids) == "a" * 400_000


@given(st.text("ab \t\u00a0\u3000", max_size=30))
@settings(max_examples=300)
def test_the_linear_spelling_of_trailing_space_splits_the_same(text: str):
    spelled = PRE_TOKENIZERS["deepseek-llm"].splits[3]
    assert spelled != r"\s+$"
    ours, theirs = (pre_tokenizers.Split(Regex(r), behavior="isolated") for r in (spelled, r"\s+$"))
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@given(st.text("<|abc>", max_size=30), st.lists(st.text("<|abc>", min_size=1, max_size=4), max_size=6, unique=True))
def test_splitter_takes_the_leftmost_longest(text: str, specials: list[str]):
    ids = {special: i for i, special in enumerate(specials)}
    expected: list[str | int] = []
    at = 0
    while at < len(text):
        found = max((s for s in specials if text.startswith(s, at)), key=len, default=None)
        if found is not None:
            expected.append(ids[found])
            at += len(found)
        else:
            if expected and isinstance(expected[-1], str):
                expected[-1] += text[at]
            else:
                expected.append(text[at])
            at += 1
    assert list(Splitter(ids.items()).split(text)) == expected


def test_nfc_where_the_model_normalizes():
    merges = ("Ã ©",)
    composed, decomposed = "é", "e\u0301"
    qwen, gpt2 = (Tokenizer.from_gguf(byte_level(merges, pre=name)) for name in ("qwen2", "gpt-2"))
    assert plain(qwen, decomposed) == plain(qwen, composed)
    assert plain(gpt2, decomposed) != plain(gpt2, composed)


def test_construction_is_quick(model_path: Any):
    from quire.weights.gguf.file import GGUF

    with GGUF.open(model_path) as file:
        times = []
        for _ in range(3):
            start = time.process_time()
            Tokenizer.from_gguf(file.metadata)
            times.append(time.process_time() - start)
    assert min(times) < 0.5  # about 0.08 s on an idle machine; the bound is for busy ones


def test_a_long_text_leaves_other_threads_alone():
    """The plain call of the library keeps the interpreter lock: a server's streams would stand still meanwhile."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    text = "The quick brown fox jumps over the lazy dog. " * 40_000
    turns = 0
    worker = threading.Thread(target=lambda: tokenizer.encode(text, add_special=False, parse_special=True))
    worker.start()
    while worker.is_alive():
        time.sleep(0.0005)
        turns += 1
    assert turns > 4  # one or two where the lock is kept


@pytest.mark.parametrize("length", [0, 10, bpe.LONG - 1, bpe.LONG, 3 * bpe.LONG])
def test_both_calls_into_the_library_agree(length: int):
    tokenizer = Tokenizer.from_gguf(byte_level(("h e", "he l", "l o", "hel lo")))
    text = ("hello, wörld " * length)[:length]
    pieces = tokenizer._encoder._pieces._tokenizer
    assert bpe.ids_of(pieces, text) == pieces.encode(text, add_special_tokens=False).ids
