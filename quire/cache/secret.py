"""The secret that salts namespaces: made once, kept in a file that only its owner can read, the same after a restart.

A namespace's salt is a keyed hash of its name under the secret. Whoever sees the keys of pages (on a disk, in events, at
a peer) cannot check a guess of what a namespace has asked without it. Machines that are to share the pages of named
namespaces get a copy of the file; the default namespace needs none.

Any number of processes may start at once: one of them makes the file, in one atomic step, and all of them read it. Where
it can be neither read nor made, a secret is drawn that lives as long as the process, and that is told once: then the
pages of named namespaces are not found again after a restart, and everything else is as before.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

FILE = "namespace-secret"
_TEXT = re.compile(rb"[0-9a-f]{64}\n?")

log = logging.getLogger("quire.cache")


class Secret:
    """The secret of one home folder; None: of this process alone. Nothing is read or made before it is needed."""

    def __init__(self, home: Path | None) -> None:
        self._path = None if home is None else home / FILE
        self._value: bytes | None = None

    @property
    def value(self) -> bytes:
        """32 random bytes."""
        if self._value is None:
            self._value = os.urandom(32) if self._path is None else self._kept(self._path)
        return self._value

    def salt(self, namespace: str) -> bytes:
        """The salt of a namespace."""
        return self._derived(b"quire namespace", namespace)

    def key(self, purpose: str) -> bytes:
        """A key for something else that has to be the same after a restart."""
        return self._derived(b"quire purpose", purpose)

    def _derived(self, person: bytes, text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        return blake2b(data, key=self.value, digest_size=32, person=person).digest()

    def _kept(self, path: Path) -> bytes:
        try:
            return _read(path) or _make(path)
        except (OSError, ValueError) as e:
            log.warning(
                "the secret that salts cache namespaces cannot be kept in %s: %s. A new one serves until this process "
                "ends; pages of named namespaces will not be found again after that",
                path,
                e,
            )
            return os.urandom(32)


def _read(path: Path) -> bytes | None:
    """The secret in a file, or None where there is no file. Raises OSError or ValueError where there is something else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is not waited for
    except FileNotFoundError:
        return None
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        text = file.read(100)
    if not _TEXT.fullmatch(text):
        raise ValueError("it does not hold 64 hexadecimal digits; delete it, and a new one is made")
    if found.st_mode & 0o077:
        log.warning("others than its owner may read %s: `chmod 600` it, or delete it for a new secret", path)
    return bytes.fromhex(text.decode())


def _make(path: Path) -> bytes:
    """Make the file, unless another process was faster; what is in it then is the secret."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(os.urandom(32).hex().encode() + b"\n")
            file.flush()
            os.fsync(handle)
        with suppress(FileExistsError):  # a link is made whole or not at all, and never over another's
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    value = _read(path)
    if value is None:
        raise FileNotFoundError("it was made, and is gone")
    return value
