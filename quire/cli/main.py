"""The command `quire`: the way to the verb that is asked for.

A plain command line goes straight to its verb (`options.parse`); help, `--debug`, mistakes and everything else go through
typer (`app.py`). Imports almost nothing: whatever is imported here, every user of every verb waits for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from quire.cli.verbs import VERBS, outcome


def main() -> None:
    """The console script."""
    verb, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if verb in VERBS:
        left = False

        def attempt() -> None:
            nonlocal left
            work = straight(verb, words)
            left = work is None
            if work is not None:
                work()

        code = outcome(attempt)
        if not left:
            sys.exit(code)
    from quire.cli.app import app

    app(prog_name="quire")


def straight(verb: str, words: list[str]) -> Callable[[], Any] | None:
    """What `words` ask of a verb, where that is plain; None where typer has to look at them, or say what is wrong."""
    from quire.cli.options import parse

    command = importlib.import_module(f"quire.cli.{verb}").command
    given = parse(command, words)
    return None if given is None else lambda: command(**given)


if __name__ == "__main__":
    main()
