"""Answers made of messages, each with a header that says whom it is for: reasoning, the reader, or a tool.

    [start] header message_mark body end_mark [start] header …

Shared by formats whose headers differ (`formats/harmony.py`, `formats/muse.py`). A header that never comes makes what
was written text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tools

REASONING, TEXT, CALL = "reasoning", "text", "call"
MAX_HEADER = 400


@dataclass(frozen=True, slots=True)
class Envelope:
    """The marks of such answers."""

    start: str  # begins a message, with the writer's role after it
    message: str  # ends a header
    ends: tuple[str, ...]  # end a body
    address: Callable[[str], tuple[str, str]]  # what a header says: one of the three above, and the tool's name
    body: Callable[[Text, str, Tools, Stops], Read[bool]]  # reads the body of a call; False: it is none


def read(t: Text, envelope: Envelope, tools: Tools, opened: str | None) -> Read[None]:
    """Read one answer. `opened` is a header that the prompt finished already."""
    ends = Stops(*envelope.ends, envelope.start)
    header = opened
    reasoned = False
    while True:
        if header is None:
            t.hold()
            while (yield from t.gets(envelope.start, *envelope.ends)):
                t.hold()  # marks between messages are nobody's text
            if not (yield from t.next()):
                t.forget()
                return
            header, stop = yield from t.short(Stops(envelope.message), MAX_HEADER)
            if stop is None:
                t.settle()
                yield from t.upto(Stops(), t.say)
                return
        kind, name = envelope.address(header)
        if kind == CALL and (not tools.tools or tools.choice == "none"):
            kind = TEXT
        t.forget() if kind != CALL else None
        if kind == CALL:
            if not (yield from envelope.body(t, name, tools, ends)):
                t.settle()
                yield from t.upto(ends, t.say, take=False)
        else:
            if kind == REASONING and reasoned:
                t.reason("\n")
            reasoned = reasoned or kind == REASONING
            yield from t.upto(ends, t.reason if kind == REASONING else t.say, take=False)
        header = None
