"""What the Responses API's endpoints take of their requests, for docs/compat.md."""

from __future__ import annotations

from quire.server.openai.responses.fields import (
    ELSEWHERE,
    IGNORED,
    NEUTRAL,
    CompactRequest,
    CountRequest,
    ResponseRequest,
)
from quire.server.shared.compat import SAMPLING, Endpoint, Fields

PATH = "/v1/responses"
_NOTES = SAMPLING | {
    "input": "a string or items: messages of text, calls of every kind and their results, reasoning, summaries, references; what OpenAI's side did is set aside, and the answer says so",
    "instructions": "of this request alone",
    "previous_response_id": "a stored response that is over",
    "text": "`format` is enforced: `text`, `json_object` or `json_schema`; `verbosity` has no effect, and the answer says so",
    "tools": "functions, custom tools with their grammars, namespaces, shells, `apply_patch`, `tool_search`; up to 1024 in all, described in the prompt where the template has no place for them; web search and image generation are left out, and the answer says so",
    "tool_choice": "`none`, `auto`, `required`, a tool or `allowed_tools`; a demanded call is enforced; what is left out cannot be demanded",
    "parallel_tool_calls": "false: at most one call, enforced",
    "reasoning": "`effort` as the template can be told it, `summary`; where the model has no place for them the answer says so",
    "context_management": "nothing is compacted by itself; over the threshold the answer says so",
    "truncation": "`auto` leaves out the oldest items of a conversation that does not fit, and tells; `disabled` refuses it",
    "chat_template_kwargs": "variables for the template; not those that the server itself sets",
    "include": "`message.output_text.logprobs`, `reasoning.encrypted_content`; others ask for parts of tools that are not here",
    "top_logprobs": "0 to 20; needs `include`",
    "max_output_tokens": "never more than the context leaves: more is refused",
    "max_tool_calls": "bounds searches for tools that are done here",
    "store": "true by default: see responses.md",
    "background": "needs `store`",
    "metadata": "kept and told back",
    "user": "told back",
    "safety_identifier": "told back",
    "prompt_cache_key": "told back",
    "prompt_cache_retention": "told back",
    "service_tier": "there is one: the answer says that another had no effect",
    "stream_options": "`include_obfuscation` only false",
}
_PROMPT = "model input instructions previous_response_id tools tool_choice parallel_tool_calls reasoning text truncation conversation"
COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path=PATH,
        what="Also `/responses`. With vLLM's sampling fields. See responses.md, also for `/v1/responses/{response}`, `/v1/responses/{response}/cancel` and "
        "`/v1/responses/{response}/input_items`.",
        fields=(Fields(shape=ResponseRequest, ignored=IGNORED, neutral=NEUTRAL, refused=ELSEWHERE, notes=_NOTES),),
        example={"input": "hi"},
        surface=f"{_PROMPT} background context_management include max_output_tokens max_tool_calls metadata prompt prompt_cache_key "
        "prompt_cache_options prompt_cache_retention safety_identifier service_tier store stream stream_options temperature "
        "top_logprobs top_p user moderation image access_programs client_metadata",
    ),
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path=f"{PATH}/input_tokens",
        what="Renders and counts the same prompt, and runs nothing.",
        fields=(Fields(shape=CountRequest, ignored=IGNORED, neutral=NEUTRAL, notes=_NOTES),),
        example={"input": "hi"},
        surface=f"{_PROMPT} personality",
    ),
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path=f"{PATH}/compact",
        what="The model writes a summary that goes in the place of a conversation. See responses.md.",
        fields=(Fields(shape=CompactRequest, ignored=IGNORED, neutral=NEUTRAL, notes=_NOTES),),
        example={"input": "hi"},
        surface="model input instructions previous_response_id prompt_cache_key prompt_cache_options prompt_cache_retention service_tier image",
    ),
)
