"""`dates`: moves lines that tell the current date or time from the system prompt to the head of the first user message.

The model still reads them. Only lines that say what they are (today, current, date, time, now) are taken: another date may be meant to stand where it does.
The end of the system prompt would be no better a place: many templates write the tools, most of an agent's prompt, behind it.
"""

from __future__ import annotations

import re

from quire.chat.canonical import Turns, moved, system_turns
from quire.chat.prefixes.change import DATE
from quire.chat.tools.types import Tools

HELP = "moves lines that tell the current date or time from the system prompt to the head of the first user message"
AUTO = False
_SAYS = re.compile(r"\b(today|current|currently|now|date|time|datetime|timestamp)\b|_date\b|_time\b", re.I)
MOST = 500  # characters of a line that says the date


def rewrite(turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]:
    for i, text in system_turns(turns):
        lines = text.split("\n")
        dated = [line for line in lines if _tells(line)]
        if dated:
            kept = "\n".join(line for line in lines if not _tells(line))
            turns, place = moved(turns, i, kept, "\n".join(dated))
            shown = "; ".join(repr(line.strip()[:80]) for line in dated)
            told.append(f"messages[{i}] (system): moved to {place}: {shown[:400]}")
    return turns, tools


def _tells(line: str) -> bool:
    return len(line) <= MOST and bool(_SAYS.search(line) and DATE.search(line))
