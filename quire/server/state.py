"""The state folder of a server: everything that must outlive the process. It is chosen once and locked against other servers; where it
cannot be used, it is off and tells why.

    lock            held by the one server that uses the folder
    responses.db    stored responses (openai/responses/stored.py)
    batches.db      files and batches (openai/batches/)
    files/          the bytes of files

Without a folder responses are kept in memory, and files and batches are refused with the reason. Knows no dialect.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from pathlib import Path
from typing import IO
from urllib.parse import quote

from quire.server.errors import Unimplemented

NOT_ASKED = "this server was started without a state folder"


class State:
    """The folder, or why there is none."""

    def __init__(self, folder: Path | None):
        self.folder: Path | None = None
        self.off = NOT_ASKED
        self._lock: IO[str] | None = None
        self._made: list[Path] = []  # folders that this start made, the innermost first
        if folder is None:
            return
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / "files").mkdir(exist_ok=True, mode=0o700)
            self._lock = (folder / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            self.off = "another server uses the state folder"
            return
        except OSError as error:
            self.close()
            self.off = f"the state folder cannot be written ({error.strerror or type(error).__name__})"
            return
        self.folder, self.off, self._made = folder, "", made

    def line(self) -> str:
        """What the start tells people."""
        if self.folder is not None:
            return f"state: {self.folder} (files, batches, stored responses)"
        return f"files and batches are off: {self.off}; stored responses are in memory"

    def path(self, name: str) -> Path | None:
        """A file in the folder, if there is a folder."""
        return None if self.folder is None else self.folder / name

    def needed(self, what: str) -> Path:
        """The folder, or the refusal of a route that cannot do without."""
        if self.folder is None:
            raise Unimplemented(
                f"{what} are off here: {self.off}",
                cure="start the server with --state-dir FOLDER",
                code="no_state_folder",
            )
        return self.folder

    def give_up(self, why: str) -> None:
        """Something in the folder cannot be used: go on without it, and say so."""
        self.folder, self.off = None, why
        self.close()

    def unused(self) -> None:
        """No model was ever loaded: take back the folder where this start made it, unless a file was uploaded meanwhile."""
        if self.folder is None or self._made[:1] != [self.folder] or any((self.folder / "files").iterdir()):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else has something in it by now
            for parent in self._made[1:]:
                parent.rmdir()
        self.folder, self.off = None, NOT_ASKED

    def close(self) -> None:
        """Let another server have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def default_folder(home: Path, model: str) -> Path:
    """Where the state of a server of `model` lies unless told otherwise: servers of two models do not meet."""
    safe = quote(model, safe=":@=+,")[:180]
    return home / "state" / (safe if safe.strip(".") else "model")
