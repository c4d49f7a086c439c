"""Grammars of calls: what the template writes is allowed, whatever is generated under them is a call that validates.

The vocabulary is bytes and the format's marks, once as plain texts and once as control tokens. Generation is a random walk
over what the mask allows, so it visits what no model would write.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.chat.templates.template import ChatTemplate
from quire.chat.tools.check import parse
from quire.chat.tools.detect import detect_format
from quire.chat.tools.probe import TurnRenderer, called, tool
from quire.chat.tools.types import Format, Tool, Tools
from quire.engine.constraints.grammar import Matcher, compile_matcher, tokenizer_of
from quire.engine.types import Constraint, Vocabulary
from quire.observe.errors import BadRequest
from tests.unit.chat.tools.kit import ENDS, ToyTokenizer
from tests.unit.chat.tools.test_reading import ASSISTANT, HERMES, NAMED, XML

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, to judge arguments independently")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A place."},
        "days": {"type": "integer", "description": "How many."},
        "unit": {"type": "string", "enum": ["C", "F"], "description": "Which."},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", "", SCHEMA), Tool("now", "", None)]
STRICT = [dataclasses.replace(t, strict=True) for t in TOOLS]
LIKELY = frozenset(b'ab1 ",:{}[]<>/=\n_')


class Bytes(ToyTokenizer):
    """Marks as control tokens after the 256 bytes."""

    def controls(self, text: str) -> list[str | int]:
        return [p if isinstance(p, str) else p - 1000 + 256 for p in super().controls(text)]


class Walk:
    """A grammar over bytes and marks."""

    def __init__(self, constraint: Constraint, special: tuple[str, ...]):
        self.special = special
        self.eos = 256 + len(special)
        tokens = [bytes([i]) for i in range(256)] + [mark.encode() for mark in special] + [b"<eos>"]
        words = Vocabulary(tokens=tokens, special=list(range(256, len(tokens))), eos_ids=(self.eos,))
        self.made = compile_matcher(constraint, tokenizer_of(words, len(tokens)))

    def mask(self, matcher: Matcher) -> np.ndarray:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little", count=self.eos + 1)
        bits[self.eos] &= matcher.is_accepting()
        return np.flatnonzero(bits)

    def takes(self, text: str) -> bool:
        matcher = self.made.deep_copy()
        for token in self.encode(text):
            if token not in self.mask(matcher):
                return False
            matcher.consume_tokens([token])
        return True

    def encode(self, text: str) -> Iterator[int]:
        at = 0
        while at < len(text):
            mark = next((i for i, m in enumerate(self.special) if text.startswith(m, at)), None)
            if mark is not None:
                yield 256 + mark
                at += len(self.special[mark])
            else:
                yield from text[at].encode()
                at += 1

    def random(self, rng: random.Random, *closings: str, most: int = 400) -> str | None:
        """A text under the grammar; None where it did not end. What closes is written whenever it may be begun."""
        matcher, out = self.made.deep_copy(), b""
        for _ in range(most):
            may = self.mask(matcher)
            closing = rng.choice(closings)
            hurry = list(self.encode(closing))
            if self.eos in may and rng.random() < 0.5:
                return out.decode("utf-8", "replace")
            if hurry[0] in may and rng.random() < 0.2:
                ahead, n = matcher.deep_copy(), 0
                while n < len(hurry) and hurry[n] in self.mask(ahead):
                    ahead.consume_tokens([hurry[n]])
                    n += 1
                if n == len(hurry):
                    matcher, out = ahead, out + closing.encode()
                    continue
            likely = [t for t in may if (t in LIKELY or t >= 256) and t != self.eos]
            token = int(rng.choice(likely or [t for t in may if t != self.eos] or [self.eos]))
            if token == self.eos:
                return out.decode("utf-8", "replace")
            matcher.consume_tokens([token])
            out += bytes([token]) if token < 256 else self.special[token - 256].encode()
        return None


def formats(source: str) -> Iterator[tuple[Format, tuple[str, ...]]]:
    template = ChatTemplate(source, "<BOS>", "<EOS>")
    plain = detect_format(template, Bytes())
    assert plain is not None
    yield plain, ()
    marks = tuple(sorted((m for m in plain.markers if " " not in m), key=len, reverse=True))
    special = detect_format(template, Bytes(marks))
    assert special is not None
    yield special, marks


def validates(calls: list[tuple[str, Any]]) -> bool:
    schemas = {"get_weather": SCHEMA, "now": {"type": "object", "maxProperties": 0}}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])
    return bool(calls)


@pytest.mark.parametrize(("source", "closing"), [(HERMES, '"}'), (XML, "\n</parameter>\n"), (NAMED, '"}')])
@pytest.mark.parametrize("choice", ["required", "one", "named", "strict"])
def test_whatever_is_generated_is_a_call_that_validates(source: str, closing: str, choice: str) -> None:
    asked = {
        "required": Tools(TOOLS, "required"),
        "one": Tools(TOOLS, "required", parallel=False),
        "named": Tools(TOOLS, "named", "get_weather"),
        "strict": Tools(STRICT, "auto"),
    }[choice]
    for form, special in formats(source):
        constraint = form.constraint(ASSISTANT, asked, None)
        assert constraint is not None
        walk = Walk(constraint, special)
        rng = random.Random(choice)
        whole = 0
        for _ in range(6):
            text = walk.random(rng, closing)
            if text is None:
                continue
            whole += 1
            _, said, calls = parse(form.reading(ASSISTANT, asked), [text])
            if choice == "strict":
                validates(calls)
                continue
            assert validates(calls), text
            assert not said.strip()
            if choice != "required":
                assert len(calls) == 1
            if choice == "named":
                assert calls[0][0] == "get_weather"
        assert whole, "no walk came to an end"


def test_free_text_and_calls_in_strict_auto_mode() -> None:
    for form, special in formats(HERMES):
        walk = Walk(form.constraint(ASSISTANT, Tools(STRICT, "auto"), None), special)
        assert walk.takes("Hello, a < b.")
        good = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "X", "days": 1}}\n</tool_call>'
        assert walk.takes("Let me see.\n" + good)
        assert walk.takes(good + "\n" + good)
        assert not walk.takes(good.replace("days", "dayz"))
        assert not walk.takes(good.replace("get_weather", "rm"))


def test_one_call_where_parallel_calls_are_off() -> None:
    for form, special in formats(HERMES):
        walk = Walk(form.constraint(ASSISTANT, Tools(TOOLS, "auto", parallel=False), None), special)
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        assert walk.takes("ok\n" + call)
        assert not walk.takes(f"{call}\n{call}")


@pytest.mark.parametrize("tail", [ASSISTANT, ASSISTANT + "<think>\n"])
def test_a_schema_counts_after_the_reasoning(tail: str) -> None:
    answer = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for form, special in formats(HERMES):
        made = form.constraint(tail, Tools(), answer)
        assert made is not None
        walk = Walk(made, special)
        opened = tail.endswith("<think>\n")
        thought = "hm {not json}</think>\n\n" if opened else "<think>\nhm {not json}</think>\n\n"
        assert walk.takes(thought + '{"a": 5}')
        assert not walk.takes(thought + "words")
        assert walk.takes('{"a": 5}') != opened or opened
        assert not walk.takes("words") or opened


def test_a_schema_or_a_call() -> None:
    answer = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for form, special in formats(HERMES):
        walk = Walk(form.constraint(ASSISTANT, Tools(TOOLS), answer), special)
        assert walk.takes('{"a": 5}')
        assert walk.takes('<tool_call>\n{"name": "now", "arguments": {"any": 1}}\n</tool_call>')
        assert not walk.takes("words")


def test_nothing_is_enforced_where_nothing_was_demanded() -> None:
    form = next(formats(HERMES))[0]
    assert form.constraint(ASSISTANT, Tools(TOOLS), None) is None
    assert form.constraint(ASSISTANT, Tools(STRICT, "none"), None) is None


def test_a_schema_that_cannot_be_enforced_names_its_tool() -> None:
    bad = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    form, special = next(formats(HERMES))
    with pytest.raises(BadRequest, match=r"odd.*uniqueItems"):
        Walk(form.constraint(ASSISTANT, Tools([TOOLS[0], bad], "required"), None), special)
    pattern = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}})
    form, special = next(formats(XML))
    with pytest.raises(BadRequest, match=r"pattern.*odd"):
        form.constraint(ASSISTANT, Tools([pattern], "required"), None)


SOME = ["Qwen-Qwen3-0.6B", "Qwen3-Coder", "GLM-4.6", "GLM-4.7-Flash", "MiniMax-M2", "deepseek-ai-DeepSeek-V3.1"]
SOME += ["deepseek-ai-DeepSeek-V3.2", "Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"]
SOME += ["meta-llama-Llama-3.2-3B-Instruct", "openai-gpt-oss-120b", "moonshotai-Kimi-K2", "Kimi-K3", "muse-glimmer"]
SOME += ["upstage-Solar-Open-100B", "meetkai-functionary-medium-v3.2", "Apertus-8B-Instruct"]
SOME += ["google-gemma-4-31B-it", "LFM2.5-8B-A1B", "MiniMax-M3"]


@pytest.mark.parametrize("name", SOME)
def test_what_templates_write_is_allowed(shared_data: Path, name: str) -> None:
    source = (shared_data / "templates" / f"{name}.jinja").read_text()
    asked = {"city": "Rome <b>", "days": 3, "unit": "C"}
    message = {"role": "assistant", "content": "", "tool_calls": [called("get_weather", asked, "abcdefgh1")]}
    written = TurnRenderer(ChatTemplate(source, "<BOS>", "<EOS>"), ENDS).turn(
        message, [tool("get_weather", SCHEMA["properties"], ["city", "days"]), tool("now", {})]
    )
    for form, special in formats(source):
        if form.name == "kimi-k3" and special:
            continue  # its marks are made of several tokens and text, which this vocabulary cannot tell
        for asked_for in (Tools(TOOLS, "required"), Tools(STRICT, "auto"), Tools(TOOLS, "named", "get_weather")):
            constraint = form.constraint(written.before[-300:], asked_for, None)
            assert constraint is not None
            text = written.text.rstrip()
            whole = Walk(constraint, special)
            assert whole.takes(text), (form.name, text)
            assert json.loads(json.dumps(parse(form.reading(written.before[-300:], asked_for), [text])[2]))


@pytest.mark.parametrize("name", SOME)
def test_whatever_is_generated_for_a_template_is_a_call_that_validates(shared_data: Path, name: str) -> None:
    """From chance, not from what the template wrote: required, named, and strict where the model chooses."""
    source = (shared_data / "templates" / f"{name}.jinja").read_text()
    written = TurnRenderer(ChatTemplate(source, "<BOS>", "<EOS>"), ENDS).turn(
        {"role": "assistant", "content": "ok"},
        [tool("get_weather", SCHEMA["properties"], ["city", "days"]), tool("now", {})],
    )
    tail = written.before[-300:]
    rng = random.Random(name)
    whole = 0
    for form, special in formats(source):
        if form.name == "kimi-k3" and special:
            continue  # its marks are made of several tokens and text, which this vocabulary cannot tell
        think = getattr(form, "think", None)
        closings = (
            '"}',
            '"',
            *([think.close.strip()] if think else []),
            *(mark for mark in form.markers if "/" in mark or "end" in mark),
            *CLOSERS,
        )
        for asked in (Tools(TOOLS, "required", parallel=False), Tools(TOOLS, "named", "get_weather")):
            constraint = form.constraint(tail, asked, None)
            assert constraint is not None
            walk = Walk(constraint, special)
            for _ in range(2):
                text = walk.random(rng, *closings)
                if text is not None:
                    whole += 1
                    _, _, calls = parse(form.reading(tail, asked), [text])
                    assert validates(calls) and len(calls) == 1, (form.name, text)
    assert whole, "no walk came to an end"


CLOSERS = (
    "<|close|>argument<|sep|>",
    "</arg_value>",
    "</parameter>",
    "</tool_call>",
    "<|call|>",
    "}",
    '<|"|>',
    "\n```",
)


ODD: list[tuple[Any, list[str], list[str]]] = [
    ({"const": "x"}, ["x"], ["y"]),
    ({"enum": ["a", 5]}, ["a", "5"], ["b"]),
    ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, ["a", "null"], ["b"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["anything", "null"], []),
    ({"type": "integer", "minimum": 3}, ["3"], ["2", "x"]),
    ({"$ref": "#/$defs/n"}, ["7"], ["8"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ODD)
def test_bare_values_are_held_to_their_schema(schema: Any, good: list[str], bad: list[str]) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"n": {"const": 7}}}
    for form, special in formats(XML):
        walk = Walk(form.constraint(ASSISTANT, Tools([Tool("f", "", parameters)], "required"), None), special)
        for texts, fine in ((good, True), (bad, False)):
            for text in texts:
                call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
                assert walk.takes(call) is fine, (schema, text)


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"properties": {"a": {"type": ["string", "integer"], "minimum": 5}}}, "minimum"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}}, "maxLength"),
        ({"properties": {"a": {"anyOf": [{"const": "x"}, {"type": "string"}]}}}, "const"),
        ({"properties": {"a": {"$ref": "#/$defs/s"}}, "$defs": {"s": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"properties": {"a": {"type": "string"}}, "required": ["b"]}, "required"),
        ({"properties": {"a": {"type": "string"}}, "minProperties": 1}, "minProperties"),
    ],
)
def test_what_bare_values_cannot_be_held_to_is_refused_by_name(parameters: dict[str, Any], word: str) -> None:
    for form, _ in formats(XML):
        with pytest.raises(BadRequest, match=rf"keyword {word}"):
            form.constraint(ASSISTANT, Tools([Tool("f", "", {"type": "object", **parameters})], "required"), None)


def test_calls_as_python(shared_data: Path) -> None:
    """Any subset of what is optional, with commas between; values are JSON, read as Python."""
    source = (shared_data / "templates" / "LFM2.5-8B-A1B.jinja").read_text()
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["boolean", "null"]}}
    asked = Tools([Tool("f", "", {"type": "object", "properties": properties, "required": ["b"]})], "required")
    for form, special in formats(source):
        walk = Walk(form.constraint("<|im_start|>assistant\n", asked, None), special)
        for inside, fine in (
            ('b="x"', {"b": "x"}),
            ('a=1, b="\\n\\"", c=null', {"a": 1, "b": '\n"', "c": None}),
            ('b="[(", c=true', {"b": "[(", "c": True}),
            ("b='x\\n\\''", {"b": "x\n'"}),
            ("b='x'y'", None),
            ("", None),
            ("a=1", None),
            ('a=1b="x"', None),
            (', b="x"', None),
            ('b="x", a=1', None),
            ('b="x", d=1', None),
        ):
            text = f"<|tool_call_start|>[f({inside})]<|tool_call_end|>"
            assert walk.takes(text) is (fine is not None), text
            if fine is not None:
                assert parse(form.reading("<|im_start|>assistant\n", asked), [text])[2] == [("f", fine)]
    bad = Tool("f", "", {"type": "object", "properties": {"from": {}}})
    with pytest.raises(BadRequest, match="no name in Python"):
        form.constraint("<|im_start|>assistant\n", Tools([bad], "required"), None)


def test_nested_elements(shared_data: Path) -> None:
    source = (shared_data / "templates" / "MiniMax-M3.jinja").read_text()
    point = {"type": "object", "properties": {"x": {"type": "number"}, "s": {"type": "string"}}, "required": ["x"]}
    properties = {
        "points": {"type": "array", "items": point, "maxItems": 2},
        "name": {"type": "string"},
        "kind": {"enum": ["u", "v"]},
    }
    asked = Tools([Tool("f", "", {"type": "object", "properties": properties, "required": ["name"]})], "required")
    ns = "]<]minimax[>["
    tail = "]~b]ai\n<mm:think>x</mm:think>"
    for form, special in formats(source):
        walk = Walk(form.constraint(tail, asked, None), special)
        for inside, fine in (
            ("@<name>a <b>@</name>", {"name": "a <b>"}),
            ("@<points>@</points>@<name>n@</name>", {"points": [], "name": "n"}),
            (
                "@<points>@<item>@<x>1.5@</x>@<s>t@</s>@</item>@</points>@<name>n@</name>@<kind>v@</kind>",
                {"points": [{"x": 1.5, "s": "t"}], "name": "n", "kind": "v"},
            ),
            ("@<kind>u@</kind>", None),
            ("@<name>n@</name>@<kind>w@</kind>", None),
            ("@<points>@<item>@</item>@</points>@<name>n@</name>", None),
            ("@<name>n@<x>1@</x>@</name>", None),
        ):
            text = f'@<tool_call>\n@<invoke name="f">{inside}@</invoke>\n@</tool_call>'.replace("@", ns)
            assert walk.takes(text) is (fine is not None), text
            if fine is not None:
                assert parse(form.reading(tail, asked), [text])[2] == [("f", fine)]
        loose = form.constraint(tail, Tools(asked.tools, "auto", parallel=False), None)
        text = '@<tool_call>\n@<invoke name="f">@<any>@<x>1@</x>@</any>@<b>t@</b>@</invoke>\n@</tool_call>'
        assert loose is not None and Walk(loose, special).takes(text.replace("@", ns))
    odd = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}})
    with pytest.raises(BadRequest, match=r"odd.*minLength"):
        form.constraint(tail, Tools([odd], "required"), None)


def test_gemmas_notation(shared_data: Path) -> None:
    source = (shared_data / "templates" / "google-gemma-4-31B-it.jinja").read_text()
    nested = Tool(
        "deep",
        "",
        {
            "type": "object",
            "properties": {
                "b": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"c": {"type": "boolean"}}, "required": ["c"]},
                },
                "a": {"type": "number"},
                "z": {"type": "string", "enum": ["u", "v"]},
            },
        },
    )
    for form, special in formats(source):
        made = form.constraint("<|turn>model\n", Tools([nested], "required"), None)
        assert made is not None
        walk = Walk(made, special)
        quote = '<|"|>'
        for good in (
            "{}",
            "{a:1.5}",
            "{b:[]}",
            "{a:1,b:[{c:true},{c:false}],z:" + f"{quote}u{quote}" + "}",
            f"{{z:{quote}v{quote}}}",
        ):
            assert walk.takes(f"<|tool_call>call:deep{good}<tool_call|>"), good
        for bad in ("{,}", "{a:true}", "{b:[{}]}", "{a:1b:[]}", f"{{z:{quote}w{quote}}}", "{q:1}", "{a:1,}"):
            assert not walk.takes(f"<|tool_call>call:deep{bad}<tool_call|>"), bad
        loose = form.constraint("<|turn>model\n", Tools([nested, TOOLS[0]], "auto", parallel=False), None)
        assert loose is not None and Walk(loose, special).takes("hm <|tool_call>call:deep{q:[1,{r:null}]}<tool_call|>")
    odd = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}})
    with pytest.raises(BadRequest, match=r"odd.*minLength"):
        form.constraint("<|turn>model\n", Tools([odd], "required"), None)
