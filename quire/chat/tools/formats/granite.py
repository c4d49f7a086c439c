"""Granite 3: <|tool_call|> and a list of calls, told to the model in words; thoughts in <think>, the answer in <response>.

The template says how in its system prompt and does not write the calls of earlier turns at all, so its source is the sign.
"""

from __future__ import annotations

from quire.chat.tools.detect import header_of, think_of
from quire.chat.tools.lark import Cut
from quire.chat.tools.marked import Marked
from quire.chat.tools.objects import ObjectSection
from quire.chat.tools.probe import RenderedTurns

NAME = "granite"
OPEN = "<|tool_call|>"


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if seen.one or OPEN not in seen.source or "JSON list" not in seen.source:
        return None
    think = think_of(seen)
    section = ObjectSection(openers=(OPEN, "<tool_call>"), first="[", between=", ", last="]")
    wrap = ("<response>", "</response>") if "<response>" in seen.source else ()
    return Marked(NAME, think, section, cut, header_of(seen, think), wrap)
