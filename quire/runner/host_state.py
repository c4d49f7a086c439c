"""What the host keeps of sequences: a Plan is applied to its slots, checked, and becomes a batch; errors stay with the row they hit.

This is the half that both runners share. `runner.py` (numpy on the host) and `device/runner.py` (torch, tokens and page tables
on the device) are the other halves: they compute the batch and choose the tokens, each in its own way.

    Plan ──► apply (closed, opened, pages) ──► refuse failed slots ──► build, dropping bad rows ──► Batch
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from quire.backends.batch import I32, Batch
from quire.backends.ops import KV
from quire.observe.errors import QuireError
from quire.runner.batch_builder import FEW, BadWork, BatchBuilder, DecodeOnly, Index
from quire.runner.lora import Loras
from quire.runner.plan import Open, Plan, Row, Work
from quire.runner.slots import Slots
from quire.runner.speculate import DraftRows, Proposer

log = logging.getLogger(__name__)

Works: TypeAlias = dict[int, Work]  # by their place in the plan, in the order of their rows


class Pending:
    """A forward that was given to the device: logits wait in it for `sample`."""

    __slots__ = ("_rows", "decode_only", "drafts", "logits", "plan", "sampled", "works")

    def __init__(self, plan: Plan):
        self.plan = plan
        self._rows: list[Row] | None = None  # until somebody has something to note
        self.decode_only = False  # every work goes on by a token, and nothing below is filled in but the logits
        self.works: Works = {}  # what is computed, by its place in plan.work
        self.sampled: list[int] = []  # places in plan.work, in the order of the rows of `logits`
        # By place in plan.work, the draft tokens that are computed with it. Zeros stand for those that only a device knows.
        self.drafts: dict[int, list[int]] = {}
        self.logits: Any = None  # 1 + drafts rows for each of `sampled`, [L, V]; valid until the next forward runs

    @property
    def rows(self) -> list[Row]:
        """The answer so far, row for row."""
        if self._rows is None:
            self._rows = [Row(accepted=0) for _ in self.plan.work]
        return self._rows

    @property
    def blank(self) -> bool:
        """Whether nothing was noted in the answer yet."""
        return self._rows is None

    def each(self) -> None:
        """Fill in `works` and `sampled` for a decode-only step whose works are to be looked at one by one."""
        self.decode_only = False
        self.works = dict(enumerate(self.plan.work))
        self.sampled = list(self.works)
        for row in self.rows:
            row.accepted = 1

    def rows_of(self, index: int) -> int:
        """Rows of logits of a sampled work."""
        return 1 + len(self.drafts.get(index, ()))


class HostState:
    """Slots and a builder, and the rules of who fails with whom."""

    def __init__(
        self,
        kv: KV,
        *,
        vocab_size: int,
        max_seqs: int,
        max_tokens: int,
        max_context: int,
        max_rows: int,
        proposer: Proposer | None = None,
    ) -> None:
        """`proposer` gives draft tokens where every token before them is known; a device's runner asks its own."""
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
            states=[bool(own.state) for own in kv.groups],
        )
        self.proposer = proposer
        self._builder = BatchBuilder(
            page_size=kv.page_size,
            vocab_size=vocab_size,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_context=max_context,
            max_rows=max_rows,
            groups=len(kv.groups),
        )
        self._decode_only = DecodeOnly(max_seqs)

    def apply(self, plan: Plan) -> None:
        """Closed slots, opened slots, pages. What is wrong with one sequence fails that one."""
        slots = self.slots
        for slot in plan.closed:
            slots.close(slot)
            if self.proposer is not None:
                self.proposer.close(slot)
        for new in plan.opened:
            try:
                slots.open(new)
                if new.adapter:
                    slots.adapter[new.slot] = self._adapter(new.adapter)
                if self.proposer is not None:
                    self.proposer.open(new.slot, self.text_of(new))
            except (ValueError, OverflowError) as error:
                slots.fail([new.slot], str(error))
        placed = [work for work in plan.work if work.pages]
        if len(placed) > FEW and slots.place_ones(placed):
            return
        for work in placed:
            if slots.failure(work.slot) is None:
                try:
                    slots.place(work)
                except ValueError as error:
                    slots.fail([work.slot], str(error))

    def text_of(self, new: Open) -> list[int]:
        """The tokens of a sequence, -1 in place of those that are no text."""
        return self.slots.spans[new.slot].blanked(new.tokens, -1) if new.spans else new.tokens

    def _adapter(self, key: str) -> int:
        if self.loras is None:
            raise ValueError(f"the adapter {key!r} is not loaded: this program has no adapters")
        return self.loras.slot_of(key)

    def build(self, pending: Pending, arrange: Callable[[Pending, Works], Works] | None = None) -> Batch | None:
        """The batch of all the work that can be done; the rest is answered with its error. None when nothing is left.

        `arrange` may put the rows in another order, and add draft tokens.
        """
        if arrange is None and len(pending.plan.work) > FEW and (slot := self.decode_only(pending.plan)) is not None:
            made = self._builder.decode_only(slot, self.slots)
            if made is not None:
                pending.works = dict(enumerate(pending.plan.work))
                return made
        works = {i: w for i, w in enumerate(pending.plan.work) if not self._refused(pending, i)}
        works = self._together(works)
        if self.slots.vectors:  # put last, so that their rows of logits are last, too: those are not sampled
            works = dict(sorted(works.items(), key=lambda item: item[1].vector))
        if self.proposer is not None:
            self._propose(pending, works, self.proposer)
        works = pending.works = works if arrange is None else arrange(pending, works)
        while works:
            drafts = [pending.drafts.get(i, ()) for i in works] if pending.drafts else ()
            try:
                return self._builder.build(list(works.values()), self.slots, drafts)
            except BadWork as error:
                index = list(works)[error.index]
                self.fail(pending, [index], str(error))
                del works[index]
        return None

    def decode_slots(self, plan: Plan) -> Index | None:
        """The slots of a decode-only plan, even if some of them failed or have adapters."""
        if self.proposer is not None or not self._decode_only.take(plan.work):
            return None
        slot, shifted = self._decode_only.slot, self.slots.shifted
        return None if shifted and slot is not None and not shifted.isdisjoint(slot.tolist()) else slot

    def decode_only(self, plan: Plan) -> Index | None:
        """The slots of a decode-only plan, if all are live and none has an adapter. None: the caller looks at each row."""
        slot = self.decode_slots(plan)
        if slot is None:
            return None
        fine = self.slots.live[slot].all() and (self.loras is None or (self.slots.adapter[slot] < 0).all())
        return slot if fine else None

    def next_positions(self, slot: Index) -> tuple[I32, list[I32]] | None:
        """The position of each slot's next token, and where it is written: see BatchBuilder.next_positions."""
        return self._builder.next_positions(slot, self.slots)

    def _together(self, works: Works) -> Works:
        """Rows of one adapter follow one another: they are one product. No result depends on it."""
        if self.loras is None or not works:
            return works
        used = self.slots.adapter[[w.slot for w in works.values()]]
        if (used[1:] >= used[:-1]).all():
            return works
        indices = list(works)
        return {indices[at]: works[indices[at]] for at in np.argsort(used, kind="stable").tolist()}

    def _propose(self, pending: Pending, works: Works, proposer: Proposer) -> None:
        """Ask for draft tokens, where the plan has room for them. All tokens before them are known here."""
        asked = [(i, w) for i, w in works.items() if w.drafts]
        if asked:
            rows = DraftRows([w.slot for _, w in asked], [w.drafts for _, w in asked], [0] * len(asked))
            found = zip(asked, map(said, proposer.propose(rows)), strict=True)
            pending.drafts = {i: drafts for (i, _), drafts in found if drafts}

    def verified(self, pending: Pending, index: int, tokens: list[int]) -> None:
        """Note the tokens of a sampled row (the draft tokens that were right, and one more) in its answer and its slot."""
        work, row, slots = pending.plan.work[index], pending.rows[index], self.slots
        drafted = len(pending.drafts.get(index, ()))
        if work.tokens is None:
            row.accepted, row.drafted = len(tokens), drafted
            slots.length[work.slot] += len(tokens) - pending.rows_of(index)
        row.tokens = tokens
        slots.last[work.slot] = tokens[-1]
        if self.proposer is not None:
            self.proposer.learn(work.slot, tokens, drafted)

    def fail(self, pending: Pending, indices: Iterable[int], why: str) -> None:
        """Answer these rows with an error, and let their slots remember it."""
        for i in indices:
            if pending.rows[i].error is None:
                pending.rows[i] = Row(accepted=0, error=why)
                self.slots.fail([pending.plan.work[i].slot], why)

    def fail_step(self, pending: Pending, error: Exception) -> None:
        """Answer every row of a step with an error, as if it had not been launched."""
        log.exception("step %d failed", pending.plan.step)
        self.fail(pending, range(len(pending.plan.work)), reason(error))
        pending.works, pending.sampled, pending.logits = {}, [], None
        pending.drafts = {}

    def _refused(self, pending: Pending, index: int) -> bool:
        """Whether this row's sequence has failed already."""
        why = self.slots.failure(pending.plan.work[index].slot)
        if why is not None:
            pending.rows[index] = Row(accepted=0, error=why)
        return why is not None


def said(draft: list[int]) -> list[int]:
    """Draft tokens up to the first -1, which stands for what is no text (a picture): the model cannot generate that."""
    return draft[: draft.index(-1)] if -1 in draft else draft


def reason(error: Exception) -> str:
    """What a request is told about a step that failed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "the machine ran out of memory in this step"
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
