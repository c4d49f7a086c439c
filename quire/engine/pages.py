"""The cached pages of an engine, for who is outside of its loop: who listens to what is cached, and where more may come from.

Nothing here runs before somebody wants it. Then pages get keys (cache/keys.py), as soon as it is known which weights were
loaded; until then they have none, nobody is told of them, and none are loaded. Used from the engine's thread, and knows
no feature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.cache.events import Listener
from quire.cache.keys import Keys
from quire.cache.loading import Loader
from quire.cache.prefix_tree import PrefixTree
from quire.cache.tiers import Tier


class Names(Protocol):
    """What finds out the keys of pages."""

    def start(self) -> None: ...
    def keys(self) -> Keys | None: ...
    def close(self) -> None: ...


class Pages:
    """The pages of one engine's tree. As long as they are not `wanted`, there is nothing to do before a step."""

    def __init__(self, tree: PrefixTree, names: Names, loader: Loader, use: Callable[[Loader], None]) -> None:
        """`use` makes the loader the scheduler's source."""
        self.wanted = False
        self._tree = tree
        self._names = names
        self._loader = loader
        self._use = use
        self._named = False

    def listen(self, listener: Listener) -> None:
        """Tell a listener what is cached, beginning with what is cached already: at once, or from the first step on in which
        pages have keys. See cache/events.py."""
        self._tree.listen(listener)
        self._name()

    def unlisten(self, listener: Listener) -> None:
        """Take a listener off: it is told nothing more."""
        self._tree.unlisten(listener)

    def load_from(self, tier: Tier | None) -> None:
        """Load pages that the tree does not have from that tier from now on. Loads that have begun go on."""
        self._loader.tier = tier
        self._use(self._loader)
        self._name()

    def advance(self) -> None:
        """Do what is due before a step; none of it waits."""
        self._name()
        self._loader.advance()

    def wait(self, seconds: float) -> bool:
        """Return when pages on their way may have come, or after so long. False: there are none to be waited for."""
        return self._loader.wait(seconds)

    def close(self) -> None:
        """Stop what runs in the background, and see to it that nobody writes a page any more."""
        self._loader.close()
        self._names.close()

    def _name(self) -> None:
        if not self.wanted:
            self.wanted = True
            self._names.start()
        if not self._named and (keys := self._names.keys()) is not None:
            self._named = True
            self._tree.name_pages(keys)
