"""Expressions in a tokenizer.json: known ones run here, others in a process that ends them, and none hangs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from quire.chat.hub import read_tokenizer
from quire.chat.tokenizers import isolated, patterns
from quire.observe.errors import BadModelFile, BadRequest
from tests.effort import at_most
from tests.unit.chat import hub_kit

pytest.importorskip("transformers", reason="needs the test extra: it writes the tokenizers")


def with_pattern(path: Path, pattern: str) -> Any:
    theirs = hub_kit.byte_level(path)
    data = json.loads((path / "tokenizer.json").read_text())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    (path / "tokenizer.json").write_text(json.dumps(data))
    return theirs


def test_known_expressions_run_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub_kit.byte_level(tmp_path)
    monkeypatch.setattr(isolated.subprocess, "Popen", None)  # to start a process would be an error
    tokenizer = read_tokenizer(hub_kit.folder(tmp_path))
    assert tokenizer.encode("Hello", add_special=False, parse_special=True)
    deepseek = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    assert patterns.is_known(deepseek) and not patterns.is_known("(a+)+$")


def test_known_expressions_are_linear():
    """Sixteen thousand of each kind of character in a row: a quadratic expression takes seconds for one of them."""
    from tokenizers import Regex, pre_tokenizers

    for pattern in sorted(patterns.KNOWN):
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        for unit in (" ", "\n", "a", "A", "1", ".", "\u4e00", " \n", "a ", "'s", "\r", "\u0301", "\u00a0"):
            text = unit * (16_000 // len(unit)) + "\u00d7"
            with at_most(0.5, (pattern, unit)):
                split.pre_tokenize_str(text)


def test_an_unknown_expression_gives_what_transformers_gives(tmp_path: Path):
    from transformers import AutoTokenizer

    with_pattern(tmp_path, r"[^\s]+|\s+(?=.)|\s")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = read_tokenizer(hub_kit.folder(tmp_path))
    for text in ("Hello, world", "a<|im_end|>b  c", "", "naïve 🎉"):
        want = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False, parse_special=True) == want
        plain = ours.encode(text, add_special=False, parse_special=False)
        assert ours.decode(plain) == text and not any(map(ours.is_special, plain))


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(?:a|a)*b", r"a*a*a*a*a*b", r"(a|b|ab)*c", r"(?=(a+)+$)x"])
def test_a_hostile_expression_costs_one_request(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolated, "SECONDS", 1)
    with_pattern(tmp_path, pattern)
    tokenizer = read_tokenizer(hub_kit.folder(tmp_path))
    assert tokenizer.encode("hello", add_special=False, parse_special=True)
    start = time.monotonic()
    with pytest.raises(BadRequest, match=r"within 1 seconds|cannot be tokenized"):
        tokenizer.encode("a" * 30_000 + "!bc", add_special=False, parse_special=True)
    assert time.monotonic() - start < 60
    assert tokenizer.encode("hello", add_special=False, parse_special=True)  # the next request is served


def test_a_file_that_needs_more_memory_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolated, "MEMORY", 1 << 24)
    with_pattern(tmp_path, r"[^\s]+|\s")
    with pytest.raises(BadModelFile, match=r"tokenizer.json cannot be used: it took too much time or memory"):
        read_tokenizer(hub_kit.folder(tmp_path)).encode("a", add_special=False, parse_special=True)


def test_an_expression_that_is_none(tmp_path: Path):
    with_pattern(tmp_path, r"(unclosed")
    with pytest.raises(BadModelFile, match=r"tokenizer.json cannot be used"):
        read_tokenizer(hub_kit.folder(tmp_path)).encode("a", add_special=False, parse_special=True)


def test_the_process_ends_with_its_tokenizer():
    made = isolated.IsolatedTokenizer("x", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    process = made._process
    assert process is not None and made.encode("aa") == [0, 0]
    del made
    assert process.wait(20) is not None
