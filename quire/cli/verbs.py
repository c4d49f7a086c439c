"""The verbs, and what they share: exit codes, and the rule that a failure is one line with its cure and never a traceback.

Exit codes: 0 done, 1 failed, 2 wrong usage (typer's), 130 interrupted, 141 nobody reads. A verb is one file of this
folder with a function called `command`, and one row of VERBS. What verbs share is in `arguments/` (how options are declared and read)
and `terminal/` (what is printed). This module imports almost nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

# name -> one line of help. `quire --help` reads this alone, so that it is instant.
VERBS: dict[str, str] = {
    "run": "Chat with a model, or ask it one thing.",
    "serve": "Serve a model over HTTP (OpenAI's, Anthropic's and Ollama's APIs).",
    "launch": "Start a coding agent on a model served here.",
    "embed": "Embed texts, compare them, or score them against a query.",
    "pull": "Fetch models into the store.",
    "list": "List the models on this machine.",
    "show": "Show what a model file contains, and what it takes to run.",
    "rm": "Remove models from the store.",
    "service": "Run `quire serve` in the background, with systemd or launchd.",
    "ps": "List the servers running on this machine.",
    "bench": "Measure how fast a model runs here.",
    "doctor": "Check this machine, and say how to cure what is wrong.",
    "version": "Show the version, Python, platform and kernels.",
}


def outcome(work: Callable[[], Any], debug: bool = False) -> int:
    """Do it, and give the exit code. What typer knows how to report is raised on."""
    try:
        work()
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        hush()
        return 141
    except Exception as e:
        if debug or hasattr(e, "exit_code"):  # usage errors, Exit and Abort: typer prints them and picks their codes
            raise
        from quire.cli.terminal import ui

        ui.fail(e)
        hush()
        return 1


def hush() -> None:
    """Throw away what is still buffered for a stdout that does not take it: it must not fail a second time at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
