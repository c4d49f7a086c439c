"""The store of models on this machine: list them, find one by name, pull or remove one.

Invariants: a model appears by one atomic rename after its digest was computed and it was synced; a manifest never names
content that is not there yet. Two processes or threads that want one model make one download. Reading the store needs no lock,
and imports no network code. Where things lie is home.py's business, bringing them pull.py's, the hub's own cache hub_cache.py's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from quire.config import Environment
from quire.observe.errors import BadModelFile, BadRequest, DownloadFailed, NotFound, QuireError, Unsupported
from quire.weights import names, sources
from quire.weights.download.progress import Progress, Quiet, mb
from quire.weights.sources import Local
from quire.weights.store.catalogue import Wanted, find, look_up
from quire.weights.store.home import Home, entries, hash_file, sync_folder
from quire.weights.store.manifest import Defaults, File, Manifest, Problem, decode, encode

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened
    from quire.weights.download.web import Http
    from quire.weights.gguf.peek import HeaderStart

__all__ = ["Manifest", "Problem", "Store", "look_up"]


class Store:
    """The model store under one folder. Cheap to make; safe to use from threads.

    `accepts` is asked about a checkpoint whose configuration is here and whose weights are not; it raises to refuse it.
    """

    def __init__(
        self,
        env: Environment | None = None,
        http: Http | None = None,
        accepts: Callable[[Opened | HeaderStart], object] | None = None,
    ):
        self.env = env or Environment.read()
        self.home = self.env.home
        self.place = Home(self.home)
        self.accepts = accepts
        self._http = http

    @property
    def http(self) -> Http:
        """The client that downloads. Made when it is wanted: what is here already needs no network code."""
        if self._http is None:
            from quire.weights.download.web import Http

            self._http = Http()
        return self._http

    # Reading: no locks, no network

    def resolve(self, name: str, *, paths: bool = True) -> Path:
        """The file or folder of `name`, already on this machine. With `paths` false, only what the store holds (for names
        that came over the network). Raises NotFound where it has to be pulled first."""
        wanted = self.look_up(name)
        reference = wanted.references[0]
        if reference.scheme == "file":
            if not paths:
                raise BadRequest(f"{name!r}: models are asked for by name here, not by path", param="model")
            return self._local(reference)
        manifest = self.get(wanted.name)
        _check_whole(manifest)
        if manifest is None and paths and (found := self.in_hub_cache(wanted)):
            return found
        if manifest is None:
            raise NotFound(
                f"{wanted.name} is not on this machine", cure=f"`quire pull {wanted.name}` fetches it", param="model"
            )
        return self.checked(manifest)

    def get(self, name: str) -> Manifest | None:
        """The manifest of `name`, or None."""
        try:
            data = self.place.manifest(self.look_up(name).name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise QuireError(f"cannot read the manifest of {name}: {e.strerror or e}") from e
        return decode(data, name)

    def list(self) -> list[Manifest]:
        """Every readable manifest, by name. What cannot be read is in `problems()`."""
        return sorted((m for _, m in self.place.manifests() if isinstance(m, Manifest)), key=lambda m: m.name)

    def blob(self, manifest: Manifest) -> Path:
        """Where the bytes of `manifest` are: a file, or a folder of files."""
        return self.place.content(manifest)

    def checked(self, manifest: Manifest) -> Path:
        """The content of a manifest, if it is there and has the right size."""
        path = self.place.content(manifest)
        again = f"`quire pull --force {manifest.name}` fetches it again"
        files = [(path / f.path, f.size) for f in manifest.files] or [(path, manifest.size)]
        for file, expected in files:
            try:
                size = file.stat().st_size
            except OSError as e:
                raise BadModelFile(f"the file of {manifest.name} is missing: {file}", cure=again) from e
            if size != expected:
                raise BadModelFile(
                    f"{manifest.name} is damaged: {file} has {size:,} bytes, its manifest says {expected:,}",
                    cure=again,
                )
        return path

    def verify(self, name: str, progress: Progress | None = None) -> None:
        """Read what `name` has whole and compare its digests. Raises BadModelFile with both."""
        manifest = self.get(name)
        if manifest is None:
            raise NotFound(f"{name} is not in the store", cure="`quire list` shows what is", param="model")
        path = self.checked(manifest)
        files = [(path / f.path, f.sha256) for f in manifest.files] or [(path, manifest.sha256)]
        for file, expected in files:
            digest = hash_file(file, manifest.name, progress or Quiet())
            if digest != expected:
                raise BadModelFile(
                    f"{manifest.name} is damaged: {file} has sha256 {digest}, its manifest says {expected}",
                    cure=f"`quire pull --force {manifest.name}` fetches it again",
                )

    def problems(self) -> list[Problem]:
        """The faults of the store that can be seen without reading content whole."""
        found: list[Problem] = []
        if self.home.exists() and not self.home.is_dir():
            found.append(Problem(f"the model store {self.home} is no folder", "set QUIRE_HOME to one", True))
        used: set[Path] = set()
        for path, m in self.place.manifests():
            if not isinstance(m, Manifest):
                found.append(Problem(f"{path} cannot be read: {m.message}", f"delete {path} and pull again", True))
                continue
            used |= self.place.contents(m)
            try:
                self.checked(m)
            except QuireError as e:
                found.append(Problem(e.message, e.cure, True))
        trees = self.home / "trees"
        folders = sorted(p for p in trees.iterdir() if p.is_dir()) if trees.is_dir() else []
        stray = [content for content in [*entries(self.home / "blobs"), *folders] if content not in used]
        found += [Problem(f"{c} ({mb(_size(c))}) belongs to no model", f"delete {c}", False) for c in stray]
        for part in entries(self.home / "partial", ".part"):
            from quire.weights.download import fetch  # rare

            state = fetch.read_state(part)
            name = state.name if state else "an unknown model"
            cure = f"`quire pull {name}` continues it, `quire rm {name}` drops it" if state else f"delete {part}"
            found.append(Problem(f"{mb(part.stat().st_size)} of an unfinished download of {name}", cure, False))
        return found

    # Writing

    def pull(self, name: str, progress: Progress | None = None, *, force: bool = False) -> Path:
        """Bring `name` here, if it is not yet, and give its file or folder. A local path is used in place.

        `force` fetches again what may have changed or been damaged. Raises NotFound, Unsupported, DownloadFailed.
        """
        progress = progress or Quiet()
        wanted = self.look_up(name)
        if wanted.references[0].scheme == "file":
            return self._local(wanted.references[0])
        if not force and (manifest := self.get(wanted.name)):
            _check_whole(manifest)
            progress.note(f"{wanted.name} is already here ({mb(manifest.size)}, {manifest.digest[:19]}…)")
            return self.checked(manifest)
        if not force and (found := self.in_hub_cache(wanted)):
            progress.note(f"{wanted.name} is in the hub's cache, and used there: {found}")
            return found
        from quire.weights.download.pull import Pull

        self.place.prepare()
        waiting = f"another pull of {wanted.name} is under way; waiting for it"
        with self.place.lock(wanted.key, lambda: progress.note(waiting)) as waited:
            if (waited or not force) and (manifest := self.get(wanted.name)):
                return self.checked(manifest)
            try:
                return Pull(self.place, self.env, self.http, wanted, progress, force, self.accepts).run()
            finally:
                progress.finish()

    def copy(self, source: str, name: str) -> Manifest:
        """Call what `source` has by a second, short name as well. The content is shared, and goes with its last name."""
        short = self._own_name(name, "destination")
        self.place.prepare()
        with self.place.lock("store"):  # nobody removes the content meanwhile
            manifest = self.get(source)
            if manifest is None:
                raise NotFound(f"{source} is not in the store", cure="`quire list` shows what is", param="source")
            self.checked(manifest)
            there = self.get(short) if self.place.manifest(short).exists() else None
            if there is not None and (there.digest, there.defaults) != (manifest.digest, manifest.defaults):
                raise BadRequest(
                    f"{short} is already the name of another model",
                    cure=f"`quire rm {short}` frees it",
                    param="destination",
                )
            return self._write(msgspec.structs.replace(manifest, name=short))

    def create(self, name: str, source: str, defaults: Defaults, licence: str = "") -> Manifest:
        """A new name for what `source` has, with defaults of its own; `source` is a name, or the digest of a file that `put`
        brought. The content is shared. A name that was made here before is made anew."""
        short = self._own_name(name, "model")
        self.place.prepare()
        with self.place.lock("store"):
            manifest = self._from_blob(source) if source.startswith("sha256:") else self.get(source)
            if manifest is None:
                raise NotFound(f"{source} is not in the store", cure="`quire list` shows what is", param="from")
            self.checked(manifest)
            there = self.get(short) if self.place.manifest(short).exists() else None
            if there is not None and there.defaults is None:
                raise BadRequest(
                    f"{short} is already the name of another model", cure=f"`quire rm {short}` frees it", param="model"
                )
            now = datetime.now(UTC).isoformat(timespec="seconds")
            made = msgspec.structs.replace(
                manifest, name=short, pulled_at=now, licence=licence or manifest.licence, defaults=defaults
            )
            self._write(made)
            if there is not None:
                self._free(there)
            return made

    def adapter(self, files: Sequence[tuple[str, str]]) -> tuple[tuple[File, ...], Path]:
        """An adapter of files that `put` brought, by names and digests: as a manifest has it, and where it lies. A PEFT folder is made of
        several, of links where there can be."""
        made: list[File] = []
        for name, sha256 in sorted(files):
            blob = self.place.blob(sha256)
            if not blob.is_file():
                raise NotFound(
                    f"sha256:{sha256} is not in the store", cure="POST /api/blobs brings it", param="adapters"
                )
            made.append(File(name, blob.stat().st_size, sha256))
        path = self.place.adapter(made)
        if len(made) > 1 and not path.exists():
            partial = self.home / "partial" / f"adapter-{os.urandom(8).hex()}"
            partial.mkdir(parents=True)
            try:
                for file in made:
                    _link(self.place.blob(file.sha256), partial / file.path)
                sync_folder(partial)
                with self.place.lock("store"):
                    if not path.exists():
                        partial.replace(path)
                        sync_folder(path.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return tuple(made), path

    def forget_adapter(self, path: Path) -> None:
        """Take apart a folder that `adapter` made, if no name uses it."""
        with self.place.lock("store"):
            used = {own for _, m in self.place.manifests() if isinstance(m, Manifest) for own in self.place.contents(m)}
            if path.is_dir() and path not in used:
                shutil.rmtree(path, ignore_errors=True)

    def adapted(self, path: str) -> list[tuple[Manifest, Path]]:
        """Names that were made of the model at `path` and have an adapter, with where that is."""
        made = [(m, m.defaults.adapter) for m in self.list() if m.defaults is not None and m.defaults.adapter]
        return [(m, self.place.adapter(files)) for m, files in made if str(self.blob(m)) == path]

    def put(self, sha256: str, partial: Path) -> Path:
        """Take a file whose digest was computed into the store. It goes when the last name that uses it does."""
        with self.place.lock("store"):
            path = self.place.blob(sha256)
            if path.exists():
                partial.unlink()
            else:
                partial.replace(path)
                sync_folder(path.parent)
            return path

    def _from_blob(self, digest: str) -> Manifest | None:
        path = self.place.blob(digest.partition(":")[2])
        if not path.is_file():
            return None
        with path.open("rb") as f:
            if f.read(4) != b"GGUF":
                raise BadRequest("the file is not a GGUF file: nothing else can be made a model of here", param="files")
        return Manifest("", f"blob:{digest}", digest, path.stat().st_size, "")

    def _own_name(self, name: str, param: str) -> str:
        """A short name that may be given to a model here."""
        short = names.parse(name)
        if not isinstance(short, names.ShortName):
            raise BadRequest(f"{name!r} is no short name", cure="write for instance mine:7b", param=param)
        if find(short) is not None:
            raise BadRequest(f"{short} is the catalogue's name for another model", param=param)
        return str(short)

    def _write(self, manifest: Manifest) -> Manifest:
        """The store's lock is held."""
        from quire.weights.download.fetch import write_whole  # writing is rare, and it brings the network's code

        path = self.place.manifest(manifest.name)
        write_whole(path, encode(manifest))
        sync_folder(path.parent)
        return manifest

    def remove(self, name: str) -> int:
        """Forget `name`; the bytes freed. Its content goes when no other name uses it, an unfinished download too.

        A repository goes from the hub's cache, where it was pulled to.
        """
        wanted = self.look_up(name)
        if wanted.references[0].scheme == "file":
            raise BadRequest(f"{name} is a file outside the store", cure="delete it yourself, if you mean to")
        known = (self.home / "manifests").is_dir() or (self.home / "partial").is_dir()
        freed = 0
        if known:
            self.place.prepare()
            freed = self._drop_partials(wanted)
            with self.place.lock("store"):
                path = self.place.manifest(wanted.name)
                if path.exists():
                    return freed + self._drop(path)
        for reference in wanted.references:
            if reference.scheme == "hf" and reference.folder:
                from quire.weights.download import hub_cache
                from quire.weights.sources.hf import HubTarget

                freed += hub_cache.remove(cast(HubTarget, reference.target), self.env)
        if freed:
            return freed
        raise NotFound(f"{wanted.name} is not in the store", cure="`quire list` shows what is", param="model")

    def _drop(self, path: Path) -> int:
        """Delete a manifest and, if it was the last to use it, its content. The store's lock is held."""
        try:
            manifest = decode(path.read_bytes(), path.stem)
        except QuireError:
            manifest = None  # unreadable: it can go, and no content can be said to be its own
        path.unlink()
        return 0 if manifest is None else self._free(manifest)

    def _free(self, manifest: Manifest) -> int:
        """Delete what that manifest used and no other one does; the bytes freed. The store's lock is held."""
        others = {path for _, m in self.place.manifests() if isinstance(m, Manifest) for path in self.place.contents(m)}
        freed = 0
        for content in self.place.contents(manifest) - others:
            if content.is_dir():
                freed += _size(content) if content == self.place.content(manifest) else 0  # an adapter's is of links
                shutil.rmtree(content, ignore_errors=True)
            else:
                freed += _size(content)
                content.unlink(missing_ok=True)
        return freed

    def _drop_partials(self, wanted: Wanted) -> int:
        freed = 0
        with self.place.lock(wanted.key):  # never under a running pull
            for part in self.place.parts(wanted.references):
                for path in (part, part.with_suffix(".json"), part.with_suffix(".member")):
                    if path.exists():
                        freed += path.stat().st_size
                        path.unlink()
        return freed

    # Names

    def look_up(self, name: str) -> Wanted:
        """The model that `name` asks for. A short name that has left the catalogue is still known by its manifest."""
        try:
            return look_up(name)
        except NotFound:
            path = self.place.manifest(name.strip())
            if not path.is_file():
                raise
            manifest = decode(path.read_bytes(), name)
            source = names.parse(manifest.source)
            if not isinstance(source, names.Reference):
                raise
            sha256 = None if manifest.folder else manifest.sha256
            return Wanted(
                manifest.name, (source,), sha256, None if manifest.folder else manifest.size, manifest.licence
            )

    def _local(self, reference: names.Reference) -> Path:
        http = cast("Http", self._http)  # or None: a file needs no network
        located = sources.load("file").locate(reference.target, self.env, http)
        if not isinstance(located, Local):
            raise DownloadFailed(f"{reference} is not a local file")
        return located.path

    def in_hub_cache(self, wanted: Wanted) -> Path | None:
        """The models that the hub's own tools have downloaded, used where they are."""
        for reference in wanted.references:
            if reference.scheme == "hf" and len(reference.parts) == 1:
                from quire.weights.download import hub_cache
                from quire.weights.sources.hf import HubTarget

                found = hub_cache.find(cast(HubTarget, reference.target), self.env, wanted.sha256)
                if found is not None:
                    return found
        return None


def _check_whole(manifest: Manifest | None) -> None:
    """Refuse a name whose bytes are only half of what it means."""
    if manifest is not None and manifest.defaults is not None and manifest.defaults.adapter:
        base = manifest.defaults.parent
        raise Unsupported(
            f"{manifest.name} is {base} with an adapter: it has no file of its own",
            cure=f"`quire serve {base}` answers to {manifest.name} too; `quire run {base} --lora PATH` takes an adapter",
        )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a filesystem without links
        shutil.copyfile(source, target)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size if path.exists() else 0
