"""`tools`: puts tools into the order of their names.

Clients that gather tools from several servers (MCP) may list them in the order in which these answered.
"""

from __future__ import annotations

from dataclasses import replace

from quire.chat.canonical import Turns
from quire.chat.tools.types import Tools

HELP = "puts tools into the order of their names"
AUTO = True


def rewrite(turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]:
    ordered = tuple(sorted(tools.tools, key=lambda tool: tool.name))
    moved = [tool.name for tool, before in zip(ordered, tools.tools, strict=True) if tool is not before]
    if not moved:
        return turns, tools
    told.append(f"tools: put into the order of their names; {len(moved)} of {len(ordered)} moved")
    return turns, replace(tools, tools=ordered)
