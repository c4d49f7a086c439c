"""Folders of safetensors on a GPU: weights that were fed in chunks are those of the file, and continuations transformers'.

Needs an NVIDIA GPU; skipped elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from quire.backends.detect import detect  # noqa: E402
from quire.backends.torch.feed import Feed  # noqa: E402
from quire.config import EngineConfig, Environment  # noqa: E402
from quire.engine.construction.build import build_engine  # noqa: E402
from quire.engine.types import Request  # noqa: E402
from quire.layouts import Dense  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from quire.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.gpu import kit  # noqa: E402
from tests.unit.models import folders  # noqa: E402

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}


def test_auto_is_the_gpu():
    assert detect().backend == "cuda"


@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_fed_numbers_are_the_files(chunk: int):
    rng = np.random.default_rng(1)
    layouts = [Dense(rng.integers(0, 1 << 15, (n, 64)).astype("<u2"), "bf16") for n in (1, 300, 7, 2000, 64)]
    device = torch.device("cuda")
    with Feed(layouts, device, chunk=chunk, buffers=3) as feed:
        for layout in layouts:
            into = torch.empty(layout.shape, dtype=torch.bfloat16, device=device)
            for start, stop, rows in feed.rows(layout):
                into[start:stop] = rows
            np.testing.assert_array_equal(into.view(torch.int16).cpu().numpy().view("<u2"), layout.data)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "smollm3"])
def test_greedy_continuations_are_those_of_transformers(kind: str, tmp_path: Path):
    """In float32, so that rounding decides nothing; cold and with prefix hits, graphs and eager steps."""
    more = {"sliding_window": None} if kind == "mistral" else {}
    model = folders.build(kind, **SIZES, **more)
    folders.save(model, tmp_path / "m", shard="300KB")
    model = model.cuda()
    auto = {"backend": "auto", "device": "auto"}
    engine, info = kit.build(tmp_path / "m", max_seqs=4, max_batch_tokens=64, context=256, **auto)
    assert any(line.startswith("device: cuda (") for line in info.decisions)
    rng = np.random.default_rng(4)
    shared = rng.integers(3, 160, 50).tolist()
    prompts = [shared, shared + rng.integers(3, 160, 30).tolist(), rng.integers(3, 160, 5).tolist()]
    try:
        for n, prompt in enumerate([*prompts, *prompts]):
            request = Request(id=str(n), tokens=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=24))
            heard = kit.serve(engine, [request], lambda event: event.tokens)[request.id]
            with torch.no_grad():
                want = model.generate(
                    torch.tensor([prompt], device="cuda"),
                    max_new_tokens=24,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            assert heard == want[0, len(prompt) :].tolist(), (kind, n)
    finally:
        engine.close()


def test_a_loaded_model_leaves_no_copy_in_host_memory(tmp_path: Path):
    """The file's pages are given back as tensors arrive."""
    model = folders.build(
        "llama", hidden_size=1024, intermediate_size=4096, num_attention_heads=16, head_dim=64, num_hidden_layers=8
    )
    folders.save(model, tmp_path / "m", dtype=torch.bfloat16)
    size = sum(info.nbytes for info in open_checkpoint(tmp_path / "m").tensors.values())
    config = EngineConfig(path=str(tmp_path / "m"), max_seqs=2, max_batch_tokens=32, context=64, kv_memory=16 << 20)
    engine, _ = build_engine(config, Environment(home=tmp_path))
    try:
        maps = Path("/proc/self/smaps").read_text().split("model.safetensors")[1:]
        resident = sum(next(int(s.split()[1]) for s in m.splitlines() if s.startswith("Rss:")) << 10 for m in maps)
        assert resident < size // 4, (resident, size)
    finally:
        engine.close()
