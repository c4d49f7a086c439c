"""Unknown fields are ignored and told, by every route; strict servers and requests refuse them, lenient ones ignore more."""

from __future__ import annotations

import json
from typing import Any

import httpx
import httpx2
import msgspec
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from quire.config import ServerConfig
from quire.server import ignored
from quire.server.app import create_app
from quire.server.callers import NOBODY
from quire.server.openai.batches.call import Call
from quire.server.reading import Reading
from quire.server.shared import lenient
from quire.server.shared.compat import HONOURED, NEUTRAL, Endpoint, Row
from quire.server.shared.messages import ChatMessage
from tests.effort import at_most
from tests.unit.server.fakes import CALLER, MODEL, URL, FakeCompleter, client_for, events, service_over
from tests.unit.server.test_compat import ASKS, IDS, WITH_FIELDS, body_with, rows_of, send, taken

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEADER = "x-quire-ignored"
LENIENT = {"x-quire-lenient": "true"}
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"model": MODEL, "max_tokens": 4, "messages": USER},
    "/api/chat": {"model": MODEL, "messages": USER},
    "/api/generate": {"model": MODEL, "prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/generate_stream": {"inputs": "hi"},
    f"/v2/models/{MODEL}/generate_stream": {"text_input": "hi"},
}


def caller() -> FakeCompleter:
    made = FakeCompleter(context=2000)
    made.answer_format = CALLER
    return made


def notes_of(value: Any) -> list[str]:
    """Every note in an answer, wherever its API has a place for them."""
    if isinstance(value, list):
        return [note for one in value for note in notes_of(one)]
    if not isinstance(value, dict):
        return []
    own = (value.get("quire") or {}).get("notes", [])
    return [*own, *(note for key, one in value.items() if key != "quire" for note in notes_of(one))]


def lines_of(r: httpx.Response) -> list[Any]:
    """The objects of an answer, whole or streamed."""
    kind = r.headers["content-type"].partition(";")[0]
    if kind == "application/json":
        return [r.json()]
    if kind == "application/x-ndjson":
        return [json.loads(line) for line in r.text.splitlines()]
    return [json.loads(line[5:]) for line in r.text.splitlines() if line.startswith("data:") and "[DONE]" not in line]


@pytest.mark.parametrize("endpoint", WITH_FIELDS, ids=IDS)
async def test_an_unknown_field_of_any_route_is_ignored_and_told(endpoint: Endpoint):
    insides = dict.fromkeys(row.name.rpartition(".")[0] for row in endpoint.rows())
    known = Row("model", HONOURED) if "model" in endpoint.example else None
    for inside in insides:
        name = f"{inside}.surprise" if inside else "surprise"
        asked = FakeCompleter(context=1000), FakeCompleter(context=1000)
        async with client_for(asked[0]) as http:
            await send(http, endpoint, body_with(endpoint, known, MODEL) if known else endpoint.example)
        async with client_for(asked[1]) as http:
            body = body_with(endpoint, Row(name, HONOURED), [1])
            r = await send(http, endpoint, body | ({"model": MODEL} if known else {}))
        if (
            r.status_code != 200
        ):  # the scripted engine does not embed, and has no store: the header is told all the same
            assert taken(endpoint, r) or endpoint.path == "/v1/batches", r.text
        else:
            assert r.status_code == 200, r.text
            notes = notes_of(lines_of(r))
            assert len(notes) == 1 and "surprise: unknown here, ignored" in notes[0], r.text
        assert r.headers[HEADER].endswith("surprise")
        told = [
            str((g.prompt, msgspec.structs.replace(g.sampling, seed=None), g.constraint))
            for one in asked
            for g in one.seen
        ]
        assert len(set(told)) <= 1, "it had an effect"


@pytest.mark.parametrize("path", BODIES)
async def test_streams_tell_it_too_once(path: str):
    async with client_for() as http:
        r = await http.post(
            path,
            json=BODIES[path] | {"stream": True, "max_token": 3, "zz": {}}
            if "stream" not in path
            else BODIES[path] | {"max_token": 3, "zz": {}},
        )
    assert r.status_code == 200, r.text
    assert r.headers[HEADER] == "max_token, zz"
    found = notes_of(lines_of(r))
    assert len(set(found)) == 2 and found[0].startswith("max_token: unknown here, ignored")
    assert len(found) == 2 or path == RESPONSES, "said once, but in responses, whose object comes several times"
    if path in (CHAT, MESSAGES):
        assert "did you mean max_tokens?" in found[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_known_is_told_nothing(stream: bool):
    async with client_for() as http:
        for path, body in BODIES.items():
            asked = body if "stream" in path else body | {"stream": stream}
            r = await http.post(path, json=asked)
            assert r.status_code == 200 and HEADER not in r.headers and not notes_of(lines_of(r)), (path, r.text)


NESTED: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "a": 1}], "b": 2},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}", "c": 1}, "d": 1}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "x", "e": [{}]},
            ],
            "tools": [TOOL | {"f": 1}, {"type": "function", "function": {"name": "g", "g": 1}}],
            "stream": True,
            "stream_options": {"include_usage": True, "h": 1},
            "response_format": {"type": "text", "i": 1},
        },
        [
            *("messages[0].content[0].a", "messages[0].b", "messages[1].tool_calls[0].d"),
            *("messages[1].tool_calls[0].function.c", "messages[2].e", "tools[0].f", "tools[1].function.g"),
            *("stream_options.h", "response_format.i"),
        ],
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi", "a": 1}], "b": 1},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "c": 1},
                {"type": "function_call_output", "call_id": "c", "output": "x", "d": 1},
            ],
            "text": {"e": 1},
            "reasoning": {"f": 1},
            "tools": [{"type": "function", "name": "f", "g": 1}],
        },
        ["input[0].content[0].a", "input[0].b", "input[1].c", "input[2].d", "text.e", "reasoning.f", "tools[0].g"],
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "a": 1}], "b": 1},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}, "c": 1}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "d": 1}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "e": 1}],
            "thinking": {"type": "adaptive", "f": 1},
            "metadata": {"g": 1},
        },
        [
            *("messages.0.content.0.a", "messages[0].b", "messages.1.content.0.c", "messages.2.content.0.d"),
            *("tools[0].e", "thinking.f", "metadata.g"),
        ],
    ),
    (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "hi", "a": 1},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}, "b": 1}, "c": 1}]},
                {"role": "tool", "content": "x"},
            ],
            "options": {"temperatur": 0.5},
            "tools": [TOOL | {"d": 1}],
        },
        [
            *("messages[0].a", "messages[1].tool_calls[0].function.b", "messages[1].tool_calls[0].c"),
            *("options.temperatur", "tools[0].d"),
        ],
    ),
    ("/generate", {"inputs": "hi", "parameters": {"grammar": {"type": "regex", "value": "a", "b": 1}, "c": 1}}, ["parameters.grammar.b", "parameters.c"]),
    (
        f"/v2/models/{MODEL}/infer",
        {
            "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"], "b": 1}],
            "outputs": [{"name": "text_output", "parameters": {"c": 1}, "d": 1}],
        },
        ["inputs[0].b", "outputs[0].d", "outputs[0].parameters.c"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "names"), NESTED, ids=[p for p, _, _ in NESTED])
async def test_unknown_fields_of_objects_are_told_by_their_paths(path: str, more: dict[str, Any], names: list[str]):
    async with client_for(caller()) as http:
        body = BODIES.get(path, {}) | more
        r = await http.post(path, json=body)
        assert r.status_code == 200, r.text
        assert sorted(r.headers[HEADER].split(", ")) == sorted(names)
        assert {note.split(": ")[0] for note in notes_of(lines_of(r))} == set(names)
        refused = await http.post(path, json=body, headers={"x-quire-strict": "true"})
        assert refused.status_code in (400, 422) and not notes_of(lines_of(refused))


async def test_what_stays_is_read_as_it_came():
    completer = caller()
    arguments = {"n": 12345678901234567890123, "x": 1.10, "a": [1e3]}
    turns = [
        {"role": "user", "content": "é\u2028"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    async with client_for(completer) as http:
        for extra in ({}, {"zz": 1}):
            r = await http.post(CHAT, json={"messages": [turn | extra for turn in turns], "seed": 1})
            assert r.status_code == 200, r.text
    assert completer.rendered[0] == completer.rendered[1]


def test_only_what_structs_forbid_is_taken_out():
    scope: Any = {lenient._LEVEL: "tell"}
    reading = Reading(scope)
    raw = b'{"role" :"user", "content": [ {"type":"text", "x":1} ], "y": {"role": 2}}'
    made = lenient.pruned(reading.unknown, raw, ChatMessage, "messages[3]")
    assert bytes(made) == b'{"role":"user","content":[{"type":"text"}]}'
    assert ignored.take(scope) == [
        "messages[3].content[0].x: unknown here, ignored",
        "messages[3].y: unknown here, ignored",
    ]
    for other in (b"1", b"[", b'{"role":', b"\xff", b"{" * 10, b'{"content":"\\ud800"}'):
        assert bytes(lenient.pruned(reading.unknown, other, ChatMessage)) == other, "who decodes it says what is wrong"


# Levels


@pytest.mark.parametrize(
    ("server", "headers", "unknown", "known"),
    [
        ("tell", {}, 200, 400),
        ("strict", {}, 400, 400),
        ("lenient", {}, 200, 200),
        ("tell", {"X-Quire-Strict": "true"}, 400, 400),
        ("tell", {"X-Quire-Lenient": "TRUE"}, 200, 200),
        ("strict", {"X-Quire-Lenient": "1"}, 200, 200),
        ("lenient", {"X-Quire-Strict": "true"}, 400, 400),
        ("strict", {"X-Quire-Strict": "false"}, 200, 400),
        ("lenient", {"X-Quire-Lenient": "0"}, 200, 400),
        ("strict", {"X-Quire-Lenient": "false"}, 400, 400),
        ("tell", {"X-Quire-Lenient": "false", "X-Quire-Strict": "false"}, 200, 400),
        ("tell", {"X-Quire-Lenient": "true", "X-Quire-Strict": "true"}, 400, 400),
        ("tell", {"X-Quire-Lenient": "perhaps"}, 400, 400),
    ],
)
async def test_the_header_says_more_than_the_server(server: Any, headers: dict[str, str], unknown: int, known: int):
    async with client_for(config=ServerConfig(fields=server)) as http:
        for fields, status in (({"zz": 1}, unknown), ({"mirostat": 2}, known)):
            for body in (fields, {"messages": [USER[0] | fields]}) if fields == {"zz": 1} else (fields,):
                r = await http.post(CHAT, json={"messages": USER} | body, headers=headers)
                assert r.status_code == status, r.text
                assert (HEADER in r.headers) == (status == 200)
        assert (await http.post(CHAT, json={"messages": USER})).status_code == 200


async def test_strict_refusals_say_what_was_meant():
    async with client_for(config=ServerConfig(fields="strict")) as http:
        error = (await http.post(CHAT, json={"messages": USER, "temperatur": 1})).json()["error"]
    assert error["message"] == "Unrecognized request argument supplied: temperatur (did you mean temperature?)"


@pytest.mark.parametrize(("endpoint", "rows"), rows_of(NEUTRAL))
async def test_lenient_ignores_what_cannot_be_honoured_and_tells_it(endpoint: Endpoint, rows: list[Row]):
    async with client_for(FakeCompleter(context=1000)) as http:
        http.headers.update(LENIENT)
        for row in rows:
            r = await send(http, endpoint, body_with(endpoint, row, ASKS))
            assert taken(endpoint, r), (row, r.text)
            assert r.headers[HEADER].endswith(row.name.rpartition(".")[2]), row
            if r.status_code == 200:
                assert "not supported" in notes_of(lines_of(r))[0]


SCHEMA = {"type": "object"}
EXCUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [{"type": "mcp", "mcp": {"name": "x"}}, TOOL]}, "tools[0].type"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (CHAT, {"documents": [{"text": "x"}]}, "documents"),
    (CHAT, {"add_special_tokens": True}, "add_special_tokens"),
    (RESPONSES, {"tools": [{"type": "file_search"}]}, "tools[0].type"),
    (RESPONSES, {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "tools[0].environment.type"),
    (RESPONSES, {"context_management": [{"type": "later"}]}, "context_management.type"),
    (RESPONSES, {"n": 2, "response_format": {"type": "json_object"}}, "response_format, n"),
    (RESPONSES, {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    (MESSAGES, {"mcp_servers": [{"url": "x"}], "container": "c"}, "mcp_servers, container"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA, "input_examples": [1]}]}, "tools[0].input_examples"),
    (MESSAGES, {"context_management": {"edits": [{"type": "later_20300101"}]}}, "context_management.edits[0].type"),
    ("/api/chat", {"options": {"num_ctx": 99_999}}, "options.num_ctx"),
    ("/api/chat", {"options": {"repeat_last_n": 4, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
    (f"/v2/models/{MODEL}/generate_stream", {"n": 2, "receipts": True}, "n, receipts"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "names"), EXCUSED, ids=[f"{p} {n}" for p, _, n in EXCUSED])
async def test_lenient_leaves_out_what_does_not_run_here(path: str, more: dict[str, Any], names: str):
    completer = caller()
    async with client_for(completer) as http:
        body = BODIES[path] | more
        refused = await http.post(path, json=body)
        assert refused.status_code in (400, 422) and HEADER not in refused.headers, refused.text
        r = await http.post(path, json=body, headers=LENIENT)
        assert r.status_code == 200, r.text
        assert r.headers[HEADER] == names
        assert len(set(notes_of(lines_of(r)))) == names.count(",") + 1
        plain = await http.post(path, json=BODIES[path])
        assert plain.status_code == 200
    first, second = completer.seen
    assert (first.prompt, first.constraint, first.sampling.n) == (second.prompt, second.constraint, 1)


INSIDE: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "name": "f", "zz": 1}]}, "tools[0].zz"),
    ({"tools": [{"type": "custom", "name": "f", "zz": 1}]}, "tools[0].zz"),
    ({"tools": [{"type": "custom", "name": "f", "format": {"type": "text", "zz": 1}}]}, "tools[0].format.zz"),
    (
        {
            "tools": [
                {
                    "type": "custom",
                    "name": "f",
                    "format": {"type": "grammar", "syntax": "regex", "definition": "a", "zz": 1},
                }
            ]
        },
        "tools[0].format.zz",
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "zz": 1, "tools": [{"type": "function", "name": "f", "yy": 1}]}]},
        "tools[0].zz, tools[0].tools[0].yy",
    ),
    ({"tools": [{"type": "shell", "zz": 1}]}, "tools[0].zz"),
    ({"tools": [{"type": "tool_search", "execution": "client", "zz": 1}]}, "tools[0].zz"),
    (
        {
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "zz": 1,
                "tools": [{"type": "function", "name": "f"}],
            },
        },
        "tool_choice.zz",
    ),
    ({"reasoning": {"zz": 1}, "text": {"format": {"type": "text", "zz": 1}}}, "reasoning.zz, text.format.zz"),
    ({"context_management": [{"type": "compaction", "compact_threshold": 99, "zz": 1}]}, "context_management[0].zz"),
    (
        {"input": [{"role": "user", "zz": 1, "content": [{"type": "input_text", "text": "hi", "zz": 1}]}]},
        "input[0].zz, input[0].content[0].zz",
    ),
    (
        {"input": [{"role": "user", "content": "hi"}, {"type": "configuration_update", "reasoning": {"zz": 1}}]},
        "input[1].reasoning.zz",
    ),
    (
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "f", "zz": 1}]},
            ]
        },
        "input[1].tools[0].zz",
    ),
    (
        {
            "input": [
                {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"], "zz": 1}},
                {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "zz": 1}]},
            ]
        },
        "input[0].action.zz, input[1].output[0].zz",
    ),
    (
        {
            "input": [
                {
                    "type": "apply_patch_call",
                    "call_id": "c",
                    "operation": {"type": "delete_file", "path": "x", "zz": 1},
                },
                {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
            ]
        },
        "input[0].operation.zz",
    ),
]


@pytest.mark.parametrize(("more", "names"), INSIDE, ids=[f"{next(iter(m))} {n}" for m, n in INSIDE])
async def test_unknown_fields_inside_of_a_response_are_ignored_and_told(more: dict[str, Any], names: str):
    """The prompt is what it is without them, and a strict request is refused by the name of the first."""
    completer = caller()
    body = BODIES[RESPONSES] | more
    known = without(body)
    async with client_for(completer) as http:
        r = await http.post(RESPONSES, json=body)
        assert r.status_code == 200 and r.headers[HEADER] == names, r.text
        assert [note.partition(":")[0] for note in r.json()["quire"]["notes"]] == names.split(", ")
        plain = await http.post(RESPONSES, json=known)
        assert plain.status_code == 200 and HEADER not in plain.headers, plain.text
        strict = await http.post(RESPONSES, json=body, headers={"x-quire-strict": "true"})
        assert strict.status_code == 400 and strict.json()["error"]["param"].endswith(("zz", "yy")), strict.text
    first, second = completer.seen
    assert (first.prompt, first.constraint) == (second.prompt, second.constraint)


def without(value: Any) -> Any:
    """A body without what nobody knows."""
    if isinstance(value, list):
        return [without(one) for one in value]
    if isinstance(value, dict):
        return {name: without(one) for name, one in value.items() if name not in ("zz", "yy")}
    return value


# Hostile bodies


async def test_many_unknown_fields_are_cheap_and_told_in_few_words():
    many = {f"field{i}": i for i in range(100_000)}
    async with client_for() as http:
        for body in (
            {"messages": USER} | many,
            {"messages": [USER[0] | many]},
            {"messages": [{**USER[0], f"x{i}": 1} for i in range(19_000)]},
        ):
            with at_most(4.0):
                r = await http.post(CHAT, json=body)
            assert len(r.headers[HEADER]) < 2500 and r.headers[HEADER].endswith(" more")
            assert r.status_code == 200 or "context" in r.text
            if r.status_code == 200:
                notes = r.json()["quire"]["notes"]
                assert len(notes) == ignored.MOST + 1 and notes[-1] == "99984 more fields: ignored"
                assert len(r.text) < 5000


async def test_names_cannot_write_headers():
    names = ["a\r\nset-cookie: x=1", "b, c", "é\u2028\u0000", "z" * 5000, "", "messages[0]"]
    async with client_for() as http:
        r = await http.post(CHAT, json={"messages": USER} | dict.fromkeys(names, 1))
    assert r.status_code == 200, r.text
    assert r.headers[HEADER] == ", ".join(["a??set-cookie:?x?1", "b??c", "???", "z" * 128, "", "messages[0]"])
    assert "set-cookie" not in r.headers and len(r.json()["quire"]["notes"]) == len(names)


async def test_a_key_that_comes_twice_is_still_refused():
    async with client_for() as http:
        body = b'{"messages": [{"role": "user", "content": "hi"}], "zz": 1, "zz": 2}'
        r = await http.post(CHAT, content=body, headers={"content-type": "application/json"} | LENIENT)
        assert r.status_code == 400 and r.json()["error"]["code"] == "duplicate_key"


async def test_refusals_tell_what_was_ignored_in_the_header():
    async with client_for() as http:
        r = await http.post(CHAT, json={"messages": USER, "zz": 1, "n": 0})
        assert r.status_code == 400 and r.json()["error"]["param"] == "n" and r.headers[HEADER] == "zz"
        assert set(r.json()) == {"error"}


# Official clients


async def test_openais_client_reads_the_notes():
    async with client_for(caller()) as http:
        theirs: Any = http
        client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="x", http_client=theirs, max_retries=0)
        extra = {"extra_body": {"zz_budget": 5}}
        whole: Any = await client.chat.completions.create(model=MODEL, messages=USER, **extra)  # type: ignore[arg-type]
        assert whole.quire["notes"] == ["zz_budget: unknown here, ignored"]
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True, **extra)  # type: ignore[arg-type]
        chunks: list[Any] = [chunk async for chunk in stream]
        assert [chunk.quire["notes"] for chunk in chunks if hasattr(chunk, "quire")] == [whole.quire["notes"]]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        text: Any = await client.completions.create(model=MODEL, prompt="hi", **extra)  # type: ignore[arg-type]
        response: Any = await client.responses.create(model=MODEL, input="hi", **extra)  # type: ignore[arg-type]
        assert text.quire == response.quire == whole.quire
        kept: Any = await client.responses.retrieve(response.id)
        assert kept.quire == whole.quire
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=USER, **extra)  # type: ignore[arg-type]
        assert raw.headers[HEADER] == "zz_budget"


async def test_anthropics_client_reads_the_notes():
    async with client_for(caller()) as http:
        transport: Any = http._transport
        theirs = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=transport.app))
        client = AsyncAnthropic(base_url=URL, api_key="x", http_client=theirs, max_retries=0)
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": USER, "extra_body": {"zz": 5}}
        whole: Any = await client.messages.create(**asked)
        assert whole.quire["notes"] == ["zz: unknown here, ignored"]
        async with client.messages.stream(**asked) as stream:
            final: Any = await stream.get_final_message()
        assert final.quire["notes"] == whole.quire["notes"] and final.content[0].text == whole.content[0].text


async def test_a_line_of_a_batch_is_told_in_its_body():
    completer = FakeCompleter()
    app = create_app(ServerConfig(), service_over(completer))
    status, body = await Call(app)(CHAT, json.dumps({"messages": USER, "zz": 1}).encode(), NOBODY)
    assert (status, notes_of(json.loads(body))) == (200, ["zz: unknown here, ignored"])


async def test_notes_go_beside_receipts():
    async with client_for() as http:
        r = await http.post(CHAT, json={"messages": USER, "stream": True, "zz": 1, "receipts": True})
    found = events(r.text)
    assert found[0]["quire"] == {"notes": ["zz: unknown here, ignored"]} and found[-1] == "[DONE]"
    assert [one["quire"].keys() for one in found[1:-1] if "quire" in one] == [{"receipts"}]
