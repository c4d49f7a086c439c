"""Every dense family against transformers, from a folder and from a GGUF of the same weights, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.weights.checkpoint import open_checkpoint
from tests.unit.models import families, folders
from tests.unit.models.families import FAMILIES, WITH_GGUF
from tests.unit.models.programs import Loaded

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the independent implementation")

BACKENDS = ["reference", "native", "torch"]


def exact_logits(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], share: float = 4e-3) -> None:
    """Within a share of what logits vary by: all that is left is rounding keys and values to float16."""
    assert got.shape == want.shape
    assert np.abs(got - want).max() < share * want.std(), f"{np.abs(got - want).max() / want.std():.1e}"


@pytest.fixture(scope="module", params=FAMILIES)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Any]]:
    """A family, its model's folder, and what transformers says of some prompts: once for all backends."""
    name, rng = request.param, np.random.default_rng(1)
    model = families.build(name)
    path = folders.save(model, tmp_path_factory.mktemp("family") / "m")
    prompts = [(rng.integers(0, 160, length).tolist(), chunk) for length, chunk in FAMILIES[name].lengths]
    return name, path, [(tokens, chunk, exact_logits(model, tokens)) for tokens, chunk in prompts]


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_logits_equal(told: tuple[str, Path, list[Any]], backend: str):
    """Prompts that cross pages, chunks and windows; then one behind a prefix that another sequence has left."""
    name, path, prompts = told
    loaded = Loaded(path, backend, most=320, context=FAMILIES[name].context)
    for tokens, chunk, want in prompts:
        close(loaded.logits(tokens, chunk), want)
    shared = min(48, (len(tokens) - 1) // 16 * 16)
    close(loaded.after_hit(tokens, shared, 23), want[shared:])
    assert want.std() > 0.1  # or nothing would be seen of an error


@pytest.mark.parametrize("name", WITH_GGUF)
def test_a_gguf_of_the_same_weights_gives_the_same_logits(name: str, tmp_path: Path):
    """On both backends of a CPU, past pages, chunks and windows, and behind a prefix that another sequence has left."""
    family, model = FAMILIES[name], families.build(name, seed=1)
    path = families.write_gguf(name, model, tmp_path / "m.gguf")
    tokens = np.random.default_rng(3).integers(0, 160, family.lengths[-1][0]).tolist()
    want, shared = exact_logits(model, tokens), min(48, (len(tokens) - 1) // 16 * 16)
    for backend in ("reference", "native"):
        loaded = Loaded(path, backend, most=256, context=family.context)
        close(loaded.logits(tokens, 33), want)
        close(loaded.after_hit(tokens, shared, 23), want[shared:])


@pytest.mark.parametrize(
    "name",
    [
        "qwen2, late windows",
        "qwen3, late windows",
        "smollm3, windows",
        "mistral, window",
        "gemma2",
        "gemma3",
        "cohere2",
    ],
)
def test_files_from_before_layer_types_have_the_same_windows(name: str, tmp_path: Path):
    """And of Gemma 3, from before it had two sets of rope parameters."""
    path = folders.save(families.build(name), tmp_path / "m")
    now: Any = models.load(open_checkpoint(path))
    old: dict[str, Any] = {"layer_types": None}
    if name == "gemma3":
        rope = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
        old |= {"rope_parameters": None, **rope}
    folders.edit(path / "config.json", **old)
    before: Any = models.load(open_checkpoint(path))
    assert [w.window for w in before.layers] == [w.window for w in now.layers]
    assert {w.window for w in now.layers} >= {families.WINDOW}
    if name == "gemma3":
        for a, b in zip(before.layers, now.layers, strict=True):
            np.testing.assert_array_equal(a.rope.frequencies, b.rope.frequencies)


def test_every_family_here_is_tried():
    """A dense family that is added without a row in FAMILIES fails here."""
    tried = {f.arch for f in FAMILIES.values()} | {"llama"}
    kinds = {families.CAUSAL.get(f.kind, f.kind) for f in FAMILIES.values()}
    modules = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "granite", "olmo2", "cohere", "glm4")
    for module in models.families():
        if module.__name__.rsplit(".", 1)[1] in modules:
            assert set(module.ARCHS) <= tried
            unknown = {"LlamaForCausalLM", "LLaMAForCausalLM", "Gemma3ForConditionalGeneration", "Qwen3Model"}
            unknown |= {"Qwen3ForSequenceClassification"}  # tests/unit/chat/test_reranker.py
            assert {n.removesuffix("ForCausalLM") for n in set(module.HF_ARCHS) - unknown} <= kinds


@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_greedy_continuations_are_those_of_transformers(name: str, tmp_path: Path):
    """Through the engine, where windows slide on while tokens are made; cold and with prefix hits, in small chunks."""
    from quire.config import EngineConfig, Environment
    from quire.engine.construction.build import build_engine
    from quire.engine.types import Request
    from quire.runner.params import SamplingParams

    model = families.build(name)
    path = folders.save(model, tmp_path / "m")
    rng = np.random.default_rng(4)
    shared = rng.integers(3, 160, 40).tolist()
    prompts = [shared, shared + rng.integers(3, 160, 20).tolist(), shared[:35] + rng.integers(3, 160, 9).tolist()]
    config = EngineConfig(path=str(path), backend="reference", max_seqs=4, max_batch_tokens=24, context=256)
    engine, _ = build_engine(config, Environment(home=tmp_path / "home", threads=2))
    cached = []
    try:
        for n, prompt in enumerate(prompts):
            engine.add(Request(id=str(n), tokens=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=6)))
            heard: list[int] = []
            while engine.busy:
                for event in engine.step():
                    assert event.error is None, event.error
                    heard += event.tokens
                    if event.receipt is not None:
                        cached.append(event.receipt.cached_tokens)
            whole = list(prompt)
            for _ in range(6):  # one forward over everything each time: no cache of theirs is trusted
                whole.append(int(exact_logits(model, whole)[-1].argmax()))
            assert heard == whole[len(prompt) :], n
    finally:
        engine.close()
    assert cached[0] == 0 and all(n > 0 for n in cached[1:])


@pytest.mark.parametrize("name", ["gemma3", "phi3, long factors", "cohere, norms by head", "glm4", "qwen3"])
def test_a_shape_without_weights_is_that_of_the_file(name: str, tmp_path: Path):
    from quire.models.shapes import load_shape

    path = folders.save(families.build(name), tmp_path / "m")
    checkpoint = open_checkpoint(path)
    model, nbytes = load_shape(str(path))
    elements = sum(int(np.prod(info.shape)) for info in checkpoint.tensors.values())
    assert nbytes == 2 * elements and model.config == models.load(checkpoint).config
