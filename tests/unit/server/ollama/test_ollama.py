"""Ollama's /api/generate and /api/chat against a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from quire.chat.infill import Infill
from quire.config import ServerConfig
from quire.observe.errors import Busy, EngineDead
from quire.server.served import Model
from quire.server.server import Server
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for

GENERATE, CHAT = "/api/generate", "/api/chat"
HI: dict[str, Any] = {"model": MODEL, "prompt": "hi"}
TALK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ANSWER = "Hello, wörld"


def lines(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def test_generate_whole():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        r = await http.post(GENERATE, json=HI | {"stream": False})
    assert r.status_code == 200, r.text
    assert r.headers["content-type"] == "application/json"
    body = r.json()
    assert (body["model"], body["response"], body["done"], body["done_reason"]) == (MODEL, ANSWER, True, "stop")
    prompt = list(b"user:hi\n")  # through the template
    assert body["context"] == prompt + list(ANSWER.encode())
    assert (body["prompt_eval_count"], body["eval_count"]) == (len(prompt), 13)
    # The engine's own times, from the receipt.
    assert (body["prompt_eval_duration"], body["eval_duration"]) == (20_000_000, 30_000_000)
    assert 0 <= body["load_duration"] < body["total_duration"]
    assert "quire" not in body
    assert completer.rendered[0][0] == [{"role": "user", "content": "hi"}]
    assert body["created_at"].endswith("Z")


async def test_generate_streams_unless_told_not_to():
    async with client_for() as http:
        r = await http.post(GENERATE, json=HI)
    assert r.headers["content-type"] == "application/x-ndjson"
    *news, last = lines(r.text)
    assert all(n["done"] is False and n["model"] == MODEL and n["created_at"] for n in news)
    assert len(news) > 5
    assert "".join(n["response"] for n in news) == ANSWER
    assert (last["done"], last["done_reason"], last["response"], last["eval_count"]) == (True, "stop", "", 13)
    assert last["context"][-1] == ord("d")


async def test_chat_whole_and_streamed():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        whole = (await http.post(CHAT, json=TALK | {"stream": False})).json()
        *news, last = lines((await http.post(CHAT, json=TALK)).text)
    assert whole["message"] == {"role": "assistant", "content": ANSWER}
    assert "context" not in whole
    assert "response" not in whole
    assert "".join(n["message"]["content"] for n in news) == ANSWER
    assert {n["message"]["role"] for n in news} == {"assistant"}
    assert last["message"]["content"] == ""
    for name in ("done", "done_reason", "prompt_eval_count", "eval_count", "prompt_eval_duration", "eval_duration"):
        assert last[name] == whole[name]


async def test_total_duration_is_the_time_it_took():
    completer = FakeCompleter()
    completer.delay = 0.02
    async with client_for(completer) as http:
        body = (await http.post(GENERATE, json=HI | {"stream": False})).json()
    assert body["load_duration"] + 13 * 0.02e9 <= body["total_duration"] < 600e9  # nanoseconds; the load was none of it


async def test_every_option_arrives():
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 7.0,
        "top_p": 0.6,
        "min_p": 0.1,
        "typical_p": 0.7,
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "seed": 42,
        "stop": ["a", "b"],
        "num_ctx": 100,
        "num_gpu": 99,
        "num_thread": 3,
        "mirostat": 0,
    }
    completer = FakeCompleter()
    async with client_for(completer) as http:
        r = await http.post(GENERATE, json=HI | {"options": options, "stream": False, "receipts": True})
    assert r.status_code == 200, r.text
    s = completer.seen[0].sampling
    assert (s.max_tokens, s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p) == (9, 0.5, 7, 0.6, 0.1, 0.7)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.2, 0.3, -0.4)
    assert (s.seed, s.stop) == (42, ("a", "b"))
    assert r.json()["done_reason"] == "length"
    assert r.json()["quire"]["receipts"][0]["seed"] == 42


async def test_defaults_are_ollamas_and_the_room_is_the_context():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        for options in (None, {}, {"seed": -1, "num_predict": -1, "top_k": None}, {"num_predict": 10_000}):
            assert (await http.post(GENERATE, json=HI | {"options": options})).status_code == 200
        await http.post(GENERATE, json=HI | {"options": {"num_ctx": 50}})
    for g in completer.seen:
        s = g.sampling
        assert (s.temperature, s.top_k, s.top_p, s.repetition_penalty, s.seed) == (0.8, 40, 0.9, 1.0, None)
    assert [g.sampling.max_tokens for g in completer.seen] == [192, 192, 192, 192, 42]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"suffix": "x"}, "infill"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"images": ["aGk="]}, "images"),
        ({"format": 5}, "format"),
        ({"think": True}, "think"),
        ({"think": "high"}, "think"),
        ({"tools": []}, "tools"),  # not of this route
        ({"surprise": 1}, "surprise"),
        ({"prompt": 5}, "prompt"),
        ({"raw": True, "system": "s"}, "system"),
        ({"raw": True, "context": [1]}, "context"),
        ({"context": [999]}, "999"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"options": 5}, "options"),
        ({"options": {"num_ctx": 201}}, "num_ctx"),
        ({"options": {"num_ctx": 8}}, "num_ctx"),  # the prompt has 8
        ({"options": {"num_ctx": 1.5}}, "num_ctx"),
        ({"options": {"num_predict": 0}}, "num_predict"),
        ({"options": {"num_predict": -7}}, "num_predict"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n"),
        ({"options": {"repeat_penalty": 0}}, "repeat_penalty"),
        ({"options": {"temperature": "hot"}}, "temperature"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"temprature": 1}}, "temprature"),
        ({"options": {"stop": [""]}}, "stop"),
    ],
)
async def test_refused_by_name(fields: dict[str, Any], names: str):
    completer = FakeCompleter()
    async with client_for(completer, strict=True) as http:
        r = await http.post(GENERATE, json=HI | fields)
    assert r.status_code == 400, r.text
    assert list(r.json()) == ["error"]
    assert names in r.json()["error"]
    assert completer.seen == []


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]: there is no call"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_chat_refuses_by_name(fields: dict[str, Any], names: str):
    async with client_for(strict=True) as http:
        r = await http.post(CHAT, json=TALK | fields)
    assert r.status_code == 400, r.text
    assert names in r.json()["error"]


async def test_what_asks_for_nothing_is_fine():
    nothing = {
        "suffix": "",
        "template": None,
        "images": [],
        "format": "",
        "think": False,
        "options": {"mirostat": 0, "mirostat_tau": 5.0, "repeat_last_n": 64, "num_keep": 4, "tfs_z": 1},
        "keep_alive": -1,
        "truncate": True,
        "context": [],
        "raw": False,
    }
    async with client_for() as http:
        r = await http.post(GENERATE, json=HI | nothing | {"stream": False})
    assert r.status_code == 200, r.text
    assert "quire" not in r.json()


async def test_system_raw_and_context():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        await http.post(GENERATE, json=HI | {"system": "be brief"})
        r = await http.post(GENERATE, json=HI | {"raw": True, "stream": False})
        await http.post(GENERATE, json=HI | {"context": [1, 2, 3]})
        completer.template = None
        await http.post(GENERATE, json=HI)
        refused = await http.post(GENERATE, json=HI | {"system": "s"})
    assert completer.rendered[0][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    prompts = [bytes(g.prompt) for g in completer.seen]
    assert prompts == [b"system:be brief\nuser:hi\n", b"hi", b"\x01\x02\x03user:hi\n", b"hi"]
    assert "context" not in r.json()  # a raw prompt is the client's own
    assert (refused.status_code, "system" in refused.json()["error"]) == (400, True)


async def test_think_false_reaches_a_template_that_knows_it():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        await http.post(CHAT, json=TALK | {"think": False})
        completer.template.source = "{{ enable_thinking }}"
        await http.post(CHAT, json=TALK | {"think": False})
        await http.post(CHAT, json=TALK)
    assert [k.get("enable_thinking") for _, k in completer.rendered] == [None, False, None]


async def test_logprobs():
    async with client_for() as http:
        ask = HI | {"logprobs": True, "top_logprobs": 2}
        *news, _ = lines((await http.post(GENERATE, json=ask)).text)
        whole = (await http.post(GENERATE, json=ask | {"stream": False})).json()
    entries = [entry for n in news for entry in n["logprobs"]]
    assert entries == whole["logprobs"]
    assert len(entries) == 13
    assert (entries[0]["token"], entries[0]["logprob"], len(entries[0]["top_logprobs"])) == ("H", -0.5, 2)


@pytest.mark.parametrize(("path", "ask"), [(GENERATE, {"prompt": ""}), (GENERATE, {}), (CHAT, {"messages": []})])
async def test_nothing_to_answer_loads(path: str, ask: dict[str, Any]):
    completer = FakeCompleter()
    async with client_for(completer) as http:
        body = (await http.post(path, json={"model": MODEL} | ask)).json()
        assert (body["done"], body["done_reason"], body["model"]) == (True, "load", MODEL)
        r = await http.post(path, json={"model": MODEL, "keep_alive": 0} | ask)
    assert completer.seen == []
    # It would not be true: the model stays.
    assert (r.status_code, "keep_alive" in r.json()["error"]) == (501, True)


@pytest.mark.parametrize(("keep", "told"), [(0, True), ("5m", True), (300, True), (-1, False), ("-1m", False)])
async def test_keep_alive_is_told_where_it_is_not_kept(keep: Any, told: bool):
    async with client_for() as http:
        body = (await http.post(GENERATE, json=HI | {"keep_alive": keep, "stream": False})).json()
    assert ("keep_alive" in str(body.get("quire"))) is told


async def test_a_request_waits_for_a_model_that_loads():
    completer = FakeCompleter()
    service = Server(ServerConfig(), [Model(MODEL)])
    async with client_for(service=service) as http:
        waiting = asyncio.create_task(http.post(GENERATE, json=HI | {"stream": False}))
        await asyncio.sleep(0.15)
        assert not waiting.done()
        service.attach(service.models.first, completer.client, completer)
        body = (await waiting).json()
    assert body["response"] == ANSWER
    assert 0 < body["load_duration"] <= body["total_duration"]


async def test_a_drain_ends_the_wait():
    service = Server(ServerConfig(), [Model(MODEL)])
    async with client_for(service=service) as http:
        waiting = asyncio.create_task(http.post(GENERATE, json=HI))
        await asyncio.sleep(0.05)
        await service.drain(1.0)
        r = await waiting
    assert (r.status_code, "shutting down" in r.json()["error"]) == (503, True)


@pytest.mark.parametrize("name", [MODEL, "fake:1b:latest", " fake:1b "])
async def test_names_of_the_served_model(name: str):
    async with client_for() as http:
        r = await http.post(GENERATE, json=HI | {"model": name, "stream": False})
    assert (r.status_code, r.json().get("model")) == (200, name)


@pytest.mark.parametrize("name", ["smollm2", "smollm2:latest", "smollm2:135m"])
async def test_names_are_completed_as_the_catalogue_does(name: str):
    completer = FakeCompleter()
    service = Server(ServerConfig(), [Model("smollm2:135m")])
    service.attach(service.models.first, completer.client, completer)
    async with client_for(service=service) as http:
        r = await http.post(CHAT, json=TALK | {"model": name, "stream": False})
    assert r.status_code == 200, r.text


@pytest.mark.parametrize("name", ["gemma3", "nope", "../../etc/passwd", "hf:a/b", "x" * 5000])
async def test_other_models_are_404_and_say_what_is_served(name: str):
    async with client_for() as http:
        r = await http.post(GENERATE, json=HI | {"model": name})
    assert r.status_code == 404
    assert MODEL in r.json()["error"]
    assert len(r.text) < 800


async def test_no_model_is_400():
    async with client_for() as http:
        r = await http.post(GENERATE, json={"prompt": "hi"})
    assert (r.status_code, "model" in r.json()["error"]) == (400, True)


async def test_trouble_has_a_status_before_the_first_token_and_a_line_after():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        completer.raises = Busy("the queue is full", retry_after=3)
        r = await http.post(GENERATE, json=HI)
        assert (r.status_code, r.headers["retry-after"], r.json()) == (503, "3", {"error": "the queue is full"})
        completer.raises, completer.dies = None, EngineDead("the engine died")
        r = await http.post(GENERATE, json=HI)
        assert r.status_code == 200
        assert lines(r.text)[-1] == {"error": "the engine died"}
        assert "".join(n.get("response", "") for n in lines(r.text)) == "Hel"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_program_need_not_say_json_but_a_page_must(kind: str):
    async with client_for() as http:

        async def send(**headers: str) -> httpx.Response:
            headers |= {"content-type": kind} if kind else {}
            return await http.post(GENERATE, content=json.dumps(HI), headers=headers)

        assert (await send()).status_code == 200
        for page in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            r = await send(**page)
            assert (r.status_code, list(r.json())) == (415, ["error"])


async def test_every_layer_answers_in_ollamas_shape():
    config = ServerConfig(api_key="k", max_body=200)
    key = {"authorization": "Bearer k"}
    async with client_for(config=config) as http:
        for r, status in (
            (await http.post(CHAT, json=TALK), 401),
            (await http.post(CHAT, json=TALK, headers=key | {"host": "evil.example"}), 403),
            (await http.get(CHAT, headers=key), 405),
            (await http.post("/api/nope", json={}, headers=key), 404),
            (await http.post(CHAT, content=b"{" + b" " * 300, headers=key), 413),
            (await http.post(CHAT, content=b"{", headers=key), 400),
        ):
            assert r.status_code == status
            assert isinstance(r.json()["error"], str)
        r = await http.get("/v1/nope", headers=key)
        assert r.json()["error"]["code"] == "unknown_url"


async def test_a_client_that_leaves_stops_its_request():
    completer = FakeCompleter(answer="x" * 150)
    completer.delay = 0.02
    from quire.server.app import create_app
    from tests.unit.server.fakes import service_over

    app = create_app(ServerConfig(), service_over(completer))
    sent: list[dict[str, Any]] = []
    left = asyncio.Event()
    body = [{"type": "http.request", "body": json.dumps(HI).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            left.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": GENERATE,
        "raw_path": GENERATE.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    await asyncio.wait_for(app(scope, receive, send), 5)
    assert (completer.aborted, completer.running) == (1, 0)


@pytest.mark.parametrize(("path", "field"), [("/api/embed", "input"), ("/api/embeddings", "prompt")])
async def test_embeddings_are_refused_and_say_what_makes_them(path: str, field: str):
    async with client_for() as http:
        r = await http.post(path, json={"model": MODEL, field: "x"})
    assert (r.status_code, "embedding model" in r.json()["error"]) == (400, True)


async def test_a_suffix_is_written_with_the_models_own_tokens():
    completer = FakeCompleter()
    asked = {"model": MODEL, "prompt": "ab", "suffix": "yz", "stream": False}
    async with client_for(completer) as http:
        r = await http.post("/api/generate", json=asked)
        assert r.status_code == 400 and "infill" in r.json()["error"]
        completer.tokenizer.infill = Infill(prefix=257, suffix=258, middle=259, ends=(260, 261))
        body = (await http.post("/api/generate", json=asked)).json()
        assert body["response"] == ANSWER and "context" not in body
        assert completer.seen[-1].prompt == [257, *b"ab", 258, *b"yz", 259]
        assert completer.seen[-1].sampling.stop_token_ids == (260, 261)
        assert completer.seen[-1].reading is None
        for more in ({"system": "x"}, {"think": True}, {"context": [1]}):
            r = await http.post("/api/generate", json=asked | more)
            assert r.status_code == 400 and next(iter(more)) in r.json()["error"]
