"""The response object of the Responses API before anything has happened: what it repeats of its request, and what it tells of it."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from starlette.types import Scope

from quire.server import ignored
from quire.server.openai.responses.fields import schema_of
from quire.server.openai.responses.request import Prepared
from quire.server.served import Served
from quire.server.shared import conversation
from quire.server.shared.fitting import HEADER


def head(served: Served, ready: Prepared, temperature: float, top_p: float) -> dict[str, Any]:
    """The response object before anything has happened, without its output. OpenAI's schema wants some fields as null and does not
    take null in others: those (`user`, `usage`) are there once they have a value."""
    asked = ready.asked
    text = asked.text.format if asked.text and asked.text.format else None
    shape: dict[str, Any] = {"type": text.type if text else "text"}
    if text is not None and text.type == "json_schema":
        shape |= {"name": text.name, "schema": schema_of(text), "strict": True}  # a schema is always enforced
        shape |= {} if text.description is None else {"description": text.description}
    effort = asked.reasoning.effort if asked.reasoning and "reasoning.effort" not in ready.no_effect else None
    summary = asked.summary
    if "reasoning.summary" in ready.no_effect:
        summary = "detailed" if summary == "concise" and conversation.reasons_apart(served) else None
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if asked.background else "in_progress",
        "background": bool(asked.background),
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": served.name,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "prompt_cache_retention": asked.prompt_cache_retention,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.stored,
        "temperature": temperature,
        "text": {"format": shape, "verbosity": "medium"},
        "tool_choice": "auto" if bytes(asked.tool_choice) in (b"", b"null") else msgspec.json.decode(asked.tool_choice),
        "tools": ready.tools.told,
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": top_p,
        "truncation": asked.truncation or "disabled",
        **({} if asked.user is None else {"user": asked.user}),
    }


def told(ready: Prepared, scope: Scope) -> dict[str, Any]:
    """What the request asked for and got nothing of, and what became of its conversation, for the answer; no word of it where there is
    nothing. A response is kept with its notes."""
    notes = [f"{name}: {why}; no effect" for name, why in ready.no_effect.items()] + ignored.take(scope)
    notes += ready.said.notes
    made = ready.said.told() | ({"notes": notes} if notes else {})
    return {"quire": made} if made else {}


def headers(ready: Prepared) -> dict[str, str] | None:
    """The headers of the answer that tell of its prompt."""
    return None if ready.said.dropped is None else {HEADER: ready.said.dropped.header}
