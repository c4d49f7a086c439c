"""Quantized weights and caches on a GPU: products at the shapes of an 8B model, engines against the torch backend, and memory.

Needs an NVIDIA GPU with fp8 arithmetic; skipped elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
pytest.importorskip("triton", reason="needs the cuda extra")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs an NVIDIA GPU with fp8 arithmetic", allow_module_level=True)

from quire.backends.cases import NO_KV, ragged  # noqa: E402
from quire.backends.choose import open_backend  # noqa: E402
from quire.backends.cuda.ops import CudaKernels  # noqa: E402
from quire.backends.cuda.products import Rows, Unnormed  # noqa: E402
from quire.backends.elementwise import SWIGLU  # noqa: E402
from quire.backends.torch.quantized import E4M3, Int4, Scaled, encode  # noqa: E402
from quire.engine.types import Request  # noqa: E402
from quire.models.shapes import SHAPES, load_shape  # noqa: E402
from tests.gpu.kit import BF16_BOUND as BOUND  # noqa: E402
from tests.gpu.kit import MATRICES_8B as MATRICES  # noqa: E402
from tests.gpu.kit import write_shape  # noqa: E402
from tests.gpu.test_engine_on_gpu import differing, engine, serve, traffic  # noqa: E402
from tests.unit.backends.cuda.paged import error  # noqa: E402

BF16 = torch.bfloat16
CUDA = torch.device("cuda")
ROWS = (1, 3, 16, 17, 64, 65, 200, 1100)
KINDS = ("fp8", "int8", "int4")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shape(tmp_path_factory.mktemp("shape"))


def weight(kind: str, n: int, k: int) -> Scaled | Int4:
    made = (
        Int4.empty(n, k, 128, CUDA)
        if kind == "int4"
        else Scaled.empty(n, k, {"fp8": E4M3, "int8": torch.int8}[kind], CUDA)
    )
    for first in range(0, n, 8192):
        part = made.rows(first, min(n, first + 8192))
        part.fill(torch.randn(part.shape, device=CUDA) * k**-0.5)
    return made


def as_multiplied(x: torch.Tensor, kind: str) -> torch.Tensor:
    dtype = {"fp8": E4M3 if x.shape[0] > 16 else None, "int8": torch.int8 if x.shape[0] > 64 else None}.get(kind)
    if dtype is None:
        return x.float()
    codes, scale = encode(x, dtype)
    return codes.float() * scale[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MATRICES)
def test_products_of_an_8b(kind: str, name: str):
    torch.backends.cuda.matmul.allow_tf32 = False
    n, k = MATRICES[name]
    kernels, w = CudaKernels(NO_KV, CUDA, BF16), weight(kind, n, k)
    exact = w.dequantize()
    for m in ROWS if name != "head" else ROWS[:-1]:
        x = torch.randn(m, k, device=CUDA).to(BF16)
        want = as_multiplied(x, kind) @ exact.T
        if name == "head":
            assert error(kernels.logits(x, w, None), want) < BOUND, m
            continue
        if name == "gate_up":
            gate, up = want.chunk(2, 1)
            got = kernels.gated(x, w, None, SWIGLU)
            assert error(got, torch.nn.functional.silu(gate) * up) < 2 * BOUND, m
            continue
        bias = torch.randn(n, device=CUDA).to(BF16)
        assert error(kernels.linear(x, w, bias), want + bias.float()) < BOUND, m
        if m <= 64:
            parts = kernels.linear(x, w, None, loose=True)
            assert error(parts.float().sum(0) if parts.dim() == 3 else parts, want) < BOUND, m
        if name in ("o", "down"):
            residual, gain = torch.randn(m, n, device=CUDA).to(BF16), torch.rand(n, device=CUDA) + 0.5
            total = residual.float() + want
            reader = weight("fp8", 256, n)
            kept, made = kernels.linear_add_norm(x, w, None, residual.clone(), gain, 1e-5, soon=(reader,))
            assert error(kept, total) < BOUND
            normed = torch.nn.functional.rms_norm(total, (n,), gain, 1e-5)
            if isinstance(made, Unnormed):  # the product that reads one row takes the norm along
                assert m == 1
                assert error(kernels.linear(made, reader, None), normed @ reader.dequantize().T) < 2 * BOUND
                continue
            assert isinstance(made, Rows)
            assert error(made.codes.float() * made.scale[:, None], normed) < 0.04  # three bits: 2.6% rms
            codes = made.codes.float() * made.scale[:, None]
            assert error(kernels.linear(made, reader, None), codes @ reader.dequantize().T) < BOUND


@pytest.mark.parametrize("m", [1, 3, 16, 40, 64, 65, 300])
def test_four_bits_in_groups_of_32(m: int):
    """As files have them."""
    n, k = 6144, 4096
    w = Int4.empty(n, k, 32, CUDA)
    w.fill(torch.randn(n, k, device=CUDA) * k**-0.5)
    x = torch.randn(m, k, device=CUDA).to(BF16)
    kernels = CudaKernels(NO_KV, CUDA, BF16)
    assert error(kernels.linear(x, w, None), x.float() @ w.dequantize().T) < BOUND
    gate, up = (x.float() @ w.dequantize().T).chunk(2, 1)
    assert error(kernels.gated(x, w, None, SWIGLU), torch.nn.functional.silu(gate) * up) < 2 * BOUND


@pytest.mark.parametrize("m", [3, 17, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_none(kind: str, m: int):
    kernels, w = CudaKernels(NO_KV, CUDA, BF16), weight(kind, 256, 512)
    x = torch.randn(m, 512, device=CUDA).to(BF16)
    x[1, 7] = float("nan")
    y = kernels.linear(kernels.rms_norm(x, torch.ones(512, device=CUDA), 1e-5, soon=(w,)), w, None)
    assert y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any()


def test_large_bf16_rows_meet_fp8_weights():
    kernels, w = CudaKernels(NO_KV, CUDA, BF16), weight("fp8", 4096, 4096)
    x = torch.randn(4, 4096, device=CUDA).to(BF16)
    x[1] *= 50_000.0
    want = x.float() @ w.dequantize().T
    got = kernels.linear(x, w, None)
    for row in range(4):
        assert error(got[row], want[row]) < BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_exact_engines(shape: str, kind: str):
    """float32 rows are multiplied with dequantized matrices: the torch backend's tokens, with graphs and without."""
    requests = list(traffic(random.Random(3), 40))
    want = serve(engine(shape, backend="torch", quantize=kind), requests)
    assert len(differing(serve(engine(shape, quantize=kind), requests), want)) <= 2


@pytest.mark.parametrize(("kind", "kept"), [("fp8", "auto"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "auto")])
def test_bf16_engines(shape: str, kind: str, kept: str):
    """Greedy tokens of a loaded engine, each nearly the oracle's best, at either depth.

    Depths are not compared token by token: they put other rows together, and a batch's shape decides how its sums are rounded.
    """
    requests = list(traffic(random.Random(4), 24, greedy=True))
    options = {"dtype": "bfloat16", "quantize": kind, "kv_dtype": kept}
    made = engine(shape, **options)
    assert made[1].weight_bytes < 0.8 * engine(shape, dtype="bfloat16")[1].weight_bytes
    seen = oracle(shape, dtype="bfloat16", quantize=kind)
    noise = {"fp8": 0.1, "int8": 0.03, "int4": 0.03}[kind] + (0.0 if kept == "auto" else 0.05)
    for heard in (serve(made, requests), serve(engine(shape, depth=0, **options), requests)):
        assert_nearly_best(seen, requests, heard, noise)


@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_caches_of_codes(shape: str, kept: str):
    """float32 rows over a cache of codes: greedy tokens, each nearly the best over a cache that keeps all."""
    requests = list(traffic(random.Random(5), 40, greedy=True))
    seen = oracle(shape, dtype="float32")
    assert_nearly_best(seen, requests, serve(engine(shape, kv_dtype=kept), requests), 0.05)


def oracle(shape: str, **options: Any) -> Callable[[list[int]], np.ndarray]:
    """The logits of every token, by the torch backend, of the same random weights."""
    model: Any = load_shape(shape)[0]
    program = open_backend("torch", device="cuda", random=True, **options).compile(
        model.forward, kv=model.kv(16, 16), max_tokens=256, max_rows=256
    )
    return lambda tokens: program.run(ragged([(0, len(tokens), list(range(16)))], np.array(tokens)))


def assert_nearly_best(
    seen: Callable[[list[int]], np.ndarray], requests: list[Request], heard: dict[str, list[int]], noise: float
) -> None:
    """Each token is as good as the best one, to within six times the noise of its row."""
    for request in requests:
        rows = seen(request.tokens + heard[request.id])[len(request.tokens) - 1 : -1]
        for row, token in zip(rows, heard[request.id], strict=True):
            assert row.max() - row[token] <= 6 * noise * np.linalg.norm(row) / np.sqrt(row.size)


@pytest.mark.parametrize(("kind", "share"), [("fp8", 0.70), ("int8", 0.70), ("int4", 0.45)])
def test_the_model_is_never_whole_in_full_precision(kind: str, share: float):
    """A 1B shape, loaded: the peak stays under a share of its size in bf16."""
    model, nbytes = load_shape("shape:llama-3.2-1b")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backend: Any = open_backend("cuda", device="cuda", dtype="bfloat16", random=True, quantize=kind)
    backend.compile(model.forward, kv=model.kv(4, 16), max_tokens=64, max_rows=64)
    assert SHAPES["llama-3.2-1b"]["tie_word_embeddings"]
    assert torch.cuda.max_memory_allocated() - before < share * nbytes + (512 << 20)
    assert backend.weight_bytes < share * nbytes
