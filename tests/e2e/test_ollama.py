"""The official `ollama` client drives the default model: lists, answers, streams, options, errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import openai
import pytest

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY = {"temperature": 0, "num_predict": 20}


@pytest.fixture
def llama(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=120) as client:
        yield client


def test_list(llama: ollama.Client, model_path: Path):
    models = llama.list().models
    assert models[0].model == DEFAULT_MODEL  # the served one first
    assert models[0].size == model_path.stat().st_size
    assert models[0].digest == hashlib.sha256(model_path.read_bytes()).hexdigest()
    assert models[0].modified_at is not None
    details = models[0].details
    assert details is not None
    assert (details.format, details.family) == ("gguf", "llama")
    assert (details.parameter_size, details.quantization_level) == ("134.52M", "Q4_1")


def test_show(llama: ollama.Client):
    shown = llama.show("smollm2")
    assert shown.capabilities == ["completion", "tools"]  # by the general prompt
    assert shown.template and "<|im_start|>" in shown.template
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.modelinfo["general.parameter_count"] == 134515008
    with pytest.raises(ollama.ResponseError) as e:
        llama.show("nope")
    assert e.value.status_code == 404
    assert DEFAULT_MODEL in e.value.error


def test_ps(llama: ollama.Client):
    (one,) = llama.ps().models
    assert one.name == DEFAULT_MODEL
    assert one.expires_at is not None and one.expires_at.year > 2200
    assert one.size is not None and one.size > 98_000_000
    assert one.size_vram == 0
    assert one.digest


def test_chat_is_what_openais_route_says(llama: ollama.Client, client: openai.OpenAI):
    r = llama.chat(DEFAULT_MODEL, messages=ASK, options=GREEDY)
    same = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=ASK,
        temperature=0,
        max_tokens=20,
    )
    assert r.message.content == same.choices[0].message.content
    assert (r.message.role, r.done, r.done_reason) == ("assistant", True, same.choices[0].finish_reason)
    assert same.usage is not None
    assert (r.prompt_eval_count, r.eval_count) == (same.usage.prompt_tokens, same.usage.completion_tokens)
    assert r.prompt_eval_duration and r.eval_duration and r.total_duration
    assert r.prompt_eval_duration + r.eval_duration <= r.total_duration
    assert r.load_duration is not None and r.load_duration < r.total_duration


@pytest.mark.parametrize("name", ["smollm2", "smollm2:latest", DEFAULT_MODEL])
def test_names(llama: ollama.Client, name: str):
    assert llama.chat(name, messages=ASK, options={"num_predict": 1}).model == name


def test_a_stream_says_the_same(llama: ollama.Client):
    whole = llama.chat(DEFAULT_MODEL, messages=ASK, options=GREEDY)
    parts = list(llama.chat(DEFAULT_MODEL, messages=ASK, options=GREEDY, stream=True))
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)


def test_generate_raw_templated_and_continued(llama: ollama.Client, client: openai.OpenAI):
    prompt = "The capital of France is"
    raw = llama.generate(DEFAULT_MODEL, prompt, raw=True, options=GREEDY)
    same = client.completions.create(model=DEFAULT_MODEL, prompt=prompt, temperature=0, max_tokens=20)
    assert raw.response == same.choices[0].text
    first = llama.generate(DEFAULT_MODEL, str(ASK[0]["content"]), options=GREEDY)
    assert first.response == llama.chat(DEFAULT_MODEL, messages=ASK, options=GREEDY).message.content
    assert first.context is not None
    assert len(first.context) == (first.prompt_eval_count or 0) + (first.eval_count or 0)
    again = llama.generate(DEFAULT_MODEL, "And of Italy?", context=first.context, options=GREEDY)
    assert (again.prompt_eval_count or 0) > len(first.context)
    streamed = "".join(
        p.response or "" for p in llama.generate(DEFAULT_MODEL, prompt, raw=True, options=GREEDY, stream=True)
    )
    assert streamed == raw.response


def test_options(llama: ollama.Client):
    sampled = {"seed": 7, "temperature": 1.0, "num_predict": 16}
    one, two = (llama.generate(DEFAULT_MODEL, "Tell me a story.", options=sampled) for _ in range(2))
    other = llama.generate(DEFAULT_MODEL, "Tell me a story.", options=sampled | {"seed": 8})
    assert one.response == two.response != other.response
    assert (one.eval_count, one.done_reason) == (16, "length")
    stopped = llama.generate(
        DEFAULT_MODEL, "1, 2, 3, 4,", raw=True, options={"temperature": 0, "stop": ["7"], "num_predict": 40}
    )
    assert stopped.done_reason == "stop"
    assert stopped.response is not None and "7" not in stopped.response


def test_logprobs(llama: ollama.Client):
    r = llama.generate(
        DEFAULT_MODEL, "The capital of France is", raw=True, options=GREEDY, logprobs=True, top_logprobs=2
    )
    assert r.logprobs is not None and len(r.logprobs) == r.eval_count
    best = r.logprobs[0].top_logprobs
    assert best is not None and best[0].token == r.logprobs[0].token


def test_a_format_is_kept(llama: ollama.Client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    r = llama.generate(DEFAULT_MODEL, "A number:", format={**schema, "additionalProperties": False}, options=GREEDY)
    if r.done_reason == "stop":
        assert list(json.loads(r.response)) == ["n"]
    else:
        assert r.response.startswith("{")


def test_nothing_to_say_loads(llama: ollama.Client):
    r = llama.generate(DEFAULT_MODEL)
    assert (r.done, r.done_reason, r.response) == (True, "load", "")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"think": True}, "think"),
        ({"options": {"mirostat": 1}}, "mirostat"),
        ({"options": {"num_ctx": 1_000_000}}, "num_ctx"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_refusals_reach_the_client(llama: ollama.Client, fields: dict[str, object], names: str):
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError) as e:
            list(llama.generate(DEFAULT_MODEL, "hi", stream=stream, **fields))
        assert e.value.status_code == 400
        assert names in e.value.error


def test_other_models_and_routes(llama: ollama.Client):
    for call, status in (
        (lambda: llama.generate("gemma3", "hi"), 404),
        (lambda: llama.delete(DEFAULT_MODEL), 400),
        (lambda: llama.push("x"), 501),
        (lambda: llama.copy(DEFAULT_MODEL, "../x"), 400),
        (lambda: llama.pull("/etc/passwd"), 400),
    ):
        with pytest.raises(ollama.ResponseError) as e:
            call()
        assert e.value.status_code == status, e.value


def test_pull_of_what_is_here(llama: ollama.Client):
    assert llama.pull("smollm2").status == "success"
    told = list(llama.pull("smollm2", stream=True))
    assert told[-1].status == "success"
    assert any("already here" in (t.status or "") for t in told)


def test_what_a_shell_sends(server: Server):
    """curl -d says that the body is a form; every example of Ollama's is written so."""
    body = '{"model": "smollm2", "prompt": "hi", "stream": false, "options": {"num_predict": 2}}'
    r = httpx.post(
        f"{server.url}/api/generate",
        content=body,
        headers={"content-type": "application/x-www-form-urlencoded"},
        timeout=60,
    )
    assert r.status_code == 200
    assert server.get("/").text == "Ollama is running"
    assert httpx.head(server.url, timeout=10).status_code == 200
