"""An embedder over an engine in this process, for the tests of those who embed and score."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quire.chat.embedder import Embedder
from quire.chat.loading import tokenizer_of
from quire.config import EngineConfig, Environment
from quire.engine.transport.inprocess import InProcessClient
from quire.weights.checkpoint import open_checkpoint


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncIterator[Embedder]:
    """The model at the path, on the native backend unless told otherwise."""
    how: dict[str, Any] = {"backend": "native", "threads": 1, **settings}
    client = InProcessClient(EngineConfig(path=str(path), name="tiny", **how), env=Environment(home=path.parent))
    info = await client.start()
    try:
        with open_checkpoint(path) as checkpoint:
            yield Embedder(client, tokenizer_of(checkpoint), info)
    finally:
        await client.close()
