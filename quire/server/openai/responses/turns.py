"""Items of the Responses API as turns for a model's template.

Reasoning, text and calls that follow each other are one turn of the assistant's. A summary of an earlier part of the conversation
(`compaction`) is a turn of the user's. What items say about the request (tools that they bring, settings that they change) is told here,
too; it is no turn. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.observe.errors import BadRequest
from quire.server.openai.responses.calls import KIND_OF, OUTPUTS, Item, KnownAs, arguments_of, result_of
from quire.server.openai.responses.items import SEAL_SUMMARY, unsealed
from quire.server.openai.responses.tools import Brought
from quire.server.served import Served
from quire.server.shared.conversation import MAX_CALLS, History, arguments_text

SUMMARY = "This is a summary of the conversation so far, which was too long to be kept:\n\n"
LOST = "[An earlier part of this conversation was summarized by another server. The summary cannot be read here.]"
_SILENT = ("additional_tools", "configuration_update", "compaction_trigger")  # items that are no turn


def turns(
    served: Served, instructions: str | None, items: Sequence[Item], places: Sequence[str], known_as: KnownAs
) -> list[dict[str, Any]]:
    """Items as turns for the model's template. `places` are where they stand in the request, for refusals."""
    made = _Turns("developer" in str(getattr(served.template, "source", "")), known_as)
    if instructions:
        made.turns.append({"role": "system", "content": instructions})
    for where, item in zip(places, items, strict=True):
        if item["type"] not in _SILENT:
            made.add(where, item)
    return _one_system(made.turns)


def brought(items: Sequence[Item], places: Sequence[str]) -> list[Brought]:
    """The tools that items bring along."""
    return [
        Brought(where, item["tools"], item["type"] == "tool_search_output")
        for where, item in zip(places, items, strict=True)
        if item["type"] in ("tool_search_output", "additional_tools")
    ]


def compacted(items: list[Item]) -> list[Item]:
    """Stored items without what a compaction among them stands for: before it, only what was said to the assistant is left."""
    last = max((i for i, item in enumerate(items) if item["type"] == "compaction"), default=0)
    return [*(item for item in items[:last] if _told(item)), *items[last:]]


def _told(item: Item) -> bool:
    return item["type"] in _SILENT or (item["type"] == "message" and item["role"] != "assistant")


class _Turns:
    """Turns in the making."""

    def __init__(self, knows_developer: bool, known_as: KnownAs):
        self.turns: list[dict[str, Any]] = []
        self._knows_developer = knows_developer
        self._known_as = known_as
        self._history = History()
        self._calls: dict[str, str] = {}  # ids of calls, by those of their items

    def add(self, where: str, item: Item) -> None:
        kind = item["type"]
        if kind in OUTPUTS:
            id = item["call_id"] or next(reversed(self._calls), "")  # a search that was done here has none
            made = self._history.answered(f"{where}.call_id", self._calls.get(id, id), result_of(item, self._known_as))
            self.turns.append(made)
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" and not self._knows_developer else item["role"]
            self.turns.append({"role": role, "content": joined(item["content"])})
        elif kind == "message":
            turn = self._assistant(("content", "tool_calls"))
            turn["content"] = joined(item["content"])
        elif kind == "reasoning":
            thought = joined(item["content"]) or joined(item["summary"])
            if thought:
                self._assistant(("content", "tool_calls", "reasoning_content"))["reasoning_content"] = thought
        elif kind == "compaction":
            said = unsealed(item["encrypted_content"], SEAL_SUMMARY)
            self.turns.append({"role": "user", "content": LOST if said is None else SUMMARY + said})
        else:
            self._call(where, KIND_OF[kind], item)

    def _call(self, where: str, kind: str, item: Item) -> None:
        turn = self._assistant(())
        calls = turn.setdefault("tool_calls", [])
        if len(calls) >= MAX_CALLS:
            raise BadRequest(f"{where}: a turn has at most {MAX_CALLS} calls", param=where)
        text = arguments_text(f"{where}.arguments", arguments_of(item))
        id = item["call_id"] or item["id"]
        self._calls |= {id: id} | ({} if item["id"] in self._calls else {item["id"]: id})
        name = self._known_as(kind, item.get("namespace"), item.get("name", kind))
        calls.append(self._history.called(where, id, name, text))

    def _assistant(self, closed_by: tuple[str, ...]) -> dict[str, Any]:
        """The assistant's turn that goes on, or a new one where the last has any of these already."""
        last = self.turns[-1] if self.turns else None
        if last is None or last["role"] != "assistant" or any(last.get(name) for name in closed_by):
            self.turns.append({"role": "assistant", "content": ""})
        return self.turns[-1]


def _one_system(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and what else is said to the system before anybody speaks, as one turn: templates expect one."""
    count = 0
    while count < len(made) and made[count]["role"] in ("system", "developer"):
        count += 1
    if count < 2:
        return made
    text = "\n\n".join(turn["content"] for turn in made[:count])
    return [{"role": made[count - 1]["role"], "content": text}, *made[count:]]


def joined(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in parts)
