"""The budget of one render of a chat template: steps, seconds, and characters or items made. Knows nothing of jinja2.

The budget in force is a context variable: a render holds for its own thread or task alone, and code that runs outside
any render (while a template compiles) finds none and stops.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

_CONTAINERS = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class OverBudget(Exception):
    """The template asked for more time or memory than one render may have."""


class Budget:
    """Seconds of work, and characters and items: made or read in all, and in one value. Used in the thread that made it."""

    __slots__ = ("_began", "_deadline", "_given", "_left", "_lists", "_seconds", "value")

    def __init__(self, seconds: float, total: int, value: int, given: Any = None):
        """given: what the template reads, and may not change."""
        self._given = given
        self._lists: frozenset[int] | None = None
        self._seconds = seconds
        self._began = time.thread_time()
        self._deadline = time.monotonic() + seconds
        self._left = total
        self.value = value

    def pay(self, size: int = 0) -> None:
        """A step, and `size` characters or items that it makes or reads."""
        if size > self.value:
            raise OverBudget(f"a value of {size} characters or items: at most {self.value} are allowed")
        self._left -= size + 1
        if self._left < 0:
            raise OverBudget("too much work and text in all")
        if time.monotonic() > self._deadline:
            self._late()

    def _late(self) -> None:
        """End a template whose time is up. What counts is how long this thread worked: a busy machine makes no template hostile."""
        left = self._began + self._seconds - time.thread_time()
        if left <= 0:
            raise OverBudget(f"more than {self._seconds:g} seconds")
        self._deadline = time.monotonic() + left

    def weigh(self, *values: Any) -> None:
        """Pay for reading whole values, nested ones with all that they hold."""
        self.pay(sum(measure(value, self.value) for value in values))

    def owns(self, value: list[Any]) -> bool:
        """Whether a list was made by the template itself. Those that it was given are walked once, and only when asked."""
        if self._lists is None:
            found, stack = set[int](), [self._given]
            while stack:
                item = stack.pop()
                if isinstance(item, Mapping):
                    stack.extend(item.values())
                elif isinstance(item, list):
                    found.add(id(item))
                    stack.extend(item)
            self._lists = frozenset(found)
        return id(value) not in self._lists


in_force: ContextVar[Budget | None] = ContextVar("budget", default=None)


def current() -> Budget:
    """The budget of the render that is going on."""
    budget = in_force.get()
    if budget is None:
        raise OverBudget("nothing may run outside a render")
    return budget


def measure(value: Any, cap: int) -> int:
    """Characters and items in a value, counted as often as they would be printed; stops soon after `cap`."""
    if isinstance(value, str):
        return len(value)
    total, stack = 0, [value]
    while stack and total <= cap:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item) + 2
        elif isinstance(item, dict):
            total += 2 * len(item) + 2
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, _CONTAINERS):
            total += len(item) + 2
            stack.extend(item)
        elif isinstance(item, int):
            total += 4 + item.bit_length() // 3
        elif isinstance(item, range):
            total += 8 * len(item)
        else:
            total += 16
    return total


def depth(value: Any) -> int:
    """The depth of nested lists and mappings. Call it on values that were measured."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        inner: Iterable[Any] = ()
        if isinstance(item, Mapping):
            inner = item.values()
        elif isinstance(item, list | tuple):
            inner = item
        stack.extend((child, level + 1) for child in inner if isinstance(child, list | tuple | Mapping))
    return deepest
