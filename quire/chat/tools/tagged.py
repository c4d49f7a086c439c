"""Calls with each argument between marks of its own, its value as bare text: Qwen3-Coder, GLM, MiniMax, Seed, DSML and more.

    section_begin call NAME name_end (key_open KEY key_end VALUE value_end)* call_end section_end

Strings are passed on as they come; other values when they are whole, as the tool's schema types them. The joined
arguments are an object. The template says which marks; any spaces may stand between them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from quire.chat.tools.lark import Lark, any_of
from quire.chat.tools.marked import DEFINED, bare_text, listed
from quire.chat.tools.named import NAME, marks
from quire.chat.tools.probe import RenderedTurns, common_prefix, common_suffix, from_mark
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tool, Tools
from quire.chat.tools.values import MAX_REFS, Schemas, literal, types_of, value_of
from quire.engine.constraints.schemas import ANNOTATIONS
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

CDATA, CDATA_END = "<![CDATA[", "]]>"  # around a string, where a template puts it there
_BARE = frozenset({"type", "nullable", "anyOf", "oneOf", "$ref", *DEFINED, *ANNOTATIONS})


@dataclass(frozen=True, slots=True)
class TaggedSection:
    """Calls as marked arguments."""

    begin: str
    call: str
    name_end: str
    key_open: str
    key_end: str  # before a string
    other_end: str  # before any other value; often the same
    value_end: str
    close: str  # after the last argument
    between: str
    end: str
    cdata: bool = False  # strings may stand in a CDATA section

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m for m in (self.begin.strip(), *self.call.split()) if m))

    @property
    def markers(self) -> tuple[str, ...]:
        texts = (
            self.begin,
            self.call,
            self.name_end,
            self.key_open,
            self.key_end,
            self.value_end,
            self.close,
            self.end,
        )
        return tuple(dict.fromkeys(mark for text in texts for mark in marks(text)))

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        schemas = Schemas(tools)
        begins = [*self.begin.split(), *self.call.split()]
        if not (yield from _follow(t, begins[begins.index(opener) + 1 :] if opener in begins else [])):
            return
        close = self.close.split()
        while True:
            name = yield from self._name(t, close)
            if name is None:
                return
            yield from self._arguments(t, name, schemas, close)
            t.hold()
            yield from t.spaces()
            if not (yield from t.gets(self.call.split()[0])):
                break
            t.hold(self.call.split()[0])
            if not (yield from _follow(t, self.call.split()[1:])):
                return
        t.forget()
        if self.end.strip():
            yield from _follow(t, self.end.split())

    def _name(self, t: Text, close: list[str]) -> Read[str | None]:
        """The name, once what follows says that it is a call."""
        key_open, end = self.key_open.strip(), self.name_end.strip()
        if end:
            name, stop = yield from t.short(Stops(end))
            if stop is None:
                return None
        else:
            stops = Stops(key_open, *close[:1])
            held: list[str] = []
            stop = yield from t.upto(stops, held.append, take=False)
            name = "".join(held)
            if stop is None:
                return None
        name = name.strip()
        if not NAME.fullmatch(name):
            return None
        yield from t.spaces()
        if (yield from t.sees(key_open, *close[:1])) is None:
            return None
        t.begin(name)
        return name

    def _arguments(self, t: Text, name: str, schemas: Schemas, close: list[str]) -> Read[None]:
        key_open, value_end = self.key_open.strip(), self.value_end.strip()
        string, other = self.key_end.strip(), self.other_end.strip()
        keys = Stops(string, other)
        lead = self.key_end[len(self.key_end.rstrip()) :]
        trail = self.value_end[: len(self.value_end) - len(self.value_end.lstrip())]
        values = Stops(trail + value_end, value_end)
        count = 0
        t.argue("{")
        while True:
            yield from t.spaces()
            if not (yield from t.gets(key_open)):
                break
            key, stop = yield from t.short(keys)
            if stop is None:
                break
            if lead:
                yield from t.gets(lead)
            t.argue((", " if count else "") + json.dumps(key.strip(), ensure_ascii=False) + ": ")
            count += 1
            told = None if string == other else stop == string
            if self.cdata and (yield from t.gets(CDATA)):
                t.argue('"')
                raw = Stops(CDATA_END + value_end)
                if (yield from t.upto(raw, lambda text: t.argue(json.dumps(text, ensure_ascii=False)[1:-1]))) is None:
                    return
                t.argue('"')
                continue
            if told or (told is None and schemas.is_text(name, key.strip())):
                t.argue('"')
                if (
                    yield from t.upto(values, lambda text: t.argue(json.dumps(text, ensure_ascii=False)[1:-1]))
                ) is None:
                    return  # the answer was cut, and so are the arguments
                t.argue('"')
            else:
                held: list[str] = []
                whole = yield from t.upto(values, held.append)
                text = "".join(held)
                value = (
                    literal(text)[1] if told is False and literal(text)[0] else schemas.value(name, key.strip(), text)
                )
                t.argue(json.dumps(value, ensure_ascii=False))
                if whole is None:
                    return
        t.argue("}")
        yield from _follow(t, close)

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        call = g.rule(any_of([self._write_one(g, tool, counts) for tool, counts in tools]))
        opener = self.openers[0]
        first = f"{self.begin}{self.call}".lstrip()[len(opener) :]
        more = f"({g.text(self.between + self.call)} {call})*" if many else ""
        return " ".join([g.text(first), call, more, g.text(self.end.rstrip())])

    def _write_one(self, g: Lark, tool: Tool, counts: bool) -> str:
        if not counts:
            # Any arguments: each a key and a text up to its end.
            one = f"{g.text(self.key_open)} /[\\w.-]{{1,64}}/ {g.text(self.key_end)} {self._bare(g)}"
            return f"{g.text(tool.name + self.name_end)} ({one})* {g.text(self.close)}"
        made = [g.text(tool.name + self.name_end)]
        for key, inner, required in listed(tool):
            written = self._write_argument(g, tool, key, inner)
            made.append(written if required else f"({written})?")
        made.append(g.text(self.close))
        return " ".join(made)

    def _write_argument(self, g: Lark, tool: Tool, key: str, inner: Any) -> str:
        whole = inner if isinstance(inner, dict) else {}
        types = types_of(inner, whole)
        text = types is None or "string" in types
        before = g.text(self.key_open + key + (self.key_end if text else self.other_end))
        if tool.grammar is not None:
            core = self.value_end.strip()
            lead, trail = self.value_end.split(core, 1)
            return f"{before} {bare_text(g, tool, core, lead)} {g.text(trail)}"
        if not text:
            part = g.part(Constraint(kind="json_schema", text=json.dumps(inner), param=f"tools: {tool.name}"))
            return f"{before} {part} {g.text(self.value_end)}"
        options = _options(inner)
        if options is not None:
            texts = [v if isinstance(v, str) else json.dumps(v) for v in options]
            if any(value_of(text, types) != v for text, v in zip(texts, options, strict=True)):
                raise BadRequest(
                    f"tools: {tool.name}'s {key}: bare texts cannot tell these values apart", param="tools"
                )
            return f"{before} {any_of([g.text(o) for o in texts])} {g.text(self.value_end)}"
        word = _unable(inner, whole)
        if word is not None:
            raise BadRequest(
                f"tools: the keyword {word} of {tool.name}'s {key} cannot be enforced: this model writes strings bare",
                param="tools",
            )
        return f"{before} {self._bare(g)}"

    def _bare(self, g: Lark) -> str:
        """A bare string and its end: the mark itself ends it, whatever stands before that."""
        core = self.value_end.strip()
        return f"{g.until(core)} {g.text(self.value_end[self.value_end.index(core) + len(core) :])}"


def _options(inner: Any) -> list[Any] | None:
    """The values that an argument may have, where its schema lists them."""
    if not isinstance(inner, dict):
        return None
    if isinstance(inner.get("enum"), list):
        return inner["enum"]
    if "const" in inner:
        return [inner["const"]]
    branches = inner.get("anyOf", inner.get("oneOf"))
    if isinstance(branches, list) and branches:
        each = [[None] if b == {"type": "null"} else _options(b) for b in branches]
        if all(one is not None for one in each):
            return [value for one in each if one is not None for value in one]
    return None


def _unable(inner: Any, whole: dict[str, Any], depth: int = 0) -> str | None:
    """A keyword that a bare text could break, if there is one; branches and references are looked into."""
    if not isinstance(inner, dict):
        return None
    word = min(set(inner) - _BARE, default=None)
    if word is not None or depth > MAX_REFS:
        return word or "$ref"
    ref = inner.get("$ref")
    parts = [*inner.get("anyOf", ()), *inner.get("oneOf", ())]
    if isinstance(ref, str):
        target: Any = whole
        for step in ref.removeprefix("#/").split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        parts.append(target)
        if target is None:
            return "$ref"
    for part in parts:
        if _options(part) is not None:
            return "enum" if "enum" in part else "const"
        if (found := _unable(part, whole, depth + 1)) is not None:
            return found
    return None


def _follow(t: Text, texts: list[str]) -> Read[bool]:
    """Take these in order, with any spaces before each; False at the first that does not come."""
    for text in texts:
        yield from t.spaces()
        if not (yield from t.gets(text)):
            return False
    return True


def derive(seen: RenderedTurns) -> TaggedSection | None:
    """The section as the template writes it, if it writes each argument between marks."""
    text, at = seen.two, 0
    cuts: list[str] = []
    for name in seen.names:
        for word in (name, seen.keys[0], seen.values[0], seen.keys[1], seen.values[1]):
            start = text.find(word, at)
            if start < 0:
                return None
            cuts.append(text[at:start])
            at = start + len(word)
    after = text[at:]
    before, to_key, to_value, next_key, to_other, gap, *_ = cuts
    key_open = from_mark(common_suffix(to_key, next_key))
    if not key_open.strip() or '":' in to_value or to_value.strip() in ("=", ":"):
        return None
    value_end = next_key[: len(next_key) - len(key_open)]
    call = from_mark(common_suffix(before, gap))
    if not call.strip() or not value_end.strip():
        return None
    closes = gap[: len(gap) - len(call)]
    whole = common_prefix(closes, after)
    core = value_end.strip()
    if core not in whole:
        return None
    close = whole[whole.index(core) + len(core) :]
    return TaggedSection(
        begin=before[: len(before) - len(call)].lstrip(),
        call=call.lstrip(),
        name_end=to_key[: len(to_key) - len(key_open)],
        key_open=key_open,
        key_end=to_value,
        other_end=to_other,
        value_end=value_end,
        close=close.lstrip() if value_end.endswith("\n") else close,
        between=closes[len(whole) :] + call[: len(call) - len(call.lstrip())],
        end=after[len(whole) :].rstrip(),
        cdata=CDATA in seen.source,
    )
