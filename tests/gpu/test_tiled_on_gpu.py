"""fp8 weights with scales for tiles on a GPU: products at the shapes of an 8B model, experts, and a folder of such weights.

Needs an NVIDIA GPU with fp8 arithmetic; skipped elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
pytest.importorskip("triton", reason="needs the cuda extra")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs an NVIDIA GPU with fp8 arithmetic", allow_module_level=True)

from quire.backends.cases import NO_KV, ragged  # noqa: E402
from quire.backends.choose import open_backend  # noqa: E402
from quire.backends.cuda import experts as mixtures  # noqa: E402
from quire.backends.cuda import tiles  # noqa: E402
from quire.backends.cuda.kernels.tuning import TILED_ROWS  # noqa: E402
from quire.backends.cuda.ops import CudaKernels  # noqa: E402
from quire.backends.cuda.tiles import GroupedRows  # noqa: E402
from quire.backends.elementwise import SWIGLU  # noqa: E402
from quire.backends.torch import experts as plain  # noqa: E402
from quire.backends.torch.quantized import Tiled  # noqa: E402
from quire.engine.types import Request  # noqa: E402
from quire.layouts import Routing  # noqa: E402
from quire.models import load  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from quire.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.gpu import kit  # noqa: E402
from tests.gpu.kit import BF16_BOUND as BOUND  # noqa: E402
from tests.unit.backends.cuda.paged import error  # noqa: E402
from tests.unit.backends.cuda.test_tiled import in_groups  # noqa: E402
from tests.unit.models import folders  # noqa: E402
from tests.unit.models import mixtures as models  # noqa: E402
from tests.unit.models.test_quantized_folders import save  # noqa: E402

BF16 = torch.bfloat16
CUDA = torch.device("cuda")
MATRICES = {**{name: kit.MATRICES_8B[name] for name in ("qkv", "o", "gate_up", "down")}, "kv_a": (576, 7168)}
ROWS = (1, 3, 16, 17, 64, 65, 200, 256, 1100)


def weight(n: int, k: int, height: int = 128) -> Tiled:
    made = Tiled.empty(n, k, height, CUDA)
    made.fill(torch.randn(n, k, device=CUDA) * k**-0.5 * torch.rand(n, 1, device=CUDA).exp())
    return made


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    return in_groups(x).float() if x.shape[0] > TILED_ROWS else x.float()


@pytest.fixture(autouse=True)
def _float32_is_float32():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", MATRICES)
def test_products_of_an_8b(name: str):
    n, k = MATRICES[name]
    kernels, w = CudaKernels(NO_KV, CUDA, BF16), weight(n, k, 64 if name == "kv_a" else 128)
    exact = w.dequantize()
    for m in ROWS:
        x = torch.randn(m, k, device=CUDA).to(BF16)
        want = as_multiplied(x) @ exact.T
        if name == "gate_up":
            gate, up = want.chunk(2, 1)
            assert error(kernels.gated(x, w, None, SWIGLU), torch.nn.functional.silu(gate) * up) < 2 * BOUND, m
            continue
        bias = torch.randn(n, device=CUDA).to(BF16)
        assert error(kernels.linear(x, w, bias), want + bias.float()) < BOUND, m
        assert error(kernels.logits(x, w, None), want) < 2e-3, m  # not rounded: fp8 sums of 128 keep 13 bits or so
        parts = kernels.linear(x, w, None, loose=True)
        assert error(parts.float().sum(0) if parts.dim() == 3 else parts, want) < BOUND, m
        if name == "o":
            residual, gain = torch.randn(m, n, device=CUDA).to(BF16), torch.rand(n, device=CUDA) + 0.5
            total = residual.float() + want
            kept, made = kernels.linear_add_norm(x, w, None, residual.clone(), gain, 1e-5, soon=(w,))
            normed = torch.nn.functional.rms_norm(total, (n,), gain, 1e-5)
            assert error(kept, total) < BOUND, m
            if m <= TILED_ROWS:
                assert error(made, normed) < 2 * BOUND, m
                continue
            assert isinstance(made, GroupedRows) and error(made.plain(torch.float32), normed) < 0.04, m
            assert error(kernels.linear(made, w, None), made.plain(torch.float32) @ exact.T) < BOUND, m


def test_many_rows_go_through_the_library_where_it_takes_tiles(monkeypatch: pytest.MonkeyPatch):
    def takes() -> bool:
        w, x = weight(4096, 4096), GroupedRows.of(torch.randn(256, 4096, device=CUDA).to(BF16))
        try:
            tiles.library_product(x, w, torch.empty(256, 4096, device=CUDA, dtype=BF16))
        except (RuntimeError, ValueError):
            return False
        return True

    library = takes()
    assert tiles.library_takes(BF16, CUDA) == library
    calls, own = list[int](), tiles.library_product
    monkeypatch.setattr(tiles, "library_product", lambda x, w, y: (calls.append(y.shape[0]), own(x, w, y))[1])
    kernels = CudaKernels(NO_KV, CUDA, BF16)
    for n, k, known in ((1024, 512, True), (384, 2560, True), (512, 640, False), (128, 512, False), (200, 512, False)):
        calls.clear()
        w = weight(n, k)
        for m in (65, 66, 200):
            x = torch.randn(m, k, device=CUDA).to(BF16)
            assert error(kernels.linear(x, w, None), as_multiplied(x) @ w.dequantize().T) < BOUND, (n, k, m)
        assert calls == ([68, 68, 200] if known and library else []), (n, k)


@pytest.mark.parametrize("m", [3, 17, 65])
def test_what_is_no_number_stays_none(m: int):
    kernels, w = CudaKernels(NO_KV, CUDA, BF16), weight(256, 512)
    x = torch.randn(m, 512, device=CUDA).to(BF16)
    x[1, 7] = float("nan")
    y = kernels.linear(kernels.rms_norm(x, torch.ones(512, device=CUDA), 1e-5, soon=(w,)), w, None)
    assert y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any()


def test_large_bf16_rows():
    kernels, w = CudaKernels(NO_KV, CUDA, BF16), weight(4096, 4096)
    x = torch.randn(40, 4096, device=CUDA).to(BF16)
    x[1] *= 50_000.0
    for rows in (x[:4], x):
        got, want = kernels.linear(rows, w, None), as_multiplied(rows) @ w.dequantize().T
        assert all(error(got[row], want[row]) < BOUND for row in range(4))


@pytest.mark.parametrize("rows", [1, 16, 100, 1024, 4096])
@pytest.mark.parametrize("d, f", [(2048, 768), (512, 192)])
def test_experts(d: int, f: int, rows: int):
    """128 experts of which 8 are chosen, as in a 30B; and such as end within a tile."""
    count, top = 128, 8
    both, down = weight(count * 2 * f, d, 128 if f % 128 == 0 else 64), weight(count * d, f)
    m = plain.Mixture(both, down, None, None, count, None, Routing(top, renormalize=True), None)
    x, logits = torch.randn(rows, d, device=CUDA).to(BF16), torch.randn(rows, count, device=CUDA)
    chosen, share = plain.route(logits, m.routing, None)
    many = rows * top > 64 * count
    want = torch.zeros(rows, d, device=CUDA)
    seen = in_groups(x).float() if many else x.float()
    for e in range(count):
        at, place = (chosen == e).nonzero(as_tuple=True)
        inner = plain.activate(seen[at] @ both.rows(e * 2 * f, (e + 1) * 2 * f).dequantize().T, None).to(BF16)
        inner = in_groups(inner).float() if many and at.numel() else inner.float()
        want[at] += share[at, place, None] * (inner @ down.rows(e * d, (e + 1) * d).dequantize().T)
    assert error(mixtures.mix(x, logits, m), want) < 1e-2
    again = mixtures.mix(x, logits, m)
    assert torch.equal(again, mixtures.mix(x, logits, m))


def test_a_row_is_the_same_in_any_batch_of_its_class():
    """The choice of a kernel and of its parts depends on the class of rows alone, never on how many there are."""
    kernels, w = CudaKernels(NO_KV, CUDA, BF16), weight(4096, 4096)
    x = torch.randn(1100, 4096, device=CUDA).to(BF16)
    for few, many in ((1, 16), (3, 9), (17, 20), (33, 64)):
        assert torch.equal(kernels.linear(x[:many], w, None)[:few], kernels.linear(x[:few], w, None)), (few, many)


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_a_folder_in_tiles(kind: str, tmp_path: Path):
    """Logits of a prompt and of single rows, kept as fp8 and dequantized, against the same numbers in transformers."""
    sizes = {**SIZES, "moe_intermediate_size": 256} if kind == "qwen3moe" else SIZES
    exact = save((models if kind == "qwen3moe" else folders).build(kind, **sizes), tmp_path / "m", "fp8 tiles").cuda()
    tokens = np.random.default_rng(1).integers(0, 160, 90)
    with torch.no_grad():
        want = exact(torch.tensor(tokens, device="cuda")[None]).logits[0].float().cpu().numpy()
    near = {}
    for quantize in ("none", "keep"):
        model = load(open_checkpoint(tmp_path / "m"))
        backend: Any = open_backend("cuda", device="cuda", dtype="bfloat16", quantize=quantize)
        program = backend.compile(model.forward, kv=model.kv(8, 16), max_tokens=128, max_rows=128)
        for n in (5, 90):  # few rows are not rounded, many are, to three bits
            got = program.run(ragged([(0, n, list(range(8)))], tokens[:n]))
            apart = np.linalg.norm(got - want[:n], axis=1) / np.linalg.norm(want[:n], axis=1)
            near[quantize, n] = float(np.median(apart))  # a router may choose otherwise for a row or two
        if quantize == "keep":
            assert "FP8 in tiles" not in backend.told()[0], backend.told()
    assert max(near["none", 5], near["none", 90], near["keep", 5]) < 0.03 and near["keep", 90] < 0.15, near


def test_an_engine_over_tiles(tmp_path: Path):
    """Graphs, chunks and depth: every token nearly the best of the torch backend's logits over the same codes."""
    save(folders.build("llama", **SIZES), tmp_path / "m", "fp8 tiles")
    engine, info = kit.build(tmp_path / "m", dtype="bfloat16", quantize="keep", max_batch_tokens=96, context=256)
    assert any("a row or a tile has one scale" in line for line in info.decisions), info.decisions
    rng = np.random.default_rng(7)
    asked = [rng.integers(3, 160, n).tolist() for n in (5, 80, 130, 17, 64, 2)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    requests = [Request(id=str(at), tokens=tokens, sampling=sampling) for at, tokens in enumerate(asked)]
    heard = kit.serve(engine, requests, lambda event: event.tokens, together=len(requests))
    engine.close()
    model = load(open_checkpoint(tmp_path / "m"))
    oracle = open_backend("torch", device="cuda", dtype="float32", quantize="keep").compile(
        model.forward, kv=model.kv(16, 16), max_tokens=256, max_rows=256
    )
    for at, tokens in enumerate(asked):
        whole = tokens + heard[str(at)]
        seen = oracle.run(ragged([(0, len(whole), list(range(16)))], np.array(whole)))[len(tokens) - 1 : -1]
        for row, token in zip(seen, heard[str(at)], strict=True):
            assert row.max() - row[token] <= 0.6 * np.linalg.norm(row) / np.sqrt(row.size)
