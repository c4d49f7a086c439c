"""The official client against one real server: responses, their streams, structured output, background, and batches that
survive a kill -9."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server, launch, wait_until

pytestmark = pytest.mark.usefixtures("model_path")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def options(state: Path, shared_data: Path) -> list[str]:
    """A template that has tools: the model calls where it must."""
    template = shared_data / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"
    return ["--state-dir", str(state), "--batch-lines", "2", "--chat-template", str(template), "--context", "2048"]


@pytest.fixture(scope="module")
def running(model_path: Path, options: list[str]) -> Iterator[list[Server]]:
    """One server; the test that kills it puts the next one in its place."""
    servers = [launch(*options)]
    yield servers
    assert servers[-1].stop() == 0, "\n".join(servers[-1].lines)


@pytest.fixture
def client(running: list[Server]) -> openai.OpenAI:
    return running[-1].client()


def test_a_conversation(client):
    first = client.responses.create(model=DEFAULT_MODEL, input="Name a fruit.", temperature=0, max_output_tokens=12)
    assert first.status in ("completed", "incomplete") and first.output_text
    assert (
        first.usage is not None
        and first.usage.input_tokens == client.responses.input_tokens.count(input="Name a fruit.").input_tokens
    )
    again = client.responses.create(
        model=DEFAULT_MODEL, input="And another.", previous_response_id=first.id, temperature=0, max_output_tokens=12
    )
    items = client.responses.input_items.list(again.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    # The same conversation, told whole: the same tokens.
    said = [
        {"role": "user", "content": "Name a fruit."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And another."},
    ]
    whole = client.responses.create(model=DEFAULT_MODEL, input=said, temperature=0, max_output_tokens=12)
    assert whole.output_text == again.output_text
    chat = client.chat.completions.create(model=DEFAULT_MODEL, messages=said, temperature=0, max_tokens=12)
    assert chat.choices[0].message.content == again.output_text
    assert client.responses.retrieve(again.id) == again
    client.responses.delete(again.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)


def test_a_stream(client):
    asked: Any = {"model": DEFAULT_MODEL, "input": "Count.", "temperature": 0}
    asked["extra_body"] = {"guided_regex": "one, (two|three|four), [a-z]{5}, end"}  # so that it comes to an end
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(deltas) and len(deltas) > 1 and final.output_text.endswith("end")
    assert client.responses.create(**asked).output_text == final.output_text


def test_structured_output(client):
    class Fruit(BaseModel):
        name: str
        red: bool

    parsed = client.responses.parse(
        model=DEFAULT_MODEL, input="A fruit, as JSON.", text_format=Fruit, temperature=0, max_output_tokens=200
    )
    if parsed.status == "completed":
        assert isinstance(parsed.output_parsed, Fruit)
    else:  # a name without an end is cut, and told so
        assert parsed.incomplete_details is not None


def test_a_loop_with_a_tool(client):
    """A call that must be made, its result, and an answer; streamed, the same call."""
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": schema}
    asked: Any = {"model": DEFAULT_MODEL, "tools": [tool | {"strict": True}], "temperature": 0, "max_output_tokens": 60}
    forced: Any = {"input": "How is the weather?", "tool_choice": "required", "parallel_tool_calls": False, **asked}
    first = client.responses.create(**forced)
    (call,) = first.output
    assert call.type == "function_call" and call.name == "get_weather" and first.status == "completed"
    assert json.loads(call.arguments)["unit"] in ("celsius", "fahrenheit")
    events = list(client.responses.create(**forced, stream=True))
    deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert deltas == call.arguments and events[-1].type == "response.completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    answer = client.responses.create(input=[result], previous_response_id=first.id, tool_choice="none", **asked)
    assert answer.output_text
    # The client keeps the conversation itself: the same prompt, the same tokens.
    said: Any = [{"role": "user", "content": "How is the weather?"}, *first.output, result]
    again = client.responses.create(input=said, tool_choice="none", **asked)
    assert again.output_text == answer.output_text and again.usage.input_tokens == answer.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="call_id"):
        client.responses.create(input=[result | {"call_id": "call_none"}], **asked)


def test_background(client):
    asked = {
        "model": DEFAULT_MODEL,
        "input": "Tell a long story.",
        "background": True,
        "extra_body": {"ignore_eos": True},
    }
    short = client.responses.create(**asked, max_output_tokens=8)
    assert short.status == "queued"
    wait_until(lambda: client.responses.retrieve(short.id).status == "incomplete")
    events = list(client.responses.retrieve(short.id, stream=True, starting_after=2))
    assert events[0].sequence_number == 3 and events[-1].type == "response.incomplete"
    long = client.responses.create(**asked)
    wait_until(lambda: client.responses.retrieve(long.id).status == "in_progress")
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


def test_errors(client):
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=DEFAULT_MODEL, input="x", previous_response_id="resp_none")
    with pytest.raises(openai.NotFoundError):
        client.files.content("file-none")


def test_a_batch_survives_a_kill(running, client, options, state, tmp_path):
    """kill -9 in the middle: the next server on the same folder ends it, with every line once."""
    total = 10
    path = tmp_path / "requests.jsonl"
    with path.open("w") as out:
        for i in range(total):
            body = {
                "model": DEFAULT_MODEL,
                "messages": [{"role": "user", "content": f"Say {i}."}],
                "max_tokens": 16,
                "temperature": 0,
                "ignore_eos": True,
            }
            bad = {"temperature": -1} if i == 5 else {}
            out.write(
                json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body | bad})
                + "\n"
            )
    stored = client.responses.create(model=DEFAULT_MODEL, input="Remember.", max_output_tokens=4)
    file = client.files.create(file=path, purpose="batch")
    assert client.files.content(file.id).content == path.read_bytes()
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"k": "v"}
    )

    def done(client: openai.OpenAI) -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts.completed if counts else 0

    wait_until(lambda: done(client) >= 2)
    old = running[-1]
    engine = old.engine_pid()
    old.process.send_signal(signal.SIGKILL)
    old.process.wait()
    wait_until(lambda: not Path(f"/proc/{engine}").exists() or _is_zombie(engine))
    running.append(launch(*options))
    client = running[-1].client()
    assert any("state:" in line and str(state) in line for line in running[-1].lines)
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 120)
    body = client.batches.retrieve(batch.id)
    assert body.output_file_id and body.error_file_id and body.metadata == {"k": "v"}
    output = [json.loads(line) for line in client.files.content(body.output_file_id).text.splitlines()]
    assert [o["custom_id"] for o in output] == [f"r{i}" for i in range(total) if i != 5]
    (fault,) = [json.loads(line) for line in client.files.content(body.error_file_id).text.splitlines()]
    assert fault["custom_id"] == "r5" and fault["response"]["status_code"] == 400
    assert body.request_counts is not None and (body.request_counts.completed, body.request_counts.failed) == (
        total - 1,
        1,
    )
    # What a batch says is what a request gets.
    alone = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Say 7."}],
        max_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    said = next(o for o in output if o["custom_id"] == "r7")["response"]["body"]
    assert said["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert client.responses.retrieve(stored.id).output_text == stored.output_text  # stored responses survived too
    assert file.id in {f.id for f in client.files.list()}
    client.files.delete(file.id)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_cancelling_a_batch(client, tmp_path):
    path = tmp_path / "requests.jsonl"
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
    path.write_text(
        "\n".join(
            json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
            for i in range(50)
        )
    )
    file = client.files.create(file=path, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    # Somebody who waits is answered while the batch runs.
    began = time.monotonic()
    client.completions.create(model=DEFAULT_MODEL, prompt="Hi", max_tokens=4)
    assert time.monotonic() - began < 20
    client.batches.cancel(batch.id)
    wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
    assert next(b.id for b in client.batches.list(limit=1)) == batch.id


def test_a_second_server_says_that_it_cannot_have_the_folder(running, state):
    """Told at the start, and by the routes; everything else works."""
    second = launch("--state-dir", str(state), wait=False)
    try:
        assert any("files and batches are off: another server uses the state folder" in line for line in second.lines)
        with pytest.raises(openai.InternalServerError, match="another server"):
            second.client().files.list()
    finally:
        second.process.kill()
        second.process.wait()
