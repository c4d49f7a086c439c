"""Rows that a program keeps, under captured graphs: the same bits as where every step is launched as it comes.

Needs an NVIDIA GPU; skipped elsewhere. In the mode whose promise is bits: prompts, decode rows and drafts that are verified.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from quire.backends.choose import open_backend  # noqa: E402
from quire.backends.ops import KV  # noqa: E402
from quire.backends.outputs import Hidden  # noqa: E402
from quire.runner.device.runner import DeviceRunner  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from quire.runner.plan import Plan, Work  # noqa: E402
from tests.unit.runner.test_speculate import Told  # noqa: E402
from tests.unit.runner.tiny_llama import KV_HEADS, LAYERS, TinyLlama, V, decode, known, opening  # noqa: E402

MODEL, POOL = TinyLlama(head_dim=16), KV(LAYERS, 40, 16, KV_HEADS, 16)
KEEP = (Hidden(0), Hidden(1), Hidden(LAYERS), Hidden(1, taken=True))
GREEDY = SamplingParams(temperature=0.0)


def runner(keep: tuple[Hidden, ...], *, padded: bool | None, proposer: Any = None) -> DeviceRunner:
    backend = open_backend("cuda", device="cuda", dtype="bfloat16", deterministic=True)
    program: Any = backend.compile(MODEL.forward, kv=POOL, max_tokens=64, max_rows=40, keep=keep)
    return DeviceRunner(
        program, kv=POOL, vocab_size=V, max_seqs=8, max_tokens=64, max_context=64, max_rows=40,
        padded=padded, proposer=proposer, drafts=4,
    )  # fmt: skip


def steps(made: DeviceRunner, plans: list[Plan]) -> list[tuple[dict[Hidden, Any], list[list[int]]]]:
    """What each step kept, and the tokens that came."""
    found = []
    for plan in plans:
        pending = made.forward(plan)
        kept = {which: rows.float().cpu().numpy() for which, rows in pending.hidden.items()}
        found.append((kept, [row.tokens for row in made.sample(pending).result().rows]))
    return found


def prompts(*lengths: int) -> Plan:
    rng = np.random.default_rng(4)
    said = [rng.integers(4, V, n).tolist() for n in lengths]
    work = [known(i, own, 0, sample=True, pages=[3 * i, 3 * i + 1, 3 * i + 2]) for i, own in enumerate(said)]
    return Plan(step=0, work=work, opened=[opening(i, own, GREEDY) for i, own in enumerate(said)])


@pytest.mark.parametrize("drafts", [False, True], ids=["decode", "verify"])
def test_graphs_keep_what_steps_that_are_launched_keep(drafts: bool):
    if drafts:
        plans = [prompts(20, 5)]
        guess = [Work(key=i, epoch=0, slot=i, n=5, start=-1, tokens=None, drafts=4, sample=True) for i in range(2)]
        plans.append(Plan(step=1, work=guess))
    else:
        plans = [prompts(20, 5, 9), *(Plan(step=n, work=[decode(i) for i in range(3)]) for n in range(1, 12))]
    results = []
    for keep, padded in ((KEEP, None), (KEEP, False), ((), None)):
        proposer = Told([5, 6, 7, 8], [8, 9, 10, 11]) if drafts else None
        made = runner(keep, padded=padded, proposer=proposer)
        if padded is None:
            assert made._decode is not None and made._decode.ladder.graphs
        results.append(steps(made, plans))
    graphs, eager, without = results
    for (a, tokens), (b, same), (nothing, plain) in zip(graphs, eager, without, strict=True):
        assert tokens == same == plain and not nothing
        assert a.keys() == b.keys() == set(KEEP)
        for which in KEEP:
            np.testing.assert_array_equal(a[which], b[which])
            assert a[which].any()
