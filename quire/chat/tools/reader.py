"""Incremental parsing for every format: text comes in pieces, and a generator reads it, waiting where it cannot decide yet.

A format's parser is a generator, written as if the whole answer were there; the primitives of `Text` yield where more text is needed.
So what is parsed cannot depend on how the text was cut. Undecided text stays in a short buffer, everything else has been handed out, and
no character is looked at twice: parsing a megabyte without an end costs a megabyte. Knows no format.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from quire.chat.tools.jsontext import JsonText
from quire.chat.tools.types import Pieces
from quire.chat.types import CallPart

T = TypeVar("T")
Read = Generator[None, None, T]
Sink = Callable[[str], None]

MAX_NAME = 512  # characters of a function's name
_SPACES = re.compile(r"\s*")
_ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

log = logging.getLogger("quire.chat")


class Stops:
    """Texts that end a stretch. The first of them that is complete counts; at one place the longest."""

    __slots__ = ("_firsts", "_most", "_pattern", "texts")

    def __init__(self, *texts: str):
        self.texts = tuple(sorted(dict.fromkeys(t for t in texts if t), key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None
        self._firsts = {t[0] for t in self.texts}
        self._most = max(map(len, self.texts), default=1)

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return None if self._pattern is None else self._pattern.search(text, at)

    def undecided(self, text: str, at: int) -> int:
        """Where the end of the text begins that may become one of these; the text's length where there is none."""
        size = len(text)
        for i in range(max(at, size - self._most + 1), size):
            if text[i] in self._firsts and any(stop.startswith(text[i:]) for stop in self.texts):
                return i
        return size


class Text:
    """The text of an answer on its way: what has come, what is left to read, and the pieces that were made of it."""

    def __init__(self) -> None:
        self.buffer = ""
        self.at = 0
        self.ended = False
        self._called = False  # a call came last, with no text after it
        self.calls = 0
        self._news: list[tuple[int, str | CallPart]] = []  # 0 reasoning, 1 text, 2 a call
        self._spaces: list[str] = []  # at the end of the text so far: dropped if a call follows
        self._raw: list[str] | None = None  # what was read since `hold`

    # ---- the machine's side

    def add(self, text: str) -> None:
        self.buffer = self.buffer[self.at :] + text
        self.at = 0

    def news(self) -> list[Pieces]:
        """The pieces that were made since the last time."""
        if not self._news:
            return []
        made: list[Pieces] = []
        reasoning: list[str] = []
        text: list[str] = []
        calls: list[CallPart] = []
        last = 0
        for kind, what in [*self._news, (-1, "")]:
            if kind < last and (reasoning or text or calls):
                made.append(Pieces("".join(reasoning), "".join(text), _joined(calls)))
                reasoning, text, calls = [], [], []
            last = kind
            if isinstance(what, CallPart):
                calls.append(what)
            elif kind == 0:
                reasoning.append(what)
            elif kind == 1:
                text.append(what)
        self._news = []
        return made

    # ---- what a format makes of it

    def reason(self, text: str) -> None:
        """Reasoning."""
        if text:
            self._news.append((0, text))

    def say(self, text: str) -> None:
        """Text for the reader. Spaces at its end wait for what follows."""
        if not text:
            return
        kept = text.rstrip()
        if kept:
            self._called = False
            self._news += [(1, space) for space in self._spaces]
            self._spaces = []
            self._news.append((1, kept))
        if len(kept) < len(text):
            self._spaces.append(text[len(kept) :])

    def speak(self, text: str) -> None:
        """Text that no call can follow."""
        self.say(text)
        self.let_go()

    def let_go(self) -> None:
        """Make text of held-back spaces, since no call can follow."""
        self._news += [(1, space) for space in self._spaces]
        self._spaces = []

    def end(self) -> None:
        """End the text. Spaces after the last call belong to it."""
        if not self._called:
            self.let_go()

    def drop_spaces(self) -> None:
        """Drop held-back spaces, since what follows is no text: they belong to neither."""
        self._spaces = []

    def begin(self, name: str, id: str | None = None) -> None:
        """A call. It is one now: what was held back is no text."""
        self._raw = None
        self._called = True
        self.drop_spaces()
        self._news.append((2, CallPart(index=self.calls, id=id or new_id(), name=name)))
        self.calls += 1

    def argue(self, text: str) -> None:
        """Arguments of the call that was begun last."""
        if text:
            self._news.append((2, CallPart(index=self.calls - 1, arguments=text)))

    def hold(self, first: str = "") -> None:
        """Remember what is read from here on, beginning with `first`, in case it is no call after all."""
        self._raw = [first]

    def forget(self) -> None:
        """Drop what was held back: it is part of no text."""
        self._raw = None

    def holds(self, start: str) -> bool:
        """Whether the text that is held back begins so."""
        return self._raw is not None and "".join(self._raw).startswith(start)

    def settle(self) -> None:
        """Make text of what was held back and became no call."""
        raw, self._raw = self._raw, None
        if raw:
            self.say("".join(raw))

    # ---- reading

    def more(self) -> Read[bool]:
        """Wait for text; False once there is no more."""
        size = len(self.buffer) - self.at
        while len(self.buffer) - self.at == size:
            if self.ended:
                return False
            yield
        return True

    def take(self, n: int) -> str:
        """The next `n` characters, which are there."""
        taken = self.buffer[self.at : self.at + n]
        self.at += n
        if self._raw is not None:
            self._raw.append(taken)
        return taken

    def sees(self, *options: str) -> Read[str | None]:
        """The longest of these that the text goes on with. It is not taken."""
        options = tuple(sorted(options, key=len, reverse=True))
        while True:
            wait = False
            for option in options:
                if self.buffer.startswith(option, self.at):
                    return option
                if not self.ended and len(self.buffer) - self.at < len(option):
                    wait = option.startswith(self.buffer[self.at :])
                    if wait:
                        break
            if not wait:
                return None
            yield from self.more()

    def gets(self, *options: str) -> Read[str | None]:
        """Take one of these, if the text goes on with it."""
        found = yield from self.sees(*options)
        if found is not None:
            self.take(len(found))
        return found

    def spaces(self) -> Read[None]:
        """Skip spaces and line ends."""
        while True:
            match = _SPACES.match(self.buffer, self.at)
            if match is not None and match.end() > self.at:
                self.take(match.end() - self.at)
            if self.at < len(self.buffer) or not (yield from self.more()):
                return

    def next(self) -> Read[str]:
        """The character that comes, not taken; "" at the end."""
        if self.at == len(self.buffer) and not (yield from self.more()):
            return ""
        return self.buffer[self.at]

    def upto(self, stops: Stops, sink: Sink | None = None, *, take: bool = True) -> Read[str | None]:
        """Pass text on until one of `stops`, which is taken (unless told not to); None: the answer ended before."""
        while True:
            match = stops.search(self.buffer, self.at)
            if match is not None and not self.ended and match.end() == len(self.buffer):
                longer = any(s.startswith(match[0]) and s != match[0] for s in stops.texts)
                if longer and (yield from self.more()):
                    continue
            end = match.start() if match is not None else stops.undecided(self.buffer, self.at)
            if match is None and self.ended:
                end = len(self.buffer)
            if end > self.at:
                passed = self.take(end - self.at)
                if sink is not None:
                    sink(passed)
            if match is not None:
                if take:
                    self.take(len(match[0]))
                return match[0]
            if not (yield from self.more()) and self.at == len(self.buffer):
                return None

    def matching(self, pattern: re.Pattern[str], most: int = MAX_NAME) -> Read[str | None]:
        """The longest run of characters of a class (a pattern of one character, repeated); None where it is too long."""
        made: list[str] = []
        size = 0
        while True:
            match = pattern.match(self.buffer, self.at)
            if match is not None and match.end() > self.at:
                made.append(self.take(match.end() - self.at))
                size += len(made[-1])
                if size > most:
                    return None
            if self.at < len(self.buffer) or not (yield from self.more()):
                return "".join(made)

    def short(self, stops: Stops, most: int = MAX_NAME) -> Read[tuple[str, str | None]]:
        """A short text up to a stop: the text, and the stop. No stop within `most` characters: ("", None)."""
        made: list[str] = []
        while True:
            match = stops.search(self.buffer, self.at)
            end = match.start() if match is not None else stops.undecided(self.buffer, self.at)
            if end > self.at:
                made.append(self.take(end - self.at))
            if sum(map(len, made)) > most:
                return "", None
            if match is not None:
                self.take(len(match[0]))
                return "".join(made), match[0]
            if not (yield from self.more()):
                return "", None

    def json(self, sink: Sink) -> Read[bool]:
        """Pass one JSON value on as it comes; False where it is none, with nothing taken of what is wrong."""
        value = JsonText()
        while not value.done and not value.failed:
            if self.at == len(self.buffer) and not (yield from self.more()):
                value.finish()
                break
            passed, end = value.feed(self.buffer, self.at)
            self.take(end - self.at)
            if passed:
                sink(passed)
        return value.done and not value.failed

    def json_string(self, most: int = 1 << 16) -> Read[str | None]:
        """A JSON string, decoded; None where there is none or it is too long."""
        if (yield from self.next()) != '"':
            return None
        parts: list[str] = []
        if not (yield from self.json(parts.append)) or sum(map(len, parts)) > most:
            return None
        try:
            return json.loads("".join(parts))
        except ValueError:
            return None


class Reader:
    """A Parser from a reading generator."""

    def __init__(self, body: Callable[[Text], Read[None]]):
        self._text = Text()
        self._run: Read[None] | None = body(self._text)
        self._step()

    def feed(self, text: str) -> list[Pieces]:
        if not text:
            return []
        self._text.add(text)
        self._step()
        return self._text.news()

    def finish(self) -> list[Pieces]:
        self._text.ended = True
        self._step()
        return self._text.news()

    def _step(self) -> None:
        text = self._text
        if self._run is not None:
            try:
                next(self._run)
                return
            except StopIteration:
                self._run = None
            except Exception as error:  # a fault of ours loses nothing of the answer
                log.error("a parser of answers failed: what is left comes as text", exc_info=error)
                self._run = None
        text.settle()
        text.say(text.take(len(text.buffer) - text.at))
        text.end()


def new_id(size: int = 24, prefix: str = "call_") -> str:
    """An id for a call."""
    return prefix + "".join(_ALNUM[byte % 62] for byte in os.urandom(size))


def _joined(calls: Sequence[CallPart]) -> list[CallPart]:
    """News of one call in a row are one."""
    made: list[CallPart] = []
    run: list[str] = []
    for part in [*calls, None]:
        if part is not None and made and part.name is None and part.index == made[-1].index:
            run.append(part.arguments)
            continue
        if run:
            last = made.pop()
            made.append(CallPart(last.index, last.id, last.name, last.arguments + "".join(run)))
            run = []
        if part is not None:
            made.append(part)
    return made
