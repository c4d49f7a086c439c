"""Lines of a batch: reading an input file into requests or faults, and writing what came of them.

An input file is hostile: any size, any bytes, lines without end. It is read once, a bounded line at a time, and only
where each request begins and how long it is stays in memory. Knows the two formats; knows no queue and no HTTP.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.server.openai.batches.journal import Line
from quire.server.replies import line as json_line

MAX_LINES = 50_000
MAX_FAULTS = 100  # told of one file
MAX_ID = 512  # characters of a custom_id


class Asked(msgspec.Struct):
    """One line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_ASKED = msgspec.json.Decoder(Asked)
Fault = dict[str, Any]


def scan(path: Path, batch: str, endpoint: str, max_line: int) -> Iterator[Line | Fault]:
    """Requests of a file in order, and faults of lines that are none. Ends early after many faults, or too many lines."""
    seen: set[str] = set()
    count = faults = 0
    with path.open("rb") as file:
        number = 0
        while True:
            start = file.tell()
            text = file.readline(max_line + 1)
            if not text:
                break
            number += 1
            if not text.strip():
                continue
            if len(text) > max_line:
                while text and not text.endswith(b"\n"):
                    text = file.readline(1 << 20)
                found: Line | Fault = fault(number, "line_too_long", f"the line is over {max_line} bytes")
            else:
                found = _line(text, number, endpoint, seen)
            if isinstance(found, dict):
                yield found
                faults += 1
                if faults >= MAX_FAULTS:
                    return
                continue
            if count >= MAX_LINES:
                yield fault(number, "too_many_requests", f"the file has over {MAX_LINES} requests")
                return
            yield Line(batch, count, found.custom_id, start, len(text))
            count += 1
    if count == 0 and faults == 0:
        yield fault(None, "empty_file", "the file has no requests")


def _line(text: bytes, number: int, endpoint: str, seen: set[str]) -> Line | Fault:
    try:
        asked = _ASKED.decode(text)
    except msgspec.ValidationError as error:
        return fault(number, "invalid_request", str(error).replace("`", "")[:300])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return fault(number, "invalid_json_line", "this line is not a JSON object")
    if not asked.custom_id or len(asked.custom_id) > MAX_ID:
        return fault(number, "invalid_custom_id", f"custom_id must have 1 to {MAX_ID} characters", "custom_id")
    if asked.custom_id in seen:
        return fault(number, "duplicate_custom_id", "another line has this custom_id", "custom_id")
    seen.add(asked.custom_id)
    if asked.method != "POST":
        return fault(number, "invalid_method", "method must be POST", "method")
    if asked.url != endpoint:
        return fault(number, "mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}", "url")
    if not bytes(asked.body).lstrip().startswith(b"{"):
        return fault(number, "invalid_body", "body must be an object", "body")
    return Line("", 0, asked.custom_id, 0, 0)


def fault(line: int | None, code: str, message: str, param: str | None = None) -> Fault:
    """The fault of a line, as a batch reports it."""
    return {"code": code, "line": line, "message": message, "param": param}


def read(path: Path, line: Line) -> bytes:
    """The body of a request that `scan` has found."""
    with path.open("rb") as file:
        file.seek(line.start)
        return bytes(_ASKED.decode(file.read(line.length)).body)


def answered(line: Line, status: int, body: bytes) -> bytes:
    """The answer to one request, as a line of the output file or, with an error's status, of the error file."""
    raw = msgspec.Raw(body if _is_json(body) else msgspec.json.encode(body.decode(errors="replace")))
    response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": raw}
    return _written(line, response, None)


def not_run(line: Line, code: str, message: str) -> bytes:
    """A request that got no answer, as a line of the error file."""
    return _written(line, None, {"code": code, "message": message})


def _written(line: Line, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    name = f"batch_req_{line.batch.removeprefix('batch_')[:16]}{line.n:08x}"  # the same however often it is written
    body = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
    return json_line(body)


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class Writing:
    """A file that is made whole or not at all, and again the same if it is made twice."""

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._part = path.with_name(f"{path.name}.part")
        self._out = self._part.open("wb")

    def write(self, lines: list[bytes]) -> None:
        """Append lines."""
        for line in lines:
            self._out.write(line)
            self.size += len(line)

    def end(self) -> None:
        """Put the file on disk under its name, whole. An empty one is not made."""
        self._out.flush()
        os.fsync(self._out.fileno())
        self._out.close()
        if self.size == 0:
            self._part.unlink()
            return
        self._part.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
