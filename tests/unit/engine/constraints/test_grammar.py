"""Schemas against texts that are known to satisfy them or not: the JSON Schema Test Suite, and what it does not think of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.chat.completer import vocabulary_of
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.engine.constraints.grammar import compile_matcher, tokenizer_of
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from tests.unit.chat.toys import byte_level, sentencepiece
from tests.unit.engine.constraints.guide_kit import WORDS, V, ask, make, run, text_of

TOKENIZER = tokenizer_of(WORDS, V)  # its first 256 tokens are the bytes

# One of its patterns has \S, which is for ECMAScript and not for the compiler all but one more character.
OTHERWISE = ("optional/ecmascript-regex.json",)


def compiled(schema: Any) -> Any:
    return compile_matcher(Constraint.json_schema(json.dumps(schema)), TOKENIZER)


def admits(matcher: Any, text: str) -> bool:
    own = matcher.deep_copy()
    return own.consume_tokens(list(text.encode("utf-8", "surrogatepass"))) and own.is_accepting()


def test_the_test_suite(shared_data: Path) -> None:
    """No text that a schema forbids is admitted, and most of what it allows is: objects that list what they have are closed."""
    folder = shared_data / "json-schema-test-suite" / "tests" / "draft2020-12"
    wrong, groups, refused, admitted, valid = [], 0, 0, 0, 0
    for file in sorted(folder.rglob("*.json")):
        for group in json.loads(file.read_text()):
            groups += 1
            try:
                matcher = compiled(group["schema"])
            except BadRequest as error:
                assert str(error)
                refused += 1
                continue
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
                ok = admits(matcher, text)
                admitted += ok
                valid += test["valid"]
                if ok and not test["valid"] and str(file.relative_to(folder)) not in OTHERWISE:
                    wrong.append((file.name, group["description"], test["description"]))
    assert not wrong
    assert groups > 400 and refused < 0.6 * groups
    assert admitted > 0.85 * valid
    print(f"{groups} schemas, {refused} refused; of {valid} texts that the others allow {admitted} are admitted")


@pytest.mark.parametrize(
    ("schema", "text", "fine"),
    [
        ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}', False),
        ({"properties": {"a\nb": {"type": "integer"}}}, r'{"a\u000ab":"x"}', False),
        ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": True}, r'{"\u0061":1}', False),
        ({"properties": {"a": {"type": "integer"}}}, '{"a":1,"a":"x"}', False),
        ({"maxProperties": 1}, '{"a":1,"b":2}', False),
        ({"type": "string"}, r'"\ud800"', False),
        ({"type": "string"}, '"a\tb"', False),
        ({"type": "string"}, r'"a\t\"\\ \n"', True),
        ({"type": "string", "maxLength": 1}, '"😀"', True),
        ({"type": "string", "maxLength": 1}, '"é́"', False),
        ({"type": "object"}, '{"a": [1, {"b": null}]}', True),
        ({"type": "object"}, '{\n    "a": 1\n}', True),
        ({"type": "object"}, "{" + " " * 200 + "}", False),
        ({"type": "object"}, '{"a":1} x', False),
        ({"type": "object"}, '{"a":1', False),
        ({}, "3", True),
        (True, "[1]", True),
        ({"title": "a\x01", "description": "\x07", "type": "null"}, "null", True),
    ],
)
def test_spellings(schema: Any, text: str, fine: bool) -> None:
    assert admits(compiled(schema), text) is fine


@pytest.mark.parametrize("metadata", [byte_level(("a b",)), sentencepiece({"▁ab": -1.0, "ab": -2.0, "▁": -3.0})])
def test_the_bytes_of_a_vocabulary(metadata: dict[str, Any]) -> None:
    """Byte-level words and SentencePiece's with byte tokens both say exactly what they add to a text."""
    own = Tokenizer.from_gguf(metadata)
    words = vocabulary_of(own, own.vocab_size + 5)
    assert len(words.tokens) == own.vocab_size
    assert [words.tokens[i] for i in words.special] == [own.token_bytes(i) for i in words.special]
    tokenizer = tokenizer_of(words, own.vocab_size + 5)
    for text in ("ab", " ab", "ab ab", "日本 é", "\n"):
        pattern = "".join(rf"\x{{{ord(c):x}}}" for c in text)
        matcher = compile_matcher(Constraint.regex(pattern), tokenizer)
        spelled = [next(i for i, t in enumerate(words.tokens) if t == bytes([b])) for b in text.encode()]
        whole = matcher.deep_copy()
        assert whole.consume_tokens(spelled) and whole.is_accepting()
        for special in words.special:
            assert not matcher.deep_copy().consume_tokens([special])


def test_answers_in_the_languages_of_the_vocabulary() -> None:
    """Characters that no token holds whole are written byte by byte."""
    ((tokens, last),) = run(make(), [ask(Constraint.choice(["Ω≈ç√∫"]))]).values()
    assert last.finish == "stop" and text_of(tokens) == "Ω≈ç√∫"


def test_importing_the_engine_does_not_import_the_compiler() -> None:
    code = "import sys, quire.engine.construction.build, quire.chat.completer, quire.server.app; print('llguidance' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
