"""Content keys: what a full page of KV is called outside of this process.

Two pages have the same key exactly when they hold the same bytes: those of the same tokens after the same prefix, in the
same namespace, of the same model computed in the same way. So a key can be stored, sent and compared by anybody:

    root     H(fingerprint, salt of the namespace)         nobody's page; a new chain for each namespace
    page 0   H(root,   tokens 0 .. 15)
    page 1   H(page 0, tokens 16 .. 31)                    one hash a page; the whole prefix is in it

The fingerprint says everything else that the numbers depend on: weights, backend, KV type, page size. The salt is a
secret (secret.py), so that nobody who sees keys can find out by trying what a namespace has asked. The default
namespace "" has none: its keys are the same on every machine that serves the model. This file does no I/O and keeps no keys.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

SIZE = 32  # bytes of a key: who chooses the tokens cannot find two prefixes with one key
# Part of every hash, and different for each kind of text. A change of what is hashed, or how, gets a new number.
_FINGERPRINT, _ROOT, _PAGE = b"quire model 1", b"quire root 1", b"quire page 1"


def fingerprint(parts: Mapping[str, str]) -> bytes:
    """One digest of everything that decides what a page's bytes are, besides tokens and namespace; each part has a name."""
    made = blake2b(digest_size=SIZE, person=_FINGERPRINT)
    for name in sorted(parts):
        for text in (name.encode(), parts[name].encode()):
            made.update(len(text).to_bytes(8, "little"))  # so that no two lists of parts are one text
            made.update(text)
    return made.digest()


class Keys:
    """The keys of one model's pages. `hashed` counts the pages that were given one."""

    __slots__ = ("_fingerprint", "_pack", "_salt", "hashed", "page_size")

    def __init__(self, fingerprint: bytes, page_size: int, salt: Callable[[str], bytes]) -> None:
        """`salt` gives that of a namespace; it is asked for none but named ones."""
        if len(fingerprint) != SIZE:
            raise ValueError(f"a fingerprint of {len(fingerprint)} bytes: it must have {SIZE}")
        self._fingerprint = fingerprint
        self._salt = salt
        self._pack = struct.Struct(f"<{page_size}q").pack  # 64 bits each: no id is cut, whatever makes ids
        self.page_size = page_size
        self.hashed = 0

    def root(self, namespace: str) -> bytes:
        """The key that a namespace's chain begins with."""
        made = blake2b(self._fingerprint, digest_size=SIZE, person=_ROOT)
        if namespace:
            made.update(self._salt(namespace))
        return made.digest()

    def key(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The key of the full page of `tokens` that comes after the page, or the root, `parent`."""
        self.hashed += 1
        return blake2b(parent + self._pack(*tokens), digest_size=SIZE, person=_PAGE).digest()

    def chain(self, parent: bytes, tokens: Sequence[int]) -> list[bytes]:
        """The keys of all full pages of tokens that come after `parent`."""
        size, keys = self.page_size, list[bytes]()
        for at in range(0, len(tokens) - size + 1, size):
            parent = self.key(parent, tokens[at : at + size])
            keys.append(parent)
        return keys
