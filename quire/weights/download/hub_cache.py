"""The hub's own cache on this machine, in the layout of its tools: what they downloaded is found, what we download they find.

    models--org--repo/blobs/<etag>               content: the sha256 of a large file, the git id of a small one
    models--org--repo/snapshots/<commit>/<path>  links into blobs
    models--org--repo/refs/<revision>            the commit that a branch or tag meant when it was downloaded

Reads and removes; downloading is hub.py's. No network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.weights.download.repository import CONFIG, INDEX, PICKLES, WEIGHTS, is_plain
from quire.weights.sources.hf import HubTarget

if TYPE_CHECKING:
    from quire.config import Environment

COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"models--([A-Za-z0-9][\w.-]*?)--([A-Za-z0-9][\w.-]*)")


@dataclass(frozen=True, slots=True)
class Cached:
    """A whole repository that is here."""

    name: str  # hf:org/repo
    path: Path  # its snapshot
    size: int
    modified: float  # seconds since 1970


def folder_of(target: HubTarget, cache: Path) -> Path:
    """The repository's folder in the cache."""
    return cache / f"models--{target.org}--{target.repo}"


def find(target: HubTarget, env: Environment, sha256: str | None = None) -> Path | None:
    """The file, or the snapshot of a whole repository, if all of it is here and is what `sha256` says (where that is known)."""
    snapshot = _snapshot(target, env)
    if snapshot is None:
        return None
    here = (snapshot / target.file).is_file() if target.file else is_whole(snapshot)
    if not here:
        return None
    content = os.path.basename(os.path.realpath(snapshot / (target.file or WEIGHTS)))
    if sha256 is not None and _SHA256.fullmatch(content) and content != sha256:
        return None  # other weights: a short name means one version
    return snapshot / target.file if target.file else snapshot


def is_whole(snapshot: Path) -> bool:
    """Whether a snapshot has a configuration and every weight file that it should have."""
    if not (snapshot / CONFIG).is_file():
        return False
    try:
        shards = set(json.loads((snapshot / INDEX).read_bytes())["weight_map"].values())
        return all(isinstance(s, str) and is_plain(s) and (snapshot / s).is_file() for s in shards)
    except FileNotFoundError:
        return any(p.suffix == ".safetensors" or p.suffix in PICKLES for p in snapshot.iterdir() if p.is_file())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return True  # an index that cannot be read: whoever loads it says so


def listed(env: Environment) -> list[Cached]:
    """Every whole repository in the cache that its main branch names."""
    found: list[Cached] = []
    try:
        folders = sorted(env.hf_cache.iterdir()) if env.hf_cache is not None else []
    except OSError:
        return []
    for folder in folders:
        if match := _FOLDER.fullmatch(folder.name):
            target = HubTarget(match[1], match[2])
            path = find(target, env)
            if path is not None:
                files = [p for p in path.rglob("*") if p.is_file()]
                size = sum(p.stat().st_size for p in files)
                found.append(Cached(str(target), path, size, path.stat().st_mtime))
    return found


def remove(target: HubTarget, env: Environment) -> int:
    """Remove a revision and what only it uses; the bytes freed."""
    snapshot = _snapshot(target, env)
    if snapshot is None or not snapshot.is_dir():
        return 0
    folder = snapshot.parent.parent
    others = {
        os.path.realpath(p)
        for other in snapshot.parent.iterdir()
        if other != snapshot
        for p in other.rglob("*")
        if p.is_symlink()
    }
    freed = 0
    for path in [p for p in snapshot.rglob("*") if p.is_file()]:
        content = Path(os.path.realpath(path))
        if str(content) not in others and content.is_relative_to(folder.resolve()):
            freed += content.stat().st_size
            content.unlink()
    shutil.rmtree(snapshot)
    for ref in [p for p in (folder / "refs").rglob("*") if p.is_file()]:
        if ref.read_text().strip() == snapshot.name:
            ref.unlink()
    if not any((folder / "snapshots").iterdir()):
        shutil.rmtree(folder)
    return freed


def _snapshot(target: HubTarget, env: Environment) -> Path | None:
    """The snapshot that the revision means here; it may lack files."""
    if env.hf_cache is None:
        return None
    folder = folder_of(target, env.hf_cache)
    commit = target.revision
    if not COMMIT.fullmatch(commit):
        try:
            with (folder / "refs" / target.revision).open() as f:
                commit = f.read(64).strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not COMMIT.fullmatch(commit):
            return None
    return folder / "snapshots" / commit
