"""The runner of an engine that embeds or scores: whole texts become one vector each, without a sampler.

Slots, page tables, checks and the batch are those of every runner (host_state.py), and so is what becomes of a text's rows
(pooler.py). What differs is what a program gives: hidden rows, and nothing else. An encoder's text comes whole, and has no KV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.backends.batch import Batch
from quire.backends.ops import KV, Program
from quire.models import Encoder
from quire.runner.host_state import HostState, Pending
from quire.runner.plan import Plan, Result, Row
from quire.runner.pooler import Pooler
from quire.runner.sampler import Masks


@dataclass(slots=True)
class Done:
    """A step that has happened."""

    rows: list[Row]

    def result(self) -> Result:
        return Result(rows=self.rows)


class PooledRunner:
    """Runs a program that gives hidden rows, and pools the rows of each text into a vector."""

    def __init__(
        self,
        program: Program,
        *,
        kv: KV,
        vocab_size: int,
        max_seqs: int,
        max_tokens: int,
        max_context: int,
        pooler: Pooler,
        encoder: Encoder | None,
    ):
        """`kv` says which pages a plan names. An encoder's program has no use for them."""
        self._program = program
        self._pooler = pooler
        self._encoder = encoder
        self._host = HostState(
            kv,
            vocab_size=vocab_size,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_context=max_context,
            max_rows=max_seqs,
        )

    def forward(self, plan: Plan) -> Done:
        """Compute the step's tokens and pool what is whole."""
        pending = Pending(plan)
        try:
            self._host.apply(plan)
            batch = self._host.build(pending)
            if batch is not None:
                self._run(pending, batch)
        except Exception as error:
            self._host.fail_step(pending, error)
        return Done(pending.rows)

    def sample(self, pending: Done, masks: Masks | None = None) -> Done:
        """The rows of the step: no token is sampled."""
        return pending

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""

    def _run(self, pending: Pending, batch: Batch) -> None:
        works = list(pending.works.values())
        ends = zip(works, batch.q_start[:-1].tolist(), batch.q_start[1:].tolist(), strict=True)
        wanted = [np.arange(*self._pooler.wanted(*one), dtype=np.int32) for one in ends]
        batch = replace(batch, logit_rows=np.concatenate(wanted))
        given = {}
        if self._encoder is not None:
            second = [np.arange(w.start, w.start + w.n) >= w.second if w.second else np.zeros(w.n) for w in works]
            given = self._encoder.given(batch.pos, np.concatenate(second).astype(np.int32))
            batch = replace(batch, pages=np.full((len(works), 1), -1, np.int32), write=np.zeros_like(batch.write))
        out = self._program.run(batch, given)
        self._host.slots.length[[w.slot for w in works]] = batch.kv_len
        at = 0
        for (i, work), rows in zip(pending.works.items(), wanted, strict=True):
            pending.rows[i] = self._pooler.row(work, out[at : at + rows.size])
            at += rows.size
