"""An engine with a pool for each kind of layer, from a model file to tokens: what a single pool gives, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams

pytest.importorskip("transformers", reason="needs transformers, which makes the model")
pytest.importorskip("gguf", reason="needs gguf, which writes the model")

from quire.models.kv_layout import KVLayout
from tests.unit.models import families, folders, mixtures

WINDOW = 24


@pytest.fixture(scope="module", params=["gemma3", "mistral, window", "gpt-oss"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    if request.param == "gpt-oss":
        return folders.save(mixtures.build("gpt-oss", sliding_window=WINDOW), folder / "model")
    return families.write_gguf(request.param, families.build(request.param), folder / "model.gguf")


def requests() -> list[Request]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 160) for _ in range(70)]
    return [
        Request(
            id=str(i),
            tokens=shared[: rng.choice([70, 50, 20])] + [rng.randrange(3, 160) for _ in range(rng.randint(1, 90))],
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 0.9]), seed=i, max_tokens=rng.randint(5, 30), logprobs=2, ignore_eos=True
            ),
            follows=str(i - 1) if i % 3 == 2 else None,
        )
        for i in range(7)
    ]


def serve(path: Path, backend: str, **options: Any) -> tuple[dict[str, list[tuple[Any, Any]]], Any, Any]:
    where = {"device": "cpu", "dtype": "float32", "threads": 1} if backend == "torch" else {"threads": 2}
    config = EngineConfig(
        path=str(path), backend=backend, **where, **{"max_seqs": 4, "max_batch_tokens": 48, **options}
    )
    engine, info = build_engine(config, Environment(home=path.parent))
    heard: dict[str, list[tuple[Any, Any]]] = {}
    todo = requests()[: 4 if backend == "torch" else None]  # it is the slow one
    while todo or engine.busy:
        if todo:
            engine.add(todo.pop(0))
        for event in engine.step():
            assert isinstance(event, Event) and event.error is None, event.error
            heard.setdefault(event.id, []).extend(zip(event.tokens, event.logprobs, strict=True))
    return heard, engine, info


def same(have: Any, want: Any, backend: str) -> bool:
    """Bit for bit; elsewhere products round by the shape of the batch, so there the tokens are what counts."""
    if backend == "native":
        return have == want
    return {k: [t for t, _ in v] for k, v in have.items()} == {k: [t for t, _ in v] for k, v in want.items()}


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_several_pools_give_what_one_gives(path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "native":
        pytest.importorskip("quire.backends.native._native", reason="needs the native backend: pip install -e .")
    if backend == "torch":
        pytest.importorskip("torch", reason="needs torch: the torch extra")
    with monkeypatch.context() as patch:
        patch.setattr(KVLayout, "split", lambda layout: None)
        want, engine, _ = serve(path, backend)
        assert len(engine._scheduler.tree.pools) == 1
    kinds: list[dict[str, Any]] = [{}, {"depth": 1}, {"kv_memory": 1 << 18, "context": 256}, {"prefix_cache": False}]
    for options in kinds if backend != "torch" else [{**kinds[1], **kinds[2]}]:
        have, engine, info = serve(path, backend, **options)
        assert same(have, want, backend)
        assert any(f"layers that see {WINDOW} tokens" in line for line in info.decisions)
        tree = engine._scheduler.tree
        tree.check([])
        assert all(tree.available(g) == pool.size for g, pool in enumerate(tree.pools))
        window = len(tree.pools) - 1
        assert tree.groups[window].resident(1000)[0] == 1000 - WINDOW + 1
        assert tree.pools[window].size < 4 * 512 // 16  # four whole contexts
        assert tree.hits > 0 or "prefix_cache" in options
