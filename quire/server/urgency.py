"""How much later than others' a request's work may run: nothing for a client that waits, much for a batch's line.

A context variable, because it belongs to a request and not to its dialect: set where a line is called, read where work
goes to the engine. Whatever priority the request itself asks for, what is behind stays behind.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

BATCH = 1 << 20  # added to the priority of a batch's lines; lower runs first
_MOST = 2**31 - 1
_behind: ContextVar[int] = ContextVar("behind", default=0)


@contextmanager
def behind(by: int = BATCH) -> Generator[None, None, None]:
    """What is asked of the engine in this block, and in tasks made in it, comes after what everybody else asks."""
    token = _behind.set(by)
    try:
        yield
    finally:
        _behind.reset(token)


def priority(asked: int = 0) -> int:
    """The priority that a request gets."""
    by = _behind.get()
    return min(max(asked, 0) + by, _MOST) if by else asked
