"""`quire serve` with a scripted model: every route, layer and signal is the real one, the answers are planned.

    python -m tests.scripted.server SCRIPT.json [--model smollm2:135m] [--chat-template FILE] [--name coder] [--record FOLDER]

Prints the address, then `ready`. Ends at SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec

from quire.config import DEFAULT_MODEL, ServerConfig
from quire.server import lifecycle
from quire.server.served import Model
from quire.server.server import Server
from quire.weights.store.store import Store
from tests.scripted.model import Script, scripted
from tests.scripted.recorder import Recorder

TEMPLATE = Path(__file__).resolve().parents[1] / "e2e" / "clients" / "tools.jinja"


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("script", type=Path)
    p.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer is used")
    p.add_argument("--chat-template", default=str(TEMPLATE), help="a file, or `own`")
    p.add_argument("--name", default="scripted-coder")
    p.add_argument("--record", type=Path)
    p.add_argument("--port", type=int, default=0)
    p.add_argument("--wait", type=float, default=0.0, help="seconds before an answer begins, as a long prompt takes")
    p.add_argument("--delay", type=float, default=0.0, help="seconds before each token")
    p.add_argument("--context", type=int, default=131_072)
    p.add_argument("--home", type=Path, help="where the note for `quire ps` goes")
    p.add_argument("--api-key")
    a = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    config = ServerConfig(port=a.port, drain_seconds=1, api_key=a.api_key, max_body=32 << 20)
    script = msgspec.json.decode(a.script.read_bytes(), type=Script)
    sock = lifecycle.bind(config.host, config.port)
    if a.record:
        create = lifecycle.create_app
        lifecycle.create_app = lambda config, source: Recorder(create(config, source), a.record)  # type: ignore[assignment]
    store = Store()
    template = None if a.chat_template == "own" else Path(a.chat_template)

    async def opener(server: Server, model: Model) -> Any:
        made = scripted(script, store.resolve(a.model), name=a.name, template=template, context=a.context)
        made[0].wait, made[0].delay = a.wait, a.delay
        _ = made[1].answer_format  # found now, as loading does
        return made

    def ready(model: Model) -> None:
        print("ready", flush=True)

    async def run() -> int:
        server = Server(config, [Model(a.name)])
        server.store = store
        return await lifecycle.serve(config, sock, server, opener, on_ready=ready)

    with lifecycle.run_file(a.home or store.home, sock, a.name):
        print(lifecycle.url_of(sock), flush=True)
        return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
