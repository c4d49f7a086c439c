"""One server with two models: each dialect answers for both, by any of their names, and neither is in the other's way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import ServerConfig
from quire.engine.types import AdapterInfo
from quire.observe.errors import BadRequest
from quire.server.served import Model, Models
from quire.server.server import Server
from tests.unit.server.fakes import FakeClient, FakeCompleter, client_for, events, settled
from tests.unit.server.openai.test_batches import begin, until
from tests.unit.server.openai.test_batches import line as batch_line

ALPHA, BETA = ("alpha", "a"), ("smollm2:135m", "b")
NAMES = [
    *((name, "alpha") for name in ALPHA),
    *((name, "beta") for name in (*BETA, "smollm2", "smollm2:latest", "b:latest")),
]
HI = [{"role": "user", "content": "hi"}]


def _adapter(name: str) -> AdapterInfo:
    return AdapterInfo(name=name, path="", rank=1, modules=1, nbytes=1, digest="")


class AdapterFake(FakeClient):
    """An engine client whose engine has adapters."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.adapters = [_adapter(name) for name in names]

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        self.adapters.append(_adapter(name))
        return self.adapters[-1]

    async def unload_adapter(self, name: str) -> None:
        self.adapters = [one for one in self.adapters if one.name != name]


class Two:
    """The server, and the script behind each of its models."""

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig(runtime_lora=True)
        self.alpha, self.beta = FakeCompleter("from alpha"), FakeCompleter("from beta", context=150)
        self.beta.client = AdapterFake("sql")
        self.server = Server(self.config, [Model(ALPHA), Model(BETA)])
        for model, completer in zip(self.server.models, (self.alpha, self.beta), strict=True):
            self.server.attach(model, completer.client, completer)  # type: ignore[arg-type]

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with client_for(service=self.server, config=self.config) as http:
            yield http


async def send(http: httpx.AsyncClient, *models: str) -> str:
    """A batch with a line for each of these models."""
    return await begin(http, "\n".join(batch_line(n, model=name) for n, name in enumerate(models)))


def openai_stream(r: httpx.Response) -> str:
    return "".join(c["delta"].get("content") or "" for e in events(r.text)[:-1] for c in e["choices"])


# How each dialect is asked for a model by its name, and where its answer has the text. Without a name: who answers, or a status.
ASKS: dict[str, tuple[Any, Any, str | int]] = {
    "chat": (
        lambda name: ("/v1/chat/completions", {"messages": HI} | name),
        lambda r: r.json()["choices"][0]["message"]["content"],
        400,
    ),
    "chat stream": (
        lambda name: ("/v1/chat/completions", {"messages": HI, "stream": True} | name),
        openai_stream,
        400,
    ),
    "completions": (
        lambda name: ("/v1/completions", {"prompt": "hi"} | name),
        lambda r: r.json()["choices"][0]["text"],
        400,
    ),
    "responses": (
        lambda name: ("/v1/responses", {"input": "hi"} | name),
        lambda r: r.json()["output"][0]["content"][0]["text"],
        400,
    ),
    "anthropic": (
        lambda name: ("/v1/messages", {"messages": HI, "max_tokens": 50} | name),
        lambda r: r.json()["content"][0]["text"],
        400,
    ),
    "ollama chat": (
        lambda name: ("/api/chat", {"messages": HI, "stream": False} | name),
        lambda r: r.json()["message"]["content"],
        400,
    ),
    "ollama generate": (
        lambda name: ("/api/generate", {"prompt": "hi", "stream": False} | name),
        lambda r: r.json()["response"],
        400,
    ),
    "tgi": (
        lambda name: ("/generate", {"inputs": "hi", "parameters": {"adapter_id": name["model"]} if name else {}}),
        lambda r: r.json()["generated_text"],
        "alpha",
    ),
    "llama.cpp": (lambda name: ("/completion", {"prompt": "hi"} | name), lambda r: r.json()["content"], "alpha"),
    "kserve": (
        lambda name: (f"/v2/models/{name.get('model', 'none')}/generate", {"text_input": "hi", "max_tokens": 50}),
        lambda r: r.json()["text_output"],
        404,
    ),
}


@pytest.mark.parametrize("dialect", ASKS)
async def test_every_name_is_answered_by_its_model(dialect: str):
    ask, text, _ = ASKS[dialect]
    two = Two()
    async with two.http() as http:
        for name, model in NAMES:
            path, body = ask({"model": name})
            r = await http.post(path, json=body)
            assert r.status_code == 200, (name, r.text)
            assert text(r) == f"from {model}", name
    asked = {"alpha": len(two.alpha.seen), "beta": len(two.beta.seen)}
    assert asked == {"alpha": 2, "beta": 5}


@pytest.mark.parametrize("dialect", ASKS)
async def test_an_adapter_belongs_to_its_model(dialect: str):
    ask, text, _ = ASKS[dialect]
    two = Two()
    async with two.http() as http:
        path, body = ask({"model": "sql"})
        r = await http.post(path, json=body)
        assert text(r) == "from beta"
        path, body = ask({"model": "b"})
        await http.post(path, json=body)
    assert [g.adapter for g in two.beta.seen] == ["sql", ""] and not two.alpha.seen


@pytest.mark.parametrize("dialect", ASKS)
async def test_a_name_that_is_none_and_no_name(dialect: str):
    ask, text, unnamed = ASKS[dialect]
    two = Two()
    async with two.http() as http:
        path, body = ask({"model": "gamma"})
        assert (await http.post(path, json=body)).status_code == 404
        path, body = ask({})
        r = await http.post(path, json=body)
        if isinstance(unnamed, str):
            assert text(r) == f"from {unnamed}"
        else:
            assert r.status_code == unnamed, r.text
            if dialect != "anthropic":  # its field is one that every request must have
                assert "alpha" in r.text and "smollm2:135m" in r.text


@pytest.mark.parametrize("dialect", ASKS)
async def test_one_engine_that_is_down_does_not_disturb_the_other(dialect: str):
    ask, _, _ = ASKS[dialect]
    two = Two()
    two.alpha.client.alive = False
    async with two.http() as http:
        for name, status in (("a", 503), ("b", 200)):
            path, body = ask({"model": name})
            assert (await http.post(path, json=body)).status_code == status, name
        r = await http.get("/ready")
        assert (r.status_code, r.json()["status"]) == (200, "degraded")
        assert [m["status"] for m in r.json()["models"]] == ["restarting", "ready"]
        assert (await http.get("/ready?model=a")).status_code == 503
        assert (await http.get("/ready?model=b")).status_code == 200
        two.beta.client.alive = False
        assert (await http.get("/ready")).status_code == 503


async def test_what_is_served_is_told_everywhere():
    two = Two()
    async with two.http() as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(m["id"], m["root"], m["parent"]) for m in listed] == [
            ("alpha", "alpha", None),
            ("a", "alpha", None),
            ("smollm2:135m", "smollm2:135m", None),
            ("b", "smollm2:135m", None),
            ("sql", "smollm2:135m", "smollm2:135m"),
        ]
        assert [m["max_model_len"] for m in listed] == [200, 200, 150, 150, 150]
        assert (await http.get("/v1/models/b")).json()["id"] == "smollm2:135m"
        assert (await http.get("/v1/models/sql")).json()["parent"] == "smollm2:135m"
        loaded = (await http.get("/api/ps")).json()["models"]
        assert [(m["name"], m["context_length"]) for m in loaded] == [("alpha", 200), ("smollm2:135m", 150)]
        index = (await http.post("/v2/repository/index")).json()
        assert [m["name"] for m in index] == ["alpha", "a", "smollm2:135m", "b", "sql"]
        assert (await http.get("/v2/models/b/ready")).json() == {"name": "smollm2:135m", "ready": True}
        info = (await http.get("/info")).json()
        assert info["model_id"] == "alpha" and [m["model_id"] for m in info["quire"]["models"]] == [
            "alpha",
            "smollm2:135m",
        ]
        props = (await http.get("/props")).json()
        assert props["model_alias"] == "alpha" and [m["id"] for m in props["quire"]["models"]] == [
            "alpha",
            "smollm2:135m",
        ]
        assert (await http.get("/props?model=b")).json()["model_alias"] == "smollm2:135m"
        assert (await http.get("/health")).json()["models"] == {"alpha": "ready", "smollm2:135m": "ready"}
        ready = (await http.get("/ready")).json()
        assert [m["model"] for m in ready["models"]] == ["alpha", "smollm2:135m"]


async def test_tags_have_every_name(tmp_path: Path):
    from tests.unit.server.ollama.test_ollama_models import model_file

    two = Two()
    for model in two.server.models:
        (tmp_path / f"{model.names[1]}.gguf").write_bytes(model_file(tmp_path / "m.gguf", model.name))
        model.path = str(tmp_path / f"{model.names[1]}.gguf")
    async with two.http() as http:
        tags = (await http.get("/api/tags")).json()["models"]
        assert [m["name"] for m in tags] == ["alpha", "a", "smollm2:135m", "b"]
        assert (await http.post("/api/show", json={"model": "smollm2"})).status_code == 200


async def test_tokens_are_those_of_the_model_that_is_named():
    two = Two()
    async with two.http() as http:
        for name, context in (("a", 200), ("smollm2", 150)):
            r = await http.post("/tokenize", json={"prompt": "hi", "model": name})
            assert r.json()["max_model_len"] == context
            assert (await http.get(f"/tokenizer_info?model={name}")).json()["model_max_length"] == context
            r = await http.post("/detokenize", json={"tokens": [104, 105], "model": name})
            assert r.json()["prompt"] == "hi"
        assert (await http.post("/tokenize", json={"prompt": "hi"})).status_code == 400  # vLLM's form names its model
        assert (
            await http.post("/tokenize", json={"content": "hi"})
        ).status_code == 200  # llama.cpp's has no place for it


async def test_metrics_are_told_apart_by_their_labels():
    two = Two()
    async with two.http() as http:
        await http.post("/v1/completions", json={"prompt": "hi", "model": "b"})
        text = (await http.get("/metrics")).text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) == len({h.split()[2] for h in heads})  # each name once, as the format wants it

    def value(name: str, family: str, **labels: str) -> dict[str, float]:
        return {
            s.labels["model_name"]: s.value
            for s in families[family].samples
            if s.name == name and all(s.labels[k] == v for k, v in labels.items())
        }

    assert value("vllm:request_success_total", "vllm:request_success", finished_reason="stop") == {
        "alpha": 0.0,
        "smollm2:135m": 1.0,
    }
    assert value("vllm:num_requests_running", "vllm:num_requests_running") == {"alpha": 1.0, "smollm2:135m": 1.0}
    assert value("vllm:time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds") == {
        "alpha": 0.0,
        "smollm2:135m": 1.0,
    }


async def test_requests_at_the_same_time_do_not_mix():
    """What a request chose stays with it, whatever others choose before it goes on."""
    two = Two()
    two.alpha.gate = two.beta.gate = asyncio.Event()
    names = ["a", "sql", "b", "a", "sql"]
    async with two.http() as http:
        asking = [
            asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "model": name})) for name in names
        ]
        await settled()
        two.alpha.gate.set()
        answers = [(await one).json() for one in asking]
    assert [a["model"] for a in answers] == ["alpha", "sql", "smollm2:135m", "alpha", "sql"]
    assert [a["choices"][0]["text"] for a in answers] == [
        f"from {n}" for n in ("alpha", "beta", "beta", "alpha", "beta")
    ]
    assert sorted(g.adapter for g in two.beta.seen) == ["", "sql", "sql"]


async def test_adapters_are_loaded_into_the_model_that_is_named():
    two = Two()
    two.alpha.client = AdapterFake()
    two.server.models.first.client = two.alpha.client  # type: ignore[assignment]
    async with two.http() as http:
        load = "/v1/load_lora_adapter"
        r = await http.post(load, json={"lora_name": "poems", "lora_path": "/x", "model": "b"})
        assert r.json()["parent"] == "smollm2:135m"
        assert (await http.post(load, json={"lora_name": "mine", "lora_path": "/x"})).json()["parent"] == "alpha"
        for taken in ("a", "smollm2", "poems"):  # names of models, and another model's adapter
            assert (await http.post(load, json={"lora_name": taken, "lora_path": "/x"})).status_code == 400, taken
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "poems"})).status_code == 200
        ids = [m["id"] for m in (await http.get("/v1/models")).json()["data"]]
        assert "poems" not in ids and "mine" in ids


async def test_a_conversation_goes_on_with_another_model(tmp_path: Path):
    two = Two(ServerConfig(state_dir=tmp_path))
    async with two.http() as http:
        first = (await http.post("/v1/responses", json={"input": "hi", "model": "a"})).json()
        body = {"input": "and now?", "model": "b", "previous_response_id": first["id"]}
        second = (await http.post("/v1/responses", json=body)).json()
        assert (first["model"], second["model"]) == ("alpha", "smollm2:135m")
        assert "from alpha" in json.dumps(two.beta.rendered)
        stored = (await http.get(f"/v1/responses/{second['id']}")).json()
        assert stored["output"][0]["content"][0]["text"] == "from beta"
    two.server.close()


async def test_batches_of_each_model(tmp_path: Path):
    two = Two(ServerConfig(state_dir=tmp_path, batch_lines=1))
    two.alpha.gate = asyncio.Event()  # its lines do not end, and keep nobody waiting
    async with two.http() as http:
        for job in two.server.jobs:
            job.start()
        slow = await send(http, "a", "a")
        done = await until(http, await send(http, "smollm2", "b"))
        assert (done["model"], done["request_counts"]["completed"]) == ("smollm2:135m", 2)
        assert two.alpha.running <= 1
        two.alpha.gate.set()
        done = await until(http, slow)
        assert (done["model"], done["request_counts"]["completed"]) == ("alpha", 2)
        for job in two.server.jobs:
            await job.stop()
    two.server.close()


async def test_a_batch_may_name_both(tmp_path: Path):
    two = Two(ServerConfig(state_dir=tmp_path))
    async with two.http() as http:
        done = await until(http, await send(http, "a", "b", "c"))
        assert (done["request_counts"]["completed"], done["request_counts"]["failed"]) == (2, 1)
        assert len(two.alpha.seen) == len(two.beta.seen) == 1
        for job in two.server.jobs:
            await job.stop()
    two.server.close()


async def test_a_model_that_still_loads_keeps_the_other_from_nothing():
    two = Two()
    late = Model("late")
    two.server.models.add(late)
    async with two.http() as http:
        r = await http.get("/ready")
        assert (r.status_code, r.json()["status"]) == (503, "loading")
        assert (await http.post("/v1/completions", json={"prompt": "x", "model": "a"})).status_code == 200
        r = await http.post("/v1/completions", json={"prompt": "x", "model": "late"})
        assert r.status_code == 503 and "loading" in r.text
        waiting = asyncio.create_task(
            http.post("/api/generate", json={"prompt": "x", "model": "late", "stream": False})
        )
        await settled()
        assert not waiting.done()
        body = {"model": "poems", "prompt": "x", "stream": False}
        for_adapter = asyncio.create_task(
            http.post("/api/generate", json=body)
        )  # no model's name yet: it may be an adapter's
        await settled()
        assert not for_adapter.done()
        completer = FakeCompleter("from late")
        completer.client = AdapterFake("poems")
        two.server.attach(late, completer.client, completer)  # type: ignore[arg-type]
        assert (await waiting).json()["response"] == "from late"
        assert (await for_adapter).json()["response"] == "from late"
        assert [g.adapter for g in completer.seen] == ["", "poems"]


async def test_a_drain_ends_the_answers_of_all():
    two = Two()
    two.alpha.gate = two.beta.gate = asyncio.Event()
    async with two.http() as http:
        asking = [
            asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "model": name}))
            for name in ("a", "b")
        ]
        await settled()
        assert await two.server.drain(0.02) is False
        assert [(await one).status_code for one in asking] == [503, 503]
    assert two.alpha.running == two.beta.running == two.server.in_flight == 0


def test_a_name_means_one_model():
    with pytest.raises(BadRequest, match="two models are called 'x'"):
        Models([Model(("y", "x")), Model("x")])


def test_hostile_names_cost_nothing():
    models = Models([Model("x")])
    assert models.find("x" * (8 << 20)) is None and models.find("") is None and models.find("\0:latest") is None
