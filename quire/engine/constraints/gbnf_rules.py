"""GBNF as it is written: a text becomes rules, or a ValueError that names the line. Knows nothing of what they are for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LAST = 0x10FFFF  # the last character
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(,?)\s*(\d{0,9})\s*\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}

Ranges = list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Node:
    """A part of a rule: `chars` (one of some characters), `text`, `seq`, `alt`, `rep`, or `ref`."""

    kind: str
    items: list[Node] = field(default_factory=list)
    text: str = ""  # of a text; the name, of a ref
    ranges: Ranges = field(default_factory=list)  # of chars
    least: int = 0  # of a rep
    most: int | None = None
    mask: int = 0  # of chars: its atoms


def read(text: str) -> dict[str, Node]:
    """The rules, by name, in their order."""
    return _Reader(text).rules()


def all_of(node: Node) -> list[Node]:
    """A node and all that is in it."""
    found, left = [], [node]
    while left:
        found.append(left.pop())
        left += found[-1].items
    return found


class _Reader:
    def __init__(self, text: str):
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Node]:
        made: dict[str, Node] = {}
        self._skip(_BLANK)
        while self._at < len(self._text):
            name = self._name()
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                raise self._wrong("::= is missing")
            self._at += 3
            self._skip(_BLANK)
            body = self._either(nested=False)
            if name in made:
                raise self._wrong(f"the rule {name} is there twice")
            made[name] = body
            self._skip(_BLANK)
        if not made:
            raise ValueError("it has no rules")
        return made

    def _either(self, nested: bool) -> Node:
        options = [self._sequence(nested)]
        while self._option():
            self._at += 1
            self._skip(_BLANK)
            options.append(self._sequence(nested))
        return options[0] if len(options) == 1 else Node("alt", options)

    def _option(self) -> bool:
        """Whether an option follows, on this line or on one below."""
        blank = _BLANK.match(self._text, self._at)
        at = blank.end() if blank else self._at
        if self._text[at : at + 1] == "|":
            self._at = at
            return True
        return False

    def _sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        while True:
            char = self._peek()
            if char == '"':
                items.append(Node("text", text=self._literal()))
            elif char == "[":
                items.append(Node("chars", ranges=self._class()))
            elif char == ".":
                self._at += 1
                items.append(Node("chars", ranges=_outside([])))
            elif char == "(":
                self._at += 1
                self._skip(_BLANK)
                items.append(self._either(nested=True))
                if self._peek() != ")":
                    raise self._wrong(") is missing")
                self._at += 1
            elif _NAME.match(self._text, self._at) and not self._begins_rule():
                items.append(Node("ref", text=self._name()))
            else:
                return items[0] if len(items) == 1 else Node("seq", items)
            while (counted := self._counted()) is not None:
                items[-1] = Node("rep", [items[-1]], least=counted[0], most=counted[1])
            self._skip(_BLANK if nested else _SPACE)

    def _begins_rule(self) -> bool:
        name = _NAME.match(self._text, self._at)
        after = _SPACE.match(self._text, name.end()) if name else None
        return after is not None and self._text.startswith("::=", after.end())

    def _counted(self) -> tuple[int, int | None] | None:
        char = self._peek()
        if char in ("*", "+", "?"):
            self._at += 1
            return (1 if char == "+" else 0), (1 if char == "?" else None)
        if char != "{":
            return None
        found = _COUNT.match(self._text, self._at)
        if found is None:
            raise self._wrong("a count is {2}, {2,} or {2,5}")
        self._at = found.end()
        least = int(found[1])
        most = least if not found[2] else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self._wrong("a count ends before it begins")
        return least, most

    def _literal(self) -> str:
        self._at += 1
        made: list[str] = []
        while (char := self._peek()) != '"':
            if char in ("", "\n"):
                raise self._wrong('" is missing')
            made.append(self._char())
        self._at += 1
        return "".join(made)

    def _class(self) -> Ranges:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        made: Ranges = []
        while self._peek() != "]":
            low = self._char()
            high = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._char()
            if ord(high) < ord(low):
                raise self._wrong(f"{low}-{high} is no range")
            made.append((ord(low), ord(high)))
        self._at += 1
        if not made and not negated:
            raise self._wrong("an empty class matches nothing")
        return _outside(made) if negated else made

    def _char(self) -> str:
        char = self._peek()
        if not char:
            raise self._wrong("it ends too soon")
        self._at += 1
        if char != "\\":
            return char
        char = self._peek()
        self._at += 1
        if char in _HEX:
            digits = self._text[self._at : self._at + _HEX[char]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[char]}}}", digits) or int(digits, 16) > LAST:
                raise self._wrong(f"\\{char} needs {_HEX[char]} hexadecimal digits")
            self._at += _HEX[char]
            return chr(int(digits, 16))
        if char in _PLAIN:
            return _PLAIN[char]
        if char in '\\"[]-^':
            return char
        raise self._wrong(f"\\{char} is not known")

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._wrong("a name is missing")
        self._at = found.end()
        return found[0]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _wrong(self, what: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        near = self._text[max(0, self._at - 10) : self._at + 20]
        return ValueError(f"line {line}, near {near!r}: {what}")


def _outside(ranges: Ranges) -> Ranges:
    """Every other character; those that are none alone are in no text."""
    made: Ranges = []
    at = 0
    for low, high in sorted([*ranges, (0xD800, 0xDFFF)]):
        if low > at:
            made.append((at, low - 1))
        at = max(at, high + 1)
    return made if at > LAST else [*made, (at, LAST)]
