"""GBNF, llama.cpp's grammars (and vLLM's EBNF), as Lark: every text of the grammar, and no other.

llguidance cuts text into words first and takes each as long as it can; GBNF knows characters alone. So rules without
recursion become words where that changes nothing: where what may follow a word cannot lengthen it, and no word is the
beginning of another. Otherwise the whole grammar is written character by character, which is exact and slower. llguidance's own
converter is not used, because it makes a word of every literal: `"a" "bc" | "ab" "d"` refuses "abc" there (test_gbnf.py).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.engine.constraints.gbnf_rules import LAST, Node, all_of, read

ROOT = "root"
MAX_WRITTEN_OUT = 100_000
PASSES = 40  # over rules that name each other


def to_lark(text: str) -> str:
    """The grammar in Lark. Raises ValueError with the line."""
    rules = read(text)
    if ROOT not in rules:
        raise ValueError(f"there is no rule {ROOT}")
    for node in (n for body in rules.values() for n in all_of(body)):
        if node.kind == "ref" and node.text not in rules:
            raise ValueError(f"the rule {node.text} is not there")
    words = _words(rules)
    exact = _written_out(rules, words) > MAX_WRITTEN_OUT or not _Words(rules, words).unambiguous()
    known = set() if exact else set(words)
    names = {name: f"{'W' if name in known else 'r'}{i}" for i, name in enumerate(rules)}
    lines = [f"{names[name]}: {_written(body, names, exact)}" for name, body in rules.items()]
    return "\n".join([f"start: {names[ROOT]}", *lines]) + "\n"


# ---- which rules can be words


def _words(rules: dict[str, Node]) -> list[str]:
    """Rules without recursion, other than the root, each after those that it names."""
    refs = {name: {n.text for n in all_of(body) if n.kind == "ref"} for name, body in rules.items()}
    named_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, inside in refs.items():
        for inner in inside:
            named_by[inner].append(name)
    left = {name: len(inside) for name, inside in refs.items()}
    found, ready = [], [name for name, count in left.items() if count == 0 and name != ROOT]
    while ready:
        found.append(ready.pop())
        for name in named_by[found[-1]]:
            left[name] -= 1
            if left[name] == 0 and name != ROOT:
                ready.append(name)
    return found


def _written_out(rules: dict[str, Node], words: list[str]) -> int:
    """The parts of the largest word: the compiler writes a word out wherever another names it."""
    sizes: dict[str, int] = {}
    for name in words:
        parts = all_of(rules[name])
        sizes[name] = len(parts) + sum(sizes[part.text] for part in parts if part.kind == "ref")
    return max(sizes.values(), default=0)


@dataclass(slots=True)
class _Shape:
    """What a node begins with, and what could lengthen it once it is whole; sets are bits, one for each kind of character."""

    empty: bool
    first: int
    longer: int
    every: int


class _Words:
    """Whether cutting a text into words, each as long as it can be, loses nothing."""

    def __init__(self, rules: dict[str, Node], words: list[str]):
        self._rules, self._words, self._is_word = rules, words, set(words)
        self._atoms(rules)
        self._shapes: dict[str, _Shape] = {}
        self._follow: dict[str, int] = dict.fromkeys(rules, 0)
        self._after: dict[Any, int] = {}  # what may follow a word: a rule's name, a text, or a mask

    def _atoms(self, rules: dict[str, Node]) -> None:
        leaves = [n for body in rules.values() for n in all_of(body) if n.kind in ("chars", "text")]
        cuts = {0, LAST + 1}
        for leaf in leaves:
            for low, high in leaf.ranges or [(ord(c), ord(c)) for c in set(leaf.text)]:
                cuts |= {low, high + 1}
        self._cuts = sorted(cuts)
        for leaf in leaves:
            for low, high in leaf.ranges:
                start, end = bisect_left(self._cuts, low), bisect_left(self._cuts, high + 1)
                leaf.mask |= (1 << end) - (1 << start)

    def _bit(self, char: str) -> int:
        return 1 << bisect_left(self._cuts, ord(char))

    def unambiguous(self) -> bool:
        """False where it is so, and where it would take long to see."""
        for name in self._words:
            self._shapes[name] = self._shape(self._rules[name])
        others = {name: body for name, body in self._rules.items() if name not in self._is_word}
        for _ in range(PASSES):  # rules that name each other
            before = {name: (s.empty, s.first) for name, s in self._shapes.items() if name in others}
            for name in reversed(others):
                self._shapes[name] = self._shape(others[name])
            if before == {name: (s.empty, s.first) for name, s in self._shapes.items() if name in others}:
                break
        else:
            return False
        for _ in range(PASSES):
            before_follow = dict(self._follow), dict(self._after)
            for name, body in others.items():
                self._walk(body, self._follow[name])
            if before_follow == (self._follow, self._after):
                return not self._lengthened() and not self._overlapping()
        return False

    def _shape(self, node: Node) -> _Shape:
        if node.kind == "chars":
            return _Shape(False, node.mask, 0, node.mask)
        if node.kind == "text":
            every = 0
            for char in set(node.text):
                every |= self._bit(char)
            return _Shape(not node.text, self._bit(node.text[0]) if node.text else 0, 0, every)
        if node.kind == "ref":
            return self._shapes.get(node.text, _Shape(False, 0, 0, 0))
        each = [self._shape(item) for item in node.items]
        if node.kind == "rep":
            (one,) = each
            more = node.most is None or node.most > 1
            longer = one.longer | (one.first if node.least != node.most else 0)
            if more and one.longer & one.first:
                longer = one.every
            return _Shape(node.least == 0 or one.empty, one.first, longer, one.every)
        if node.kind == "alt":
            made = _Shape(False, 0, 0, 0)
            for one in each:
                if one.first & made.first:  # one of them may be whole where another goes on
                    made.longer |= one.every | made.every
                made = _Shape(
                    made.empty or one.empty, made.first | one.first, made.longer | one.longer, made.every | one.every
                )
            made.longer |= made.first if made.empty else 0
            return made
        made = _Shape(True, 0, 0, 0)
        for one in each:
            clash = made.longer & one.first
            longer = one.longer | ((made.longer | one.first) if one.empty else 0)
            every = made.every | one.every
            made = _Shape(made.empty and one.empty, made.first | (one.first if made.empty else 0), longer, every)
            if clash:
                made.longer |= every
        return made

    def _walk(self, node: Node, after: int) -> None:
        """Note what may follow each word in a rule that is none."""
        if node.kind == "ref" and node.text not in self._is_word:
            self._follow[node.text] |= after
        elif node.kind in ("ref", "text", "chars"):
            key = node.mask if node.kind == "chars" else (node.kind, node.text)
            self._after[key] = self._after.get(key, 0) | after
        elif node.kind == "rep":
            again = self._shape(node.items[0]).first if node.most is None or node.most > 1 else 0
            self._walk(node.items[0], after | again)
        elif node.kind == "alt":
            for item in node.items:
                self._walk(item, after)
        else:
            for item in reversed(node.items):
                self._walk(item, after)
                shape = self._shape(item)
                after = shape.first | (after if shape.empty else 0)

    def _lengthened(self) -> bool:
        """Whether some word could swallow the beginning of what follows it."""
        return any(
            self._shapes[key[1]].longer & after
            for key, after in self._after.items()
            if isinstance(key, tuple) and key[0] == "ref"
        )

    def _overlapping(self) -> bool:
        """Whether one word may be whole where another goes on. Only words that begin alike can be in each other's way."""
        texts = sorted({key[1] for key in self._after if isinstance(key, tuple) and key[0] == "text" and key[1]})
        if any(longer.startswith(text) for text, longer in pairwise(texts)):
            return True
        starts = 0
        for text in texts:
            starts |= self._bit(text[0])
        others = [self._shapes[key[1]].first for key in self._after if isinstance(key, tuple) and key[0] == "ref"]
        singles = 0
        for key in self._after:
            singles |= key if isinstance(key, int) else 0
        seen = starts | singles
        for first in others:
            if first & seen:
                return True
            seen |= first
        return bool(singles & starts) and any(len(text) > 1 and self._bit(text[0]) & singles for text in texts)


# ---- writing


def _written(node: Node, names: dict[str, str], exact: bool) -> str:
    if node.kind == "chars":
        return "/[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges) + "]/"
    if node.kind == "text":
        parts = list(node.text) if exact else [node.text]
        return " ".join(json.dumps(part) for part in parts) or '""'
    if node.kind == "ref":
        return names[node.text]
    each = [_written(item, names, exact) for item in node.items]
    if node.kind == "rep":
        return f"({each[0]}){{{node.least},{'' if node.most is None else node.most}}}"
    if node.kind == "alt":
        return "(" + " | ".join(each) + ")"
    return " ".join(each) or '""'
