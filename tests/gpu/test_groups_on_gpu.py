"""Layers that forget, on a GPU: a pool and a page table for each kind of layer, through graphs, depth, prefix hits and long prompts.

Needs an NVIDIA GPU and transformers, which makes the models (a tiny Gemma 3 and a tiny gpt-oss); skipped elsewhere. All in float32,
with float16 keys and values. Launches of another shape round differently, so there a token may differ at a tie, and only at one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("transformers", reason="needs transformers, which makes the models: pip install quire[test]")

from quire.config import PAGE_SIZE  # noqa: E402
from quire.engine.types import Request  # noqa: E402
from quire.models.kv_layout import KVLayout  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from tests.gpu.grouped import (  # noqa: E402
    check_again,
    check_log_probabilities,
    engine,
    serve,
    tokens,
    traffic,
    unexplained,
)
from tests.unit.models import families, folders, mixtures  # noqa: E402
from tests.unit.models.test_families import exact_logits  # noqa: E402

WINDOW = 90  # ends inside a page


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Its name, the transformers model, and where it lies."""
    kind = mixtures if request.param == "gpt-oss" else families
    model = kind.build(request.param, sliding_window=WINDOW)
    return request.param, model, folders.save(model, tmp_path_factory.mktemp("groups") / "model")


def test_every_kind_of_layer_has_its_pool(made: tuple[str, Any, Path]):
    running = engine(made[2])
    tree, program = running._scheduler.tree, running._runner._program
    assert [type(g).__name__ for g in tree.groups] == ["Full", "Window"]
    assert len(program.kernels.caches) == 2 and len(running._runner._state.tables) == 2
    for group, pool in zip(program.kernels.caches, tree.pools, strict=True):
        assert group and all(cache.keys.shape[0] == pool.size + 1 for cache in group)  # and one to spare
    assert len(running._runner._decode.ladder.graphs) >= 4
    running.close()


def test_graphs_and_depth_change_nothing(made: tuple[str, Any, Path], monkeypatch: pytest.MonkeyPatch):
    """Replayed graphs at depth 0, 1 and 2 are the same to the token; eager steps and a single pool differ at ties alone."""
    requests = traffic(1, 40)
    want = serve(engine(made[2], depth=0), requests)
    for depth in (1, 2):
        assert tokens(serve(engine(made[2], depth=depth), requests)) == tokens(want)
    requests = traffic(2, 30, greedy=True)
    want = serve(engine(made[2]), requests)
    allowed = 1 if made[0] == "gemma3" else 3  # a router that chooses another expert changes more than a tie does
    eager = engine(made[2])
    eager._runner._decode = eager._runner._prefill = None
    assert len(unexplained(serve(eager, requests), want)) <= allowed
    with monkeypatch.context() as patch:
        patch.setattr(KVLayout, "split", lambda layout: None)
        whole = engine(made[2])
        assert len(whole._scheduler.tree.pools) == 1
        assert len(unexplained(serve(whole, requests), want)) <= allowed
    plain = engine(made[2], backend="torch")
    assert len(plain._scheduler.tree.pools) == 2
    assert len(unexplained(serve(plain, requests), want)) <= allowed


@pytest.mark.parametrize("chunk", [48, 512])
def test_log_probabilities_are_those_of_transformers(made: tuple[str, Any, Path], chunk: int):
    """Prompts longer than the window, in chunks shorter than it and in one step; then tokens from graphs, far past it."""
    name, model, path = made
    exact = mixtures.exact_logits if name == "gpt-oss" else exact_logits
    check_log_probabilities(path, chunk, (5, WINDOW, 300, 301), lambda tokens: exact(model, tokens))


def test_a_prefix_is_found_where_the_window_is_there(made: tuple[str, Any, Path]):
    """The same prompt again: found in both pools, and the tokens are those of the first time."""
    cached = check_again(made[2])
    assert cached[0] == 0 and cached[1] >= 240 and cached[2] == cached[1]


def test_memory_for_a_long_context_is_bounded_by_the_window(made: tuple[str, Any, Path]):
    running = engine(made[2], max_seqs=2, max_batch_tokens=64)
    tree = running._scheduler.tree
    sampling = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    running.add(Request(id="long", tokens=[3 + i * 7 % 150 for i in range(320)], sampling=sampling))
    held = [0, 0]
    while running.busy:
        running.step()
        held = [max(held[g], pool.size - tree.available(g)) for g, pool in enumerate(tree.pools)]
    assert held[0] == -(-469 // PAGE_SIZE)  # every token but the last
    # What the next token sees, two steps in flight, and a page that is cut at either end.
    assert held[1] <= -(-(WINDOW + 2 * 64) // PAGE_SIZE) + 2 < held[0] // 1.7
    assert tree.pools[1].size < 2 * 480 // PAGE_SIZE  # two whole contexts
    tree.check([])
    running.close()


def test_a_shared_prefix_that_is_read_once(made: tuple[str, Any, Path], monkeypatch: pytest.MonkeyPatch):
    """Decode rows over a common beginning: layers that see everything read it once, those with a window their own pages."""
    monkeypatch.setattr("quire.runner.device.runner.WORTH", 1)
    rng = random.Random(4)
    base = [rng.randrange(3, 160) for _ in range(260)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, logprobs=4, ignore_eos=True)
    requests = [
        Request(id=str(i), tokens=base + [rng.randrange(3, 160) for _ in range(1 + 3 * i)], sampling=sampling)
        for i in range(16)
    ]
    running = engine(made[2])
    told: list[int] = []
    run = running._runner._decode.run

    def watched(*arrays: Any, sharing: Any, **more: Any) -> Any:
        told.append(0 if sharing is None else sum(sharing.counts))
        return run(*arrays, sharing=sharing, **more)

    running._runner._decode.run = watched
    have = serve(running, requests)
    assert sum(n >= 4 for n in told) > 20
    alone = engine(made[2], max_seqs=1, prefix_cache=False, depth=0)
    want = {r.id: serve(alone, [r])[r.id] for r in requests}
    assert len(unexplained(have, want)) <= (1 if made[0] == "gemma3" else 3)


def test_deterministic_bits_are_the_same_in_any_batch(made: tuple[str, Any, Path]):
    """Windows, groups and sinks in the mode whose promise is bits: alone, among others, in other chunks, after a hit."""
    if made[0] != "gemma3":
        pytest.skip("needs a model without experts: this is about windows and groups")
    requests = traffic(3, 12)
    want = serve(engine(made[2], deterministic=True, max_seqs=1, prefix_cache=False, depth=0), requests)
    have = serve(engine(made[2], deterministic=True, max_batch_tokens=80), requests)
    assert have == want
