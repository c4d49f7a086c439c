"""An HTTP server that does what it is told: serve a file properly, or misbehave in one exact way per request.

`Origin.files` maps paths to bodies. `Origin.faults` is a list of faults, one taken per request (None: behave); when it
is empty the server behaves. Every request is kept in `Origin.seen`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Fault:
    """One misbehaviour. Only what is set happens."""

    status: int | None = None  # answer this status and no file
    headers: dict[str, str] = field(default_factory=dict)
    drop_after: int | None = None  # close the connection after so many body bytes
    extra_length: int = 0  # say the body is longer (or shorter) than it is
    ignore_range: bool = False
    shift_range: int = 0  # answer a range with one that starts elsewhere
    pause: threading.Event | None = None  # wait for it before the body


@dataclass
class Body:
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    etag: str | None = "auto"

    def tag(self) -> str | None:
        return f'"{hashlib.md5(self.data).hexdigest()}"' if self.etag == "auto" else self.etag


class Origin:
    def __init__(self) -> None:
        self.files: dict[str, Body] = {}
        self.routes: dict[str, Callable[[Seen], tuple[int, dict[str, str], bytes]]] = {}
        self.faults: list[Fault | None] = []
        self.always: Fault | None = None
        self.seen: list[Seen] = []
        origin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                origin.answer(self)

            def do_HEAD(self) -> None:
                origin.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def gets(self, path: str) -> list[Seen]:
        return [s for s in self.seen if s.path == path and s.method == "GET"]

    def answer(self, h: BaseHTTPRequestHandler) -> None:
        seen = Seen(h.command, h.path, {k.lower(): v for k, v in h.headers.items()})
        self.seen.append(seen)
        h.close_connection = True
        if h.path in self.routes:
            status, headers, data = self.routes[h.path](seen)
            self.send(h, status, {"Content-Length": str(len(data))} | headers, data, None)
            return
        fault = (self.faults.pop(0) if self.faults else self.always) or Fault()
        if fault.status is not None:
            self.send(h, fault.status, {"Content-Length": "0"} | fault.headers, b"", None)
            return
        body = self.files.get(h.path)
        if body is None:
            self.send(h, 404, {"Content-Length": "0"}, b"", None)
            return
        status, headers, data = self.body(seen, body, fault)
        if fault.pause is not None:
            fault.pause.wait(20)
        self.send(h, status, headers | fault.headers, data, fault.drop_after)

    def body(self, seen: Seen, body: Body, fault: Fault) -> tuple[int, dict[str, str], bytes]:
        tag = body.tag()
        headers = dict(body.headers) | ({"ETag": tag} if tag else {})
        total = len(body.data)
        wanted = seen.headers.get("range")
        condition = seen.headers.get("if-range")
        if wanted and not fault.ignore_range and (condition is None or condition == tag):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) + fault.shift_range
            if start >= total:
                return 416, {"Content-Range": f"bytes */{total}", "Content-Length": "0"}, b""
            data = body.data[start : int(last) + 1 + fault.shift_range] if last else body.data[start:]
            headers |= {"Content-Range": f"bytes {start}-{start + len(data) - 1}/{total}"}
            return 206, headers | {"Content-Length": str(len(data) + fault.extra_length)}, data
        return 200, headers | {"Content-Length": str(total + fault.extra_length)}, body.data

    def send(
        self, h: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes, drop: int | None
    ) -> None:
        h.send_response(status)
        for name, value in headers.items():
            h.send_header(name, value)
        h.send_header("Connection", "close")
        h.end_headers()
        if h.command != "HEAD":
            with contextlib.suppress(OSError):  # the client may be gone
                h.wfile.write(data if drop is None else data[:drop])
