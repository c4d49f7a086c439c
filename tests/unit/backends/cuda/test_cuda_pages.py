"""Pages that are moved between programs of the CUDA backend, for what its own kernels keep in them.

Compiled on a GPU, where copies are on streams of their own; in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends import cases
from quire.backends.cases import groups
from quire.backends.choose import open_backend
from tests.unit.backends.moving import check_moves, page_cases

GPU = torch.cuda.is_available()
SMALL: dict[str, Any] = {} if GPU else {"turns": groups.FEW, "heads": 2, "kv_heads": 1, "dim": 16}
CASES = {case.name: case for case in page_cases(["f16", "int8", "fp8"], **SMALL)}
FAST = [name for name in CASES if GPU or "groups" in name or "conv" in name]  # in the interpreter


def backend(**options: Any) -> Any:
    return open_backend("cuda", device="cuda" if GPU else "cpu", dtype="float32", **options)


@pytest.mark.parametrize("name", FAST)
def test_pages_that_were_moved_give_the_same_bits(name: str):
    results = check_moves(backend().compile, CASES[name])
    assert all(np.isfinite(x).all() and x.any() for x in results)


def test_what_is_no_number_in_other_pages_stays_there():
    case = groups.grouped((0, 20), "f16", np.random.default_rng(5), **SMALL)
    results = check_moves(backend().compile, case, bits=0xFF)
    assert all(np.isfinite(x).all() for x in results)


def test_torch_and_cuda_lay_pages_out_alike():
    """What one of them keeps, the other can go on from."""
    case: cases.Case = CASES["attention-groups-0-40-f16"]
    limits = partial(dict, kv=case.kv, inputs=case.widths, max_tokens=128, max_rows=128)
    plain = open_backend("torch", device="cuda" if GPU else "cpu", dtype="float32").compile(case.forward, **limits())
    own = backend().compile(case.forward, **limits())
    step = case.steps[0]
    plain.run(step.batch, step.inputs)
    own.run(step.batch, step.inputs)
    for g, kv in enumerate(case.kv.groups):
        assert plain.page_layout(g) == own.page_layout(g)
        a, b = (p.read_pages(g, range(kv.pages)).wait() for p in (plain, own))
        np.testing.assert_array_equal(a, b)
