"""A small HTTP client over the standard library, for reading index pages and model files.

Proxies come from the environment (urllib's own rule); redirects are followed here, by hand, so that what must not leave
an origin does not. Invariants: only http and https; an Authorization header goes to the origin it was meant for and to
no other; https is never left for http; every failure is either Transient (worth another try) or an error with a cure.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from functools import cache
from typing import IO, Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urljoin, urlsplit

from quire.config import VERSION
from quire.observe.errors import DownloadFailed, NotFound

MAX_PAGE = 64 << 20  # the largest document that is read into memory
MAX_HOPS = 10
MAX_WAIT = 60.0  # the longest Retry-After that is obeyed
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
REDIRECTS = {301, 302, 303, 307, 308}

T = TypeVar("T")


class Transient(Exception):
    """A failure that another try may not meet."""

    def __init__(self, what: str, retry_after: float | None = None):
        super().__init__(what)
        self.retry_after = retry_after


@dataclass(slots=True)
class Reply:
    """An answer: the last hop's status, headers and body."""

    status: int
    headers: Message
    url: str
    stream: Any  # an http.client.HTTPResponse, or the HTTPError that wraps one

    def get(self, name: str) -> str | None:
        return self.headers.get(name)

    def length(self) -> int | None:
        text = (self.headers.get("Content-Length") or "").strip()
        return int(text) if text.isdigit() else None

    def read(self, n: int) -> bytes:
        """At most `n` bytes, as soon as there are any; b"" at the end. A broken connection is Transient."""
        try:
            return self.stream.read1(n)
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise Transient(f"{host_of(self.url)} broke off ({_why(e)})") from e

    def close(self) -> None:
        self.stream.close()


@dataclass(frozen=True, slots=True)
class Page:
    """A small document, whole."""

    url: str  # after redirects: what its links are relative to
    type: str
    body: bytes


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Redirects come back as answers."""

    def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Http:
    """The client. `attempts` bounds tries in a row that got nothing."""

    timeout: float = 30.0
    attempts: int = 5
    backoff: float = 0.5  # seconds before the second try, doubled each time
    cafile: str | None = None  # certificates trusted besides the system's
    note: Callable[[str], None] = field(default=lambda text: None)
    sleep: Callable[[float], None] = time.sleep

    def trusting(self, cafile: str | None) -> Http:
        """A client like this one, with the certificates in `cafile` trusted too."""
        return replace(self, cafile=cafile) if cafile else self

    def head(self, url: str, *, auth: str | None = None, cures: Mapping[int, str] | None = None) -> Reply:
        """The headers of `url`; its redirect is an answer too."""

        def once() -> Reply:
            reply = self.once(url, method="HEAD", auth=auth, cures=cures, follow=False)
            reply.close()
            return reply

        return self.retrying(once)

    def page(
        self, url: str, *, accept: str = "*/*", auth: str | None = None, cures: Mapping[int, str] | None = None
    ) -> Page:
        """A document that fits in memory."""

        def once() -> Page:
            reply = self.once(url, headers={"Accept": accept}, auth=auth, cures=cures)
            body = bytearray()
            try:
                while chunk := reply.read(1 << 16):
                    body += chunk
                    if len(body) > MAX_PAGE:
                        raise DownloadFailed(f"{display(url)} is over {MAX_PAGE >> 20} MiB: not an index page")
            finally:
                reply.close()
            if (length := reply.length()) is not None and len(body) < length:
                raise Transient(f"{host_of(url)} broke off after {len(body)} of {length} bytes")
            kind = (reply.get("Content-Type") or "").split(";")[0].strip().lower()
            return Page(reply.url, kind, bytes(body))

        return self.retrying(once)

    def retrying(self, once: Callable[[], T]) -> T:
        """`once()`, tried again after each Transient until the attempts are spent."""
        for attempt in range(1, self.attempts + 1):
            try:
                return once()
            except Transient as e:
                self.wait(e, attempt)
        raise AssertionError("unreachable: wait raises on the last attempt")

    def wait(self, failure: Transient, attempt: int) -> None:
        """Sleep before the next try, saying so; raise DownloadFailed where `attempt` was the last."""
        if attempt >= self.attempts:
            raise DownloadFailed(
                f"{failure}; gave up after {attempt} tries", cure="check the network and try again"
            ) from failure
        pause = self.backoff * 2 ** (attempt - 1)
        if failure.retry_after is not None:
            pause = min(max(pause, failure.retry_after), MAX_WAIT)
        self.note(f"{failure}; trying again in {pause:.1f} s ({attempt} of {self.attempts})")
        self.sleep(pause)

    def once(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        auth: str | None = None,
        cures: Mapping[int, str] | None = None,
        follow: bool = True,
    ) -> Reply:
        """One request, redirects followed. Raises Transient, NotFound or DownloadFailed; 416 is an answer."""
        origin = origin_of(url)
        here = url
        for _ in range(MAX_HOPS + 1):
            request = urllib.request.Request(here, method=method, headers=dict(headers or {}))
            request.add_header("User-Agent", f"quire/{VERSION}")
            request.add_header("Accept-Encoding", "identity")  # a resumed byte range must be of the file itself
            if auth and origin_of(here) == origin:
                request.add_header("Authorization", auth)
            reply = self._send(request, here)
            if reply.status not in REDIRECTS:
                break
            if not follow:
                return reply
            reply.close()
            here = next_hop(here, reply)
        else:
            raise DownloadFailed(
                f"{display(url)} redirects more than {MAX_HOPS} times", cure="the address is likely wrong"
            )
        if reply.status in (200, 206, 416):
            if (reply.get("Content-Encoding") or "identity").lower() != "identity":
                reply.close()
                raise DownloadFailed(f"{display(here)} answers with Content-Encoding {reply.get('Content-Encoding')!r}")
            return reply
        reply.close()
        raise _refused(reply, url, cures or {})

    def _send(self, request: urllib.request.Request, url: str) -> Reply:
        try:
            stream = _opener(self.cafile).open(request, timeout=self.timeout)
            return Reply(stream.status, stream.headers, url, stream)
        except HTTPError as e:
            return Reply(e.code, e.headers, url, e)
        except URLError as e:
            raise _unreachable(e.reason, url) from e
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise _unreachable(e, url) from e


@cache
def _opener(cafile: str | None) -> urllib.request.OpenerDirector:
    """Reading the system's certificates takes tens of milliseconds: once per process."""
    context = ssl.create_default_context()
    if cafile:
        try:
            context.load_verify_locations(cafile)
        except (OSError, ssl.SSLError) as e:
            raise DownloadFailed(f"cannot read the certificates in {cafile}: {_why(e)}") from e
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _StayHere())


def next_hop(here: str, reply: Reply) -> str:
    """Where a redirect from `here` leads, if it may be followed."""
    there = urljoin(here, reply.get("Location") or "")
    if not reply.get("Location"):
        raise DownloadFailed(f"{display(here)} answers {reply.status} without saying where to go")
    old, new = urlsplit(here).scheme, urlsplit(there).scheme
    if new not in ("http", "https"):
        raise DownloadFailed(f"{display(here)} redirects to {display(there)}: only http and https are followed")
    if old == "https" and new == "http":
        raise DownloadFailed(f"{display(here)} redirects to plain http ({display(there)}): refused")
    return there


def _refused(reply: Reply, url: str, cures: Mapping[int, str]) -> Exception:
    status, where = reply.status, display(url)
    meaning = http.client.responses.get(status, "no standard meaning")
    said = f"{where} answered {status} ({meaning})"
    if words := "".join(c for c in reply.get("X-Error-Message") or "" if c.isprintable())[:200]:
        said += f": {words}"  # the hub's own word, as for a model whose terms are not accepted yet
    if status in TRANSIENT:
        after = (reply.get("Retry-After") or "").strip()
        return Transient(said, float(after) if after.isdigit() else None)
    cure = cures.get(status, "")
    if status in (404, 410):
        return NotFound(said, cure=cure or "check the name; the file may have moved")
    if not cure and status in (401, 403, 407):
        cure = "it needs credentials that were not given or not accepted"
    return DownloadFailed(said, cure=cure)


def _unreachable(reason: object, url: str) -> Exception:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DownloadFailed(
            f"the certificate of {host_of(url)} is not trusted: {reason.verify_message}",
            cure="where a proxy signs for it, set SSL_CERT_FILE to a bundle that holds the proxy's certificate",
        )
    if isinstance(reason, (ValueError, http.client.InvalidURL)) and not isinstance(reason, OSError):
        return DownloadFailed(f"{display(url)} cannot be asked for: {reason}")
    return Transient(f"cannot reach {host_of(url)}: {_why(reason)}")


def _why(e: object) -> str:
    return str(e) or type(e).__name__


def origin_of(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what credentials belong to."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, (parts.hostname or "").lower(), parts.port or (443 if scheme == "https" else 80)


def host_of(url: str) -> str:
    """The host of `url`, for messages."""
    return urlsplit(url).hostname or url


def display(url: str) -> str:
    """`url` without credentials, query (signatures live there) or fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()


def split_credentials(url: str) -> tuple[str, str | None]:
    """`url` without user:password@, and those as an Authorization header."""
    parts = urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = userinfo.partition(":")
    token = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode("ascii")
    return parts._replace(netloc=host).geturl(), f"Basic {token}"
