"""A multipart form with one file in it, as it arrives: the file's bytes go to disk, never whole into memory.

`python_multipart` does the parsing. Starlette's `request.form()`, over the same parser, is not used: it takes a file of any size, and writes it
to a temporary file that would have to be copied to its place.

Owns the form's rules (one file, few and short fields) and the refusal of forms that a web page of another origin sends:
a browser does that unasked. The name that a client gives its file is a label, never a path. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from quire.observe.errors import BadRequest, QuireError, TooLarge
from quire.server.errors import ClientGone, Forbidden, UnsupportedMedia

MAX_FIELDS = 16
MAX_FIELD = 4096  # bytes of a field's value
MAX_NAME = 255  # characters of a file's name
OVERHEAD = 64 * 1024  # what a form may add to its file
GATHER = 1 << 20  # bytes that go to disk together


class StorageFull(QuireError):
    """The disk is full, or does not take the file for another reason."""

    code = "storage_full"
    status = 507


@dataclass(slots=True)
class Upload:
    """A form that was received whole: its fields, and its file at the path that was asked for."""

    filename: str
    size: int
    fields: dict[str, str]


async def receive(request: Request, path: Path, limit: int, field_name: str = "file") -> Upload:
    """Write the form's file to `path` and sync it; what does not end well leaves nothing there."""
    _check_page(request)
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise UnsupportedMedia("the body must be a form", cure="send it as multipart/form-data with a boundary")
    try:
        with path.open("wb") as out:
            form = _Form(out, limit, field_name)
            try:
                await _feed(request, MultipartParser(boundary, form.callbacks()))  # type: ignore[arg-type]
            except FormParserError as error:
                raise BadRequest(f"the form cannot be read: {str(error)[:200]}", code="invalid_form") from None
            upload = form.result()
            await asyncio.to_thread(_sync, out)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageFull(f"the file cannot be stored: {error.strerror or 'the disk does not take it'}") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return upload


async def _feed(request: Request, parser: MultipartParser) -> None:
    """The body into the parser, which writes the file: in a thread, a good deal at a time."""
    held: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        held.append(message.get("body", b""))
        size += len(held[-1])
        more = bool(message.get("more_body"))
        if size >= GATHER or not more:
            data = b"".join(held)
            held, size = [], 0
            await asyncio.to_thread(parser.write, data)
    parser.finalize()


def _sync(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())


def _check_page(request: Request) -> None:
    """A form is what any page may send anywhere; only one of this server's own, or of an origin let in, may here."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if (origin is None and site is None) or site in ("same-origin", "none"):
        return
    allowed = request.app.state.server.config.cors_origins
    if origin is None or (origin not in allowed and "*" not in allowed):
        raise Forbidden("a web page of another origin may not upload here", cure="start the server with --cors-origin")


@dataclass(slots=True)
class _Form:
    """The parser's callbacks: one part after the other."""

    out: IO[bytes]
    limit: int
    field_name: str
    filename: str | None = None
    size: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    _name: str = ""  # of the part that is coming
    _is_file: bool = False
    _value: bytearray = field(default_factory=bytearray)
    _header: bytearray = field(default_factory=bytearray)
    _header_value: bytearray = field(default_factory=bytearray)
    _disposition: bytes = b""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self.part_begin,
            "on_part_data": self.part_data,
            "on_part_end": self.part_end,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self.header_end,
            "on_headers_finished": self.headers_finished,
            "on_end": self.end,
        }

    def part_begin(self) -> None:
        self._value.clear()
        self._disposition = b""

    def header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise BadRequest("a part of the form has no name", code="invalid_form")
        self._name = options[b"name"].decode(errors="replace")[:64]
        self._is_file = self._name == self.field_name
        if self._is_file:
            if self.filename is not None:
                raise BadRequest(f"the form has two files named {self.field_name}: send one", param=self.field_name)
            self.filename = label(options.get(b"filename", b"upload").decode(errors="replace"))
        elif b"filename" in options:
            raise BadRequest(f"the form's {self._name} is a file: {self.field_name} is the one taken", param=self._name)
        elif self._name in self.fields:
            raise BadRequest(f"the form has {self._name} twice", param=self._name)
        elif len(self.fields) >= MAX_FIELDS:
            raise BadRequest(f"the form has over {MAX_FIELDS} fields", code="invalid_form")

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size += end - start
            if self.size > self.limit:
                raise TooLarge(f"the file is over {self.limit} bytes, the most this server takes", param="file")
            self.out.write(memoryview(data)[start:end])
            return
        if len(self._value) + end - start > MAX_FIELD:
            raise BadRequest(f"{self._name} has over {MAX_FIELD} bytes", param=self._name)
        self._value += data[start:end]

    def part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = bytes(self._value).decode(errors="replace")

    def end(self) -> None:
        self.ended = True

    def result(self) -> Upload:
        """The upload, if all of the form came."""
        if not self.ended:
            raise BadRequest("the form ends before its last boundary", code="invalid_form")
        if self.filename is None:
            raise BadRequest(f"{self.field_name} is missing", param=self.field_name)
        return Upload(self.filename, self.size, self.fields)


def label(name: str) -> str:
    """A file's name as people read it: its last part, printable, of bounded length."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "_" for c in last)[:MAX_NAME] or "upload"
