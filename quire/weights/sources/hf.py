"""A Hugging Face repository, hf:org/repo[@revision], or one file of it, hf:org/repo/path/file.gguf[@revision].

What the hub's own tools have downloaded is found in their cache (hub_cache.py); a whole repository is pulled there too (hub.py). Of a
file the hub is asked once, without following its redirect, for the file's digest (LFS files carry their sha256), its size
and the commit that the revision means now. The token goes to the hub's own host and to no other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from quire.observe.errors import BadRequest, Unsupported
from quire.weights.sources import Remote

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.download.web import Http, Reply

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
RENAMED = 3  # how often a repository may have been


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A repository, or a file in it, at a revision (a branch, a tag or a commit)."""

    org: str
    repo: str
    file: str = ""  # "" is the repository whole
    revision: str = "main"

    @property
    def folder(self) -> bool:
        return not self.file

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{'/'.join(p for p in (self.org, self.repo, self.file) if p)}{at}"


def parse(rest: str, part: bool = False) -> HubTarget:
    """`rest` as org/repo[/file][@revision]."""
    name, at, revision = rest.partition("@")
    pieces = name.split("/")
    if len(pieces) < 2 or not all(pieces):
        cure = "write hf:org/repo or hf:org/repo/file.gguf"
        raise BadRequest(f"'hf:{rest}' names no repository and no file", cure=cure, param="model")
    org, repo, file = pieces[0], pieces[1], "/".join(pieces[2:])
    if not _PART.fullmatch(org) or not _PART.fullmatch(repo):
        raise BadRequest(f"'hf:{rest}': {org}/{repo} is not a repository name", param="model")
    if any(p in (".", "..") for p in pieces):
        raise BadRequest(f"'hf:{rest}': a path in a repository has no '.' or '..'", param="model")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise BadRequest(f"'hf:{rest}': {revision!r} is not a branch, tag or commit", param="model")
    if file and not part and not file.lower().endswith(".gguf"):
        raise Unsupported(
            f"'hf:{rest}' is not a .gguf file",
            cure=f"name one, or the whole repository: hf:{org}/{repo}",
            param="model",
        )
    return HubTarget(org, repo, file, revision or "main")


def authorization(env: Environment) -> str | None:
    """The header that the hub's own host gets."""
    return f"Bearer {env.hf_token}" if env.hf_token else None


def cures(target: HubTarget, env: Environment) -> dict[int, str]:
    """Advice for each of the hub's refusals."""
    gated = (
        "the token in HF_TOKEN may not read it: accept the model's terms on its page, or use another token"
        if env.hf_token
        else "it needs a token: set HF_TOKEN (or the name is misspelt; the hub answers both alike)"
    )
    what = "the repository, the file and" if target.file else "the repository and"
    missing = f"check {what} the revision {target.revision!r} on the hub"
    if not env.hf_token:
        missing += "; a private one needs HF_TOKEN"
    return {401: gated, 403: gated, 404: missing}


def locate(target: HubTarget, env: Environment, http: Http) -> Remote:
    """The file's address, with what the hub says of its digest and size."""
    if not target.file:
        raise Unsupported(f"{target} is a whole repository, not a file", param="model")
    endpoint = env.hf_endpoint.rstrip("/")
    auth = authorization(env)

    def address(revision: str) -> str:
        return f"{endpoint}/{target.org}/{target.repo}/resolve/{quote(revision, safe='')}/{quote(target.file)}"

    first = _asked(address(target.revision), auth, target, env, http)
    linked = _unquote(first.get("X-Linked-Etag") or first.get("ETag") or "")
    length = first.get("X-Linked-Size") or (first.get("Content-Length") if first.status == 200 else None) or ""
    commit = first.get("X-Repo-Commit") or ""
    pinned = target.revision
    if _COMMIT.fullmatch(commit) and commit != target.revision:
        pinned = commit  # a branch may move between this question and the last byte
    return Remote(
        address(pinned),
        sha256=linked if _SHA256.fullmatch(linked) else None,
        size=int(length) if length.isdigit() else None,
        auth=auth,
        notes=(f"{target.revision} is commit {commit[:12]}",) if pinned != target.revision else (),
    )


def _asked(url: str, auth: str | None, target: HubTarget, env: Environment, http: Http) -> Reply:
    """What the hub says of a file. A repository that was renamed redirects within the hub, and says nothing itself."""
    from quire.weights.download.web import REDIRECTS, next_hop, origin_of  # parsing a name needs no network

    reply = http.head(url, auth=auth, cures=cures(target, env))
    for _ in range(RENAMED):
        if reply.status not in REDIRECTS or reply.get("X-Repo-Commit") or reply.get("X-Linked-Etag"):
            break
        there = next_hop(url, reply)
        if origin_of(there) != origin_of(url):
            break
        url, reply = there, http.head(there, auth=auth, cures=cures(target, env))
    return reply


def _unquote(etag: str) -> str:
    return etag.removeprefix("W/").strip('"').lower()
