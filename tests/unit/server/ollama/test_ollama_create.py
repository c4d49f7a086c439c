"""POST /api/create and the blobs: names made of models that are here, with defaults of their own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.observe.errors import BadRequest, Unsupported
from quire.server.ollama import adapters, modelfile
from quire.server.server import Server
from quire.weights.store.manifest import Defaults
from tests.unit.server.fakes import MODEL, client_for
from tests.unit.server.ollama.test_ollama_models import model_file, service  # noqa: F401  (a fixture)

PIRATE = {
    "model": "pirate",
    "from": MODEL,
    "system": "You are a pirate.",
    "parameters": {"temperature": 0.25, "num_predict": 4, "stop": ["x", "y"]},
    "messages": [{"role": "user", "content": "Ahoy"}, {"role": "assistant", "content": "Arr"}],
    "license": ["MIT", "and more"],
}


ALONE = dict.fromkeys(PIRATE.keys() - {"model"})  # nothing beside a Modelfile


async def make(http: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await http.post("/api/create", json=PIRATE | more)


async def test_made_shown_listed_copied_and_deleted(service: Server):  # noqa: F811
    async with client_for(service=service) as http:
        r = await make(http)
        assert [json.loads(line)["status"] for line in r.text.splitlines()][-1] == "success"
        assert (await make(http, stream=False)).json() == {"status": "success"}
        shown = (await http.post("/api/show", json={"model": "pirate"})).json()
        assert shown["system"] == "You are a pirate." and shown["license"] == "MIT\nand more"
        assert shown["details"]["parent_model"] == MODEL
        assert "temperature                    0.25" in shown["parameters"] and "top_k" in shown["parameters"]
        assert [line.split()[1] for line in shown["parameters"].splitlines() if line.startswith("stop")] == [
            '"x"',
            '"y"',
        ]
        back = modelfile.parse(shown["modelfile"])
        assert back["from"] == MODEL and back["system"] == PIRATE["system"]
        assert back["parameters"] == PIRATE["parameters"] and back["messages"] == PIRATE["messages"]
        names = [m["name"] for m in (await http.get("/api/tags")).json()["models"]]
        assert "pirate" in names
        await http.post("/api/copy", json={"source": "pirate", "destination": "captain"})
        assert (await http.post("/api/show", json={"model": "captain"})).json()["system"] == PIRATE["system"]
        for name in ("pirate", "captain"):
            assert (await http.request("DELETE", "/api/delete", json={"model": name})).status_code == 200
            assert (await http.post("/api/show", json={"model": name})).status_code == 404
        assert service.models.first.path is not None and Path(service.models.first.path).exists()


async def test_made_from_what_was_made(service: Server):  # noqa: F811
    async with client_for(service=service) as http:
        await make(http)
        r = await http.post("/api/create", json={"model": "mate", "from": "pirate", "parameters": {"temperature": 1}})
        assert r.status_code == 200, r.text
        shown = (await http.post("/api/show", json={"model": "mate:latest"})).json()
    assert shown["system"] == PIRATE["system"]
    assert modelfile.parse(shown["modelfile"])["parameters"] == {**PIRATE["parameters"], "temperature": 1}


async def test_from_a_modelfile(service: Server):  # noqa: F811
    text = (
        f'# mine\nFROM {MODEL}\nPARAMETER top_k 3\nPARAMETER stop "a b"\nSYSTEM """Two\nlines"""\nMESSAGE user "hi"\n'
    )
    async with client_for(service=service) as http:
        r = await http.post("/api/create", json={"name": "mine", "modelfile": text, "stream": False})
        assert r.json() == {"status": "success"}, r.text
        shown = (await http.post("/api/show", json={"model": "mine"})).json()
    assert shown["system"] == "Two\nlines"
    assert shown["messages"] == [{"role": "user", "content": "hi"}]
    assert modelfile.parse(shown["modelfile"])["parameters"] == {"top_k": 3, "stop": ["a b"]}


@pytest.mark.parametrize(
    ("more", "status", "names"),
    [
        ({"model": None}, 400, "model"),
        ({"model": "../x"}, 400, "short name"),
        ({"model": "smollm2:135m"}, 400, "catalogue"),
        ({"model": MODEL}, 400, "already"),
        ({"from": None}, 400, "from"),
        ({"from": "nowhere:1b"}, 404, "nowhere"),
        ({"from": "/etc/passwd"}, 404, "from"),
        ({"files": {"a.gguf": "sha256:" + "0" * 64}}, 400, "from"),
        ({"from": None, "files": {"a.gguf": "sha256:" + "0" * 64}}, 404, "not in the store"),
        ({"from": None, "files": {"a.gguf": "../../x"}}, 400, "files"),
        ({"from": None, "files": {"a": "sha256:" + "0" * 64, "b": "sha256:" + "1" * 64}}, 400, "files"),
        ({"template": "{{ .Prompt }}"}, 400, "Go template"),
        (
            {"template": "{{ if .System }}{{ .System }}{{ end }}{{- range .Messages }}{{ .Content }}{{ end }}"},
            400,
            "Go",
        ),
        ({"template": "always the same"}, 400, "does not write what the user says"),
        ({"template": "{% for m in messages %}{{ m.content }}"}, 400, "template"),
        ({"template": "{{ messages[3].content }}"}, 400, "template"),
        ({"template": "{% for i in range(10**9) %}x{% endfor %}{{ messages[0].content }}"}, 400, "template"),
        ({"adapters": {"a": "sha256:00"}}, 400, "adapters"),
        ({"adapters": {"a": "/etc/passwd"}}, 400, "/api/blobs/"),
        ({"adapters": {"a": "sha256:" + "0" * 64}}, 404, "not in the store"),
        ({"adapters": {"a": "sha256:" + "0" * 64, "b": "sha256:" + "1" * 64}}, 400, "adapter_model.safetensors"),
        ({"modelfile": f"FROM {MODEL}\nADAPTER ./mine.gguf", **ALONE}, 400, "/api/blobs/"),
        ({"quantize": "q4_K_M"}, 400, "quantize"),
        ({"parameters": {"mirostat": 2}}, 400, "mirostat"),
        ({"parameters": {"nonsense": 2}}, 400, "nonsense"),
        ({"parameters": {"temperature": "hot"}}, 400, "temperature"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
        ({"system": "x" * (1 << 21)}, 400, "system"),
        ({"surprise": 1}, 400, "surprise"),
        ({"modelfile": "FROM x"}, 400, "modelfile"),
    ],
)
async def test_what_cannot_be_honoured(service: Server, more: dict[str, Any], status: int, names: str):  # noqa: F811
    async with client_for(service=service, strict=True) as http:
        r = await make(http, **more)
        assert r.status_code == status, r.text
        assert names in r.json()["error"]
        assert (await http.post("/api/show", json={"model": "pirate"})).status_code == 404


@pytest.mark.parametrize(
    "text", ["", "SYSTEM x", "FROM", "FROM a\nTEACH b", 'FROM a\nSYSTEM """x', 'FROM a\nSYSTEM "x', "FROM a\n" * 5000]
)
def test_modelfiles_that_are_none(text: str):
    with pytest.raises(BadRequest, match="modelfile"):
        modelfile.parse(text)


def test_a_modelfile_goes_round():
    made = Defaults(
        "a:1b", "s", {"temperature": 0.1, "stop": ["q"], "use_mmap": True}, ({"role": "user", "content": "m"},)
    )
    back = modelfile.parse(modelfile.write(made.parent, made, "MIT"))
    assert back == {
        "from": "a:1b",
        "parameters": made.parameters,
        "system": "s",
        "messages": list(made.messages),
        "license": ["MIT"],
    }


async def test_the_models_own_template_may_be_said_again(service: Server):  # noqa: F811
    async with client_for(service=service) as http:
        assert (await make(http, template="{{ messages }}")).status_code == 200


async def test_a_file_by_its_digest(service: Server, tmp_path: Path):  # noqa: F811
    data = model_file(tmp_path / "c.gguf", "c")
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    store = service.store
    assert store is not None
    async with client_for(config=ServerConfig(max_body=1000), service=service) as http:
        assert (await http.head(f"/api/blobs/{digest}")).status_code == 404
        assert (await http.post(f"/api/blobs/{digest}", content=data + b"x")).status_code == 400
        assert (await http.post("/api/blobs/sha256:00", content=data)).status_code == 400
        assert (await http.post("/api/blobs/..%2f..%2fx", content=data)).status_code in (400, 404)
        assert (await http.post(f"/api/blobs/{digest}", content=data)).status_code == 201
        assert (await http.post(f"/api/blobs/{digest}", content=data)).status_code == 201
        assert (await http.head(f"/api/blobs/{digest}")).status_code == 200
        assert not list((store.home / "partial").iterdir())
        r = await http.post("/api/create", json={"model": "up", "files": {"c.gguf": digest}, "stream": False})
        assert r.json() == {"status": "success"}, r.text
        shown = (await http.post("/api/show", json={"model": "up"})).json()
        assert shown["template"] == "{{ messages }}"
        assert store.resolve("up", paths=False).read_bytes() == data
        assert (await http.request("DELETE", "/api/delete", json={"model": "up"})).status_code == 200
        assert (await http.head(f"/api/blobs/{digest}")).status_code == 404


async def test_not_from_other_machines_without_a_key(service: Server):  # noqa: F811
    service.config = ServerConfig(host="0.0.0.0")
    async with client_for(config=service.config, service=service) as http:
        assert (await make(http)).status_code == 403
        assert (await http.post("/api/blobs/sha256:" + "0" * 64, content=b"x")).status_code == 403


async def test_requests_get_what_the_name_says(service: Server):  # noqa: F811
    completer: Any = service.models.first.completer
    async with client_for(service=service) as http:
        await make(http)
        ask = {"model": "pirate:latest", "messages": [{"role": "user", "content": "hi"}], "stream": False}
        body = (await http.post("/api/chat", json=ask)).json()
        assert body["model"] == "pirate:latest" and body["done_reason"] == "length" and body["eval_count"] == 4
        messages, _ = completer.rendered[-1]
        assert [(m["role"], m["content"]) for m in messages] == [
            ("system", "You are a pirate."),
            ("user", "Ahoy"),
            ("assistant", "Arr"),
            ("user", "hi"),
        ]
        sampling = completer.seen[-1].sampling
        assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0.25, 4, ("x", "y"))
        assert sampling.top_k == 40  # Ollama's own where the name says nothing
        ask["messages"].insert(0, {"role": "system", "content": "Be kind."})
        await http.post("/api/chat", json=ask | {"options": {"temperature": 1, "stop": "z"}})
        messages, _ = completer.rendered[-1]
        assert [m["content"] for m in messages] == ["Be kind.", "Ahoy", "Arr", "hi"]
        sampling = completer.seen[-1].sampling
        assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (1, 4, ("z",))
        await http.post("/api/generate", json={"model": "pirate", "prompt": "go", "stream": False})
        messages, _ = completer.rendered[-1]
        assert [m["content"] for m in messages] == ["You are a pirate.", "Ahoy", "Arr", "go"]
        await http.post("/api/generate", json={"model": "pirate", "prompt": "go", "stream": False, "system": "S"})
        assert completer.rendered[-1][0][0]["content"] == "S"
        plain = await http.post("/api/chat", json=ask | {"model": MODEL})
        assert plain.status_code == 200 and len(completer.rendered[-1][0]) == 2
        other = {"model": "far", "from": "other:7b", "stream": False}
        assert (await http.post("/api/create", json=other)).status_code == 200
        r = await http.post("/api/chat", json=ask | {"model": "far"})
        assert r.status_code == 404, "its bytes are not those being served"


async def test_a_template_of_one_s_own_is_kept_told_and_inherited(service: Server):  # noqa: F811
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    text = f'FROM {MODEL}\nTEMPLATE """{source}"""\n'
    async with client_for(service=service) as http:
        assert (await http.post("/api/create", json={"model": "mine", "modelfile": text})).status_code == 200
        assert (await http.post("/api/create", json={"model": "child", "from": "mine"})).status_code == 200
        for name in ("mine", "child"):
            shown = (await http.post("/api/show", json={"model": name})).json()
            assert shown["template"] == source
            assert modelfile.parse(shown["modelfile"])["template"] == source
        assert (
            await http.post("/api/create", json={"model": "child", "from": "mine", "template": ""})
        ).status_code == 200
        assert (await http.post("/api/show", json={"model": "child"})).json()["template"] == "{{ messages }}"


async def test_an_adapter_that_the_server_has_no_room_for(
    service: Server,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    """The name is kept and that is told; until it can be answered with its adapter it is not answered at all."""
    monkeypatch.setattr(adapters, "check_fits", lambda model, adapter: None)  # the engine here is a script
    store, data = service.store, b"GGUF, as far as the store is concerned"
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    assert store is not None
    async with client_for(service=service) as http:
        assert (await http.post(f"/api/blobs/{digest}", content=data)).status_code == 201
        made = {"model": "tuned", "from": MODEL, "adapters": {"a.gguf": digest}, "stream": False}
        r = await http.post("/api/create", json=made)
        assert r.json()["status"] == "success" and "no room for adapters" in r.json()["quire"]["notes"][0]
        lines = (await http.post("/api/create", json=made | {"stream": True})).text.splitlines()
        assert any("no room for adapters" in line for line in lines)
        shown = (await http.post("/api/show", json={"model": "tuned"})).json()
        assert f"ADAPTER @{digest}" in shown["modelfile"]
        assert modelfile.parse(shown["modelfile"])["adapters"] == {f"@{digest}": f"@{digest}"}
        for path, body in (
            ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/api/generate", {"prompt": "hi"}),
        ):
            r = await http.post(path, json={"model": "tuned", **body})
            assert r.status_code == 400 and "adapter" in r.json()["error"] and "not loaded" in r.json()["error"]
        with pytest.raises(Unsupported, match="with an adapter"):
            store.resolve("tuned")  # `quire run` and `quire serve` would leave the adapter out
        with pytest.raises(Unsupported, match="with an adapter"):
            store.pull("tuned")
        blob = store.place.blob(digest.partition(":")[2])
        assert blob.exists() and str(blob) not in " ".join(p.text for p in store.problems())
        assert (await http.request("DELETE", "/api/delete", json={"model": "tuned"})).status_code == 200
        assert not blob.exists()
