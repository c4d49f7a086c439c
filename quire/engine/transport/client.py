"""The protocol by which everything above talks to an engine: in this process, in another, over a network or to a fleet.

Callers cannot tell which. A client is used from one asyncio loop; `generate` yields events until one has `finish`, and
leaving the iteration early (break, cancellation, aclose) aborts the request within one step.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, runtime_checkable

from quire.engine.types import AdapterInfo, EngineInfo, Event, Request, Stats, Vocabulary
from quire.observe.steps import KEPT, StepInfo


class EngineClient(Protocol):
    """One engine, wherever it runs."""

    @property
    def info(self) -> EngineInfo | None:
        """What the engine decided at start; None until it is ready."""
        ...

    @property
    def alive(self) -> bool:
        """False while the engine is starting, restarting or dead."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request. Raises Busy, Unavailable or EngineDead; a bad request ends in an error event."""
        ...

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The bytes of the tokens: needed before the first request with a constraint, and kept over restarts."""
        ...

    def abort(self, request_id: str) -> None:
        """Let a request go; its generator ends with finish "abort"."""
        ...

    def stats(self) -> Stats:
        """The newest snapshot."""
        ...

    async def steps(self, most: int = KEPT) -> list[StepInfo]:
        """The newest steps of the engine, in their order; no more than it keeps. Raises Unavailable where there is none."""
        ...

    async def start(self) -> EngineInfo:
        """Load the model; returns when the first request can run."""
        ...

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Wait for running requests up to the limit, then abort them, and stop the engine."""
        ...


@runtime_checkable
class AdapterClient(Protocol):
    """A client whose engine has adapters that can be changed while it runs."""

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name now."""
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Read an adapter from that path, as the engine sees it. Raises QuireError; then nothing has changed."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Requests that use it finish; no new one may."""
        ...
