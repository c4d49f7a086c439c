"""Opening a model for the server: its engine in a process of its own, its tokenizer and chat template in this one.

Both are made at the same time, from the same file. Dialects that must do something when a model is loaded are asked by their hooks. Knows the
engine's process client and the completer; knows no HTTP and no dialect.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.transport.client import EngineClient
from quire.server.served import Model
from quire.server.server import Server

if TYPE_CHECKING:
    from quire.chat.completer import Completer
    from quire.chat.templates.template import ChatTemplate
    from quire.chat.tokenizers.tokenizer import Tokenizer


async def open_model(
    server: Server, model: Model, config: EngineConfig, say: Callable[[str], None]
) -> tuple[EngineClient, Completer]:
    """Load `config.path`; `say` gets the lines that the engine has for people."""
    from quire.chat.completer import Completer
    from quire.chat.loading import tokenizer_and_template
    from quire.engine.transport.process_client import ProcessClient
    from quire.weights.checkpoint import open_checkpoint

    def progress(done: int, total: int) -> None:
        model.note = f"reading weights, {100 * done // max(1, total)}%"
        model.loading.note(done, total)

    def restarted(reason: str) -> None:
        model.restarted += 1
        model.loading.begin()

    def read_tokenizer() -> tuple[Tokenizer, ChatTemplate | None]:
        with open_checkpoint(config.path) as checkpoint:
            return tokenizer_and_template(checkpoint, server.config.chat_template)

    model.path = config.path
    for hook in server.hooks:
        config = await hook.before(model, config)
    client = ProcessClient(
        config,
        restarts=server.config.restarts,
        hang_seconds=server.config.hang_seconds,
        on_line=say,
        on_progress=progress,
        on_restart=restarted,
    )
    model.note = "starting the engine"
    model.loading.begin()
    reading = asyncio.create_task(asyncio.to_thread(read_tokenizer))
    try:
        info = await client.start()
        tokenizer, template = await reading
        for hook in server.hooks:
            await hook.after(model, client, say)
    except BaseException:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await client.close()
        raise
    completer = Completer(client, tokenizer, template, info)
    await asyncio.to_thread(lambda: completer.answer_format)  # found from the template now, not at the first request
    threading.Thread(target=_tell, args=(completer, say), name="quire-answers", daemon=True).start()
    return client, completer


def _tell(completer: Completer, say: Callable[[str], None]) -> None:
    """Say how answers are read, and what of them could not be: beside the way, nobody waits for it."""
    if completer.prompts_tools:
        say("tools: by the general prompt, because the chat template has no place for them (docs/tools.md)")
    try:
        score = completer.score()
    except Exception as error:  # a template's fault: requests that meet it are refused with the reason
        say(f"answers: the chat template could not be tried: {error}")
        return
    if score is not None:
        short = "" if score.whole else "; what is written otherwise comes as text (docs/tools.md)"
        say(f"answers: {score.format}, read back from the chat template: {score}{short}")
