"""The HTTP application: routes from every dialect file, probes, and the layers in front of them.

    Access (log, count, drain) -> HostCheck -> Cors -> KeyCheck -> BodyLimit -> router -> dialects/*

Every layer is pure ASGI, so streams flow and a client's departure is seen. A dialect is a file in `dialects/` with
`register(app, service)`; files that begin with an underscore are shared parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from quire.config import VERSION, ServerConfig
from quire.observe.errors import QuireError
from quire.observe.metrics import CONTENT_TYPE
from quire.server import dialects, errors
from quire.server.access import Access
from quire.server.errors import ClientGone
from quire.server.guard import LOOPBACK_NAMES, Cors, HostCheck, KeyCheck, is_loopback
from quire.server.limits import BodyLimit
from quire.server.replies import reply
from quire.server.service import Service

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


def create_app(config: ServerConfig, source: Service | Completer) -> FastAPI:
    """The application over a Service (which may still be loading) or over a completer that is ready."""
    if isinstance(source, Service):
        service = source
    else:
        service = Service(config, source.info.model)
        service.attach(source.client, source)
    app = _App(
        title="Quire",
        version=VERSION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_layers(config, service),
        exception_handlers={
            QuireError: errors.on_quire_error,
            HTTPException: errors.on_http_exception,
            ClientGone: errors.on_client_gone,
            Exception: errors.on_exception,
        },
    )
    app.state.service = service
    _probes(app, service)
    for module in pkgutil.iter_modules(dialects.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{dialects.__name__}.{module.name}").register(app, service)
    _shorten(app)
    return app


def _shorten(app: FastAPI) -> None:
    """Find paths without a variable by one look, not by a walk along eighty routes; what is not found walks."""
    router = app.router
    walk = router.app
    plain = [route for route in router.routes if isinstance(route, _Route) and "{" not in route.path]
    known = {(route.path, method): route for route in reversed(plain) for method in route.methods or ()}

    async def find(scope: Scope, receive: Receive, send: Send) -> None:
        route = known.get((scope["path"], scope["method"])) if scope["type"] == "http" else None
        if route is None:
            return await walk(scope, receive, send)
        scope.update(router=router, route=route, endpoint=route.endpoint, path_params={})
        return await route.handle(scope, receive, send)

    router.middleware_stack = find


def _layers(config: ServerConfig, service: Service) -> list[Middleware]:
    layers = [Middleware(Access, service=service, log_requests=config.log_requests)]
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


def _probes(app: FastAPI, service: Service) -> None:
    async def health(request: Request) -> Response:
        """The process answers."""
        return reply({"status": "ok"})

    async def ready(request: Request) -> Response:
        """A request sent now would be taken."""
        stage, detail = service.stage, service.detail
        body = {"status": stage, "model": service.name}
        if detail:
            body["detail"] = errors.clean(detail, "the server's log has the cause")
        if stage == "ready":
            return reply(body)
        return reply(body, 503, {} if stage == "failed" else {"retry-after": "2"})  # that one does not come back

    async def version(request: Request) -> Response:
        return reply({"version": VERSION})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    for path, handler in (("/health", health), ("/ready", ready), ("/version", version), ("/metrics", metrics)):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
