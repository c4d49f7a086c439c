"""`quire rm`: remove models from the store."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quire.cli.terminal import ui
from quire.observe.errors import NotFound
from quire.weights.download.progress import mb
from quire.weights.store.store import Store


def command(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Models, as `quire list` names them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove models from the store.

    On a terminal it asks first. A file that two names share stays until both are gone; an unfinished download of a
    name goes with it. A repository (hf:org/repo) goes from the hub's cache, which other tools share. Files named by path
    are never touched.
    """
    store = Store()
    wanted = [store.look_up(name).name for name in names]  # every name is judged before anything is removed
    if not yes and sys.stdin.isatty() and not typer.confirm(f"Remove {', '.join(wanted)}?", err=True):
        raise typer.Exit(1)
    failed = 0
    for name in wanted:
        try:
            freed = store.remove(name)
        except NotFound as e:
            failed += 1
            ui.fail(e)
        else:
            ui.note(f"removed {name} ({mb(freed) + ' freed' if freed else 'its file is shared and stays'})")
    if failed:
        raise typer.Exit(1)
