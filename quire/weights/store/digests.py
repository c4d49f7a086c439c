"""The digest of the weights that an engine has loaded, without making its start wait.

What came from the store is known by its digest already. Anything else is read once, by a thread in the background that
gives way to everybody, and remembered in a small file by inode, size and times: the next start finds it there. A file
that changed since the engine opened it has no digest here, because what was loaded can no longer be read.

    one .gguf          its sha256, as the store has it
    a folder           the digest of the list of its weight files and configurations (manifest.digest_of), so that a folder
                       from the store and the same files anywhere else are one model; the tokenizer is no part of it
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quire.weights.store.home import Home
from quire.weights.store.manifest import File, Manifest, digest_of

FILE = "digests.json"
KEEP = 1024  # files that are remembered
CHUNK = 1 << 20
_BLOB = re.compile(r"sha256-([0-9a-f]{64})")

log = logging.getLogger("quire.weights")


class Changed(Exception):
    """A file is not the one that was opened."""


class WeightsDigest:
    """The digest of some files, found out in the background once `start` was called."""

    def __init__(self, files: Sequence[tuple[Path, os.stat_result]], home: Path, folder: Path | None = None) -> None:
        """The files, as they were found when the engine opened them. `folder` is what they lie in, if they are a model
        together."""
        self._files = [(path, _identity(found)) for path, found in files]
        self._home = home
        self._folder = folder
        self._digest: str | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.failed = ""  # why there will be none

    @property
    def digest(self) -> str | None:
        """64 hexadecimal digits, or None as long as they are not known."""
        return self._digest

    def start(self) -> None:
        """Find it out: at once where nothing has to be read, else in the background. Harmless when called again."""
        if self._thread is not None or self._digest is not None or self.failed:
            return
        known = self._from_store()
        if not self._complete(known):
            known = _recall(self._home / FILE) | known
        if self._complete(known):
            self._digest = self._whole(known)
            return
        self._thread = threading.Thread(target=self._run, name="quire-digest", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread, if there is one."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        self.join()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # of this thread alone, where the system can do that
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            known = _recall(self._home / FILE) | self._from_store()
            for path, identity in self._files:
                if identity not in known and (sha256 := self._read(path, identity)) is not None:
                    known[identity] = sha256
            if not self._stop.is_set():
                _remember(self._home / FILE, {identity: known[identity] for _, identity in self._files})
                self._digest = self._whole(known)
        except (OSError, Changed) as e:
            self.failed = f"the weights cannot be identified: {e}"
            log.warning("%s. Cached pages get no keys, so they stay in this process", self.failed)

    def _read(self, path: Path, identity: str) -> str | None:
        """The sha256 of a file; None when told to stop."""
        made = hashlib.sha256()
        with path.open("rb") as file:
            if _identity(os.fstat(file.fileno())) != identity:
                raise Changed(f"{path} is not the file that was loaded any more")
            while chunk := file.read(CHUNK):
                if self._stop.is_set():
                    return None
                made.update(chunk)
            if _identity(os.fstat(file.fileno())) != identity:
                raise Changed(f"{path} changed while it was read")
        return made.hexdigest()

    def _whole(self, known: dict[str, str]) -> str:
        """The digest of all files, from those of each."""
        if self._folder is None and len(self._files) == 1:
            return known[self._files[0][1]]
        return digest_of(File(path.name, 0, known[identity]) for path, identity in self._files)

    def _complete(self, known: dict[str, str]) -> bool:
        return all(identity in known for _, identity in self._files)

    def _from_store(self) -> dict[str, str]:
        """What the store says of these files: of a blob its name, of a folder's files its manifest."""
        place, known = Home(self._home), dict[str, str]()
        for path, identity in self._files:
            if path.parent == place.root / "blobs" and (match := _BLOB.fullmatch(path.name)):
                known[identity] = match[1]
        folder = self._folder
        if folder is not None and folder.parent == place.root / "trees" and (match := _BLOB.fullmatch(folder.name)):
            of = {f.path: f.sha256 for f in _files_of(place, match[1])}
            known |= {identity: of[path.name] for path, identity in self._files if path.name in of}
        return known


def _files_of(place: Home, sha256: str) -> Sequence[File]:
    """The files of the folder with that digest."""
    for _, manifest in place.manifests():
        if isinstance(manifest, Manifest) and manifest.folder and manifest.sha256 == sha256:
            return manifest.files
    return ()


def _identity(found: os.stat_result) -> str:
    """The properties of a file that change when it does."""
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _recall(path: Path) -> dict[str, str]:
    """The digests that are remembered. A file that is not as we write it counts as empty."""
    try:
        found = json.loads(path.read_bytes())
        items = list(found.items())
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {k: v for k, v in items if isinstance(v, str) and re.fullmatch(r"[0-9a-f]{64}", v)}


def _remember(path: Path, new: dict[str, str]) -> None:
    """Written beside and moved into place, so that a reader never sees half of it. What cannot be kept is read again."""
    known = {k: v for k, v in _recall(path).items() if k not in new} | new
    beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(json.dumps(dict(list(known.items())[-KEEP:]), indent=1))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
