"""The intake: a Plan is applied to the slots, checked, and becomes a batch; and failures stay with whom they hit.

This is the half of a runner that no device changes. `runner.py` (numpy on the host) and `device_runner.py` (torch, state on
the device) are the other halves: they compute the batch and choose the tokens, each in its own way.

    Plan ──► apply (closed, opened, pages) ──► refuse failed slots ──► build, dropping bad rows ──► Batch
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from quire.backends.batch import Batch
from quire.backends.ops import KV
from quire.observe.errors import QuireError
from quire.runner.batch_builder import BadWork, BatchBuilder
from quire.runner.lora import Loras
from quire.runner.plan import Plan, Row, Work
from quire.runner.slots import Slots

log = logging.getLogger(__name__)

Works: TypeAlias = dict[int, Work]  # by their place in the plan, in the order of their rows


class Pending:
    """A forward that was given to the device: logits wait in it for `sample`."""

    __slots__ = ("logits", "plan", "rows", "sampled", "works")

    def __init__(self, plan: Plan):
        self.plan = plan
        self.rows = [Row(accepted=0) for _ in plan.work]
        self.works: Works = {}  # what is computed, by its place in plan.work
        self.sampled: list[int] = []  # places in plan.work, in the order of the rows of `logits`
        self.logits: Any = None  # [len(sampled), V]; valid until the next forward runs


class Intake:
    """Slots and a builder, and the rules of who fails with whom."""

    def __init__(
        self, kv: KV, *, vocab_size: int, max_seqs: int, max_tokens: int, max_context: int, max_rows: int
    ) -> None:
        self.loras: Loras | None = None  # the adapters that sequences may name
        if max_rows < max_seqs:
            raise ValueError(f"max_rows ({max_rows}) is under max_seqs ({max_seqs}): every sequence may sample")
        self.slots = Slots(
            max_seqs,
            -(-max_context // kv.page_size),
            pages=kv.pages,
            vocab_size=vocab_size,
            window=kv.window,
            more=[(own.pages, own.window) for own in kv.more],
        )
        self._builder = BatchBuilder(
            page_size=kv.page_size,
            vocab_size=vocab_size,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_context=max_context,
            max_rows=max_rows,
            groups=len(kv.groups),
        )

    def apply(self, plan: Plan) -> None:
        """Closed slots, opened slots, pages. What is wrong with one sequence fails that one."""
        slots = self.slots
        for slot in plan.closed:
            slots.close(slot)
        for new in plan.opened:
            try:
                slots.open(new)
                if new.adapter:
                    slots.adapter[new.slot] = self._adapter(new.adapter)
            except (ValueError, OverflowError) as error:
                slots.fail([new.slot], str(error))
        for work in plan.work:
            if work.pages and slots.failure(work.slot) is None:
                try:
                    slots.place(work)
                except ValueError as error:
                    slots.fail([work.slot], str(error))

    def _adapter(self, key: str) -> int:
        if self.loras is None:
            raise ValueError(f"the adapter {key!r} is not loaded: this program has no adapters")
        return self.loras.slot_of(key)

    def build(self, pending: Pending, arrange: Callable[[Works], Works] | None = None) -> Batch | None:
        """The batch of all the work that can be done; the rest is answered with its error. None when nothing is left.

        `arrange` may put the rows in another order.
        """
        works = {i: w for i, w in enumerate(pending.plan.work) if not self._refused(pending, i)}
        works = self._together(works)
        works = pending.works = works if arrange is None else arrange(works)
        while works:
            try:
                return self._builder.build(list(works.values()), self.slots)
            except BadWork as error:
                index = list(works)[error.index]
                self.fail(pending, [index], str(error))
                del works[index]
        return None

    def _together(self, works: Works) -> Works:
        """Rows of one adapter follow one another: they are one product. No result depends on it."""
        if self.loras is None or not works:
            return works
        used = self.slots.adapter[[w.slot for w in works.values()]]
        if (used[1:] >= used[:-1]).all():
            return works
        places = list(works)
        return {places[at]: works[places[at]] for at in np.argsort(used, kind="stable").tolist()}

    def fail(self, pending: Pending, indices: Iterable[int], why: str) -> None:
        """Answer these rows with an error, and let their slots remember it."""
        for i in indices:
            if pending.rows[i].error is None:
                pending.rows[i] = Row(accepted=0, error=why)
                self.slots.fail([pending.plan.work[i].slot], why)

    def fail_step(self, pending: Pending, error: Exception) -> None:
        """Nothing of this step happened."""
        log.exception("step %d failed", pending.plan.step)
        self.fail(pending, range(len(pending.plan.work)), reason(error))
        pending.works, pending.sampled, pending.logits = {}, [], None

    def _refused(self, pending: Pending, index: int) -> bool:
        """Whether this row's sequence has failed already."""
        why = self.slots.failure(pending.plan.work[index].slot)
        if why is not None:
            pending.rows[index] = Row(accepted=0, error=why)
        return why is not None


def reason(error: Exception) -> str:
    """What a request is told about a step that failed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "the machine ran out of memory in this step"
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
