"""A reader for one JSON value as its text comes: where it ends, and whether it is one. Constant work for each character.

What is handed on is the text as it was written, save one thing: a raw control character inside a string, which models write
and JSON forbids, goes on as its escape. Depth is bounded; nothing recurses.
"""

from __future__ import annotations

import re

MAX_DEPTH = 2000
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_LITERAL_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SPACE = re.compile(r"[ \t\n\r]+")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = {**{chr(i): f"\\u{i:04x}" for i in range(32)}, "\n": "\\n", "\r": "\\r", "\t": "\\t"}

# What may come next.
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _AFTER, _STRING, _LITERALS = range(8)


class JsonText:
    """One value. After `done` or `failed` it takes nothing more."""

    __slots__ = ("_escape", "_is_key", "_literal", "_mode", "_stack", "done", "failed")

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._mode = _VALUE
        self._stack: list[str] = []
        self._literal: list[str] = []
        self._escape = 0  # 1: a backslash came; 2 to 5: that many hex digits and one are to come
        self._is_key = False

    def feed(self, text: str, at: int) -> tuple[str, int]:
        """Take what belongs to the value from text[at:]: what to hand on, and where it ends or goes wrong."""
        out: list[str] = []
        start = at
        size = len(text)
        while at < size and not self.done and not self.failed:
            if self._mode == _STRING:
                char = text[at]
                if self._escape:
                    at += self._escaped(char)
                    continue
                run = _RUN.match(text, at)
                if run is not None:
                    at = run.end()
                elif char == '"':
                    at += 1
                    self._end_string()
                elif char == "\\":
                    at += 1
                    self._escape = 1
                else:
                    out += (text[start:at], _ESCAPED[char])
                    at += 1
                    start = at
            elif self._mode == _LITERALS:
                run = _LITERAL_RUN.match(text, at)
                if run is not None:
                    self._literal.append(run[0])
                    at = run.end()
                else:
                    self._end_literal()
            else:
                space = _SPACE.match(text, at)
                at = space.end() if space is not None else at + self._structure(text[at])
        out.append(text[start:at])
        return "".join(out), at

    def finish(self) -> None:
        """The text ended: a number may be whole by that."""
        if self._mode == _LITERALS:
            self._end_literal()
        if not self.done:
            self.failed = True

    def _structure(self, char: str) -> int:
        """Take a character between values; how many were taken."""
        mode, stack = self._mode, self._stack
        if mode == _AFTER:
            if char == "," and stack:
                self._mode = _KEY if stack[-1] == "{" else _VALUE
            elif stack and char == ("}" if stack[-1] == "{" else "]"):
                stack.pop()
                self._end_value()
            else:
                self.failed = True
        elif mode == _COLON:
            self.failed = char != ":"
            self._mode = _VALUE
        elif mode in (_FIRST_KEY, _KEY):
            if char == '"':
                self._mode, self._is_key = _STRING, True
            elif char == "}" and mode == _FIRST_KEY:
                stack.pop()
                self._end_value()
            else:
                self.failed = True
        elif char == "]" and mode == _FIRST_ITEM:
            stack.pop()
            self._end_value()
        elif char in "{[":
            stack.append(char)
            self._mode = _FIRST_KEY if char == "{" else _FIRST_ITEM
            self.failed = len(stack) > MAX_DEPTH
        elif char == '"':
            self._mode, self._is_key = _STRING, False
        elif char in "-0123456789tfn":
            self._mode = _LITERALS
            return 0
        else:
            self.failed = True
        return 0 if self.failed else 1

    def _escaped(self, char: str) -> int:
        if self._escape == 1:
            if char == "u":
                self._escape = 5
            elif char in _ESCAPES:
                self._escape = 0
            else:
                self.failed = True
        elif char in _HEX:
            self._escape = self._escape - 1 if self._escape > 2 else 0
        else:
            self.failed = True
        return 0 if self.failed else 1

    def _end_string(self) -> None:
        if self._is_key:
            self._mode = _COLON
        else:
            self._end_value()

    def _end_literal(self) -> None:
        word = "".join(self._literal)
        self._literal = []
        if _LITERAL.fullmatch(word) is None:
            self.failed = True
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._mode = _AFTER
        self.done = not self._stack
