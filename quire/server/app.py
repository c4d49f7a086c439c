"""The HTTP application: routes from every dialect, probes, and the layers in front of them.

    Access (log, count, drain) -> HostCheck -> Cors -> KeyCheck -> BodyLimit -> KnownPaths -> router -> a dialect's handler

Every layer is pure ASGI, so streams flow and a client's departure is seen. A dialect is a package beside this file that has
`register(app, server)`: it is found by listing, and nothing here names one.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from quire import server as room
from quire.config import VERSION, ServerConfig
from quire.observe.errors import BadRequest, QuireError
from quire.observe.metrics import CONTENT_TYPE
from quire.server import errors
from quire.server.errors import ClientGone
from quire.server.middleware import (
    LOOPBACK_NAMES,
    Access,
    BodyLimit,
    Cors,
    HostCheck,
    KeyCheck,
    KnownPaths,
    is_loopback,
)
from quire.server.replies import reply
from quire.server.served import Model
from quire.server.server import Server

if TYPE_CHECKING:
    from quire.chat.completer import Completer

FORM = 64 * 1024  # what a form may add to the file in it


class _Route(Route):
    """A route that names itself to the layers in front. Bodies are read by the dialects, so nothing is analysed or injected."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        if match != Match.NONE:
            found["route"] = self
        return match, found


class _App(FastAPI):
    """FastAPI with plain routes: every handler takes a Request and gives a Response."""

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        route = _Route(path, endpoint, methods=options["methods"])
        route.methods = set(options["methods"])  # HEAD only where it is asked for
        self.router.routes.append(route)


def dialects() -> Iterator[ModuleType]:
    """The packages beside this file that are dialects."""
    for module in pkgutil.iter_modules(room.__path__):
        if module.ispkg and hasattr(package := importlib.import_module(f"{room.__name__}.{module.name}"), "register"):
            yield package


def create_app(config: ServerConfig, source: Server | Completer) -> FastAPI:
    """The application over a Server (whose models may still be loading) or over a completer that is ready."""
    if isinstance(source, Server):
        server = source
    else:
        server = Server(config, [model := Model(source.info.model)])
        server.attach(model, source.client, source)
    app = _App(
        title="Quire",
        version=VERSION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_layers(config, server),
        exception_handlers={
            QuireError: errors.on_quire_error,
            HTTPException: errors.on_http_exception,
            ClientGone: errors.on_client_gone,
            Exception: errors.on_exception,
        },
    )
    app.state.server = server
    _probes(app, server)
    for dialect in dialects():
        dialect.register(app, server)
    app.router.middleware_stack = KnownPaths(app.router)
    return app


def _layers(config: ServerConfig, server: Server) -> list[Middleware]:
    layers = [Middleware(Access, server=server, log_requests=config.log_requests)]
    if is_loopback(config.host):
        layers.append(Middleware(HostCheck, names=LOOPBACK_NAMES | {config.host} | set(config.allowed_hosts)))
    elif config.allowed_hosts:
        layers.append(Middleware(HostCheck, names=config.allowed_hosts))
    if config.cors_origins:
        layers.append(Middleware(Cors, origins=config.cors_origins))
    keys = {"": config.api_key} if config.api_key else {}
    if keys or config.api_keys:
        layers.append(Middleware(KeyCheck, keys=keys | dict(config.api_keys)))
    layers.append(Middleware(BodyLimit, limit=config.max_body, special={"/v1/files": config.max_file + FORM}))
    return layers


def _probes(app: FastAPI, server: Server) -> None:
    async def live(request: Request) -> Response:
        """The process answers."""
        return reply({"status": "ok"})

    async def health(request: Request) -> Response:
        """Every model has loaded once, and not all have failed for good: scripts made for llama-server and vLLM wait for this."""
        several = {} if len(server.models) == 1 else {"models": {m.name: m.stage for m in server.models}}
        stage = server.health
        if stage == "ok":
            return reply({"status": stage, **several})
        # llama-server's words, which some clients look for.
        told = (
            {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
            if stage == "loading"
            else {}
        )
        return reply(
            {"status": stage, **told, **several}, 503, _again(server.retry_after if stage == "loading" else None)
        )

    async def ready(request: Request) -> Response:
        """A request sent now would be taken: by the model that is named, or by one at least."""
        name = request.query_params.get("model")
        if name is not None or len(server.models) == 1:
            body = _told(server.models.choose(name)[0])
            stage = body["status"] = "draining" if server.draining else body["status"]
        else:
            stage = server.stage
            body = {"status": stage, "model": server.models.first.name, "models": [_told(m) for m in server.models]}
        if stage in ("ready", "degraded"):
            return reply(body)
        failed = stage == "failed"  # that one does not come back
        return reply(body, 503, {} if failed else _again(server.retry_after or 2.0))

    async def version(request: Request) -> Response:
        return reply({"version": VERSION})

    async def metrics(request: Request) -> Response:
        return Response(server.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def steps(request: Request) -> Response:
        """The newest steps of an engine: who rode in each, how long it took, and what held others back."""
        served = await server.resolve(request, request.query_params.get("model"))
        served.caller.check_administers("GET /debug/steps")
        last = request.query_params.get("last", "32")
        if not last.isascii() or not last.isdecimal() or len(last) > 9:
            raise BadRequest(f"last is {last[:32]!r}: it is how many steps", param="last")
        told = await served.client.steps(int(last))
        body = [
            {**msgspec.structs.asdict(step), "rows": [{"id": i, "tokens": n} for i, n in step.rows]} for step in told
        ]
        return reply({"model": served.model.name, "steps": body})

    routes = {"/live": live, "/health": health, "/ready": ready, "/version": version, "/metrics": metrics}
    routes["/debug/steps"] = steps
    for path, handler in routes.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)


def _again(seconds: float | None) -> dict[str, str]:
    return {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}


def _told(model: Model) -> dict[str, str]:
    """How a model is."""
    body = {"status": model.stage, "model": model.name}
    if model.detail:
        body["detail"] = errors.clean(model.detail, "the server's log has the cause")
    return body
