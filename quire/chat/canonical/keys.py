"""`keys`: sorts the keys of every object in the schemas of tools.

JSON gives the order of keys no meaning, and some clients write another one each time. Lists are left as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.chat.canonical import Turns
from quire.chat.tools.types import Tools

HELP = "sorts the keys in the schemas of tools"
AUTO = True


def rewrite(turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]:
    made = list(tools.tools)
    for i, tool in enumerate(made):
        if tool.parameters is None:
            continue
        ordered, changed = _ordered(tool.parameters)
        if changed:
            made[i] = replace(tool, parameters=ordered)
            told.append(f"tools[{i}] ({tool.name}): the keys of its schema were sorted")
    return turns, replace(tools, tools=tuple(made)) if told else tools


def _ordered(value: Any) -> tuple[Any, bool]:
    """A value with its objects' keys in order, and whether any were not."""
    if isinstance(value, dict):
        pairs = [(key, *_ordered(value[key])) for key in sorted(value)]
        return {key: item for key, item, _ in pairs}, list(value) != sorted(value) or any(c for *_, c in pairs)
    if isinstance(value, list):
        items = [_ordered(item) for item in value]
        return [item for item, _ in items], any(changed for _, changed in items)
    return value, False
