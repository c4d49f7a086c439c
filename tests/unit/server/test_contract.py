"""Requests made from each dialect's own structs, valid, nearly valid and junk: never a 5xx, never a hang, errors in shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.config import Environment, ServerConfig
from quire.observe.errors import DownloadFailed
from quire.server import compat
from quire.server.app import create_app
from quire.server.shared.compat import Endpoint
from quire.weights.store.store import Store
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
    parts = [(part.inside, struct(msgspec.inspect.type_info(part.shape).fields)) for part in endpoint.fields]
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
    unload = r.status_code == 501 and "keep_alive" in r.text  # the one thing that can be asked for and is not here
    assert r.status_code == 200 or 400 <= r.status_code < 500 or unload, (r.status_code, r.text)
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
    elif kind.partition(";")[0] == "application/json":
        r.json()


class Offline:
    """A network that is not there."""

    def __getattr__(self, name: str) -> Any:
        raise DownloadFailed("there is no network in this test")


class Wire:
    """One app with a state folder and a store, and one loop, for all examples of a test."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.completer = FakeCompleter(answer="ok")
        config = ServerConfig(state_dir=folder / "state")
        self.service = service_over(self.completer, config)
        self.service.store = Store(Environment(home=folder / "home"), cast(Any, Offline()))
        self.transport = httpx.ASGITransport(app=create_app(config, self.service), raise_app_exceptions=False)
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"no request\n")}}
        self.file = self.run("POST", "/v1/files", **form).json()["id"]
        self.response = self.run("POST", "/v1/responses", json={"input": "hi"}).json()["id"]

    def run(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def one() -> httpx.Response:
            http = httpx.AsyncClient(transport=self.transport, base_url=URL, trust_env=False)
            async with http, asyncio.timeout(SECONDS):
                return await http.request(method, path, **more)

        r = self.runner.run(one())
        check(path, r)
        assert self.completer.running == 0, "nothing is left running"
        return r

    def send(self, endpoint: Endpoint, content: bytes) -> httpx.Response:
        path = endpoint.path.replace("{name}", MODEL)
        content = content.replace(b"file-x", self.file.encode())  # of the batch's example: a file that is there
        return self.run(endpoint.method, path, content=content, headers={"content-type": "application/json"})

    async def end(self) -> None:
        for job in self.service.jobs:
            await job.stop()
        self.service.close()


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    made = Wire(tmp_path_factory.mktemp("wire"))
    with made.runner:
        yield made
        made.runner.run(made.end())


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


def test_a_batch_of_the_example_is_taken(wire: Wire):
    """What the two tests above send to /v1/batches is more than refusals."""
    (endpoint,) = (e for e in ENDPOINTS if e.path == "/v1/batches")
    assert wire.send(endpoint, encoded(dict(endpoint.example))).json()["object"] == "batch"


KEPT = ("files", "files/{}/content", "files/{}", "batches", "batches/{}", "batches/{}/cancel")
LOOKED_AT = [f"/v1/{path}" for path in (*KEPT, "responses/{}", "responses/{}/input_items", "responses/{}/cancel")]


@pytest.mark.parametrize("path", LOOKED_AT)
def test_generated_lookups(path: str, wire: Wire):
    """Ids and queries, of what is there and of nothing, by every method."""
    ids = st.sampled_from([wire.file, wire.response, "batch_x", "..", "%2e%2e%2f"]) | TEXT.map(lambda t: quote(t, ""))
    value = st.sampled_from(["0", "1", "100", "-1", "asc", "desc", "true", "batch", wire.file]) | TEXT
    names = st.sampled_from(["after", "limit", "order", "purpose", "stream", "starting_after", "surprise"])
    method = st.sampled_from(["GET", "POST", "PUT", "OPTIONS"])  # what is there stays

    @FEW
    @given(id=ids, query=st.dictionaries(names, value, max_size=3), method=method)
    def run(id: str, query: dict[str, str], method: str) -> None:
        wire.run(method, path.format(id or "x"), params=query)

    run()


def test_generated_forms(wire: Wire):
    """Uploads: parts, names and boundaries, whole and cut."""
    parts = st.lists(
        st.tuples(
            st.sampled_from(["file", "purpose", "expires_after[anchor]", "other"]) | TEXT, TEXT, st.binary(max_size=40)
        ),
        max_size=4,
    )

    @FEW
    @given(parts=parts, cut=st.integers(0, 400), said=st.sampled_from(["b", "b", "c", ""]))
    def run(parts: list[tuple[str, str, bytes]], cut: int, said: str) -> None:
        body = b"".join(
            f'--b\r\nContent-Disposition: form-data; name="{name}"'.encode()
            + (f'; filename="{label}"'.encode() if label else b"")
            + b"\r\n\r\n"
            + data
            + b"\r\n"
            for name, label, data in parts
        )
        body = (body + b"--b--\r\n")[: len(body) + 10 - cut if cut < 20 else None]
        wire.run("POST", "/v1/files", content=body, headers={"content-type": f"multipart/form-data; boundary={said}"})

    run()
