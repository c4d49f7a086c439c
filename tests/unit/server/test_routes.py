"""The small routes: probes, models, tokenize, version, request ids; and the stages a service goes through."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire import __version__
from quire.config import ServerConfig
from quire.engine.types import EngineInfo
from quire.server.app import create_app
from quire.server.served import Model, Progress, fingerprint
from quire.server.server import Server
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, service_over

HI = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


async def test_probes_and_version():
    async with client_for() as http:
        assert (await http.get("/live")).json() == {"status": "ok"}
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/ready")).json() == {"status": "ready", "model": MODEL}
        assert (await http.get("/version")).json() == {"version": __version__}


async def test_the_newest_steps():
    async with client_for() as http:
        told = (await http.get("/debug/steps")).json()
        assert told["model"] == MODEL and len(told["steps"]) == 4
        assert told["steps"][-1] == {
            "step": 3,
            "seconds": 0.5,
            "ended": 3.0,
            "rows": [{"id": "chatcmpl-1", "tokens": 1}, {"id": "chatcmpl-2", "tokens": 16}],
            "waiting": 3,
            "held": {"slots": 3},
        }
        assert [s["step"] for s in (await http.get("/debug/steps?last=2")).json()["steps"]] == [2, 3]
        for last in ("", "-1", "many", "1" * 20, "１"):
            refused = await http.get("/debug/steps", params={"last": last})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last")


async def test_stages():
    completer = FakeCompleter()
    service = Server(ServerConfig(), [Model(MODEL)])
    async with client_for(service=service) as http:

        async def stage() -> tuple[int, str]:
            r = await http.get("/ready")
            return r.status_code, r.json()["status"]

        assert await stage() == (503, "loading")
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/health")).status_code == 503
        r = await http.post("/tokenize", json={"prompt": "x"})
        assert (r.status_code, r.json()["error"]["code"]) == (503, "unavailable")
        service.attach(service.models.first, completer.client, completer)
        assert await stage() == (200, "ready")
        completer.client.alive = False
        assert await stage() == (503, "restarting")
        assert (await http.get("/health")).status_code == 200  # it has loaded once, and it comes back
        r = await http.post(CHAT, json=HI)
        assert r.status_code == 503
        assert r.headers["retry-after"]
        completer.client.alive = True
        assert (await http.post(CHAT, json=HI)).status_code == 200
        service.draining = True
        assert await stage() == (503, "draining")
        for path in (CHAT, "/v1/completions", "/tokenize"):
            r = await http.post(path, json={})
            assert r.status_code == 503
            assert r.headers["connection"] == "close"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200


async def test_an_engine_that_stays_down_is_told_with_the_reason():
    completer = FakeCompleter()
    client: Any = completer.client
    service = Server(ServerConfig(), [Model(MODEL)])
    service.attach(service.models.first, client, completer)
    async with client_for(service=service) as http:
        client.alive, client.why = False, "the engine process was killed by SIGKILL; it is being restarted"
        r = await http.get("/ready")
        assert r.status_code == 503 and r.headers["retry-after"] == "2"
        assert r.json() == {"status": "restarting", "model": MODEL, "detail": client.why}
        client.gave_up, client.why = True, "the engine process ended with status 9; it died 6 times within a minute"
        r = await http.get("/ready")
        assert r.status_code == 503 and "retry-after" not in r.headers  # it does not come back
        assert r.json() == {"status": "failed", "model": MODEL, "detail": client.why}
        r = await http.post(CHAT, json=HI)
        assert r.status_code == 503 and "6 times" in r.json()["error"]["message"]
        assert "start the server again" in r.json()["error"]["message"]
        r = await http.get("/health")
        assert (r.status_code, r.json()["status"]) == (503, "failed") and "retry-after" not in r.headers
        # The probe needs no key: what a stranger must not see stays in the log.
        client.why = "/srv/models/secret.gguf: tensor 'x' is broken; it died 6 times within a minute"
        assert (await http.get("/ready")).json()["detail"] == "the server's log has the cause"
        assert (await http.get("/live")).status_code == 200


async def test_when_to_ask_again_goes_by_how_far_loading_is():
    now = 100.0
    progress = Progress(lambda: now)
    assert progress.left() is None  # nothing has begun
    progress.begin()
    assert progress.left() == 1.0  # nobody can say more yet
    now += 6
    progress.note(3, 12)
    assert progress.left() == 18.0
    now += 6
    progress.note(12, 12)
    assert progress.left() == 1.0
    progress.end()
    progress.begin()  # again, as an engine does that died: it takes as long as before
    now += 4
    assert progress.left() == 8.0
    service = Server(ServerConfig(), [Model(MODEL)])
    model = service.models.first
    model.loading = progress
    async with client_for(service=service) as http:
        for refused in (await http.post(CHAT, json=HI), await http.get("/ready"), await http.get("/health")):
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "8")


async def test_routes_without_v1_are_the_same():
    async with client_for() as http:
        assert (await http.get("/models")).json() == (await http.get("/v1/models")).json()
        assert (await http.post("/chat/completions", json=HI)).json()["object"] == "chat.completion"
        assert (await http.post("/responses", json={"input": "hi"})).json()["object"] == "response"
        refused = await http.post("/embeddings", json={"input": "hi", "nonsense": 1})
        assert (
            refused.json()["error"]["param"]
            == (await http.post("/v1/embeddings", json={"input": "hi", "nonsense": 1})).json()["error"]["param"]
        )


async def test_any_model_name_is_answered_by_the_first_where_that_was_asked_for():
    completer = FakeCompleter()
    ask = HI | {"model": "gpt-4o"}
    async with client_for(service=service_over(completer)) as http:
        assert (await http.post(CHAT, json=ask)).status_code == 404
    service = Server(ServerConfig(any_model_name=True), [Model(MODEL)])
    service.attach(service.models.first, completer.client, completer)
    async with client_for(service=service) as http:
        told = (await http.post(CHAT, json=ask)).json()
        assert told["model"] == MODEL  # who answered, not who was asked for
        assert (await http.post("/api/chat", json=ask | {"stream": False})).json()["model"] == MODEL
        assert [m["id"] for m in (await http.get("/v1/models")).json()["data"]] == [MODEL]


async def test_models():
    async with client_for() as http:
        listed = (await http.get("/v1/models")).json()
        assert listed["object"] == "list"
        (card,) = listed["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 200)
        assert card["quire"] == {"tasks": ["generate"]}
        assert (await http.get(f"/v1/models/{MODEL}")).json() == card
        missing = await http.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_back():
    async with client_for() as http:
        r = (await http.post("/tokenize", json={"model": MODEL, "prompt": "hé", "return_token_strs": True})).json()
        assert r["tokens"] == [104, 195, 169]
        assert (r["count"], r["max_model_len"]) == (3, 200)
        assert r["token_strs"][0] == "h"
        assert (await http.post("/detokenize", json={"tokens": r["tokens"]})).json() == {
            "prompt": "hé",
            "content": "hé",
        }
        chat = (await http.post("/tokenize", json=HI | {"add_generation_prompt": True})).json()
        assert chat["tokens"] == list(b"user:hi\n")
        assert chat["token_strs"] is None
        assert (await http.post("/tokenize", json={"prompt": "", "add_special_tokens": False})).json()["tokens"] == []
        # longer than the context is fine here: nothing is going to be computed
        assert (await http.post("/tokenize", json={"prompt": "x" * 300})).json()["count"] == 300


async def test_request_ids_go_round():
    async with client_for() as http:
        r = await http.get("/health", headers={"x-request-id": "abc-1"})
        assert r.headers["x-request-id"] == "abc-1"
        r = await http.get("/health", headers={"x-request-id": "bad id!"})
        assert len(r.headers["x-request-id"]) == 16


async def test_log_lines_cannot_be_forged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "quire.access")
    async with client_for() as http:
        await http.get("/nope%0AINFO fake line")
        await http.get("/health")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "quire.access"]
    assert line.startswith("GET /nope%0AINFO%20fake%20line 404 ")


async def test_an_app_over_a_ready_completer():
    completer = FakeCompleter()
    app = create_app(ServerConfig(), completer)
    assert app.state.server.stage == "ready"
    assert app.state.server.models.first.name == MODEL


async def test_drain_waits_for_those_in_flight():
    service = service_over(FakeCompleter())
    assert await service.drain(0.1)
    service.enter()
    assert not await service.drain(0.05)
    service.leave()
    assert service.in_flight == 0


def test_the_fingerprint_ignores_threads_but_nothing_else():
    def info(**changes: object) -> EngineInfo:
        base: dict[str, object] = {
            "model": "m",
            "architecture": "llama",
            "backend": "native (avx512, 2 threads)",
            "page_size": 16,
            **dict.fromkeys(("vocab_size", "context", "max_seqs", "max_batch_tokens", "pages"), 10),
            "weight_bytes": 5,
            "kv_bytes": 1,
        }
        return EngineInfo(**(base | changes))

    one = fingerprint(info())
    assert fingerprint(info(backend="native (avx512, 16 threads)")) == one
    assert fingerprint(info(pages=50, load_seconds=3.0)) == one
    for change in ({"backend": "native (neon, 2 threads)"}, {"model": "x"}, {"weight_bytes": 6}):
        assert fingerprint(info(**change)) != one


async def test_tokenize_in_the_shape_of_whoever_asks():
    async with client_for() as http:
        for base in ("", "/v1"):
            r = await http.post(f"{base}/tokenize", json={"content": "hé"})
            assert r.json() == {"tokens": list("hé".encode())}
        pieces = (await http.post("/tokenize", json={"content": "hé", "with_pieces": True})).json()["tokens"]
        assert pieces == [{"id": 104, "piece": "h"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
        tgi = (await http.post("/tokenize", json={"inputs": "aéb"})).json()
        assert [(t["id"], t["start"], t["stop"]) for t in tgi] == [(97, 0, 1), (0xC3, 1, 2), (0xA9, 1, 2), (98, 2, 3)]
        back = (await http.post("/v1/detokenize", json={"tokens": [104, 105]})).json()
        assert back == {"prompt": "hi", "content": "hi"}
        for body, param in (
            ({"content": "a", "inputs": "a"}, "prompt"),
            ({"content": "a", "add_special_tokens": True}, "add_special_tokens"),
            ({"prompt": "a", "with_pieces": True}, "with_pieces"),
            ({"inputs": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ):
            r = await http.post("/tokenize", json=body)
            assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text


async def test_a_template_applied():
    async with client_for() as http:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await http.post("/apply-template", json=body)).json() == {"prompt": "user:hi\n"}


async def test_what_is_told_of_the_tokenizer():
    async with client_for() as http:
        body = (await http.get("/tokenizer_info")).json()
    assert (body["bos_token"], body["eos_token"], body["chat_template"]) == (None, "<256>", "{{ messages }}")
