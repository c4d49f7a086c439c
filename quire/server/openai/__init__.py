"""OpenAI's API: chat completions, completions, embeddings, the models, the Responses API, files and batches."""

from __future__ import annotations

from fastapi import FastAPI

from quire.server.openai import chat, completions, embeddings, models
from quire.server.openai.batches import file_routes
from quire.server.openai.batches import routes as batch_routes
from quire.server.openai.responses import routes as response_routes
from quire.server.server import Server


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    for part in (batch_routes, chat, completions, embeddings, file_routes, models, response_routes):
        part.register(app, server)
