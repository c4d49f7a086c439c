"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters come and go while the model is served.

    {"lora_name": "sql", "lora_path": "/adapters/sql"}      -> 200, and `"model": "sql"` may be asked for
    {"lora_name": "sql"}                                    -> 200; running requests finish with it

An adapter belongs to one model: with several served, `model` says which (Quire's own field); without it a load goes to the first, and an unload
finds the adapter by its name.

Reading files by path is an administrator's right: without --runtime-lora both are 403.
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.transport.client import AdapterClient
from quire.observe.errors import BadModelFile, BadRequest, NotEnoughMemory, Unsupported
from quire.server.callers import caller_of
from quire.server.errors import Forbidden
from quire.server.replies import reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared.bodies import parse, read_json
from quire.server.shared.compat import Endpoint, Fields

MAX_PATH = 4096
NEUTRAL: dict[str, tuple[object, ...]] = {"lora_int_id": (None,), "load_inplace": (None, False)}


class LoadRequest(msgspec.Struct, kw_only=True):
    """The fields that are honoured."""

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadRequest(msgspec.Struct, kw_only=True):
    """The fields that are honoured."""

    lora_name: str
    model: str | None = None


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""

    async def load(request: Request) -> Response:
        asked = parse(await read_json(request), LoadRequest, (), NEUTRAL)
        _check_allowed(server, request)
        served = await server.resolve(request, asked.model, first=True)
        client, model = _client(served), served.model
        if server.models.get(asked.lora_name) is not None or any(
            asked.lora_name in other.loaded_adapters for other in server.models if other is not model
        ):
            raise BadRequest("that is the name of a model, or of another model's adapter", param="lora_name")
        if not 0 < len(asked.lora_path) <= MAX_PATH or "\0" in asked.lora_path:
            raise BadRequest(f"lora_path must be a path of 1 to {MAX_PATH} characters", param="lora_path")
        try:
            made = await client.load_adapter(asked.lora_name, asked.lora_path)
        except (
            BadModelFile,
            Unsupported,
            NotEnoughMemory,
        ) as e:  # whoever may name a path may know what is wrong there
            raise BadRequest(e.message, cure=e.cure, param="lora_path", code=e.code) from e
        told = {"id": made.name, "parent": model.name, "rank": made.rank, "bytes": made.nbytes}
        return reply({"status": "loaded", **told})

    async def unload(request: Request) -> Response:
        asked = parse(await read_json(request), UnloadRequest, (), NEUTRAL)
        _check_allowed(server, request)
        owner = next((m for m in server.models if asked.lora_name in m.loaded_adapters), server.models.first)
        served = await server.resolve(request, asked.model or owner.name)
        await _client(served).unload_adapter(asked.lora_name)
        return reply({"status": "unloaded", "id": asked.lora_name})

    app.add_api_route("/v1/load_lora_adapter", load, methods=["POST"], response_model=None)
    app.add_api_route("/v1/unload_lora_adapter", unload, methods=["POST"], response_model=None)


def _check_allowed(server: Server, request: Request) -> None:
    """403 where adapters may not be changed, or not by who asks."""
    if not server.config.runtime_lora:
        raise Forbidden(
            "adapters cannot be loaded or unloaded while this server runs: that reads files of this machine",
            cure="start it with --runtime-lora",
            code="forbidden",
        )
    caller_of(request.scope).check_administers("loading and unloading adapters")


def _client(served: Served) -> AdapterClient:
    """The client that loads adapters."""
    client = served.client
    if not isinstance(client, AdapterClient):
        raise Unsupported("this server's engine has no adapters")
    return client


NOTES = {
    "lora_path": "a PEFT folder or a GGUF file of this machine",
    "model": "Quire's: whose adapter it is, where several models are served; the first by default",
}
COMPAT = tuple(
    Endpoint(
        dialect="OpenAI, with vLLM's fields",
        method="POST",
        path=f"/v1/{verb}_lora_adapter",
        what=what,
        fields=(Fields(shape=shape, neutral=NEUTRAL, notes=NOTES),),
        example={"lora_name": "mine", **({"lora_path": "adapters/mine"} if verb == "load" else {})},
        surface=surface,
        task="adapters",
    )
    for verb, shape, surface, what in (
        ("load", LoadRequest, "lora_name lora_path load_inplace", "With `--runtime-lora`, else 403. See adapters.md."),
        (
            "unload",
            UnloadRequest,
            "lora_name lora_int_id",
            "With `--runtime-lora`, else 403. Running answers finish with it.",
        ),
    )
)
