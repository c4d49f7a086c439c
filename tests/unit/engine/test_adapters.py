"""Adapters in an engine: chosen by name, each with prefixes of its own, loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.engine import Engine
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.transport.process_client import ProcessClient
from quire.engine.types import EngineInfo, Event, Request
from quire.observe.errors import BadModelFile, BadRequest, NotEnoughMemory, NotFound, QuireError, Unsupported
from quire.runner.params import SamplingParams

pytest.importorskip("torch", reason="needs the test extra: torch makes the model")
pytest.importorskip("peft", reason="needs the test extra: peft makes the adapters")

from tests.unit.models import adapters, folders, tiny

PROMPT = np.random.default_rng(1).integers(3, 120, 50).tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model `m` and adapters `a`, `b`, `c`."""
    path = tmp_path_factory.mktemp("lora")
    model = tiny.build(num_hidden_layers=2)
    folders.save(model, path / "m")
    for i, name in enumerate("abc"):
        adapters.save(model, path / name, r=4 + 4 * i, seed=i)
    return path


def config_of(files: Path, loras: str = "ab", backend: str = "native", **more: object) -> EngineConfig:
    own = tuple((name, str(files / name)) for name in loras)
    settings = {"max_seqs": 6, "max_batch_tokens": 64, "context": 256, "runtime_lora": True, "max_loras": 2, **more}
    return EngineConfig(path=str(files / "m"), backend=backend, loras=own, **settings)  # type: ignore[arg-type]


def build(config: EngineConfig, tmp_path: Path) -> tuple[Engine, EngineInfo]:
    return build_engine(config, Environment(home=tmp_path / "home", threads=2))


@pytest.fixture
def engine(files: Path, tmp_path: Path) -> Iterator[Engine]:
    made, info = build(config_of(files), tmp_path)
    assert [a.name for a in info.adapters] == ["a", "b"] and info.max_adapters == 2
    assert any("adapter a: rank 4 on 14 modules" in line for line in info.decisions)
    yield made
    made.close()


def request(name: str, adapter: str = "", tokens: list[int] | None = None, n: int = 6, **more: object) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=n)
    return Request(id=name, tokens=tokens or PROMPT, sampling=sampling, adapter=adapter, **more)  # type: ignore[arg-type]


def finish(engine: Engine, *requests: Request) -> dict[str, list[Event]]:
    for one in requests:
        engine.add(one)
    heard: dict[str, list[Event]] = {one.id: [] for one in requests}
    while engine.busy:
        for event in engine.step():
            heard.setdefault(event.id, []).append(event)
    return heard


def tokens(events: list[Event]) -> list[int]:
    assert events[-1].error is None, events[-1].error
    return [t for e in events for t in e.tokens]


def test_a_mixture_answers_as_each_alone(engine: Engine):
    alone = {name: tokens(finish(engine, request(f"alone {name}", name))[f"alone {name}"]) for name in ("", "a", "b")}
    assert len({tuple(x) for x in alone.values()}) == 3
    salted = {"namespace": "fresh"}  # nothing from the cache
    rows = [request(f"{i} {name}", name, **salted) for i in range(2) for name in ("b", "", "a")]
    for name, events in finish(engine, *rows).items():
        assert tokens(events) == alone[name.split(" ")[1]], name


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_other_backends_give_the_same_tokens(backend: str, engine: Engine, files: Path, tmp_path: Path):
    other, _ = build(config_of(files, backend=backend, dtype="float32" if backend == "torch" else "auto"), tmp_path)
    rows = [request(f"{name}.", name, n=4) for name in ("b", "", "a")]
    want, got = finish(engine, *rows), finish(other, *rows)
    other.close()
    assert {k: tokens(v) for k, v in got.items()} == {k: tokens(v) for k, v in want.items()}


def test_prefixes_are_found_within_an_adapter_and_never_across(engine: Engine):
    def cached(name: str, adapter: str, **more: object) -> int:
        receipt = finish(engine, request(name, adapter, **more))[name][-1].receipt
        assert receipt is not None and receipt.adapter.startswith(f"{adapter}@" if adapter else "")
        return receipt.cached_tokens

    assert cached("a 1", "a") == 0
    assert cached("a 2", "a") == 48
    assert cached("b 1", "b") == 0
    assert cached("none 1", "") == 0
    assert cached("none 2", "") == 48
    assert cached("salted", "a", namespace="x") == 0
    assert cached("salted 2", "a", namespace="x") == 48


def test_content_that_changed_under_a_name_never_meets_the_old_pages(engine: Engine, files: Path):
    old = finish(engine, request("1", "b"))["1"]
    engine.hooks.unload("b")
    engine.hooks.load("b", str(files / "c"))
    new = finish(engine, request("2", "b"))["2"]
    assert new[-1].receipt is not None and new[-1].receipt.cached_tokens == 0
    assert tokens(new) != tokens(old)
    engine.hooks.unload("b")
    engine.hooks.load("b", str(files / "b"))
    again = finish(engine, request("3", "b"))["3"]
    assert tokens(again) == tokens(old)


def test_unloading_lets_running_requests_finish_and_refuses_new_ones(engine: Engine, files: Path):
    want = tokens(finish(engine, request("before", "a", n=20, namespace="1"))["before"])
    engine.add(request("running", "a", n=20, namespace="2"))
    heard = [event for _ in range(4) for event in engine.step()]
    engine.hooks.unload("a")
    with pytest.raises(BadRequest, match="2 adapters are loaded, 1 of them unloaded and still in use"):
        engine.hooks.load("c", str(files / "c"))  # its slot is not free yet
    engine.add(request("late", "a"))
    events: dict[str, list[Event]] = {"running": heard, "late": []}
    while engine.busy:
        for event in engine.step():
            events[event.id].append(event)
    assert tokens(events["running"]) == want
    assert "'a' is not loaded" in (events["late"][-1].error or "")
    engine.hooks.load("c", str(files / "c"))
    assert tokens(finish(engine, request("after", "c"))["after"])


def test_an_aborted_request_gives_its_adapter_up(engine: Engine, files: Path):
    engine.add(request("gone", "a", n=50))
    engine.step()
    engine.hooks.unload("a")
    engine.abort("gone")
    finish(engine)
    engine.hooks.load("c", str(files / "c"))
    engine.hooks.unload("c")
    with pytest.raises(NotFound, match="no adapter 'c'"):
        engine.hooks.unload("c")


def test_what_cannot_be_loaded_changes_nothing(engine: Engine, files: Path, tmp_path: Path):
    adapters.save(tiny.build(num_hidden_layers=3), tmp_path / "deep", ("q_proj",))
    want = tokens(finish(engine, request("1", "a"))["1"])
    engine.hooks.unload("b")
    for name, path, error in (
        ("a", files / "c", BadRequest),
        ("no such", tmp_path, BadRequest),
        ("x", tmp_path / "nothing", NotFound),
        ("x", tmp_path / "deep", BadModelFile),
    ):
        with pytest.raises(error):
            engine.hooks.load(name, str(path))
    engine.hooks.load("x", str(files / "b"))
    assert tokens(finish(engine, request("2", "a", namespace="2"))["2"]) == want


def test_an_engine_without_adapters_refuses_who_names_one(files: Path, tmp_path: Path):
    engine, info = build(config_of(files, "", runtime_lora=False), tmp_path)
    events = finish(engine, request("1", "a"))["1"]
    assert "'a' is not loaded" in (events[-1].error or "") and info.max_adapters == 0
    with pytest.raises(Unsupported, match="--runtime-lora"):
        engine.hooks.load("a", str(files / "a"))
    engine.close()


def test_a_bad_adapter_is_told_before_the_engine_starts(files: Path, tmp_path: Path):
    adapters.save(tiny.build(num_hidden_layers=3), tmp_path / "deep", ("q_proj",))
    config = config_of(files, "")
    config = EngineConfig(path=config.path, backend="native", loras=(("x", str(tmp_path / "deep")),))
    with pytest.raises(BadModelFile, match=r"layers\.2\.self_attn\.q_proj"):
        build(config, tmp_path)


def test_one_that_finds_no_memory_at_the_start_leaves_no_thread_behind(files, tmp_path, monkeypatch):
    monkeypatch.setattr("quire.engine.construction.adapters.available_memory", lambda: 0)
    before = {thread for thread in threading.enumerate() if thread.name == "quire-runner"}
    with pytest.raises(NotEnoughMemory, match="0 MiB are free"):
        build(config_of(files, depth=1), tmp_path)
    assert {thread for thread in threading.enumerate() if thread.name == "quire-runner"} <= before


@pytest.mark.parametrize("kind", ["inprocess", "process"])
def test_clients_load_and_unload(kind: str, files: Path, tmp_path: Path):
    """Also: an engine process that was killed has its adapters again."""

    async def heard(client: InProcessClient | ProcessClient, one: Request) -> list[int]:
        return tokens([event async for event in client.generate(one)])

    async def main() -> None:
        config = config_of(files, "a")
        lines: list[str] = []
        client = InProcessClient(config) if kind == "inprocess" else ProcessClient(config, on_line=lines.append)
        await client.start()
        try:
            assert [a.name for a in client.adapters] == ["a"]
            first = await heard(client, request("1", "a"))
            with pytest.raises(QuireError, match="no adapter at"):
                await client.load_adapter("b", str(tmp_path / "nothing"))
            made = await client.load_adapter("b", str(files / "b"))
            assert (made.name, made.rank, made.modules) == ("b", 8, 14)
            second = await heard(client, request("2", "b"))
            assert second != first
            if isinstance(client, ProcessClient):
                await client.unload_adapter("a")
                assert client.pid is not None
                __import__("os").kill(client.pid, 9)
                while client.alive:
                    await asyncio.sleep(0.01)
                while not client.alive:
                    await asyncio.sleep(0.02)
                assert await heard(client, request("3", "b")) == second
                with pytest.raises(AssertionError, match="'a' is not loaded"):
                    await heard(client, request("4", "a"))
            await client.unload_adapter("b")
            with pytest.raises(QuireError, match="no adapter 'b'"):
                await client.unload_adapter("b")
            assert all(a.name != "b" for a in client.adapters)
        finally:
            await client.close()

    asyncio.run(main())
