"""Text Generation Inference's API."""

from __future__ import annotations

from fastapi import FastAPI

from quire.server.server import Server
from quire.server.tgi import routes


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    routes.register(app, server)
