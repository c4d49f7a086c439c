"""Requests and answers of a server, one JSON file each, as they went over the wire."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECRET = ("authorization", "x-api-key", "cookie")


class Recorder:
    """An ASGI layer around an application; files are numbered in the order in which requests came."""

    def __init__(self, app: ASGIApp, folder: Path):
        self.app = app
        self.folder = folder
        self.count = 0
        folder.mkdir(parents=True, exist_ok=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/health", "/ready", "/metrics"):
            await self.app(scope, receive, send)
            return
        self.count += 1
        number, began = self.count, time.time()
        body, status, answer = bytearray(), 0, bytearray()

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            answer.extend(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, received, sent)
        finally:
            headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
            told = {
                "method": scope["method"],
                "path": scope["path"],
                "query": scope["query_string"].decode("latin-1"),
                "headers": {key: "..." if key in SECRET else value for key, value in headers.items()},
                "body": _json(bytes(body)),
                "status": status,
                "answer": bytes(answer).decode(errors="replace"),
                "seconds": round(time.time() - began, 3),
            }
            path = self.folder / f"{number:03d}.json"
            path.with_suffix(".tmp").write_text(json.dumps(told, indent=1, ensure_ascii=False))
            path.with_suffix(".tmp").replace(path)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace") or None
