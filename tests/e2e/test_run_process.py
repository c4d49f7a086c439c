"""The default model in a process of its own: the same tokens as in this one, and a death it survives."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.transport.client import EngineClient
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.transport.process_client import ProcessClient
from quire.engine.types import Request
from quire.observe.errors import BadModelFile, EngineDead, NotFound
from quire.runner.params import SamplingParams


async def ask(client: EngineClient, name: str, max_tokens: int = 12, began: asyncio.Event | None = None) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = Request(id=name, tokens=[504, 3575, 282, 4649, 314], sampling=sampling)
    tokens: list[int] = []
    async for event in client.generate(request):
        tokens += event.tokens
        if began is not None:
            began.set()
    return tokens


async def test_the_same_tokens_wherever_the_engine_lives(model_path: Path) -> None:
    config = EngineConfig(path=str(model_path), context=512)
    here, there = InProcessClient(config), ProcessClient(config, on_line=lambda line: None)
    await asyncio.gather(here.start(), there.start())
    try:
        answers = await asyncio.gather(ask(here, "a"), ask(there, "a"))
        assert answers[0] == answers[1]
        assert len(answers[0]) == 12
        began = asyncio.Event()
        task = asyncio.create_task(ask(there, "long", 400, began))
        await began.wait()
        os.kill(there.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await task
        while not there.alive:
            await asyncio.sleep(0.01)
        assert await ask(there, "again") == answers[0]
    finally:
        await asyncio.gather(here.close(), there.close())


async def test_a_bad_file_is_the_readers_own_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 64)
    lines: list[str] = []
    with pytest.raises(BadModelFile, match=r"bad\.gguf"):
        await ProcessClient(EngineConfig(path=str(bad)), on_line=lines.append).start()
    with pytest.raises(NotFound):
        await ProcessClient(EngineConfig(path=str(tmp_path / "none.gguf")), on_line=lines.append).start()
    assert lines == []
