"""Adapters through a server: chosen by model name in every dialect, loaded and unloaded while it serves, and back after a death."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

torch = pytest.importorskip("torch", reason="needs the test extra: torch makes the model")
pytest.importorskip("peft", reason="needs the test extra: peft makes the adapters")

from tests.e2e.conftest import Server, launch  # noqa: E402
from tests.unit.chat import hub_kit  # noqa: E402
from tests.unit.models import adapters, folders  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model `m` with a tokenizer and a template, and adapters `a` and `b`."""
    path = tmp_path_factory.mktemp("lora")
    tokenizer = hub_kit.byte_level(path / "m")
    tokenizer.chat_template = hub_kit.TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.save_pretrained(path / "m")
    (path / "m" / "config.json").unlink()
    size = max(tokenizer.get_vocab().values()) + 1
    model = folders.build("qwen2", vocab_size=size + 8, eos_token_id=2, bos_token_id=None, num_hidden_layers=2)
    folders.save(model, path / "m")
    for i, name in enumerate("ab"):
        adapters.save(model, path / name, seed=i)
    return path


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[Server]:
    running = launch("--lora", f"first={files / 'a'}", "--runtime-lora", "--context", "256", model=str(files / "m"))
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


def answer(server: Server, model: str | None) -> str:
    """What a completion says, greedily."""
    body = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    done = httpx.post(f"{server.url}/v1/completions", json=body | ({"model": model} if model else {}), timeout=30)
    assert done.status_code == 200, done.text
    if model:
        assert done.json()["model"] == model
    return done.json()["choices"][0]["text"]


def change(server: Server, verb: str, **body: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=body, timeout=30)


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


def test_a_request_chooses_by_model_name_in_every_dialect(server: Server):
    base, first = answer(server, None), answer(server, "first")
    assert answer(server, "m") == base != first
    messages = [{"role": "user", "content": "hello"}]
    said: dict[str, list[str]] = {}
    for model in ("m", "first"):
        common = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        chat = httpx.post(f"{server.url}/v1/chat/completions", json=common, timeout=30).json()
        claude = httpx.post(f"{server.url}/v1/messages", json=common, timeout=30).json()
        options = {"temperature": 0, "num_predict": 8, "seed": 0}
        ollama = httpx.post(
            f"{server.url}/api/chat",
            json={"model": model, "messages": messages, "stream": False, "options": options},
            timeout=30,
        ).json()
        assert chat["model"] == claude["model"] == model
        said[model] = [
            chat["choices"][0]["message"]["content"],
            claude["content"][0]["text"],
            ollama["message"]["content"],
        ]
    for dialect in range(3):
        assert said["m"][dialect] != said["first"][dialect], dialect
    unknown = httpx.post(f"{server.url}/v1/completions", json={"model": "second", "prompt": "x"}, timeout=30)
    assert unknown.status_code == 404


def test_loading_unloading_and_a_death(server: Server, files: Path):
    listed = {card["id"]: card["parent"] for card in server.get("/v1/models").json()["data"]}
    assert listed == {"m": None, "first": "m"}
    assert server.get("/v1/models/first").json()["parent"] == "m"
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
    assert httpx.post(f"{server.url}/v1/completions", json={"model": "second", "prompt": "x"}).status_code == 404


def test_without_the_right_nothing_is_loaded(files: Path):
    running = launch("--lora", f"first={files / 'a'}", "--context", "256", model=str(files / "m"))
    try:
        refused = change(running, "load", lora_name="second", lora_path=str(files / "b"))
        assert refused.status_code == 403 and "--runtime-lora" in refused.text
        assert change(running, "unload", lora_name="first").status_code == 403
        assert answer(running, "first") != answer(running, "m")
    finally:
        running.stop()
