"""Request fields that OpenAI, vLLM or llama.cpp know and Quire does not act on: one table of what becomes of each.

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
from quire.server import bodies

T = TypeVar("T", bound=msgspec.Struct)

SLOTS = ("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse")  # of llama.cpp's slots, which are not here
IGNORED = frozenset(
    {
        *SLOTS,
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

# llama.cpp's further samplers and reports, which its clients send on every route, mostly to say nothing.
LLAMA_CPP: dict[str, tuple[object, ...]] = {
    "repeat_last_n": (None, -1),
    "dynatemp_range": (None, 0, 0.0),
    "dynatemp_exponent": (None, 1, 1.0),
    "mirostat": (None, 0),
    "mirostat_tau": (None, 5, 5.0),
    "mirostat_eta": (None, 0.1),
    "dry_multiplier": (None, 0, 0.0),
    "dry_base": (None, 1.75),
    "dry_allowed_length": (None, 2),
    "dry_penalty_last_n": (None, -1, 0),
    "dry_sequence_breakers": (None,),
    "xtc_probability": (None, 0, 0.0),
    "xtc_threshold": (None, 0.1),
    "top_n_sigma": (None, -1, -1.0),
    "samplers": (None,),
    "n_indent": (None, 0),
    "t_max_predict_ms": (None, 0, -1),
    "t_max_prompt_ms": (None, 0, -1),
    "post_sampling_probs": (None, False),
    "return_progress": (None, False),
    "response_fields": (None, []),
}
NEUTRAL: dict[str, tuple[object, ...]] = {
    **LLAMA_CPP,
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
    given = bodies.top_level(body)
    for name, raw in given.items():
        if name in honoured or name in ignored:
            continue
        if name not in neutral:
            raise bodies.unknown_field(name, sorted(honoured))
        check(name, bodies.parse(raw, object), neutral[name])
    return bodies.parse(body, shape)


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
