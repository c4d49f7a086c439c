"""/v1/batches and its queue: through the same routes as HTTP, exactly once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai.types import Batch

from quire.config import ServerConfig
from quire.engine.types import Event, Receipt, Request
from quire.observe.errors import Busy, EngineDead
from quire.server.callers import BATCH
from quire.server.openai.batches import files, journal, lines, queue
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, service_over

CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig(state_dir=tmp_path, batch_lines=3)


@asynccontextmanager
async def server(config: ServerConfig, completer: FakeCompleter | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A server that ends as a killed one does: its tasks are dropped, and nothing is told to anybody."""
    service = service_over(completer or FakeCompleter(), config)
    async with client_for(service=service, config=config) as http:
        for job in service.jobs:
            job.start()  # as a loaded model does
        try:
            yield http
        finally:
            for job in service.jobs:
                await job.stop()
            service.close()


def line(i: int | str, url: str = CHAT, **body: Any) -> str:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": f"n{i}"}]} | body
    return json.dumps({"custom_id": f"id{i}", "method": "POST", "url": url, "body": asked})


async def begin(
    http: httpx.AsyncClient, text: str | bytes, endpoint: str = CHAT, window: str = "24h", **more: Any
) -> str:
    data = text if isinstance(text, bytes) else text.encode()
    file = (await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})).json()["id"]
    asked = {"input_file_id": file, "endpoint": endpoint, "completion_window": window} | more
    r = await http.post("/v1/batches", json=asked)
    assert r.status_code == 200, r.text
    Batch.model_validate(r.json())
    assert r.json()["status"] == "validating"
    return r.json()["id"]


async def until(http: httpx.AsyncClient, batch: str, *states: str, done: int = 0) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            body = (await http.get(f"/v1/batches/{batch}")).json()
            if body["status"] in (states or OVER) and body["request_counts"]["completed"] >= done:
                Batch.model_validate(body)
                return body
            await asyncio.sleep(0.005)


async def read(http: httpx.AsyncClient, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    r = await http.get(f"/v1/files/{file}/content")
    assert r.status_code == 200
    return [json.loads(text) for text in r.text.splitlines()]


async def test_a_batch_from_end_to_end(config):
    completer = FakeCompleter()
    async with server(config, completer) as http:
        text = "\n".join([line(0), line(1, temperature=-1), "", line(2), line(3, model="other"), line(4, stream=True)])
        batch = await begin(http, text, metadata={"a": "b"})
        body = await until(http, batch)
        output, faults = await read(http, body.get("output_file_id")), await read(http, body.get("error_file_id"))
        listed = (await http.get("/v1/batches")).json()
        files = (await http.get("/v1/files?purpose=batch_output")).json()["data"]
    assert body["status"] == "completed"
    assert body["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
    assert (body["metadata"], body["endpoint"], body.get("errors"), body["model"]) == ({"a": "b"}, CHAT, None, MODEL)
    assert body["created_at"] <= body["in_progress_at"] <= body["finalizing_at"] <= body["completed_at"]
    assert [o["custom_id"] for o in output] == ["id0", "id2"]
    first = output[0]
    assert first["error"] is None and first["response"]["status_code"] == 200 and first["response"]["request_id"]
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "Hello, wörld"
    assert [f["custom_id"] for f in faults] == ["id1", "id3", "id4"]
    assert [f["response"]["status_code"] for f in faults] == [400, 404, 400]
    assert [f["response"]["body"]["error"]["param"] for f in faults] == ["temperature", "model", "stream"]
    assert len({o["id"] for o in output + faults}) == 5
    assert body["usage"]["output_tokens"] == 26 and body["usage"]["input_tokens"] == 2 * len(b"user:n0\n")
    assert listed["data"] == [body] and {f["id"] for f in files} == {body["output_file_id"], body["error_file_id"]}
    assert all(g.priority == BATCH for g in completer.seen)


async def test_lines_stay_behind_whatever_they_ask_for(config):
    completer = FakeCompleter()
    async with server(config, completer) as http:
        await until(http, await begin(http, line(0, priority=-1_000_000) + "\n" + line(1, priority=7)))
        await http.post(CHAT, json={"messages": [{"role": "user", "content": "now"}]})
    assert sorted(g.priority for g in completer.seen) == [0, BATCH, BATCH + 7]


async def test_only_so_many_lines_at_a_time(config):
    completer = FakeCompleter()
    completer.delay = 0.002
    async with server(config, completer) as http:
        one = await begin(http, "\n".join(line(i) for i in range(8)))
        two = await begin(http, "\n".join(line(i) for i in range(4)))
        await until(http, two)
        assert (await until(http, one))["request_counts"]["completed"] == 8
    assert completer.most == 3
    order = [bytes(g.prompt).decode() for g in completer.seen]
    assert order.index("user:n7\n") < len(order) - 3  # the first batch's lines go first


async def test_embeddings_stay_behind_too(config):
    completer = FakeCompleter()
    completer.info = msgspec.structs.replace(completer.info, task="embed", dimensions=2)
    asked: list[Request] = []

    async def generate(request: Request) -> AsyncIterator[Event]:
        asked.append(request)
        yield Event(id=request.id, finish="stop", vector=b"\0\0\x80?" * 2, receipt=Receipt())

    completer.client.generate = generate
    text = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": {"input": [[1, 2]]}})
    async with server(config, completer) as http:
        done = await until(http, await begin(http, text, "/v1/embeddings"))
        (output,) = await read(http, done["output_file_id"])
        assert (await http.post("/v1/embeddings", json={"input": [3, 4]})).status_code == 200
    assert output["response"]["body"]["data"][0]["embedding"] == [1.0, 1.0]
    assert [(r.tokens, r.priority) for r in asked] == [([1, 2], BATCH), ([3, 4], 0)]


async def test_a_key_is_for_strangers(tmp_path):
    """Lines need none: who may make a batch may run it."""
    config = ServerConfig(state_dir=tmp_path, api_key="secret", host="0.0.0.0")
    async with server(config) as http:
        assert (await http.get("/v1/batches")).status_code == 401
        assert (await http.get("/v1/files")).status_code == 401
        http.headers["authorization"] = "Bearer secret"
        assert (await until(http, await begin(http, line(0))))["request_counts"]["completed"] == 1


@pytest.mark.parametrize(
    ("endpoint", "body", "reaches"),
    [
        ("/v1/completions", {"prompt": "p"}, lambda b: b["choices"][0]["text"]),
        ("/v1/responses", {"input": "p"}, lambda b: b["output"][0]["content"][0]["text"]),
    ],
)
async def test_other_endpoints(config, endpoint, body, reaches):
    text = json.dumps({"custom_id": "x", "method": "POST", "url": endpoint, "body": body})
    async with server(config) as http:
        done = await until(http, await begin(http, text, endpoint))
        (output,) = await read(http, done["output_file_id"])
        assert reaches(output["response"]["body"]) == "Hello, wörld"
        assert done["usage"]["output_tokens"] == 13
        if endpoint == "/v1/responses":
            stored = await http.get(f"/v1/responses/{output['response']['body']['id']}")
            assert stored.json() == output["response"]["body"]


async def test_embeddings_are_refused_by_a_model_that_has_none(config):
    text = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": {"input": "p"}})
    async with server(config) as http:
        done = await until(http, await begin(http, text, "/v1/embeddings"))
        (fault,) = await read(http, done["error_file_id"])
        assert fault["response"]["body"]["error"]["code"] == "unsupported_task"
        assert "output_file_id" not in done


BAD_LINES: list[tuple[str | bytes, str]] = [
    ("not json", "invalid_json_line"),
    ('"text"', "invalid_request"),
    ("[" * 100_000, "invalid_request"),
    ('{"body": ' + "[" * 100_000, "invalid_json_line"),
    ('{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}', "invalid_request"),
    ('{"custom_id": "", "method": "POST", "url": "/v1/chat/completions", "body": {}}', "invalid_custom_id"),
    ('{"custom_id": "a", "method": "GET", "url": "/v1/chat/completions", "body": {}}', "invalid_method"),
    ('{"custom_id": "a", "method": "POST", "url": "/v1/models", "body": {}}', "mismatched_endpoint"),
    ('{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": [1]}', "invalid_body"),
    (line(0), "duplicate_custom_id"),
    ("x" * 200_000, "line_too_long"),
    (b"\xff\xfe\x00", "invalid_json_line"),
]


async def test_a_bad_line_fails_the_batch_with_its_number(tmp_path):
    config = ServerConfig(state_dir=tmp_path, max_body=150_000)
    completer = FakeCompleter()
    async with server(config, completer) as http:
        for bad, code in BAD_LINES:
            raw = bad if isinstance(bad, bytes) else bad.encode()
            body = await until(http, await begin(http, line(0).encode() + b"\n" + raw + b"\n" + line(9).encode()))
            assert body["status"] == "failed" and body["failed_at"] and "output_file_id" not in body
            (error,) = body["errors"]["data"]
            assert (error["code"], error["line"]) == (code, 2), (bad[:80], error)
    assert completer.seen == []  # nothing ran


async def test_bad_files(config, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINES", 3)
    monkeypatch.setattr(lines, "MAX_FAULTS", 5)
    async with server(config) as http:
        empty = await until(http, await begin(http, "\n \n"))
        many = await until(http, await begin(http, "\n".join(line(i) for i in range(4))))
        rubbish = await until(http, await begin(http, "x\n" * 100))
    assert [b["status"] for b in (empty, many, rubbish)] == ["failed"] * 3
    assert empty["errors"]["data"][0]["code"] == "empty_file"
    assert many["errors"]["data"][0]["code"] == "too_many_requests"
    assert [e["line"] for e in rubbish["errors"]["data"]] == [1, 2, 3, 4, 5]


async def test_refusals(config):
    async with server(config) as http:
        http.headers["x-quire-strict"] = "true"
        file = (await http.post("/v1/files", data={"purpose": "evals"}, files={"file": ("f", b"x")})).json()["id"]
        good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        for more, status, param in (
            ({}, 400, "input_file_id"),  # its purpose
            ({"input_file_id": "file-none"}, 404, "id"),
            ({"endpoint": "/v1/messages"}, 400, "endpoint"),
            ({"completion_window": "soon"}, 400, "completion_window"),
            ({"completion_window": "8d"}, 400, "completion_window"),
            ({"color": 1}, 400, "color"),
            ({"metadata": {"a": "x" * 600}}, 400, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ):
            r = await http.post("/v1/batches", json=good | more)
            assert r.status_code == status and r.json()["error"]["param"] == param, r.text
        assert (await http.get("/v1/batches/batch_none")).status_code == 404
        assert (await http.post("/v1/batches/batch_none/cancel")).status_code == 404
        done = await begin(http, line(0))
        await until(http, done)
        r = await http.post(f"/v1/batches/{done}/cancel")
        assert r.status_code == 400 and r.json()["error"]["code"] == "batch_not_cancellable"
        ids = [done] + [await begin(http, line(0)) for _ in range(2)]
        page = (await http.get("/v1/batches?limit=2")).json()
        rest = (await http.get(f"/v1/batches?limit=2&after={page['last_id']}")).json()
        assert [b["id"] for b in page["data"] + rest["data"]] == ids[::-1]
        assert page["has_more"] and not rest["has_more"]


async def test_cancelling_keeps_what_is_done(config):
    completer = FakeCompleter()
    completer.gate, completer.free = asyncio.Event(), 5
    async with server(config, completer) as http:
        batch = await begin(http, "\n".join(line(i) for i in range(30)))
        file = (await http.get(f"/v1/batches/{batch}")).json()["input_file_id"]
        await until(http, batch, "in_progress", done=5)
        r = await http.delete(f"/v1/files/{file}")
        assert r.status_code == 409 and r.json()["error"]["code"] == "file_in_use"
        while completer.held < 3:
            await asyncio.sleep(0.001)
        assert completer.running == 3
        assert (await http.post(f"/v1/batches/{batch}/cancel")).json()["status"] == "cancelling"
        body = await until(http, batch)
        assert completer.running == 0
        output, faults = await read(http, body.get("output_file_id")), await read(http, body.get("error_file_id"))
        assert body["status"] == "cancelled" and body["cancelled_at"] >= body["cancelling_at"]
        assert (len(output), len(faults)) == (5, 25)
        assert {f["error"]["code"] for f in faults} == {"batch_cancelled"} and faults[0]["response"] is None
        counts = body["request_counts"]
        assert (counts["completed"], counts["failed"]) == (len(output), len(faults))
        assert (await http.delete(f"/v1/files/{file}")).status_code == 200


async def test_expiring(config):
    completer = FakeCompleter()
    completer.gate, completer.free = asyncio.Event(), 5
    async with server(config, completer) as http:
        batch = await begin(http, "\n".join(line(i) for i in range(100)), window="2s")
        body = await until(http, batch)
        output, faults = await read(http, body.get("output_file_id")), await read(http, body.get("error_file_id"))
    assert body["status"] == "expired" and body["expired_at"] >= body["expires_at"]
    assert (len(output), len(faults)) == (5, 95) and faults[-1]["error"]["code"] == "batch_expired"


async def test_no_line_is_lost_or_doubled_when_the_server_is_killed(config):
    """Killed again and again in the middle; the journal is all that a new server has."""
    total = 20
    ran: list[str] = []
    batch = ""
    for life in range(30):
        completer = FakeCompleter()
        completer.delay = 0.001
        async with server(config, completer) as http:
            batch = batch or await begin(http, "\n".join(line(i) for i in range(total)))
            deadline = asyncio.get_running_loop().time() + 0.02 + 0.002 * life
            while asyncio.get_running_loop().time() < deadline:
                body = (await http.get(f"/v1/batches/{batch}")).json()
                if body["status"] in OVER:
                    break
                await asyncio.sleep(0.002)
        ran += [bytes(g.prompt).decode() for g in completer.seen]
        if body["status"] in OVER:
            break
    assert life >= 2, "it was never killed in the middle"
    async with server(config) as http:
        body = await until(http, batch)
        output = await read(http, body.get("output_file_id"))
    assert body["status"] == "completed" and "error_file_id" not in body
    assert body["request_counts"] == {"total": total, "completed": total, "failed": 0}
    assert [o["custom_id"] for o in output] == [f"id{i}" for i in range(total)]
    assert len(ran) > total  # some were computed twice, and told once


@pytest.mark.parametrize("at", ["add", "begin", "finalize", "results", "close"])
async def test_a_death_between_any_two_steps(config, at, monkeypatch):
    """The process dies just after a step of the journal, or just before the next."""

    async with server(config) as http:
        journal = http._transport.app.state.batches.journal
        step = getattr(journal, at)
        dead = asyncio.Event()

        async def dying(*args: Any) -> Any:
            if at != "close":
                await step(*args)
            dead.set()
            await asyncio.Event().wait()  # never comes back: what follows does not happen

        monkeypatch.setattr(journal, at, dying, raising=False)
        batch = await begin(http, "\n".join([line(0), line(1, temperature=-1), line(2)]))
        async with asyncio.timeout(10):
            await dead.wait()
    async with server(config) as http:
        body = await until(http, batch)
        output, faults = await read(http, body.get("output_file_id")), await read(http, body.get("error_file_id"))
        files = (await http.get("/v1/files")).json()["data"]
    assert body["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert [o["custom_id"] for o in output] == ["id0", "id2"] and [f["custom_id"] for f in faults] == ["id1"]
    assert len(files) == 3
    on_disk = {p.name for p in (config.state_dir / "files").iterdir()}
    assert on_disk == {f["id"] for f in files}  # no strays


async def test_a_result_is_told_once_and_files_keep_their_ids(config):
    """The journal itself: what is written twice is written once."""
    async with server(config) as http:
        app = http._transport.app
        book = app.state.batches.journal
        await app.state.server.jobs[0].stop()
        app.state.server.jobs[0].start = lambda: None
        batch = await begin(http, line(0))
        one = journal.Line(batch, 0, "id0", 0, 1)
        await book.add([one, journal.Line(batch, 1, "id1", 0, 1)])
        assert await book.begin(batch, 2) and not await book.begin(batch, 2)
        assert await book.record(one, journal.COMPLETED, b"first")
        assert not await book.record(one, journal.COMPLETED, b"second")
        assert not await book.record(one, journal.FAILED, b"third")
        row = (await book.get(batch)).row
        assert (row["completed"], row["failed"]) == (1, 0)
        assert [(found.n, result) for found, result in await book.results(batch, journal.COMPLETED, -1)] == [
            (0, b"first")
        ]
        assert [found.n for found in await book.waiting(5, set(), [MODEL])] == [1]
        assert await book.waiting(5, {(batch, 1)}, MODEL) == []
        closing = await book.finalize(await book.get(batch), "completed")
        again = await book.finalize(await book.get(batch), "expired")
        assert (again.row["output_file"], again.row["outcome"]) == (closing.row["output_file"], "completed")
        assert "output_file_id" not in closing.body()  # not before it can be read
        assert (await http.post(f"/v1/batches/{batch}/cancel")).status_code == 400
        stale = await book.finalize(closing, "completed")
        assert stale.status == "finalizing"


async def test_cancelled_and_expired_while_the_server_was_down(config):
    async with server(config) as http:
        service = http._transport.app.state.server
        for job in service.jobs:
            await job.stop()
        service.jobs[0].start = lambda: None  # nothing runs: the server dies before it can
        cancelled = await begin(http, line(0))
        expired = await begin(http, line(0))
        await http.post(f"/v1/batches/{cancelled}/cancel")
        past = "UPDATE batches SET expires = created WHERE id = ?"
        book = http._transport.app.state.batches.journal
        await book._run(lambda link: link.execute(past, (expired,)))
    async with server(config) as http:
        assert (await until(http, cancelled))["status"] == "cancelled"
        assert (await until(http, expired))["status"] == "expired"


async def test_a_server_that_is_busy_is_no_lines_fault(config, monkeypatch):
    monkeypatch.setattr(queue, "PATIENCE", (0.001, 0.002))
    completer = FakeCompleter()
    completer.raises = Busy("full")
    async with server(config, completer) as http:
        batch = await begin(http, line(0))
        await until(http, batch, "in_progress")
        completer.client.alive = False  # the engine restarts
        await asyncio.sleep(0.05)
        assert (await http.get(f"/v1/batches/{batch}")).json()["status"] == "in_progress"
        completer.client.alive, completer.raises = True, None
        assert (await until(http, batch))["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_line_that_kills_its_engine_is_given_up(config, monkeypatch):
    monkeypatch.setattr(queue, "PATIENCE", (0.001, 0.002))
    completer = FakeCompleter()
    completer.dies = EngineDead("died")
    async with server(config, completer) as http:
        body = await until(http, await begin(http, line(0)))
        (fault,) = await read(http, body.get("error_file_id"))
    assert len(completer.seen) == queue.DEATHS
    assert fault["response"]["status_code"] == 503
    assert fault["response"]["body"]["error"]["code"] == "engine_dead"


async def test_a_failure_of_ours_is_an_error_line(config):
    completer = FakeCompleter()
    completer.dies = ZeroDivisionError()
    async with server(config, completer) as http:
        body = await until(http, await begin(http, line(0)))
        (fault,) = await read(http, body.get("error_file_id"))
    assert fault["response"]["status_code"] == 500
    assert "Traceback" not in json.dumps(fault)


async def test_a_drain_stops_the_queue_at_once(config):
    completer = FakeCompleter()
    completer.delay = 1.0
    async with server(config, completer) as http:
        service = http._transport.app.state.server
        batch = await begin(http, line(0))
        await until(http, batch, "in_progress")
        while not completer.running:
            await asyncio.sleep(0.001)
        assert await service.drain(30.0) is True  # nobody waits for a batch
        assert completer.running == 0
    async with server(config) as http:
        assert (await until(http, batch))["status"] == "completed"


async def test_a_batch_waits_for_its_model(config):
    """Another model in the same folder does not run it."""
    async with server(config) as http:
        service = http._transport.app.state.server
        (model,) = service.models
        model.names = ("other",)
        theirs = await begin(http, line(0, model="other"))
        model.names = (MODEL,)
        ours = await begin(http, line(0))
        await until(http, ours)
        assert (await until(http, theirs, "in_progress"))["request_counts"]["completed"] == 0
        model.names = ("other",)
        service.jobs[0].start()
        assert (await until(http, theirs))["request_counts"]["completed"] == 1


async def test_results_are_read_in_bounded_pieces(config, monkeypatch):
    monkeypatch.setattr(journal, "TOGETHER", 1000)  # two or three of them at a time
    async with server(config) as http:
        body = await until(http, await begin(http, "\n".join(line(i) for i in range(20))))
        output = await read(http, body.get("output_file_id"))
    assert [o["custom_id"] for o in output] == [f"id{i}" for i in range(20)]


async def test_output_files_expire_when_asked(config):
    async with server(config) as http:
        keep = {"anchor": "created_at", "seconds": 3600}
        body = await until(http, await begin(http, line(0), output_expires_after=keep))
        file = (await http.get(f"/v1/files/{body['output_file_id']}")).json()
        assert file["expires_at"] == file["created_at"] + 3600


async def test_trouble_of_any_kind_is_waited_out(config, monkeypatch, caplog):
    """Also at the very beginning, and of a kind that nobody thought of."""
    monkeypatch.setattr(queue, "TROUBLE", 0.02)
    tried: list[str] = []

    def failing(owner: type, name: str, error: Exception) -> None:
        real = getattr(owner, name)

        async def once(self: Any, *args: Any) -> Any:
            tried.append(name)
            if tried.count(name) == 1:
                raise error
            return await real(self, *args)

        monkeypatch.setattr(owner, name, once)

    failing(files.Files, "sweep", PermissionError("not ours"))
    failing(journal.Journal, "active", ZeroDivisionError("a fault"))
    async with server(config) as http:
        body = await until(http, await begin(http, line(0)))
    assert body["status"] == "completed" and tried.count("sweep") == 2
    assert "not ours" in caplog.text and "ZeroDivisionError" in caplog.text
