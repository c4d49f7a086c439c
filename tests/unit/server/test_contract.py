"""Requests made from each dialect's own structs, valid, nearly valid and junk: never a 5xx, never a hang, errors in shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.server import compat
from quire.server.app import create_app
from quire.server.dialects._compat import Endpoint
from tests.unit.server.fakes import MODEL, URL, FakeCompleter, service_over

SECONDS = 5.0  # for one answer
ENDPOINTS = [e for e in compat.endpoints() if e.fields]
FEW = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

TEXT = st.text(max_size=12)
NUMBER = st.integers(-3, 40) | st.integers() | st.floats(-3, 40) | st.floats()
LEAF = st.none() | st.booleans() | NUMBER | TEXT
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)


def fitting(node: Any) -> st.SearchStrategy[Any]:
    """Values that a type takes."""
    inspect = msgspec.inspect
    match node:
        case inspect.UnionType(types=types):
            return st.one_of(*(fitting(t) for t in types))
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(0, 5) | st.integers(-2, 300)
        case inspect.FloatType():
            return st.floats(0, 1) | st.integers(0, 3)
        case inspect.StrType():
            return st.sampled_from(["a", MODEL, "user", "text", "json", "json_object", "float", "auto", "none"]) | TEXT
        case inspect.ListType(item_type=item):
            return st.lists(fitting(item), max_size=3)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(fitting(key).map(str), fitting(value), max_size=3)
        case inspect.StructType(fields=fields):
            return struct(fields)
        case _:
            return JSON


@st.composite
def struct(draw: st.DrawFn, fields: Any) -> dict[str, Any]:
    """What must be there, and a few of the others."""
    needed = [f for f in fields if f.required]
    others = [f for f in fields if not f.required]
    some = draw(st.lists(st.sampled_from(others), max_size=4, unique_by=lambda f: f.encode_name)) if others else []
    return {f.encode_name: draw(fitting(f.type)) for f in (*needed, *some)}


def bodies(endpoint: Endpoint) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies whose fields have the right types, around the smallest that is answered."""
    parts = [(part.inside, struct(msgspec.inspect.type_info(part.shape).fields)) for part in endpoint.fields]  # type: ignore[attr-defined]
    example = {k: (v or MODEL if k == "model" else v) for k, v in endpoint.example.items()}

    def whole(pieces: list[dict[str, Any]], keep: bool) -> dict[str, Any]:
        body: dict[str, Any] = {}
        for (inside, _), piece in zip(parts, pieces, strict=True):
            if inside:
                body[inside] = piece
            else:
                body |= piece
        return body | example if keep else body

    return st.builds(whole, st.tuples(*(made for _, made in parts)).map(list), st.booleans())


@st.composite
def nearly(draw: st.DrawFn, endpoint: Endpoint) -> Any:
    """A body with something wrong in it."""
    body = draw(bodies(endpoint))
    where = body
    if body and draw(st.booleans()):
        nested = [v for v in body.values() if isinstance(v, dict) and v]
        where = draw(st.sampled_from(nested)) if nested else body
    if where:
        where[draw(st.sampled_from(sorted(where)))] = draw(JSON)
    if draw(st.booleans()):
        where[draw(TEXT)] = draw(LEAF)
    return body


def shape_of(path: str, body: Any) -> None:
    """An error as the path's dialect has it."""
    assert isinstance(body, dict), body
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and {"type", "message"} <= set(body["error"])
    elif path.startswith("/api/"):
        assert isinstance(body["error"], str) and body["error"]
    elif path.startswith("/generate") or path == "/":
        assert set(body) == {"error", "error_type"} and body["error"]
    elif path.startswith(("/completion", "/infill")):
        assert set(body["error"]) == {"code", "message", "type"} and body["error"]["message"]
    elif path.startswith("/v2/models"):
        assert set(body) == {"error"} and isinstance(body["error"], str)
    else:
        error = body["error"]
        assert {"message", "type", "param", "code"} <= set(error) and error["message"]


def check(path: str, r: httpx.Response) -> None:
    assert r.status_code == 200 or 400 <= r.status_code < 500 or r.status_code == 501, (r.status_code, r.text)
    kind = r.headers.get("content-type", "")
    if r.status_code != 200:
        shape_of(path, r.json())
        return
    if kind.startswith("text/event-stream"):
        lines = [line for line in r.text.splitlines() if line.startswith("data:")]
        for line in lines:
            assert line[5:].strip() == "[DONE]" or isinstance(json.loads(line[5:]), dict | list)
        assert lines or "stream" in path  # an empty answer of a stream that ends with its body
    elif kind.startswith("application/x-ndjson"):
        assert all(isinstance(json.loads(line), dict) for line in r.text.splitlines())
    elif kind.startswith("application/json"):
        r.json()


class Wire:
    """One app and one loop for all examples of a test."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.completer = FakeCompleter(answer="ok")
        app = create_app(ServerConfig(), service_over(self.completer))
        self.transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    def send(self, endpoint: Endpoint, content: bytes) -> None:
        path = endpoint.path.replace("{name}", MODEL)

        async def one() -> httpx.Response:
            http = httpx.AsyncClient(transport=self.transport, base_url=URL, trust_env=False)
            async with http, asyncio.timeout(SECONDS):
                headers = {"content-type": "application/json"}
                return await http.request(endpoint.method, path, content=content, headers=headers)

        r = self.runner.run(one())
        check(path, r)
        assert self.completer.running == 0, "nothing is left running"


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    made = Wire()
    with made.runner:
        yield made


def encoded(body: Any) -> bytes:
    """As JSON, NaN and lone surrogates included: the server has to know what to do with them."""
    return json.dumps(body).encode()


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=[f"{e.method} {e.path}" for e in ENDPOINTS])
def test_generated_requests(endpoint: Endpoint, wire: Wire):
    @FEW
    @given(body=bodies(endpoint) | nearly(endpoint) | JSON)
    def run(body: Any) -> None:
        wire.send(endpoint, encoded(body))

    run()


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=[f"{e.method} {e.path}" for e in ENDPOINTS])
def test_broken_bytes(endpoint: Endpoint, wire: Wire):
    example = encoded(dict(endpoint.example))
    for content in (
        b"",
        b"\xff\xfe{}",
        example[:-1],
        example + b"x",
        b"[" * 60_000,
        b'{"a":' * 60_000,
        example[:-1] + b',"x":' + b"[" * 2000 + b"]" * 2000 + b"}",
        example[:-1] + b', "temperature": NaN}',
        example[:-1] + b', "temperature": 1e400, "options": {"seed": -Infinity}, "parameters": {"seed": 1e400}}',
        example[:-1] + b', "model": "a", "model": "b"}',
        example.replace(b"hi", b"\xed\xa0\x80"),
        example.replace(b'"hi"', b'"' + b"x" * 2_000_000 + b'"'),
    ):
        wire.send(endpoint, content)
