"""`billing`: removes the line that Claude Code writes about itself at the head of its system prompt.

The line (`x-anthropic-billing-header: cc_version=...; cch=...;`) is for Anthropic's accounting and changes from request to request.
"""

from __future__ import annotations

import re

from quire.chat.canonical import Turns, system_turns, with_text
from quire.chat.tools.types import Tools

HELP = "removes Claude Code's billing line from the head of the system prompt"
AUTO = True
_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")


def without(text: str) -> str:
    """A system prompt without the line, where it begins with it."""
    return _LINE.sub("", text, count=1) if _LINE.match(text) else text


def rewrite(turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]:
    for i, text in system_turns(turns):
        kept = without(text)
        if kept != text:
            turns = with_text(turns, i, kept)
            told.append(f"messages[{i}] (system): the line x-anthropic-billing-header was removed")
    return turns, tools
