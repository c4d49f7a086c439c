"""Lark grammars written anew, so that a text can be held to them where it stands inside something else: a JSON string, or between two marks.

Inside a JSON string each character of the text is what JSON writes for it (one spelling: that of `json.dumps`). A lexer cannot be told so: it
would have to look two characters ahead at every `\\`. So a grammar whose rules do not name themselves becomes one pattern, which has no lexer to
mislead, and one of which a mark can be kept out. One that is recursive becomes rules over single characters, which never compete for length.
What is not understood for certain is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

MAX_BYTES = 1 << 20  # of all that is written: a class of characters becomes a list of what its members are written as
SPECIAL = [chr(i) for i in range(32)] + ['"', "\\"]  # what JSON escapes
_PLAIN = "".join(
    chr(i) for i in (*range(32, 0x2100), *range(0x3000, 0x3100), 0x4E00, 0xE000, 0x1F600) if i not in (34, 92)
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_NOT_SPECIAL = '[^"\\\\\\x00-\\x1f]'

# Terminals of Lark's own library that grammars import.
COMMON = {
    "DIGIT": "/[0-9]/",
    "HEXDIGIT": "/[a-fA-F0-9]/",
    "INT": "/[0-9]+/",
    "SIGNED_INT": "/[+-]?[0-9]+/",
    "DECIMAL": r"/[0-9]+\.[0-9]*|\.[0-9]+/",
    "FLOAT": r"/[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "NUMBER": r"/[0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "SIGNED_NUMBER": r"/[+-]?([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
    "LCASE_LETTER": "/[a-z]/",
    "UCASE_LETTER": "/[A-Z]/",
    "LETTER": "/[a-zA-Z]/",
    "WORD": "/[a-zA-Z]+/",
    "CNAME": "/[_a-zA-Z][_a-zA-Z0-9]*/",
    "WS_INLINE": r"/[ \t]+/",
    "WS": r"/[ \t\f\r\n]+/",
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/(\r?\n)+/",
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")(?P<fold>i?)(?![A-Za-z0-9_])
    |(?P<pattern>/(?!/)(?:[^/\\\n]|\\.)+/)(?P<flags>[a-z]*)
    |%import[ ]+common\.(?P<imported>[A-Z_]+)(?:[ ]*->[ ]*(?P<as>[A-Z_][A-Z0-9_]*))?(?=[ \t\r\n]|$)
    |(?P<alias>->[ ]*[A-Za-z_]\w*)
    |(?P<range>\.\.)
    |[?!]?(?P<head>[A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*:
    |(?P<name>[A-Za-z_]\w*)
    |(?P<count>\{\d+(?:,\d*)?\}|~[ ]*\d+(?:[ ]*\.\.[ ]*\d+)?)
    |(?P<kept>[|()\[\]*+?])""",
    re.VERBOSE,
)
_ATOM = re.compile(
    r"""(?P<cls>\[\^?\]?(?:[^\]\\\[&~-]|\\.|-(?!-)|&(?!&)|~(?!~))*\])
    |(?P<any>\.)
    |(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsS]|[nrtfv]|[^A-Za-z0-9]))
    |(?P<group>\(\?:|\((?!\?))
    |(?P<count>[*+?]\??|\{\d+(?:,\d*)?\}\??)
    |(?P<kept>[|)])
    |(?P<char>[^\\\[\](){}^$.*+?|])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True)
class _Name:
    """The use of a rule."""

    name: str


@dataclass(slots=True)
class _Pattern:
    """A pattern of the client's, or a text as one."""

    text: str
    flags: str = ""


Part = _Name | _Pattern | str  # the last: a bracket, a bar or a count


@dataclass(slots=True)
class _Rules:
    """A grammar, read."""

    bodies: dict[str, list[Part]] = field(default_factory=dict)

    def take(self, name: str) -> list[Part]:
        if name in self.bodies:
            raise ValueError(f"there are two rules {name!r}")
        return self.bodies.setdefault(name, [])


def escaped(grammar: str) -> str:
    """The grammar of the inside of a JSON string whose text satisfies this one, without the quotes. Raises ValueError."""
    rules = _read(grammar)
    pattern = _one_pattern(rules, _escaped_pattern)
    if pattern is not None:
        return f"start: /{pattern}/\n"
    return _characters(rules)


def pattern_of(grammar: str) -> str | None:
    """One pattern for the texts of the grammar; None where it is recursive, and no pattern describes them. Raises ValueError."""
    return _one_pattern(_read(grammar), lambda pattern, flags: f"(?{flags}:{pattern})" if flags else f"(?:{pattern})")


# ---- reading


def _read(grammar: str) -> _Rules:
    made = _Rules()
    body: list[Part] = []
    at = 0
    first: str | None = None  # the beginning of a range
    while at < len(grammar):
        token = _TOKEN.match(grammar, at)
        if token is None:
            word = grammar[at:].split("\n")[0][:40]
            raise ValueError(f"{word!r} cannot be enforced in the way this model writes calls")
        at = token.end()
        if token["head"]:
            body = made.take(token["head"])
        elif token["text"] and first is not None:
            body.append(_Pattern(_between(first, _said(token["text"]))))
            first = None
        elif token["text"] and grammar[at:].lstrip(" ").startswith(".."):
            first = _said(token["text"])
        elif token["text"]:
            body.append(_Pattern(_hex(_said(token["text"])), "i" if token["fold"] else ""))
        elif token["pattern"]:
            if set(token["flags"]) - set("isu"):
                raise ValueError(f"the flags {token['flags']!r} of a pattern cannot be enforced")
            body.append(_Pattern(token["pattern"][1:-1].replace("\\/", "/"), token["flags"].replace("u", "")))
        elif token["imported"]:
            if token["imported"] not in COMMON:
                raise ValueError(
                    f"%import common.{token['imported']} cannot be enforced in the way this model writes calls"
                )
            made.take(token["as"] or token["imported"]).append(_Pattern(COMMON[token["imported"]][1:-1]))
        elif token["name"]:
            body.append(_Name(token["name"]))
        elif token["count"]:
            count = token["count"].strip("{}~ ").replace(" ", "").replace("..", ",")
            body.append(f"{{{count}}}")
        elif token["kept"]:
            body.append(token["kept"])
    if "start" not in made.bodies:
        raise ValueError("there is no rule start")
    missing = {part.name for parts in made.bodies.values() for part in parts if isinstance(part, _Name)} - set(
        made.bodies
    )
    if missing:
        raise ValueError(f"there is no rule {min(missing)!r}")
    return made


def _said(literal: str) -> str:
    try:
        return json.loads(literal)
    except ValueError:
        raise ValueError(f"{literal[:40]} is not a text: it is escaped otherwise than in JSON") from None


def _between(a: str, b: str) -> str:
    """A range of characters as a pattern."""
    if len(a) != 1 or len(b) != 1 or a > b:
        raise ValueError(f"{a[:20]!r}..{b[:20]!r} is not a range of characters")
    return f"[{_hex(a)}-{_hex(b)}]"


# ---- writing


def _one_pattern(rules: _Rules, write: Callable[[str, str], str]) -> str | None:
    """All rules in one pattern; None where a rule leads back to itself."""
    done: dict[str, str] = {}
    size = 0
    names = {name: [part.name for part in parts if isinstance(part, _Name)] for name, parts in rules.bodies.items()}
    open_ = {"start": iter(names["start"])}  # a path of rules, each with the names in it that are still to be written
    while open_:  # without recursion: chains of names are long
        name = next(reversed(open_))
        inner = next((one for one in open_[name] if one not in done), None)
        if inner is not None:
            if inner in open_:
                return None
            open_[inner] = iter(names[inner])
            continue
        del open_[name]
        written = []
        for part in rules.bodies[name]:
            if isinstance(part, _Name):
                written.append(done[part.name])
            elif isinstance(part, _Pattern):
                written.append(write(part.text, part.flags))
            else:
                written.append({"(": "(?:", "[": "(?:", "]": ")?"}.get(part, part))
            size += len(written[-1])
            if size > MAX_BYTES:
                raise ValueError(f"written out, it has over {MAX_BYTES} characters")
        done[name] = f"(?:{''.join(written)})"
    return done["start"]


def _characters(rules: _Rules) -> str:
    """The grammar in rules over what JSON writes for single characters."""
    lines: list[str] = []
    names = {name: "start" if name == "start" else f"n{i}" for i, name in enumerate(rules.bodies)}
    for name, parts in rules.bodies.items():
        made: list[str] = []
        for part in parts:
            if isinstance(part, _Name):
                made.append(names[part.name])
            elif isinstance(part, _Pattern):
                made += ["(", *_atoms(part.text, part.flags, lambda one: f" /{one}/ "), ")"]
            else:
                made.append({"[": "(", "]": ")?"}.get(part, part))
        lines.append(f"{names[name]}: " + (" ".join(made) or '""'))
    whole = "\n".join(lines) + "\n"
    if len(whole) > MAX_BYTES:
        raise ValueError(f"written out, it has over {MAX_BYTES} characters")
    return whole


def _escaped_pattern(pattern: str, flags: str) -> str:
    return "(?:" + "".join("(?:" if one == "(" else one for one in _atoms(pattern, flags, str)) + ")"


def _atoms(pattern: str, flags: str, write: Callable[[str], str]) -> list[str]:
    """The parts of a pattern: brackets, bars and counts as they are, and each character as JSON writes it."""
    made: list[str] = []
    at = 0
    while at < len(pattern):
        atom = _ATOM.match(pattern, at)
        if atom is None:
            raise ValueError(f"the pattern part {pattern[at : at + 20]!r} cannot be enforced inside a JSON string")
        if atom["group"]:
            made.append("(")
        elif atom["count"]:  # a lazy count counts the same texts
            made.append(atom[0] if len(atom[0]) == 1 else atom[0].removesuffix("?"))
        elif atom["kept"]:
            made.append(atom[0])
        else:
            made.append(write(_atom(atom[0], "i" in flags, "s" in flags)))
        at = atom.end()
    return made


@lru_cache(maxsize=1024)
def _atom(atom: str, fold: bool, dotall: bool) -> str:
    """A pattern for what JSON writes for one character of a pattern, or a class of them."""
    if atom[0] == "\\" and atom[1] not in "dDwWsS":
        atom = _CONTROLS.get(atom[1]) or (chr(int(atom[2:], 16)) if atom[1] in "xu" and len(atom) > 2 else atom[1])
        if atom == ".":
            return "\\x2e"
    matches = re.compile(
        atom if len(atom) > 1 or atom == "." else re.escape(atom),
        re.ASCII | (re.IGNORECASE if fold else 0) | (re.DOTALL if dotall else 0),
    )
    made = [_hex(json.dumps(one)[1:-1]) for one in SPECIAL if matches.fullmatch(one)]
    folds = "(?i:%s)" if fold else "%s"
    if atom == ".":
        made.insert(0, _NOT_SPECIAL)
    elif len(atom) == 1:
        made = made or [folds % _hex(atom)]
    elif matches.search(_PLAIN):
        made.insert(0, folds % f"[{atom}&&{_NOT_SPECIAL}]")
    if not made:
        raise ValueError(f"the pattern part {atom[:20]!r} cannot be enforced inside a JSON string")
    return f"(?:{'|'.join(made)})"


def _hex(text: str) -> str:
    """A text as a pattern that matches nothing else."""
    return "".join(one if one.isalnum() or not one.isascii() else f"\\x{ord(one):02x}" for one in text)
