"""The writer of docs/compat.md: it lays out the tables that each dialect has beside its structs.

    python -m quire.server.compat [FILE]        prints it, or writes it there

Knows no field: it gathers `COMPAT` and `ABSENT` of every module of every dialect and lays them out.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from quire.server.app import dialects
from quire.server.shared.compat import HONOURED, NEUTRAL, NO_EFFECT, REFUSED, Absent, Endpoint, Row

HEAD = """\
# Compatibility

What becomes of every field of every route. This page is written by `python -m quire.server.compat docs/compat.md` from the tables beside the
structs that read the requests (`quire/server/`, a package for each dialect); the tests send every row to a server and compare.

- **honoured**: does what its API says, or what is said beside it. `null` means the default everywhere.
- **no effect**: accepted with any value, because it cannot change the answer; why is said beside it.
- **refused unless**: would change the answer and cannot be honoured: a 400 that names it, unless its value asks for nothing.
- **refused**: a 400 that names it, with what to do instead.

A field that is in no table, or in no struct of an object in the body, is **unknown**. It is ignored and told: in the header `X-Quire-Ignored`, and in
`quire.notes` of the answer or of a stream's first event, by its path and with what was probably meant. With `--strict`, or in a request with the header
`X-Quire-Strict: true`, it is a 400 (422 on TGI's routes) that says the same. With `--lenient` or `X-Quire-Lenient: true` what is said below to be refused (unless
it asks for nothing) is ignored and told, too. See [server.md](server.md#unknown-fields). An object that has a key twice is always refused, in bodies of up
to 1 MiB: which value was meant is not ours to guess.
"""
# The order of the page. A dialect that is not here comes after, by name.
ORDER = ("OpenAI", "OpenAI, with vLLM's fields", "Anthropic", "Ollama", "llama.cpp", "TGI", "KServe v2")


def _modules() -> Iterable[object]:
    for dialect in dialects():
        for module in pkgutil.walk_packages(dialect.__path__, f"{dialect.__name__}."):
            yield importlib.import_module(module.name)


def endpoints() -> list[Endpoint]:
    """Every route in the tables, by dialect."""
    found = [e for module in _modules() for e in getattr(module, "COMPAT", ())]
    return sorted(found, key=lambda e: (_place(e.dialect), e.path, e.method))


def absent() -> list[Absent]:
    """Every route that is known and not here."""
    found = [a for module in _modules() for a in getattr(module, "ABSENT", ())]
    return sorted(found, key=lambda a: (_place(a.dialect), a.path))


def _place(dialect: str) -> tuple[int, str]:
    return (ORDER.index(dialect) if dialect in ORDER else len(ORDER), dialect)


def page() -> str:
    """The whole of docs/compat.md."""
    parts = [HEAD]
    missing = absent()
    by_dialect: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints():
        by_dialect.setdefault(endpoint.dialect, []).append(endpoint)
    for dialect, routes in by_dialect.items():
        parts.append(f"## {dialect}\n")
        parts += map(_section, routes)
        parts += _absent([a for a in missing if a.dialect == dialect])
    for dialect in dict.fromkeys(a.dialect for a in missing if a.dialect not in by_dialect):
        parts.append(f"## {dialect}\n")
        parts += _absent([a for a in missing if a.dialect == dialect])
    return "\n".join(parts)


def _section(route: Endpoint) -> str:
    lines = [f"### `{route.method} {route.path}`", ""]
    if route.what:
        lines += [route.what, ""]
    rows = route.rows()
    if rows:
        lines += ["| field | | |", "|---|---|---|", *map(_row, rows), ""]
    return "\n".join(lines)


def _row(row: Row) -> str:
    note = row.note
    if row.verdict == NEUTRAL:
        note = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in row.neutral)
    if row.verdict not in (HONOURED, NO_EFFECT, NEUTRAL, REFUSED):
        raise ValueError(f"{row.name}: {row.verdict}")
    return f"| `{row.name}` | {row.verdict} | {note.replace('|', chr(92) + '|')} |"


def _absent(routes: list[Absent]) -> list[str]:
    if not routes:
        return []
    rows = [f"| `{a.path}` | {a.status} | {a.why} |" for a in routes]
    return ["\n".join(["Not here:", "", "| route | status | |", "|---|---|---|", *rows, ""])]


def main() -> int:
    """Print the page, or write it to the file that is named."""
    text = page()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
