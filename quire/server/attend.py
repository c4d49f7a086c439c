"""Work that answers one request as a whole: it is let go when its client leaves, and when the server stops waiting.

The counterpart of Feed for routes without a stream. Knows no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from quire.observe.errors import QuireError
from quire.server.errors import ClientGone
from quire.server.service import Service

T = TypeVar("T")


class _Attended:
    """What a shutdown sees of it."""

    def __init__(self, task: asyncio.Task[Any]):
        self._task = task
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self._task.cancel()


async def attended(service: Service, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientGone, or what the server stops with; both cancel it."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(_left(request))
    own = _Attended(task)
    service.feeds.add(own)
    metrics = service.model_metrics
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if own.failure is not None:
            raise own.failure
        if not task.done():
            raise ClientGone
        return task.result()
    except BaseException as error:
        if metrics is not None and isinstance(error, ClientGone | asyncio.CancelledError):
            metrics.disconnected()
        if metrics is not None and isinstance(error, QuireError):
            metrics.refused(error.code)
        raise
    finally:
        service.feeds.discard(own)
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
