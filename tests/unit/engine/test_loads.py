"""An engine that loads pages from a tier: the tokens of a recompute, on every backend, whatever the tier does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends.pages import PageBytes
from quire.cache.events import Removed, Stored
from quire.cache.tiers import Part
from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.engine import Engine
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams

pytest.importorskip("torch", reason="needs the test extra: torch makes the model")
pytest.importorskip("gguf", reason="needs gguf, which writes the model")

from tests.unit.models import families, folders, tiny

PROMPT = np.random.default_rng(5).integers(3, 120, 100).tolist()


class HostJob:
    """Ends when it is let."""

    def __init__(self, well: bool | None = True) -> None:
        self.well = well
        self.waited = 0

    def ended(self) -> bool | None:
        return self.well

    def wait(self, seconds: float) -> None:
        self.waited += 1


class HostTier:
    """Keeps pages in memory. It hears of them as a listener, and copies each at once."""

    def __init__(self, engine: Engine) -> None:
        self.kept: dict[tuple[int, bytes], PageBytes] = {}
        self.loaded: list[tuple[int, int]] = []  # group and pages of each part
        self.well: bool | None = True
        self.jobs: list[HostJob] = []
        self.attach(engine)

    def attach(self, engine: Engine) -> None:
        assert engine.pages is not None
        self.runner: Any = engine._runner
        engine.pages.load_from(self)
        engine.pages.listen(self)

    def stored(self, event: Stored) -> None:
        copy = self.runner.read_pages(event.group, [event.page])
        self.kept[event.group, event.key] = copy.wait()[0].copy()

    def removed(self, event: Removed) -> None: ...

    def has(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        return [(group, key) in self.kept for key in keys]

    def load(self, parts: Sequence[Part]) -> HostJob:
        for part in parts:
            self.loaded.append((part.group, len(part.keys)))
            for row, key in zip(part.buffer, part.keys, strict=True):
                row[:] = self.kept[part.group, key]
        self.jobs.append(HostJob(self.well))
        return self.jobs[-1]

    def store(self, parts: Sequence[Part]) -> HostJob:
        raise AssertionError(parts)

    def drop(self, group: int, keys: Sequence[bytes]) -> None: ...


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    folders.save(tiny.build(num_hidden_layers=2), path / "full")
    families.write_gguf("gemma3", families.build("gemma3"), path / "window")
    return path


def build(path: Path, home: Path, **settings: Any) -> Engine:
    made: dict[str, Any] = {"backend": "native", "max_seqs": 4, "max_batch_tokens": 48, **settings}
    if made["backend"] == "torch":
        made |= {"device": "cpu", "dtype": "float32"}
    return build_engine(EngineConfig(path=str(path), **made), Environment(home=home, threads=2))[0]


def request(name: str, tokens: Sequence[int] = PROMPT, **more: Any) -> Request:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
    return Request(id=name, tokens=list(tokens), sampling=sampling, **more)


def run(engine: Engine, *requests: Request) -> dict[str, list[Event]]:
    """Every event of some requests that come at once."""
    names: Any = engine.pages and engine.pages._names
    if names._weights is not None and not isinstance(names._weights, str):
        names._weights.join()
    heard: dict[str, list[Event]] = {r.id: [] for r in requests}
    for each in requests:
        engine.add(each)
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            heard[event.id].append(event)
    return heard


def said(events: list[Event]) -> list[Any]:
    return [(t, p) for e in events for t, p in zip(e.tokens, e.logprobs, strict=True)]


def receipt(events: list[Event]) -> Any:
    return events[-1].receipt


KINDS = [
    ("full", {"backend": "native"}),
    ("full", {"backend": "native", "depth": 2}),
    ("full", {"backend": "native", "kv_dtype": "int8"}),
    ("full", {"backend": "reference"}),
    ("full", {"backend": "torch"}),
    ("window", {"backend": "native", "depth": 1}),
    ("window", {"backend": "torch"}),
]


@pytest.mark.parametrize(
    ("model", "settings"), KINDS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_a_loaded_page_is_a_hit_to_the_last_bit(
    model: str, settings: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    """One engine computes, another one loads what the first has kept: a restart, or a peer."""
    first = build(models / model, tmp_path, **settings)
    tier = HostTier(first)
    cold = run(first, request("cold"))["cold"]
    warm = run(first, request("warm"))["warm"]  # from the first one's own tree
    first.close()
    assert receipt(cold).cached_tokens == 0 and receipt(warm).cached_tokens == 96 and not tier.loaded
    second = build(models / model, tmp_path, **settings)
    tier.attach(second)
    loaded = run(second, request("loaded"))["loaded"]
    assert (receipt(loaded).cached_tokens, receipt(loaded).loaded_tokens) == (96, 96)
    assert tier.loaded[0] == (0, 6) and second.stats().loaded_tokens == 96
    if (
        settings["backend"] == "torch"
    ):  # sums depend on the shape of a step there: what is cached alike is what compares
        assert said(loaded) == said(warm)
    else:
        assert said(loaded) == said(warm) == said(cold)
    assert receipt(run(second, request("again"))["again"]).loaded_tokens == 0
    second.close()


def engines(models: Path, tmp_path: Path, **settings: Any) -> tuple[Engine, HostTier, list[Any]]:
    """An engine with a tier that has PROMPT, and the answer."""
    first = build(models / "full", tmp_path, **settings)
    tier = HostTier(first)
    answer = said(run(first, request("cold"))["cold"])
    first.close()
    second = build(models / "full", tmp_path, **settings)
    tier.attach(second)
    names: Any = second.pages and second.pages._names
    names._weights.join()
    return second, tier, answer


@pytest.mark.parametrize("depth", [0, 2])
def test_a_load_that_fails_is_a_miss(depth: int, models: Path, tmp_path: Path) -> None:
    engine, tier, answer = engines(models, tmp_path, depth=depth)
    tier.well = False
    events = run(engine, request("a"))["a"]
    assert said(events) == answer and tier.loaded
    assert (receipt(events).cached_tokens, receipt(events).loaded_tokens) == (0, 0)
    engine.close()


def test_a_late_load_is_a_miss_and_its_pages_come_back_when_it_ends(models: Path, tmp_path: Path) -> None:
    engine, tier, answer = engines(models, tmp_path)
    now = [0.0]
    loader: Any = engine.pages and engine.pages._loader
    loader._clock = lambda: now[0]
    tier.well = None  # under way, for ever
    engine.add(request("a"))
    for _ in range(20):  # the engine waits for it, and does not take it for a fault
        assert engine.step() == []
    assert engine.stats().loading == 1 and tier.jobs[0].waited > 10
    now[0] = 1000.0
    heard: list[Event] = []
    while engine.busy:
        heard += engine.step()
    assert said(heard) == answer and receipt(heard).cached_tokens == 0
    scheduler: Any = engine._scheduler
    assert len(tier.jobs) == 1 and bool(scheduler._admission.loads) and engine.stats().pages_used == 6
    tier.jobs[0].well = True
    again = run(engine, request("b"))["b"]
    assert said(again) == answer and not scheduler._admission.loads and engine.stats().pages_used == 0
    engine.close()


def test_others_run_meanwhile_and_share_what_comes(models: Path, tmp_path: Path) -> None:
    engine, tier, answer = engines(models, tmp_path)
    tier.well = None
    heard: dict[str, list[Event]] = {name: [] for name in ("a", "b", "other")}
    engine.add(request("a"))
    engine.add(request("b"))
    engine.add(request("other", [7] * 20))
    for _ in range(30):
        for event in engine.step():
            heard[event.id].append(event)
    assert heard["other"][-1].finish and not heard["a"] and engine.stats().loading == 2 and len(tier.jobs) == 1
    tier.jobs[0].well = True
    while engine.busy:
        for event in engine.step():
            heard[event.id].append(event)
    assert said(heard["a"]) == said(heard["b"]) == answer and len(tier.jobs) == 1
    assert receipt(heard["b"]).cached_tokens == 96
    engine.close()


def test_one_that_goes_leaves_its_pages_until_nobody_writes_them(models: Path, tmp_path: Path) -> None:
    engine, tier, answer = engines(models, tmp_path)
    tier.well = None
    engine.add(request("a"))
    engine.step()
    engine.abort("a")
    assert [e.finish for e in engine.step()] == ["abort"] and not engine.busy
    assert engine.stats().pages_used == 6 and engine.stats().loading == 0
    tier.jobs[0].well = True
    events = run(engine, request("b"))["b"]  # finds what came after all
    assert said(events) == answer and receipt(events).cached_tokens == 96 and len(tier.jobs) == 1
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_closes_with_loads_under_way(depth: int, models: Path, tmp_path: Path) -> None:
    engine, tier, _ = engines(models, tmp_path, depth=depth)
    tier.well = None
    engine.add(request("a"))
    engine.step()
    engine.close()
    tier.jobs[0].well = True  # too late for anybody


def test_a_load_that_never_ends_where_nothing_else_can_go_on_ends_in_an_error(models: Path, tmp_path: Path) -> None:
    """The pool holds one sequence, and its pages are those that are being written."""
    engine, tier, _ = engines(models, tmp_path)
    now = [0.0]
    loader: Any = engine.pages and engine.pages._loader
    loader._clock = lambda: now[0]
    scheduler: Any = engine._scheduler
    taken = scheduler.tree.match("taken", [])
    assert scheduler.tree.extend(taken, (scheduler.tree.available() - 8) * 16)
    tier.well = None
    engine.add(request("a"))
    engine.step()
    now[0] = 20.0  # late: it would compute, and there is no room
    for _ in range(30):
        assert engine.step() == []
    now[0] = 1e6
    heard: list[Event] = []
    for _ in range(10):
        heard += engine.step()
    assert [e.finish for e in heard] == ["error"] and "progress" in str(heard[0].error)
    scheduler.tree.release(taken)
    engine.close()


def test_the_runner_writes_pages_behind_the_steps_it_was_given(models: Path, tmp_path: Path) -> None:
    """A step that is still to come may write the page's former content: the copy waits its turn, and its caller does not."""
    engine = build(models / "full", tmp_path, depth=1)
    runner: Any = engine._runner
    go = threading.Event()
    runner._submit(go.wait)
    buffer = runner.page_buffer(0, 1)
    buffer[:] = 7
    copy = runner.write_pages(0, [2], buffer)
    assert not copy.done()
    go.set()
    assert copy.wait() is buffer and copy.done()
    assert (runner.read_pages(0, [2]).wait() == 7).all()
    bad = runner.write_pages(0, [1 << 30], buffer)
    with pytest.raises(RuntimeError, match="could not be copied"):
        bad.wait()
    with pytest.raises(RuntimeError, match="could not be copied"):
        bad.done()
    engine.close()
