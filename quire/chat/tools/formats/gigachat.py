"""GigaChat 3: the call is a message of its own, `function call`, with {"name": …, "arguments": {…}} in it."""

from __future__ import annotations

from quire.chat.tools.lark import Cut
from quire.chat.tools.marked import Marked
from quire.chat.tools.objects import ObjectSection
from quire.chat.tools.probe import RenderedTurns

NAME = "gigachat-3"
CALL = "function call<|role_sep|>"
OPEN = f"<|message_sep|>\n\n{CALL}"


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if CALL not in seen.one:
        return None
    section = ObjectSection(openers=(OPEN, CALL), first="\n", between=f"{OPEN}\n")
    return Marked(NAME, None, section, cut, seen.header, more=("<|message_sep|>", "<|role_sep|>"))
