"""The list of models, as the clients read it that shorten conversations by it."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from quire.config import ServerConfig
from quire.server.openai.codex_models import INSTRUCTIONS
from quire.server.served import Model
from quire.server.server import Server
from tests.unit.server.fakes import CALLER, MODEL, URL, FakeCompleter, client_for

CONTEXT = 4321
# What codex-rs needs of a model; a list in which one of them is missing is refused as a whole.
CODEX = (
    *("slug", "display_name", "description", "supported_reasoning_levels", "shell_type", "visibility"),
    *("supported_in_api", "priority", "upgrade", "base_instructions", "support_verbosity", "default_verbosity"),
    *("apply_patch_tool_type", "truncation_policy", "supports_parallel_tool_calls", "experimental_supported_tools"),
)


def model(calls: bool = True, reasons: bool = True) -> FakeCompleter:
    made = FakeCompleter(context=CONTEXT)
    made.answer_format = type(CALLER)(name="x", reasons=reasons, calls=calls, markers=())
    return made


def deep(card: dict[str, Any], path: str) -> Any:
    value: Any = card
    for name in path.split("."):
        value = value[name]
    return value


async def test_the_context_has_every_name_that_agents_look_for():
    async with client_for(model()) as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
        assert (await http.get(f"/v1/models/{MODEL}")).json() == card
    for path in (
        *("context_length", "max_model_len", "context_window", "max_context_window", "max_context_length", "n_ctx"),
        *("meta.n_ctx", "meta.n_ctx_train", "top_provider.context_length"),
    ):
        assert deep(card, path) == CONTEXT, path
    for path in ("max_input_tokens", "max_tokens", "max_output_tokens", "top_provider.max_completion_tokens"):
        assert deep(card, path) == CONTEXT - 1, path


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("reasons", [True, False])
async def test_what_it_can_do_is_told(calls: bool, reasons: bool):
    async with client_for(model(calls, reasons)) as http:
        body = (await http.get("/v1/models")).json()
        (local,) = (await http.get("/api/v0/models")).json()["data"]
    (card,), (codex,) = body["data"], body["models"]
    able = card["capabilities"]
    assert (able["tools"], able["reasoning"], able["vision"], able["structured_output"]) == (
        calls,
        reasons,
        False,
        True,
    )
    assert able["thinking"] == {"supported": reasons} and able["image_input"] == {"supported": False}
    assert ("tools" in card["supported_parameters"]) == calls
    assert ("reasoning" in card["supported_parameters"]) == reasons
    assert bool(codex["supported_reasoning_levels"]) == reasons and codex["supports_parallel_tool_calls"] == calls
    assert local["capabilities"] == (["tool_use"] if calls else [])
    assert (local["state"], local["type"], local["loaded_context_length"]) == ("loaded", "llm", CONTEXT)


async def test_codex_finds_its_list_beside_openais():
    async with client_for(model()) as http:
        body = (await http.get("/v1/models", params={"client_version": "0.169.0"})).json()
    (codex,) = body["models"]
    assert not set(CODEX) - codex.keys()
    assert (codex["slug"], codex["context_window"], codex["priority"]) == (MODEL, CONTEXT, 0)
    assert codex["base_instructions"] == INSTRUCTIONS and "terminal" in INSTRUCTIONS, (
        "an empty one would leave Codex without any"
    )


async def test_official_clients_list_it():
    async with client_for(model()) as http:
        theirs: Any = http
        openai = AsyncOpenAI(base_url=f"{URL}/v1", api_key="x", http_client=theirs)
        (found,) = (await openai.models.list()).data
        assert found.id == MODEL and found.model_extra is not None and found.model_extra["context_length"] == CONTEXT
        transport: Any = http._transport
        other = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=transport.app))
        claude = AsyncAnthropic(base_url=URL, api_key="x", http_client=other)
        page = await claude.models.list()
        (one,) = page.data
        assert (one.id, one.type, one.display_name) == (MODEL, "model", MODEL) and one.created_at.year > 2000
        assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, MODEL)
        assert (one.max_input_tokens, one.max_tokens) == (CONTEXT - 1, CONTEXT - 1)
        assert (await claude.models.retrieve(MODEL)).id == MODEL


async def test_a_model_that_is_not_loaded_is_listed_without_facts():
    async with client_for(service=Server(ServerConfig(), [Model(MODEL)])) as http:
        body = (await http.get("/v1/models")).json()
        (local,) = (await http.get("/api/v0/models")).json()["data"]
    assert body["models"] == [] and body["data"][0]["max_model_len"] is None
    assert "capabilities" not in body["data"][0] and local["state"] == "not-loaded"


async def test_ollamas_show_has_the_context():
    async with client_for(model()) as http:
        found = (await http.get("/api/ps")).json()["models"]
    assert found[0]["context_length"] == CONTEXT
