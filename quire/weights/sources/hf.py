"""One file of a Hugging Face repository: hf:org/repo/path/file.gguf[@revision].

The hub is asked once, without following its redirect, for the file's digest (LFS files carry their sha256), its size
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
    from quire.weights.web import Http

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A file in a repository at a revision (a branch, a tag or a commit)."""

    org: str
    repo: str
    file: str
    revision: str = "main"

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.org}/{self.repo}/{self.file}{at}"


def parse(rest: str) -> HubTarget:
    """`rest` as org/repo/file[@revision]."""
    name, at, revision = rest.partition("@")
    pieces = name.split("/")
    if len(pieces) < 3 or not all(pieces):
        raise BadRequest(f"'hf:{rest}' names no file", cure="write hf:org/repo/file.gguf", param="model")
    org, repo, file = pieces[0], pieces[1], "/".join(pieces[2:])
    if not _PART.fullmatch(org) or not _PART.fullmatch(repo):
        raise BadRequest(f"'hf:{rest}': {org}/{repo} is not a repository name", param="model")
    if any(p in (".", "..") for p in pieces):
        raise BadRequest(f"'hf:{rest}': a path in a repository has no '.' or '..'", param="model")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise BadRequest(f"'hf:{rest}': {revision!r} is not a branch, tag or commit", param="model")
    if not file.lower().endswith(".gguf"):
        raise Unsupported(
            f"'hf:{rest}' is not a .gguf file", cure="this version reads GGUF files; name one", param="model"
        )
    return HubTarget(org, repo, file, revision or "main")


def locate(target: HubTarget, env: Environment, http: Http) -> Remote:
    """The file's address, with what the hub says of its digest and size."""
    endpoint = env.hf_endpoint.rstrip("/")
    auth = f"Bearer {env.hf_token}" if env.hf_token else None
    cure_401 = (
        "the token in HF_TOKEN may not read it: accept the model's terms on its page, or use another token"
        if env.hf_token
        else "it needs a token: set HF_TOKEN (or the name is misspelt; the hub answers both alike)"
    )
    cures = {
        401: cure_401,
        403: cure_401,
        404: f"check the repository, the file and the revision {target.revision!r} on the hub",
    }

    def address(revision: str) -> str:
        return f"{endpoint}/{target.org}/{target.repo}/resolve/{quote(revision, safe='')}/{quote(target.file)}"

    first = http.head(address(target.revision), auth=auth, cures=cures)
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


def _unquote(etag: str) -> str:
    return etag.removeprefix("W/").strip('"').lower()
