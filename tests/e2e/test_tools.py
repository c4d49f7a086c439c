"""Tools with the official clients, on a tiny model whose template has them: where it must call, its arguments validate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import ollama
import openai
import pytest

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server, launch

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA},
}
TIME: Any = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module", params=["a template with tools", "the general prompt"])
def forced(model_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """The default model, with a template that has tools and with its own, which has none: it calls where it must."""
    given: list[str] = []
    if request.param == "a template with tools":
        folder: Path = request.getfixturevalue("shared_data")
        given = ["--chat-template", str(folder / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja")]
    started = launch(*given, "--context", "2048")
    yield started
    assert started.stop() == 0, "\n".join(started.lines)


def create(server: Server, **fields: Any) -> Any:
    fields = {"model": DEFAULT_MODEL, "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 80, "seed": 1, **fields}
    return server.client().chat.completions.create(**fields)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


def check(name: str, arguments: Any) -> None:
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in (WEATHER, TIME)}
    jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_call_that_must_be_made_is_made_and_validates(forced: Server, temperature: float):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        r = create(forced, tool_choice=choice, temperature=temperature, parallel_tool_calls=False)
        (item,) = r.choices
        assert item.finish_reason == "tool_calls", r
        assert item.message.content is None
        ((name, arguments),) = calls_of(item.message)
        check(name, arguments)
        if choice != "required":
            assert name == "get_weather"


def test_streamed_is_whole_hit_is_miss_and_stop_strings_stay_out(forced: Server):
    """The same request four times: cold, from the cache, streamed, and with a stop string that only calls contain."""
    fields: dict[str, Any] = {
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0.9,
        "extra_body": {"cache_salt": "tools"},
    }
    cold, warm = create(forced, **fields), create(forced, **fields)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0 < warm.usage.prompt_tokens_details.cached_tokens
    expected = calls_of(cold.choices[0].message)
    assert expected == calls_of(warm.choices[0].message)
    stopped = create(forced, **fields, stop=["city", "</tool_call>"])
    assert calls_of(stopped.choices[0].message) == expected
    assert stopped.choices[0].finish_reason == cold.choices[0].finish_reason
    parts: dict[int, dict[str, str]] = {}
    finish = None
    for chunk in create(forced, **fields, stream=True):
        (item,) = chunk.choices
        finish = item.finish_reason or finish
        for part in item.delta.tool_calls or []:
            if part.id is not None:
                assert part.index not in parts and part.type == "function"
                parts[part.index] = {"name": part.function.name, "arguments": ""}
            parts[part.index]["arguments"] += part.function.arguments
    assert finish == cold.choices[0].finish_reason
    assert [(p["name"], json.loads(p["arguments"])) for _, p in sorted(parts.items())] == expected


def test_several_choices_logprobs_and_a_length(forced: Server):
    r = create(forced, tool_choice="required", n=3, logprobs=True, temperature=1.2)
    for item in r.choices:
        assert item.finish_reason in ("tool_calls", "length")
        if item.finish_reason == "tool_calls":
            for name, arguments in calls_of(item.message):
                check(name, arguments)
    total = sum(len(item.logprobs.content) for item in r.choices)
    assert total == r.usage.completion_tokens
    cut = create(forced, tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=12)
    assert cut.choices[0].finish_reason == "length"


def test_the_clients_own_stream_and_parser(forced: Server):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with forced.client().chat.completions.stream(
        model=DEFAULT_MODEL,
        messages=ASK,
        tools=[strict],
        tool_choice="required",
        temperature=0,
        max_tokens=80,
        parallel_tool_calls=False,
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == json.loads(call.function.arguments)
    check("get_weather", call.function.parsed_arguments)


def test_a_form_and_no_tools(forced: Server):
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    r = create(forced, tools=openai.NOT_GIVEN, response_format=form)
    jsonschema.validate(json.loads(r.choices[0].message.content), SCHEMA)
    none = create(forced, tool_choice="none", max_tokens=8)
    assert none.choices[0].message.tool_calls is None and none.choices[0].message.content


def test_a_form_a_stop_string_and_the_cache_together(forced: Server):
    """What the schema allows, cut where the stop string begins, and the same from the cache as without it."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    fields: dict[str, Any] = {"tools": openai.NOT_GIVEN, "response_format": form, "temperature": 0.9}
    cold = create(forced, **fields, stop=['"unit"'], extra_body={"cache_salt": "form"})
    warm = create(forced, **fields, stop=['"unit"'], extra_body={"cache_salt": "form"})
    whole = create(forced, **fields, extra_body={"cache_salt": "form"}).choices[0].message.content
    assert cold.usage.prompt_tokens_details.cached_tokens == 0 < warm.usage.prompt_tokens_details.cached_tokens
    for r in (cold, warm):
        assert (r.choices[0].finish_reason, r.choices[0].stop_reason) == ("stop", '"unit"')
        assert r.choices[0].message.content == whole.partition('"unit"')[0]
        assert r.usage.completion_tokens == cold.usage.completion_tokens
    jsonschema.validate(json.loads(whole), SCHEMA)


def test_continuing_the_last_message(forced: Server):
    said = [*ASK, {"role": "assistant", "content": "The weather in Paris is"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    r = create(forced, messages=said, tools=openai.NOT_GIVEN, temperature=0, max_tokens=8, extra_body=more)
    template = forced.client().post("/../tokenize", cast_to=object, body={"messages": said, **more})
    text = forced.client().post("/../detokenize", cast_to=object, body={"tokens": template["tokens"]})["prompt"]
    assert text.endswith("assistant\nThe weather in Paris is")
    plain = forced.client().completions.create(model=DEFAULT_MODEL, prompt=text, temperature=0, max_tokens=8)
    assert r.choices[0].message.content == plain.choices[0].text


def test_anthropics_client_calls(forced: Server):
    with anthropic.Anthropic(base_url=forced.url, api_key="unused", max_retries=0, timeout=120) as claude:
        tool = {"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}
        fields: Any = {
            "model": DEFAULT_MODEL,
            "max_tokens": 80,
            "messages": ASK,
            "tools": [tool],
            "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
            "extra_body": {"temperature": 0},
        }
        r = claude.messages.create(**fields)
        assert r.stop_reason == "tool_use"
        (block,) = [b for b in r.content if b.type == "tool_use"]
        check("get_weather", block.input)
        with claude.messages.stream(**fields) as stream:
            final = stream.get_final_message()
        assert [(b.type, getattr(b, "input", None)) for b in final.content] == [
            (b.type, getattr(b, "input", None)) for b in r.content
        ]
        counted = claude.messages.count_tokens(model=DEFAULT_MODEL, messages=ASK, tools=[tool]).input_tokens
        bare = claude.messages.count_tokens(model=DEFAULT_MODEL, messages=ASK).input_tokens
        usage = r.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens > bare + 50
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "18 degrees"}
        loop = [*ASK, {"role": "assistant", "content": r.content}, {"role": "user", "content": [result]}]
        answered = claude.messages.create(
            **fields | {"messages": loop, "tool_choice": {"type": "auto"}, "max_tokens": 8}
        )
        assert answered.content and answered.usage.input_tokens + answered.usage.cache_read_input_tokens > counted


def test_the_responses_api_calls(forced: Server):
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    fields: Any = {"model": DEFAULT_MODEL, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    client = forced.client()
    made = client.responses.create(input="Weather in Paris?", temperature=0, max_output_tokens=80, **fields)
    (call,) = [item for item in made.output if item.type == "function_call"]
    check(call.name, json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    follow = client.responses.create(
        input=[output], previous_response_id=made.id, max_output_tokens=16, **fields | {"tool_choice": "auto"}
    )
    assert follow.output and follow.usage.input_tokens > made.usage.input_tokens


def test_errors_reach_the_clients(forced: Server, server: Server):
    with pytest.raises(openai.BadRequestError) as caught:
        create(forced, tools=[WEATHER, WEATHER])
    assert caught.value.param == "tools[1].function.name"
    unenforceable = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"x": {"not": {}}}}},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        create(forced, tools=[unenforceable], tool_choice="required")
    assert "tools" in (caught.value.param or ""), caught.value
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, tools=openai.NOT_GIVEN, reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"


def test_a_tool_loop(forced: Server):
    """A call, its result, an answer; and the same conversation is the same prompt in Ollama's dialect."""
    first = create(forced, tool_choice="required", temperature=0, parallel_tool_calls=False).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and rain"}
    talk = [*ASK, first, result]
    second = create(forced, messages=talk, tool_choice="auto", temperature=0, max_tokens=8)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls
    client = ollama.Client(host=forced.url, timeout=120)
    options = {"temperature": 0, "num_predict": 8}
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    same: list[Any] = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "tool_name": call.function.name, "content": "18 degrees and rain"},
    ]
    # As it is: the client sends a tool without those parts of its schema that it does not know.
    body = {"model": DEFAULT_MODEL, "messages": same, "tools": [WEATHER, TIME], "options": options, "stream": False}
    exact = httpx.post(f"{forced.url}/api/chat", json=body, timeout=120).json()
    assert exact["prompt_eval_count"] == second.usage.prompt_tokens
    assert exact["message"]["content"] == (second.choices[0].message.content or "")
    whole = client.chat(DEFAULT_MODEL, messages=same, tools=[WEATHER, TIME], options=options)
    parts = list(client.chat(DEFAULT_MODEL, messages=same, tools=[WEATHER, TIME], options=options, stream=True))
    assert "".join(p.message.content or "" for p in parts) == (whole.message.content or "")
    with pytest.raises(ollama.ResponseError, match="think"):
        client.chat(DEFAULT_MODEL, messages=ASK, think=True)
