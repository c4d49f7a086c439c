"""`git`: moves the state of a git repository from the system prompt to the head of the first user message.

Claude Code writes it (`gitStatus: ...`: branch, changed files, recent commits) when it starts, so resuming a session after a change begins another prompt, and
the tools, which templates write behind the system prompt, are computed again.
"""

from __future__ import annotations

from quire.chat.canonical import Turns, moved, system_turns
from quire.chat.tools.types import Tools

HELP = "moves Claude Code's git status from the system prompt to the head of the first user message"
AUTO = False
_BEGIN, _COMMITS = "gitStatus: ", "\nRecent commits:\n"
MOST = 32_000  # characters of a status


def rewrite(turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]:
    for i, text in system_turns(turns):
        found = _status(text)
        if found is not None:
            begin, end = found
            turns, place = moved(turns, i, text[:begin].rstrip("\n") + text[end:], text[begin:end].strip("\n"))
            told.append(f"messages[{i}] (system): the git status was moved to {place}")
    return turns, tools


def _status(text: str) -> tuple[int, int] | None:
    """Where the status begins, at the beginning of a line, and where the last of its commits ends."""
    begin = 0 if text.startswith(_BEGIN) else text.find("\n" + _BEGIN) + 1
    if not text.startswith(_BEGIN, begin):
        return None
    commits = text.find(_COMMITS, begin, begin + MOST)
    if commits < 0:
        return None
    end = text.find("\n\n", commits + len(_COMMITS))
    return begin, len(text) if end < 0 else end + 1
