"""`ids`: replaces UUIDs and long hexadecimal numbers in the system prompt by zeros of the same shape.

The model can no longer name them, so a prompt whose ids it shall use (a path, a session to report to) must be left alone.
"""

from __future__ import annotations

import re

from quire.chat.canonical import Turns, system_turns, with_text
from quire.chat.tools.types import Tools

HELP = "replaces UUIDs and long hexadecimal numbers in the system prompt by zeros: the model cannot use them any more"
AUTO = False
_ID = re.compile(
    r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|\b(?=[0-9a-f]{0,63}\d)(?=[0-9a-f]{0,63}[a-f])[0-9a-f]{16,64}\b",
    re.I,
)


def rewrite(turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]:
    for i, text in system_turns(turns):
        made, count = _ID.subn(lambda match: re.sub("[0-9a-fA-F]", "0", match.group()), text)
        if made != text:
            turns = with_text(turns, i, made)
            told.append(f"messages[{i}] (system): {count} {'id was' if count == 1 else 'ids were'} replaced by zeros")
    return turns, tools
