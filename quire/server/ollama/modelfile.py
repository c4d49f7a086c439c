"""Ollama's Modelfile: lines of instructions, as the fields that /api/create has for them. And back, for /api/show.

    FROM smollm2:135m
    PARAMETER temperature 0.2
    SYSTEM \"\"\"You are a pirate.\"\"\"
    MESSAGE user Ahoy!

Only the shape is judged here: an instruction that is none, a quote that does not end. What the values mean is `create.py`'s business.
"""

from __future__ import annotations

from typing import Any

from quire.observe.errors import BadRequest
from quire.weights.store.manifest import Defaults

MAX_LINES = 4096
KNOWN = ("FROM", "PARAMETER", "SYSTEM", "TEMPLATE", "ADAPTER", "MESSAGE", "LICENSE")
MANY = frozenset({"stop"})  # parameters that may come several times


def parse(text: str) -> dict[str, Any]:
    """The fields of a create request that the instructions mean."""
    made: dict[str, Any] = {}
    for number, word, value in _instructions(text):
        if word == "PARAMETER":
            name, _, given = value.partition(" ")
            parameters = made.setdefault("parameters", {})
            if name in MANY:
                parameters.setdefault(name, []).append(_unquoted(given.strip(), number))
            else:
                parameters[name] = _value(given.strip())
        elif word == "MESSAGE":
            role, _, content = value.partition(" ")
            made.setdefault("messages", []).append({"role": role, "content": _unquoted(content.strip(), number)})
        elif word == "LICENSE":
            made.setdefault("license", []).append(_unquoted(value, number))
        elif word == "ADAPTER":
            made["adapters"] = {**made.get("adapters", {}), value: value}
        else:
            made[word.lower()] = _unquoted(value, number)
    if "from" not in made:
        raise BadRequest("modelfile: FROM is missing", param="modelfile")
    return made


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Line number, instruction and what follows it; a text in three quotes may go over several lines."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise BadRequest(f"modelfile has {len(lines)} lines: at most {MAX_LINES}", param="modelfile")
    found: list[tuple[int, str, str]] = []
    at = 0
    while at < len(lines):
        line, number = lines[at].strip(), at + 1
        at += 1
        if not line or line.startswith("#"):
            continue
        word, _, value = line.partition(" ")
        word, value = word.upper(), value.strip()
        if word not in KNOWN:
            raise BadRequest(
                f"modelfile, line {number}: {word[:40]!r} is no instruction", cure=", ".join(KNOWN), param="modelfile"
            )
        if value.count('"""') == 1:
            while at < len(lines) and '"""' not in lines[at]:
                value += "\n" + lines[at]
                at += 1
            if at == len(lines):
                raise BadRequest(f'modelfile, line {number}: the text has no closing """', param="modelfile")
            value += "\n" + lines[at].rstrip()
            at += 1
        if not value:
            raise BadRequest(f"modelfile, line {number}: {word} has nothing after it", param="modelfile")
        found.append((number, word, value))
    return found


def _unquoted(value: str, number: int) -> str:
    for quote in ('"""', '"'):
        if value.startswith(quote):
            if len(value) < 2 * len(quote) or not value.endswith(quote):
                raise BadRequest(f"modelfile, line {number}: a quote is not closed", param="modelfile")
            return value[len(quote) : -len(quote)]
    return value


def _value(text: str) -> Any:
    """A number, a truth, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip('"')


def write(base: str, defaults: Defaults, licence: str) -> str:
    """A Modelfile that says the same."""
    lines = [f"FROM {base}"]
    for name, value in defaults.parameters.items():
        lines += [f"PARAMETER {name} {said(one)}" for one in (value if isinstance(value, list) else [value])]
    if len(defaults.adapter) == 1:
        lines.append(f"ADAPTER @sha256:{defaults.adapter[0].sha256}")
    elif defaults.adapter:  # a Modelfile names a folder, which has no digest of its own
        lines += [f"# ADAPTER: {file.path} sha256:{file.sha256}" for file in defaults.adapter]
    if defaults.template:
        lines.append(f'TEMPLATE """{defaults.template}"""')
    if defaults.system:
        lines.append(f'SYSTEM """{defaults.system}"""')
    lines += [f'MESSAGE {m["role"]} """{m["content"]}"""' for m in defaults.messages]
    if licence:
        lines.append(f'LICENSE """{licence}"""')
    return "\n".join(lines) + "\n"


def said(value: Any) -> str:
    """A parameter's value as a Modelfile has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
