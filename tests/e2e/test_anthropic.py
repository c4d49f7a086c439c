"""The official `anthropic` client drives /v1/messages on the default model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server, wait_until
from tests.unit.server.anthropic.claude_code import BETAS, BODY, COUNTED, HEADERS

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client (the test extra has it)")

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a dog and a cat."}]
# Newer clients have no parameters for sampling; the fields are sent all the same.
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}


def client_of(server: Server, key: str = "unused") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture
def claude(server: Server) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


def create(client: Any, **more: Any) -> Any:
    return client.messages.create(**({"model": DEFAULT_MODEL, "max_tokens": 24, "messages": ASK} | GREEDY | more))


def test_an_answer_is_the_one_that_openais_dialect_gives(claude: Any, server: Server):
    r = create(claude, system="You answer briefly.")
    assert (r.type, r.role, r.model) == ("message", "assistant", DEFAULT_MODEL)
    assert r.id.startswith("msg_")
    assert [b.type for b in r.content] == ["text"]
    assert r.stop_reason in ("end_turn", "max_tokens")
    assert r._request_id
    other = server.client().chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "system", "content": "You answer briefly."}, *ASK],
        temperature=0,
        max_tokens=24,
    )
    assert r.content[0].text == other.choices[0].message.content
    assert other.usage is not None
    assert r.usage.input_tokens + r.usage.cache_read_input_tokens == other.usage.prompt_tokens
    assert r.usage.output_tokens == other.usage.completion_tokens


def test_a_stream_says_the_same(claude: Any):
    whole = create(claude, messages=STORY)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24
    with claude.messages.stream(model=DEFAULT_MODEL, max_tokens=24, messages=STORY, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, None)
    assert final.usage.output_tokens == 24
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == total
    raw = [e.type for e in create(claude, messages=STORY, stream=True)]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(raw[2:-3]) == {"content_block_delta"}


def test_counting_is_what_a_message_costs(claude: Any):
    for fields in (
        {"messages": ASK},
        {"messages": STORY, "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]},
        {
            "messages": [
                *ASK,
                {"role": "assistant", "content": "Paris"},
                {"role": "user", "content": [{"type": "text", "text": "And of Spain?"}]},
            ]
        },
    ):
        counted = claude.messages.count_tokens(model=DEFAULT_MODEL, **fields).input_tokens
        usage = create(claude, max_tokens=1, **fields).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_cache_reads_are_told_and_taken_from_the_input(claude: Any):
    long = [{"role": "user", "content": "Count the clouds: " + "one cloud, " * 40}]
    counted = claude.messages.count_tokens(model=DEFAULT_MODEL, messages=long).input_tokens
    first, again = (create(claude, max_tokens=4, messages=long) for _ in range(2))
    assert again.usage.cache_read_input_tokens > 64
    assert again.usage.cache_read_input_tokens > first.usage.cache_read_input_tokens
    for usage in (first.usage, again.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert first.content[0].text == again.content[0].text


def test_claude_codes_own_line_does_not_defeat_the_cache(claude: Any):
    system = "You know every hill: " + "a hill, " * 40

    def cached(n: int) -> int:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={n:05x};"}
        r = create(claude, max_tokens=1, system=[line, {"type": "text", "text": system}])
        return r.usage.cache_read_input_tokens

    cached(1)
    assert cached(2) > 64


def test_stop_sequences(claude: Any):
    text = create(claude, messages=STORY, max_tokens=40).content[0].text
    assert len(text) > 60
    stop = text[30:37]  # begins and ends where no token does
    cut = create(claude, messages=STORY, max_tokens=40, stop_sequences=["never said", stop])
    assert cut.content[0].text == text[: text.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    kwargs: Any = {"model": DEFAULT_MODEL, "max_tokens": 40, "messages": STORY, "stop_sequences": [stop]} | GREEDY
    with claude.messages.stream(**kwargs) as stream:
        seen = ""
        for piece in stream.text_stream:
            seen += piece
            assert text[: text.index(stop)].startswith(seen)  # not one character of it, ever
        final = stream.get_final_message()
    assert seen == text[: text.index(stop)]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert final.usage.output_tokens == cut.usage.output_tokens


def test_a_conversation_goes_on(claude: Any):
    """An answer is sent back as the client holds it."""
    first = create(claude)
    r = create(claude, messages=[*ASK, {"role": first.role, "content": first.content}, *STORY])
    assert r.content[0].text


def test_errors_are_the_clients_own(claude: Any):
    for expected, code, fields in (
        (anthropic.NotFoundError, "model_not_found", {"model": "nope"}),
        (anthropic.BadRequestError, "invalid_request", {"max_tokens": 0}),
        (
            anthropic.BadRequestError,
            "unknown_parameter",
            {"extra_body": {"seed": 7}, "extra_headers": {"X-Quire-Strict": "true"}},
        ),
        (anthropic.BadRequestError, "unsupported_parameter", {"extra_body": {"container": "x"}}),
        (
            anthropic.BadRequestError,
            "context_length_exceeded",
            {"messages": [{"role": "user", "content": "word " * 9000}]},
        ),
        (anthropic.APIStatusError, "request_too_large", {"system": "x" * (9 << 20)}),
    ):
        for stream in (False, True):
            with pytest.raises(expected) as caught:
                create(claude, stream=stream, **fields)
            assert caught.value.body["type"] == "error"
            assert caught.value.body["error"]["details"]["error_code"] == code
    assert "prompt is too long" in str(_refused(claude, messages=[{"role": "user", "content": "word " * 9000}]))
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.list()
    assert create(claude, max_tokens=1).content


def _refused(client: Any, **fields: Any) -> Exception:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, **fields)
    return caught.value


def test_the_context_ends_an_answer_that_may_be_longer(start: Callable[..., Server]):
    server = start("--context", "64")
    with client_of(server) as client:
        r = create(client, messages=STORY, max_tokens=100_000)
        assert r.stop_reason == "model_context_window_exceeded"
        assert r.usage.input_tokens + r.usage.cache_read_input_tokens + r.usage.output_tokens == 64


def test_claude_codes_request(start: Callable[..., Server], shared_data: Path):
    """The model has no tools of its own; with a template that has, it is asked as Claude Code asks, by its own client."""
    template = shared_data / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"
    server = start("--chat-template", str(template), "--context", "4096")
    extra = {"temperature": 0, "stream": True}
    body = {k: v for k, v in BODY.items() if k not in extra} | {"model": DEFAULT_MODEL, "max_tokens": 12}
    more: dict[str, Any] = {"betas": BETAS, "extra_headers": HEADERS}
    with client_of(server) as client:
        counted = client.beta.messages.count_tokens(**COUNTED | {"model": DEFAULT_MODEL}, **more)
        cached: list[int] = []
        for _ in range(2):  # computed, then from the cache
            found = list(client.beta.messages.create(**body, extra_body=extra, stream=True, **more))
            assert found[0].type == "message_start" and found[-1].type == "message_stop"
            start_usage, delta = found[0].message.usage, found[-2]
            assert (start_usage.cache_read_input_tokens, start_usage.cache_creation_input_tokens) == (0, 0)
            assert delta.context_management.applied_edits == []
            assert delta.usage.input_tokens + delta.usage.cache_read_input_tokens == counted.input_tokens
            notes = found[0].message.quire["notes"]
            assert [note.split(" ")[0] for note in notes] == ["system:", "output_config.effort", "thinking:"]
            cached.append(delta.usage.cache_read_input_tokens)
        assert cached[1] > 100
        results = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}}
        results["keep"] = {"type": "tool_uses", "value": 1}
        long = "a line of the file\n" * 40
        messages = [turn if i != 2 else _read(long) for i, turn in enumerate(BODY["messages"])]
        fields = body | {"messages": messages, "context_management": {"edits": [results]}}
        whole = client.beta.messages.create(**fields, extra_body={"temperature": 0}, **more)
        (edit,) = whole.context_management.applied_edits
        assert edit.cleared_tool_uses == 1 and edit.cleared_input_tokens > 100


def _read(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_01A", "content": text}]}


def test_the_key_comes_in_anthropics_header(start: Callable[..., Server]):
    server = start(env={"QUIRE_API_KEY": "s3cret"})
    with client_of(server, "s3cret") as good, client_of(server, "wrong") as bad:
        assert create(good, max_tokens=1).content
        for call in (
            lambda: create(bad),
            lambda: create(bad, stream=True),
            lambda: bad.messages.count_tokens(model=DEFAULT_MODEL, messages=ASK),
        ):
            with pytest.raises(anthropic.AuthenticationError, match="needs an API key"):
                call()


def test_a_client_that_leaves_stops_its_request(claude: Any, server: Server):
    before = server.metric("quire_client_disconnects_total")
    stream = create(claude, messages=STORY, max_tokens=4000, stream=True)
    for event in stream:
        if event.type == "content_block_delta":
            break
    began = time.monotonic()
    stream.close()
    wait_until(lambda: server.metric("quire_client_disconnects_total") == before + 1, 10)
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 10)
    assert time.monotonic() - began < 10
