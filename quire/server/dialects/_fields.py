"""What becomes of every request field that OpenAI or vLLM know and Quire does not act on. One table.

honoured   a field of the route's struct; not listed here
IGNORED    cannot change the tokens: accepted with any value
NEUTRAL    would change the answer: accepted only with a value that asks for nothing, else 400 naming the field
(others)   unknown: 400 "Unrecognized request argument supplied", as OpenAI does
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import TypeVar

import msgspec

from quire.observe.errors import BadRequest
from quire.server import limits

T = TypeVar("T", bound=msgspec.Struct)

IGNORED = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "prompt_cache_key",  # prefixes are shared without being told
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",  # a hint for speed
        "parallel_tool_calls",  # tools themselves are refused
        "include_reasoning",
        "session_id",
    }
)

NEUTRAL: dict[str, tuple[object, ...]] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "moderation": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "chat_template": (None,),  # a template from a client is a program
    "guided_decoding_backend": (None,),
    "logits_processors": (None, []),
    "return_tokens_as_token_ids": (None, False),
    "kv_transfer_params": (None,),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "prompt_embeds": (None,),
    "thinking_token_budget": (None,),
    "vllm_xargs": (None, {}),
    "logprob_token_ids": (None,),
    "extra_body": (None, {}),
}


INSTEAD = {"functions": "send tools", "function_call": "send tool_choice"}  # what such a field became


def parse(
    body: bytes | msgspec.Raw,
    shape: type[T],
    ignored: Collection[str] = IGNORED,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
) -> T:
    """The request as `shape`, every field of it accounted for."""
    honoured = _honoured(shape)
    given = limits.top_level(body)
    for name, raw in given.items():
        if name in honoured or name in ignored:
            continue
        if name not in neutral:
            raise limits.unknown_field(name, sorted(honoured))
        check(name, limits.parse(raw, object), neutral[name])
    return limits.parse(body, shape)


def check(name: str, value: object, neutral: tuple[object, ...]) -> None:
    """Refuse a value that asks for something."""
    if any(type(value) is type(n) and value == n for n in neutral):
        return
    asks_nothing = " or ".join(msgspec.json.encode(n).decode() for n in neutral)
    raise BadRequest(
        f"{name} is not supported: the only accepted value is {asks_nothing}",
        cure=INSTEAD.get(name, ""),
        param=name,
        code="unsupported_parameter",
    )


@cache
def _honoured(shape: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(f.encode_name for f in msgspec.structs.fields(shape))
