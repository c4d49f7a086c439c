"""The cached pages of an engine, for who is outside of its loop: who listens to what is stored and removed.

Nothing here runs before somebody wants it. Then pages get keys (cache/keys.py), as soon as it is known which weights were
loaded; until then they have none, and nobody is told of them. Used from the engine's thread, and knows no feature.
"""

from __future__ import annotations

from typing import Protocol

from quire.cache.events import Listener
from quire.cache.keys import Keys
from quire.cache.prefix_tree import PrefixTree


class Names(Protocol):
    """Who finds out what pages are called."""

    def start(self) -> None: ...
    def keys(self) -> Keys | None: ...
    def close(self) -> None: ...


class Pages:
    """The pages of one engine's tree."""

    def __init__(self, tree: PrefixTree, names: Names) -> None:
        self._tree = tree
        self._names = names
        self._wanted = self._named = False

    def listen(self, listener: Listener) -> None:
        """From now on tell it what is cached, beginning with what is cached already: at once, or from the first step on in
        which pages have keys."""
        self._tree.listen(listener)
        self._name()

    def unlisten(self, listener: Listener) -> None:
        """Tell it nothing more."""
        self._tree.unlisten(listener)

    def advance(self) -> None:
        """What is to be done before a step."""
        if self._wanted and not self._named:
            self._name()

    def close(self) -> None:
        """Stop what runs in the background."""
        self._names.close()

    def _name(self) -> None:
        if not self._wanted:
            self._wanted = True
            self._names.start()
        if not self._named and (keys := self._names.keys()) is not None:
            self._named = True
            self._tree.name_pages(keys)
