"""`instructor`: a model's fields from an answer, by each of its modes, streamed, listed, retried, and in Anthropic's dialect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.clients.conftest import ASK, LONG, Served

instructor = pytest.importorskip("instructor", reason="needs instructor: `make test-clients` installs it")


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    rank: int = Field(ge=1, le=9)


def client(served: Served, mode: str, **more: Any) -> Any:
    made = openai.OpenAI(base_url=served.openai, api_key=served.key, max_retries=0, **more)
    return instructor.from_openai(made, mode=getattr(instructor.Mode, mode))


def fields(served: Served, **more: Any) -> dict[str, Any]:
    return {"model": served.model, "messages": ASK, "temperature": 0, "max_tokens": 400, "max_retries": 0, **more}


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_a_model(served: Served, mode: str):
    city, raw = client(served, mode).create_with_completion(response_model=City, **fields(served))
    assert isinstance(city, City)
    assert raw.usage.completion_tokens > 0


def test_a_model_over_responses(served: Served):
    more = fields(served)
    del more["max_tokens"]
    more["input"] = more.pop("messages")
    city = client(served, "RESPONSES_TOOLS").responses.create(response_model=City, max_output_tokens=400, **more)
    assert isinstance(city, City)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_parts_of_a_stream(served: Served, mode: str):
    parts = list(client(served, mode).create_partial(response_model=City, **fields(served)))
    assert len(parts) > 1
    City(**parts[-1].model_dump())


def test_a_list(served: Served):
    class Cities(BaseModel):
        cities: list[City] = Field(min_length=2, max_length=2)

    made = client(served, "TOOLS_STRICT").create(response_model=Cities, **fields(served, max_tokens=900))
    assert len(made.cities) == 2
    streamed: Iterable[City] = client(served, "TOOLS").create_iterable(
        response_model=City, **fields(served, max_tokens=700)
    )
    assert isinstance(next(iter(streamed)), City)


def test_it_asks_again_with_what_was_wrong(served: Served):
    """A check that no schema can tell: the second answer comes from a prompt with the call and the complaint in it."""
    from pydantic import field_validator

    tries: list[str] = []

    class Checked(BaseModel):
        name: Literal["Paris", "Rome"]

        @field_validator("name")
        @classmethod
        def not_the_first_time(cls, value: str) -> str:
            tries.append(value)
            if len(tries) < 2:
                raise ValueError("say it again")
            return value

    made = client(served, "TOOLS").create(response_model=Checked, **fields(served, max_retries=2))
    assert isinstance(made, Checked) and len(tries) >= 2


def test_anthropics_dialect(served: Served):
    anthropic = pytest.importorskip("anthropic")
    claude = anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0)
    made = instructor.from_anthropic(claude, mode=instructor.Mode.ANTHROPIC_TOOLS).create(
        response_model=City, model=served.model, messages=ASK, max_tokens=400, max_retries=0
    )
    assert isinstance(made, City)


def test_errors_and_time_limits(served: Served):
    with pytest.raises(Exception, match="temperature"):
        client(served, "TOOLS").create(response_model=City, **fields(served, temperature=-1))
    with pytest.raises(Exception, match="not served here"):
        client(served, "TOOLS").create(response_model=City, **fields(served, model="nobody"))

    class Story(BaseModel):
        text: str = Field(min_length=9000)

    with served.stops_early(), pytest.raises(Exception, match=r"(?i)timed out"):
        client(served, "JSON_SCHEMA", timeout=0.6).create(response_model=Story, **fields(served, max_tokens=LONG))
