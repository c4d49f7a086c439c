"""The command `quire`: the way to the verb that is asked for.

A plain command line goes straight to its verb (`arguments/options.py`); help, `--debug`, mistakes and everything else go through
typer (`app.py`). Imports almost nothing: whatever is imported here, every user of every verb waits for, and a Ctrl-C that comes before
`main` runs is met by Python's own traceback.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False  # typing itself is one of the things that take their time
if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer


def main() -> None:
    """The console script."""
    try:
        have_streams()
        sys.exit(do(sys.argv[1:]))
    except KeyboardInterrupt:  # while modules were imported
        sys.exit(130)


def do(words: list[str]) -> int:
    """What the words ask for; gives the exit code, or ends the process as typer does."""
    from quire.cli.verbs import VERBS, outcome

    if words and words[0] in VERBS:
        left = False

        def attempt() -> None:
            nonlocal left
            work = straight(words[0], words[1:])
            left = work is None
            if work is not None:
                work()

        code = outcome(attempt)
        if not left:
            return code
    return outcome(through_typer, debug=words[:1] == ["--debug"])


def through_typer() -> None:
    """Everything that is not plain. It ends the process itself, unless something fails on the way."""
    from quire.cli.app import app

    app(prog_name="quire")


def have_streams() -> None:
    """One in the place of each of the three that somebody closed (`>&-`, a service without them), with the number it had.

    Otherwise the next file that is opened takes the number, and what a library prints lands in it. Writing to such a stdout fails
    and is told; what is said on such a stderr, or on one that cannot be written, is for nobody.
    """
    for name in ("stdin", "stdout", "stderr"):  # in order: the lowest number that is free is the one that is missing
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            raw = io.FileIO(number, "r" if name == "stdin" else "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(io.BufferedReader(raw) if name == "stdin" else io.BufferedWriter(raw)))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale without the letters is no reason to fail
    if isinstance(sys.stderr, io.TextIOWrapper):
        heard = io.BufferedWriter(Forgetful(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(heard, sys.stderr.encoding, "backslashreplace", line_buffering=True)


class Forgetful(io.FileIO):
    """A stderr that drops what the system does not take. A buffer that kept it would write it again when Python ends, and that failure
    would decide the exit code."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def straight(verb: str, words: list[str]) -> Callable[[], None] | None:
    """What `words` ask of a verb, where that is plain; None where typer has to look at them, or say what is wrong."""
    import importlib

    from quire.cli.arguments.options import parse

    command = importlib.import_module(f"quire.cli.{verb}").command
    given = parse(command, words)
    return None if given is None else lambda: command(**given)


if __name__ == "__main__":
    main()
