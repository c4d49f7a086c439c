"""Files out of archives: one member of a wheel (zip) or of an npm package (tar, gzip), or a folder of them.

An archive is a container and nothing else. A member's name is never used as a path: the caller says where the bytes go, and of a
folder only names that stay below it are taken. Sizes are checked against what is expected and against the disk before a byte is written.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from quire.observe.errors import DownloadFailed, Unsupported
from quire.weights.download.fetch import CHUNK, check_room, open_raw, write_all
from quire.weights.download.progress import Progress
from quire.weights.download.repository import is_plain

MAX_MEMBERS = 10_000
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    tarfile.TarError,
    gzip.BadGzipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
)


@dataclass(slots=True)
class Joined:
    """Members of archives, one after another, in one file."""

    dest: Path
    progress: Progress
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, archive: Path, member: str | None, expected: int | None = None) -> None:
        """Append `member`, or without one the file itself; raises DownloadFailed where it is not there, or has not the
        expected size."""
        if member is None:
            with archive.open("rb") as source, open_raw(self.dest, "ab") as out:
                size = archive.stat().st_size
                self.progress.start(size, f"joining {self.dest.stem}")
                self.size += _copy(source, out, self.dest, self.digest, size, self.progress)
            return
        with _opened(archive, member) as (source, size, kind):
            if expected is not None and size != expected:
                raise DownloadFailed(f"{member!r} has {size:,} bytes in the {kind}; expected {expected:,}")
            check_room(self.dest.parent, size)
            self.progress.start(size, f"unpacking {member.rpartition('/')[2]}")
            with open_raw(self.dest, "ab") as out:
                self.size += _copy(source, out, self.dest, self.digest, size, self.progress)


def extract(archive: Path, member: str, dest: Path, expected: int | None, progress: Progress) -> str:
    """Copy `member` to `dest`; its sha256."""
    dest.unlink(missing_ok=True)
    made = Joined(dest, progress)
    made.add(archive, member, expected)
    return made.digest.hexdigest()


def unpack(
    archive: Path, folder: str, into: Path, choose: Callable[[dict[str, int]], list[str]], progress: Progress
) -> dict[str, tuple[int, str]]:
    """Files of a folder in the archive, those that `choose` picks of their sizes, below `into`; their sizes and digests."""
    with _reading(archive) as (opened, kind):
        inside = {n.removeprefix(folder): s for n, s, _ in opened() if n.startswith(folder)}
        inside = {n: s for n, s in inside.items() if is_plain(n)}
        if not inside:
            raise DownloadFailed(f"the {kind} holds no folder {folder!r}")
        wanted = set(choose(inside))
        total = sum(inside[n] for n in wanted)
        check_room(into.parent, total)
        progress.start(total, f"unpacking {folder.rstrip('/').rpartition('/')[2]}")
        made: dict[str, tuple[int, str]] = {}
        for name, _, source in opened():
            relative = name.removeprefix(folder)
            if not name.startswith(folder) or relative not in wanted or relative in made:
                continue
            dest = into / relative
            dest.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with open_raw(dest, "wb") as out:
                size = _copy(source(), out, dest, digest, inside[relative], progress)
            made[relative] = (size, digest.hexdigest())
        return made


def _copy(source: IO[bytes], out: Any, dest: Path, digest: Any, size: int, progress: Progress) -> int:
    done = 0
    while chunk := source.read(CHUNK):
        done += len(chunk)  # the readers themselves stop at the declared size
        write_all(out, chunk, dest)
        digest.update(chunk)
        progress.advance(len(chunk))
    if done != size:
        raise DownloadFailed(f"a member unpacks to {done:,} bytes where {size:,} are declared")
    return done


@contextmanager
def _opened(archive: Path, member: str) -> Iterator[tuple[IO[bytes], int, str]]:
    with _reading(archive) as (opened, kind):
        seen: list[str] = []
        for name, size, source in opened():
            if name == member:
                yield source(), size, kind
                return
            seen.append(name)
        found = [n for n in seen if n.lower().endswith(".gguf")][:5]
        raise DownloadFailed(
            f"the {kind} holds no {member!r}", cure=f"it holds {', '.join(found) or 'no .gguf file at all'}"
        )


Member = tuple[str, int, Callable[[], IO[bytes]]]  # name, bytes, and a way to read it before the next one is asked for


@contextmanager
def _reading(archive: Path) -> Iterator[tuple[Callable[[], Iterator[Member]], str]]:
    """A way to go through the files in it, as often as is wanted, and what to call it."""
    with archive.open("rb") as f:
        is_gzip = f.read(2) == b"\x1f\x8b"
    kind = "package" if is_gzip else "wheel"
    try:
        if is_gzip:
            yield lambda: _tar_members(archive), kind
        else:
            with zipfile.ZipFile(archive) as z:
                yield lambda: _zip_members(z), kind
    except _BROKEN as e:
        raise DownloadFailed(f"the {kind} cannot be unpacked: {e}") from e


def _tar_members(archive: Path) -> Iterator[Member]:
    """The members of a tar file, in its order, each read before the next: what is compressed cannot be read backwards."""
    with tarfile.open(archive, "r:gz") as t:
        for count, info in enumerate(t):
            if count >= MAX_MEMBERS:
                raise Unsupported(f"the package holds more than {MAX_MEMBERS} files")
            if info.isreg():

                def source(info: tarfile.TarInfo = info) -> IO[bytes]:
                    opened = t.extractfile(info)
                    assert opened is not None  # a regular file has content
                    return opened

                yield info.name, info.size, source


def _zip_members(z: zipfile.ZipFile) -> Iterator[Member]:
    for info in z.infolist():
        if not info.is_dir():
            yield info.filename, info.file_size, lambda info=info: z.open(info)
