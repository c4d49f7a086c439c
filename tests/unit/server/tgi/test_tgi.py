"""TGI's routes against a scripted engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quire.chat.types import Chunk
from quire.config import ServerConfig
from quire.observe.errors import Busy
from tests.unit.server.fakes import FakeCompleter, client_for
from tests.unit.server.openai.test_completions import Scored

TEXT = "Hello, wörld"


def ask(inputs: str = "say", **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": parameters}


def data(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data:{") for block in blocks), text
    return [json.loads(block[5:]) for block in blocks]


async def test_generate_and_its_details():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        assert (await http.post("/generate", json={"inputs": "say"})).json() == {"generated_text": TEXT}
        body = (await http.post("/generate", json=ask(details=True, decoder_input_details=True, top_n_tokens=2))).json()
    assert completer.seen[0].sampling.temperature == 0 and completer.seen[0].sampling.max_tokens == 100
    assert completer.seen[0].sampling.logprobs is None
    details = body["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 13, None)
    assert [t["text"] for t in details["prefill"]] == ["s", "a", "y"]
    assert [t["logprob"] for t in details["prefill"]] == [None, -0.5, -0.5]
    assert "".join(t["text"] for t in details["tokens"] if not t["special"]) == TEXT
    assert [len(top) for top in details["top_tokens"]] == [2] * 13
    assert details["tokens"][0] == {"id": ord("H"), "text": "H", "logprob": -0.5, "special": False}


async def test_one_event_for_each_token():
    async with client_for() as http:
        r = await http.post("/generate_stream", json=ask(details=True, max_new_tokens=5, return_full_text=True))
    assert r.headers["content-type"].startswith("text/event-stream")
    events = data(r.text)
    assert [e["index"] for e in events] == [1, 2, 3, 4, 5]
    assert "".join(e["token"]["text"] for e in events) == "Hello"
    assert [e["generated_text"] for e in events] == [None] * 4 + ["sayHello"]
    assert events[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 5,
        "seed": None,
        "input_length": 3,
    }
    assert events[0]["details"] is None


async def test_with_stop_sequences_the_last_token_carries_the_end():
    async with client_for() as http:
        events = data((await http.post("/generate_stream", json=ask(stop=["zzz"]))).text)
    assert "".join(e["token"]["text"] for e in events) == TEXT == events[-1]["generated_text"]
    assert all(e["generated_text"] is None for e in events[:-1])


async def test_the_compatible_route_answers_a_list_or_a_stream():
    async with client_for() as http:
        assert (await http.post("/", json={"inputs": "a"})).json() == [{"generated_text": TEXT}]
        events = data((await http.post("/", json={"inputs": "a", "stream": True})).text)
        assert events[-1]["generated_text"] == TEXT
        assert (await http.get("/")).text == "Ollama is running"
        info = (await http.get("/info")).json()
    assert info["max_total_tokens"] == 200 and info["model_id"] == "fake:1b"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 1.0, "top_p": 1.0}, 0.0),
        ({"temperature": 0.5}, 0.5),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"typical_p": 0.9}, 1.0),
    ],
)
async def test_when_tokens_are_drawn(parameters: dict[str, Any], temperature: float):
    completer = FakeCompleter()
    async with client_for(completer) as http:
        body = (await http.post("/generate", json=ask(details=True, **parameters))).json()
    assert completer.seen[0].sampling.temperature == temperature
    assert body["details"]["seed"] == (1234 if temperature else None)


async def test_best_of_is_by_the_mean_and_told_whole():
    async with client_for(Scored(answer="abc")) as http:
        body = (await http.post("/generate", json=ask(details=True, best_of=4, do_sample=True))).json()
    assert body["generated_text"] == "abc2"
    others = body["details"]["best_of_sequences"]
    assert [o["generated_text"] for o in others] == ["abc", "abc3", "abc1"]


class Late(FakeCompleter):
    """Its end comes by itself, with text that was held back, as after half a stop sequence."""

    async def _chunks(self, g: Any) -> Any:
        held = ""
        async for chunk in super()._chunks(g):
            text, held = held, chunk.text
            yield replace(chunk, text=text, finish=None, receipt=None)
            end = chunk
        yield Chunk(text=held, finish=end.finish, stop_reason="d", receipt=end.receipt)


async def test_text_that_comes_after_the_last_token_is_in_its_event():
    completer = Late()
    async with client_for(completer) as http:
        events = data((await http.post("/generate_stream", json=ask(stop=["d"], details=True))).text)
        whole = (await http.post("/generate", json=ask(stop=["d"], details=True))).json()
    assert len(events) == 13 and completer.seen[0].sampling.include_stop
    assert "".join(e["token"]["text"] for e in events) == TEXT == events[-1]["generated_text"]
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert whole["details"]["tokens"] == [e["token"] for e in events]


async def test_truncate_is_honoured_and_told():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        body = (await http.post("/generate", json=ask("abcdef", truncate=4))).json()
        assert completer.seen[-1].prompt == list(b"cdef")
        assert body["quire"] == {"cut_tokens": {"0": 2}}
        completer.tokenizer.add_bos, completer.tokenizer.bos_id = True, ord("a")
        await http.post("/generate", json=ask("abcdef", truncate=4))
        assert completer.seen[-1].prompt == list(b"adef")
        assert "quire" not in (await http.post("/generate", json=ask("abc", truncate=4))).json()


async def test_grammars():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        for grammar, kind, text in (
            ({"type": "json", "value": {"type": "object"}}, "json_schema", '{"type":"object"}'),
            ({"type": "json", "value": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
            ({"type": "regex", "value": "a+"}, "regex", "a+"),
            ({"type": "json_schema", "value": {"name": "x", "schema": {}}}, "json_schema", "{}"),
        ):
            r = await http.post("/generate", json=ask(grammar=grammar))
            assert r.status_code == 200, r.text
            constraint = completer.seen[-1].constraint
            assert constraint is not None and constraint.kind == kind
            assert constraint.text.replace(" ", "") == text.replace(" ", "")


BAD: list[tuple[Any, str]] = [
    ({}, "inputs"),
    ({"inputs": 5}, "inputs"),
    ({"inputs": ""}, "inputs"),
    ({"inputs": "a", "surprise": 1}, "surprise"),
    (ask(surprise=1), "surprise"),
    (ask(watermark=True), "watermark"),
    (ask(temperature=0), "temperature"),
    (ask(temperature=-1), "temperature"),
    (ask(top_k=0), "top_k"),
    (ask(top_p=2), "top_p"),
    (ask(truncate=0), "truncate"),
    (ask(best_of=2), "best_of"),
    (ask(best_of=65, do_sample=True), "best_of"),
    (ask(max_new_tokens=0), "max_new_tokens"),
    (ask(max_new_tokens=500), "max_new_tokens"),
    (ask(top_n_tokens=21), "top_n_tokens"),
    (ask(stop=["x"] * 17), "stop"),
    (ask(stop="x"), "stop"),
    (ask(seed=-(2**70)), "seed"),
    (ask(decoder_input_details=True), "decoder_input_details"),
    (ask(grammar={"type": "lark", "value": "x"}), "grammar"),
    (ask(grammar={"type": "regex", "value": 1}), "grammar"),
    (ask("x" * 300), "inputs"),
    ([], "object"),
]


@pytest.mark.parametrize(("body", "names"), BAD, ids=[str(b)[:60] for b, _ in BAD])
async def test_refusals_in_tgis_shape(body: Any, names: str):
    completer = FakeCompleter()
    async with client_for(completer, strict=True) as http:
        for path in ("/generate", "/generate_stream", "/"):
            r = await http.post(path, json=body)
            assert r.status_code == 422, r.text
            assert set(r.json()) == {"error", "error_type"}
            assert r.json()["error_type"] == "validation" and names in r.json()["error"]
        assert not completer.seen


async def test_an_adapter_that_is_not_loaded():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        r = await http.post("/generate", json=ask(adapter_id="x"))
        assert r.status_code == 404 and set(r.json()) == {"error", "error_type"} and "not served" in r.json()["error"]
        assert not completer.seen
        assert (await http.post("/generate", json=ask(adapter_id=""))).status_code == 200


async def test_what_is_refused_in_a_stream_only():
    async with client_for() as http:
        for more in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True, "details": True}):
            assert (await http.post("/generate", json=ask(**more))).status_code == 200
            assert (await http.post("/generate_stream", json=ask(**more))).status_code == 422


async def test_every_layer_speaks_it():
    completer = FakeCompleter()
    completer.raises = Busy("full")
    async with client_for(completer, ServerConfig(max_body=1000)) as http:
        for path in ("/generate", "/generate_stream", "/"):
            assert (await http.post(path, json=ask())).json()["error_type"] == "overloaded"
            r = await http.post(path, json=ask("x" * 2000))
            assert r.status_code == 413 and set(r.json()) == {"error", "error_type"}
    completer = FakeCompleter()
    completer.dies = RuntimeError("secret")
    async with client_for(completer) as http:
        *_, last = data((await http.post("/generate_stream", json=ask())).text)
    assert set(last) == {"error", "error_type"} and "secret" not in last["error"]


async def test_huggingfaces_own_client_reads_it():
    """Its body for text_generation, and its reading of the answers; a server of its own is in tests/e2e."""
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    async with client_for() as http:
        body = {"inputs": "say", "parameters": {"details": True, "max_new_tokens": 3, "stop": []}, "stream": False}
        (answer,) = (await http.post("/", json=body)).json()
        read = hub.TextGenerationOutput.parse_obj_as_instance(answer)
        assert read.generated_text == "Hel" and read.details is not None
        assert read.details.finish_reason == "length" and len(read.details.tokens) == 3
        events = data((await http.post("/", json=body | {"stream": True})).text)
        parts = [hub.TextGenerationStreamOutput.parse_obj_as_instance(e) for e in events]
        assert "".join(p.token.text for p in parts) == "Hel"
