"""What the prefix cache tells of itself."""

from __future__ import annotations

from fastapi import FastAPI

from quire.server.cache import routes
from quire.server.server import Server


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    routes.register(app, server)
