"""The store of responses: bounds, chains, files that are opened again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.observe.errors import NotFound, QuireError
from quire.server.database import Database
from quire.server.openai.responses.stored import SCHEMA, Bounds, Record, StoredResponses


def record(name: str, previous: str | None = None, text: str = "x", status: str = "completed") -> Record:
    return Record(
        name,
        {"id": name, "status": status, "created_at": 1},
        previous,
        [{"id": f"{name}-in", "text": text}],
        [{"id": f"{name}-out", "text": text}],
    )


def kept(path: Path | None = None, **bounds: Any) -> StoredResponses:
    return StoredResponses(Database(path, SCHEMA), Bounds(**bounds))


async def names(store: StoredResponses, *all: str) -> list[str]:
    """Which are there, found without a use of them."""
    found = await store._database.run(lambda link: [r["id"] for r in link.execute("SELECT id FROM responses")])
    return [name for name in all if name in found]


async def test_what_was_put_is_got():
    store = kept()
    await store.put(record("a"))
    got = await store.get("a")
    assert got is not None and got == record("a")
    assert got.whole["output"] == [{"id": "a-out", "text": "x"}]
    assert await store.get("b") is None
    await store.put(record("a", text="newer"))  # in its place
    again = await store.get("a")
    assert again is not None and again.input == [{"id": "a-in", "text": "newer"}]


async def test_a_conversation_and_its_items():
    store = kept()
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        await store.put(record(name, previous, text=name))
    assert [i["id"] for i in await store.context("c")] == ["a-in", "a-out", "b-in", "b-out", "c-in", "c-out"]
    assert (await store.item("b-out")) == {"id": "b-out", "text": "b"}
    assert await store.item("b-none") is None
    assert await store.remove("b") and not await store.remove("b")
    assert await store.item("b-out") is None
    with pytest.raises(NotFound, match="'b' is not stored"):
        await store.context("c")
    with pytest.raises(NotFound, match="'nobody'"):
        await store.context("nobody")


async def test_the_count_is_bounded_and_a_use_counts():
    store = kept(count=3)
    for name in ("a", "b", "c"):
        await store.put(record(name))
    await store.get("a")
    await store.put(record("d"))
    assert await names(store, "a", "b", "c", "d") == ["a", "c", "d"]


async def test_a_conversation_keeps_its_beginning():
    store = kept(count=3)
    await store.put(record("a"))
    await store.put(record("b", "a"))
    await store.put(record("x"))
    await store.put(record("c", "b"))  # a use of a and b: x is the oldest now
    assert await names(store, "a", "b", "c", "x") == ["a", "b", "c"]
    assert len(await store.context("c")) == 6
    await store.put(record("y"))  # a, b and c are equally old: the end goes first
    assert await names(store, "a", "b", "c", "y") == ["a", "b", "y"]


async def test_bytes_are_bounded():
    store = kept(bytes=30_000)
    for i in range(10):
        await store.put(record(str(i), text="x" * 2000))
    left = await names(store, *map(str, range(10)))
    assert 4 <= len(left) <= 7 and left == [str(i) for i in range(10 - len(left), 10)]


async def test_age_is_bounded_but_not_of_those_that_run(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("quire.server.openai.responses.stored.time.time", lambda: now[0])
    store = kept(seconds=60)
    await store.put(record("old"))
    await store.put(record("runs", status="in_progress"))
    now[0] += 61
    await store.put(record("new"))
    assert await names(store, "old", "runs", "new") == ["runs", "new"]


async def test_a_file_outlives_the_store(tmp_path):
    path = tmp_path / "responses.db"
    store = kept(path)
    await store.put(record("a"))
    await store.put(record("b", "a", status="in_progress"))
    store.close()
    store = kept(path)
    assert (await store.get("a")) == record("a")
    interrupted = await store.get("b")
    assert interrupted is not None and interrupted.body["status"] == "failed"
    assert interrupted.body["error"]["code"] == "server_error"
    store.close()


async def test_a_transaction_that_fails_changes_nothing(tmp_path):
    store = kept(tmp_path / "responses.db")
    with pytest.raises(KeyError):
        await store.put(Record("a", {"id": "a", "status": "completed"}, None, [{"id": "1"}, {"no": "id"}]))
    assert await store.get("a") is None
    store.close()


async def test_another_versions_file_is_refused(tmp_path):
    Database(tmp_path / "x.db", SCHEMA, version=2).close()
    with pytest.raises(QuireError, match="another version"):
        Database(tmp_path / "x.db", SCHEMA, version=1)


async def test_who_leaves_during_the_first_look_does_not_spoil_it(tmp_path):
    store = kept(tmp_path / "responses.db")
    await store.put(record("a", status="in_progress"))
    store.close()
    store = kept(tmp_path / "responses.db")
    free = threading.Event()
    busy = asyncio.create_task(store._database.run(lambda link: free.wait(30)))
    await asyncio.sleep(0)
    first = asyncio.create_task(store.get("a"))
    await asyncio.sleep(0)
    first.cancel()
    second, third = asyncio.create_task(store.put(record("b", status="queued"))), asyncio.create_task(store.get("a"))
    await asyncio.sleep(0)
    free.set()
    await asyncio.gather(busy, second)
    got = await third
    assert got is not None and got.body["status"] == "failed"
    fresh = await store.get("b")
    assert fresh is not None and fresh.body["status"] == "queued"  # nobody takes it for one that was interrupted
    store.close()
