"""Streams and files of batches keep what an answer says off the ends of their lines: clients disagree on what ends one."""

from __future__ import annotations

from typing import Any

import pytest

from quire.chat.types import Chunk
from quire.server.openai.batches.journal import Line
from quire.server.openai.batches.lines import answered, not_run
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for
from tests.unit.server.scripts import script

TEXT = "a\u0085b\u2028c\u2029d"
TALK: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": TALK, "stream": True},
    "/v1/completions": {"model": MODEL, "prompt": "hi", "stream": True},
    "/v1/responses": {"model": MODEL, "input": "hi", "stream": True},
    "/v1/messages": {"model": MODEL, "messages": TALK, "max_tokens": 9, "stream": True},
    "/generate_stream": {"inputs": "hi"},
    "/api/chat": {"model": MODEL, "messages": TALK},
    "/api/generate": {"model": MODEL, "prompt": "hi"},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_every_line_is_whole_for_every_client(path: str):
    completer = FakeCompleter(context=400)
    completer.script = script(Chunk(text=TEXT))
    async with client_for(completer) as http:
        r = await http.post(path, json=ROUTES[path])
    assert r.status_code == 200, r.text
    assert r.text.splitlines() == r.text.split("\n")[:-1]
    assert "a\\u0085b\\u2028c\\u2029d" in r.text


def test_a_line_of_a_batch_is_whole_too():
    line = Line("batch_1", 0, TEXT, 0, 0)
    for told in (answered(line, 200, f'"{TEXT}"'.encode()), not_run(line, "bad", TEXT)):
        assert len(told.decode().splitlines()) == 1
        assert told.count(b"a\\u0085b\\u2028c\\u2029d") == 2
