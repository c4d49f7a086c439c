"""Triton's own HTTP client, `tritonclient`, against the KServe v2 routes: health, metadata, infer with tensors as bytes and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.config import VERSION
from tests.e2e.clients.conftest import Served

triton: Any = pytest.importorskip("tritonclient.http", reason="needs tritonclient: pip install tritonclient[http]")
from tritonclient.utils import InferenceServerException  # noqa: E402

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    made = triton.InferenceServerClient(url=served.url.removeprefix("http://"), network_timeout=60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def headers(served: Served) -> dict[str, str]:
    return {"Authorization": f"Bearer {served.key}"}


def text(*texts: str, binary: bool = True) -> Any:
    made = triton.InferInput("text_input", [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array([t.encode() for t in texts], np.object_), binary_data=binary)
    return made


def number(name: str, value: Any, kind: str, dtype: Any) -> Any:
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(np.array([value], dtype))
    return made


def test_health_and_metadata(client: Any, headers: dict[str, str], served: Served):
    assert client.is_server_live(headers=headers) and client.is_server_ready(headers=headers)
    assert client.is_model_ready(served.model, headers=headers)
    assert client.is_model_ready(served.model, "1", headers=headers)
    assert not client.is_model_ready("nobody", headers=headers)
    told = client.get_server_metadata(headers=headers)
    assert told["name"] == "quire" and told["version"] == VERSION and "binary_tensor_data" in told["extensions"]
    model = client.get_model_metadata(served.model, headers=headers)
    assert model["name"] == served.model and model["outputs"][0]["name"] == "text_output"
    assert [one["name"] for one in client.get_model_repository_index(headers=headers)] == [served.model]


@pytest.mark.parametrize("binary", [True, False])
def test_infer(client: Any, headers: dict[str, str], served: Served, binary: bool):
    limits = [number("max_tokens", 5, "INT32", np.int32), number("temperature", 0.0, "FP32", np.float32)]
    wanted = [triton.InferRequestedOutput("text_output", binary_data=binary)]
    answers = []
    for outputs in (wanted, None):
        done = client.infer(
            served.model, [text(PROMPT, binary=binary), *limits], outputs=outputs, request_id="7", headers=headers
        )
        assert done.get_response()["id"] == "7"
        answers.append(_texts(done))
    several = client.infer(served.model, [text(PROMPT, "Two plus two is", binary=binary), *limits], headers=headers)
    first, second = _texts(several)
    assert answers == [[first], [first]] and "Paris" in first and second != first
    waiting = client.async_infer(served.model, [text(PROMPT), *limits], headers=headers)
    assert _texts(waiting.get_result()) == [first]
    told = client.infer(
        served.model, [text(PROMPT)], headers=headers, parameters={"max_tokens": 5, "temperature": 0.0, "seed": 1}
    )
    assert _texts(told) == [first]


def _texts(done: Any) -> list[str]:
    return [t.decode() if isinstance(t, bytes) else t for t in done.as_numpy("text_output").tolist()]


def test_refusals_are_its_exceptions(client: Any, headers: dict[str, str], served: Served):
    with pytest.raises(InferenceServerException, match="not served here"):
        client.infer("nobody", [text(PROMPT)], headers=headers)
    with pytest.raises(InferenceServerException, match="no_such_field"):
        client.infer(served.model, [text(PROMPT), number("no_such_field", 1, "INT32", np.int32)], headers=headers)
    with pytest.raises(InferenceServerException, match="API key"):
        client.infer(served.model, [text(PROMPT)])
    for ask in (
        lambda: client.load_model(served.model, headers=headers),
        lambda: client.get_model_config(served.model, headers=headers),
        lambda: client.get_inference_statistics(served.model, headers=headers),
    ):
        with pytest.raises(InferenceServerException):
            ask()
