"""LoRA adapters on a GPU against transformers with the adapter added into its weights: products, and an engine with graphs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install quire[test]")
pytest.importorskip("triton", reason="needs triton: pip install quire[test]")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.engine.types import Request  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from tests.gpu import kit  # noqa: E402
from tests.unit.models import folders, tiny  # noqa: E402
from tests.unit.models.adapters import EVERY, Adapted  # noqa: E402

TOKENS = np.random.default_rng(5).integers(3, 120, 45).tolist()


def save(model: Any, path: Path, rank: int, seed: int) -> Any:
    """A random adapter in PEFT's layout, written by hand; the model with it added to its weights."""
    from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]

    path.mkdir()
    made, parts = copy.deepcopy(model), {}
    numbers = torch.Generator().manual_seed(seed)
    for name, module in made.named_modules():
        if name.rsplit(".", 1)[-1] in EVERY:
            a = torch.randn(rank, module.in_features, generator=numbers) * 0.12
            b = torch.randn(module.out_features, rank, generator=numbers) * 0.12
            parts[f"base_model.model.{name}.lora_A.weight"], parts[f"base_model.model.{name}.lora_B.weight"] = a, b
            with torch.no_grad():
                module.weight += 2.0 * b @ a
    save_file(parts, str(path / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(EVERY), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder with a model `m` and adapters `a` and `b`; the model without, with the first, with the second."""
    path = tmp_path_factory.mktemp("lora")
    model = tiny.build(num_hidden_layers=2)
    folders.save(model, path / "m")
    return path, [model, save(model, path / "a", 4, 1), save(model, path / "b", 12, 2)]


def exact(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.mark.parametrize(("dtype", "share"), [("float32", 8e-3), ("bfloat16", 6e-2)])
def test_logits(made: tuple[Path, list[Any]], dtype: str, share: float):
    path, models = made
    loaded = Adapted(path / "m", [path / "a", path / "b"], "cuda", device="cuda", dtype=dtype)
    for slot, model in zip((-1, 0, 1), models, strict=True):
        want = exact(model, TOKENS)
        for chunk in (None, 7):
            got = loaded.logits(TOKENS, slot) if chunk is None else loaded.logits(TOKENS, slot, chunk=chunk)
            assert np.linalg.norm(got - want) < share * np.linalg.norm(want)


def engine_of(path: Path, loras: tuple[str, ...], **options: Any) -> Any:
    named = tuple((name, str(path / name)) for name in loras)
    options = {"context": 256, "runtime_lora": True, "max_lora_rank": 16} | options
    return kit.build(path / "m", loras=named, **options)[0]


def serve(engine: Any, requests: list[Request]) -> dict[str, list[Any]]:
    """The log probabilities of every request's tokens."""
    return kit.serve(engine, requests, lambda event: event.logprobs, together=len(requests))


SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)


def asked(names: list[str]) -> list[Request]:
    return [
        Request(id=f"{i}:{name}", tokens=TOKENS[: 20 + i], sampling=SAMPLING, adapter=name)
        for i, name in enumerate(names)
    ]


def check(heard: dict[str, list[Any]], models: dict[str, Any]) -> None:
    """Every token is the best one of the model that it was asked of, or as good."""
    for i, told in heard.items():
        place, name = i.split(":")
        prompt, said = TOKENS[: 20 + int(place)], [p.token for p in told]
        logits = exact(models[name], prompt + said)[len(prompt) - 1 : -1]
        best = logits.max(1) - logits[np.arange(len(logits)), said]
        assert best.max() < 2e-2 * logits.std(), i


def eager(engine: Any) -> list[int]:
    """Rows of the steps that are launched as they come, from now on."""
    runner, seen = engine._runner, []
    launch = runner._eager

    def watched(pending: Any, batch: Any, *more: Any) -> Any:
        seen.append(batch.tokens)
        return launch(pending, batch, *more)

    runner._eager = watched
    return seen


def test_an_engine_with_graphs_mixes_them(made: tuple[Path, list[Any]]):
    """Steps with adapters and without are all replayed, and continue as transformers does."""
    path, models = made
    engine = engine_of(path, ("a", "b"))
    seen = eager(engine)
    heard = serve(engine, asked(["", "a", "b", "a", "", "b"])) | serve(engine, asked([""]))
    engine.close()
    check(heard, dict(zip(("", "a", "b"), models, strict=True)))
    assert seen == []


def test_an_adapter_is_loaded_without_capturing_anew(made: tuple[Path, list[Any]]):
    """Graphs that were captured with empty slots serve what is loaded later, and what takes its place."""
    path, models = made
    engine = engine_of(path, ())
    graphs = dict(engine._runner._decode.ladder.graphs)
    seen, known = eager(engine), dict(zip(("", "a", "b"), models, strict=True))
    engine.hooks.load("x", str(path / "a"))
    check(serve(engine, asked(["", "x", "x"])), {**known, "x": models[1]})
    engine.hooks.unload("x")
    engine.hooks.load("x", str(path / "b"))
    engine.hooks.load("a", str(path / "a"))
    check(serve(engine, asked(["x", "a", "", "x"])), {**known, "x": models[2]})
    assert engine._runner._decode.ladder.graphs == graphs and seen == []
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_are_the_same_in_any_batch(made: tuple[Path, list[Any]], dtype: str):
    """Alone, eagerly and cold; and all of them together, from graphs."""
    path, _ = made
    requests = asked(["", "a", "b", "a", "", "b"])
    alone = engine_of(path, ("a", "b"), deterministic=True, dtype=dtype, prefix_cache=False, depth=0)
    alone._runner._decode = alone._runner._prefill = None
    want = {name: told for request in requests for name, told in serve(alone, [request]).items()}
    assert serve(engine_of(path, ("a", "b"), deterministic=True, dtype=dtype), requests) == want
