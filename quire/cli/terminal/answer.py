"""Printing an answer: its text to stdout as it comes, everything else (spinner, notes, numbers) to stderr.

Shared by one answer (`run.py`) and a conversation (`conversation.py`). Imports nothing heavy: it is on the way to the first token.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.config import Terminal

if TYPE_CHECKING:
    from quire.engine.types import EngineInfo
    from quire.llm import Completion, Output
    from quire.runner.params import SamplingParams


DIM, PLAIN = "\x1b[2m", "\x1b[22m"
THINKING, ANSWER = "[thinking]\n", "\n[answer]\n"  # in their place, where a terminal shall show nothing but text


def show(stream: Iterable[str]) -> float | None:
    """Pieces to stdout as they come, with a spinner before the first. Ends with a newline, also when interrupted.

    Returns how old the process was when the first piece was written, where the system tells.
    """
    out = sys.stdout
    screen = out.isatty()
    coloured = screen and Terminal.read().colours
    last, first = "\n", None
    thinking = False
    spinner = Spinner("thinking")
    spinner.start()
    try:
        for piece in stream:
            spinner.stop()
            first = first or _age()
            if type(piece) is not str:  # a Thought: for people alone, the answer is what goes on in a pipe
                if screen:
                    said = _tame(piece)
                    out.write(f"{DIM}{said}{PLAIN}" if coloured else said if thinking else THINKING + said)
                    out.flush()
                    thinking = True
                continue
            if thinking:
                out.write("\n\n" if coloured else ANSWER)
                thinking = False
            last = piece
            out.write(_tame(piece) if screen else piece)
            out.flush()
    finally:
        spinner.stop()
        if thinking or not last.endswith("\n"):
            out.write("\n")
        out.flush()
    return first


def _age() -> float | None:
    """Seconds since this process was started; Linux tells."""
    try:
        with open("/proc/self/stat") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def _tame(text: str) -> str:
    """The text without control sequences: nothing a model says may steer the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def report(output: Output, info: EngineInfo, params: SamplingParams, stats: bool, lift: str = "--max-tokens 0") -> None:
    """Say what cut an answer short and what lifts that bound, and the numbers when asked."""
    done = output.outputs[0]
    if done.finish_reason == "length":
        full = len(output.prompt_tokens) + len(done.tokens) >= info.context
        bound = f"at {params.max_tokens} tokens; {lift} lets it go on to the end of the context"
        say(
            f"[the answer was cut: the context of {info.context} tokens is full]"
            if full
            else f"[the answer was cut {bound}]"
        )
    if stats:
        for line in numbers(done):
            say(line)


def decisions(info: EngineInfo) -> None:
    """Print the decisions taken at load."""
    for line in info.decisions:
        say(line)


def numbers(done: Completion) -> list[str]:
    """A receipt as lines of text."""
    r = done.receipt
    computed = r.prompt_tokens - r.cached_tokens
    first = r.queue_seconds + r.prefill_seconds
    lines = [
        f"prompt: {r.prompt_tokens} tokens, {r.cached_tokens} of them cached; answer: {r.output_tokens} tokens; "
        f"ended by {done.finish_reason or 'interrupt'}; seed {r.seed}",
        f"first token: {first * 1000:.0f} ms (queue {r.queue_seconds * 1000:.0f}, prefill {r.prefill_seconds * 1000:.0f})",
    ]
    if r.prefill_seconds > 0 and computed > 0:
        lines.append(f"prefill: {computed / r.prefill_seconds:.1f} tokens/s")
    if r.decode_seconds > 0 and r.output_tokens > 1:
        lines.append(f"decode: {(r.output_tokens - 1) / r.decode_seconds:.1f} tokens/s")
    return lines


def say(text: str) -> None:
    """A line on stderr. Where nobody can hear it, the answer goes on all the same."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Spinner:
    """Something that moves on stderr while nothing else does; on a terminal only."""

    def __init__(self, text: str):
        self._text = text
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if sys.stderr.isatty() and Terminal.read().moves:
            self._thread = threading.Thread(target=self._turn, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Spinner:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _turn(self) -> None:
        shown = False
        wait = 0.15  # what is over sooner needs no spinner
        for frame in _frames():
            if self._over.wait(wait):
                break
            sys.stderr.write(f"\r{frame} {self._text} ")
            sys.stderr.flush()
            shown, wait = True, 0.1
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _frames() -> Iterable[str]:
    while True:
        yield from "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
