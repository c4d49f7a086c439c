"""The store on disk: its folders and its locks.

    blobs/sha256-<hex>      a model file, verified, never written again
    trees/sha256-<hex>/     a model that is a folder, the same
    manifests/<name>.json   what a name means (manifest.py)
    partial/                downloads under way or interrupted (fetch.py)
    locks/                  one file per download, and one for the store's own bookkeeping

No name, however hostile, gives a path outside these folders. Nothing here decides what is in them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from quire.observe.errors import QuireError
from quire.weights.download.progress import Progress
from quire.weights.names import Reference
from quire.weights.store.manifest import File, Manifest, decode, digest_of


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of a model store, and the paths in it."""

    root: Path

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / f"sha256-{sha256}"

    def tree(self, sha256: str) -> Path:
        return self.root / "trees" / f"sha256-{sha256}"

    def content(self, manifest: Manifest) -> Path:
        """The file or the folder that a manifest names."""
        return self.tree(manifest.sha256) if manifest.folder else self.blob(manifest.sha256)

    def adapter(self, files: Sequence[File]) -> Path:
        """Where an adapter lies: its one file, or the folder that is made of several."""
        return self.blob(files[0].sha256) if len(files) == 1 else self.tree(digest_of(files))

    def contents(self, manifest: Manifest) -> set[Path]:
        """Everything that a manifest needs to be there."""
        adapter = () if manifest.defaults is None else manifest.defaults.adapter
        more = {self.adapter(adapter), *(self.blob(file.sha256) for file in adapter)} if adapter else set[Path]()
        return {self.content(manifest), *more}

    def part(self, reference: object) -> Path:
        """The file that a reference's bytes are downloaded into. Its state, and what is made of it, differ in the suffix."""
        return self.root / "partial" / f"{key(str(reference))}.part"

    def parts(self, references: Iterable[Reference]) -> list[Path]:
        """The files that the bytes of a pull are downloaded into, from whichever of its sources."""
        each = [(r, *(r.parts if len(r.parts) > 1 else ())) for r in references]
        return [self.part(r) for group in each for r in group]

    def manifest(self, name: str) -> Path:
        safe = quote(name, safe=":@=+,")
        if len(safe) > 180:  # file names end at 255 bytes
            safe = f"{safe[:100]}~{key(name)}"
        return self.root / "manifests" / f"{safe}.json"

    def manifests(self) -> list[tuple[Path, Manifest | QuireError]]:
        """Every manifest, or why it cannot be read."""
        found: list[tuple[Path, Manifest | QuireError]] = []
        for path in entries(self.root / "manifests", ".json"):
            try:
                found.append((path, decode(path.read_bytes(), path.stem)))
            except FileNotFoundError:
                continue  # removed while we looked
            except OSError as e:
                found.append((path, QuireError(str(e))))
            except QuireError as e:
                found.append((path, e))
        return found

    def prepare(self) -> None:
        try:
            for folder in ("blobs", "trees", "manifests", "partial", "locks"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise QuireError(
                f"cannot make the model store at {self.root}: {e.strerror or e}",
                cure="set QUIRE_HOME to a folder you can write to",
            ) from e

    @contextmanager
    def lock(self, name: str, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
        """Hold the lock of that name, against other processes and other threads alike; yields whether it waited.

        flock belongs to the open file, so each holder opens its own. Lock files stay: deleting one that another
        process has just opened would let two in.
        """
        try:
            handle = (self.root / "locks" / f"{name}.lock").open("a")
        except OSError as e:
            raise QuireError(
                f"cannot lock the model store at {self.root}: {e.strerror or e}",
                cure="set QUIRE_HOME to a folder you can write to",
            ) from e
        with handle:
            waited = False
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise QuireError(f"{self.root} is on a filesystem without locks: {e.strerror}") from e
                waited = True
                if waiting is not None:
                    waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield waited


def entries(folder: Path, suffix: str = "") -> list[Path]:
    """Files in a folder, by name; none where there is no folder."""
    try:
        return sorted(p for p in folder.iterdir() if p.name.endswith(suffix) and p.is_file())
    except OSError:
        return []


def hash_file(path: Path, label: str, progress: Progress) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    progress.start(path.stat().st_size, label)
    try:
        with path.open("rb") as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
                progress.advance(len(chunk))
    finally:
        progress.finish()
    return digest.hexdigest()


def key(text: str) -> str:
    """A file name for any text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
