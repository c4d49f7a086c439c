"""The architecture of a GGUF from its first bytes, while the file is still being downloaded.

A model that cannot be served is refused before gigabytes of it have come. `peek` reads whatever part of the header is there: a key
beyond it is not known yet, and that is no error. The whole header is read by header.py once the file is complete. Only bytes that no
GGUF begins with raise.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from quire.observe.errors import BadModelFile

MAGIC = b"GGUF"
_KEY = b"general.architecture"
_STRING = 8
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True, slots=True)
class HeaderStart:
    """The beginning of a GGUF."""

    path: str  # what it is called, for messages
    architecture: str


def peek(name: str, head: bytes) -> HeaderStart | None:
    """The facts in those first bytes of a file, or None where they are not in them. Raises BadModelFile for what is no GGUF."""
    if not head.startswith(MAGIC):
        raise BadModelFile(f"{name} is not a GGUF file: it starts with {head[:4]!r}")
    at = 24  # magic, version, two counts
    while (found := _text(head, at)) is not None:
        key, at = found
        kind = int.from_bytes(head[at : at + 4], "little")
        at += 4
        if kind == _STRING:
            value = _text(head, at)
            if value is None:
                return None
            if key == _KEY:
                return HeaderStart(name, value[0].decode("utf-8", "replace"))
            at = value[1]
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            return None
    return None


def _text(head: bytes, at: int) -> tuple[bytes, int] | None:
    """The text at a place, and where it ends, or None where it goes beyond what is here."""
    if at + 8 > len(head):
        return None
    length = struct.unpack_from("<Q", head, at)[0]
    end = at + 8 + length
    return (head[at + 8 : end], end) if length <= len(head) and end + 4 <= len(head) else None
