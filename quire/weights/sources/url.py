"""A .gguf file at an http or https address. Nothing is known about it beforehand but where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.observe.errors import BadRequest, Unsupported
from quire.weights.download.web import split_credentials
from quire.weights.sources import Remote

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.download.web import Http


@dataclass(frozen=True, slots=True)
class UrlTarget:
    """A checked address, without its fragment. `auth` came as user:password@ and is not part of the name."""

    url: str
    auth: str | None = None

    def __str__(self) -> str:
        return self.url


def parse(rest: str, part: bool = False) -> UrlTarget:
    """`rest` as an address."""
    try:
        parts = urlsplit(rest)
        host, _ = parts.hostname, parts.port
    except ValueError as e:
        raise BadRequest(f"{rest!r} is not a URL: {e}", param="model") from None
    if parts.scheme.lower() not in ("http", "https") or not host:
        raise BadRequest(f"{rest!r} is not an http or https URL with a host", param="model")
    if any(c.isspace() for c in rest):
        raise BadRequest(f"{rest!r} holds a space", cure="write it as %20", param="model")
    if not part and not parts.path.lower().endswith(".gguf"):
        raise Unsupported(
            f"{rest!r} does not name a .gguf file", cure="this version reads GGUF files; give the address of one"
        )
    url, auth = split_credentials(parts._replace(fragment="").geturl())
    return UrlTarget(url, auth)


def locate(target: UrlTarget, env: Environment, http: Http) -> Remote:
    """The address itself."""
    return Remote(target.url, auth=target.auth)
