"""Who asks: the owner of what a request keeps, found by the key that it came with.

The server's own key (and nobody's, where no key is needed) owns what has no owner's name; it alone may change the server: its models, its
adapters. Every further key has a name, which is the owner: keys may change under it. Stored responses, files and batches are seen by their owner
alone, and prefixes that one has computed are found by nobody else. A context variable, because it belongs to a request and not to its
dialect: what a request starts belongs to the same owner.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from quire.observe.errors import BadRequest, NotFound
from quire.server.errors import Forbidden

MAX_KEYS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KEY = re.compile(r"[!-~]{8,512}")
_owner: ContextVar[str] = ContextVar("owner", default="")


def owner() -> str:
    """Whose request this task serves; empty: the server's own key, or no key."""
    return _owner.get()


@contextmanager
def acting_for(name: str) -> Generator[None, None, None]:
    """What is done in this block, and in tasks made in it, is done for that owner."""
    token = _owner.set(name)
    try:
        yield
    finally:
        _owner.reset(token)


def namespace(asked: str) -> str:
    """Where prefixes are looked for and kept: each owner's own, whatever salt a request has."""
    name = owner()
    if not name:
        return asked
    return hashlib.blake2b(f"{len(name)} {name} {asked}".encode(), digest_size=16, person=b"quire tenant").hexdigest()


def check_administers(what: str) -> None:
    """Refuse owners who only use the server."""
    if owner():
        raise Forbidden(f"{what} takes the server's own key", cure="ask who runs it", code="forbidden")


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
