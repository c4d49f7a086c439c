"""Sizes: what is asked, what the model allows, what the memory holds. Honoured exactly, or refused with the numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.backends.ops import KV
from quire.config import EngineConfig, Environment
from quire.engine.build import build_engine, resolve_sizes
from quire.models import Model
from quire.observe.errors import BadRequest

ENV = Environment(home=Path("/nowhere"))
PAGE = 2 * 2 * 16 * 1 * 8 * 2  # bytes: layers, K and V, tokens, heads, width, float16


def model(context: int = 1000) -> Model:
    made = SimpleNamespace(
        config=SimpleNamespace(context=context), kv=lambda pages, size: KV(2, pages, size, kv_heads=1, head_dim=8)
    )
    return cast("Model", made)


def sizes(available: int = 1 << 30, env: Environment = ENV, **options: Any) -> Any:
    return resolve_sizes(EngineConfig(path="", **options), env, model(), available)


def test_unasked_it_is_the_models_context_four_times() -> None:
    got = sizes(max_seqs=8)
    assert (got.context, got.pages) == (1000, 8 * 32)
    assert "512 tokens of each of 8 sequences" in got.lines[0]
    got = sizes(max_seqs=7)
    assert (got.context, got.pages) == (1000, 4 * 63)
    assert "4 full contexts" in got.lines[0]
    assert "what the model was made for" in got.lines[1]
    assert sizes(max_seqs=64, context=160).pages == 64 * 10


def test_asked_is_honoured_exactly() -> None:
    got = sizes(context=100, kv_memory=10 * PAGE)
    assert (got.context, got.pages) == (100, 10)
    assert "asked for; the model was made for 1000" in got.lines[1]
    env = dataclasses.replace(ENV, kv_memory=f"{20 * PAGE}")
    assert sizes(env=env).pages == 20
    assert sizes(env=env, kv_memory=30 * PAGE).pages == 30


def test_little_memory_bounds_the_context_and_says_so() -> None:
    got = sizes(available=20 * PAGE)
    assert (got.context, got.pages) == (160, 10)
    assert "what the KV pool holds; the model: 1000" in got.lines[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"context": 1001}, "1001 was asked for: the model was made for 1000"),
        ({"context": 1000, "kv_memory": 10 * PAGE}, "holds 160 tokens"),
        ({"kv_memory": 2 << 30}, "2048 MiB were asked for"),
        ({"kv_memory": PAGE - 1}, f"takes {PAGE}"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        sizes(**options)


def test_a_bad_environment_names_the_variable() -> None:
    with pytest.raises(BadRequest, match="QUIRE_KV_MEMORY"):
        sizes(env=dataclasses.replace(ENV, kv_memory="plenty"))


@pytest.mark.parametrize("name", ["threads", "context", "max_seqs", "max_batch_tokens"])
def test_numbers_that_could_never_work(name: str) -> None:
    with pytest.raises(BadRequest, match=f"{name} is 0"):
        build_engine(EngineConfig(path="none.gguf", **{name: 0}), ENV)  # type: ignore[arg-type]


def test_depth_is_bounded() -> None:
    with pytest.raises(BadRequest, match="depth is 9"):
        build_engine(EngineConfig(path="none.gguf", depth=9), ENV)


def test_a_step_must_hold_one_token_of_every_sequence():
    with pytest.raises(BadRequest, match="max_batch_tokens is 8 and max_seqs 16"):
        build_engine(EngineConfig(path="absent.gguf", max_seqs=16, max_batch_tokens=8), ENV)


def test_a_container_limit_bounds_the_memory(tmp_path):
    from quire.config import _container_memory

    assert _container_memory(tmp_path) == 1 << 62
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert _container_memory(tmp_path) == 1 << 62
    (tmp_path / "memory.max").write_text("5000\n")
    assert _container_memory(tmp_path) == 4000
    (tmp_path / "memory.max").write_text("500\n")
    assert _container_memory(tmp_path) == 0
