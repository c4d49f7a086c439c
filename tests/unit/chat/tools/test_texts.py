"""Tools that take a text with a grammar: whatever is generated in a format's own way of calling is read back as a text of the grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest

from quire.chat.templates.template import ChatTemplate
from quire.chat.tools.check import parse
from quire.chat.tools.detect import detect_format
from quire.chat.tools.general import general
from quire.chat.tools.types import TEXT, Tool, Tools
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from tests.unit.chat.tools.test_constraints import Bytes, Walk, formats
from tests.unit.chat.tools.test_reading import ASSISTANT, HERMES, NAMED, XML

SCHEMA = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT], "additionalProperties": False}
PATCH = r"""start: "*** Begin" LF hunk+ "*** End" LF?
hunk: "@@" LF line+ | "drop " name LF
line: ("+" | "-" | " ") /(.*)/ LF -> line
name: /[a-z"\\]+/   // a comment
%import common.LF
"""
PATCH_LIKE = re.compile(r'\*\*\* Begin\n(@@\n([-+ ].*\n)+|drop [a-z"\\]+\n)+\*\*\* End\n?')
NESTED = 'start: "<" inner* ">"\ninner: start | /[a-c"\\n]/\n'


def nested(text: str) -> bool:
    depth = 0
    for i, one in enumerate(text):
        depth += (one == "<") - (one == ">")
        if one not in '<>abc"\n' or depth < 0 or (depth == 0 and i < len(text) - 1):
            return False
    return depth == 0 and text.startswith("<")


def takes_text(kind: str, grammar: str) -> Tool:
    return Tool("f", "", SCHEMA, True, Constraint(kind=kind, text=grammar, param="tools[0].format"))


def walked(constraint: Constraint | None, special: tuple[str, ...]) -> Walk:
    assert constraint is not None
    return Walk(constraint, special)


CASES: list[tuple[str, str, Callable[[str], object]]] = [
    ("lark", PATCH, PATCH_LIKE.fullmatch),
    ("regex", r'^[a-b"\\<]{1,6}\n?$', re.compile(r'[a-b"\\<]{1,6}\n?').fullmatch),
]


@pytest.mark.parametrize(("source", "closing"), [(HERMES, '"}}'), (XML, "\n</parameter>\n"), (NAMED, '"}')])
@pytest.mark.parametrize(("kind", "grammar", "right"), CASES)
def test_whatever_is_generated_is_a_text_of_the_grammar(
    source: str, closing: str, kind: str, grammar: str, right: Callable[[str], object]
) -> None:
    tools = Tools([takes_text(kind, grammar), Tool("now")], "named", "f")
    for form, special in formats(source):
        walk, rng, whole = walked(form.constraint(ASSISTANT, tools, None), special), random.Random(kind), 0
        ends = (closing, *(("*** End", "\\n*** End") if kind == "lark" else ()))
        for _ in range(12):
            if (text := walk.random(rng, *ends, most=300)) is None:
                continue
            whole += 1
            _, said, calls = parse(form.reading(ASSISTANT, tools), [text])
            assert not said.strip() and [name for name, _ in calls] == ["f"]
            assert right(calls[0][1][TEXT]), (text, calls)
        assert whole, "no walk came to an end"


TEXTS = [
    '*** Begin\n@@\n+say "hi" \\ and <b>\t…é\n-\n*** End\n',
    '*** Begin\ndrop a\\"b\n*** End',
]


@pytest.mark.parametrize("source", [HERMES, XML, NAMED])
def test_a_text_of_the_grammar_may_be_written(source: str) -> None:
    tools = Tools([takes_text("lark", PATCH)], "required", parallel=False)
    for form, special in formats(source):
        walk = walked(form.constraint(ASSISTANT, tools, None), special)
        for text in TEXTS:
            assert PATCH_LIKE.fullmatch(text)
            written = as_template(source, text)
            assert walk.takes(written), written
            assert parse(form.reading(ASSISTANT, tools), [written])[2] == [("f", {TEXT: text})]
            assert not walk.takes(written.replace("***", "**", 1))


def as_template(source: str, text: str) -> str:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {TEXT: text}}}
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    whole = ChatTemplate(source, "<BOS>", "<EOS>").render(turns)
    written = whole[whole.index(ASSISTANT) + len(ASSISTANT) :].lstrip("\n")
    return written.split("<|im_end|>")[0].rstrip("\n")


def test_a_mark_in_the_text_is_barred_where_it_would_end_the_text() -> None:
    tools = Tools([takes_text("lark", PATCH)], "required", parallel=False)
    for form, special in formats(XML):
        walk = walked(form.constraint(ASSISTANT, tools, None), special)
        written = as_template(XML, TEXTS[0].replace("<b>", "</parameter> <b>"))
        assert not walk.takes(written)


def test_a_recursive_grammar() -> None:
    tools = Tools([takes_text("lark", NESTED)], "required", parallel=False)
    for source in (HERMES, NAMED):
        for form, special in formats(source):
            walk, rng, whole = walked(form.constraint(ASSISTANT, tools, None), special), random.Random(3), 0
            assert walk.takes(as_template(source, '<a<"\n>>'))
            assert not walk.takes(as_template(source, '<a<"\n>'))
            for _ in range(10):
                if (text := walk.random(rng, '>"}', most=200)) is not None:
                    whole += 1
                    (call,) = parse(form.reading(ASSISTANT, tools), [text])[2]
                    assert nested(call[1][TEXT]), text
            assert whole


def test_a_recursive_grammar_where_texts_are_bare() -> None:
    """Only a control token ends such a text for certain."""
    tools = Tools([takes_text("lark", NESTED)], "required")
    plain = detect_format(ChatTemplate(XML, "<BOS>", "<EOS>"), Bytes())
    special = detect_format(ChatTemplate(XML, "<BOS>", "<EOS>"), Bytes(("</parameter>",)))
    assert plain is not None and special is not None
    with pytest.raises(BadRequest, match=r"tools\[0\].format: a rule that names itself"):
        plain.constraint(ASSISTANT, tools, None)
    walk = walked(special.constraint(ASSISTANT, tools, None), ("</parameter>",))
    assert walk.takes(as_template(XML, '<a<"\n>>'))
    assert not walk.takes(as_template(XML, '<a<"\n>'))


def test_the_arguments_are_json_whatever_the_grammar_has() -> None:
    """Every character that JSON escapes comes back, in both ways of writing a grammar."""
    characters = "".join(map(chr, range(32))) + '"\\/\x7fé😀'
    both = ['start: /[^a]/+ "b"\n', 'start: /[^a]/ start | "b"\n']
    for grammar in both:
        tools = Tools([takes_text("lark", grammar)], "required", parallel=False)
        for form, special in formats(HERMES):
            walk = walked(form.constraint(ASSISTANT, tools, None), special)
            inner = json.dumps({TEXT: characters + "b"}, ensure_ascii=False)
            assert walk.takes(f'<tool_call>\n{{"name": "f", "arguments": {inner}}}\n</tool_call>')
            assert not walk.takes(f'<tool_call>\n{{"name": "f", "arguments": {inner.replace("é", "a")}}}\n</tool_call>')


def test_the_general_prompt_holds_a_text_to_its_grammar() -> None:
    """Where it is demanded, and where the model calls by itself after some words."""
    form = general(None, Bytes().controls)
    tool = takes_text("lark", PATCH)
    for said, tools in (("", Tools([tool], "named", "f")), ("I write.\n", Tools([tool]))):
        walk = walked(form.constraint("", tools, None), ())
        for text in TEXTS:
            call = json.dumps({"name": "f", "arguments": {TEXT: text}}, ensure_ascii=False)
            written = f"{said}<tool_call>\n{call}\n</tool_call>"
            assert walk.takes(written), written
            assert parse(form.reading("", tools), [written])[2] == [("f", {TEXT: text})]
            assert not walk.takes(written.replace("***", "**", 1))
    walk, rng, whole = walked(form.constraint("", Tools([tool], "named", "f"), None), ()), random.Random(3), 0
    for _ in range(12):
        if (text := walk.random(rng, '"}}', "*** End", "\\n*** End", most=300)) is not None:
            whole += 1
            ((_, arguments),) = parse(form.reading("", Tools([tool], "named", "f")), [text])[2]
            assert PATCH_LIKE.fullmatch(arguments[TEXT]), text
    assert whole, "no walk came to an end"
