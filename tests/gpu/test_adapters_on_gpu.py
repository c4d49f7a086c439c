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

from quire.config import EngineConfig, Environment  # noqa: E402
from quire.engine.build import build_engine  # noqa: E402
from quire.engine.types import Request  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
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


def test_an_engine_with_graphs_mixes_them(made: tuple[Path, list[Any]], tmp_path: Path):
    """Plain steps are replayed, steps with adapters are not: both continue as transformers does."""
    path, models = made
    config = EngineConfig(
        path=str(path / "m"),
        backend="cuda",
        device="cuda",
        dtype="float32",
        loras=(("a", str(path / "a")), ("b", str(path / "b"))),
        max_seqs=8,
        max_batch_tokens=128,
        context=256,
        kv_memory=1 << 26,
    )
    engine, _ = build_engine(config, Environment(home=tmp_path))
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    names = ["", "a", "b", "a", "", "b"]
    for i, adapter in enumerate(names):
        engine.add(Request(id=str(i), tokens=TOKENS[: 20 + i], sampling=sampling, adapter=adapter))
    heard: dict[str, list[int]] = {}
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            heard.setdefault(event.id, []).extend(event.tokens)
    engine.add(Request(id="later", tokens=TOKENS, sampling=sampling))
    while engine.busy:
        for event in engine.step():
            heard.setdefault(event.id, []).extend(event.tokens)
    engine.close()
    for i, adapter in [*enumerate(names), ("later", "")]:
        model = models[["", "a", "b"].index(adapter)]
        tokens = TOKENS if i == "later" else TOKENS[: 20 + int(i)]
        logits = exact(model, tokens + heard[str(i)])[len(tokens) - 1 : -1]
        best = logits.max(1) - logits[np.arange(len(logits)), heard[str(i)]]
        assert best.max() < 2e-2 * logits.std(), (i, adapter)
