"""An engine over a tiny Qwen3-Next on the CUDA backend, its steps padded as captured ones are: transformers' tokens, hits too.

In Triton's interpreter where there is no GPU, which is slow: two layers, no experts. tests/gpu/test_hybrid_on_gpu.py has the rest.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.types import Request
from quire.runner.device import runner as device_runner
from quire.runner.params import SamplingParams

pytest.importorskip("transformers", reason="needs transformers, which makes the model: pip install quire[test]")

from tests.unit.models import folders, mixtures

GPU = torch.cuda.is_available()


@pytest.mark.large
def test_padded_steps_continue_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner = functools.partial(device_runner.DeviceRunner, padded=True)
    monkeypatch.setattr(device_runner, "DeviceRunner", runner)
    model = mixtures.build("qwen3next", num_hidden_layers=2, full_attention_interval=2, mlp_only_layers=[0, 1])
    config = EngineConfig(
        path=str(folders.save(model, tmp_path / "m")), backend="cuda", device="cuda" if GPU else "cpu", dtype="float32",
        max_seqs=3, max_batch_tokens=40, context=128, kv_memory=4 << 20,
    )  # fmt: skip
    engine, _ = build_engine(config, Environment(home=tmp_path / "home"))
    rng = np.random.default_rng(4)
    shared = rng.integers(3, 160, 35).tolist()
    prompts = [shared, shared + rng.integers(3, 160, 20).tolist(), rng.integers(3, 160, 3).tolist(), shared]
    heard: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=str(i), tokens=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=4)))
        while engine.busy if i in (0, 3) else i == 2 and engine.busy:  # the second and the third are served together
            for event in engine.step():
                assert event.error is None, event.error
                heard.setdefault(event.id, []).extend(event.tokens)
                if event.receipt is not None:
                    cached[event.id] = event.receipt.cached_tokens
    engine.close()
    for i, prompt in enumerate(prompts):
        assert heard[str(i)] == mixtures.continued(model, prompt, heard[str(i)]), i
    assert cached == {"0": 0, "1": 32, "2": 0, "3": 32}
