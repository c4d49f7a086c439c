"""`git`: moves the state of a git repository from the system prompt to the head of the first user message.

Claude Code writes it (`gitStatus: ...`: branch, changed files, recent commits) when it starts, so resuming a session after a change begins another prompt, and
the tools, which templates write behind the system prompt, are computed again.
"""

from __future__ import annotations

import re

from quire.chat.canonical import Turns, moved, system_turns
from quire.chat.tools.types import Tools

HELP = "moves Claude Code's git status from the system prompt to the head of the first user message"
AUTO = False
_STATUS = re.compile(r"^gitStatus: [^\n]*\n(?:[^\n]*\n){1,500}?Recent commits:\n(?:[^\n]+(?:\n|\Z)){0,100}", re.M)


def rewrite(turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]:
    for i, text in system_turns(turns):
        found = _STATUS.search(text)
        if found is not None:
            kept = text[: found.start()].rstrip("\n") + text[found.end() :]
            turns, place = moved(turns, i, kept, found.group().strip("\n"))
            told.append(f"messages[{i}] (system): the git status was moved to {place}")
    return turns, tools
