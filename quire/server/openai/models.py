"""GET /v1/models and /v1/models/{id}: the models that are served, and their adapters, which name their model as the parent.

One answer for every client that reads it: in OpenAI's shape, with the context under each name that an agent looks for, so that it
shortens a conversation in time, and with what the model can do. Anthropic's clients find their fields in the same objects, Codex its
own list beside them. Under `quire.tasks` is what requests may ask for. Further names of a model are listed too: they have it as their root.
GET /api/v0/models is LM Studio's list of the same models.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.types import EngineInfo
from quire.server.openai.codex_models import codex_model
from quire.server.replies import reply
from quire.server.served import Model
from quire.server.server import Server
from quire.server.shared.compat import Absent, Endpoint

# What a request for text may have, in OpenRouter's words, of every model and of those that can do it.
ALWAYS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("seed", "stop", "max_tokens", "logprobs", "top_logprobs", "response_format", "structured_outputs"),
)  # fmt: skip
CALLS = ("tools", "tool_choice", "parallel_tool_calls")
REASONS = ("reasoning", "include_reasoning")


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""

    def cards() -> list[tuple[Model, dict[str, Any]]]:
        return [(m, _card(m, name, name in m.names)) for m in server.models for name in (*m.names, *m.adapters)]

    async def models(request: Request) -> Response:
        found = cards()
        data = [card for _, card in found]
        codex = [codex_model(card, i) for i, (model, card) in enumerate(found) if _generates(model)]
        ends = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}  # as Anthropic's lists end
        return reply({"object": "list", "data": data, **ends, "models": codex})

    async def model(request: Request) -> Response:
        found, adapter = server.models.choose(request.path_params["model_id"])
        return reply(_card(found, adapter or found.name, not adapter))

    async def local(request: Request) -> Response:
        return reply({"object": "list", "data": [_local(model, card) for model, card in cards()]})

    for path in ("/v1/models", "/models"):
        app.add_api_route(path, models, methods=["GET"], response_model=None)
    # A model's name may hold slashes.
    app.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"], response_model=None)
    app.add_api_route("/api/v0/models", local, methods=["GET"], response_model=None)


def _generates(model: Model) -> bool:
    return model.completer is not None and model.completer.info.task == "generate"


def _card(model: Model, name: str, itself: bool) -> dict[str, Any]:
    info = None if model.completer is None else model.completer.info
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": model.created,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "quire",
        "display_name": name,
        "name": name,
        "root": model.name,
        "parent": None if itself else model.name,  # an adapter has the model that it adds to
        "max_model_len": None if info is None else info.context,  # null until it is loaded, when the rest comes too
        **({} if info is None else _facts(model, info)),
        "quire": {"tasks": None if info is None else info.tasks},
    }


def _facts(model: Model, info: EngineInfo) -> dict[str, Any]:
    """The context by all its names, and what the model can do, where it makes text."""
    context = (
        info.context
    )  # what is served, also where others tell what a model was trained with: clients take it for the window
    answer = max(1, context - 1)  # prompt and answer share the context: each has at least one token of it
    sizes: dict[str, Any] = dict.fromkeys(
        ("context_length", "context_window", "max_context_length", "max_context_window", "n_ctx"), context
    )
    sizes |= {
        "max_input_tokens": answer,
        "meta": {"n_ctx": context, "n_ctx_train": context, "n_vocab": info.vocab_size},
    }
    if not _generates(model):
        return sizes
    calls, reasons = _able(model)
    told = {"tools": calls, "function_calling": calls, "reasoning": reasons, "structured_output": True, "vision": False}
    theirs = {"structured_outputs": True, "thinking": reasons, "image_input": False, "pdf_input": False}
    return {
        **sizes,
        "max_tokens": answer,
        "max_output_tokens": answer,
        "top_provider": {"context_length": context, "max_completion_tokens": answer},
        "architecture": {"modality": "text->text", "input_modalities": ["text"], "output_modalities": ["text"]},
        "supported_parameters": [*ALWAYS, *(CALLS if calls else ()), *(REASONS if reasons else ())],
        "capabilities": told
        | {name: {"supported": can} for name, can in theirs.items()},  # the latter as Anthropic has them
    }


def _able(model: Model) -> tuple[bool, bool]:
    """Whether the model calls tools, and whether it reasons apart from its answers."""
    answers = None if model.completer is None else model.completer.answer_format
    return (False, False) if answers is None else (bool(answers.calls), bool(answers.reasons))


def _local(model: Model, card: dict[str, Any]) -> dict[str, Any]:
    info = None if model.completer is None else model.completer.info
    return {
        "id": card["id"],
        "object": "model",
        "type": "embeddings" if info is not None and info.task == "embed" else "llm",
        "publisher": "quire",
        "arch": "" if info is None else info.architecture,
        "state": "loaded" if model.stage == "ready" else "not-loaded",
        "max_context_length": card["max_model_len"],
        "loaded_context_length": card["max_model_len"],
        "capabilities": ["tool_use"] if _able(model)[0] else [],
    }


COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="GET",
        path="/v1/models",
        what="Also `/models`. The served models. The context is told as `context_length`, `context_window`, `max_context_length`, `max_model_len`, `n_ctx`, `meta.n_ctx` and "
        "`top_provider.context_length`; `capabilities` and `supported_parameters` say what each can do, `quire.tasks` what it is asked for: `generate`, `embed`, "
        "`score`. Anthropic's fields (`type`, `display_name`, `created_at`, `max_input_tokens`, `max_tokens`) are in the same objects; `models` is Codex's list. "
        "LM Studio's list of the same models is `/api/v0/models`.",
    ),
    Endpoint(dialect="OpenAI", method="GET", path="/v1/models/{model_id:path}"),
)
_NO_MEDIA = "the models served take and make text"
ABSENT = (
    Absent("OpenAI", "/v1/audio/…", _NO_MEDIA),
    Absent("OpenAI", "/v1/images/…", _NO_MEDIA),
    Absent("OpenAI", "/v1/realtime", _NO_MEDIA),
    Absent("OpenAI", "/v1/moderations", "no model for it"),
)
