"""The fields of one request that nobody here knows or can honour, and that were ignored: kept while its body is read, told in its answer.

`shared/lenient.py` decides which fields those are and adds them to the `Ignored` of the request's scope. The answer tells them three times: in the
header X-Quire-Ignored (every answer, refusals too), in `quire.notes` of a body, and in the first event of a stream. A dialect that has a
better place for the notes takes them with `take`. What is told is bounded, whatever the request has, and holds plain characters alone.
A request without such a field has no `Ignored`, and pays for none of this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

KEY = "quire.ignored"  # where a scope has its Ignored
HEADER = b"x-quire-ignored"
MOST = 16  # fields that are told by name
LONGEST = 128  # characters of a field's path
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:/\[\]-]")


@dataclass(slots=True)
class Ignored:
    """What was ignored of one request, in the order in which it was found."""

    names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    count: int = 0
    taken: bool = False  # a dialect tells the notes itself

    def add(self, name: str, why: str) -> None:
        """A field that is ignored, by its path, and a sentence about it. What is read twice is told once."""
        name = plain(name)
        note = f"{name}: {why}"
        if note in self.notes:
            return
        self.count += 1
        if self.count <= MOST:
            self.names.append(name)
            self.notes.append(note)

    def header(self) -> tuple[bytes, bytes]:
        """The header: the names, and how many more there were."""
        more = [f"+{self.count - MOST} more"] if self.count > MOST else []
        return HEADER, ", ".join([*self.names, *more]).encode()

    def told(self) -> list[str]:
        """The notes, and how many more there were."""
        return [*self.notes, *([f"{self.count - MOST} more fields: ignored"] if self.count > MOST else [])]


def plain(name: str) -> str:
    """A name as a header can have it: what else it holds is shown as question marks."""
    return _UNSAFE.sub("?", name[:LONGEST])


def of(scope: Scope) -> Ignored:
    """The request's own, made when the first field is ignored."""
    return scope.setdefault(KEY, Ignored())


def take(scope: Scope) -> list[str]:
    """The notes, for a dialect that has a place of its own for them; they are not added again on the way out."""
    found: Ignored | None = scope.get(KEY)
    if found is None:
        return []
    found.taken = True
    return found.told()


def noted(value: Any, scope: Scope, inside: str = "") -> Any:
    """An object of an answer with the notes under `quire`, or in the object `inside` of it. A list has them in its first object."""
    found: Ignored | None = scope.get(KEY)
    if found is None or found.taken:
        return value
    if isinstance(value, list) and value:
        return [noted(value[0], scope, inside), *value[1:]]
    if not isinstance(value, Mapping):
        return value
    if inside and isinstance(value.get(inside), Mapping):
        return {**value, inside: noted(value[inside], scope)}
    own = value.get("quire") or {}
    return {**value, "quire": {**own, "notes": [*own.get("notes", ()), *found.told()]}}
