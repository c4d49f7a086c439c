"""The download of one model: its sources in turn, until one gives the bytes that are wanted, verified, in the store.

A source gives a file, parts of a file, a file or a folder inside an archive, or a repository (hub.py). The lock of the model is held by
the caller. Whatever fails, what a later try can use is kept, and an interrupt says how much that is.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quire.observe.errors import BadModelFile, DownloadFailed, NotFound, QuireError, Unsupported
from quire.weights import sources
from quire.weights.download import archive, repository, segments
from quire.weights.download.fetch import Transfer, check_room, discard, disk_errors, write_whole
from quire.weights.download.parallel import Shared, run_all
from quire.weights.download.progress import Progress, mb
from quire.weights.gguf.peek import MAGIC, HeaderStart, peek
from quire.weights.names import Reference
from quire.weights.sources import Local, Remote
from quire.weights.store.home import hash_file, sync_folder
from quire.weights.store.manifest import File, Manifest, digest_of, encode

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.checkpoint import Opened
    from quire.weights.download.web import Http
    from quire.weights.sources.hf import HubTarget
    from quire.weights.store.catalogue import Wanted
    from quire.weights.store.home import Home


_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)


class Pull:
    """`run` once. Raises NotFound, Unsupported, DownloadFailed."""

    def __init__(
        self,
        place: Home,
        env: Environment,
        http: Http,
        wanted: Wanted,
        progress: Progress,
        force: bool,
        accepts: Callable[[Opened | HeaderStart], object] | None = None,
    ):
        self.place, self.env, self.accepts = place, env, accepts
        self.wanted, self.progress, self.force = wanted, progress, force
        self.http = replace(http, note=progress.note)

    def run(self) -> Path:
        wanted = self.wanted
        if wanted.sha256 and not wanted.folder and self._usable(wanted.sha256, wanted.size):
            return self._adopt(wanted.references[0], wanted.sha256)
        failures: list[QuireError] = []
        for reference in wanted.references:
            try:
                return self._from(reference)
            except (NotFound, DownloadFailed) as e:
                if e.code == "disk_full":
                    raise
                failures.append(e)
                if len(failures) < len(wanted.references):
                    self.progress.note(f"{reference} failed: {e}; trying the next source")
            except KeyboardInterrupt:
                self._say_kept(sum(p.stat().st_size for p in self.place.parts(wanted.references) if p.exists()))
                raise
        if len(failures) == 1:
            raise failures[0]
        tried = "; ".join(f"{r}: {e.message}" for r, e in zip(wanted.references, failures, strict=True))
        raise DownloadFailed(f"{wanted.name} could not be had from any of its sources: {tried}")

    def _from(self, reference: Reference) -> Path:
        if reference.scheme == "hf" and reference.folder:
            return self._repository(reference)
        if len(reference.parts) > 1:
            return self._joined(reference)
        if (split := _SPLIT.search(str(reference).partition("@")[0])) and int(split[1]) > 1:
            raise Unsupported(
                f"{reference} is one of {int(split[1])} files of a split model: they are not fetched one by one",
                cure="fetch all of them into one folder with the hub's own tools, and name the first file by its path",
            )
        remote = self._locate(reference)
        part = self.place.part(reference)
        if remote.member is None:
            remote = self._agree(reference, remote)
            if remote.sha256 and self._usable(remote.sha256, remote.size):
                return self._adopt(reference, remote.sha256)
            look = partial(self._glimpse, reference)
            digest = Transfer(
                remote, part, self.wanted.name, self.http, self.progress, look=look, lanes=segments.LANES
            ).run()
            return self._commit(reference, part, digest, [part])
        room = 0 if reference.folder else self.wanted.size or 0
        http = self.http.trusting(remote.cafile)
        Transfer(remote, part, self.wanted.name, http, self.progress, reserve=room, lanes=segments.LANES).run()
        if reference.folder:
            return self._unpack(reference, remote.member, part)
        done = part.with_suffix(".member")
        try:
            digest = archive.extract(part, remote.member, done, self.wanted.size, self.progress)
            self._verify(remote.member, digest)
        except DownloadFailed as e:
            done.unlink(missing_ok=True)
            if e.code != "disk_full":  # the archive itself is no good; what only lacks room is kept
                discard(part)
            raise
        return self._commit(reference, done, digest, [part])

    def _glimpse(self, reference: Reference, head: bytes) -> None:
        """A file's beginning is enough to refuse it: no GGUF, or an architecture that is not known here."""
        seen = peek(str(reference), head)
        if self.accepts is not None and seen is not None:
            self.accepts(seen)

    def _locate(self, reference: Reference) -> Remote:
        remote = sources.load(reference.scheme).locate(reference.target, self.env, self.http)
        if isinstance(remote, Local):
            raise DownloadFailed(f"{reference} is a local file: nothing to pull")
        for note in remote.notes:
            self.progress.note(note)
        return remote

    # Several parts

    def _joined(self, reference: Reference) -> Path:
        """Parts come side by side, and are put together when all are here."""
        remotes = run_all([partial(self._sized, r) for r in reference.parts], threading.Event())
        parts = [self.place.part(r) for r in reference.parts]
        here = [p.stat().st_size if p.exists() else 0 for p in parts]
        sizes = [r.size for r in remotes]
        total = None if None in sizes else sum(s for s in sizes if s is not None)
        check_room(parts[0].parent, max(0, (total or 0) - sum(here)) + (self.wanted.size or total or 0))
        shared = Shared(self.progress, total, self.wanted.name, sum(here))
        http = replace(self.http, note=shared.note)
        transfers = [
            Transfer(remote, part, self.wanted.name, http.trusting(remote.cafile), shared.slice(have))
            for remote, part, have in zip(remotes, parts, here, strict=True)
        ]
        run_all([t.run for t in transfers], shared.stop)
        self.progress.finish()
        done = self.place.part(reference).with_suffix(".member")
        done.unlink(missing_ok=True)
        joined = archive.Joined(done, self.progress)
        try:
            for remote, part in zip(remotes, parts, strict=True):
                joined.add(part, remote.member)
            if self.wanted.size is not None and joined.size != self.wanted.size:
                raise DownloadFailed(
                    f"the {len(remotes)} parts of {reference} have {joined.size:,} bytes; expected {self.wanted.size:,}"
                )
            self._verify(str(reference), joined.digest.hexdigest())
        except DownloadFailed as e:
            done.unlink(missing_ok=True)
            if e.code != "disk_full":
                for part in parts:
                    discard(part)
            raise
        return self._commit(reference, done, joined.digest.hexdigest(), parts)

    def _sized(self, reference: Reference) -> Remote:
        """Where a part is, with its size where somebody says it."""
        remote = self._locate(reference)
        if remote.size is None:
            length = self.http.trusting(remote.cafile).head(remote.url, auth=remote.auth).length()
            remote = replace(remote, size=length)
        return remote

    # Folders

    def _repository(self, reference: Reference) -> Path:
        from quire.weights.download.hub import RepositoryPull

        target = cast("HubTarget", reference.target)
        pull = RepositoryPull(target, self.env, self.http, self.progress, self.accepts, self.wanted.sha256, self.force)
        try:
            return pull.run()
        except KeyboardInterrupt:
            self._say_kept(pull.kept())
            raise

    def _unpack(self, reference: Reference, member: str, part: Path) -> Path:
        """A folder inside an archive becomes a tree with a name."""
        temp = part.with_suffix(".tree")
        shutil.rmtree(temp, ignore_errors=True)
        try:
            made = archive.unpack(part, member, temp, repository.choose, self.progress)
            weights = made.get(repository.WEIGHTS)
            if weights is not None:
                self._verify(repository.WEIGHTS, weights[1])
        except DownloadFailed as e:
            shutil.rmtree(temp, ignore_errors=True)
            if e.code != "disk_full":
                discard(part)
            raise
        files = tuple(File(path, size, sha256) for path, (size, sha256) in sorted(made.items()))
        digest = digest_of(files)
        tree = self.place.tree(digest)
        with self.place.lock("store"), disk_errors(tree):
            for file in files:
                with (temp / file.path).open("rb") as f:
                    os.fsync(f.fileno())
            shutil.rmtree(tree, ignore_errors=True)  # the same content, perhaps damaged
            temp.replace(tree)
            sync_folder(tree.parent)
            self._write_manifest(reference, digest, sum(f.size for f in files), "safetensors", files)
        return self._done(tree, digest, sum(f.size for f in files), [part])

    # Into the store

    def _verify(self, what: str, digest: str) -> None:
        if self.wanted.sha256 and digest != self.wanted.sha256:
            raise DownloadFailed(
                f"{what} does not verify: its sha256 is {digest}, expected {self.wanted.sha256}; it was deleted"
            )

    def _agree(self, reference: Reference, remote: Remote) -> Remote:
        """`remote` with what is known beforehand; a source that promises other bytes is refused before any download."""
        wanted = self.wanted
        if wanted.sha256 and remote.sha256 and wanted.sha256 != remote.sha256:
            raise DownloadFailed(
                f"{reference} now holds another file: sha256 {remote.sha256}, expected {wanted.sha256}",
            )
        return replace(remote, sha256=wanted.sha256 or remote.sha256, size=wanted.size or remote.size)

    def _commit(self, reference: Reference, done: Path, digest: str, parts: list[Path]) -> Path:
        """A finished file becomes a blob with a name."""
        with done.open("rb") as f:
            head = f.read(len(MAGIC))
            if head != MAGIC:
                for part in (done, *parts):
                    discard(part)
                raise BadModelFile(f"{reference} is not a GGUF file: it starts with {head!r}; it was deleted")
            os.fsync(f.fileno())
        blob = self.place.blob(digest)
        with self.place.lock("store"), disk_errors(blob):
            done.chmod(0o644)
            done.replace(blob)
            sync_folder(blob.parent)
            self._write_manifest(reference, digest, blob.stat().st_size)
        return self._done(blob, digest, blob.stat().st_size, parts)

    def _done(self, path: Path, digest: str, size: int, parts: list[Path]) -> Path:
        for part in parts:
            discard(part)
        self.progress.finish()
        self.progress.note(f"pulled {self.wanted.name}: {mb(size)}, sha256:{digest[:12]}…")
        return path

    def _adopt(self, reference: Reference, sha256: str) -> Path:
        """Name a blob that is here already."""
        with self.place.lock("store"):
            blob = self.place.blob(sha256)
            if blob.exists():
                self._write_manifest(reference, sha256, blob.stat().st_size)
                self.progress.note(f"{self.wanted.name}: its bytes are already here, nothing to download")
                return blob
        raise DownloadFailed(f"{self.wanted.name} was removed while it was being pulled", cure="pull it again")

    def _usable(self, sha256: str, size: int | None) -> bool:
        """Whether the blob is here and whole; a damaged one is deleted, saying so. `force` reads it whole."""
        blob = self.place.blob(sha256)
        if not blob.is_file():
            return False
        if (size is None or blob.stat().st_size == size) and (
            not self.force or hash_file(blob, "checking", self.progress) == sha256
        ):
            return True
        self.progress.note(f"{blob.name} is damaged; deleting it and fetching it again")
        blob.unlink(missing_ok=True)
        return False

    def _write_manifest(
        self, reference: Reference, sha256: str, size: int, form: str = "gguf", files: tuple[File, ...] = ()
    ) -> None:
        """The store's lock is held, and the content is in its place."""
        manifest = Manifest(
            name=self.wanted.name,
            source=str(reference),
            digest=f"sha256:{sha256}",
            size=size,
            pulled_at=datetime.now(UTC).isoformat(timespec="seconds"),
            format=form,
            licence=self.wanted.licence,
            files=files,
        )
        path = self.place.manifest(self.wanted.name)
        write_whole(path, encode(manifest))
        sync_folder(path.parent)

    def _say_kept(self, kept: int) -> None:
        if kept:
            self.progress.finish()
            self.progress.note(f"stopped; {mb(kept)} kept. `quire pull {self.wanted.name}` continues from there")
