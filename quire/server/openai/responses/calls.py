"""The kinds of calls of the Responses API: what a call and its result are as items, and what they are for a model, which knows functions alone.

A model calls a function with JSON arguments. Which item that becomes is the kind of the tool that the name stands for (`Known`): a function's
call, a text for a `custom` tool, a command for a shell, a change of a file, a search for tools. Items that clients send back become the
same arguments again, so that a model sees what it wrote. Knows no prompts and no events.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.server.shared.texts import arguments_with

Item = dict[str, Any]
KnownAs: TypeAlias = Callable[
    [str, str | None, str], str
]  # the model's name of a tool: by kind, namespace or none, and name

FUNCTION, CUSTOM, LOCAL_SHELL, SHELL, APPLY_PATCH, SEARCH = (
    *("function", "custom", "local_shell", "shell", "apply_patch", "tool_search"),
)
# The type of the item that a call of a tool of that type is, and the beginning of its id.
CALLS = {
    FUNCTION: ("function_call", "fc"),
    CUSTOM: ("custom_tool_call", "ctc"),
    LOCAL_SHELL: ("local_shell_call", "lsh"),
    SHELL: ("shell_call", "sh"),
    APPLY_PATCH: ("apply_patch_call", "apc"),
    SEARCH: ("tool_search_call", "tsc"),
}
KIND_OF = {item: kind for kind, (item, _) in CALLS.items()}
OUTPUTS = {  # the type of the item that a result is, and the beginning of its id
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "local_shell_call_output": "lsho",
    "shell_call_output": "sho",
    "apply_patch_call_output": "apco",
    "tool_search_output": "tso",
}
OPERATIONS = ("create_file", "update_file", "delete_file")


@dataclass(frozen=True, slots=True)
class Known:
    """What a name that the model knows stands for."""

    kind: str = FUNCTION
    name: str = ""
    space: str | None = None
    here: bool = False  # of a search for tools: it is done here, not by the client

    def item(self, id: str, call: str) -> Item:
        """A call that has no arguments yet."""
        head: Item = {"id": id, "type": CALLS[self.kind][0], "status": "in_progress", "call_id": call}
        if self.kind in (FUNCTION, CUSTOM):
            space = {"namespace": self.space} if self.space else {}
            return head | {"name": self.name, **space, ("arguments" if self.kind == FUNCTION else "input"): ""}
        if self.kind == SEARCH:
            return head | {"execution": "server" if self.here else "client", "call_id": None if self.here else call}
        return head

    def fields(self, arguments: str) -> Item | None:
        """The fields of a call with these arguments; None where they are none for a tool of this kind."""
        try:
            given: Any = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
        if not isinstance(given, dict):
            return None
        if self.kind == SEARCH:
            return {"arguments": given}
        return {LOCAL_SHELL: _exec, SHELL: _commands, APPLY_PATCH: _operation}[self.kind](given)


def is_json(text: str) -> bool:
    """Whether a text is whole JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _exec(given: dict[str, Any]) -> Item | None:
    command = given.get("command")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    if not _texts(command) or not command:
        return None
    env = given.get("env")
    return {
        "action": {
            "type": "exec",
            "command": command,
            "env": {k: str(v) for k, v in env.items()} if isinstance(env, dict) else {},
            "timeout_ms": _whole(given.get("timeout_ms")),
            "user": _word(given.get("user")),
            "working_directory": _word(given.get("working_directory")),
        }
    }


def _commands(given: dict[str, Any]) -> Item | None:
    commands = given.get("commands", given.get("command"))
    commands = [commands] if isinstance(commands, str) else commands
    if not _texts(commands) or not commands:
        return None
    limits = {name: _whole(given.get(name)) for name in ("timeout_ms", "max_output_length")}
    return {"action": {"commands": commands, **limits}, "environment": {"type": "local"}}


def _operation(given: dict[str, Any]) -> Item | None:
    kind, path, diff = given.get("type"), given.get("path"), given.get("diff")
    if kind not in OPERATIONS or not isinstance(path, str):
        return None
    if kind == "delete_file":
        return {"operation": {"type": kind, "path": path}}
    return {"operation": {"type": kind, "path": path, "diff": diff}} if isinstance(diff, str) else None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


# ---- what a model is shown of items


def arguments_of(item: Item) -> str | dict[str, Any]:
    """The arguments of a call, as the model wrote them."""
    kind = KIND_OF[item["type"]]
    if kind == FUNCTION:
        return item["arguments"]
    if kind == CUSTOM:
        return arguments_with(item["input"])
    if kind == SEARCH:
        return item["arguments"]
    given = item["operation"] if kind == APPLY_PATCH else item["action"]
    return {name: value for name, value in given.items() if value not in (None, {}) and value != "exec"}


def result_of(item: Item, known_as: KnownAs) -> str:
    """The text of a result; tools that it brings are told by the names that the model knows."""
    kind = item["type"]
    if kind == "tool_search_output":
        names = [known_as(*one) for tool in item["tools"] for one in _named(tool)]
        return f"These tools can be called now: {', '.join(names)}" if names else "No tool was found."
    if kind == "shell_call_output":
        kept = [{k: one[k] for k in ("stdout", "stderr", "outcome") if k in one} for one in item["output"]]
        return json.dumps(kept, ensure_ascii=False)
    if kind == "apply_patch_call_output":
        return f"{item['status']}: {item['output']}" if item.get("output") else item["status"]
    output = item["output"]
    return output if isinstance(output, str) else "\n".join(part.get("text", "") for part in output)


def _named(tool: Any, space: str | None = None) -> list[tuple[str, str | None, str]]:
    if not isinstance(tool, dict):
        return []
    if isinstance(tool.get("tools"), list):
        return [one for inner in tool["tools"] for one in _named(inner, str(tool.get("name")))]
    kind = str(tool.get("type"))
    return [(kind, space, str(tool.get("name") or kind))]
