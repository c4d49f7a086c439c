"""`quire list`: the models in the store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from quire.cli.arguments.options import Option
from quire.cli.terminal import ui
from quire.config import DEFAULT_MODEL
from quire.weights.download import hub_cache
from quire.weights.download.progress import mb
from quire.weights.store.catalogue import ENTRIES
from quire.weights.store.store import Store


def command(
    json: Annotated[bool, Option("--json", help="As JSON.")] = False,
    known: Annotated[bool, Option("--known", help="List the short names that can be pulled instead.")] = False,
) -> None:
    """List the models on this machine."""
    if known:
        _known(json)
        return
    store = Store()
    models = store.list()
    cached = hub_cache.listed(store.env)
    if json:
        ui.emit([{**_plain(m), "path": str(store.blob(m))} for m in models] + [_cached(c) for c in cached])
    elif models or cached:
        rows = [(m.name, mb(m.size), m.format, ui.ago(m.pulled_at)) for m in models]
        rows += [(c.name, mb(c.size), "safetensors, in the hub's cache", ui.ago(_when(c))) for c in cached]
        ui.table(("NAME", "SIZE", "FORMAT", "PULLED"), rows)
    else:
        ui.note(f"No models yet. `quire pull {DEFAULT_MODEL}` fetches the default one.")
    for problem in store.problems():
        if problem.fatal:
            ui.note(f"warning: {problem.text}: {problem.cure}")


def _known(json: bool) -> None:
    if json:
        ui.emit(ENTRIES)
    else:
        rows = [(e.name, mb(e.size), e.licence, e.description) for e in ENTRIES]
        ui.table(("NAME", "SIZE", "LICENCE", "WHAT"), rows)


def _when(cached: hub_cache.Cached) -> str:
    return datetime.fromtimestamp(cached.modified, UTC).isoformat(timespec="seconds")


def _cached(cached: hub_cache.Cached) -> dict[str, object]:
    """The models in the hub's cache, by the same names as a manifest."""
    return {
        "name": cached.name,
        "source": cached.name,
        "size": cached.size,
        "pulled_at": _when(cached),
        "format": "safetensors",
        "path": str(cached.path),
    }


def _plain(manifest: object) -> dict[str, object]:
    import msgspec

    return msgspec.to_builtins(manifest)
