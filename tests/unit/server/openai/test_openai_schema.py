"""Every answer of OpenAI's routes against the schema that OpenAI publishes: what it requires is there, null or not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.observe.errors import Busy, EngineDead, QuireError
from quire.server.served import Model
from quire.server.server import Server
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, client_for, events
from tests.unit.server.openai.openai_schema import conforms, conforms_event
from tests.unit.server.openai.test_batches import begin, line, server, until
from tests.unit.server.scripts import THINKS_AND_CALLS

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAYS = {"messages": [{"role": "user", "content": "hi"}]}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CHATS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "max_tokens": 3},
    {"logprobs": True, "top_logprobs": 2},
    {"service_tier": "auto", "prediction": {"type": "content", "content": "x"}, "store": False, "metadata": {}},
    {"stop": "l", "return_token_ids": True, "receipts": True, "timings_per_token": True},
    {"prompt_logprobs": 1},
)
TEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": ["a", "b"], "n": 2, "max_tokens": 2},
    {"echo": True, "logprobs": 2, "max_tokens": 2},
    {"best_of": 3},
    {"echo": True, "logprobs": 0, "max_tokens": 0},
)
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"instructions": "Be kind.", "metadata": {"a": "b"}, "user": "u", "temperature": 0, "prompt_cache_key": "k"},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"max_output_tokens": 3},
    {"store": False, "truncation": "disabled", "text": {"format": {"type": "json_object"}, "verbosity": "medium"}},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
)
THINKS = {
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "tools": [{"type": "function", **WEATHER}, {"type": "function", "name": "time", "strict": True}],
    "tool_choice": "auto",
}


def caller() -> FakeCompleter:
    """An engine whose answer thinks, speaks and calls."""
    made = FakeCompleter()
    made.answer_format = CALLER
    made.script = THINKS_AND_CALLS
    return made


async def good(http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    r = await http.post(path, json={"model": MODEL, **body})
    assert r.status_code == 200, r.text
    return r


@pytest.mark.parametrize("asked", CHATS, ids=[",".join(a) or "plain" for a in CHATS])
async def test_chat(asked: dict[str, Any]):
    async with client_for() as http:
        conforms("CreateChatCompletionResponse", (await good(http, CHAT, **SAYS, **asked)).json())
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await good(http, CHAT, **SAYS, **asked, **options)).text)
    assert chunks.pop() == "[DONE]" and len(chunks) > 3
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk)


async def test_chat_with_calls_and_thoughts():
    tools = [{"type": "function", "function": WEATHER}]
    async with client_for(caller()) as http:
        conforms("CreateChatCompletionResponse", (await good(http, CHAT, **SAYS, tools=tools)).json())
        for chunk in events((await good(http, CHAT, **SAYS, tools=tools, stream=True)).text)[:-1]:
            conforms("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("asked", TEXTS, ids=[",".join(a) or "plain" for a in TEXTS])
async def test_completions(asked: dict[str, Any]):
    async with client_for() as http:
        conforms("CreateCompletionResponse", scored((await good(http, TEXT, **({"prompt": "hi"} | asked))).json()))
        if "best_of" in asked:
            return
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await good(http, TEXT, **({"prompt": "hi"} | asked), **options)).text)
    assert chunks.pop() == "[DONE]"
    assert chunks[-1]["usage"]["total_tokens"] and all(chunk.pop("usage") is None for chunk in chunks[:-1])
    for chunk in chunks:
        for choice in chunk["choices"]:
            # OpenAI's own streams have null until the end, which its schema, written for whole answers, does not know.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        conforms("CreateCompletionResponse", scored(chunk))


def scored(body: dict[str, Any]) -> dict[str, Any]:
    """The answer with a number for the first token of an echo, which nothing predicts: OpenAI and every harness have null there,
    and the schema does not know it."""
    for choice in body["choices"]:
        told = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        assert None not in told["token_logprobs"][1:]
        told["token_logprobs"] = [p or 0.0 for p in told["token_logprobs"]]
        told["top_logprobs"] = [top or {} for top in told["top_logprobs"]]
    return body


@pytest.mark.parametrize("asked", ASKED, ids=[",".join(a) or "plain" for a in ASKED])
async def test_responses(asked: dict[str, Any]):
    async with client_for() as http:
        body = (await good(http, RESPONSES, input="hi", **asked)).json()
        conforms("Response", body)
        for event in named((await good(http, RESPONSES, input="hi", stream=True, **asked)).text):
            conforms_event(event)
        if body["store"]:
            conforms("Response", (await http.get(f"{RESPONSES}/{body['id']}")).json())
            conforms("ResponseItemList", (await http.get(f"{RESPONSES}/{body['id']}/input_items")).json())
        count = {k: v for k, v in asked.items() if k in ("instructions", "text", "truncation")}
        conforms("TokenCountsResource", (await good(http, f"{RESPONSES}/input_tokens", input="hi", **count)).json())


async def test_responses_of_every_kind_of_item():
    async with client_for(caller()) as http:
        found = named((await good(http, RESPONSES, input="hi", stream=True, **THINKS)).text)
        for event in found:
            conforms_event(event)
        whole = found[-1]["response"]
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
        conforms("Response", (await http.get(f"{RESPONSES}/{whole['id']}")).json())
        calls = [item for item in whole["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": c["call_id"], "output": "5"} for c in calls]
        named_choice = {"tool_choice": {"type": "function", "name": "time"}, "previous_response_id": whole["id"]}
        after = (await good(http, RESPONSES, input=results, **(THINKS | named_choice))).json()
        conforms("Response", after)
        items = (await http.get(f"{RESPONSES}/{after['id']}/input_items?limit=100")).json()
        assert len(items["data"]) == 7
        conforms("ResponseItemList", items)


async def test_responses_that_fail_wait_and_are_cancelled():
    completer = FakeCompleter(answer="x" * 50)
    completer.dies = EngineDead("it died")
    async with client_for(completer) as http:
        found = named((await good(http, RESPONSES, input="hi", stream=True)).text)
        assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
        for event in found:
            conforms_event(event)
    completer.dies, completer.delay = None, 0.05
    async with client_for(completer) as http:
        waiting = (await good(http, RESPONSES, input="hi", background=True)).json()
        conforms("Response", waiting)
        assert waiting["status"] == "queued"
        over = (await http.post(f"{RESPONSES}/{waiting['id']}/cancel")).json()
        conforms("Response", over)
        assert over["status"] == "cancelled"


async def test_models():
    service = Server(ServerConfig(), [Model(MODEL)])
    for ready in (False, True):
        if ready:
            completer = FakeCompleter()
            service.attach(service.models.first, completer.client, completer)
        async with client_for(service=service) as http:
            conforms("ListModelsResponse", (await http.get("/v1/models")).json())
            conforms("Model", (await http.get(f"/v1/models/{MODEL}")).json())


async def test_files_and_batches(tmp_path: Path):
    async with server(ServerConfig(state_dir=tmp_path, batch_lines=2)) as http:
        conforms("ListBatchesResponse", (await http.get("/v1/batches")).json())
        form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await http.post("/v1/files", data=form, files={"file": ("a.jsonl", b"{}\n")})).json()
        conforms("OpenAIFile", file)
        done = await until(http, await begin(http, line(0) + "\n" + line(1, temperature=-1), metadata={"a": "b"}))
        conforms("Batch", done)
        bad = await until(http, await begin(http, "nonsense"))
        assert bad["status"] == "failed" and bad["errors"]["data"]
        conforms("Batch", bad)
        conforms("ListBatchesResponse", (await http.get("/v1/batches")).json())
        listed = (await http.get("/v1/files")).json()
        assert {one["purpose"] for one in listed["data"]} == {"batch", "batch_output"}
        conforms("ListFilesResponse", listed)
        conforms("DeleteFileResponse", (await http.delete(f"/v1/files/{file['id']}")).json())


FAULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", CHAT, {"content": b"{"}),
    ("POST", CHAT, {"json": SAYS | {"temperature": -1}}),
    ("POST", CHAT, {"json": SAYS | {"surprise": 1}}),
    ("POST", CHAT, {"json": SAYS | {"model": "other"}}),
    ("POST", CHAT, {"content": b"{}", "headers": {"content-type": "text/plain"}}),
    ("POST", TEXT, {"json": {"prompt": "x" * 300}}),
    ("POST", RESPONSES, {"json": {"input": "hi", "previous_response_id": "resp_x"}}),
    ("GET", f"{RESPONSES}/resp_x", {}),
    ("POST", "/v1/embeddings", {"json": {"input": "hi"}}),
    ("GET", "/v1/files/x", {}),
    ("GET", "/v1/nowhere", {}),
    ("DELETE", CHAT, {}),
    ("POST", CHAT, {"content": b"x" * 2000, "headers": {"content-type": "application/json"}}),
]


@pytest.mark.parametrize(("method", "path", "more"), FAULTS, ids=[f"{m} {p} {str(b)[:40]}" for m, p, b in FAULTS])
async def test_errors(method: str, path: str, more: dict[str, Any]):
    async with client_for(config=ServerConfig(max_body=1000), strict=True) as http:
        r = await http.request(method, path, **more)
    assert r.status_code >= 400, r.text
    conforms("ErrorResponse", r.json())
    assert set(r.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("error", [Busy("full"), EngineDead("it died"), QuireError("no")], ids=lambda e: e.code)
async def test_errors_of_the_engine(error: QuireError):
    completer = FakeCompleter()
    completer.raises = error
    async with client_for(completer) as http:
        for stream in (False, True):
            r = await http.post(CHAT, json=SAYS | {"stream": stream})
            assert r.status_code == error.status
            conforms("ErrorResponse", r.json())
    completer.raises, completer.dies = None, error
    async with client_for(completer) as http:
        conforms("ErrorResponse", events((await good(http, CHAT, **SAYS, stream=True)).text)[-2])


async def test_the_oracle_sees_what_is_missing():
    async with client_for() as http:
        body = (await good(http, CHAT, **SAYS)).json()
        response = (await good(http, RESPONSES, input="hi")).json()
    error = {"error": {"message": "m", "type": "t", "code": None, "param": None}}
    for name, whole, path, told in (
        ("CreateChatCompletionResponse", body, ("choices", 0, "message", "refusal"), "refusal"),
        ("CreateChatCompletionResponse", body, ("choices", 0, "logprobs"), "logprobs"),
        ("Response", response, ("incomplete_details",), "incomplete_details"),
        (
            "Response",
            response,
            ("output", 0, "content", 0, "annotations"),
            r"output\.0",
        ),  # a union: no alternative fits
        ("ErrorResponse", error, ("error", "param"), "param"),
    ):
        conforms(name, whole)
        less = copy.deepcopy(whole)
        inside: Any = less
        for key in path[:-1]:
            inside = inside[key]
        del inside[path[-1]]
        with pytest.raises(AssertionError, match=told):
            conforms(name, less)


def named(text: str) -> list[dict[str, Any]]:
    """The events of a streamed response."""
    blocks = [block.partition("\ndata: ")[2] for block in text.split("\n\n") if block.startswith("event: ")]
    return [json.loads(data) for data in blocks]
