"""Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>, thoughts in <|channel>thought … <channel|>.

Arguments look like JSON with bare keys and a mark of their own in place of the quotation mark; they become JSON as they
come.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from quire.chat.answers.lark import Cut, Lark
from quire.chat.answers.machine import Read, Stops, Text
from quire.chat.answers.marked import Marked, Think
from quire.chat.answers.named import NAME as NAMES
from quire.chat.answers.probe import Seen
from quire.chat.answers.types import Tool, Tools
from quire.chat.answers.values import literal
from quire.observe.errors import BadRequest

NAME = "gemma"
OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THINK = Think("<|channel>thought", "<channel|>")
MAX_DEPTH = 64
_WORD = re.compile(r"[^,}\]\n<]+")
_KEY = re.compile(r"[^:<{},\"]+")


def found(seen: Seen, cut: Cut) -> Marked | None:
    if OPEN not in seen.one and not (OPEN in seen.source and QUOTE in seen.source):
        return None
    header = seen.header.split("<|channel>")[0]
    return Marked(NAME, THINK, GemmaSection(), cut, header, more=("<|channel>",))


@dataclass(frozen=True, slots=True)
class GemmaSection:
    """How it writes calls."""

    openers: tuple[str, ...] = (OPEN,)
    markers: tuple[str, ...] = (OPEN, CLOSE, QUOTE)

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        yield from t.spaces()
        if not (yield from t.gets("call:")):
            return
        name, stop = yield from t.short(Stops("{"))
        if stop is None or not NAMES.fullmatch(name.strip()):
            return
        t.begin(name.strip())
        t.argue("{")
        if not (yield from _items(t, "}", True, 0)):
            yield from t.upto(Stops(CLOSE), t.argue, take=False)
        yield from t.spaces()
        yield from t.gets(CLOSE)

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        raise BadRequest(
            "tools: calls cannot be demanded of this model by a grammar: it writes arguments in a notation of its own",
            param="tool_choice",
            cure='use tool_choice "auto" without strict tools',
        )


def _items(t: Text, end: str, keyed: bool, depth: int) -> Read[bool]:
    """The inside of an object or a list up to its end, as JSON."""
    first = True
    while True:
        yield from t.spaces()
        if (yield from t.gets(end)):
            t.argue(end)
            return True
        if not first:
            if not (yield from t.gets(",")):
                return False
            t.argue(", ")
            yield from t.spaces()
        first = False
        if keyed and not (yield from _key(t)):
            return False
        if not (yield from _value(t, depth)):
            return False


def _key(t: Text) -> Read[bool]:
    key: str | None
    if (yield from t.gets(QUOTE)):
        key, stop = yield from t.short(Stops(QUOTE))
        key = key if stop is not None else None
    elif (yield from t.next()) == '"':
        key = yield from t.json_string()
    else:
        key = yield from t.matching(_KEY)
    yield from t.spaces()
    if not key or not (yield from t.gets(":")):
        return False
    t.argue(json.dumps(key.strip(), ensure_ascii=False) + ": ")
    yield from t.spaces()
    return True


def _value(t: Text, depth: int) -> Read[bool]:
    if depth > MAX_DEPTH:
        return False
    if (yield from t.gets(QUOTE)):
        t.argue('"')
        whole = yield from t.upto(Stops(QUOTE), lambda text: t.argue(json.dumps(text, ensure_ascii=False)[1:-1]))
        if whole is None:
            return False
        t.argue('"')
        return True
    char = yield from t.next()
    if char in ("{", "["):
        t.take(1)
        t.argue(char)
        return (yield from _items(t, "}" if char == "{" else "]", char == "{", depth + 1))
    if char == '"':
        return (yield from t.json(t.argue))
    word = yield from t.matching(_WORD, 1 << 16)
    if not word:
        return False
    read, value = literal(word)
    t.argue(json.dumps(value if read else word.strip(), ensure_ascii=False))
    return True
