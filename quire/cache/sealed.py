"""A tier whose bytes are checked: for media that may change what they keep, or peers that may send anything.

Each row is stored with a seal, a hash of its bytes, its key and its group; a load whose seals do not fit ends badly, and so
is a miss like any other. With a `secret`, nobody who does not have it can make a seal. A tier in memory needs none of this,
and should not pay for it: hashing takes longer than copying.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from quire.backends.pages import PageBytes
from quire.cache.tiers import Job, Part, Tier

SEAL = 16  # bytes


class Sealed:
    """A tier over another one, that stores a seal (a checksum) behind each row."""

    def __init__(self, tier: Tier, secret: bytes = b"") -> None:
        self._tier = tier
        self._secret = secret[:64]

    def has(self, group: int, keys: Sequence[bytes]) -> Sequence[bool]:
        return self._tier.has(group, keys)

    def drop(self, group: int, keys: Sequence[bytes]) -> None:
        self._tier.drop(group, keys)

    def store(self, parts: Sequence[Part]) -> Job:
        sealed = [_wider(part) for part in parts]
        for part, wide in zip(parts, sealed, strict=True):
            wide.buffer[:, :-SEAL] = part.buffer
            for key, row in zip(wide.keys, wide.buffer, strict=True):
                row[-SEAL:] = np.frombuffer(self._seal(part.group, key, row[:-SEAL]), np.uint8)
        return self._tier.store(sealed)

    def load(self, parts: Sequence[Part]) -> Job:
        sealed = [_wider(part) for part in parts]
        return _Unsealing(self, self._tier.load(sealed), list(zip(parts, sealed, strict=True)))

    def fits(self, part: Part) -> bool:
        """Whether the seal of every row fits its bytes."""
        return all(
            hmac.compare_digest(self._seal(part.group, key, row[:-SEAL]), row[-SEAL:].tobytes())
            for key, row in zip(part.keys, part.buffer, strict=True)
        )

    def _seal(self, group: int, key: bytes, row: PageBytes) -> bytes:
        made = blake2b(row.tobytes(), digest_size=SEAL, key=self._secret, person=b"quire seal 1")
        made.update(group.to_bytes(4, "little") + key)
        return made.digest()


class _Unsealing:
    """A load whose rows are checked when they are there, and only then given on."""

    def __init__(self, tier: Sealed, job: Job, parts: list[tuple[Part, Part]]) -> None:
        self._tier = tier
        self._job = job
        self._parts = parts
        self._fits: bool | None = None

    def ended(self) -> bool | None:
        if self._fits is None and (well := self._job.ended()) is not None:
            self._fits = well and all(self._tier.fits(sealed) for _, sealed in self._parts)
            for part, sealed in self._parts if self._fits else ():
                part.buffer[:] = sealed.buffer[:, :-SEAL]
            self._parts = []
        return self._fits

    def wait(self, seconds: float) -> None:
        self._job.wait(seconds)


def _wider(part: Part) -> Part:
    rows, nbytes = part.buffer.shape
    return Part(part.group, part.keys, np.zeros((rows, nbytes + SEAL), np.uint8))
