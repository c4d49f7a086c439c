"""A Hugging Face repository, hf:org/repo[@revision], or one file of it, hf:org/repo/path/file.gguf[@revision].

What the hub's own tools have downloaded is found in their cache and used in place. A whole repository is not downloaded
here yet; of a file the hub is asked once, without following its redirect, for the file's digest (LFS files carry their sha256), its size
and the commit that the revision means now. The token goes to the hub's own host and to no other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
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
    """A repository, or a file in it, at a revision (a branch, a tag or a commit)."""

    org: str
    repo: str
    file: str = ""  # "" is the repository whole
    revision: str = "main"

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{'/'.join(p for p in (self.org, self.repo, self.file) if p)}{at}"


def parse(rest: str) -> HubTarget:
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
    if file and not file.lower().endswith(".gguf"):
        raise Unsupported(
            f"'hf:{rest}' is not a .gguf file",
            cure=f"name one, or the whole repository: hf:{org}/{repo}",
            param="model",
        )
    return HubTarget(org, repo, file, revision or "main")


def cached(target: HubTarget, env: Environment) -> Path | None:
    """Where the hub's own cache has it, or None.

    refs/<revision> holds the commit that a branch or a tag meant when it was downloaded; snapshots/<commit> the files.
    """
    if env.hf_cache is None:
        return None
    repository = env.hf_cache / f"models--{target.org}--{target.repo}"
    commit = target.revision
    if not _COMMIT.fullmatch(commit):
        try:
            with (repository / "refs" / target.revision).open() as f:
                commit = f.read(64).strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None
    snapshot = repository / "snapshots" / commit
    path = snapshot / target.file if target.file else snapshot
    here = path if target.file else snapshot / "config.json"
    return path if here.is_file() else None


def locate(target: HubTarget, env: Environment, http: Http) -> Remote:
    """The file's address, with what the hub says of its digest and size."""
    if not target.file:
        raise Unsupported(
            f"{target} is a whole repository, which is not in the hub's cache at {env.hf_cache}, and fetching one is not "
            "supported here yet",
            cure=f"`hf download {target.org}/{target.repo}` puts it there; or name a file: {target}/file.gguf",
            param="model",
        )
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
