"""POST /tokenize and /detokenize in the shapes of vLLM, llama.cpp and TGI, vLLM's /tokenizer_info and llama.cpp's /apply-template.

The three share a path and differ in the field that has the text: `prompt` or `messages` (vLLM), `content` (llama.cpp), `inputs` (TGI). Each gets
its own answer. /detokenize answers with both names of the text.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.observe.errors import BadRequest
from quire.server.replies import reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared import conversation
from quire.server.shared.bodies import parse, read_json
from quire.server.shared.compat import Absent, Endpoint, Fields
from quire.server.shared.conversation import check_text, encode_text, template_kwargs
from quire.server.shared.messages import ChatMessage, turns
from quire.server.shared.tools import Raw, choose, openai_tools

MAX_TOKENS = 1 << 20  # token ids in one detokenize request
# Which fields belong to which text.
FORMS: dict[str, frozenset[str]] = {
    "prompt": frozenset({"add_special_tokens", "return_token_strs"}),
    "messages": frozenset(
        {
            *("add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
            *("tools", "return_token_strs"),
        }
    ),
    "content": frozenset({"add_special", "parse_special", "with_pieces"}),
    "inputs": frozenset({"add_special_tokens"}),
}


# Refused unless they ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "chat_template": (None,),  # a template from a client is a program
    "mm_processor_kwargs": (None, {}),
}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """One of `prompt`, `messages`, `content` and `inputs`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Raw] | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    inputs: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class ApplyRequest(msgspec.Struct, kw_only=True):
    """A conversation, to be written as the model's template writes it."""

    messages: list[ChatMessage]
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Raw] | None = None


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""

    async def tokenize(request: Request) -> Response:
        asked = parse(await read_json(request), TokenizeRequest, (), NEUTRAL)
        form = _form(asked)
        served = await server.resolve(request, asked.model, first=form in ("content", "inputs"))
        if form == "content":
            return reply({"tokens": await _llama_cpp(served, asked)})
        if form == "inputs":
            tokens = await encode_text(served, asked.inputs or "", "inputs", asked.add_special_tokens)
            return reply(_tgi(served, asked.inputs or "", tokens))
        if form == "messages":
            if asked.add_special_tokens:
                raise BadRequest(
                    "add_special_tokens is for prompt: the template writes them", param="add_special_tokens"
                )
            tokens = await conversation.encode(served, _conversation(served, asked))
        else:
            tokens = await encode_text(served, asked.prompt or "", "prompt", asked.add_special_tokens)
        completer = served.completer
        strings = [completer.tokenizer.token_text(t) for t in tokens] if asked.return_token_strs else None
        return reply(
            {
                "count": len(tokens),
                "max_model_len": completer.info.context,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def detokenize(request: Request) -> Response:
        asked = parse(await read_json(request), DetokenizeRequest, (), {})
        served = await server.resolve(request, asked.model, first=True)
        completer = served.completer
        vocab = completer.tokenizer.vocab_size
        if len(asked.tokens) > MAX_TOKENS:
            raise BadRequest(f"{len(asked.tokens)} tokens: at most {MAX_TOKENS}", param="tokens")
        for token in asked.tokens:
            if not 0 <= token < vocab:
                raise BadRequest(f"tokens holds {token}: the vocabulary has {vocab}", param="tokens")
        text = await asyncio.to_thread(completer.tokenizer.decode, asked.tokens, skip_special=False)
        return reply({"prompt": text, "content": text})

    async def apply_template(request: Request) -> Response:
        asked = parse(await read_json(request), ApplyRequest, (), NEUTRAL)
        served = await server.resolve(request, asked.model, first=True)
        ids = await conversation.encode(served, _conversation(served, asked))
        tokenizer = served.tokenizer
        if tokenizer.add_bos and ids[:1] == [tokenizer.bos_id]:
            ids = ids[1:]  # whoever sends the text gets it again
        return reply({"prompt": await asyncio.to_thread(tokenizer.decode, ids, skip_special=False)})

    async def tokenizer_info(request: Request) -> Response:
        served = await server.resolve(request, request.query_params.get("model"), first=True)
        completer = served.completer
        tokenizer = completer.tokenizer
        bos, eos = (None if t is None else tokenizer.token_text(t) for t in (tokenizer.bos_id, tokenizer.eos_id))
        return reply(
            {
                "tokenizer_class": "quire",
                "bos_token": bos,
                "eos_token": eos,
                "add_bos_token": tokenizer.add_bos,
                "add_eos_token": tokenizer.add_eos,
                "model_max_length": completer.info.context,
                "chat_template": getattr(completer.template, "source", None),
            }
        )

    app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"], response_model=None)
    for base in ("", "/v1"):
        app.add_api_route(f"{base}/tokenize", tokenize, methods=["POST"], response_model=None)
        app.add_api_route(f"{base}/detokenize", detokenize, methods=["POST"], response_model=None)
    app.add_api_route("/apply-template", apply_template, methods=["POST"], response_model=None)


def _conversation(served: Served, asked: TokenizeRequest | ApplyRequest) -> conversation.Conversation:
    """The conversation that a request has."""
    return conversation.Conversation(
        turns(served, asked.messages or []),
        choose(openai_tools(asked.tools, served.reading), None),
        template_kwargs(asked.chat_template_kwargs),
        asked.add_generation_prompt is not False,
        bool(asked.continue_final_message),
    )


def _form(asked: TokenizeRequest) -> str:
    """The field that has the text; the others that came must go with it."""
    given = [name for name in FORMS if getattr(asked, name) is not None]
    if len(given) != 1:
        raise BadRequest("send one of prompt, messages, content and inputs", param="prompt")
    form = given[0]
    for name in sorted(frozenset().union(*FORMS.values()) - FORMS[form]):
        if getattr(asked, name) is not None:
            raise BadRequest(f"{name} does not go with {form}", param=name)
    return form


async def _llama_cpp(served: Served, asked: TokenizeRequest) -> list[Any]:
    text = asked.content or ""
    check_text(served, text, "content")
    tokenizer = served.tokenizer
    special, parse_special = bool(asked.add_special), asked.parse_special is not False
    ids = await asyncio.to_thread(tokenizer.encode, text, add_special=special, parse_special=parse_special)
    return ids if not asked.with_pieces else [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in ids]


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _tgi(served: Served, text: str, ids: list[int]) -> list[dict[str, Any]]:
    """Tokens with the characters of the text that they stand for; one that stands for none has an empty range."""
    tokenizer = served.tokenizer
    data, at, begun = text.encode(), 0, 0  # bytes, and characters that have begun in them
    found: list[dict[str, Any]] = []
    for token in ids:
        piece = tokenizer.token_bytes(token)
        if not data.startswith(piece, at):  # a begin token, or a space that the vocabulary puts before a text
            piece = piece[1:] if piece[:1] == b" " and data.startswith(piece[1:], at) else b""
        inside = bool(piece) and piece[0] & 0xC0 == 0x80
        start, at = begun - inside, at + len(piece)
        begun += sum(b & 0xC0 != 0x80 for b in piece)
        found.append({"id": token, "text": tokenizer.token_text(token), "start": start, "stop": begun})
    return found


_NOTES = {
    "model": "the served model, or left out",
    "prompt": "vLLM's form",
    "messages": "vLLM's form: the conversation as the template writes it",
    "content": "llama.cpp's form",
    "inputs": "TGI's form",
    "tools": "with `messages`",
    "continue_final_message": "with `messages`",
    "add_special_tokens": "with `prompt` and `inputs`; true by default",
    "add_special": "with `content`; false by default",
    "parse_special": "with `content`; true by default",
}
_USER = [{"role": "user", "content": "hi"}]
COMPAT = (
    Endpoint(
        dialect="OpenAI, with vLLM's fields",
        method="POST",
        path="/tokenize",
        what="Also `/v1/tokenize`. One of `prompt`, `messages`, `content` and `inputs`; each is answered in the shape of the API it comes from.",
        fields=(Fields(shape=TokenizeRequest, neutral=NEUTRAL, notes=_NOTES),),
        example={"prompt": "hi"},
        surface="prompt messages tools add_special_tokens add_generation_prompt return_token_strs content add_special with_pieces inputs",
    ),
    Endpoint(
        dialect="OpenAI, with vLLM's fields",
        method="POST",
        path="/detokenize",
        what="Also `/v1/detokenize`. The text comes as `prompt` (vLLM's) and as `content` (llama.cpp's).",
        fields=(Fields(shape=DetokenizeRequest),),
        example={"tokens": [97]},
        surface="tokens",
    ),
    Endpoint(
        dialect="OpenAI, with vLLM's fields",
        method="GET",
        path="/tokenizer_info",
        what="The begin and end tokens and the chat template, for harnesses that tokenize here; of `?model=NAME`, or of the first.",
    ),
    Endpoint(
        dialect="llama.cpp",
        method="POST",
        path="/apply-template",
        what="The text of a conversation, without the begin token that a prompt gets.",
        fields=(Fields(shape=ApplyRequest, neutral=NEUTRAL),),
        example={"messages": _USER},
        surface="messages",
    ),
)
ABSENT = (
    *(
        Absent("OpenAI, with vLLM's fields", path, "not built")
        for path in (
            "/pooling",
            "/classify",
            "/v1/chat/completions/render",
            "/inference/v1/generate",
            "/invocations",
            "/sleep",
            "/wake_up",
            "/reset_prefix_cache",
        )
    ),
    Absent("SGLang", "/generate", "the path is TGI's here: a body without `inputs` is refused"),
    Absent("SGLang", "/encode", "`/v1/embeddings` does it"),
    Absent("SGLang", "/get_model_info", "`/v1/models` and `/props` tell it"),
    Absent("SGLang", "/flush_cache", "not built"),
)
