"""Ollama's routes about models: what clients probe, the lists, and the store over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gguf
import httpx
import msgspec
import numpy as np
import pytest

from quire import __version__
from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.served import Model
from quire.server.server import Server
from quire.weights.store import catalogue
from quire.weights.store.catalogue import Entry
from quire.weights.store.manifest import Manifest, encode
from quire.weights.store.store import Store
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, client_for
from tests.unit.weights.origin import Body, Fault, Origin

TINY = b"GGUF" + random.Random(5).randbytes(400_000)
SHA = hashlib.sha256(TINY).hexdigest()


def model_file(path: Path, name: str) -> bytes:
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(name)
    w.add_context_length(512)
    w.add_block_count(3)
    w.add_chat_template("{{ messages }}")
    w.add_token_list(["a", "b"])
    w.add_tensor("token_embd.weight", np.zeros((40, 64), np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path.read_bytes()


def put(store: Store, name: str, data: bytes, pulled_at: str = "2026-03-04T05:06:07+00:00") -> Manifest:
    store.place.prepare()
    digest = hashlib.sha256(data).hexdigest()
    made = Manifest(
        name, f"hf:org/{name.partition(':')[0]}/x.gguf", f"sha256:{digest}", len(data), pulled_at, licence="MIT"
    )
    store.place.manifest(name).write_bytes(encode(made))
    store.place.blob(digest).write_bytes(data)
    return made


@pytest.fixture
def service(tmp_store: Store, tmp_path: Path) -> Server:
    """A ready service whose model is in the store, beside another one."""
    completer = FakeCompleter()
    service = Server(ServerConfig(), [Model(MODEL)])
    service.attach(service.models.first, completer.client, completer)
    service.store = tmp_store
    manifest = put(tmp_store, MODEL, model_file(tmp_path / "a.gguf", "a"))
    put(tmp_store, "other:7b", model_file(tmp_path / "b.gguf", "b"), "2026-08-04T05:06:07+00:00")
    service.models.first.path = str(tmp_store.blob(manifest))
    return service


@pytest.fixture
def origin() -> Iterator[Origin]:
    server = Origin()
    yield server
    server.close()


@pytest.fixture
def tiny(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A model in the catalogue that can be had from the local server."""
    origin.files["/m.gguf"] = Body(TINY)
    made = Entry("tiny:1m", (origin.url + "/m.gguf",), SHA, len(TINY), "MIT", "for tests")
    monkeypatch.setattr(catalogue, "ENTRIES", (*catalogue.ENTRIES, made))
    return made


async def test_what_clients_probe():
    async with client_for() as http:
        r = await http.get("/")
        assert (r.status_code, r.text) == (200, "Ollama is running")
        assert (await http.head("/")).status_code == 200
        body = (await http.get("/api/version")).json()
        assert body["quire"] == __version__
        assert tuple(map(int, body["version"].split("."))) >= (0, 6, 4)  # what editors ask for
        assert (await http.head("/api/version")).status_code == 200
        assert (await http.head("/api/tags")).status_code == 200


async def test_tags_are_the_served_model_and_then_the_stores(service: Server):
    async with client_for(service=service) as http:
        served, other = (await http.get("/api/tags")).json()["models"]
    assert (served["name"], served["model"], other["name"]) == (MODEL, MODEL, "other:7b")
    data = Path(str(service.models.first.path)).read_bytes()
    assert (served["size"], served["digest"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert datetime.fromisoformat(served["modified_at"]) == datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    assert served["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "3K",
        "quantization_level": "F16",
    }


async def test_a_broken_header_costs_only_its_details(service: Server):
    assert service.store is not None
    put(service.store, "broken:1b", b"GGUF" + b"\xff" * 100)
    async with client_for(service=service) as http:
        models = (await http.get("/api/tags")).json()["models"]
    broken = next(m for m in models if m["name"] == "broken:1b")
    assert (broken["size"], broken["details"]["format"], broken["details"]["family"]) == (104, "gguf", "")
    assert len(models) == 3


async def test_a_served_file_outside_the_store(tmp_path: Path):
    completer = FakeCompleter()
    service = Server(ServerConfig(), [Model(MODEL)])
    async with client_for(service=service) as http:
        assert (await http.get("/api/tags")).json() == {"models": []}  # not found yet
        assert (await http.get("/api/ps")).json() == {"models": []}
        data = model_file(tmp_path / "mine.gguf", "a")
        service.models.first.path = str(tmp_path / "mine.gguf")
        service.attach(service.models.first, completer.client, completer)
        (one,) = (await http.get("/api/tags")).json()["models"]
        assert (one["name"], one["size"], one["digest"]) == (MODEL, len(data), "")
        assert str(tmp_path) not in (await http.post("/api/show", json={"model": MODEL})).text
        r = await http.post("/api/pull", json={"model": "smollm2"})
        assert (r.status_code, "store" in r.json()["error"]) == (501, True)


async def test_show(service: Server):
    async with client_for(service=service) as http:
        body = (await http.post("/api/show", json={"model": MODEL})).json()
        other = (await http.post("/api/show", json={"name": "other:7b:latest"})).json()
        missing = await http.post("/api/show", json={"model": "nope"})
        verbose = await http.post("/api/show", json={"model": MODEL, "verbose": True})
        nobody = await http.post("/api/show", json={})
    assert body["template"] == "{{ messages }}"
    assert body["capabilities"] == ["completion", "tools"]  # by the general prompt
    assert service.models.first.completer is not None
    service.models.first.completer.answer_format = CALLER
    async with client_for(service=service) as http:
        able = (await http.post("/api/show", json={"model": MODEL})).json()
        idle = (await http.post("/api/show", json={"name": "other:7b"})).json()
    assert able["capabilities"] == ["completion", "tools", "thinking"]
    assert idle["capabilities"] == ["completion"]
    assert body["license"] == "MIT"
    info = body["model_info"]
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 512)
    assert (info["general.parameter_count"], info["llama.block_count"]) == (2560, 3)
    assert info["tokenizer.ggml.tokens"] is None
    assert "tokenizer.chat_template" not in info
    assert dict(line.split() for line in body["parameters"].splitlines())["temperature"] == "0.8"
    assert other["modelfile"].endswith("FROM other:7b\n")
    assert missing.status_code == 404
    assert MODEL in missing.json()["error"] and "other:7b" in missing.json()["error"]
    assert (verbose.status_code, nobody.status_code) == (400, 400)


async def test_ps_says_what_is_loaded_and_that_it_stays(service: Server):
    async with client_for(service=service) as http:
        (one,) = (await http.get("/api/ps")).json()["models"]
        assert (one["name"], one["size"], one["size_vram"], one["context_length"]) == (MODEL, 2000, 0, 200)
        assert one["digest"] and one["details"]["family"] == "llama"
        assert datetime.fromisoformat(one["expires_at"]).year > 2200
        info = service.models.first.info
        service.models.first.completer.info = msgspec.structs.replace(info, backend="cuda (NVIDIA H200, bfloat16)")
        (one,) = (await http.get("/api/ps")).json()["models"]
        assert one["size_vram"] == 2000
        service.models.first.client.alive = False
        assert (await http.get("/api/ps")).json() == {"models": []}


# The store


async def test_pull_tells_how_it_goes(service: Server, tiny: Entry, origin: Origin):
    async with client_for(service=service) as http:
        r = await http.post("/api/pull", json={"model": "tiny:1m"})
    assert r.headers["content-type"] == "application/x-ndjson"
    told = [json.loads(line) for line in r.text.splitlines()]
    assert told[0] == {"status": "pulling tiny:1m"}
    assert told[-1] == {"status": "success"}
    moves = [t for t in told if "completed" in t]
    assert all(t["total"] == len(TINY) and t["digest"] == f"sha256:{SHA}" for t in moves)
    assert moves[-1]["completed"] == len(TINY)
    assert [t["completed"] for t in moves] == sorted(t["completed"] for t in moves)
    assert service.store is not None
    assert service.store.resolve("tiny:1m").read_bytes() == TINY


async def test_pull_in_one_answer_and_what_is_here_already(service: Server, tiny: Entry, origin: Origin):
    async with client_for(service=service) as http:
        for _ in range(2):
            r = await http.post("/api/pull", json={"name": "tiny:1m", "stream": False})
            assert (r.status_code, r.json()) == (200, {"status": "success"})
        assert len(origin.seen) == 1
        origin.files.clear()
        assert service.store is not None
        service.store.remove("tiny:1m")
        r = await http.post("/api/pull", json={"name": "tiny:1m", "stream": False})
        assert r.status_code in (404, 502)
        assert list(r.json()) == ["error"]
        r = await http.post("/api/pull", json={"name": "tiny:1m"})
        assert r.status_code == 200
        assert list(json.loads(r.text.splitlines()[-1])) == ["error"]


async def test_a_pull_ends_with_its_client_and_keeps_what_came(service: Server, tiny: Entry, origin: Origin):
    go = threading.Event()
    origin.faults = [Fault(pause=go)]
    app = create_app(ServerConfig(), service)
    left = asyncio.Event()
    body = [{"type": "http.request", "body": b'{"model": "tiny:1m"}', "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/api/pull",
        "raw_path": b"/api/pull",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    pulling = asyncio.create_task(app(scope, receive, send))
    while not origin.seen:
        await asyncio.sleep(0.01)
    assert not pulling.done()
    left.set()
    await asyncio.wait_for(pulling, 20)  # the client is let go at once, whatever the network does
    assert not service.running
    go.set()
    assert service.store is not None
    for _ in range(200):
        if not any(t.name == "pull" for t in threading.enumerate()):
            break
        await asyncio.sleep(0.02)
    assert not any(t.name == "pull" for t in threading.enumerate())
    assert service.store.get("tiny:1m") is None  # it was not finished for nobody
    assert b"success" not in b"".join(m.get("body", b"") for m in sent)


async def test_a_few_pulls_at_a_time(service: Server, tiny: Entry, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    from quire.server.ollama import store as ollama_store

    monkeypatch.setattr(ollama_store, "MAX_PULLS", 1)
    go = threading.Event()
    origin.faults = [Fault(pause=go)]
    async with client_for(service=service) as http:
        first = asyncio.create_task(http.post("/api/pull", json={"model": "tiny:1m"}))
        while not origin.seen:
            await asyncio.sleep(0.01)
        r = await http.post("/api/pull", json={"model": "tiny:1m"})
        assert (r.status_code, r.headers["retry-after"]) == (503, "30")
        go.set()
        assert (await first).text.splitlines()[-1] == '{"status":"success"}'
        r = await http.post("/api/pull", json={"model": "tiny:1m", "stream": False})
        assert r.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        ({}, 400, "model"),
        ({"model": "nosuch:1b"}, 404, "nosuch:1b"),
        ({"model": "/etc/passwd"}, 400, "path"),
        ({"model": "~/x.gguf"}, 400, "path"),
        ({"model": "http://169.254.169.254/x.gguf"}, 400, "address"),
        ({"model": "hf.co/org/repo"}, 400, "hf:org/repo"),
        ({"model": "smollm2", "insecure": True}, 400, "insecure"),
    ],
)
async def test_pulls_that_are_refused(service: Server, body: dict[str, Any], status: int, names: str):
    async with client_for(service=service) as http:
        r = await http.post("/api/pull", json=body)
    assert r.status_code == status, r.text
    assert names in r.json()["error"]


async def test_delete(service: Server):
    assert service.store is not None
    async with client_for(service=service) as http:

        async def delete(name: str) -> httpx.Response:
            return await http.request("DELETE", "/api/delete", json={"model": name})

        served = await delete(MODEL)
        assert (served.status_code, "being served" in served.json()["error"]) == (400, True)
        assert (await delete("nope")).status_code == 404
        assert (await delete("/etc/passwd")).status_code == 404
        assert (await delete("other:7b")).status_code == 200
        assert (await delete("other:7b")).status_code == 404
        assert [m["name"] for m in (await http.get("/api/tags")).json()["models"]] == [MODEL]
    assert service.store.get(MODEL) is not None


async def test_what_is_served_by_an_alias_is_not_deleted(tmp_store: Store, tmp_path: Path):
    """By any of its names: its alias, and the store's. Other names of the store go, made ones and copies of it too."""
    service = Server(ServerConfig(), [Model("chat", source="other:7b")])
    service.store = tmp_store
    blob = tmp_store.blob(put(tmp_store, "other:7b", model_file(tmp_path / "b.gguf", "b")))
    service.models.first.path = str(blob)
    tmp_store.copy("other:7b", "mine")
    async with client_for(service=service) as http:

        async def delete(name: str) -> httpx.Response:
            return await http.request("DELETE", "/api/delete", json={"model": name})

        for name in ("other:7b", "chat", "chat:latest"):
            r = await delete(name)
            assert (r.status_code, list(r.json())) == (400, ["error"]), name
            assert "is being served" in r.json()["error"], name
        assert "other:7b is being served, as chat" in (await delete("other:7b")).json()["error"]
        assert (await delete("mine")).status_code == 200
    assert tmp_store.get("other:7b") is not None and blob.exists()


async def test_copy_is_a_second_name(service: Server):
    assert service.store is not None
    async with client_for(service=service) as http:

        async def copy(source: str, destination: str) -> httpx.Response:
            return await http.post("/api/copy", json={"source": source, "destination": destination})

        assert (await copy("other:7b", "mine:latest")).status_code == 200
        assert (await copy("other:7b", "mine")).status_code == 200  # the same again
        names = {m["name"]: m["digest"] for m in (await http.get("/api/tags")).json()["models"]}
        assert names["mine"] == names["other:7b"]
        for source, destination, status in (
            ("nope", "x", 404),
            (MODEL, "mine", 400),  # taken
            ("other:7b", "smollm2:135m", 400),  # the catalogue's
            ("other:7b", "../x", 400),
            ("other:7b", "", 400),
        ):
            r = await copy(source, destination)
            assert (r.status_code, list(r.json())) == (status, ["error"]), (source, destination)
        blob = service.store.resolve("other:7b")
        service.store.remove("other:7b")
        assert service.store.resolve("mine") == blob  # the content goes with its last name
        service.store.remove("mine")
        assert not blob.exists()


async def test_the_store_is_not_changed_from_other_machines_without_a_key(service: Server):
    service.config = ServerConfig(host="0.0.0.0")
    async with client_for(service=service) as http:
        for method, path, body in (
            ("POST", "/api/pull", {"model": "smollm2"}),
            ("DELETE", "/api/delete", {"model": "other:7b"}),
            ("POST", "/api/copy", {"source": "other:7b", "destination": "x"}),
        ):
            r = await http.request(method, path, json=body)
            assert (r.status_code, "QUIRE_API_KEY" in r.json()["error"]) == (403, True)
        service.config = ServerConfig(host="0.0.0.0", api_key="k")
        r = await http.request("DELETE", "/api/delete", json={"model": "other:7b"})
        assert r.status_code == 200


async def test_what_is_not_here_is_named(service: Server):
    async with client_for(service=service) as http:
        r = await http.post("/api/push", content=b"{}")
    assert r.status_code == 501
    assert "push" in r.json()["error"]


async def test_a_pull_that_nobody_waits_for_stops_at_the_next_bytes(service: Server):
    from quire.server.ollama.store import Gone, Pulling

    pulling = Pulling(service, "tiny:1m", None, lambda _: None)
    pulling.start(100, "tiny:1m", 10)
    pulling.advance(5)
    pulling.fail(Exception("gone"))
    with pytest.raises(Gone):
        pulling.advance(5)
    with pytest.raises(Gone):
        pulling.start(100, "tiny:1m")
