"""A model with recurrent layers on a GPU: transformers' log probabilities, graphs, prefix hits, preemption, and equal bits.

Needs an NVIDIA GPU and transformers, which makes the model (a tiny Qwen3-Next: delta nets, gated attention, experts); skipped
elsewhere. Its float32 runs keep float16 keys and values. Launches of another shape round differently, so a token may differ at a tie, and only
at one; with --deterministic nothing may differ.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("transformers", reason="needs transformers, which makes the model: pip install quire[test]")

from quire.engine.construction import generating as build_writing  # noqa: E402
from quire.engine.construction.sizes import resolve_sizes  # noqa: E402
from quire.observe.errors import Unsupported  # noqa: E402
from tests.gpu.grouped import (  # noqa: E402
    check_again,
    check_log_probabilities,
    engine,
    serve,
    tokens,
    traffic,
    unexplained,
)
from tests.unit.engine.test_engine_states import Served  # noqa: E402
from tests.unit.models import folders, mixtures  # noqa: E402
from tests.unit.models.programs import Loaded  # noqa: E402

DETERMINISTIC = {"device": "cuda", "deterministic": True, "kv_memory": 64 << 20}
TIES = 3  # requests that may differ by more than a tie: a router that chooses another expert changes more


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The transformers model, and where it lies."""
    model = mixtures.build("qwen3next")
    return model, folders.save(model, tmp_path_factory.mktemp("hybrid") / "m")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_transformers(made: tuple[Any, Path], dtype: str):
    """Chunks that cross pages, rows one by one, and what another sequence's state is gone on from. Of few experts all are
    chosen, so that no router decides by rounding. In half floats as near as plain torch comes, which rounds as often."""
    model = mixtures.build("qwen3next", num_experts=3)
    path = folders.save(model, made[1].parent / f"few-{dtype}")
    loaded = Loaded(path, "cuda", most=640, device="cuda", dtype=dtype)
    prompt = np.random.default_rng(1).integers(0, 160, 300).tolist()
    want = mixtures.exact_logits(model, prompt)
    bound = 3e-3
    if dtype != "float32":
        plain = Loaded(path, "torch", most=640, device="cuda", dtype=dtype).logits(prompt, 300)
        bound = 1.25 * np.linalg.norm(plain - want) / np.linalg.norm(want)
        assert bound < 0.15
    for chunk in (300, 64, 33, 5):
        got = loaded.logits(prompt, chunk)
        assert np.linalg.norm(got - want) < bound * np.linalg.norm(want), chunk
    for chunk in (23, 1):
        got = loaded.after_hit(prompt, 48, chunk)
        assert np.linalg.norm(got - want[48:]) < bound * np.linalg.norm(want[48:]), chunk


def test_states_have_a_pool_and_decoding_is_captured(made: tuple[Any, Path]):
    running = engine(made[1])
    tree, program = running._scheduler.tree, running._runner._program
    assert [type(g).__name__ for g in tree.groups] == ["Full", "State"]
    assert program.kernels.states.pool(1, 0).shape[0] == tree.pools[1].size
    assert len(running._runner._decode.ladder.graphs) >= 4 and running._runner._prefill.ladder.graphs
    running.close()


def test_graphs_and_depth_change_nothing(made: tuple[Any, Path]):
    requests = traffic(1, 40)
    want = serve(engine(made[1], depth=0), requests)
    for depth in (1, 2):
        assert tokens(serve(engine(made[1], depth=depth), requests)) == tokens(want)
    requests = traffic(2, 30, greedy=True)
    want = serve(engine(made[1]), requests)
    eager = engine(made[1])
    eager._runner._decode = eager._runner._prefill = None
    assert len(unexplained(serve(eager, requests), want)) <= TIES
    plain = engine(made[1], backend="torch")
    assert len(unexplained(serve(plain, requests), want)) <= TIES


@pytest.mark.parametrize("chunk", [48, 512])
def test_log_probabilities_are_those_of_transformers(made: tuple[Any, Path], chunk: int):
    """Prompts in chunks and in one step, then a hundred tokens from graphs."""
    model, path = made
    check_log_probabilities(path, chunk, (5, 90, 300, 301), lambda tokens: mixtures.exact_logits(model, tokens))


def test_a_prefix_is_gone_on_from_a_state(made: tuple[Any, Path]):
    """The same prompt again: found up to its last page, and the tokens are those of the first time."""
    assert check_again(made[1]) == [0, 288, 288]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request: pytest.FixtureRequest, made: tuple[Any, Path]) -> tuple[str, Any]:
    """Each request on its own, cold, its prompt in one piece."""
    options = {**DETERMINISTIC, "dtype": request.param}
    return request.param, Served(made[1], "cuda", at_once=1, prefix_cache=False, max_batch_tokens=256, **options).heard


@pytest.mark.parametrize("options", [{"max_batch_tokens": 7, "depth": 0}, {"depth": 1, "repeat": 2}], ids=str)
def test_deterministic_bits_are_the_same_whatever_happens(
    made: tuple[Any, Path], alone: tuple[str, Any], options: dict[str, Any]
):
    """In any batch and chunk, and from a state that another sequence left."""
    served = Served(made[1], "cuda", **{**DETERMINISTIC, "dtype": alone[0], **options})
    assert served.heard == alone[1]
    assert served.tree.hits > 0


def test_deterministic_bits_are_the_same_after_a_preemption(
    made: tuple[Any, Path], alone: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        build_writing, "resolve_sizes", lambda *args: replace(resolve_sizes(*args), groups=(12, 12), context=192)
    )
    served = Served(made[1], "cuda", at_once=4, depth=1, **{**DETERMINISTIC, "dtype": alone[0]})
    assert served.heard == alone[1]
    assert served.stats.preemptions > 0


def test_guesses_are_refused(made: tuple[Any, Path]):
    with pytest.raises(Unsupported, match="cannot be taken back"):
        engine(made[1], speculate="ngram")


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
def test_quantized_weights(made: tuple[Any, Path], quantize: str):
    """States stay float32, and what is said is about as likely as before."""
    model = mixtures.build("qwen3next", linear_num_value_heads=16, linear_num_key_heads=4)
    path = folders.save(model, made[1].parent / quantize)
    heard = serve(engine(path, dtype="bfloat16", quantize=quantize), traffic(3, 8, greedy=True))
    want = serve(engine(path, dtype="bfloat16"), traffic(3, 8, greedy=True))
    first = [abs(heard[name][0].logprob - want[name][0].logprob) for name in want]
    assert np.median(first) < 0.5
