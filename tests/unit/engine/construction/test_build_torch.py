"""Engines over the torch backend: whole, with random weights of a shape, and with memory that is the engine's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, Environment, resolve_pool
from quire.engine.construction.build import build_engine
from quire.engine.types import Request
from quire.models import shapes
from quire.observe.errors import BadModelFile, BadRequest, NotFound, Unsupported
from quire.runner.params import SamplingParams
from tests.unit.models import tiny

pytest.importorskip("torch", reason="needs the torch extra")

ENV = Environment(home=Path("/nowhere"))
SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def answers(config: EngineConfig, requests: list[Request]) -> dict[str, list[int]]:
    engine, _ = build_engine(config, ENV)
    for request in requests:
        engine.add(request)
    heard: dict[str, list[int]] = {r.id: [] for r in requests}
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            heard[event.id] += event.tokens
    engine.close()
    return heard


def requests(n: int = 6) -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.5, "seed": 6},
    ]
    return [
        Request(
            id=str(i),
            tokens=[(7 * i + 3 * j) % 160 for j in range(5 + 9 * i)],
            sampling=SamplingParams(max_tokens=12 + i, **kinds[i % 3]),
        )
        for i in range(n)
    ]


SIZES: dict[str, Any] = {"max_seqs": 4, "max_batch_tokens": 24, "context": 128}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[int]]]:
    """A model, and what the reference engine says of it."""
    path = str(tiny.write_gguf(tiny.build(), tmp_path_factory.mktemp("tiny") / "m.gguf"))
    return path, answers(EngineConfig(path=path, backend="reference", depth=0, **SIZES), requests())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_device_runner_gives_the_reference_engines_tokens(told: tuple[str, dict[str, list[int]]], depth: int):
    """The same model, scheduler and cache; another backend, another runner, any number of steps ahead."""
    path, want = told
    assert answers(EngineConfig(path=path, backend="torch", device="cpu", depth=depth, **SIZES), requests()) == want


def test_a_shape_runs_with_random_weights(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    config = EngineConfig(path=str(path), load_format="dummy", backend="torch", device="cpu", max_seqs=4, context=128)
    engine, info = build_engine(config, ENV)
    engine.close()
    assert info.vocab_size == 160 and any("random numbers" in line for line in info.decisions)
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
    assert info.weight_bytes == 4 * (2 * 160 * 64 + 2 * per_layer + 64)
    assert answers(config, requests(3)) == answers(config, requests(3))


def test_known_shapes_are_what_they_are_called():
    for name, billions in (
        ("smollm2-135m", 0.135),
        ("llama-3.2-1b", 1.24),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
    ):
        _, nbytes = shapes.load_shape(f"shape:{name}")
        assert nbytes / 2e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        ("shape:none", NotFound, "no shape is named"),
        ("absent.json", NotFound, "no file"),
        ("model.gguf", Unsupported, "no shape to fill"),
    ],
)
def test_a_bad_shape_is_refused(source: str, error: type[Exception], why: str):
    with pytest.raises(error, match=why):
        shapes.load_shape(source)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": "x"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_a_bad_configuration_is_refused(tmp_path: Path, change: dict[str, Any], why: str):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **change}))
    with pytest.raises((BadModelFile, Unsupported), match=why):
        shapes.load_shape(str(path))
    path.write_text("[1")
    with pytest.raises(BadModelFile, match="not JSON"):
        shapes.load_shape(str(path))


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"load_format": "dummy"}, Unsupported, "random weights"),
        ({"load_format": "pickle"}, BadRequest, "auto or dummy"),
        ({"dtype": "bfloat16"}, Unsupported, "no device or dtype"),
        ({"backend": "torch", "deterministic": True}, Unsupported, "same bits"),
        ({"backend": "reference", "deterministic": True}, Unsupported, "same bits"),
        ({"backend": "torch", "dtype": "int3"}, Unsupported, "no dtype"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: dict[str, Any], error: type[Exception], why: str):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    load = {"path": str(path)} if options.get("load_format") == "dummy" else {}
    if not load:
        load = {"path": str(tiny.write_gguf(tiny.build(), tmp_path / "m.gguf"))}
    with pytest.raises(error, match=why):
        build_engine(EngineConfig(**load, **options), ENV)


def test_memory_of_its_own_is_taken_whole():
    pages, line = resolve_pool(None, 1000 * 64, 64, context=1600, max_seqs=8, own=True)
    assert pages == 800 and "beside the weights" in line  # every sequence's full context
    assert resolve_pool(None, 1000 * 64, 64, context=16000, max_seqs=8, own=True)[0] == 1000
    assert resolve_pool(64 * 5, 1000 * 64, 64, context=1600, max_seqs=8, own=True)[0] == 5
