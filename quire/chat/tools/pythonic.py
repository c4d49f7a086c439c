"""Calls as Python writes them: [f(a=1), g(b="x")]. Each call comes whole, once its closing parenthesis is there.

The extent of a call is found by counting brackets outside quotation marks, and then Python's own parser reads it; only
literals count as arguments, and JSON's true, false and null. Nothing is run.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from quire.chat.tools.reader import Read, Text

_NAME = re.compile(r"[\w.\-]+")
_PLAIN = re.compile(r"[^()\[\]{}'\"\\]+")
_QUOTED = re.compile(r"[^'\"\\]+")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567\n")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def read_call(t: Text, known: Any = bool) -> Read[bool]:
    """Read one call. False: it is none, and what was read is still held back."""
    name = yield from t.matching(_NAME)
    if not name or name[0].isdigit() or not known(name) or (yield from t.next()) != "(":
        return False
    held = yield from _bracketed(t)
    arguments = None if held is None else _arguments(held)
    if arguments is None:
        return False
    t.begin(name)
    t.argue(json.dumps(arguments, ensure_ascii=False))
    return True


def _bracketed(t: Text) -> Read[str | None]:
    """The text from an opening bracket to its closing one."""
    made: list[str] = []
    stack: list[str] = []
    quote = ""
    while True:
        if t.at == len(t.buffer) and not (yield from t.more()):
            return None
        run = (_QUOTED if quote else _PLAIN).match(t.buffer, t.at)
        if run is not None:
            taken = t.take(run.end() - t.at)
            made.append(taken.replace("\n", "\\n") if quote else taken)  # some write lines into plain quotes
            continue
        char = t.take(1)
        made.append(char)
        if char == "\\":
            after = yield from t.next()
            if not after:
                return None
            if after not in _ESCAPES:
                made.append(char)  # Python would keep such a backslash, and complain
            made.append(t.take(1))
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _CLOSING:
            stack.append(_CLOSING[char])
        elif not stack or stack.pop() != char:
            return None
        elif not stack:
            return "".join(made)


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        made = {str(k.arg): _literal(k.value) for k in call.keywords}
        json.dumps(made, allow_nan=False)
        return made
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.Dict):
        return {str(_literal(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    return ast.literal_eval(node)
