"""What Ollama's clients ask before they generate: is it there, which version, which models, what is loaded.

GET / answers the words that they compare. `version` is the level of Ollama's API that these routes speak, because clients refuse
servers below some level; Quire's own is beside it. One model is loaded, from start to stop: it never expires.
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
from quire.server.dialects import _modelfile, _ollama, _ollama_cards
from quire.server.dialects._compat import Endpoint, Fields
from quire.server.replies import reply
from quire.server.service import Service

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


def register(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def root(request: Request) -> Response:
        return Response(RUNNING, media_type="text/plain")

    async def version(request: Request) -> Response:
        return reply({"version": LEVEL, "quire": VERSION})

    async def tags(request: Request) -> Response:
        cards = await asyncio.to_thread(_ollama_cards.all_cards, service)
        return reply({"models": [card.listed() for card in cards]})

    async def show(request: Request) -> Response:
        asked = _ollama.parse(await _ollama.read(request), ShowRequest, neutral=NEUTRAL)
        name = asked.model or asked.name
        if not name:
            raise BadRequest("model is missing", param="model")
        card = await asyncio.to_thread(_ollama_cards.find, service, name)
        able = _abilities(service) if _ollama.is_served(service, name) else []
        return reply(_shown(card, able))

    async def ps(request: Request) -> Response:
        card = await asyncio.to_thread(_ollama_cards.served, service)
        return reply({"models": _loaded(service, card)})

    for path, handler in (("/", root), ("/api/version", version), ("/api/tags", tags)):
        app.add_api_route(path, handler, methods=["GET", "HEAD"], response_model=None)
    app.add_api_route("/api/show", show, methods=["POST"], response_model=None)
    app.add_api_route("/api/ps", ps, methods=["GET"], response_model=None)


def _abilities(service: Service) -> list[str]:
    """What the served model does besides completing, as far as it is loaded."""
    answers = None if service.completer is None else service.completer.answers
    if answers is None:
        return []
    return ["tools"] * answers.calls + ["thinking"] * answers.reasons


def _shown(card: _ollama_cards.Card, able: list[str]) -> dict[str, Any]:
    """As /api/show has it. The template is the model's own, in Jinja; the parameters are what holds where a client says nothing."""
    made = card.defaults
    chosen: dict[str, Any] = {**_ollama.DEFAULTS, **({} if made is None else made.parameters)}
    lines: list[str] = []
    for name, value in chosen.items():
        lines += [f"{name:<30} {_modelfile.said(one)}" for one in (value if isinstance(value, list) else [value])]
    written = f"# written for clients that read one; Quire has none\nFROM {card.name}\n"
    if made is not None:
        written = _modelfile.write(made.parent, made, card.licence)
    body: dict[str, Any] = {
        "license": card.licence,
        "modelfile": written,
        "parameters": "\n".join(lines),
        "template": card.header.template if made is None or not made.template else made.template,
        "details": card.header.details,
        "model_info": card.header.info,
        "capabilities": ["embedding" if "bert" in card.header.details["family"].lower() else "completion", *able],
        "modified_at": _ollama.stamp(card.modified),
    }
    if made is not None:
        body["details"] = {**card.header.details, "parent_model": made.parent}
        body["system"] = made.system
        body["messages"] = list(made.messages)
    return body


def _loaded(service: Service, card: _ollama_cards.Card | None) -> list[dict[str, Any]]:
    """As /api/ps has it: nothing until the model is loaded, nor while its engine is down."""
    if service.stage != "ready":
        return []
    info = service.info
    taken = info.weight_bytes + info.kv_bytes
    kind = info.backend.partition(" ")[0]
    on_gpu = kind == "cuda" or (kind == "torch" and "(cpu" not in info.backend)
    return [
        {
            "name": service.name,
            "model": service.name,
            "size": taken,  # weights and the KV pool
            "digest": "" if card is None else card.digest,
            "details": _ollama_cards.unknown() if card is None else card.header.details,
            "expires_at": NEVER,
            "size_vram": taken if on_gpu else 0,
            "context_length": info.context,
        }
    ]


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
            ("/api/tags", "The served model and those in the store."),
            ("/api/ps", "The loaded model; it never expires."),
            ("/api/version", "The level of Ollama's API spoken here; `quire` is this server's."),
        )
    ),
    Endpoint(dialect="Ollama", method="GET", path="/", what="`Ollama is running`, which clients compare."),
)
