"""What verbs print: progress bars, tables, errors, sizes and times. Nothing here decides anything.

Answers go to stdout, everything said about them to stderr. rich is imported only where something moves on a terminal.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from quire.config import Terminal
from quire.observe.errors import QuireError
from quire.weights.download.progress import Progress, mb

if TYPE_CHECKING:
    import rich.progress

LINE_EVERY = 5.0  # seconds between lines where there is no terminal
BOLD, RED, GREEN, YELLOW = 1, 31, 32, 33  # as terminals number them
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO, errno.EFBIG)
CURES = {
    errno.ENOSPC: "the disk is full; free some of it (`quire rm NAME`), or write elsewhere",
    errno.EDQUOT: "the disk quota is used up; free some of it, or write elsewhere",
    errno.EBADF: "standard output is closed; give it somewhere to go",
    errno.EIO: "the device or terminal behind it is gone or damaged",
    errno.EFBIG: "`ulimit -f` bounds the size of files",
    errno.EACCES: "this user may not; choose another place, or change who may",
    errno.EPERM: "this user may not; choose another place, or change who may",
    errno.EROFS: "it is on a disk that cannot be written; choose another place",
    errno.ENOENT: "look at the path",
    errno.ENOTDIR: "a part of the path is a file and not a folder",
    errno.EISDIR: "it is a folder; name a file",
    errno.EMFILE: "`ulimit -n` bounds the files that are open; raise it",
}


def echo(text: str) -> None:
    """A line on stdout, at once."""
    print(text, flush=True)


def style(text: str, how: int, stream: TextIO) -> str:
    """`text` so that a terminal shows it that way; plain where `stream` is none, and where NO_COLOR says so."""
    return f"\x1b[{how}m{text}\x1b[0m" if stream.isatty() and Terminal.read().colours else text


def fail(error: BaseException) -> None:
    """An error, as one line with its cure."""
    if isinstance(error, QuireError):
        text = error.message + (f": {error.cure}" if error.cure else "")
    elif isinstance(error, OSError) and error.strerror and (error.filename or error.errno in UNWRITTEN):
        # The machine's own refusal, not a mistake of ours. Without a name it is of something that was already open.
        what = error.filename or "writing what there is to say"
        text = f"{what}: {error.strerror}: {CURES.get(error.errno or 0, 'nothing more is known here')}"
    else:
        text = f"internal error, {type(error).__name__}: {error}. `quire --debug …` shows where; please report it"
    # A message may quote a file or a server: nothing in it may steer the terminal.
    safe = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.splitlines()))
    note(style(f"error: {safe}", RED, sys.stderr))


def note(text: str) -> None:
    """A sentence about what is going on. Where nobody can hear it, the work goes on all the same."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def emit(value: Any) -> None:
    """`value` as JSON on stdout."""
    import msgspec

    echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Left-aligned columns on stdout; never cut, so that a pipe sees everything."""
    lines = [list(head), *[list(r) for r in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for n, line in enumerate(lines):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        echo(text if n else style(text, BOLD, sys.stdout))


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and values on stdout, one pair a line."""
    listed = list(pairs)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        echo(f"{style(name.ljust(width), BOLD, sys.stdout)}  {value}")


def ago(iso: str, now: datetime | None = None) -> str:
    """How long ago an ISO 8601 time was, in the one unit that matters."""
    try:
        then = datetime.fromisoformat(iso)
    except ValueError:
        return "?"
    seconds = ((now or datetime.now(UTC)) - then.astimezone(UTC)).total_seconds()
    for unit, size in (("year", 365 * 86400), ("month", 30 * 86400), ("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            n = int(seconds // size)
            return f"{n} {unit}{'s' if n > 1 else ''} ago"
    return "just now"


def progress() -> Progress:
    """A bar on a terminal, a line now and then elsewhere."""
    return Bar() if sys.stderr.isatty() and Terminal.read().moves else Lines()


class Bar:
    """A moving bar with speed and time left, on stderr."""

    def __init__(self) -> None:
        self.live: rich.progress.Progress | None = None

    def start(self, total: int | None, label: str, done: int = 0) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        self.finish()
        self.live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            DownloadColumn(),
            Speed(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.live.add_task(escape(label), total=total, completed=done)
        self.live.start()

    def advance(self, n: int) -> None:
        if self.live is not None:
            self.live.advance(self.live.task_ids[0], n)

    def finish(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def note(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            note(text)


class Lines:
    """Plain lines on stderr, at most one every few seconds."""

    def __init__(self) -> None:
        self.label, self.total = "", 0
        self.done = self.first = 0
        self.began = self.spoke = 0.0

    def start(self, total: int | None, label: str, done: int = 0) -> None:
        self.label, self.total, self.done, self.first = label, total or 0, done, done
        self.began = self.spoke = time.monotonic()
        note(f"{label}: {mb(total) if total else 'size unknown'}{f', {mb(done)} here already' if done else ''}")

    def advance(self, n: int) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.spoke < LINE_EVERY:
            return
        self.spoke = now
        speed = (self.done - self.first) / (now - self.began)
        rest = f" of {mb(self.total)} ({100 * self.done // self.total}%)" if self.total else ""
        left = f", {max(0, self.total - self.done) / speed:.0f} s left" if self.total and speed else ""
        note(f"{self.label}: {mb(self.done)}{rest}, {mb(int(speed))}/s{left}")

    def finish(self) -> None:
        self.label = ""

    def note(self, text: str) -> None:
        note(text)
