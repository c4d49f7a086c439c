"""What vLLM adds to OpenAI's API: adapters that come and go, rerank, score, and /tokenize and /detokenize, which llama.cpp and TGI share."""

from __future__ import annotations

from fastapi import FastAPI

from quire.server.server import Server
from quire.server.vllm import lora, rerank, score, tokenize


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    for part in (lora, rerank, score, tokenize):
        part.register(app, server)
