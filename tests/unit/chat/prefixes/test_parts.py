"""The map of a prompt: every text that a request has lies, in the rendered prompt, in the part that it is of."""

from __future__ import annotations

from typing import Any

import pytest

from quire.chat.prefixes.parts import FIRST_MARK, Map, Part, map_of, part_of
from quire.chat.types import Origin
from tests.unit.chat.prefixes.kit import COUNTS, STARTS, TOOLS_FIRST, TRIMS, template, tokenizer, tool

CALL = {"id": "c", "type": "function", "function": {"name": "grep_it", "arguments": '{"a": "needle"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are sysprompt."},
    {"role": "user", "content": "  first question \n"},
    {"role": "assistant", "content": "an answer", "tool_calls": [CALL]},
    {"role": "tool", "content": "resulttext", "tool_call_id": "c", "name": "grep_it"},
    {"role": "user", "content": "/last question"},
]
TOOLS = [tool("alpha_tool", x={"type": "string"}), tool("beta_tool", yparam={"type": "number"})]


def parts(source: str, messages: list[dict[str, Any]] = MESSAGES, **given: Any) -> Map:
    return map_of(template(source).conversation(messages, **given))


def where(made: Map, text: str) -> str:
    assert made.text.count(text) == 1, made.text
    at = made.text.index(text)
    found = {made.at(i).where for i in range(at, at + len(text))}
    assert len(found) == 1, found
    return found.pop()


def test_every_text_is_where_it_came_from():
    made = parts(TOOLS_FIRST, tools=TOOLS)
    assert where(made, "You are sysprompt.") == "messages[0] (system)"
    assert where(made, "Does alpha_tool.") == "tools[0] (alpha_tool)"
    assert where(made, '"x": {"type": "string"}') == "tools[0] (alpha_tool)"
    assert where(made, "beta_tool.") == "tools[1] (beta_tool)"
    assert where(made, "yparam") == "tools[1] (beta_tool)"
    assert where(made, "first question") == "messages[1] (user)"
    assert where(made, "an answer") == "messages[2] (assistant)"
    assert where(made, "needle") == "messages[2].tool_calls[0] (assistant)"
    assert where(made, "resulttext") == "messages[3] (tool)"
    assert where(made, "/last question") == "messages[4] (user)"
    assert made.at(len(made.text) - 1).kind == "template"  # the beginning of the answer
    assert {made.at(i).kind for i in range(len(made.text))} == {"system", "tools", "message", "template"}


@pytest.mark.parametrize("source", [TRIMS, STARTS, COUNTS])
def test_a_template_that_looks_at_what_it_is_given_is_mapped_all_the_same(source: str):
    """It trims, looks at the beginning, or counts characters: marks would change the prompt, and are put elsewhere or left out."""
    plain = [m for m in MESSAGES if m["role"] in ("system", "user")]
    made = parts(source, plain)
    assert made.text == template(source).render(plain)
    assert where(made, "You are sysprompt.") == "messages[0] (system)"
    assert where(made, "first question") == "messages[1] (user)"
    assert where(made, "last question") == "messages[2] (user)"


def test_marks_that_change_the_prompt_are_not_believed():
    """Each message has 99 characters, and with marks one more digit says so: places would be off by one more with each message."""
    many = [{"role": "user", "content": f"{n:02}".ljust(99, "x")} for n in range(60)]
    made = parts(COUNTS, many)
    for n in range(60):
        assert made.at(made.text.index(f"{n:02}xxx")).where == f"messages[{n}] (user)"


def test_marks_in_a_message_are_text():
    mine = [{"role": "user", "content": f"a{chr(FIRST_MARK)}b"}, {"role": "user", "content": "second"}]
    made = parts(TOOLS_FIRST, mine)
    assert made.text == template(TOOLS_FIRST).render(mine)
    assert where(made, "second") == "messages[1] (user)"


def test_a_token_s_part():
    words = tokenizer()
    text = template().render(MESSAGES, tools=TOOLS)
    ids = words.encode(text, add_special=False, parse_special=True)
    origin = Origin(MESSAGES, {"tools": TOOLS, "add_generation_prompt": True})
    for needle, expected in (("sysprompt", "messages[0]"), ("beta_tool.", "tools[1]"), ("/last", "messages[4]")):
        before = next(n for n in range(len(ids)) if len(words.decode(ids[:n])) == text.index(needle))
        assert part_of(origin, template(), words, ids[:before]).where.startswith(expected)


def test_what_cannot_be_known_is_said_to_be_unknown():
    words = tokenizer()
    assert part_of(None, template(), words, []) == Part("prompt", "the prompt")
    origin = Origin(MESSAGES, {})
    other = words.encode("quite another text", add_special=False, parse_special=False)
    assert part_of(origin, template(), words, other).kind == "unknown"
    refuses = template("{{ raise_exception('no') }}")
    assert part_of(origin, refuses, words, []).kind == "unknown"
