"""What a file has in four bits stays so on the device: experts of MXFP4 by themselves, integers where it is asked for. Whole programs
against the reference backend, and what is told of it at load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends.batch import Batch
from quire.backends.cases import NO_KV
from quire.backends.choose import open_backend
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.deterministic import DeterministicBackend
from quire.backends.ops import Ops, Tensor
from quire.backends.torch.quantized import tensors
from quire.backends.torch.words import IntWords, MxWords
from quire.formats import mxfp4
from quire.formats.hub._blocks import affine
from quire.layouts import Affine, Dense, Experts, Routing
from tests.unit.backends.cuda.paged import error

D, F, E, TOP = 192, 128, 4, 2


def packed(n: int, k: int, rng: np.random.Generator) -> Affine:
    """As a folder has it: codes and exponents apart."""
    codes = rng.integers(0, 256, (n, k // 32, 16), np.uint8)
    return mxfp4.join(codes, rng.integers(116, 124, (n, k // 32), np.uint8))


def integers(n: int, k: int, rng: np.random.Generator, group: int = 128) -> Affine:
    """As GPTQ has it: a scale and a zero for every so many columns."""
    codes = rng.integers(0, 256, (n, k // 2), np.uint8)
    scale = (rng.random((n, k // group)) * 0.01 + 0.002).astype(np.float16).astype(np.float32)
    zero = rng.integers(0, 16, (n, k // group))
    return affine("GPTQ", 4, (n, k), lambda a, b: codes[a:b], lambda a, b: scale[a:b], lambda a, b: zero[a:b], group)


def numbers(*shape: int, rng: np.random.Generator) -> Dense:
    return Dense(rng.standard_normal(shape).astype(np.float32), "f32")


class Mixed:
    """A mixture of packed experts behind a packed product."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.first = integers(D, 256, rng)
        gate, up, down = (tuple(packed(n, k, rng) for _ in range(E)) for n, k in ((F, D), (F, D), (D, F)))
        biases = [tuple(numbers(n, rng=rng) for _ in range(E)) for n in (F, F, D)]
        self.experts = Experts(gate, up, down, biases[0], biases[1], biases[2], limit=2.0)
        self.routing = Routing(TOP, renormalize=True)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        h = ops.linear(inputs["x"], self.first)
        return ops.moe(h, inputs["logits"], self.experts, self.routing)


def run(backend: Any, model: Mixed, rows: int) -> np.ndarray:
    rng = np.random.default_rng(rows)
    given = {"x": rng.standard_normal((rows, 256)), "logits": rng.standard_normal((rows, E))}
    program = backend.compile(model.forward, kv=NO_KV, max_tokens=32, max_rows=32, inputs={"x": 256, "logits": E})
    ids = np.zeros(rows, np.int32)
    batch = Batch(
        ids=ids, pos=np.arange(rows, dtype=np.int32), q_start=np.array([0, rows], np.int32),
        kv_len=np.array([rows], np.int32), pages=np.zeros((1, 1), np.int32), write=np.zeros(rows, np.int32),
        logit_rows=np.zeros(0, np.int32),
    )  # fmt: skip
    return program.run(batch, {name: x.astype(np.float32) for name, x in given.items()})


def backend_of(half: torch.dtype, kind: type[CudaBackend] = CudaBackend, quantize: str = "keep") -> CudaBackend:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return kind(device, str(half).removeprefix("torch."), quantize=quantize)


@pytest.mark.parametrize("rows", [1, 3, 19])
def test_a_program_over_packed_weights(rows: int, half: torch.dtype):
    model, backend = Mixed(), backend_of(half)
    want = torch.from_numpy(run(open_backend("reference"), model, rows))
    assert error(torch.from_numpy(run(backend, model, rows)), want) < (2e-2 if half == torch.bfloat16 else 3e-3)
    kinds = [type(held) for _, held in backend.weights._tensors.values()]
    assert kinds.count(MxWords) == 3 * E and kinds.count(IntWords) == 1
    assert backend.weights[model.first].group == 128  # type: ignore[union-attr]


def test_what_is_kept_packed_and_what_is_not_is_told(half: torch.dtype):
    model, backend = Mixed(), backend_of(half, quantize="none")
    run(backend, model, 1)
    kept, expanded = backend.told()
    assert kept.startswith(f"packed: {3 * E} matrices of MXFP4")
    assert sum(t.nbytes for t in tensors(backend.weights.stacked(model.experts.down))) == D * E * F * 17 // 32
    assert expanded.startswith("expanded: 1 matrices of GPTQ") and "--quantize keep" in expanded


def test_bits_that_no_batch_may_change_are_not_packed(half: torch.dtype):
    """Its kernels know one order of sums, which these have not; so it is said what that takes."""
    model, backend = Mixed(), backend_of(half, DeterministicBackend, "none")
    want = torch.from_numpy(run(open_backend("reference"), model, 3))
    assert error(torch.from_numpy(run(backend, model, 3)), want) < (2e-2 if half == torch.bfloat16 else 3e-3)
    assert [line.split(":")[0] for line in backend.told()] == ["expanded", "expanded"]
    assert "of MXFP4" in "".join(backend.told())


def test_experts_that_are_not_whole_tiles_are_expanded(half: torch.dtype):
    rng = np.random.default_rng(1)
    model, backend = Mixed(), backend_of(half, quantize="none")
    gate, up, down = (tuple(packed(n, k, rng) for _ in range(E)) for n, k in ((96, D), (96, D), (D, 96)))
    model.experts = Experts(gate, up, down)
    want = torch.from_numpy(run(open_backend("reference"), model, 3))
    assert error(torch.from_numpy(run(backend, model, 3)), want) < (2e-2 if half == torch.bfloat16 else 3e-3)
    assert any(line.startswith(f"expanded: {2 * E} matrices of MXFP4") for line in backend.told())
