"""Blocking work in daemon threads: the process does not wait for them when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but the process does not wait for the thread when it ends: a lock may be
    held for long, and a download may never end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        try:
            settle = partial(done.set_result, work())
        except BaseException as e:
            settle = partial(done.set_exception, e)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if done.cancelled() else settle())

    threading.Thread(target=body, daemon=True, name="quire-work").start()
    return await done
