"""A service as `quire service install` was asked for it, and the files that a supervisor wants for it.

Every file that is written begins with a line that says so (MARK), and a file without it is never overwritten or removed. Variables
hold keys: the file with them is readable by its owner alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.config import Environment
from quire.observe.errors import BadRequest, QuireError

MARK = "Written by `quire service install`"
MARGIN = 30  # seconds that stopping may take beyond the drain: the engine process, files, the last answers
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
_FILE_MODE = 0o644


@dataclass(frozen=True, slots=True)
class Service:
    """What is to run, and as whom."""

    name: str
    system: bool  # of the machine, not of the user who installs it
    run_as: str | None  # with `system`: the account; None: one that systemd makes up
    command: tuple[str, ...]
    variables: dict[str, str]
    home: Path
    drain: float  # seconds


@dataclass(frozen=True, slots=True)
class File:
    """A file that a supervisor reads."""

    path: Path
    text: str
    mode: int = _FILE_MODE


class Supervisor(Protocol):
    """One of the programs that start services and start them again."""

    def home(self, service: str, run_as: str | None) -> Path | None:
        """The QUIRE_HOME that a service of the machine gets; None: the one of whoever installs it."""
        ...

    def kept(self, service: str) -> dict[str, str]:
        """The variables that an earlier installation wrote."""
        ...

    def files(self, service: Service) -> list[File]: ...

    def paths(self, service: str) -> list[Path]:
        """Where an installation has its files."""
        ...

    def start(self, service: str, changed: bool) -> None: ...

    def stop(self, service: str) -> None:
        """Stop it, and do not start it again with the machine."""
        ...

    def reload(self) -> None:
        """Forget units whose files are gone."""
        ...

    def status(self, service: str) -> int: ...

    def logs(self, service: str, lines: int, follow: bool) -> int: ...

    def hints(self, service: str) -> list[str]:
        """What whoever installed it should know."""
        ...


def check_name(name: str) -> str:
    """The name of a service, which becomes the name of files."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} cannot be a service's name", cure="use up to 48 lower-case letters, digits and hyphens"
        )
    return name


def check_words(words: Sequence[str]) -> None:
    """Refuse what no supervisor's file can hold."""
    for word in words:
        if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in word):
            raise BadRequest(f"{word!r} cannot be written into a service's file", cure="leave control characters out")


def variables(env: Environment, kept: Mapping[str, str], home: Path) -> dict[str, str]:
    """The variables of a service: those that are set now, then those that an earlier installation wrote. QUIRE_HOME is always there."""
    usual = Path("~/.cache/huggingface/hub").expanduser()
    now = {
        "QUIRE_HOME": str(home),
        "QUIRE_API_KEY": env.api_key,
        "QUIRE_THREADS": None if env.threads is None else str(env.threads),
        "QUIRE_KV_MEMORY": env.kv_memory,
        "QUIRE_ISA": env.isa,
        "HF_ENDPOINT": None if env.hf_endpoint == Environment(home).hf_endpoint else env.hf_endpoint,
        "HF_TOKEN": env.hf_token,
        "HF_HUB_CACHE": None if env.hf_cache in (None, usual) else str(env.hf_cache),
        "PIP_INDEX_URL": env.pypi_index,
        "NPM_CONFIG_REGISTRY": env.npm_registry,
    }
    found = {**kept, **{name: value for name, value in now.items() if value is not None}}
    check_words(tuple(found.values()))
    return found


def write(files: Sequence[File]) -> list[File]:
    """Write the files that are not there as they should be; gives those. A file of somebody else is refused before any is written."""
    different = [file for file in files if _differs(file)]
    for file in different:
        if file.path.exists() and not ours(file.path):
            raise BadRequest(
                f"{file.path} is not one that Quire wrote", cure="move it away, or give --name another name"
            )
    for file in different:
        _replace(file)
    return different


def _differs(file: File) -> bool:
    try:
        return file.path.read_text() != file.text or file.path.stat().st_mode & 0o777 != file.mode
    except (FileNotFoundError, UnicodeDecodeError):
        return True


def _replace(file: File) -> None:
    """Put the file there whole, with its mode from its first moment."""
    file.path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".quire-", dir=file.path.parent)  # 0600
    try:
        with os.fdopen(handle, "w") as out:
            out.write(file.text)
        os.chmod(name, file.mode)
        os.replace(name, file.path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def ours(path: Path) -> bool:
    """Whether Quire wrote this file."""
    try:
        with path.open(errors="replace") as file:
            return MARK in file.read(1024)
    except FileNotFoundError:
        return False


def run(*words: str, quiet: bool = False) -> int:
    """Run a supervisor's program, on this terminal; gives its exit status."""
    found = shutil.which(words[0])
    if found is None:
        raise QuireError(
            f"{words[0]} is not on this machine, so there is nothing that could run a service",
            cure="`quire service install --print` shows the files, for another supervisor",
        )
    where = subprocess.DEVNULL if quiet else None
    return subprocess.run([found, *words[1:]], stdin=subprocess.DEVNULL, stdout=where, stderr=where).returncode


def must(*words: str) -> None:
    """Run a supervisor's program, which has to succeed."""
    status = run(*words)
    if status:
        raise QuireError(f"`{' '.join(words)}` failed with status {status}", cure="what it said is above")
