"""`context_management` of Anthropic's requests: edits that make a conversation shorter before the model sees it.

Owns the shapes of the edits and what each leaves of a conversation's turns: `clear_tool_uses_20250919` puts a placeholder where old
results of tools were, `clear_thinking_20251015` leaves out old thinking. `compact_20260112` would have the model sum the conversation up, which is not
done here, so it is refused once the prompt is long enough for it. Counts no tokens and renders nothing: `request.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.observe.errors import BadRequest
from quire.server.anthropic.turns import dotted
from quire.server.reading import Reading
from quire.server.shared.tools import Kind, at

CLEARED = "[This tool result was cleared to make room.]"
Turns = list[dict[str, Any]]


class Amount(msgspec.Struct, forbid_unknown_fields=True):
    """An amount, in units of its type: of a trigger, or of what is kept."""

    type: str
    value: int


class KeptThinking(msgspec.Struct, forbid_unknown_fields=True):
    """`keep` of `clear_thinking_20251015`."""

    type: str
    value: int | None = None


class ToolUses(msgspec.Struct, forbid_unknown_fields=True):
    """`clear_tool_uses_20250919`."""

    type: str
    trigger: Amount | None = None
    keep: Amount | None = None
    clear_at_least: Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ThinkingEdit(msgspec.Struct, forbid_unknown_fields=True):
    """`clear_thinking_20251015`."""

    type: str
    keep: str | KeptThinking | None = None


class Compaction(msgspec.Struct, forbid_unknown_fields=True):
    """`compact_20260112`."""

    type: str
    trigger: Amount | None = None
    pause_after_compaction: bool | None = None
    instructions: str | None = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """`context_management`."""

    edits: list[msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True)
class Edited:
    """What an edit would leave. It is done if that saves at least so many tokens of the prompt."""

    turns: Turns
    cleared: dict[str, Any]  # as `applied_edits` tells it
    at_least: int = 1


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit, checked."""

    where: str
    asked: ToolUses | ThinkingEdit | Compaction

    def edited(self, turns: Turns, tokens: int) -> Edited | None:
        """The conversation without what the edit clears; None where it clears nothing. `tokens` are the prompt's."""
        if isinstance(self.asked, ToolUses):
            return _without_results(self.asked, turns, tokens)
        if isinstance(self.asked, ThinkingEdit):
            return _without_thinking(self.asked, turns)
        most = 150_000 if self.asked.trigger is None else self.asked.trigger.value
        if tokens > most:
            where = dotted(self.where)
            raise BadRequest(
                f"{where}: the prompt has {tokens} tokens, which is over the trigger of {most}, and compaction is not supported",
                cure="leave the edit out, and shorten the conversation in the client",
                param=where,
                code="unsupported_parameter",
            )
        return None


def edits(asked: ContextManagement | None, reading: Reading) -> list[Edit]:
    """The edits of a request, each type at most once."""
    made: list[Edit] = []
    for i, raw in enumerate((asked and asked.edits) or ()):
        where = f"context_management.edits[{i}]"
        kind = at(where, raw, Kind).type
        if kind is None or kind not in _KINDS:
            refusal = BadRequest(
                f"{where}.type: must be one of {', '.join(_KINDS)}",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
            reading.excuse(refusal)
            continue
        if any(kind == one.asked.type for one in made):
            raise BadRequest(f"{where}.type: there is an edit of the type {kind} already", param=f"{where}.type")
        shape, check = _KINDS[kind]
        one = at(where, raw, shape, reading)
        check(where, one)
        made.append(Edit(where, one))
    return made


def _amount(where: str, amount: Amount | KeptThinking | None, types: tuple[str, ...], least: int = 0) -> None:
    if amount is None:
        return
    if amount.type not in types:
        raise BadRequest(f"{where}.type: must be {' or '.join(types)}", param=f"{where}.type")
    if amount.value is None or amount.value < least:
        raise BadRequest(f"{where}.value: must be at least {least}", param=f"{where}.value")


def _check_tool_uses(where: str, asked: ToolUses) -> None:
    _amount(f"{where}.trigger", asked.trigger, ("input_tokens", "tool_uses"))
    _amount(f"{where}.keep", asked.keep, ("tool_uses",))
    _amount(f"{where}.clear_at_least", asked.clear_at_least, ("input_tokens",))


def _check_thinking(where: str, asked: ThinkingEdit) -> None:
    keep = asked.keep
    if isinstance(keep, str):
        if keep != "all":
            raise BadRequest(f"{where}.keep: must be all, or an object", param=f"{where}.keep")
    elif keep is not None and keep.type != "all":
        _amount(f"{where}.keep", keep, ("all", "thinking_turns"), 1)


def _check_compaction(where: str, asked: Compaction) -> None:
    _amount(f"{where}.trigger", asked.trigger, ("input_tokens",))


_KINDS: dict[str, tuple[Any, Any]] = {
    "clear_tool_uses_20250919": (ToolUses, _check_tool_uses),
    "clear_thinking_20251015": (ThinkingEdit, _check_thinking),
    "compact_20260112": (Compaction, _check_compaction),
}


def _without_results(asked: ToolUses, turns: Turns, tokens: int) -> Edited | None:
    """All results but the latest become a placeholder, and so do the arguments of their calls where that is asked for."""
    results = [turn for turn in turns if turn["role"] == "tool"]
    trigger = asked.trigger or Amount("input_tokens", 100_000)
    if (tokens if trigger.type == "input_tokens" else len(results)) <= trigger.value:
        return None
    keep = 3 if asked.keep is None else asked.keep.value
    spared = set(asked.exclude_tools or ())
    old = {t["tool_call_id"] for t in results[: max(len(results) - keep, 0)] if t["name"] not in spared}
    if not old:
        return None
    inputs = asked.clear_tool_inputs
    named = set(inputs) if isinstance(inputs, list) else None

    def emptied(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if call["id"] not in old or (named is not None and function["name"] not in named):
            return call
        return call | {"function": function | {"arguments": "{}"}}

    made: Turns = []
    for turn in turns:
        if turn["role"] == "tool" and turn["tool_call_id"] in old:
            turn = turn | {"content": CLEARED}
        elif inputs and "tool_calls" in turn:
            turn = turn | {"tool_calls": [emptied(call) for call in turn["tool_calls"]]}
        made.append(turn)
    least = 1 if asked.clear_at_least is None else max(asked.clear_at_least.value, 1)
    return Edited(made, {"cleared_tool_uses": len(old)}, least)


def _without_thinking(asked: ThinkingEdit, turns: Turns) -> Edited | None:
    """Thinking stays only in the assistant's latest turns that have any. Calls and their results are of one turn."""
    keep = asked.keep or KeptThinking("thinking_turns", 1)
    if isinstance(keep, str) or keep.value is None:
        return None
    of: list[int] = []  # which of the assistant's turns each belongs to
    number = 0
    for i, turn in enumerate(turns):
        # A text beside results is in the same message as they are: the assistant has not ended its turn.
        number += turn["role"] == "user" and (i == 0 or turns[i - 1]["role"] != "tool")
        of.append(number)
    thinking = sorted({n for n, turn in zip(of, turns, strict=True) if "reasoning_content" in turn})
    old = set(thinking[: -keep.value])
    if not old:
        return None
    made = [
        {name: value for name, value in turn.items() if name != "reasoning_content"} if n in old else turn
        for n, turn in zip(of, turns, strict=True)
    ]
    return Edited(made, {"cleared_thinking_turns": len(old)})
