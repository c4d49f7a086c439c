"""The KServe v2 (Open Inference) protocol."""

from __future__ import annotations

from fastapi import FastAPI

from quire.server.kserve import routes
from quire.server.server import Server


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    routes.register(app, server)
