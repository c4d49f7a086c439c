"""OpenAI's API: chat completions, completions, embeddings, the models, the Responses API, files and batches."""

from __future__ import annotations

from fastapi import FastAPI

from quire.server.openai import chat, completions, embeddings, models
from quire.server.openai.batches import file_routes
from quire.server.openai.batches import routes as batches
from quire.server.openai.responses import routes as responses
from quire.server.server import Server


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    for part in (batches, chat, completions, embeddings, file_routes, models, responses):
        part.register(app, server)
