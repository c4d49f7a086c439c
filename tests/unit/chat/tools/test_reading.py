"""Answers as models write them, right and wrong: nothing lost, nothing raised, the same however the text is cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.chat.tools.check import parse
from quire.chat.tools.types import Tools
from tests.unit.chat.tools.kit import every_way, format_of, some_ways, tools

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
HERMES = (
    HEAD + THINK + "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    + TAIL
)
XML = (
    HEAD + THINK + "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}" + TAIL
)
NAMED = (
    HEAD
    + "{{ m.content }}{% if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}<|call|>{{ c.function.name }}<|sep|>"
    "{{ c.function.arguments | tojson }}<|end_call|>{% endfor %}<|end_calls|>{% endif %}" + TAIL
)
ASSISTANT = "<|im_start|>assistant\n"


def read(source: str, text: str, offered: Tools | None = None, tail: str = ASSISTANT):
    form = format_of(source)
    assert form is not None
    return every_way(form.reading(tail, tools("f", "g") if offered is None else offered), text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello.", ("", "Hello.", [])),
        ("  Hello \n", ("", "  Hello \n", [])),
        ("<think>\nhm\n</think>\n\nHi", ("hm", "Hi", [])),
        ("<think>hm", ("hm", "", [])),
        ("I say <think> in the middle", ("", "I say <think> in the middle", [])),
        ('<tool_call>\n{"name": "f", "arguments": {"city": "X"}}\n</tool_call>', ("", "", [("f", {"city": "X"})])),
        ('Let me.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "Let me.", [("f", {"a": 1})])),
        ('<tool_call>{"name": "f"}</tool_call> Done', ("", "Done", [("f", {})])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [("f", {"a": 1})])),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", {})])),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', ("", "", [("f", {"a": "x\ny"})])),
        (
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            ("", "", [("f", {}), ("g", {})]),
        ),
        # Not calls: they come as they were written.
        ("<tool_call>not json</tool_call>", ("", "<tool_call>not json</tool_call>", [])),
        ('<tool_call>{"nam": 1}</tool_call>', ("", '<tool_call>{"nam": 1}</tool_call>', [])),
        ('<tool_call>{"name": 5, "arguments": {}}', ("", '<tool_call>{"name": 5, "arguments": {}}', [])),
        ("a < b and <tool", ("", "a < b and <tool", [])),
        ("<tool_call>", ("", "<tool_call>", [])),
        ('<tool_call>{"name": "f", ', ("", '<tool_call>{"name": "f", ', [])),
        # Arguments that go wrong once they are on their way stay what the model wrote.
        ('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', ("", "", [("f", '{"a": oops}}')])),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, ', ("", "", [("f", '{"a": [1, ')])),
    ],
)
def test_hermes(text, wanted):
    assert read(HERMES, text) == wanted


def test_the_prompt_may_have_opened_the_reasoning():
    assert read(HERMES, "hm\n</think>\n\nHi", tail=ASSISTANT + "<think>\n") == ("hm", "Hi", [])
    assert read(HERMES, "Hi", tail=ASSISTANT + "<think>\n\n</think>\n\n") == ("", "Hi", [])
    asked = "<|im_start|>user\nwhat is <think>?<|im_end|>\n" + ASSISTANT
    assert read(HERMES, "a tag", tail=asked) == ("", "a tag", [])


def test_without_tools_a_call_is_text():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(HERMES, text, Tools()) == ("", text, [])
    assert read(HERMES, text, tools("f", choice="none")) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "<tool_call>\n<function=f>\n<parameter=city>\nA\nB\n</parameter>\n<parameter=days>\n5\n</parameter>\n</function>\n</tool_call>",
            ("", "", [("f", {"city": "A\nB", "days": 5})]),
        ),
        (
            "<tool_call><function=f><parameter=city>5</parameter></function></tool_call>",
            ("", "", [("f", {"city": "5"})]),
        ),
        ("<function=f>\n<parameter=days>\n7\n</parameter>\n</function>\n</tool_call>", ("", "", [("f", {"days": 7})])),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", ("", "", [("f", {})])),
        ("<tool_call>\n<function=f>\noops", ("", "<tool_call>\n<function=f>\noops", [])),
        ("<tool_call>\nnothing\n</tool_call>", ("", "<tool_call>\nnothing\n</tool_call>", [])),
    ],
)
def test_marked_arguments(text, wanted):
    assert read(XML, text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('ok<|calls|><|call|>f<|sep|>{"a": 1}<|end_call|><|end_calls|>', ("", "ok", [("f", {"a": 1})])),
        (
            "<|calls|><|call|>f<|sep|>{}<|end_call|>\n<|call|>g<|sep|>{}<|end_call|><|end_calls|>",
            ("", "", [("f", {}), ("g", {})]),
        ),
        ("<|calls|>nothing<|end_calls|>", ("", "<|calls|>nothing<|end_calls|>", [])),
        ("<|call|>f<|sep|>words", ("", "<|call|>f<|sep|>words", [])),
    ],
)
def test_a_name_and_its_arguments(text, wanted):
    assert read(NAMED, text) == wanted


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([HERMES, XML, NAMED]),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<think>",
                "</think>",
                "\n",
                " ",
                "f",
                "{",
                "}",
                '"name"',
                ": ",
                '"f"',
                '"arguments"',
                "<function=",
                ">",
                "<parameter=",
                "</parameter>",
                "</function>",
                "<|calls|>",
                "<|call|>",
                "<|sep|>",
                "[",
                "]",
                ",",
                '{"name": "f", "arguments": {"a": "b"}}',
                "text",
                "\\",
                '"',
                "é🙂",
            ]
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 9999), max_size=5),
)
def test_any_text_is_read_the_same_however_it_is_cut(source, parts, cuts):
    form = format_of(source)
    assert form is not None
    reading = form.reading(ASSISTANT, tools("f", "g"))
    text = "".join(parts)
    whole = parse(reading, [text])
    assert some_ways(reading, text, cuts) == whole
    assert parse(reading, list(text)) == whole


@pytest.mark.parametrize(
    ("source", "start", "unit"),
    [
        (HERMES, "", "<tool_cal "),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', "xyz\\n "),
        (HERMES, '<tool_call>{"arguments": {"a": "', "xyz\\n "),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": oops', " \n"),
        (HERMES, "<think>", "</thin \n\n"),
        (HERMES, "", " \n"),
        (HERMES, "", "<tool_call>"),
        (XML, "<tool_call>\n<function=f>\n<parameter=city>\n", "\n</parameter "),
        (XML, "<tool_call>\n<function=", "name"),
        (NAMED, "<|calls|><|call|>f<|sep|>", "[" * 10),
    ],
)
def test_an_answer_without_end_costs_its_length(source, start, unit):
    form = format_of(source)
    assert form is not None
    text = start + unit * (100_000 // len(unit))
    reading = form.reading(ASSISTANT, tools("f"))
    begun = time.process_time()
    parser = reading.parser()
    size = 0
    for at in range(0, len(text), 4):
        for piece in parser.feed(text[at : at + 4]):
            size += len(piece.text) + len(piece.reasoning) + sum(len(c.arguments) for c in piece.calls)
    for piece in parser.finish():
        size += len(piece.text) + len(piece.reasoning) + sum(len(c.arguments) for c in piece.calls)
    assert (
        time.process_time() - begun < 5
    )  # well under a second; looking at what is held again and again would take minutes
    assert size > 0.8 * len(text) or unit.isspace()


def test_arguments_come_as_they_are_written():
    form = format_of(HERMES)
    assert form is not None
    parser = form.reading(ASSISTANT, tools("f")).parser()
    assert parser.feed('<tool_call>\n{"name": "f", "argu') == []
    (named,) = parser.feed('ments": {"city": "Pa')
    assert named.calls[0].name == "f" and named.calls[0].id and named.calls[0].arguments == '{"city": "Pa'
    (more,) = parser.feed('ris"')
    assert (more.calls[0].name, more.calls[0].id, more.calls[0].arguments) == (None, None, 'ris"')
    assert "".join(c.arguments for p in parser.feed("}}") for c in p.calls) == "}"


def test_strings_of_marked_arguments_come_as_they_are_written():
    form = format_of(XML)
    assert form is not None
    parser = form.reading(ASSISTANT, tools("f")).parser()
    parser.feed("<tool_call>\n<function=f>\n<parameter=city>\n")
    (piece,) = parser.feed('say "hi"\n and')
    assert piece.calls[0].arguments == 'say \\"hi\\"\\n and'
    rest = "".join(c.arguments for p in parser.feed("\n</parameter>\n</function>") for c in p.calls)
    assert json.loads('{"city": "say \\"hi\\"\\n and' + rest) == {"city": 'say "hi"\n and'}
