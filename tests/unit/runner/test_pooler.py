"""Vectors beside tokens in the host's runner: whose row is whose, and that nobody samples for a vector."""

from __future__ import annotations

import numpy as np

from quire.backends.ops import KV
from quire.backends.outputs import Hidden
from quire.backends.reference.backend import ReferenceBackend
from quire.models.embedding import Pooling
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan, Row
from quire.runner.pooler import Pooler
from quire.runner.runner import Runner
from tests.unit.runner.tiny_llama import CONTEXT, KV_HEADS, LAYERS, TinyLlama, V, known, opening

PAGE = 16
MODEL, POOL = TinyLlama(head_dim=8), KV(LAYERS, 64, PAGE, KV_HEADS, 8)


def test_a_sequence_that_wants_a_vector_gets_no_token_and_takes_none_from_others():
    pooler = Pooler(Pooling("last", True))
    pooler.keep = Hidden(1, taken=True)  # which this model marks
    sampled: list[int] = []

    def made(*vectors: int) -> list[Row]:
        program = ReferenceBackend().compile(MODEL.forward, kv=POOL, max_tokens=64, max_rows=40, keep=[pooler.keep])
        runner = Runner(
            program, kv=POOL, vocab_size=V, max_seqs=8, max_tokens=64, max_context=CONTEXT, max_rows=40, pooler=pooler
        )  # fmt: skip
        choose = runner._sampler.sample
        runner._sampler.sample = lambda logits, *a, **b: sampled.append(len(logits)) or choose(logits, *a, **b)
        lengths = (9, 20, 5)
        said = [[(7 * i + 3 * j) % V for j in range(n)] for i, n in enumerate(lengths)]
        pages = [list(range(6 * i, 6 * i + -(-n // PAGE))) for i, n in enumerate(lengths)]
        work = [known(i, own, 0, sample=True, pages=pages[i], vector=i in vectors) for i, own in enumerate(said)]
        opened = [opening(i, own, SamplingParams(temperature=0.0)) for i, own in enumerate(said)]
        for i in vectors:
            opened[i].vector = True
        result = runner.step(Plan(step=0, work=work, opened=opened))
        kept = program.hidden(pooler.keep)
        order = [i for i in range(3) if i not in vectors] + list(vectors)
        for i in vectors:
            row = kept[order.index(i)].astype(np.float64)
            np.testing.assert_allclose(np.frombuffer(result.rows[i].vector, "<f4"), row / np.sqrt(row @ row), atol=1e-6)
        return result.rows

    plain = made()
    mixed = made(0, 1)
    assert sampled == [3, 1]
    assert [row.tokens for row in mixed] == [[], [], plain[2].tokens]
    assert [row.accepted for row in mixed] == [9, 20, 5]
    assert all(row.error is None for row in mixed) and not mixed[2].vector
