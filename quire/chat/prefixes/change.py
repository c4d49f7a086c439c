"""What changed between two prompts where they part: the stretch before and now, what kind of change it is, and how much behind it is the same.

Works on token ids and on the texts that they decode to, both bounded. Knows no requests.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

GRAM = 16  # tokens in a row that make two stretches the same
TAIL = 1 << 16  # tokens behind the place that are looked at
QUOTED = 160  # characters of a stretch that are told
AROUND = 80  # characters of context on either side
SHOWN = 48  # tokens that are decoded of a stretch
STATUS = 512  # tokens of a git status, as Claude Code writes it
_GIT = "gitStatus:"

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Change:
    """A changed stretch. `again` counts tokens behind it that the earlier prompt had too: what was computed a second time."""

    kind: str
    context: str  # what stands before the stretch in both
    before: str
    now: str
    again: int


@dataclass(frozen=True, slots=True)
class Resync:
    """How two tails go on: so many tokens of each are the changed stretch, and so many behind it are in both."""

    old: int
    new: int
    again: int


def resync(old: array[int], new: array[int], at: int) -> Resync:
    """Where two arrays that part at `at` come together again, and how much of the new one's rest is in the old one's."""
    before, after = old[at : at + TAIL].tobytes(), new[at : at + TAIL].tobytes()
    size = old.itemsize
    wide = GRAM * size
    grams: dict[bytes, int] = {}
    for i in range(0, len(before) - wide + 1, size):
        grams.setdefault(before[i : i + wide], i // size)
    first: tuple[int, int] | None = None
    again, counted = 0, 0
    for j in range(0, len(after) - wide + 1, size):
        found = grams.get(after[j : j + wide])
        if found is None:
            continue
        at_new = j // size
        if first is None:
            first = (found, at_new)
        again += at_new + GRAM - max(counted, at_new)
        counted = at_new + GRAM
    if first is None:
        return Resync(len(before) // size, len(after) // size, 0)
    return Resync(*first, again)


def describe(old: array[int], new: array[int], at: int, found: Resync, decode: Decode) -> Change:
    """A change as people see it: whole words, with what stands before them."""
    context = _shown(decode(new[max(0, at - SHOWN) : at]))
    was = _shown(decode(old[at : at + min(found.old, SHOWN)]))
    now = _shown(decode(new[at : at + min(found.new, SHOWN)]))
    head = _LAST_WORD.search(context)
    lead = head.group()[-64:] if head else ""
    rests = [_behind(ids, at + width, found, decode) for ids, width in ((old, found.old), (new, found.new))]
    before_text, now_text = (f"{lead}{text}{rest}" for text, (rest, _) in zip((was, now), rests, strict=True))
    far = rests[1][1]
    kind = _kind(context.removesuffix(lead), before_text, now_text, far)
    if kind == "other" and _GIT in decode(new[max(0, at - STATUS) : at]):
        kind = "git"
    elif kind == "other":
        kind = _moved(old, new, at, found)
    context = context.removesuffix(lead)[-AROUND:]
    return Change(kind, context, before_text[:QUOTED], now_text[:QUOTED], found.again)


_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_LAST_WORD = re.compile(r"[\w.:/+\\-]*$")
_FIRST_WORD = re.compile(r"[\w.:/+\\-]*")
DATE = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\b\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?\s?(?:[AaPp][Mm]\b)?|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"
    rf"|(?:\b{_DAY},?\s+)?\b{_MONTH}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?"
    rf"|(?:\b{_DAY},?\s+)?\b\d{{1,2}}\s+{_MONTH}(?:\s+\d{{4}})?|\b{_DAY}\b"
)
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("billing", re.compile(r"x-anthropic-billing-header:[^\n]*")),
    ("date", DATE),
    (
        "id",
        re.compile(
            r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{7,64}\b"
            r"|\b[A-Za-z]{1,12}[_-](?=[A-Za-z0-9]*\d)[A-Za-z0-9]{12,64}\b"
        ),
    ),
    ("path", re.compile(r"(?:[A-Za-z]:\\|~?/)?[\w.@+-]+(?:[/\\][\w.@+-]+)+[/\\]?|/[\w.@+-]+")),
    ("number", re.compile(r"\d[\d,.]*")),
)


def _behind(ids: array[int], at: int, found: Resync, decode: Decode) -> tuple[str, str]:
    """The rest of the word that a stretch ends in, and what stands behind that."""
    text = _shown(decode(ids[at : at + SHOWN])) if found.again else ""
    match = _FIRST_WORD.match(text)
    rest = match.group()[:64] if match else ""
    return rest, text.removeprefix(rest)


def _kind(context: str, before: str, now: str, behind: str) -> str:
    """The kind of a change. Of a date or a line only a part may have changed, so what surrounds it counts."""
    near, far = context[-AROUND:], behind[:AROUND]
    if before and now and _words(before) == _words(now):
        return "order"
    for kind, pattern in _KINDS:
        if all(_holds(pattern, near, text, far) for text in (before, now)):
            return kind
    return "other"


def _words(text: str) -> list[str]:
    return sorted(re.findall(r"\w+", text))


def _holds(pattern: re.Pattern[str], near: str, text: str, far: str) -> bool:
    """Whether one thing that the pattern describes is all of the text, but for signs around it."""
    whole = near + text + far
    core = text.strip(" \t\r\n\"'`,;:.()[]{}<>")
    if not core:
        return False
    begin = len(near) + text.index(core)
    end = begin + len(core)
    for match in pattern.finditer(whole):
        if match.start() <= begin and end <= match.end():
            return True
        if match.start() >= end:
            return False
    return False


def _moved(old: array[int], new: array[int], at: int, found: Resync) -> str:
    """What a change is that no pattern describes: something that went somewhere else, came, went or became another text."""
    gone, come = old[at : at + min(found.old, TAIL)], new[at : at + min(found.new, TAIL)]
    if len(gone) >= GRAM and _within(gone, new[at : at + TAIL]):
        return "order"
    if len(come) >= GRAM and _within(come, old[at : at + TAIL]):
        return "order"
    if found.again and len(gone) <= 2 < len(come):
        return "inserted"
    if found.again and len(come) <= 2 < len(gone):
        return "removed"
    return "other"


def _within(part: array[int], whole: array[int]) -> bool:
    """Whether most of a stretch is somewhere in another one. Its ends may have become other tokens beside other neighbours."""
    held = whole.tobytes()
    pieces = list(_pieces(part))
    return sum(held.find(piece) >= 0 for piece in pieces) * 2 > len(pieces)


def _pieces(part: array[int]) -> Iterator[bytes]:
    for i in range(1, max(2, len(part) - 8), max(8, len(part) // 32)):
        yield part[i : i + 8].tobytes()


def _shown(text: str) -> str:
    return text.strip("\ufffd")
