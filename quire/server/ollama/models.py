"""The routes that Ollama's clients call before they generate: GET /, /api/version, /api/tags, /api/show and /api/ps.

GET / answers the sentence that they compare. `version` is the level of Ollama's API that these routes speak, because clients refuse
servers below some level; Quire's own is beside it. A model is loaded from start to stop: it never expires.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.config import VERSION
from quire.observe.errors import BadRequest
from quire.server.ollama import cards, modelfile, requests
from quire.server.ollama.names import Names
from quire.server.replies import reply
from quire.server.served import Model
from quire.server.shared.compat import Endpoint, Fields

RUNNING = "Ollama is running"
LEVEL = "0.6.4"  # the first in which /api/show tells capabilities
# Ollama's own word for never is as far ahead as its clock goes; clients show "Forever" beyond twenty years.
NEVER = "2318-01-01T00:00:00Z"


NEUTRAL: dict[str, tuple[object, ...]] = {
    "verbose": (None, False),
    "system": (None, ""),
    "template": (None, ""),
    "options": (None, {}),
}


class ShowRequest(msgspec.Struct, kw_only=True):
    """`name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None


def register(app: FastAPI, names: Names) -> None:
    """Add the routes."""

    async def root(request: Request) -> Response:
        return Response(RUNNING, media_type="text/plain")

    async def version(request: Request) -> Response:
        return reply({"version": LEVEL, "quire": VERSION})

    async def tags(request: Request) -> Response:
        found = await asyncio.to_thread(cards.all_cards, names)
        return reply({"models": [card.listed() for card in found]})

    async def show(request: Request) -> Response:
        asked = requests.parse(await requests.read(request), ShowRequest, neutral=NEUTRAL)
        name = asked.model or asked.name
        if not name:
            raise BadRequest("model is missing", param="model")
        card = await asyncio.to_thread(cards.find, names, name)
        able = _abilities(names.get(name))
        return reply(_shown(card, able))

    async def ps(request: Request) -> Response:
        loaded = [model for model in names.server.models if model.stage == "ready"]
        told = [_loaded(model, await asyncio.to_thread(cards.served, names, model)) for model in loaded]
        return reply({"models": told})

    for path, handler in (("/", root), ("/api/version", version), ("/api/tags", tags)):
        app.add_api_route(path, handler, methods=["GET", "HEAD"], response_model=None)
    app.add_api_route("/api/show", show, methods=["POST"], response_model=None)
    app.add_api_route("/api/ps", ps, methods=["GET"], response_model=None)


def _abilities(model: Model | None) -> list[str]:
    """What a served model does besides completing, as far as it is loaded."""
    completer = None if model is None else model.completer
    if completer is None:
        return []
    answers = completer.answer_format
    calls = completer.prompts_tools or (answers is not None and answers.calls)
    return ["tools"] * calls + ["thinking"] * (answers is not None and answers.reasons)


def _shown(card: cards.Card, able: list[str]) -> dict[str, Any]:
    """The card as /api/show has it. The template is the model's own, in Jinja; the parameters are what holds where a client says
    nothing."""
    made = card.defaults
    chosen: dict[str, Any] = {**requests.DEFAULTS, **({} if made is None else made.parameters)}
    lines: list[str] = []
    for name, value in chosen.items():
        lines += [f"{name:<30} {modelfile.said(one)}" for one in (value if isinstance(value, list) else [value])]
    written = f"# written for clients that read one; Quire has none\nFROM {card.name}\n"
    if made is not None:
        written = modelfile.write(made.parent, made, card.licence)
    body: dict[str, Any] = {
        "license": card.licence,
        "modelfile": written,
        "parameters": "\n".join(lines),
        "template": card.header.template if made is None or not made.template else made.template,
        "details": card.header.details,
        "model_info": card.header.info,
        "capabilities": ["embedding" if "bert" in card.header.details["family"].lower() else "completion", *able],
        "modified_at": requests.stamp(card.modified),
    }
    if made is not None:
        body["details"] = {**card.header.details, "parent_model": made.parent}
        body["system"] = made.system
        body["messages"] = list(made.messages)
    return body


def _loaded(model: Model, card: cards.Card | None) -> dict[str, Any]:
    """The model as /api/ps lists it. While it loads, and while its engine is down, it is not listed."""
    info = model.info
    taken = info.weight_bytes + info.kv_bytes
    kind = info.backend.partition(" ")[0]
    on_gpu = kind == "cuda" or (kind == "torch" and "(cpu" not in info.backend)
    return {
        "name": model.name,
        "model": model.name,
        "size": taken,  # weights and the KV pool
        "digest": "" if card is None else card.digest,
        "details": cards.unknown() if card is None else card.header.details,
        "expires_at": NEVER,
        "size_vram": taken if on_gpu else 0,
        "context_length": info.context,
    }


COMPAT = (
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/show",
        what="What is in a model, served or in the store.",
        fields=(
            Fields(
                shape=ShowRequest,
                neutral=NEUTRAL,
                notes={"name": "the older word for `model`"},
            ),
        ),
        example={"model": ""},
        surface="model verbose",
        task="store",
    ),
    *(
        Endpoint(dialect="Ollama", method="GET", path=path, what=what)
        for path, what in (
            ("/api/tags", "The served models and those in the store."),
            ("/api/ps", "The loaded models; they never expire."),
            ("/api/version", "The level of Ollama's API spoken here; `quire` is this server's."),
        )
    ),
    Endpoint(dialect="Ollama", method="GET", path="/", what="`Ollama is running`, which clients compare."),
)
