"""Several keys on one server: what one of them stored is not there for another, in any route, and nobody but the server's own changes it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from quire.cli import serve
from quire.config import Environment, ServerConfig
from quire.observe.errors import BadRequest, NotFound
from quire.server import callers
from quire.server.callers import NOBODY, Caller
from quire.server.database import Database
from quire.server.errors import Forbidden
from quire.server.ollama import store as ollama_store
from quire.server.openai.batches import files
from quire.server.openai.responses import stored
from quire.server.served import Model
from quire.server.server import Server
from quire.weights.store.store import Store
from tests.unit.server.fakes import MODEL, FakeCompleter
from tests.unit.server.openai.test_batches import line, server, until

KEYS = {"": "the-server's-own", "ann": "key-of-ann", "bob": "key-of-bob"}


class Desk:
    """One server, and a client for each key."""

    def __init__(self, http: httpx.AsyncClient, completer: FakeCompleter):
        self.http = http
        self.completer = completer

    async def __call__(self, who: str, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.http.request(method, path, headers={"authorization": f"Bearer {KEYS[who]}"}, **more)

    async def made(self, who: str, path: str, **more: Any) -> dict[str, Any]:
        r = await self(who, "POST", path, **more)
        assert r.status_code == 200, r.text
        return r.json()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    others = tuple((name, key) for name, key in KEYS.items() if name)
    config = ServerConfig(state_dir=tmp_path, api_key=KEYS[""], api_keys=others, runtime_lora=True)
    completer = FakeCompleter()
    async with server(config, completer) as http:
        yield Desk(http, completer)


@pytest.mark.parametrize("other", ["bob", ""])
async def test_stored_responses_are_their_owner_s(desk: Desk, other: str):
    body = {"model": MODEL, "input": "hi"}
    for more in ({}, {"background": True}):
        mine = await desk.made("ann", "/v1/responses", json=body | more)
        path = f"/v1/responses/{mine['id']}"
        for method, at in (
            ("GET", path),
            ("GET", f"{path}?stream=true"),
            ("GET", f"{path}/input_items"),
            ("POST", f"{path}/cancel"),
            ("DELETE", path),
        ):
            r = await desk(other, method, at)
            assert r.status_code == 404 and r.json()["error"]["code"] == "response_not_found", (method, at)
        r = await desk(other, "POST", "/v1/responses", json=body | {"previous_response_id": mine["id"]})
        assert r.status_code == 400 and r.json()["error"]["code"] == "previous_response_not_found"
        assert (await desk("ann", "GET", path)).status_code == 200
    one = await desk.made("ann", "/v1/responses", json=body)
    item = {"type": "item_reference", "id": one["output"][0]["id"]}
    r = await desk(other, "POST", "/v1/responses", json={"input": [item]})
    assert r.status_code == 400 and r.json()["error"]["code"] == "item_not_found"
    again = await desk.made("ann", "/v1/responses", json=body | {"previous_response_id": one["id"], "input": [item]})
    assert (await desk("ann", "DELETE", f"/v1/responses/{again['id']}")).json()["deleted"]


async def test_files_and_batches_are_their_owner_s(desk: Desk):
    sent = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", f"{line(0)}\n".encode())}}
    file = (await desk.made("ann", "/v1/files", **sent))["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for who in ("bob", ""):
        for method, path in (
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("DELETE", f"/v1/files/{file}"),
        ):
            assert (await desk(who, method, path)).status_code == 404, (who, path)
        assert (await desk(who, "GET", "/v1/files")).json()["data"] == []
        assert (await desk(who, "GET", f"/v1/files?after={file}")).status_code == 400
        assert (await desk(who, "POST", "/v1/batches", json=asked)).status_code == 404
    batch = (await desk.made("ann", "/v1/batches", json=asked))["id"]
    desk.http.headers["authorization"] = f"Bearer {KEYS['ann']}"
    done = await until(desk.http, batch)
    del desk.http.headers["authorization"]
    for who in ("bob", ""):
        assert (await desk(who, "GET", f"/v1/batches/{batch}")).status_code == 404
        assert (await desk(who, "POST", f"/v1/batches/{batch}/cancel")).status_code == 404
        assert (await desk(who, "GET", "/v1/batches")).json()["data"] == []
        assert (await desk(who, "GET", f"/v1/batches?after={batch}")).status_code == 400
        assert (await desk(who, "GET", f"/v1/files/{done['output_file_id']}/content")).status_code == 404
    assert [b["id"] for b in (await desk("ann", "GET", "/v1/batches")).json()["data"]] == [batch]
    assert (await desk("ann", "GET", f"/v1/files/{done['output_file_id']}/content")).status_code == 200


async def test_lines_of_a_batch_act_for_its_owner(desk: Desk):
    one = await desk.made("ann", "/v1/responses", json={"input": "hi"})
    ask = {"model": MODEL, "input": "more", "previous_response_id": one["id"], "messages": None}
    text = line(0, "/v1/responses", **ask).replace(', "messages": null', "")
    for who, good in (("ann", 1), ("bob", 0)):
        sent = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", text.encode())}}
        file = (await desk.made(who, "/v1/files", **sent))["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/responses", "completion_window": "24h"}
        batch = (await desk.made(who, "/v1/batches", json=asked))["id"]
        desk.http.headers["authorization"] = f"Bearer {KEYS[who]}"
        done = await until(desk.http, batch)
        assert done["request_counts"]["completed"] == good, (who, done)


async def test_prefixes_are_found_by_their_owner_alone(desk: Desk):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    for who in ("", "ann", "bob", "ann"):
        await desk.made(who, "/v1/chat/completions", json=body)
    await desk.made("ann", "/v1/chat/completions", json=body | {"cache_salt": "s"})
    own, ann, bob, again, salted = [g.namespace for g in desk.completer.seen]
    assert own == "" and ann == again and len({own, ann, bob, salted}) == 4


async def test_only_the_server_s_own_key_changes_it(desk: Desk):
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/x"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ):
        r = await desk("ann", "POST", path, json=body)
        assert r.status_code == 403 and "own key" in r.text
        assert (await desk("", "POST", path, json=body)).status_code != 403


async def test_only_the_server_s_own_key_sees_who_rides_in_steps(desk: Desk):
    assert (await desk("ann", "GET", "/debug/steps")).status_code == 403
    assert (await desk("", "GET", "/debug/steps")).status_code == 200


def test_nor_the_models_of_its_machine(tmp_path: Path):
    service = Server(ServerConfig(), [Model(MODEL)])
    service.store = Store(Environment(home=tmp_path))
    assert ollama_store.writable(service, NOBODY) is service.store
    with pytest.raises(Forbidden, match="own key"):
        ollama_store.writable(service, Caller("ann"))


def test_a_file_of_keys(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# ours\nann  key-of-ann\n\nbob@x.org key-of-bob # until June\n")
    assert callers.read_keys(path) == (("ann", "key-of-ann"), ("bob@x.org", "key-of-bob"))
    for text in (
        "",
        "ann",
        "ann short",
        "a n n",
        "ann key-of-ann\nann key-of-two",
        "ann key-of-ann\nbob key-of-ann",
        "/ abcdefgh",
    ):
        path.write_text(text)
        with pytest.raises(BadRequest):
            callers.read_keys(path)
    with pytest.raises(NotFound):
        callers.read_keys(tmp_path / "none")
    path.write_text("ann key-of-ann\n")
    assert serve._read_keys(path, "another-key") == (("ann", "key-of-ann"),)
    with pytest.raises(typer.BadParameter, match="own key"):
        serve._read_keys(path, "key-of-ann")


def test_what_was_kept_before_there_were_owners(tmp_path: Path):
    old = sqlite3.connect(tmp_path / "old.db")
    old.execute("CREATE TABLE files (id TEXT PRIMARY KEY, name TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,"
                " created INTEGER NOT NULL, expires INTEGER)")  # fmt: skip
    old.execute("INSERT INTO files VALUES ('file-1', 'a', 'batch', 1, 1, NULL)")
    old.execute("PRAGMA user_version = 1")
    old.commit()
    old.close()
    for _ in range(2):
        database = Database(tmp_path / "old.db", files.SCHEMA, later=files.LATER)
        assert database._link is not None
        assert files.find(database._link, "file-1", "") is not None
        assert files.find(database._link, "file-1", "ann") is None
        database.close()
    assert stored.LATER
