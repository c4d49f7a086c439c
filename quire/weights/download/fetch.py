"""Remote bytes into a partial file: resumed, bounded, hashed, retried, and reported as they come.

Owns the transfer; a large file comes in several ranges at once (segments.py), and is written from its beginning all the same. Knows nothing of names, manifests or where a finished file ends up (pull.py), what is inside an archive (archive.py),
nor how a request is made (web.py).
Invariants: every byte of a finished file was hashed; a partial file is kept on any failure that a later try could
continue, and thrown away, saying so, when it cannot be part of what the server now has.

    x.part   the bytes so far            x.json   where they came from: address, validators, length
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Literal

import msgspec

from quire.observe.errors import DownloadFailed, QuireError
from quire.weights.download import segments
from quire.weights.download.progress import Progress, mb
from quire.weights.download.web import Http, Reply, Transient, display, host_of
from quire.weights.sources import Remote

CHUNK = 256 * 1024
SPARE_DISK = 16 << 20  # left free beside a download
LARGER = "QUIRE_HOME (HF_HUB_CACHE for a whole repository of the hub) to a larger disk"
LOOK = 64 << 10  # bytes of a file's beginning that are looked at while the rest comes


class PartState(msgspec.Struct, frozen=True):
    """The contents of x.json, which describes the unfinished download x.part."""

    name: str  # what the user asked for, to tell how to resume
    url: str
    sha256: str | None = None
    etag: str | None = None
    modified: str | None = None
    total: int | None = None

    @property
    def validator(self) -> str | None:
        """The value for If-Range: a strong ETag, else the date."""
        if self.etag and not self.etag.startswith("W/"):
            return self.etag
        return self.modified


def read_state(part: Path) -> PartState | None:
    """The state beside `part`, or None where there is none that can be read."""
    try:
        return msgspec.json.decode(part.with_suffix(".json").read_bytes(), type=PartState)
    except (OSError, msgspec.DecodeError):
        return None


def discard(part: Path) -> None:
    """Remove `part` and its state."""
    part.unlink(missing_ok=True)
    part.with_suffix(".json").unlink(missing_ok=True)


class Transfer:
    """The download of one remote file into `part`. The caller holds the lock on it."""

    def __init__(
        self,
        remote: Remote,
        part: Path,
        name: str,
        http: Http,
        progress: Progress,
        reserve: int = 0,
        look: Callable[[bytes], object] | None = None,
        lanes: int = 1,
    ):
        self.remote, self.part, self.name = remote, part, name
        self.http, self.progress = http, progress
        self.reserve = reserve  # bytes of disk the caller needs besides
        self.look = look  # is shown the first LOOK bytes once they are here, and raises to refuse the file
        self.lanes = lanes  # ranges of it that may come at once, where the server gives ranges
        self.have = 0
        self._new_hashes()
        self.state = PartState(name, remote.url, remote.sha256)
        self.inherited = False  # some of the bytes came before this run
        self.restarts = 0

    def _new_hashes(self) -> None:
        self.hash = hashlib.sha256()
        self.second = hashlib.sha512() if self.remote.sha512 else None  # what the npm registry promises

    def _feed(self, chunk: bytes) -> None:
        self.hash.update(chunk)
        if self.second is not None:
            self.second.update(chunk)

    def run(self) -> str:
        """Bring the file here whole; its sha256. Raises DownloadFailed or NotFound."""
        self._inherit()
        failures = 0
        while True:
            before = self.have
            try:
                if self._attempt():
                    break
                failures = 0  # a discarded part is a new beginning; it happens once
            except Transient as e:
                failures = 1 if self.have > before else failures + 1
                self.http.wait(e, failures)
        self._show()
        digest = self.hash.hexdigest()
        if self.remote.sha256 and digest != self.remote.sha256:
            return self._mismatch("sha256", digest, self.remote.sha256)
        if self.second is not None and self.remote.sha512 and self.second.hexdigest() != self.remote.sha512:
            return self._mismatch("sha512", self.second.hexdigest(), self.remote.sha512)
        return digest

    def _inherit(self) -> None:
        """Take over what an earlier run left, if it can still be a part of this file."""
        size = self.part.stat().st_size if self.part.exists() else 0
        if not size:
            return
        old = read_state(self.part)
        same_digest = old is not None and old.sha256 is not None and old.sha256 == self.remote.sha256
        if old is None:
            why = "where it came from is not recorded"
        elif old.sha256 and self.remote.sha256 and not same_digest:
            why = "the remote file has changed since"
        elif not same_digest and old.url != self.remote.url:
            why = "the file is now at another address"
        elif not old.validator and not self.remote.sha256 and not self.remote.sha512:
            why = "the server gives no way to tell whether the file is still the same"
        else:
            self.progress.note(f"continuing after {mb(size)} already here")
            with self.part.open("rb") as f:
                while chunk := f.read(1 << 20):
                    self._feed(chunk)
            self.have, self.state, self.inherited = size, old, True
            return
        self._restart(why)

    def _restart(self, why: str) -> None:
        had = self.part.stat().st_size if self.part.exists() else 0
        discard(self.part)
        self.restarts += 1
        if self.restarts > self.http.attempts:
            raise DownloadFailed(
                f"{display(self.remote.url)}: started over {self.http.attempts} times; the last: {why}"
            )
        if had:
            self.progress.note(f"starting over, dropping {mb(had)}: {why}")
        self.have, self.inherited = 0, False
        self._new_hashes()
        self.state = PartState(self.name, self.remote.url, self.remote.sha256)

    def _attempt(self) -> bool:
        """Make one request: True when the file is whole, False to ask again from the start."""
        headers: dict[str, str] = {}
        if self.have:
            headers["Range"] = f"bytes={self.have}-"
            if self.state.validator:
                headers["If-Range"] = self.state.validator
        reply = self.http.once(self.remote.url, headers=headers, auth=self.remote.auth)
        try:
            if reply.status == 416:
                return self._past_the_end(reply)
            if reply.status == 206 and not self._continues(reply):
                return False
            if reply.status == 200:
                self._from_the_start(reply)
            self._check_room()
            self.progress.start(self.state.total or self.remote.size, self.name, self.have)
            if not self._in_ranges(reply):
                self._stream(reply)
            else:
                if self.look is not None:
                    self._stream(reply, LOOK)
                reply.close()
                self._side_by_side()
        finally:
            reply.close()
        return True

    def _past_the_end(self, reply: Reply) -> bool:
        total = (reply.get("Content-Range") or "").rpartition("/")[2]
        if not self.have:
            raise DownloadFailed(f"{display(self.remote.url)} answered 416 to a request for the whole file")
        if total == str(self.have) and self.state.total in (None, self.have):
            return True  # nothing was missing but the news
        said = f"; it was {self.state.total:,} bytes before" if self.state.total else ""
        self._restart(f"the remote file ends at or before what is here{said}")
        return False

    def _continues(self, reply: Reply) -> bool:
        """Whether a 206 goes on exactly where the part ends."""
        span, _, total = (reply.get("Content-Range") or "").removeprefix("bytes ").partition("/")
        start = span.partition("-")[0]
        if start != str(self.have):
            self._restart(f"the server answered a request for byte {self.have} with {reply.get('Content-Range')!r}")
            return False
        if total.isdigit() and self.state.total is not None and int(total) != self.state.total:
            self._restart(f"the remote file changed from {self.state.total:,} to {total} bytes")
            return False
        if total.isdigit():
            self._expect(int(total))
        return True

    def _from_the_start(self, reply: Reply) -> None:
        """A 200 is the whole file: record its validators, and drop what is here if there is anything."""
        etag, modified = reply.get("ETag"), reply.get("Last-Modified")
        if self.have:
            changed = (etag, modified) != (self.state.etag, self.state.modified)
            self._restart("the remote file has changed since" if changed else "the server does not resume")
        self.state = PartState(self.name, self.remote.url, self.remote.sha256, etag, modified, None)
        if (length := reply.length()) is not None:
            self._expect(length)
        write_whole(self.part.with_suffix(".json"), msgspec.json.encode(self.state))

    def _expect(self, total: int) -> None:
        if self.remote.size is not None and total != self.remote.size:
            discard(self.part)
            raise DownloadFailed(
                f"{display(self.remote.url)} has {total:,} bytes where {self.remote.size:,} were promised; kept nothing"
            )
        self.state = msgspec.structs.replace(self.state, total=total)

    def _check_room(self) -> None:
        total = self.state.total or self.remote.size
        check_room(self.part.parent, (total - self.have if total else 0) + self.reserve)

    def _in_ranges(self, reply: Reply) -> bool:
        """Whether what is missing is worth several requests, and the server can be held to one version of the file."""
        ranges = reply.status == 206 or (reply.get("Accept-Ranges") or "").strip().lower() == "bytes"
        known = self.state.validator is not None or self.remote.sha256 is not None
        missing = (self.state.total or 0) - self.have
        return self.lanes > 1 and ranges and known and missing > 2 * segments.SEGMENT

    def _stream(self, reply: Reply, until: int | None = None) -> None:
        """The bytes of the response, up to a byte if that is given."""
        total = self.state.total
        bound = total if total is not None else self.remote.size
        with open_raw(self.part, "ab") as out:
            while (total is None or self.have < total) and (until is None or self.have < until):
                chunk = reply.read(CHUNK if total is None else min(CHUNK, total - self.have))
                if not chunk:
                    break
                if bound is not None and self.have + len(chunk) > bound:
                    discard(self.part)
                    raise DownloadFailed(f"{display(self.remote.url)} sends more than {bound:,} bytes; kept nothing")
                self._take(out, chunk)
        short = bound if until is None else until
        if short is not None and self.have < short:
            raise Transient(f"{host_of(self.remote.url)} closed the connection after {self.have:,} of {bound:,} bytes")

    def _take(self, out: FileIO, chunk: bytes) -> None:
        write_all(out, chunk, self.part)
        self._feed(chunk)
        self.have += len(chunk)
        self.progress.advance(len(chunk))
        if self.have >= LOOK:
            self._show()

    def _side_by_side(self) -> None:
        """The rest, several ranges at a time."""
        assert self.state.total is not None
        coming = segments.Prefetch(self._range, self.have, self.state.total, lanes=self.lanes, segment=segments.SEGMENT)
        try:
            with open_raw(self.part, "ab") as out:
                for got in coming:
                    for at in range(0, len(got), CHUNK):
                        self._take(out, got[at : at + CHUNK])
        finally:
            coming.stop()

    def _range(self, first: int, end: int, going: Callable[[], None]) -> bytes:
        """Bytes first .. end. Whatever else comes in their place, the rest is asked for in one stream."""
        headers = {"Range": f"bytes={first}-{end - 1}"}
        if self.state.validator:
            headers["If-Range"] = self.state.validator
        reply = self.http.once(self.remote.url, headers=headers, auth=self.remote.auth)
        try:
            span, _, total = (reply.get("Content-Range") or "").removeprefix("bytes ").partition("/")
            if reply.status != 206 or span != f"{first}-{end - 1}" or total not in ("*", str(self.state.total)):
                self.lanes = 1
                raise Transient(f"{host_of(self.remote.url)} does not give the parts of the file that it was asked for")
            body = bytearray()
            while len(body) < end - first and (chunk := reply.read(min(CHUNK, end - first - len(body)))):
                body += chunk
                going()
        finally:
            reply.close()
        if len(body) < end - first:
            raise Transient(f"{host_of(self.remote.url)} closed the connection after {len(body):,} bytes of a part")
        return bytes(body)

    def _show(self) -> None:
        """Let somebody look at the beginning, once; what is refused is not kept."""
        look, self.look = self.look, None
        if look is None:
            return
        with self.part.open("rb") as f:
            head = f.read(LOOK)
        try:
            look(head)
        except QuireError:
            discard(self.part)
            raise

    def _mismatch(self, kind: str, digest: str, expected: str) -> str:
        if self.inherited:
            self._restart("with it the file does not have the digest it should")
            return self.run()
        discard(self.part)
        raise DownloadFailed(
            f"{display(self.remote.url)} does not verify: its {kind} is {digest}, expected {expected}; "
            "the download was deleted",
            cure="try again; if it fails again the file was replaced or tampered with",
        )


def check_room(folder: Path, need: int) -> None:
    """Raise DownloadFailed where the disk under `folder` has not `need` bytes and a little more."""
    free = shutil.disk_usage(folder).free
    if need and free < need + SPARE_DISK:
        raise DownloadFailed(
            f"not enough disk space under {folder}: {mb(need)} needed, {mb(free)} free",
            cure=f"free some (`quire list`, `quire rm NAME`), or set {LARGER}",
            code="disk_full",
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failing disk into an error with a cure. Network errors are Transient and pass through."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DownloadFailed(
            f"cannot write {path}: {e.strerror or e}",
            cure=f"free some space, or set {LARGER}" if full else "check the folder's permissions",
            code="disk_full" if full else None,
        ) from e


def open_raw(path: Path, mode: Literal["ab", "wb"]) -> FileIO:
    """`path` without a buffer: what was written is in the file even when this process is killed."""
    with disk_errors(path):
        return path.open(mode, buffering=0)


def write_all(out: FileIO, data: bytes, path: Path) -> None:
    """Write all of `data` to an unbuffered file, whose write may be short."""
    view = memoryview(data)
    with disk_errors(path):
        while view:
            view = view[out.write(view) :]


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by a file holding `data`, at once or not at all."""
    temp = path.with_name(f"{path.name}.new")
    with disk_errors(path):
        temp.write_bytes(data)
        temp.replace(path)
