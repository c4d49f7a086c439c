"""llama.cpp's own routes against a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from quire.chat.infill import Infill
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, events

TEXT = "Hello, wörld"


async def test_completion():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        body = (await http.post("/completion", json={"prompt": "say", "return_tokens": True})).json()
        same = (await http.post("/completions", json={"prompt": [115, 97, 121], "n_predict": 5})).json()
    assert body["content"] == TEXT and body["tokens"] == list(TEXT.encode())
    assert (body["stop_type"], body["stopping_word"], body["truncated"]) == ("eos", "", False)
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens_cached"]) == (13, 3, 3)
    assert body["generation_settings"]["seed"] == 1234
    assert body["timings"]["prompt_ms"] == 20 and body["timings"]["predicted_per_second"] == 12 / 0.03
    assert (same["content"], same["stop_type"], same["tokens"]) == ("Hello", "limit", [])
    s = completer.seen[0].sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.max_tokens) == (0.8, 40, 0.95, 0.05, 197)
    assert completer.seen[1].prompt == completer.seen[0].prompt


async def test_stream():
    async with client_for() as http:
        r = await http.post("/completion", json={"prompt": "say", "stream": True, "n_probs": 2})
    *parts, last = events(r.text)
    assert "".join(p["content"] for p in parts) == TEXT
    assert [p["stop"] for p in parts] == [False] * len(parts) and last["stop"] is True and last["content"] == ""
    first = parts[0]["completion_probabilities"][0]
    assert (first["token"], first["logprob"], len(first["top_logprobs"])) == ("H", -0.5, 2)


async def test_infill():
    completer = FakeCompleter()
    body = {"input_prefix": "a", "input_suffix": "b", "cache_prompt": True}
    async with client_for(completer) as http:
        r = await http.post("/infill", json=body)
        assert r.status_code == 400 and MODEL in r.json()["error"]["message"]
        completer.tokenizer.infill = Infill(260, 261, 262, (260, 263))
        assert (await http.post("/infill", json=body)).json()["content"] == TEXT
    assert completer.seen[0].prompt == [260, 97, 261, 98, 262]
    assert completer.seen[0].sampling.stop_token_ids == (260, 263)


async def test_props():
    async with client_for() as http:
        body = (await http.get("/props")).json()
    assert body["default_generation_settings"]["n_ctx"] == 200 and body["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": 500}, "n_predict"),
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"mirostat": 1}, "mirostat"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"temperature": 1e9}, "temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"n_probs": 21}, "n_probs"),
        ({"logit_bias": [["hello", 1]]}, "logit_bias"),
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"grammar": "root ::= x", "json_schema": {}}, "json_schema"),
        ({"surprise": 1}, "surprise"),
    ],
)
async def test_refusals(more: dict[str, Any], names: str):
    completer = FakeCompleter()
    async with client_for(completer, strict=True) as http:
        r = await http.post("/completion", json={"prompt": "a"} | more)
        assert r.status_code == 400, r.text
        assert set(r.json()["error"]) == {"code", "message", "type"} and names in r.json()["error"]["message"]
        assert not completer.seen


async def test_biases_and_constraints():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        for bias in ([[5, -1], [6, False]], {"5": -1, "6": False}):
            assert (await http.post("/completion", json={"prompt": "a", "logit_bias": bias})).status_code == 200
            assert completer.seen[-1].sampling.logit_bias == {5: -1.0, 6: -100.0}
        await http.post("/completion", json={"prompt": "a", "json_schema": {"type": "object"}})
        constraint = completer.seen[-1].constraint
        assert constraint is not None and constraint.text == '{"type":"object"}'
