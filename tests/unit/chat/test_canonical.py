"""Canonicalizers: what each rewrites, what it leaves alone, and that it says so."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quire.chat.canonical import available, names, rewrite
from quire.chat.tools.types import Tool, Tools
from quire.observe.errors import BadRequest

NONE = Tools()
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.476; cc_entrypoint=cli; cch=7d1f0;"
GIT = (
    "gitStatus: This is the git status at the start of the conversation.\n\nCurrent branch: master\n\n"
    "Status:\nM calc.py\n?? out.txt\n\nRecent commits:\n7b455d4 a\n1234567 b"
)


def talk(system: str, user: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def texts(turns: list[dict[str, Any]]) -> list[str]:
    return [turn["content"] for turn in turns]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("billing", (f"{BILLING}\nbe kind", "hi"), ("be kind", "hi")),
        ("billing", (f"not first {BILLING}", "hi"), None),
        ("billing", ("be kind", BILLING), None),
        ("dates", ("a\nToday's date: Thu Nov 19 2026\nb", "hi"), ("a\nb", "Today's date: Thu Nov 19 2026\n\nhi")),
        ("dates", ("<current_date>2026-11-19</current_date>", "hi"), ("", "<current_date>2026-11-19</current_date>\n\nhi")),
        ("dates", ("The current time is 10:31 PM.\nThe date is 2026-01-01.", "hi"), ("", "The current time is 10:31 PM.\nThe date is 2026-01-01.\n\nhi")),
        ("dates", ("version 2024-05-01 of the API\nToday is a good day", "hi"), None),
        ("dates", ("be kind", "Today is 2026-11-19"), None),
        ("git", (f"rules\n\n{GIT}", "hi"), ("rules", f"{GIT}\n\nhi")),
        ("git", (f"rules\n\n{GIT}\n\nmore rules", "hi"), ("rules\nmore rules", f"{GIT}\n\nhi")),
        ("git", ("gitStatus: none", "hi"), None),
        ("git", (GIT, "hi"), ("", f"{GIT}\n\nhi")),
        ("git", ("a gitStatus: b\nRecent commits:\nc", "hi"), None),
        ("ids", ("session 51802154-c298-426a-b4ec-ed8980b48641!", "hi"), ("session 00000000-0000-0000-0000-000000000000!", "hi")),
        ("ids", ("key 7d1f0a99b2c3d4e5 and 1234567890123456, deadbeef", "hi"), ("key 0000000000000000 and 1234567890123456, deadbeef", "hi")),
        ("ids", ("be kind", "51802154-c298-426a-b4ec-ed8980b48641"), None),
    ],
)  # fmt: skip
def test_texts(name: str, before: tuple[str, str], after: tuple[str, str] | None):
    given = talk(*before)
    kept = copy.deepcopy(given)
    turns, tools, told = rewrite(given, NONE, (name,))
    assert given == kept, "what is given is never changed"
    assert tools is NONE
    assert tuple(texts(turns)) == (after or before)
    assert len(told) == (after is not None)
    assert all(line.startswith(f"{name}: messages[0] (system): ") for line in told)
    again = rewrite(turns, NONE, (name,))
    assert again[:2] == (turns, NONE), "what is canonical stays"
    assert not again[2]


def test_keys_are_sorted_at_every_depth_and_lists_are_not():
    schema = {
        "type": "object",
        "properties": {"b": {"type": "string", "enum": ["z", "a"]}, "a": {}},
        "required": ["b", "a"],
    }
    tools = Tools((Tool("f", "does", schema), Tool("g", "", None), Tool("h", "", {"a": 1, "b": [{"a": 1}]})))
    _, made, told = rewrite([], tools, ("keys",))
    assert list(made.tools[0].parameters or {}) == ["properties", "required", "type"]
    assert made.tools[0].parameters == schema, "the same JSON"
    properties = (made.tools[0].parameters or {})["properties"]
    assert list(properties) == ["a", "b"]
    assert list(properties["b"]) == ["enum", "type"]
    assert properties["b"]["enum"] == ["z", "a"]
    assert list(schema) == ["type", "properties", "required"]
    assert made.tools[1:] == tools.tools[1:]
    assert told == ("keys: tools[0] (f): the keys of its schema were sorted",)


def test_tools_are_put_in_order_and_the_choice_stays():
    tools = Tools((Tool("b"), Tool("a"), Tool("c")), "named", "b", False)
    _, made, told = rewrite([], tools, ("tools",))
    assert [t.name for t in made.tools] == ["a", "b", "c"]
    assert (made.choice, made.name, made.parallel) == ("named", "b", False)
    assert told == ("tools: tools: put into the order of their names; 2 of 3 moved",)
    assert rewrite([], made, ("tools",))[1] is made


def test_names():
    assert names("auto", "x") == ("billing", "keys", "tools"), "what carries no meaning"
    assert names(" dates ,AUTO", "x") == ("billing", "dates", "keys", "tools")
    assert names("none", "x") == names("", "x") == ()
    with pytest.raises(BadRequest, match="x names 'everything'") as error:
        names("auto,everything", "x")
    assert "auto, none, billing" in error.value.cure
    assert all(made.HELP for made in available().values())


def test_a_conversation_without_a_user_keeps_what_is_moved():
    turns, _, told = rewrite([{"role": "system", "content": "Today is 2026-11-19.\nbe kind"}], NONE, ("dates",))
    assert texts(turns) == ["be kind\nToday is 2026-11-19."]
    assert "the end of the system prompt" in told[0]
