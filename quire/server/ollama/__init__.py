"""Ollama's API, with the names that it makes: its store routes, its Modelfiles, and the adapters of made names."""

from __future__ import annotations

from fastapi import FastAPI

from quire.server.ollama import create, embed, generate, models, store
from quire.server.ollama.adapters import Loading
from quire.server.ollama.names import Names
from quire.server.server import Server


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    names = Names(server)
    server.hooks.append(Loading(names))
    for part in (create, embed, generate, models, store):
        part.register(app, names)
