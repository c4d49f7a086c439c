"""`dates`: moves lines of the system prompt that tell the current date or time to its end.

The model still reads them. Only lines that say what they are (today, current, date, time, now) are taken: a date may be meant to stand where it does.
"""

from __future__ import annotations

import re

from quire.chat.canonical import Turns, system_turns, with_text
from quire.chat.prefixes.change import DATE
from quire.chat.tools.types import Tools

HELP = "moves lines of the system prompt that tell the current date or time to its end"
AUTO = False
_SAYS = re.compile(r"\b(today|current|currently|now|date|time|datetime|timestamp)\b", re.I)
MOST = 500  # characters of a line that says the date


def rewrite(turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]:
    for i, text in system_turns(turns):
        lines = text.split("\n")
        dated = {j for j, line in enumerate(lines) if len(line) <= MOST and _SAYS.search(line) and DATE.search(line)}
        kept = [line for j, line in enumerate(lines) if j not in dated]
        moved = "\n".join([*kept, *(lines[j] for j in sorted(dated))])
        if moved != text:
            turns = with_text(turns, i, moved)
            shown = "; ".join(repr(lines[j].strip()[:80]) for j in sorted(dated))
            told.append(f"messages[{i}] (system): moved to the end: {shown[:400]}")
    return turns, tools
