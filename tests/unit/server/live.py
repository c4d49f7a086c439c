"""A whole server process over the scripted engine, as a program: for signals, sockets and exit codes.

python -m tests.unit.server.live HOME PORT DRAIN_SECONDS DELAY LOAD_SECONDS
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from quire.config import ServerConfig
from quire.server import lifecycle
from quire.server.served import Model
from quire.server.server import Server
from tests.unit.server.fakes import MODEL, FakeCompleter


def main() -> int:
    home, port, drain, delay, load = Path(sys.argv[1]), *map(float, sys.argv[2:6])
    config = ServerConfig(port=int(port), drain_seconds=drain, max_body=100_000)
    logging.basicConfig(level=logging.INFO)
    sock = lifecycle.bind(config.host, config.port)
    completer = FakeCompleter(answer="x" * 100)
    completer.delay = delay

    async def opener(server: Server, model: Model) -> Any:
        model.note = "pretending"
        await asyncio.sleep(load)
        return completer.client, completer

    async def run() -> int:
        service = Server(config, [Model(MODEL)])
        code = await lifecycle.serve(config, sock, service, opener, on_ready=lambda model: print("ready", flush=True))
        print(f"aborted={completer.aborted} running={completer.running} closed={completer.client.closed}", flush=True)
        return code

    with lifecycle.run_file(home, sock, MODEL):
        print(lifecycle.url_of(sock), flush=True)
        return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
