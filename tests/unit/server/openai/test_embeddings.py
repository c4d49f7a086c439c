"""POST /v1/embeddings, /v1/rerank and /v1/score over a tiny model, and what a model of another kind answers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from quire.chat.completer import Completer
from quire.chat.loading import tokenizer_and_template
from quire.config import EngineConfig, Environment, ServerConfig
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.types import Event, Receipt
from quire.engine.types import Request as EngineRequest
from quire.observe.errors import Unavailable
from quire.server.app import create_app
from quire.server.callers import Caller
from quire.server.errors import ClientGone
from quire.server.feed import while_connected
from quire.server.served import Model, Served
from quire.server.server import Server
from quire.weights.checkpoint import open_checkpoint
from tests.unit.chat import hub_kit
from tests.unit.chat.test_embedder import folder, wanted
from tests.unit.models import folders
from tests.unit.server.fakes import URL, FakeCompleter, client_for
from tests.unit.server.openai.openai_schema import conforms

pytest.importorskip("torch", reason="needs torch: the test extra")
pytest.importorskip("transformers", reason="needs transformers: the test extra")

EMBED = "/v1/embeddings"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    return folder(tmp_path_factory.mktemp("e") / "m")


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    return folder(tmp_path_factory.mktemp("r") / "m", "bert-score")


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(path=str(path), name="tiny", backend="native", threads=1)
    client = InProcessClient(config, env=Environment(home=path.parent))
    info = await client.start()
    try:
        with open_checkpoint(path) as checkpoint:
            completer = Completer(client, *tokenizer_and_template(checkpoint), info)
        service = Server(ServerConfig(), [Model("tiny")])
        service.attach(service.models.first, client, completer)
        transport = httpx.ASGITransport(app=create_app(ServerConfig(), service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
            yield http
    finally:
        await client.close()


async def test_every_form_of_input_and_both_encodings(tiny: tuple[Path, Any, Any]):
    path, model, theirs = tiny
    ids = theirs("the cat").input_ids
    async with serving(path) as http:
        for given, texts in (
            ("the cat", ["the cat"]),
            (["the cat", "dog"], ["the cat", "dog"]),
            (ids, ["the cat"]),
            ([ids, theirs("dog").input_ids], ["the cat", "dog"]),
        ):
            body = (await http.post(EMBED, json={"model": "tiny", "input": given, "user": "u"})).json()
            packed = (await http.post(EMBED, json={"input": given, "encoding_format": "base64"})).json()
            conforms("CreateEmbeddingResponse", body)
            assert body["object"] == "list" and body["model"] == "tiny"
            count = sum(len(theirs(t).input_ids) for t in texts)
            assert body["usage"] == packed["usage"] == {"prompt_tokens": count, "total_tokens": count}
            assert [d["index"] for d in body["data"]] == list(range(len(texts)))
            for text, plain, coded in zip(texts, body["data"], packed["data"], strict=True):
                np.testing.assert_allclose(plain["embedding"], wanted(model, theirs, text), atol=2e-5)
                decoded = np.frombuffer(base64.b64decode(coded["embedding"]), "<f4")
                assert decoded.tobytes() == np.array(plain["embedding"], np.float32).tobytes()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [""] * 2049}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, 120]}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["dog", "the cat " * 60]}, "input[1]"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
async def test_what_cannot_be_honoured_is_a_400_that_names_it(
    body: dict[str, Any], param: str, tiny: tuple[Path, Any, Any]
):
    async with serving(tiny[0]) as http:
        http.headers["x-quire-strict"] = "true"
        r = await http.post(EMBED, json=body)
        assert r.status_code == 400
        assert r.json()["error"]["param"] == param
        assert (await http.post(EMBED, json={"input": "dog"})).status_code == 200


async def test_cutting_is_asked_for_and_told(tiny: tuple[Path, Any, Any]):
    path, model, theirs = tiny
    text = "the cat " * 60
    async with serving(path) as http:
        refused = (await http.post(EMBED, json={"input": text})).json()["error"]
        assert "122 tokens" in refused["message"] and "80" in refused["message"]
        assert refused["code"] == "context_length_exceeded"
        body = (await http.post(EMBED, json={"input": ["dog", text], "truncate": True})).json()
        same = (await http.post(EMBED, json={"input": ["dog", text], "truncate_prompt_tokens": -1})).json()
        less = (
            await http.post(EMBED, json={"input": text, "truncate_prompt_tokens": 20, "truncation_side": "left"})
        ).json()
        for keep in (0, -2, 81):
            r = await http.post(EMBED, json={"input": text, "truncate_prompt_tokens": keep})
            assert (r.status_code, r.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert same["data"] == body["data"] and same["quire"] == body["quire"]
    assert less["quire"] == {"cut_tokens": {"0": 102}}
    assert body["quire"] == {"cut_tokens": {"1": 42}}
    assert body["usage"]["total_tokens"] == 3 + 80
    np.testing.assert_allclose(body["data"][1]["embedding"], wanted(model, theirs, text, 80), atol=2e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank(path: str, ranker: tuple[Path, Any, Any]):
    import torch

    folder_path, model, theirs = ranker
    documents = ["dog", "the cat sits", "runs", "dog"]
    with torch.no_grad():
        scores = [
            float(torch.sigmoid(model(**theirs("the cat", d, return_tensors="pt")).logits[0, 0])) for d in documents
        ]
    order = sorted(range(4), key=lambda i: (-scores[i], i))
    async with serving(folder_path) as http:
        body = (await http.post(path, json={"query": "the cat", "documents": documents})).json()
        assert [r["index"] for r in body["results"]] == order
        for r in body["results"]:
            assert r["relevance_score"] == pytest.approx(scores[r["index"]], abs=2e-5)
            assert r["document"] == {"text": documents[r["index"]]}
        listed = [{"text": d, "title": "x"} for d in documents]
        short = {"query": "the cat", "documents": listed, "top_n": 2, "return_documents": False}
        body = (await http.post(path, json=short)).json()
        assert [r["index"] for r in body["results"]] == order[:2] and "document" not in body["results"][0]
        for wrong, param in (({"documents": []}, "documents"), ({"top_n": 0}, "top_n"), ({"query": 1}, "query")):
            r = await http.post(path, json={**short, **wrong})
            assert r.status_code == 400 and r.json()["error"]["param"] == param


async def test_score_pairs_one_with_many_or_each_with_its_own(tiny: tuple[Path, Any, Any]):
    path, model, theirs = tiny
    cosine = lambda a, b: float(wanted(model, theirs, a) @ wanted(model, theirs, b))  # noqa: E731
    async with serving(path) as http:
        for first, second in (("cat", "dog"), ("cat", ["dog", "runs"]), (["cat", "dog"], ["runs", "sits"])):
            body = (await http.post("/v1/score", json={"text_1": first, "text_2": second})).json()
            seconds = [second] if isinstance(second, str) else second
            firsts = [first] * len(seconds) if isinstance(first, str) else first
            assert body["object"] == "list" and [d["index"] for d in body["data"]] == list(range(len(seconds)))
            for a, b, d in zip(firsts, seconds, body["data"], strict=True):
                assert d["object"] == "score" and d["score"] == pytest.approx(cosine(a, b), abs=2e-5)
        r = await http.post("/score", json={"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
        assert r.status_code == 400 and r.json()["error"]["param"] == "text_1"


async def test_a_model_answers_only_for_what_it_is(tiny: tuple[Path, Any, Any], ranker: tuple[Path, Any, Any]):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with serving(tiny[0]) as http:
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "hi"})):
            error = (await http.post(path, json=body)).json()["error"]
            assert error["code"] == "unsupported_task" and "tiny embeds" in error["message"]
            assert "/v1/embeddings" in error["message"]
        assert (await http.post("/tokenize", json={"prompt": "the cat"})).json()["count"] == 4
        assert (await http.get("/metrics")).status_code == 200
    async with serving(ranker[0]) as http:
        r = await http.post(EMBED, json={"input": "x"})
        assert r.status_code == 400 and "scores pairs" in r.json()["error"]["message"]
        r = await http.post("/v1/chat/completions", json=chat)
        assert r.status_code == 400 and "/v1/rerank" in r.json()["error"]["message"]
    async with client_for() as http:  # a model that generates
        for path, body in ((EMBED, {"input": "x"}), ("/v1/rerank", {"query": "x", "documents": ["y"]})):
            r = await http.post(path, json=body)
            assert (r.status_code, r.json()["error"]["code"]) == (400, "unsupported_task")
            assert "--task embed" in r.json()["error"]["message"]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that generates."""
    path = tmp_path_factory.mktemp("w") / "m"
    tokenizer = hub_kit.byte_level(path)
    (path / "config.json").unlink()
    size = max(tokenizer.get_vocab().values()) + 1
    folders.save(folders.build("qwen2", vocab_size=size + 8, eos_token_id=2, bos_token_id=None), path)
    return path


async def test_a_model_that_generates_embeds_beside_its_answers(writer: Path):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(writer, dtype=torch.float32).eval()
    texts = ["the cat sits", "dog", "a much longer text that takes some more tokens than the others do"]
    asked = {"prompt": "The", "max_tokens": 60, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    async with serving(writer) as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
        assert card["quire"] == {"tasks": ["generate", "embed"]}
        alone = (await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
        answer, *made = await asyncio.gather(
            http.post("/v1/completions", json=asked), *(http.post(EMBED, json={"input": text}) for text in texts)
        )
        assert answer.json()["choices"][0]["text"] == alone
        for text, one in zip(texts, made, strict=True):
            ids = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
            with torch.no_grad():
                row = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1].numpy()
            vector = np.array(one.json()["data"][0]["embedding"])
            np.testing.assert_allclose(vector, row / np.linalg.norm(row), atol=2e-3)
            assert one.json()["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
        both = (await http.post("/api/embed", json={"model": "tiny", "input": texts[:2]})).json()
        assert both["embeddings"] == [one.json()["data"][0]["embedding"] for one in made[:2]]
        r = await http.post(EMBED, json={"input": "dog", "dimensions": 8})
        assert r.status_code == 400 and r.json()["error"]["param"] == "dimensions"
        scored: list[tuple[str, Any]] = [
            ("/v1/rerank", {"query": "x", "documents": ["y"]}),
            ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ]
        for path, body in scored:
            r = await http.post(path, json=body)
            assert (r.status_code, r.json()["error"]["code"]) == (400, "unsupported_task")
            assert "not to score" in r.json()["error"]["message"] and "--task embed" in r.json()["error"]["message"]


async def test_texts_are_computed_for_whom_they_are():
    """By the adapter that was named, and with the cached prefixes of the caller alone."""
    completer: Any = FakeCompleter()
    completer.info = msgspec.structs.replace(completer.info, dimensions=2)
    asked: list[EngineRequest] = []

    async def generate(request: EngineRequest) -> AsyncIterator[Event]:
        asked.append(request)
        yield Event(id=request.id, finish="stop", vector=b"\0\0\x80?" * 2, receipt=Receipt())

    completer.client.generate = generate
    for caller in (Caller("ann"), Caller("bob", behind=7), Caller()):
        await Served(Model("m"), completer, "tuned", "tuned", caller).embedder().embed([[1, 2]])
    assert all(r.vector and r.adapter == "tuned" for r in asked)
    assert [r.priority for r in asked] == [0, 7, 0]
    first, second, own = (r.namespace for r in asked)
    assert own == "" and len({first, second, own}) == 3 and first == Caller("ann").namespace("")


class Leaving:
    """A request whose client leaves when told."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_work_is_let_go_when_its_client_leaves_or_the_server_stops():
    completer: Any = FakeCompleter()
    served = Served(Model("tiny"), completer, "tiny")
    ended: list[str] = []

    async def work() -> int:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("let go")
        return 1

    request: Any = Leaving()
    asyncio.get_running_loop().call_later(0.05, request.gone.set)
    with pytest.raises(ClientGone):
        await while_connected(served, request, work())
    request = Leaving()
    asyncio.get_running_loop().call_later(0.05, lambda: [f.fail(Unavailable("stopping")) for f in served.model.running])
    with pytest.raises(Unavailable, match="stopping"):
        await while_connected(served, request, work())
    assert ended == ["let go"] * 2 and not served.model.running


async def test_ollamas_routes(tiny: tuple[Path, Any, Any]):
    path, model, theirs = tiny
    long = "the cat " * 60
    async with serving(path) as http:
        http.headers["x-quire-strict"] = "true"
        ask = {"model": "tiny", "input": ["the cat", "dog"], "options": {"temperature": 0.1}, "keep_alive": "5m"}
        body = (await http.post("/api/embed", json=ask)).json()
        for text, vector in zip(ask["input"], body["embeddings"], strict=True):
            np.testing.assert_allclose(vector, wanted(model, theirs, text), atol=2e-5)
        assert body["prompt_eval_count"] == sum(len(theirs(t).input_ids) for t in ask["input"])
        assert body["model"] == "tiny" and "quire" not in body
        assert 0 < body["total_duration"] < 60e9 and 0 <= body["load_duration"] <= body["total_duration"]
        one = (await http.post("/api/embeddings", json={"model": "tiny", "prompt": "the cat"})).json()
        assert one == {"embedding": body["embeddings"][0]}
        cut = (await http.post("/api/embed", json={"model": "tiny", "input": ["dog", long]})).json()
        assert list(cut["quire"]["cut_tokens"]) == ["1"] and cut["quire"]["cut_tokens"]["1"] > 0
        assert (await http.post("/api/embed", json={"model": "tiny", "input": []})).json()["embeddings"] == []
        for url, asked, names in (
            ("/api/embed", {"model": "tiny", "input": long, "truncate": False}, "input"),
            ("/api/embeddings", {"model": "tiny", "prompt": long}, "prompt"),
            ("/api/embed", {"model": "tiny", "input": "a", "dimensions": 5}, "dimensions"),
            ("/api/embed", {"model": "tiny", "input": "a", "options": {"num_ctx": 4}}, "num_ctx"),
            ("/api/embed", {"model": "tiny", "input": "a", "options": {"x": 4}}, "x"),
            ("/api/embed", {"input": "a"}, "model"),
        ):
            r = await http.post(url, json=asked)
            assert r.status_code == 400 and names in r.json()["error"], r.text
        assert (await http.post("/api/embed", json={"model": "other", "input": "a"})).status_code == 404
