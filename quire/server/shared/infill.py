"""Fill-in-the-middle prompts (a prefix and a suffix), which three dialects ask for under different names. A model that was not trained for it
refuses them."""

from __future__ import annotations

import asyncio

from quire.chat import infill
from quire.observe.errors import BadRequest
from quire.server.served import Served
from quire.server.shared.conversation import check_text


async def gap(
    served: Served, before: str | list[int], after: str, params: tuple[str, str] = ("prompt", "suffix")
) -> tuple[list[int], tuple[int, ...]]:
    """The prompt, and the tokens that end what fills the gap. `params` are the fields' names."""
    tokenizer = served.completer.tokenizer
    tokens = tokenizer.infill
    if tokens is None:
        raise BadRequest(
            f"{served.model.name} has no infill tokens: it continues a text, and cannot write towards a suffix",
            cure="ask for a completion without one, or serve a model that was taught to fill in (qwen2.5-coder:1.5b is one)",
            param=params[1],
            code="unsupported_parameter",
        )
    for text, name in zip((before, after), params, strict=True):
        if isinstance(text, str):
            check_text(served, text, name)
    return await asyncio.to_thread(infill.write, tokenizer, tokens, before, after), tokens.ends
