"""Command R+ with tools: Action:, a fence, and a list of {"tool_name": …, "parameters": {…}}."""

from __future__ import annotations

from quire.chat.tools.lark import Cut
from quire.chat.tools.marked import Marked
from quire.chat.tools.objects import Keys, ObjectSection
from quire.chat.tools.probe import RenderedTurns

NAME = "command-r"
OPEN = "Action:\n```json"


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if OPEN not in seen.one:
        return None
    section = ObjectSection(
        openers=(OPEN, "Action: ```json"),
        closer="```",
        first="\n[\n    ",
        between=",\n    ",
        last="\n]```",
        head='{\n        "tool_name": "',
        middle='",\n        "parameters": ',
        tail="\n    }",
        keys=Keys(name=("tool_name",), arguments=("parameters",)),
    )
    return Marked(NAME, None, section, cut, seen.header)
