"""Structural tags: free text in which some stretches are constrained, as xgrammar describes them and vLLM and SGLang take them.

    text <tool>{"a": 1}</tool> text …      a trigger, once written, must become one of the tags that begin with it

Owns their shapes and their grammar in Lark; what stands inside a tag becomes a part of its own, so that a refusal can name
it. Tags are bytes, whatever the vocabulary: a client reads them in the text. A kind of tag that is not known is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeGuard

from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

MAX_TAGS = 512
MAX_DEPTH = 16
_ANY = "/(.|\\n)*/"


def written(constraint: Constraint, prefix: str = "s") -> tuple[str, dict[str, Constraint]]:
    """The grammar of structural tags, and the constraints inside it by name; names begin with the prefix."""
    try:
        whole = json.loads(constraint.text)
    except ValueError as error:
        raise BadRequest(f"it is not JSON: {error}") from None
    if not isinstance(whole, dict):
        raise BadRequest("structural tags are a JSON object")
    maker = _Maker(constraint, prefix)
    if "structures" in whole:  # the older form
        asked: Any = {"type": "triggered_tags", "triggers": whole.get("triggers"), "tags": _old(whole["structures"])}
    elif "format" in whole:
        asked = whole["format"]
    else:
        raise BadRequest("structural tags need a format, or structures and triggers")
    start = maker.make(asked, 0)
    return "\n".join([f"start: {start}", *maker.rules]) + "\n", maker.parts


def _old(structures: Any) -> list[Any]:
    if not isinstance(structures, list):
        raise BadRequest("structures must be a list")
    made: list[Any] = []
    for one in structures:
        if not isinstance(one, dict) or "schema" not in one:
            raise BadRequest("each of the structures needs begin, schema and end")
        inside = {"type": "json_schema", "json_schema": one["schema"]}
        made.append({"type": "tag", "begin": one.get("begin"), "content": inside, "end": one.get("end")})
    return made


class _Maker:
    """One grammar in the making."""

    def __init__(self, whole: Constraint, prefix: str):
        self.rules: list[str] = []
        self.parts: dict[str, Constraint] = {}
        self._whole = whole
        self._prefix = prefix
        self._tags = 0
        self._makers: dict[str, Callable[[dict[str, Any], int], str]] = {
            "const_string": self._const,
            "json_schema": self._schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._text,
            "sequence": self._sequence,
            "or": self._either,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def make(self, asked: Any, depth: int) -> str:
        """What one format describes."""
        if depth > MAX_DEPTH:
            raise BadRequest(f"structural tags may be nested {MAX_DEPTH} deep")
        if not isinstance(asked, dict):
            raise BadRequest("each format of a structural tag is an object with a type")
        kind = asked.get("type", "tag" if "begin" in asked else None)
        maker = self._makers.get(kind) if isinstance(kind, str) else None
        if maker is None:
            known = ", ".join(self._makers)
            raise BadRequest(f"the structural tag type {kind!r} cannot be enforced", cure=f"there are {known}")
        return maker(asked, depth)

    def _rule(self, body: str, options: str = "", terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _part(self, kind: str, text: str) -> str:
        name = f"{self._prefix}{len(self.parts)}"
        self.parts[name] = Constraint(kind=kind, text=text, param=self._whole.param, blanks=self._whole.blanks)
        return f"@{name}"

    def _const(self, asked: dict[str, Any], depth: int) -> str:
        return _literal(_string(asked, "value"))

    def _schema(self, asked: dict[str, Any], depth: int) -> str:
        if asked.get("style", "json") != "json":
            raise BadRequest(f"the structural tag style {asked['style']!r} cannot be enforced", cure="use json")
        if "json_schema" not in asked:
            raise BadRequest("a structural tag of type json_schema needs json_schema")
        return self._part("json_schema", json.dumps(asked["json_schema"]))

    def _regex(self, asked: dict[str, Any], depth: int) -> str:
        return self._part("regex", _string(asked, "pattern"))

    def _grammar(self, asked: dict[str, Any], depth: int) -> str:
        text = _string(asked, "grammar")
        return self._part("gbnf" if "::=" in text else "lark", text)

    def _text(self, asked: dict[str, Any], depth: int) -> str:
        """Text that nothing follows: the whole rest."""
        return self._free(_excluded(asked))

    def _sequence(self, asked: dict[str, Any], depth: int) -> str:
        made: list[str] = []
        parts = _several(asked, "elements")
        i = 0
        while i < len(parts):
            part, after = parts[i], parts[i + 1] if i + 1 < len(parts) else None
            if after is not None and _is_text(part):  # it ends where the next part begins
                begin = _beginning(after)
                if not begin:
                    raise BadRequest("any_text in a sequence must come last, or before a const_string or a tag")
                made.append(self._upto([begin], _excluded(part)))
                if after.get("type") != "const_string":
                    made.append(self._tag(after, depth + 1, begin))
                i += 2
            else:
                made.append(self.make(part, depth + 1))
                i += 1
        return "(" + " ".join(made) + ")"

    def _either(self, asked: dict[str, Any], depth: int) -> str:
        return "(" + " | ".join(self.make(part, depth + 1) for part in _several(asked, "elements")) + ")"

    def _tag(self, asked: dict[str, Any], depth: int, begun: str = "") -> str:
        """One tag; `begun` of it was written as its trigger."""
        self._tags += 1
        if self._tags > MAX_TAGS:
            raise BadRequest(f"structural tags may have {MAX_TAGS} tags")
        begin, content, ends = _string(asked, "begin"), asked.get("content"), _ends(asked)
        opening = _literal(begin[len(begun) :])
        if _is_text(content):
            if not all(ends):
                raise BadRequest("a tag around any_text needs an end")
            return self._rule(f"{opening} {self._upto(ends, _excluded(content))}")
        closing = " | ".join(_literal(end) for end in ends)
        return self._rule(f"{opening} {self.make(content, depth + 1)} ({closing})")

    def _triggered(self, asked: dict[str, Any], depth: int) -> str:
        triggers, tags = asked.get("triggers"), _several(asked, "tags")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise BadRequest("triggers must be a list of strings, none of them empty")
        for one in triggers:
            if any(other != one and other.startswith(one) for other in triggers):
                raise BadRequest(f"trigger {one!r} is the beginning of another: one of them would never count")
        by: dict[str, list[dict[str, Any]]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _string(tag, "begin") if isinstance(tag, dict) else ""
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise BadRequest(f"the tag {begin!r} begins with none of the triggers")
            by[trigger].append(tag)
        barred = [*triggers, *_excluded(asked)]
        options: list[str] = []
        for trigger, own in by.items():
            if own:
                head = self._upto(triggers, _excluded(asked), only=trigger)
                rest = " | ".join(self._tag(tag, depth + 1, trigger) for tag in own)
                options.append(f"{head} ({rest})")
        one = self._rule(" | ".join(options))
        rest, once = self._free(barred), asked.get("stop_after_first") is True
        if asked.get("at_least_one") is True:  # the first comes at once
            first = "(" + " | ".join(self._tag(tag, depth + 1) for tag in tags) + ")"
            return first if once else f"({first} {one}* {rest})"
        return f"({one} | {rest})" if once else f"({one}* {rest})"

    def _separated(self, asked: dict[str, Any], depth: int) -> str:
        tag = "(" + " | ".join(self._tag(t, depth + 1) for t in _several(asked, "tags") if _checked(t)) + ")"
        one = self._rule(tag)
        made = (
            one
            if asked.get("stop_after_first") is True
            else f"({one} ({_literal(_string(asked, 'separator'))} {one})*)"
        )
        return made if asked.get("at_least_one") is True else f"{made}?"

    def _free(self, barred: list[str]) -> str:
        """Any text in which none of these stands."""
        if not barred:
            return self._rule(_ANY, terminal=True)
        return self._rule(f"{_ANY} & ~/(.|\\n)*({_pattern(barred)})(.|\\n)*/", terminal=True)

    def _upto(self, ends: list[str], barred: list[str], only: str = "") -> str:
        """Text up to the first of these ends, that end included. What is barred stands nowhere in it."""
        first = f"~/(.|\\n)*({_pattern(ends)})(.|\\n)+/"
        also = f" & ~/(.|\\n)*({_pattern(barred)})(.|\\n)*/" if barred else ""
        return self._rule(f"/(.|\\n)*({_pattern([only] if only else ends)})/ & {first}{also}", terminal=True)


def _literal(text: str) -> str:
    return json.dumps(text)


def _pattern(texts: list[str]) -> str:
    return "|".join("".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in t) for t in texts)


def _string(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"a structural tag needs {name} to be a string")
    return value


def _several(asked: dict[str, Any], name: str) -> list[Any]:
    value = asked.get(name)
    if not isinstance(value, list) or not value:
        raise BadRequest(f"a structural tag needs {name} to be a list that is not empty")
    return value


def _ends(asked: dict[str, Any]) -> list[str]:
    end: Any = asked.get("end")
    ends: list[Any] = end if isinstance(end, list) else [end]
    if not ends or not all(isinstance(one, str) for one in ends):
        raise BadRequest("a structural tag needs end to be a string, or a list of strings")
    return ends


def _excluded(asked: dict[str, Any]) -> list[str]:
    words = asked.get("excludes") or []
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise BadRequest("excludes must be a list of strings, none of them empty")
    return words


def _is_text(asked: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(asked, dict) and asked.get("type") == "any_text"


def _beginning(asked: Any) -> str:
    """The text with which a part begins, where it is known."""
    if isinstance(asked, dict) and asked.get("type") in ("const_string", "tag"):
        return _string(asked, "value" if asked["type"] == "const_string" else "begin")
    return ""


def _checked(tag: Any) -> bool:
    if not isinstance(tag, dict):
        raise BadRequest("each of the tags is an object")
    return True
