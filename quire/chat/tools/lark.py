"""Grammars of whole answers, as they are put together: literal texts, control tokens, schemas, and free text between.

Knows llguidance's syntax and no format. A text of a format may hold control tokens: those are demanded by their ids, since
no bytes spell them; everything else is bytes, however a model cuts it. A schema becomes a part of its own, so that a
refusal can name the tool it came from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from quire.engine.types import Constraint

Cut = Callable[[str], list[str | int]]  # a text cut at its control tokens
SPACE = "/[ \\n\\t]{0,8}/"


class Lark:
    """A grammar that is being written."""

    def __init__(self, cut: Cut):
        self.cut = cut
        self._rules: list[str] = []
        self._parts: dict[str, Constraint] = {}

    def text(self, text: str) -> str:
        """Exactly this text, where control tokens count as such."""
        made = (f"<[{p}]>" if isinstance(p, int) else json.dumps(p) for p in self.cut(text) if p != "")
        return " ".join(made)

    def rule(self, body: str) -> str:
        """A rule of its own; its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def define(self, name: str, body: str) -> None:
        """A rule under a name, which its body may use."""
        self._rules.append(f"{name}: {body}")

    def has(self, name: str) -> bool:
        """Whether there is a rule of this name."""
        return any(rule.startswith(f"{name}: ") for rule in self._rules)

    def part(self, constraint: Constraint) -> str:
        """A rule for what another constraint describes."""
        found = next((name for name, had in self._parts.items() if had == constraint), None)
        if found is None:
            found = f"p{len(self._parts)}"
            self._parts[found] = constraint
        return f"@{found}"

    def until(self, stop: str) -> str:
        """Any text up to `stop`, and `stop`."""
        parts = [p for p in self.cut(stop) if p != ""]
        if isinstance(parts[0], int):
            return f"{self.any()} {self.text(stop)}"
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: ANY {json.dumps(parts[0])}")
        self.any()
        return " ".join([name, *(f"<[{p}]>" if isinstance(p, int) else json.dumps(p) for p in parts[1:])])

    def first(self, pattern: str, before: str, mark: str) -> str:
        """A text that a pattern (between slashes) matches, then `before` and `mark`, which does not stand earlier. The mark is no control token."""
        name = f"TEXT{len(self._rules)}"
        ends = _pattern(mark)
        self._rules.append(f"{name}: {pattern[:-1]}{_pattern(before)}{ends}/ & ~/(.|\\n)*{ends}(.|\\n)+/")
        return name

    def any(self) -> str:
        """Any text without control tokens, or none."""
        if "ANY: /(.|\\n)*/" not in self._rules:
            self._rules.append("ANY: /(.|\\n)*/")
        return "ANY"

    def free(self, *without: str) -> str:
        """Any text in which none of these begins."""
        texts = [first for first in (self.cut(text)[0] for text in without) if isinstance(first, str)]
        if not texts:
            return self.any()
        name = f"FREE{len(self._rules)}"
        barred = "|".join(_pattern(text) for text in texts)
        self._rules.append(f"{name}: /(.|\\n)*/ & ~/(.|\\n)*({barred})(.|\\n)*/")
        return name

    def build(self, start: str, param: str) -> Constraint:
        """The whole."""
        grammar = "\n".join([f"start: {start}", *self._rules]) + "\n"
        parts = {name: msgspec.structs.asdict(part) for name, part in self._parts.items()}
        text = msgspec.json.encode({"grammar": grammar, "parts": parts}).decode()
        return Constraint(kind="composed", text=text, param=param)


def _pattern(text: str) -> str:
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in text)


def any_of(options: list[str]) -> str:
    """A rule for one of these."""
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def lark_regex(pattern: str) -> str:
    """A pattern between slashes."""
    return "/" + re.sub(r"(?<!\\)/", r"\\/", pattern) + "/"
