"""POST /tokenize and /detokenize, in vLLM's shapes: text or messages to token ids, and back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.observe.errors import BadRequest
from quire.server.dialects import _turns
from quire.server.dialects._fields import parse
from quire.server.dialects._messages import ChatMessage, turns
from quire.server.dialects._openai import encode_text
from quire.server.dialects._tools import NOTHING, Raw, openai_choice, openai_tools
from quire.server.dialects.openai_chat import template_kwargs
from quire.server.limits import read_json
from quire.server.service import Service

MAX_TOKENS = 1 << 20  # token ids in one detokenize request


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Raw] | None = None
    tool_choice: Raw = NOTHING
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


def register(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def tokenize(request: Request) -> Response:
        asked = parse(await read_json(request), TokenizeRequest)
        service.check_model(asked.model)
        completer = service.ready()
        if (asked.prompt is None) == (asked.messages is None):
            raise BadRequest("send either prompt or messages", param="prompt")
        if asked.messages is not None:
            if asked.add_special_tokens:
                raise BadRequest(
                    "add_special_tokens is for prompt: the template writes them", param="add_special_tokens"
                )
            talk = _turns.Talk(
                turns(service, asked.messages),
                openai_choice(openai_tools(asked.tools), asked.tool_choice, None),
                template_kwargs(asked.chat_template_kwargs),
                asked.add_generation_prompt is not False,
                bool(asked.continue_final_message),
            )
            tokens = await _turns.encode(service, talk)
        else:
            tokens = await encode_text(service, asked.prompt or "", "prompt", asked.add_special_tokens)
        body: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": completer.info.context,
            "tokens": tokens,
            "token_strs": [completer.tokenizer.token_text(t) for t in tokens] if asked.return_token_strs else None,
        }
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def detokenize(request: Request) -> Response:
        asked = parse(await read_json(request), DetokenizeRequest)
        service.check_model(asked.model)
        completer = service.ready()
        vocab = completer.tokenizer.vocab_size
        if len(asked.tokens) > MAX_TOKENS:
            raise BadRequest(f"{len(asked.tokens)} tokens: at most {MAX_TOKENS}", param="tokens")
        for token in asked.tokens:
            if not 0 <= token < vocab:
                raise BadRequest(f"tokens holds {token}: the vocabulary has {vocab}", param="tokens")
        text = await asyncio.to_thread(completer.tokenizer.decode, asked.tokens, skip_special=False)
        return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")

    app.add_api_route("/tokenize", tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/detokenize", detokenize, methods=["POST"], response_model=None)
