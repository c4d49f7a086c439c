"""`quire version`: what is running, for a bug report."""

from __future__ import annotations

import importlib
import platform
from typing import Annotated

from quire.cli.arguments.options import Option
from quire.cli.terminal import ui
from quire.config import VERSION, Environment


def command(json: Annotated[bool, Option("--json", help="As JSON.")] = False) -> None:
    """Version, Python, platform and kernels."""
    facts = gather()
    if json:
        ui.emit(facts)
    else:
        ui.fields((name, value or f"none: {kernels()[1]}") for name, value in facts.items())


def gather() -> dict[str, str | None]:
    """The facts; `kernels` is None where the native extension cannot be loaded."""
    return {
        "quire": VERSION,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "machine": platform.machine(),
        "kernels": kernels()[0],
    }


def kernels() -> tuple[str | None, str]:
    """The kernel set that the native backend will use, or None and why there is none."""
    forced = Environment.read().isa
    try:
        can = list(importlib.import_module("quire.backends.native").available())
    except Exception as e:  # a broken extension can fail in any way, and this command is for finding out
        return None, f"{type(e).__name__}: {e}"
    if forced and forced not in can:
        return None, f"QUIRE_ISA asks for {forced!r}; this CPU can run {', '.join(can)}"
    return forced or can[0], ""
