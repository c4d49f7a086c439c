"""`context_management` at /v1/messages: what the edits clear, what they leave, and that the answer tells both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.chat.types import Chunk
from quire.server.anthropic.editing import CLEARED
from tests.unit.server.anthropic.test_anthropic import events
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, client_for
from tests.unit.server.scripts import script

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ALL = {"type": "clear_thinking_20251015", "keep": "all"}
LONG = "a result that is a good deal longer than what is put in its place. " * 3


class Renders(FakeCompleter):
    """Renders all of a message, not its text alone."""

    async def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        self.rendered.append((messages, kwargs))
        return self.tokenizer.encode(json.dumps(messages))


def completer() -> FakeCompleter:
    made = Renders(context=20_000)
    made.answer_format = CALLER
    made.script = script(Chunk(text="ok"))
    return made


def called(n: int, name: str = "read") -> list[dict[str, Any]]:
    """A call after some thinking, and its result with a remark of the user's."""
    use = {"type": "tool_use", "id": f"t{n}", "name": name, "input": {"path": f"/file/{n}"}}
    result = {"type": "tool_result", "tool_use_id": f"t{n}", "content": f"{n}: {LONG}"}
    return [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": f"thought {n}", "signature": ""}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "a reminder"}]},
    ]


# Two turns of the assistant's: a loop of three calls and an answer, then a loop of one call.
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "read"},
    *called(1),
    *called(2, "list"),
    *called(3),
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "thought 4", "signature": ""}]},
    {"role": "user", "content": "again"},
    *called(5),
]


def ask(*edits: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HISTORY, "context_management": {"edits": list(edits)}, **fields}


async def edited(*edits: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The turns that the model is shown, and the edits that the answer tells; the same in a stream and in a count."""
    fake = completer()
    async with client_for(fake) as http:
        r = await http.post(MESSAGES, json=ask(*edits, max_tokens=9))
        assert r.status_code == 200, r.text
        whole, shown = r.json(), json.loads(bytes(fake.seen[0].prompt))
        found = events((await http.post(MESSAGES, json=ask(*edits, max_tokens=9, stream=True))).text)
        count = (await http.post(COUNT, json=ask(*edits))).json()
        plain = (await http.post(COUNT, json={"model": MODEL, "messages": HISTORY})).json()
    assert fake.seen[0].prompt == fake.seen[1].prompt
    assert found[-2]["type"] == "message_delta"
    assert found[-2]["context_management"] == whole["context_management"]
    usage, applied = whole["usage"], whole["context_management"]["applied_edits"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count["context_management"] == {"original_input_tokens": plain["input_tokens"]}
    saved = sum(one["cleared_input_tokens"] for one in applied)
    assert plain == {"input_tokens": count["input_tokens"] + saved}
    return shown, [{k: v for k, v in one.items() if k != "cleared_input_tokens"} for one in applied]


def results(turns: list[dict[str, Any]]) -> list[str]:
    return ["-" if t["content"] == CLEARED else t["content"][0] for t in turns if t["role"] == "tool"]


def thoughts(turns: list[dict[str, Any]]) -> list[str]:
    return [t["reasoning_content"][-1] for t in turns if "reasoning_content" in t]


def arguments(turns: list[dict[str, Any]]) -> list[str]:
    return [c["function"]["arguments"] for t in turns for c in t.get("tool_calls", [])]


def uses(**fields: Any) -> dict[str, Any]:
    return {"type": "clear_tool_uses_20250919", **fields}


def of(type: str, value: int) -> dict[str, Any]:
    return {"type": type, "value": value}


NOW = of("tool_uses", 1)


@pytest.mark.parametrize(
    "edits",
    [
        [],
        [ALL],
        [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}],
        [{"type": "clear_thinking_20251015", "keep": of("thinking_turns", 2)}],
        [uses()],
        [ALL, uses(trigger=of("input_tokens", 100_000), keep=of("tool_uses", 0), clear_tool_inputs=True)],
        [uses(trigger=of("tool_uses", 4), keep=of("tool_uses", 0))],
        [uses(trigger=NOW, keep=of("tool_uses", 4))],
        [uses(trigger=NOW, clear_at_least=of("input_tokens", 10_000))],
        [uses(trigger=NOW, keep=of("tool_uses", 0), exclude_tools=["read", "list"])],
        [{"type": "compact_20260112"}],
        [{"type": "compact_20260112", "trigger": of("input_tokens", 150_000), "instructions": "be short"}],
    ],
)
async def test_edits_that_clear_nothing(edits: list[Any]):
    shown, applied = await edited(*edits)
    assert applied == []
    assert results(shown) == ["1", "2", "3", "5"] and thoughts(shown) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("edit", "left"),
    [
        (uses(trigger=NOW), ["-", "2", "3", "5"]),
        (uses(trigger=of("tool_uses", 3), keep=of("tool_uses", 1)), ["-", "-", "-", "5"]),
        (uses(trigger=of("input_tokens", 1000), keep=of("tool_uses", 0)), ["-", "-", "-", "-"]),
        (uses(trigger=NOW, keep=of("tool_uses", 1), exclude_tools=["list"]), ["-", "2", "-", "5"]),
        (uses(trigger=NOW, keep=of("tool_uses", 2), clear_at_least=of("input_tokens", 200)), ["-", "-", "3", "5"]),
    ],
)
async def test_old_results_are_cleared(edit: Any, left: list[str]):
    shown, applied = await edited(edit)
    assert results(shown) == left and thoughts(shown) == ["1", "2", "3", "4", "5"]
    assert applied == [{"type": edit["type"], "cleared_tool_uses": left.count("-")}]
    assert "{}" not in arguments(shown)


@pytest.mark.parametrize(
    ("inputs", "empty"), [(False, []), (True, [0, 1, 2]), (["list"], [1]), (["read"], [0, 2]), ([], [])]
)
async def test_arguments_of_cleared_calls_are_cleared_too(inputs: Any, empty: list[int]):
    shown, _ = await edited(uses(trigger=NOW, keep=of("tool_uses", 1), clear_tool_inputs=inputs))
    assert [i for i, text in enumerate(arguments(shown)) if text == "{}"] == empty
    assert len(arguments(shown)) == 4


@pytest.mark.parametrize("keep", [None, of("thinking_turns", 1)])
async def test_old_thinking_is_cleared_by_turns_not_by_messages(keep: Any):
    shown, applied = await edited({"type": "clear_thinking_20251015", "keep": keep})
    assert thoughts(shown) == ["5"] and results(shown) == ["1", "2", "3", "5"]
    assert applied == [{"type": "clear_thinking_20251015", "cleared_thinking_turns": 1}]


async def test_edits_go_one_after_the_other():
    shown, applied = await edited({"type": "clear_thinking_20251015"}, uses(trigger=NOW, keep=of("tool_uses", 0)))
    assert thoughts(shown) == ["5"] and results(shown) == ["-"] * 4
    assert [one["type"] for one in applied] == ["clear_thinking_20251015", "clear_tool_uses_20250919"]


async def test_what_does_not_make_the_prompt_shorter_is_not_done():
    """A result that is shorter than the placeholder stays."""
    fake = completer()
    short = json.loads(json.dumps(HISTORY).replace(LONG, ""))
    async with client_for(fake) as http:
        body = ask(uses(trigger=NOW, keep=of("tool_uses", 0)), max_tokens=9) | {"messages": short}
        r = await http.post(MESSAGES, json=body)
    assert r.json()["context_management"] == {"applied_edits": []}
    assert CLEARED not in bytes(fake.seen[0].prompt).decode()


AT = "context_management.edits.0"


@pytest.mark.parametrize(
    ("edits", "begins"),
    [
        ([5], f"{AT}: Expected object"),
        ([{}], f"{AT}.type: must be one of clear_tool_uses_20250919, "),
        ([{"type": "clear_all_20990101"}], f"{AT}.type: must be one of"),
        ([ALL, ALL], "context_management.edits.1.type: there is an edit of the type clear_thinking_20251015 already"),
        ([uses(x=1)], f"{AT}.x: Extra inputs"),
        ([uses(trigger=of("turns", 1))], f"{AT}.trigger.type: must be input_tokens or tool_uses"),
        ([uses(trigger=of("tool_uses", -1))], f"{AT}.trigger.value: must be at least 0"),
        ([uses(trigger={"type": "tool_uses"})], f"{AT}.trigger.value: Field required"),
        ([uses(keep=of("input_tokens", 1))], f"{AT}.keep.type: must be tool_uses"),
        ([uses(clear_at_least=of("tool_uses", 1))], f"{AT}.clear_at_least.type: must be input_tokens"),
        ([ALL | {"keep": "some"}], f"{AT}.keep: must be all"),
        ([ALL | {"keep": of("thinking_turns", 0)}], f"{AT}.keep.value: must be at least 1"),
        ([ALL | {"keep": {"type": "thinking_turns"}}], f"{AT}.keep.value: must be at least 1"),
        ([ALL | {"keep": of("messages", 1)}], f"{AT}.keep.type: must be all or thinking_turns"),
        ([{"type": "compact_20260112", "trigger": of("input_tokens", 100)}], f"{AT}: the prompt has "),
    ],
)
async def test_refusals(edits: list[Any], begins: str):
    fake = completer()
    async with client_for(fake, strict=True) as http:
        for body in (ask(*edits, max_tokens=9), ask(*edits, max_tokens=9, stream=True)):
            r = await http.post(MESSAGES, json=body)
            assert r.status_code == 400 and not fake.seen
            assert r.json()["error"]["message"].startswith(begins), r.text


@pytest.mark.parametrize("asked", [None, {}, {"edits": None}])
async def test_no_edits(asked: Any):
    async with client_for(completer()) as http:
        r = await http.post(MESSAGES, json=ask(max_tokens=9) | {"context_management": asked})
    assert ("context_management" in r.json()) == (asked is not None)
