"""Callers: whose request it is, by the API key it came with, and how far behind other requests its work may run.

The server's own key (or no key, where none is needed) is the owner with an empty name; it alone may change the server: its models, its
adapters. Every further key has a name, which is the owner: keys may change under it. Stored responses, files and batches are seen by their owner
alone, and prefixes that one has computed are found by nobody else. A Caller belongs to a request: the layer that checks keys puts it into the request's
scope, and handlers hand it on.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Scope

from quire.observe.errors import BadRequest, NotFound
from quire.server.errors import Forbidden

MAX_KEYS = 1000
BATCH = 1 << 20  # added to the priority of a batch's lines; lower runs first
SCOPE = "quire.caller"
_MOST = 2**31 - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KEY = re.compile(r"[!-~]{8,512}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. `owner` is empty for the server's own key, or no key; `behind` is added to the priority of its work."""

    owner: str = ""
    behind: int = 0

    def namespace(self, asked: str) -> str:
        """The namespace in which prefixes are looked for and kept: each owner's own, whatever salt a request has."""
        name = self.owner
        if not name:
            return asked
        whole = f"{len(name)} {name} {asked}".encode()
        return hashlib.blake2b(whole, digest_size=16, person=b"quire tenant").hexdigest()

    def priority(self, asked: int = 0) -> int:
        """The priority that a request gets. Whatever it asks for itself, what is behind stays behind."""
        return min(max(asked, 0) + self.behind, _MOST) if self.behind else asked

    def check_administers(self, what: str) -> None:
        """Refuse owners who only use the server."""
        if self.owner:
            raise Forbidden(f"{what} takes the server's own key", cure="ask who runs it", code="forbidden")


NOBODY = Caller()  # the server's own key, or none


def caller_of(scope: Scope) -> Caller:
    """The caller that sent a request."""
    return scope.get(SCOPE, NOBODY)


def read_keys(path: Path) -> tuple[tuple[str, str], ...]:
    """Names and keys from a file of lines `NAME KEY`; what is behind # is a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise NotFound(f"there is no file of keys at {path}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise BadRequest(f"the keys in {path} cannot be read: {e}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _KEY.fullmatch(words[1]):
            raise BadRequest(
                f"{where} is not a name and a key",
                cure="NAME KEY: a name of letters, digits and ._@-, and 8 to 512 printable characters",
            )
        if words[0] in found or words[1] in found.values():
            raise BadRequest(f"{where}: that {'name' if words[0] in found else 'key'} comes twice")
        found[words[0]] = words[1]
    if not 1 <= len(found) <= MAX_KEYS:
        raise BadRequest(f"{path} has {len(found)} keys: 1 to {MAX_KEYS} are taken")
    return tuple(found.items())
