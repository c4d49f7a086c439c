"""The KServe v2 protocol against a scripted engine."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from quire.config import ServerConfig
from quire.server.served import Model
from quire.server.server import Server
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, events

TEXT = "Hello, wörld"
BASE = f"/v2/models/{MODEL}"


def tensor(name: str, *values: Any, datatype: str = "BYTES") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(values)], "data": list(values)}


def ask(*more: dict[str, Any], text: str = "say", **fields: Any) -> dict[str, Any]:
    return {"inputs": [tensor("text_input", text), *more], **fields}


async def test_metadata_and_health():
    async with client_for() as http:
        assert (await http.get("/v2")).json()["name"] == "quire"
        assert (await http.get("/v2/health/live")).json() == {"live": True}
        assert (await http.get("/v2/health/ready")).json() == {"ready": True}
        for base in (BASE, f"{BASE}/versions/1"):
            body = (await http.get(base)).json()
            assert body["name"] == MODEL and body["versions"] == ["1"]
            assert body["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
            assert (await http.get(f"{base}/ready")).json() == {"name": MODEL, "ready": True}
        assert (await http.post("/v2/repository/index")).json()[0]["state"] == "READY"
        for path in ("/v2/models/other", f"{BASE}/versions/2", "/v2/models/other/ready"):
            r = await http.get(path)
            assert r.status_code == 404 and set(r.json()) == {"error"}


async def test_a_server_that_loads_is_alive_and_not_ready():
    async with client_for(service=Server(ServerConfig(), [Model(MODEL)])) as http:
        assert (await http.get("/v2/health/live")).status_code == 200
        assert (await http.get("/v2/health/ready")).status_code == 503
        assert (await http.get(f"{BASE}/ready")).status_code == 503
        r = await http.post(f"{BASE}/infer", json=ask())
        assert r.status_code == 503 and set(r.json()) == {"error"}


async def test_infer():
    completer = FakeCompleter(answer="x" * 40)
    async with client_for(completer) as http:
        r = await http.post(f"{BASE}/infer", json=ask(id="7"))
    assert r.json() == {
        "model_name": MODEL,
        "model_version": "1",
        "id": "7",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["x" * 16]}],
    }
    assert completer.seen[0].prompt == list(b"say")


async def test_parameters_inputs_and_nested_json_are_the_same_fields():
    completer = FakeCompleter()
    ways = (
        ask(parameters={"max_tokens": 5, "temperature": 0.5, "stop": ["z"]}),
        ask(
            tensor("max_tokens", 5, datatype="INT32"),
            tensor("temperature", 0.5, datatype="FP32"),
            tensor("stop", "z"),
        ),
        ask(tensor("sampling_parameters", json.dumps({"max_tokens": 5, "temperature": 0.5, "stop": ["z"]}))),
    )
    async with client_for(completer) as http:
        for body in ways:
            r = await http.post(f"{BASE}/infer", json=body)
            assert r.json()["outputs"][0]["data"] == ["Hello"], r.text
    assert len({(s.max_tokens, s.temperature, s.stop) for s in (g.sampling for g in completer.seen)}) == 1


async def test_several_texts_and_the_input_before_the_output():
    body = {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": [["a"], ["b"]]}],
        "parameters": {"exclude_input_in_output": False, "max_tokens": 2},
    }
    async with client_for() as http:
        output = (await http.post(f"{BASE}/infer", json=body)).json()["outputs"][0]
    assert output["shape"] == [2] and output["data"] == ["aHe", "bHe"]


def packed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(t)) + t for t in texts)


async def test_tensors_as_bytes_both_ways():
    """What tritonclient sends unless told otherwise."""
    text, limit = packed("sÿ".encode()), struct.pack("<i", 4)
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(text)}},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": len(limit)}},
    ]
    head = json.dumps(
        {"inputs": inputs, "outputs": [{"name": "text_output", "parameters": {"binary_data": True}}]}
    ).encode()
    completer = FakeCompleter()
    async with client_for(completer) as http:
        r = await http.post(
            f"{BASE}/infer",
            content=head + text + limit,
            headers={"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"},
        )
        assert r.status_code == 200, r.text
        size = int(r.headers["inference-header-content-length"])
        told = json.loads(r.content[:size])
        assert told["outputs"][0]["parameters"] == {"binary_data_size": len(r.content) - size}
        assert r.content[size:] == packed(b"Hell")
        assert completer.seen[0].prompt == list("sÿ".encode())
        for body, header in (
            (head + text, str(len(head))),
            (head + text + limit + b"x", str(len(head))),
            (head + b"\xff\xff\xff\xff" + text[4:] + limit, str(len(head))),
            (head + text + limit, str(10**9)),
            (head + text + limit, "-1"),
            (head + text + limit, "x"),
            (head + text[:4] + b"\xff" * (len(text) - 4) + limit, str(len(head))),
        ):
            r = await http.post(f"{BASE}/infer", content=body, headers={"inference-header-content-length": header})
            assert r.status_code == 400 and set(r.json()) == {"error"}, r.text


async def test_generate_and_its_stream():
    async with client_for() as http:
        r = await http.post(f"{BASE}/generate", json={"text_input": "say", "parameters": {"max_tokens": 40}, "id": "a"})
        assert r.json() == {"model_name": MODEL, "model_version": "1", "id": "a", "text_output": TEXT}
        r = await http.post(f"{BASE}/generate", json={"text_input": "say", "max_tokens": 3, "temperature": 0})
        assert r.json()["text_output"] == "Hel"
        r = await http.post(
            f"{BASE}/generate_stream",
            json={
                "text_input": "say",
                "parameters": {"max_tokens": 40, "stream": True, "exclude_input_in_output": False},
            },
        )
    parts = events(r.text)
    assert "".join(p["text_output"] for p in parts) == "say" + TEXT
    assert all(p["model_name"] == MODEL for p in parts)


BAD: list[tuple[Any, str]] = [
    ({}, "inputs"),
    ({"inputs": []}, "text_input"),
    ({"inputs": [tensor("text_input", 5, datatype="INT32")]}, "text_input"),
    ({"inputs": [tensor("text_input", 5)]}, "inputs[0].data"),
    ({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["a"]}]}, "inputs[0]"),
    ({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [-1], "data": ["a"]}]}, "shape"),
    ({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [10**9], "data": ["a"]}]}, "shape"),
    ({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]}, "data"),
    ({"inputs": [{"name": "text_input", "datatype": "TEXT", "shape": [1], "data": ["a"]}]}, "datatype"),
    (ask(tensor("text_input", "b")), "text_input"),
    (ask(tensor("surprise", 1, datatype="INT32")), "surprise"),
    (ask(parameters={"surprise": 1}), "surprise"),
    (ask(parameters={"temperature": "hot"}), "temperature"),
    (ask(parameters={"temperature": -1}), "temperature"),
    (ask(tensor("temperature", 0.1, 0.2, datatype="FP32")), "temperature"),
    (ask(tensor("temperature", True, datatype="FP32")), "inputs[1].data"),
    (ask(tensor("max_tokens", 3, datatype="INT32"), parameters={"max_tokens": 3}), "max_tokens"),
    (ask(tensor("sampling_parameters", "{")), "JSON"),
    (ask(tensor("sampling_parameters", '{"n": 2}')), "n"),
    (ask(outputs=[{"name": "logits"}]), "outputs[0].name"),
    (ask(outputs=[{"name": "text_output", "parameters": {"x": 1}}]), "outputs[0]"),
    (ask(text="x" * 300), "text_input"),
    (ask(text=""), "text_input"),
    (ask(surprise=1), "surprise"),
    (ask(parameters={"receipts": True}), "receipts"),
]


@pytest.mark.parametrize(("body", "names"), BAD, ids=[str(b)[:70] for b, _ in BAD])
async def test_refusals_in_its_shape(body: Any, names: str):
    completer = FakeCompleter()
    async with client_for(completer, strict=True) as http:
        r = await http.post(f"{BASE}/infer", json=body)
        assert r.status_code == 400, r.text
        assert set(r.json()) == {"error"} and names in r.json()["error"], r.text
        assert not completer.seen


async def test_refusals_of_the_generate_extension():
    async with client_for(strict=True) as http:
        for body, names in (
            ({}, "text_input"),
            ({"text_input": "a", "surprise": 1}, "surprise"),
            ({"text_input": "a", "max_tokens": 1, "parameters": {"max_tokens": 1}}, "max_tokens"),
            ({"text_input": "a", "parameters": {"stream": True}}, "stream"),
            ({"text_input": "a", "n": 2}, "n"),
        ):
            r = await http.post(f"{BASE}/generate", json=body)
            assert r.status_code == 400 and names in r.json()["error"], r.text
        assert (await http.post("/v2/models/x/generate", json={"text_input": "a"})).status_code == 404
        r = await http.post(f"{BASE}/generate_stream", json={"text_input": "a", "stream": False})
        assert r.status_code == 400
