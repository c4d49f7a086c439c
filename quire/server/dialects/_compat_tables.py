"""The conformance tables of dialects whose structs are shared by several files, and the routes that are known and not here."""

from __future__ import annotations

from quire.server.dialects import _anthropic, _fields, _ollama, ollama_generate
from quire.server.dialects._anthropic import MessagesRequest, Prompt
from quire.server.dialects._compat import SAMPLING, Absent, Endpoint, Fields
from quire.server.dialects.openai_chat import ChatRequest

_USER = [{"role": "user", "content": "hi"}]

_CHAT = Endpoint(
    dialect="OpenAI",
    method="POST",
    path="/v1/chat/completions",
    what="OpenAI's fields, and vLLM's and llama.cpp's beside them.",
    fields=(
        Fields(
            shape=ChatRequest,
            ignored=_fields.IGNORED,
            neutral=_fields.NEUTRAL,
            refused={
                "echo": (True, "for `/v1/completions`"),
                "add_special_tokens": (True, "the template writes them; false and null are fine"),
            },
            notes=SAMPLING
            | {
                "max_completion_tokens": "the newer name of `max_tokens`; if both are sent they must agree",
                "logprobs": "",
                "top_logprobs": "0 to 20; needs `logprobs`",
                "add_generation_prompt": "true by default",
                "chat_template_kwargs": "words for the template; not the names that the server itself sets",
                "tools": "functions, up to 1024; of a model whose template has tools",
                "tool_choice": "`none`, `auto`, `required`, a function or `allowed_tools`; a demanded call is enforced",
                "parallel_tool_calls": "false: at most one call, enforced",
                "reasoning_effort": "what the template can be told: an effort, or on and off; else refused",
                "include_reasoning": "false leaves it out of the answer",
                "continue_final_message": "the answer goes on with the last message, the assistant's",
                "documents": "of a model whose template has a place for them",
                "timings_per_token": "llama.cpp's `timings`",
                "service_tier": "`auto` or `default`",
                "prediction": "checked and not used; the usage says so",
            },
        ),
    ),
    example={"messages": _USER},
    surface="timings_per_token functions function_call modalities audio web_search_options moderation "
    "messages model max_completion_tokens max_tokens n stream stream_options temperature top_p stop seed logprobs top_logprobs "
    "logit_bias frequency_penalty presence_penalty tools tool_choice parallel_tool_calls response_format reasoning_effort "
    "verbosity prediction service_tier user safety_identifier prompt_cache_key store metadata "
    "top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words echo "
    "add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs "
    "structured_outputs priority request_id session_id return_token_ids return_tokens_as_token_ids cache_salt "
    "kv_transfer_params thinking_token_budget include_reasoning use_beam_search",
)

_ANTHROPIC = (
    Endpoint(
        dialect="Anthropic",
        method="POST",
        path="/v1/messages",
        fields=(
            Fields(
                shape=MessagesRequest,
                ignored=_anthropic.IGNORED,
                neutral=_anthropic.NEUTRAL,
                notes={
                    "max_tokens": "a bound: the context may end the answer first, and `stop_reason` says so",
                    "temperature": "may go beyond Anthropic's 1",
                    "metadata": "`user_id`; without effect",
                    "system": "text or text blocks",
                    "messages": "text, tool_use, tool_result and thinking blocks; an assistant's last message is continued",
                    "tools": "the client's own; of a model whose template has tools",
                    "tool_choice": "`any` and `tool` are enforced",
                    "thinking": "`enabled` of a model that reasons; the budget is a target",
                    "output_config": "`format` is enforced; `effort` as the template can be told it",
                    "output_format": "the older place of `output_config.format`",
                },
            ),
        ),
        example={"model": "", "max_tokens": 4, "messages": _USER},
        surface="model max_tokens messages system stop_sequences temperature top_p top_k tools tool_choice thinking metadata stream",
    ),
    Endpoint(
        dialect="Anthropic",
        method="POST",
        path="/v1/messages/count_tokens",
        what="Renders and counts the same prompt, and runs nothing.",
        fields=(Fields(shape=Prompt, ignored=_anthropic.IGNORED, neutral=_anthropic.NEUTRAL),),
        example={"model": "", "messages": _USER},
        surface="model messages system tools tool_choice thinking",
    ),
)

_OPTIONS = Fields(
    shape=_ollama.Options,
    inside="options",
    ignored=dict.fromkeys(_ollama.IGNORED_OPTIONS, "the server's to decide; it cannot change the tokens"),
    neutral=_ollama.NEUTRAL_OPTIONS,
    notes={
        "num_ctx": "bounds prompt and answer together; more than is served is refused",
        "num_predict": "-1 and -2: as many as there is room for",
        "temperature": "0.8 by default",
        "top_k": "40 by default",
        "top_p": "0.9 by default",
        "repeat_penalty": "1 by default, over the whole text",
        "repeat_last_n": "beside a penalty only -1",
        "seed": "-1: any",
    },
)
_OLLAMA_NOTES = {
    "stream": "true by default",
    "format": "enforced: `json` or a JSON schema",
    "think": "true, false, or low, medium, high, max, as the template can be told",
    "keep_alive": "the model stays loaded; an answer to one who asks otherwise says so",
    "receipts": "Quire's: what happened to the request",
}
_OLLAMA = (
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/chat",
        fields=(
            Fields(
                shape=ollama_generate.ChatRequest,
                ignored=ollama_generate.IGNORED,
                notes=_OLLAMA_NOTES | {"tools": "of a model whose template has tools; the model chooses"},
            ),
            _OPTIONS,
        ),
        example={"model": "", "messages": _USER, "stream": False},
        surface="model messages format options keep_alive think tools stream truncate shift logprobs top_logprobs",
    ),
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/generate",
        fields=(
            Fields(
                shape=ollama_generate.GenerateRequest,
                ignored=ollama_generate.IGNORED,
                neutral=ollama_generate.NEUTRAL,
                notes=_OLLAMA_NOTES
                | {
                    "context": "put before the new turn as it is",
                    "suffix": "of a model with infill tokens; else 400",
                },
            ),
            _OPTIONS,
        ),
        example={"model": "", "prompt": "hi", "stream": False},
        surface="model prompt suffix images format options system template raw keep_alive think stream truncate shift logprobs context",
    ),
)

_MODELS = (
    Endpoint(dialect="OpenAI", method="GET", path="/v1/models", what="The served model, with vLLM's `max_model_len`."),
    Endpoint(dialect="OpenAI", method="GET", path="/v1/models/{model_id:path}"),
)

COMPAT = (_CHAT, *_MODELS, *_ANTHROPIC, *_OLLAMA)

_LATER = "not built"
ABSENT = (
    *(
        Absent("OpenAI", path, why)
        for path, why in (
            ("/v1/audio/…", "the models served take and make text"),
            ("/v1/images/…", "the models served take and make text"),
            ("/v1/realtime", "the models served take and make text"),
            ("/v1/moderations", "no model for it"),
        )
    ),
    *(
        Absent("OpenAI, with vLLM's fields", path, _LATER)
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
    *(
        Absent("SGLang", path, why)
        for path, why in (
            ("/generate", "the path is TGI's here: a body without `inputs` is refused"),
            ("/encode", "`/v1/embeddings` does it"),
            ("/get_model_info", "`/v1/models` and `/props` tell it"),
            ("/flush_cache", _LATER),
        )
    ),
    *(
        Absent("llama.cpp", path, why)
        for path, why in (
            ("/embedding", "`/v1/embeddings` does it"),
            ("/slots", "there are no slots: sequences share one pool"),
            ("/lora-adapters", _LATER),
            ("/models/load", "one server has one model"),
        )
    ),
    *(
        Absent("TGI", path, why)
        for path, why in (("/chat_tokenize", "`/tokenize` with `messages` does it"), ("/invocations", _LATER))
    ),
    *(
        Absent("KServe v2", path, why)
        for path, why in (
            ("/v2/models/{name}/config", _LATER),
            ("/v2/models/{name}/stats", "`/metrics` tells it"),
            ("/v2/repository/models/{name}/load", "one server has one model"),
            ("gRPC", _LATER),
        )
    ),
)
