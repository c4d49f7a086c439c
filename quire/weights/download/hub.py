"""A whole repository of the hub, into the hub's own cache on this machine (hub_cache.py).

The hub is asked once what the revision means and which files it has; the configuration comes first, so that a model that is not
supported is refused before its weights are downloaded, and pickles before anything is. Files come side by side, resumed and verified: large ones
by their sha256, small ones by their git id. Links and the reference are written last: what can be seen is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from quire.observe.errors import DownloadFailed, QuireError, Unsupported
from quire.weights.download import repository, segments
from quire.weights.download.fetch import Transfer, check_room, discard, disk_errors
from quire.weights.download.hub_cache import COMMIT, folder_of
from quire.weights.download.parallel import Shared, run_all
from quire.weights.download.progress import Progress, mb
from quire.weights.download.web import display
from quire.weights.sources import Remote
from quire.weights.sources.hf import HubTarget, authorization, cures
from quire.weights.store.home import hash_file, key, sync_folder

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.checkpoint import Opened
    from quire.weights.download.web import Http
    from quire.weights.gguf.peek import HeaderStart

_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Lfs(msgspec.Struct):
    sha256: str = ""
    size: int | None = None


class _Listed(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None
    lfs: _Lfs | None = None


class _Info(msgspec.Struct):
    sha: str = ""
    siblings: list[_Listed] = []


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the repository, and what the hub promises of it."""

    path: str
    size: int | None
    sha256: str | None  # of a large file
    git: str | None  # the git id of a small one

    @property
    def etag(self) -> str | None:
        return self.sha256 or self.git


class RepositoryPull:
    """The download of one repository. `accepts` raises for a configuration that cannot be run."""

    def __init__(
        self,
        target: HubTarget,
        env: Environment,
        http: Http,
        progress: Progress,
        accepts: Callable[[Opened | HeaderStart], object] | None = None,
        sha256: str | None = None,
        force: bool = False,
    ):
        self.target, self.env, self.http, self.progress = target, env, http, progress
        self.accepts, self.force = accepts, force
        self.sha256 = sha256  # of model.safetensors, where it is known beforehand
        self.auth = authorization(env)
        if env.hf_cache is None:
            raise Unsupported(f"{target}: there is no folder for the hub's cache", cure="set HF_HUB_CACHE")
        self.folder = folder_of(target, env.hf_cache)
        self.locks = env.hf_cache / ".locks" / self.folder.name  # where the hub's tools keep theirs

    def run(self) -> Path:
        """The snapshot's folder, with all of the model in it."""
        commit, files = self._list()
        try:
            side = repository.side_files(files)
            weights = None if repository.INDEX in files else repository.weight_files(files, None)
        except QuireError as e:
            raise type(e)(f"{self.target}: {e.message}", cure=e.cure) from None
        self._prepare()
        chosen = self._first(files, commit)
        if weights is None:
            index = self._bring([files[repository.INDEX]], commit)[0].read_bytes()
            try:
                weights = repository.weight_files(files, index)
            except QuireError as e:
                raise type(e)(f"{self.target}: {e.message}", cure=e.cure) from None
        rest = [files[n] for n in dict.fromkeys((*side, *weights)) if n not in chosen]
        self._agree(rest)
        if commit != self.target.revision:
            self.progress.note(f"{self.target.revision} is commit {commit[:12]}")
        blobs = self._bring(rest, commit)
        chosen |= {f.path: b for f, b in zip(rest, blobs, strict=True)}
        snapshot = self._link(commit, chosen)
        self.progress.finish()
        total = sum(b.stat().st_size for b in chosen.values())
        self.progress.note(f"pulled {self.target}: {len(chosen)} files, {mb(total)}, in {snapshot}")
        return snapshot

    def kept(self) -> int:
        """Bytes of files that are not whole yet."""
        try:
            return sum(p.stat().st_size for p in (self.folder / "blobs").glob("*.part"))
        except OSError:
            return 0

    def _list(self) -> tuple[str, dict[str, _File]]:
        """The commit that the revision means, and its files."""
        t = self.target
        revision = quote(t.revision, safe="")
        url = f"{self.env.hf_endpoint.rstrip('/')}/api/models/{t.org}/{t.repo}/revision/{revision}?blobs=true"
        page = self.http.page(url, accept="application/json", auth=self.auth, cures=cures(t, self.env))
        try:
            info = msgspec.json.decode(page.body, type=_Info)
        except msgspec.DecodeError as e:
            raise DownloadFailed(f"{display(url)} does not describe a repository: {e}") from e
        if not COMMIT.fullmatch(info.sha):
            raise DownloadFailed(f"{display(url)} names no commit: {info.sha[:80]!r}")
        files: dict[str, _File] = {}
        for f in info.siblings:
            large = f.lfs.sha256 if f.lfs is not None and _SHA256.fullmatch(f.lfs.sha256) else None
            git = f.blobId if f.blobId and COMMIT.fullmatch(f.blobId) and large is None else None
            size = f.lfs.size if f.lfs is not None and f.lfs.size is not None else f.size
            files[f.rfilename] = _File(f.rfilename, size, large, git)
        return info.sha, files

    def _first(self, files: dict[str, _File], commit: str) -> dict[str, Path]:
        """The configuration, judged."""
        config = self._bring([files[repository.CONFIG]], commit)[0]
        if self.accepts is not None:
            from quire.weights.folder import Folder
            from quire.weights.values import Values

            values = Values.read(config)
            values.where = f"{self.target}: {repository.CONFIG}"
            self.accepts(Folder(str(self.target), values))
        return {repository.CONFIG: config}

    def _agree(self, files: list[_File]) -> None:
        if self.sha256 is None:
            return
        for f in files:
            if f.path == repository.WEIGHTS and f.sha256 and f.sha256 != self.sha256:
                raise DownloadFailed(
                    f"{self.target} now holds other weights: sha256 {f.sha256}, expected {self.sha256}"
                )

    def _prepare(self) -> None:
        for folder in (self.folder / "blobs", self.folder / "snapshots", self.folder / "refs", self.locks):
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def _bring(self, files: list[_File], commit: str) -> list[Path]:
        """Bring each file's content into the cache."""
        wanted = [(f, self.folder / "blobs" / (f.etag or key(f"{commit}/{f.path}"))) for f in files]
        here = [b.exists() and not (self.force and self._damaged(f, b)) for f, b in wanted]
        parts = [_size(b.with_name(f"{b.name}.part")) for _, b in wanted]
        missing = [(f, b, part) for (f, b), done, part in zip(wanted, here, parts, strict=True) if not done]
        if missing:
            sizes = [f.size for f, _, _ in missing]
            total = None if None in sizes else sum(s for s in sizes if s is not None)
            done = sum(part for _, _, part in missing)
            check_room(self.folder, max(0, (total or 0) - done))
            shared = Shared(self.progress, total, str(self.target), done)
            http = replace(self.http, note=shared.note)
            large = sum((size or 0) > 2 * segments.SEGMENT for size in sizes)
            lanes = max(1, segments.LANES // max(1, large))  # many large files are parallel enough
            jobs = [partial(self._transfer, f, b, commit, http, shared, part, lanes) for f, b, part in missing]
            run_all(jobs, shared.stop)
            self.progress.finish()
        return [b for _, b in wanted]

    def _transfer(
        self, f: _File, blob: Path, commit: str, http: Http, shared: Shared, counted: int, lanes: int
    ) -> None:
        t = self.target
        url = f"{self.env.hf_endpoint.rstrip('/')}/{t.org}/{t.repo}/resolve/{commit}/{quote(f.path)}"
        with (self.locks / f"{blob.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the hub's tools take the same one
            if blob.exists():
                return
            part = blob.with_name(f"{blob.name}.part")
            remote = Remote(url, f.sha256, f.size, self.auth)
            Transfer(remote, part, str(t), http, shared.slice(counted), lanes=lanes).run()
            if f.git is not None and (found := _git_id(part)) != f.git:
                discard(part)
                raise DownloadFailed(
                    f"{display(url)} does not verify: its git id is {found}, expected {f.git}; deleted"
                )
            with disk_errors(blob):
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                part.chmod(0o644)
                part.replace(blob)
            discard(part)

    def _damaged(self, f: _File, blob: Path) -> bool:
        """Whether a blob is not what its name says; then it is deleted, saying so."""
        right = f.size is None or blob.stat().st_size == f.size
        if right and f.sha256:
            right = hash_file(blob, f"checking {f.path}", self.progress) == f.sha256
        elif right and f.git:
            right = _git_id(blob) == f.git
        if not right:
            self.progress.note(f"{f.path} is damaged; deleting it and fetching it again")
            blob.unlink()
        return not right

    def _link(self, commit: str, blobs: dict[str, Path]) -> Path:
        """The snapshot: links to the content, the configuration's last; then the reference."""
        snapshot = self.folder / "snapshots" / commit
        for path in sorted(blobs, key=lambda p: p == repository.CONFIG):
            link = snapshot / path
            with disk_errors(link):
                link.parent.mkdir(parents=True, exist_ok=True)
                temp = link.with_name(f".{link.name}.{os.urandom(4).hex()}.new")  # others may pull the same at once
                temp.symlink_to(os.path.relpath(blobs[path], link.parent))
                temp.replace(link)
        sync_folder(snapshot)
        if commit != self.target.revision:
            ref = self.folder / "refs" / self.target.revision
            with disk_errors(ref):
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(commit)
        return snapshot


def _git_id(path: Path) -> str:
    """The id that git gives a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
