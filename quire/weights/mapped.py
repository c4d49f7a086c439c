"""A file mapped into memory, read-only. Its pages are given back to the system while it is read, and it is closed when no view is left.

What the bytes mean is the business of who inherits this (`gguf.py`, `safetensors.py`). Views stay valid after `close()`, which
only gives up the file's own hold.

Not covered: a file that somebody cuts short while it is mapped. Reading a page that is gone ends the process (SIGBUS),
as for every program that maps files; replace a model file by renaming a new one over it, never by writing into it.
"""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np

from quire.observe.errors import BadModelFile, NotFound


class MappedFile:
    """`_data` is all of it as bytes, or None once closed."""

    path: str
    size: int  # bytes
    found: os.stat_result  # which file it was when it was opened
    wanted = "name a model file"  # what to do when the path is none

    def __init__(self, path: str, file: mmap.mmap):
        self._map = file
        self._data: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(file, np.uint8)
        self.path = path
        self.size = self._data.size

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the file and check its header. Reads no weights."""
        path = os.fspath(path)
        try:
            # Asked before opening: opening a pipe would wait for somebody to write into it.
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise BadModelFile(f"{path} is {kind}", cure=cls.wanted)
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size == 0:
                    raise BadModelFile(f"{path} is empty: 0 bytes", cure="fetch it again")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise NotFound(f"there is no file {path}") from None
        except (OSError, ValueError) as e:
            raise BadModelFile(f"{path} cannot be opened: {e}") from None
        made = cls(path, mapped)
        made.found = found
        return made

    def release_range(self, start: int, nbytes: int) -> None:
        """Let go of the pages that hold these bytes. Does nothing where the system has no such call."""
        if self._data is None or nbytes <= 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        # Whole pages, outwards: a neighbour's bytes in the first or last page are read again when they are used.
        first = max(0, start) // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(start + nbytes, self.size)
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Give up the map. If layouts or strings still use it, it goes when the last of them does."""
        self._data = None
        with suppress(BufferError):  # views are alive, and hold the map themselves
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()
