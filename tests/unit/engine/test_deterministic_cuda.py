"""The promise of `deterministic` on the cuda backend, with no tolerance: tokens and log probabilities, bit for bit.

A tiny random Llama in Triton's interpreter (or on a GPU, where there is one): each request alone, in a batch, with its
prompt cut into chunks, cold and from the prefix tree, at depth 0 and 1, with and without the padded ladder.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
pytest.importorskip("triton", reason="needs the cuda extra")

from quire.backends.cuda import deterministic  # noqa: E402
from quire.backends.cuda.kernels import combine, product  # noqa: E402
from quire.config import EngineConfig, Environment  # noqa: E402
from quire.engine.construction.build import build_engine  # noqa: E402
from quire.engine.types import Request  # noqa: E402
from quire.runner.device import runner as device_runner  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402

GPU = torch.cuda.is_available()
SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,  # a second one costs the interpreter as much again, and sums nothing otherwise
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
REQUESTS = [
    Request(
        id=str(i),
        tokens=[(7 * i + 3 * j) % 160 for j in range(length)],
        sampling=SamplingParams(max_tokens=2, logprobs=3, prompt_logprobs=2 if i == 1 else None, **kind),
    )
    for i, (length, kind) in enumerate(
        [
            (70, {"temperature": 0.0}),
            (9, {"temperature": 1.0, "top_p": 0.9, "seed": 5}),
            (21, {"temperature": 1.2, "typical_p": 0.9, "frequency_penalty": 0.5, "seed": 6}),
        ]
    )
]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def _small():
    """What is cut into pieces for a large model is cut so here. One tile in the interpreter: see test_deterministic.py."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(deterministic, "SPLIT", 64)
        patch.setattr(product, "SEGMENT", 64)
        if not GPU:
            patch.setattr(product, "TILES", product.TILES[:1])
            patch.setattr(combine, "_AHEAD", 1)
        yield


def answers(shape: str, requests: list[Request], **options: Any) -> dict[str, list[Any]]:
    """Everything each request is told, by id. Requests of one call ride together."""
    settings: dict[str, Any] = {
        "max_seqs": 4,
        "max_batch_tokens": 128,
        "context": 128,
        "depth": 0,
        "kv_memory": 1 << 20,
    }
    kind = {"device": "cuda", "dtype": "bfloat16"} if GPU else {"device": "cpu", "dtype": "float16"}
    config = EngineConfig(
        path=shape, load_format="dummy", backend="cuda", deterministic=True, **{**settings, **kind, **options}
    )
    engine, info = build_engine(config, Environment(home=Path("/nowhere")))
    assert any("same bits in any batch" in line for line in info.decisions)
    heard: dict[str, list[Any]] = {}
    for request in requests:
        engine.add(request)
        heard[request.id] = []
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            told = [(p.token, p.logprob, p.rank, p.top) for p in [*(event.prompt_logprobs or ()), *event.logprobs]]
            heard[event.id] += [event.tokens, told + [event.vector] * bool(event.vector)]
    engine.close()
    return {name: flat(parts) for name, parts in heard.items()}


def flat(parts: list[Any]) -> list[Any]:
    """Tokens and log probabilities in order, however they were cut into events."""
    return [x for part in parts[0::2] for x in part] + [x for part in parts[1::2] for x in part]


@pytest.fixture(scope="module")
def alone(shape: str) -> dict[str, list[Any]]:
    return {name: told for request in REQUESTS for name, told in answers(shape, [request]).items()}


def test_alone_or_in_a_batch(shape: str, alone: dict[str, list[Any]]):
    assert answers(shape, REQUESTS) == alone


def test_with_a_text_that_is_embedded(shape: str, alone: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch):
    """Its vector has the same bits alone and among answers, on the ladder of padded steps."""
    text = Request(id="text", tokens=[(5 * j) % 160 for j in range(33)], vector=True)
    apart = answers(shape, [text])
    assert len(apart["text"][-1]) == 4 * SHAPE["hidden_size"]
    plain = device_runner.DeviceRunner.__init__
    monkeypatch.setattr(device_runner.DeviceRunner, "__init__", functools.partialmethod(plain, padded=True))
    assert answers(shape, [REQUESTS[1], text, REQUESTS[2]]) == {n: alone[n] for n in ("1", "2")} | apart


@pytest.mark.large
def test_in_chunks_and_from_the_prefix_tree(shape: str, alone: dict[str, list[Any]]):
    """Prompts cut every 27 tokens or so; then again behind a request that leaves the same prompt in the tree."""
    assert answers(shape, REQUESTS, max_batch_tokens=27) == alone
    again = Request(id="again", tokens=REQUESTS[0].tokens, sampling=REQUESTS[0].sampling)
    told = answers(shape, [REQUESTS[0], again], max_seqs=1)
    assert told["again"] == told["0"] == alone["0"]


@pytest.mark.large
def test_ahead_and_on_the_ladder(shape: str, alone: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch):
    """Depth 1, and decode steps padded up to the next size as graphs have them."""
    plain = device_runner.DeviceRunner.__init__
    monkeypatch.setattr(device_runner.DeviceRunner, "__init__", functools.partialmethod(plain, padded=True))
    assert answers(shape, REQUESTS, depth=1) == alone
