"""The models that `quire serve` is asked for, as its command line has them: which, what clients call them, and whose adapters are whose.

    quire serve smollm2:135m                        called by its own name
    quire serve chat=smollm2:135m code=./coder.gguf    each by an alias
    quire serve chat,default=smollm2:135m           by two; answers have the first

What cannot be is refused here, before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from quire.weights.store.store import Store

_ALIASES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@,-]*")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One model, and what clients call it: answers have the first name."""

    model: str
    names: tuple[str, ...]
    source: str = ""  # what the store calls it; empty for a file outside of the store

    @property
    def name(self) -> str:
        return self.names[0]


def read_models(store: Store, given: Sequence[str], named: Sequence[str]) -> list[Wanted]:
    """The models in order. `named` has names for the first so many of them, as --name gives them."""
    if len(named) > len(given):
        raise typer.BadParameter(f"{len(named)} names for {len(given)} models", param_hint="--name")
    found: list[Wanted] = []
    for i, text in enumerate(given):
        aliases, model = _split(text)
        if i < len(named):
            if aliases:
                raise typer.BadParameter(f"{text!r} says already what it is called", param_hint="--name")
            aliases = named[i]
        source = store_name(store, model)
        own = source or _file_name(store, model)  # a wrong path is told here
        found.append(Wanted(model, _names(aliases) if aliases else (own,), source))
    taken: set[str] = set()
    for one in found:
        for name in one.names:
            if name in taken:
                raise typer.BadParameter(
                    f"two models would be called {name!r}: give one another name, OTHER={one.model}",
                    param_hint="MODELS",
                )
            taken.add(name)
    return found


def _split(text: str) -> tuple[str, str]:
    """ALIAS=MODEL; an empty alias where there is none. A path may have an equals sign in it."""
    alias, equals, model = text.partition("=")
    if not equals or not model or not _ALIASES.fullmatch(alias) or Path(text).expanduser().exists():
        return "", text
    return alias, model


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name or not name.isprintable():
            raise typer.BadParameter(f"{text!r} cannot be sent and read: take a name of letters", param_hint="--name")
    return tuple(dict.fromkeys(names))


def store_name(store: Store, model: str) -> str:
    """What the store calls a model; empty for a file outside of the store."""
    wanted = store.look_up(model)
    return "" if wanted.references[0].scheme == "file" else wanted.name


def _file_name(store: Store, model: str) -> str:
    """What a file is called unless told otherwise: the last part of its path, since clients need not know the folder."""
    store.resolve(model)
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else path.stem


def read_loras(listed: Sequence[str], models: Sequence[Wanted]) -> dict[str, tuple[tuple[str, str], ...]]:
    """NAME=PATH or NAME@MODEL=PATH of each, checked, by the name of the model that it is for: a wrong path is told before anything is started."""
    called = {name: one.name for one in models for name in one.names}
    found: dict[str, list[tuple[str, str]]] = {}
    taken = set(called)
    for text in listed:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise typer.BadParameter(f"{text!r} is not NAME=PATH", param_hint="--lora")
        before, at, model = name.partition("@")
        if at and before and model in called:
            name, owner = before, called[model]
        elif len(models) == 1:
            owner = models[0].name
        else:
            raise typer.BadParameter(
                f"{text!r} does not say whose adapter it is: write {before or name}@MODEL=PATH, with one of {', '.join(called)}",
                param_hint="--lora",
            )
        if name in taken:
            raise typer.BadParameter(f"the name {name!r} is taken", param_hint="--lora")
        if not Path(path).expanduser().exists():
            raise typer.BadParameter(f"{path!r} does not exist", param_hint="--lora")
        taken.add(name)
        found.setdefault(owner, []).append((name, str(Path(path).expanduser())))
    return {owner: tuple(adapters) for owner, adapters in found.items()}
