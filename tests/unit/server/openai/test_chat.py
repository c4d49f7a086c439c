"""POST /v1/chat/completions against a scripted engine."""

from __future__ import annotations

import pytest

from quire.observe.errors import Busy, EngineDead
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, events, opened_by

HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_whole_answer():
    async with client_for() as http:
        r = await http.post("/v1/chat/completions", json=HI)
    assert r.status_code == 200
    body = r.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    assert body["system_fingerprint"].startswith("fp_")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, wörld", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = len(b"user:hi\n")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 13,
        "total_tokens": prompt + 13,
        "prompt_tokens_details": {"cached_tokens": prompt},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert "quire" not in body


async def test_several_choices_and_length():
    async with client_for() as http:
        r = await http.post("/v1/chat/completions", json=HI | {"n": 3, "max_tokens": 13})
    body = r.json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length", "length"]
    assert body["usage"]["completion_tokens"] == 39
    assert body["usage"]["prompt_tokens"] == 8  # once, not once per choice
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 8  # so this too


async def test_every_sampling_field_arrives():
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"5": 2, "7": -1.5},
        "seed": 42,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "min_tokens": 1,
        "max_completion_tokens": 9,
        "ignore_eos": True,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "prompt_logprobs": 2,
        "skip_special_tokens": False,
        "priority": -3,
        "itl_slo_ms": 40,
        "cache_salt": "tenant",
        "request_id": "mine-1",
    }
    completer = FakeCompleter()
    async with client_for(completer) as http:
        r = await http.post("/v1/chat/completions", json=HI | asked)
    assert r.status_code == 200, r.text
    (g,) = completer.seen
    s = g.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.typical_p) == (0.5, 0.9, 40, 0.1, 0.8)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.1, 0.2, -0.3)
    assert s.logit_bias == {5: 2.0, 7: -1.5}
    assert (s.seed, s.stop, s.stop_token_ids, s.include_stop) == (42, ("a", "b"), (1, 2), True)
    assert (s.min_tokens, s.max_tokens, s.ignore_eos, s.n) == (1, 9, True, 2)
    assert (s.logprobs, s.prompt_logprobs, s.skip_special_tokens) == (3, 2, False)
    assert (g.priority, g.itl, g.namespace) == (-3, 0.04, "tenant")
    assert r.json()["id"] == "chatcmpl-mine-1"
    assert g.id != "mine-1"  # two clients may choose the same one


async def test_null_means_default_and_minus_one_is_no_top_k():
    completer = FakeCompleter()
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "tools", "store"))
    async with client_for(completer) as http:
        r = await http.post("/v1/chat/completions", json=HI | nulls | {"top_k": -1, "stop": "x"})
    assert r.status_code == 200, r.text
    assert completer.seen[0].sampling.temperature == 1.0
    assert completer.seen[0].sampling.top_k == 0
    assert completer.seen[0].sampling.max_tokens is None
    assert completer.seen[0].sampling.stop == ("x",)


async def test_harmless_fields_and_tools_that_must_not_be_called():
    extras = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
    }
    async with client_for() as http:
        r = await http.post("/v1/chat/completions", json=HI | extras)
    assert r.status_code == 200, r.text


async def test_messages_reach_the_template():
    completer = FakeCompleter()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None, "annotations": []}
        | {"provider_specific_fields": {"refusal": None}},  # litellm's
        {"role": "user", "content": ""},
    ]
    ask = {"messages": messages, "add_generation_prompt": False, "chat_template_kwargs": {"thinking": True}}
    async with client_for(completer) as http:
        r = await http.post("/v1/chat/completions", json=ask)
        completer.template.source = "if role == 'developer'"
        await http.post("/v1/chat/completions", json=ask)
    assert r.status_code == 200, r.text
    rendered, kwargs = completer.rendered[0]
    assert rendered == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": ""},
    ]
    assert kwargs == {"thinking": True, "add_generation_prompt": False}
    assert completer.rendered[1][0][0]["role"] == "developer"


async def test_logprobs_carry_bytes():
    async with client_for() as http:
        r = await http.post("/v1/chat/completions", json=HI | {"logprobs": True, "top_logprobs": 2})
    content = r.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 13
    assert content[0]["token"] == "H"
    assert content[0]["bytes"] == [72]
    assert [t["token"] for t in content[0]["top_logprobs"]] == ["H", "I"]
    half = content[8]  # the first byte of ö is no text by itself
    assert half["bytes"] == [0xC3]
    assert half["token"] == "bytes:\\xc3"


async def test_receipts_token_ids_and_prompt_logprobs_on_request():
    ask = HI | {"receipts": True, "return_token_ids": True, "prompt_logprobs": 1, "seed": 7}
    async with client_for() as http:
        body = (await http.post("/v1/chat/completions", json=ask)).json()
    (receipt,) = body["quire"]["receipts"]
    assert (receipt["index"], receipt["seed"], receipt["cached_tokens"], receipt["preemptions"]) == (0, 7, 8, 0)
    assert body["prompt_token_ids"] == list(b"user:hi\n")
    assert body["choices"][0]["token_ids"] == list("Hello, wörld".encode())
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == 8
    assert body["prompt_logprobs"][1][str(ord("s"))]["decoded_token"] == "s"


async def test_a_stream():
    async with client_for() as http:
        r = await http.post("/v1/chat/completions", json=HI | {"stream": True, "n": 2})
    assert r.headers["content-type"].startswith("text/event-stream")
    assert r.headers["cache-control"] == "no-cache"
    assert "content-length" not in r.headers
    found = events(r.text)
    assert found[-1] == "[DONE]"
    chunks = found[:-1]
    assert [c["choices"][0]["delta"] for c in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)
    for index, expected in ((0, "Hello, wörld"), (1, "Hello, wörld1")):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == expected
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


async def test_a_stream_with_usage_logprobs_and_receipts():
    ask = HI | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "receipts": True}
    async with client_for() as http:
        found = events((await http.post("/v1/chat/completions", json=ask)).text)
    *chunks, last, done = found
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 13
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert all(c["usage"] is None for c in chunks)
    tokens = [t for c in chunks for t in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert bytes(b for t in tokens for b in t["bytes"]).decode() == "Hello, wörld"
    assert chunks[-1]["quire"]["receipts"][0]["seed"] == 1234
    assert not any("quire" in c for c in chunks[:-1])


async def test_usage_so_far_in_every_chunk_for_who_asks():
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client_for() as http:
        found = events(
            (await http.post("/v1/chat/completions", json=HI | {"stream": True, "stream_options": options})).text
        )
        alone = HI | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        without = events((await http.post("/v1/chat/completions", json=alone)).text)
    *chunks, last, done = found
    assert done == "[DONE]"
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    text = ["".join(c["choices"][0]["delta"].get("content", "") for c in chunks[: i + 1]) for i in range(len(chunks))]
    assert counts[0] == 0
    # A byte is a token here, and what is held back of a character is counted when it comes.
    assert counts == [len(said.encode()) for said in text]
    for chunk in chunks:
        assert chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
    assert last["usage"]["completion_tokens"] == counts[-1] == 13
    assert all("usage" not in c for c in without[:-1])  # as vLLM: it goes with include_usage


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after(stream: bool):
    completer = FakeCompleter()
    completer.raises = Busy("the queue holds 1024 requests", retry_after=2.2)
    async with client_for(completer) as http:
        r = await http.post("/v1/chat/completions", json=HI | {"stream": stream})
        assert r.status_code == 429
        assert r.headers["retry-after"] == "3"
        assert r.json()["error"]["code"] == "queue_full"
        completer.raises = None
        assert (await http.post("/v1/chat/completions", json=HI)).status_code == 200


async def test_engine_death_before_and_during_an_answer():
    completer = FakeCompleter()
    completer.dies = EngineDead("the engine process died while it held the request")
    async with client_for(completer) as http:
        whole = await http.post("/v1/chat/completions", json=HI)
        assert whole.status_code == 503
        assert whole.json()["error"]["code"] == "engine_dead"
        assert "retry-after" in whole.headers
        found = events((await http.post("/v1/chat/completions", json=HI | {"stream": True})).text)
    assert found[-1] == "[DONE]"
    assert found[-2]["error"]["code"] == "engine_dead"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in found[:-2]) == "Hel"


async def test_engine_errors_never_show_the_machine():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        completer.error_event = "the request needs 400 pages and the pool has 100"
        r = await http.post("/v1/chat/completions", json=HI)
        assert (r.status_code, r.json()["error"]["message"]) == (400, completer.error_event)
        for leak in ("boom at 0x7f33aabbcc", "open('/home/x/model.gguf')", 'File "x.py", line 3'):
            completer.error_event = leak
            r = await http.post("/v1/chat/completions", json=HI)
            assert r.status_code == 400
            assert leak not in r.text
        completer.error_event = None
        completer.dies = RuntimeError("/etc/secret at 0x7fffdeadbeef")
        r = await http.post("/v1/chat/completions", json=HI)
        assert r.status_code == 500
        assert "secret" not in r.text
        r = await http.post("/v1/chat/completions", json=HI | {"stream": True})
        assert "secret" not in r.text
        assert events(r.text)[-2]["error"]["code"] == "internal_error"


async def test_a_long_wait_is_kept_alive(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire.server.replies.FIRST_SECONDS", 0.02)
    monkeypatch.setattr("quire.server.replies.KEEP_ALIVE_SECONDS", 0.01)
    completer = FakeCompleter()
    async with client_for(completer) as http:
        completer.gate = opened_by(http, b": waiting", 2)
        r = await http.post("/v1/chat/completions", json=HI | {"stream": True})
    assert r.text.count(": waiting\n\n") >= 2
    assert events(r.text)[-1] == "[DONE]"
