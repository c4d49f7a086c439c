"""Responses that run in the background: their states, their logs, cancelling and stopping."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.observe.errors import EngineDead
from quire.server.openai.responses import runs
from quire.server.openai.responses.stored import UNFINISHED, Record, StoredResponses
from tests.unit.server.fakes import FakeCompleter, client_for, opened_by, service_over, settled
from tests.unit.server.openai.test_responses import HI, kinds, post, told


async def until(http: httpx.AsyncClient, response: str, *states: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            body = (await http.get(f"/v1/responses/{response}")).json()
            if body["status"] in states:
                return body
            await asyncio.sleep(0.005)


async def test_a_response_goes_its_way():
    completer = FakeCompleter()
    completer.gate = asyncio.Event()
    async with client_for(completer) as http:
        body = await post(http, background=True)
        assert body["status"] == "queued" and body["output"] == [] and body["background"] is True
        running = await until(http, body["id"], "in_progress")
        assert "usage" not in running
        follow_up = await http.post("/v1/responses", json=HI | {"previous_response_id": body["id"]})
        assert follow_up.status_code == 400  # not before its end
        completer.gate.set()
        done = await until(http, body["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "Hello, wörld"
        again = await http.post(f"/v1/responses/{body['id']}/cancel")
        assert again.json()["status"] == "completed"  # too late, and harmless
        await post(http, previous_response_id=body["id"])


async def test_a_stream_can_be_taken_up_again():
    completer = FakeCompleter()
    completer.delay = 0.002
    async with client_for(completer) as http:
        events = told((await http.post("/v1/responses", json=HI | {"background": True, "stream": True})).text)
        assert kinds(events)[:3] == ["created", "queued", "in_progress"] and kinds(events)[-1] == "completed"
        response = events[-1]["response"]["id"]
        rest = await http.get(f"/v1/responses/{response}?stream=true&starting_after=5")
        whole = await http.get(f"/v1/responses/{response}?stream=true")
        beyond = await http.get(f"/v1/responses/{response}?stream=true&starting_after=9999")
        bad = await http.get(f"/v1/responses/{response}?stream=true&starting_after=-1")
        lone = await http.get(f"/v1/responses/{response}?starting_after=1")
    assert told(whole.text) == events
    assert (
        rest.text == "".join(whole.text.partition("event: ")[1:]).split('"sequence_number":5,')[1].partition("\n\n")[2]
    )
    assert beyond.status_code == 200 and beyond.text == ""
    assert bad.status_code == lone.status_code == 400


async def test_a_listener_gets_what_comes_and_may_leave():
    completer = FakeCompleter()
    completer.delay = 0.01
    async with client_for(completer) as http:
        body = await post(http, background=True)
        listening = asyncio.create_task(http.get(f"/v1/responses/{body['id']}?stream=true"))
        leaving = asyncio.create_task(http.get(f"/v1/responses/{body['id']}?stream=true"))
        await asyncio.sleep(0.03)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        events = told((await listening).text)
    assert kinds(events)[-1] == "completed"
    assert completer.aborted == 0  # nobody's leaving stops a background response


async def test_a_long_wait_has_the_same_events_for_every_listener(monkeypatch: pytest.MonkeyPatch):
    """A keepalive is logged, so that the numbers that a client resumes from stay true."""
    monkeypatch.setattr(runs, "KEEP_ALIVE_SECONDS", 0.01)
    completer = FakeCompleter()
    async with client_for(completer) as http:
        completer.gate = opened_by(http, b"event: keepalive", 4)
        body = await post(http, background=True)
        path = f"/v1/responses/{body['id']}?stream=true"
        texts = [r.text for r in await asyncio.gather(http.get(path), http.get(path))]
        again = (await http.get(path)).text
        beyond = (await http.get(f"{path}&starting_after={len(told(again))}")).text
    assert texts == [again, again] and beyond == ""
    assert kinds(told(again))[2:5] == ["in_progress", "keepalive", "output_item.added"]
    assert kinds(told(again))[-1] == "completed" and ": waiting" not in again


async def test_nothing_is_logged_between_the_end_and_its_telling(
    monkeypatch: pytest.MonkeyPatch, stored: tuple[asyncio.Event, asyncio.Event]
):
    """The end has its numbers already while it is being stored: who waits then gets a comment."""
    monkeypatch.setattr(runs, "KEEP_ALIVE_SECONDS", 0.01)
    begun, go = stored
    async with client_for() as http:
        twice = opened_by(http, b": waiting", 2)
        body = await post(http, background=True)
        listening = asyncio.create_task(http.get(f"/v1/responses/{body['id']}?stream=true"))
        await begun.wait()
        async with asyncio.timeout(10):
            await twice.wait()
        go.set()
        text = (await listening).text
    assert ": waiting" in text and kinds(told(text))[-1] == "completed"


async def test_cancelling():
    completer = FakeCompleter()
    completer.gate, completer.gate_at = asyncio.Event(), 5
    async with client_for(completer) as http:
        body = await post(http, background=True)
        listening = asyncio.create_task(http.get(f"/v1/responses/{body['id']}?stream=true"))
        await until(http, body["id"], "in_progress")
        while not completer.held:
            await asyncio.sleep(0.001)
        await settled()
        cancelled = (await http.post(f"/v1/responses/{body['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        text = cancelled["output"][0]["content"][0]["text"]
        assert text == "Hello"
        assert cancelled["output"][0]["status"] == "incomplete"
        assert (await http.get(f"/v1/responses/{body['id']}")).json() == cancelled
        last = told((await listening).text)[-1]
        assert (last["type"], last["code"]) == ("error", "response_cancelled")
        assert completer.running == 0 and completer.aborted == 1


async def test_deleting_one_that_runs():
    completer = FakeCompleter()
    completer.delay = 1.0
    async with client_for(completer) as http:
        body = await post(http, background=True)
        await until(http, body["id"], "in_progress")
        assert (await http.delete(f"/v1/responses/{body['id']}")).json()["deleted"] is True
        assert (await http.get(f"/v1/responses/{body['id']}")).status_code == 404
        assert (await http.get(f"/v1/responses/{body['id']}?stream=true")).status_code == 404
    assert completer.running == 0


async def test_one_that_fails():
    completer = FakeCompleter()
    completer.dies = EngineDead("the engine died")
    async with client_for(completer) as http:
        body = await post(http, background=True)
        failed = await until(http, body["id"], "failed")
        assert failed["error"]["code"] == "server_error" and "died" in failed["error"]["message"]
        events = told((await http.get(f"/v1/responses/{body['id']}?stream=true")).text)
        assert [e["type"] for e in events[-2:]] == ["error", "response.failed"]


async def test_only_so_many_run_and_wait(monkeypatch):
    monkeypatch.setattr(runs, "TOGETHER", 2)
    monkeypatch.setattr(runs, "MAX_QUEUED", 3)
    completer = FakeCompleter()
    completer.delay = 0.5
    async with client_for(completer) as http:
        bodies = [await post(http, background=True) for _ in range(3)]
        await until(http, bodies[1]["id"], "in_progress")
        assert (await http.get(f"/v1/responses/{bodies[2]['id']}")).json()["status"] == "queued"
        assert completer.running == 2
        r = await http.post("/v1/responses", json=HI | {"background": True})
        assert r.status_code == 429
        await http.post(f"/v1/responses/{bodies[2]['id']}/cancel")  # before its turn
        assert (await until(http, bodies[2]["id"], "cancelled"))["output"] == []
        completer.delay = 0.0
        for body in bodies[:2]:
            await until(http, body["id"], "completed")


async def test_old_logs_give_way(monkeypatch):
    monkeypatch.setattr(runs, "MAX_ENDED", 1)
    async with client_for() as http:
        old, new = "", ""
        for _ in range(2):  # one after the other: of two at once either may end first
            old, new = new, (await post(http, background=True))["id"]
            await until(http, new, "completed")
        gone = await http.get(f"/v1/responses/{old}?stream=true")
        assert gone.status_code == 400 and "no longer kept" in gone.json()["error"]["message"]
        assert (await http.get(f"/v1/responses/{new}?stream=true")).status_code == 200


async def test_a_shutdown_waits_then_fails_them():
    completer = FakeCompleter()
    completer.delay = 5.0
    service = service_over(completer)
    async with client_for(service=service) as http:
        body = await post(http, background=True)
        await until(http, body["id"], "in_progress")
        assert await service.drain(0.05) is False
        assert completer.running == 0 and service.in_flight == 0


async def test_one_that_ran_when_the_server_died_is_told_failed(tmp_path):
    config = ServerConfig(state_dir=tmp_path)
    completer = FakeCompleter()
    completer.delay = 5.0
    service = service_over(completer, config)
    async with client_for(service=service, config=config) as http:
        body = await post(http, background=True)
        done = (await http.post("/v1/responses", json=HI | {"background": True})).json()
    service.close()  # as a killed process lets go, without a word to anybody
    async with client_for(FakeCompleter(), config) as http:
        got = (await http.get(f"/v1/responses/{body['id']}")).json()
        assert got["status"] == "failed" and got["error"]["code"] == "server_error"
        assert (await http.get(f"/v1/responses/{done['id']}")).status_code == 200


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """The ends of responses are stored slowly: the first event is set when one is about to be, the second lets it be."""
    put, storing, free = StoredResponses.put, asyncio.Event(), asyncio.Event()

    async def slowly(self: StoredResponses, record: Record) -> None:
        if record.body["status"] not in UNFINISHED:
            storing.set()
            await free.wait()
        await put(self, record)

    monkeypatch.setattr(StoredResponses, "put", slowly)
    return storing, free


async def test_who_asks_while_the_end_is_stored_hears_of_it_when_it_is(stored):
    storing, free = stored
    async with client_for(FakeCompleter()) as http:
        body = await post(http, background=True)
        await asyncio.wait_for(storing.wait(), 5)
        asked = asyncio.create_task(http.get(f"/v1/responses/{body['id']}"))
        left = asyncio.create_task(http.get(f"/v1/responses/{body['id']}"))
        await asyncio.sleep(0.02)
        left.cancel()
        await asyncio.sleep(0.01)
        assert not asked.done()
        free.set()
        assert (await asked).json()["status"] == "completed"
        await post(http, previous_response_id=body["id"])


async def test_a_cancel_that_comes_too_late_loses_nothing(stored):
    """While the end is being stored: the second of two cancels, and one that meets the end."""
    storing, free = stored
    for gate, cancels, end in ((asyncio.Event(), 2, "cancelled"), (None, 1, "completed")):
        storing.clear()
        free.clear()
        completer = FakeCompleter()
        completer.gate = gate
        async with client_for(completer) as http:
            body = await post(http, background=True)
            if gate is None:
                await asyncio.wait_for(storing.wait(), 5)
            asked = [asyncio.create_task(http.post(f"/v1/responses/{body['id']}/cancel")) for _ in range(cancels)]
            await asyncio.wait_for(storing.wait(), 5)
            await asyncio.sleep(0.01)
            asked.append(asyncio.create_task(http.post(f"/v1/responses/{body['id']}/cancel")))
            await asyncio.sleep(0.01)
            free.set()
            assert [(await one).json()["status"] for one in asked] == [end] * (cancels + 1)
