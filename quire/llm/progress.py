"""A progress bar: one line on stderr that is rewritten, on a terminal only. Imports nothing heavy, since every script would wait for it."""

from __future__ import annotations

import sys
import time


def on_screen() -> bool:
    """Whether somebody watches: a terminal, or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class Bar:
    """A download's progress as one line that is rewritten. For terminals and notebooks, without further imports."""

    def __init__(self) -> None:
        self._label, self._total, self._done, self._told = "", 0, 0, 0.0

    def start(self, total: int | None, label: str, done: int = 0) -> None:
        self._label, self._total, self._done = label, total or 0, done

    def advance(self, n: int) -> None:
        self._done += n
        if time.monotonic() - self._told > 0.1 or self._done == self._total:
            self._told = time.monotonic()
            of = f" of {self._total / 1e6:.1f} MB, {100 * self._done // self._total}%" if self._total else " MB"
            print(f"\r{self._label}: {self._done / 1e6:.1f}{of}", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._done:
            print(file=sys.stderr, flush=True)
            self._done = 0

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Meter:
    """How far a batch is, as one line that is rewritten."""

    def __init__(self, total: int):
        self._total, self._done, self._tokens, self._told = total, 0, 0, 0.0
        self._began = time.monotonic()

    def done(self, tokens: int) -> None:
        self._done += 1
        self._tokens += tokens
        now = time.monotonic()
        if now - self._told > 0.1 or self._done == self._total:
            self._told = now
            rate = self._tokens / max(1e-9, now - self._began)
            line = f"\r{self._done} of {self._total} prompts, {self._tokens} tokens, {rate:.1f} tokens/s"
            print(line, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        print(file=sys.stderr, flush=True)
