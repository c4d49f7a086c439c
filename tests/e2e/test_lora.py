"""Adapters through a server: chosen by model name in every dialect, loaded and unloaded while it serves, made into names of their own by
Ollama's create, and back after a death and a restart."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch", reason="needs the test extra: torch makes the model")
pytest.importorskip("peft", reason="needs the test extra: peft makes the adapters")

from quire.config import Environment  # noqa: E402
from quire.weights.store.manifest import File, Manifest, digest_of, encode  # noqa: E402
from quire.weights.store.store import Store  # noqa: E402
from tests.e2e.conftest import Server, launch  # noqa: E402
from tests.unit.chat import hub_kit  # noqa: E402
from tests.unit.models import adapters, folders  # noqa: E402

NAME = "tiny:1b"  # in the store; clients call it m


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model `m` with a tokenizer and a template, adapters `a` and `b` of it, `other` of another one, and a store with the model."""
    path = tmp_path_factory.mktemp("lora")
    tokenizer = hub_kit.byte_level(path / "m")
    tokenizer.chat_template = hub_kit.TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.save_pretrained(path / "m")
    (path / "m" / "config.json").unlink()
    size = max(tokenizer.get_vocab().values()) + 1
    shape = {"vocab_size": size + 8, "eos_token_id": 2, "bos_token_id": None, "num_hidden_layers": 2}
    model = folders.build("qwen2", **shape)
    folders.save(model, path / "m")
    for i, name in enumerate("ab"):
        adapters.save(model, path / name, seed=i)
    adapters.save(folders.build("qwen2", **(shape | {"hidden_size": 64})), path / "other")
    _keep(Store(Environment(home=path / "home")), path / "m")
    return path


def _keep(store: Store, folder: Path) -> None:
    """The model as the store has one that was pulled."""
    store.place.prepare()
    every = sorted(p for p in folder.iterdir() if p.is_file())
    listed = tuple(File(p.name, p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest()) for p in every)
    digest, total = digest_of(listed), sum(file.size for file in listed)
    shutil.copytree(folder, store.place.tree(digest))
    made = Manifest(NAME, "hf:org/tiny", f"sha256:{digest}", total, "2026-03-04T05:06:07+00:00", "folder", files=listed)
    store.place.manifest(NAME).write_bytes(encode(made))


def serve(files: Path, *options: str) -> Server:
    return launch(*options, "--context", "256", "--name", "m", model=NAME, env={"QUIRE_HOME": str(files / "home")})


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[Server]:
    running = serve(files, "--lora", f"first={files / 'a'}", "--runtime-lora")
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


def post(server: Server, path: str, body: Any, **more: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30, **more)


def answer(server: Server, model: str | None) -> str:
    """What a completion says, greedily."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    done = post(server, "/v1/completions", body | ({"model": model} if model else {}))
    assert done.status_code == 200, done.text
    if model:
        assert done.json()["model"] == model
    return done.json()["choices"][0]["text"]


def change(server: Server, verb: str, **body: str) -> httpx.Response:
    return post(server, f"/v1/{verb}_lora_adapter", body)


PROMPT = "The quick brown fox"
SAYS = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 8, "seed": 0}
# Every way to ask: where, with what, and where the text and the model's name are in the answer.
WAYS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}, "choices.0.text", "model"),
    (
        "/v1/chat/completions",
        {"messages": SAYS, "max_tokens": 8, "temperature": 0},
        "choices.0.message.content",
        "model",
    ),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 8, "temperature": 0}, "output.0.content.0.text", "model"),
    ("/v1/messages", {"messages": SAYS, "max_tokens": 8, "temperature": 0}, "content.0.text", "model"),
    ("/api/chat", {"messages": SAYS, "stream": False, "options": GREEDY}, "message.content", "model"),
    ("/api/generate", {"prompt": "hello", "stream": False, "options": GREEDY}, "response", "model"),
    ("/completion", {"prompt": PROMPT, "n_predict": 8, "temperature": 0}, "content", "model"),
    (
        "/v2/models/MODEL/generate",
        {"text_input": PROMPT, "max_tokens": 8, "temperature": 0},
        "text_output",
        "model_name",
    ),
    ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}, "generated_text", ""),
]


def said(server: Server, way: tuple[str, dict[str, Any], str, str], model: str) -> tuple[int, str]:
    """Status and text of one answer."""
    path, body, text, name = way
    if path == "/generate":
        body = body | {"parameters": body["parameters"] | ({} if model == "m" else {"adapter_id": model})}
    elif "MODEL" not in path:
        body = body | {"model": model}
    done = post(server, path.replace("MODEL", model), body)
    found: Any = done.json()
    if done.status_code != 200:
        return done.status_code, done.text
    if name:
        assert found[name] == model, found
    for key in text.split("."):
        found = found[int(key)] if key.isdigit() else found[key]
    return 200, found


@pytest.mark.parametrize("way", WAYS, ids=[path for path, *_ in WAYS])
def test_a_request_chooses_by_model_name(server: Server, way: tuple[str, dict[str, Any], str, str]):
    base, first, nobody = (said(server, way, name) for name in ("m", "first", "second"))
    assert base[0] == first[0] == 200 and base[1] != first[1], (base, first)
    assert nobody[0] == 404
    if way[0] in ("/completion", "/v2/models/MODEL/generate", "/generate"):  # the same prompt, so the same answer
        assert base[1] == said(server, WAYS[0], "m")[1] and first[1] == said(server, WAYS[0], "first")[1]


def test_lines_of_a_batch_choose_too(server: Server):
    asked = [{"model": m, "prompt": PROMPT, "max_tokens": 8, "temperature": 0} for m in ("m", "first", "second")]
    text = "\n".join(
        json.dumps({"custom_id": a["model"], "method": "POST", "url": "/v1/completions", "body": a}) for a in asked
    )
    client = server.client()
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
    end = time.monotonic() + 30
    while batch.status not in ("completed", "failed") and time.monotonic() < end:
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id and batch.error_file_id
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in output}
    assert texts == {name: said(server, WAYS[0], name)[1] for name in ("m", "first")}
    (fault,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(fault)["response"]["status_code"] == 404


def test_embeddings_are_those_of_the_model_or_the_adapter_that_is_named(server: Server, files: Path):
    import peft
    import torch
    import transformers

    ids = post(server, "/tokenize", {"prompt": "two words"}).json()["tokens"]
    bare = transformers.AutoModelForCausalLM.from_pretrained(files / "m", dtype=torch.float32).eval()

    def wanted(model: Any) -> Any:
        with torch.no_grad():
            row = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        return row / row.norm()

    want = {"m": wanted(bare)}  # before the adapter is put into it
    want["first"] = wanted(peft.PeftModel.from_pretrained(bare, files / "a").eval())
    assert float(want["m"] @ want["first"]) < 0.999
    for model, vector in want.items():
        made = post(server, "/v1/embeddings", {"input": "two words", "model": model}).json()
        assert made["model"] == model
        assert float(torch.tensor(made["data"][0]["embedding"]) @ vector) > 0.9999
        theirs = post(server, "/api/embed", {"input": "two words", "model": model}).json()
        assert theirs["embeddings"][0] == made["data"][0]["embedding"]
    refused = post(server, "/v1/embeddings", {"input": "x", "model": "second"})
    assert refused.status_code == 404


def test_a_constraint_holds_through_an_adapter(server: Server):
    body = {"prompt": "The", "max_tokens": 40, "seed": 1, "receipts": True, "guided_regex": "(yes|no), [0-9]{3}"}
    texts = {}
    for model in (None, "first"):
        r = httpx.post(f"{server.url}/v1/completions", json=body | ({"model": model} if model else {}), timeout=30)
        assert r.status_code == 200, r.text
        (choice,) = r.json()["choices"]
        assert choice["finish_reason"] == "stop" and re.fullmatch("(yes|no), [0-9]{3}", choice["text"])
        receipt = r.json()["quire"]["receipts"][0]
        assert receipt["enforced"] == "regex" and receipt.get("adapter", "").partition("@")[0] == (model or "")
        texts[model] = choice["text"]
    assert texts[None] != texts["first"]


def test_loading_unloading_and_a_death(server: Server, files: Path):
    listed = {card["id"]: card["parent"] for card in server.get("/v1/models").json()["data"]}
    assert listed == {"m": None, "first": "m"}
    assert server.get("/v1/models/first").json()["parent"] == "m"
    assert [m["name"] for m in post(server, "/v2/repository/index", {}).json()] == ["m", "first"]
    assert server.get("/v2/models/first").json()["name"] == "first"
    assert change(server, "load", lora_name="second", lora_path=str(files / "b")).status_code == 200
    second = answer(server, "second")
    assert second not in (answer(server, "m"), answer(server, "first"))
    for body, status in (
        ({"lora_name": "second", "lora_path": str(files / "b")}, 400),
        ({"lora_name": "m", "lora_path": str(files / "b")}, 400),
        ({"lora_name": "third", "lora_path": str(files / "m")}, 404),
        ({"lora_name": "third", "lora_path": ""}, 400),
        ({"lora_name": "third"}, 400),
    ):
        assert change(server, "load", **body).status_code == status, body
    os.kill(server.engine_pid(), signal.SIGKILL)
    end = time.monotonic() + 30
    while server.ready() and time.monotonic() < end:
        time.sleep(0.02)
    while not server.ready() and time.monotonic() < end:
        time.sleep(0.05)
    assert answer(server, "second") == second
    assert change(server, "unload", lora_name="second").status_code == 200
    assert change(server, "unload", lora_name="second").status_code == 404
    assert post(server, "/v1/completions", {"model": "second", "prompt": "x"}).status_code == 404


# Names that are made of an adapter


def upload(server: Server, folder: Path) -> dict[str, str]:
    """The files of a PEFT folder, as Ollama's clients bring them: names and digests."""
    made: dict[str, str] = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        made[path.name] = "sha256:" + hashlib.sha256(data).hexdigest()
        sent = httpx.post(f"{server.url}/api/blobs/{made[path.name]}", content=data, timeout=30)
        assert sent.status_code == 201, sent.text
    return made


def create(server: Server, name: str, **more: Any) -> httpx.Response:
    return post(server, "/api/create", {"model": name, "from": NAME, "stream": False, **more})


def tags(server: Server) -> dict[str, Any]:
    return {m["name"]: m for m in server.get("/api/tags").json()["models"]}


def test_a_name_made_of_an_adapter(server: Server, files: Path):
    mine, theirs = upload(server, files / "b"), upload(server, files / "other")
    refused = create(server, "wrong", adapters=theirs)
    assert refused.status_code == 400 and "of this model has" in refused.json()["error"], refused.text
    assert str(files) not in refused.text
    config = "adapter_config.json"
    assert create(server, "wrong", adapters={config: mine[config]}).status_code == 400
    assert create(server, "first", adapters=mine).status_code == 400  # taken by --lora
    assert "wrong" not in tags(server)

    made = create(server, "tuned", adapters=mine)
    assert made.json() == {"status": "success"}, made.text
    assert tags(server)["tuned"]["size"] > tags(server)[NAME]["size"]
    shown = post(server, "/api/show", {"model": "tuned"}).json()
    assert mine["adapter_model.safetensors"] in shown["modelfile"] and shown["details"]["parent_model"] == NAME
    assert post(server, "/v1/load_lora_adapter", {"lora_name": "ref", "lora_path": str(files / "b")}).status_code == 200
    for way in WAYS:
        assert said(server, way, "tuned") == said(server, way, "ref") != said(server, way, "m"), way[0]

    # With more than an adapter it is a name of Ollama's routes alone: nobody else knows what it says.
    ours = {"adapters": mine, "parameters": {"num_predict": 3, "temperature": 0}}
    assert create(server, "short", **ours).status_code == 200
    text = post(server, "/api/generate", {"model": "short", "prompt": "hello", "stream": False}).json()
    whole = said(server, WAYS[5], "tuned")[1]
    assert text["eval_count"] == 3 and whole.startswith(text["response"]) and text["response"]
    assert said(server, WAYS[0], "short")[0] == 404 and "short" not in server.get("/v1/models").text
    assert create(server, "twice", **{"from": "short", "adapters": mine}).status_code == 400
    assert create(server, "short", adapters=mine).json() == {"status": "success"}  # made anew: now an adapter alone
    assert said(server, WAYS[0], "short") == said(server, WAYS[0], "ref")

    for path, body in (("/api/copy", {"source": "tuned", "destination": "again"}),):
        assert post(server, path, body).status_code == 200
    assert said(server, WAYS[0], "again") == said(server, WAYS[0], "ref")
    for name in ("short", "again"):
        gone = httpx.request("DELETE", f"{server.url}/api/delete", json={"model": name}, timeout=30)
        assert gone.status_code == 200
        assert said(server, WAYS[0], name)[0] == 404 and said(server, WAYS[5], name)[0] == 404
    assert change(server, "unload", lora_name="ref").status_code == 200


def test_a_name_with_a_template_of_its_own(server: Server):
    """It is how prompts are written, and nobody else's are."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert create(server, "bare", template=source).json() == {"status": "success"}
    greedy = {"stream": False, "options": GREEDY}
    raw = post(server, "/api/generate", {"model": "m", "prompt": PROMPT, "raw": True, **greedy}).json()["response"]
    talk = [{"role": "user", "content": PROMPT}]
    assert post(server, "/api/chat", {"model": "bare", "messages": talk, **greedy}).json()["message"]["content"] == raw
    assert post(server, "/api/generate", {"model": "bare", "prompt": PROMPT, **greedy}).json()["response"] == raw
    assert post(server, "/api/chat", {"model": "m", "messages": talk, **greedy}).json()["message"]["content"] != raw
    assert httpx.request("DELETE", f"{server.url}/api/delete", json={"model": "bare"}, timeout=30).status_code == 200


def test_it_is_there_after_a_restart_and_without_the_right_nothing_is_loaded(server: Server, files: Path):
    """Without --lora and --runtime-lora: the store's names bring their room with them, and clients load nothing by path."""
    want = said(server, WAYS[0], "tuned"), said(server, WAYS[0], "m")
    running = serve(files, "--state-dir", "none")
    try:
        assert (said(running, WAYS[0], "tuned"), said(running, WAYS[0], "m")) == want
        assert said(running, WAYS[5], "tuned:latest")[1] == said(running, WAYS[5], "tuned")[1]
        refused = change(running, "load", lora_name="second", lora_path=str(files / "b"))
        assert refused.status_code == 403 and "--runtime-lora" in refused.text
        assert change(running, "unload", lora_name="tuned").status_code == 403
        gone = httpx.request("DELETE", f"{running.url}/api/delete", json={"model": "tuned"}, timeout=30)
        assert gone.status_code == 200 and said(running, WAYS[0], "tuned")[0] == 404
    finally:
        assert running.stop() == 0
    store = Store(Environment(home=files / "home"))
    assert [m.name for m in store.list()] == [NAME] and not [p for p in store.problems() if p.fatal]
    assert len(list((files / "home" / "trees").iterdir())) == 1  # the model's: adapters went with their names
