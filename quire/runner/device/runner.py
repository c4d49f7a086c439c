"""The runner whose state lives on a device: the token sampled last never waits for the host.

    host     | plan k+1, send | plan k+2, send .. result k | ..
    device   |     forward k, sample k     |     forward k+1, sample k+1     | ..       result() waits for a copy back

A step is one copy to the device (tokens, positions, page-table changes, what sampling needs), kernels, and one copy back.
The host knows every length and position ahead, because a sequence grows by what was planned; it does not know tokens,
so `-1 - slot` stands for "what that slot sampled last". Steps of one row a sequence go through decode.DecodeSteps, short ones
with prompts through prefill.PrefillSteps, those that verify draft tokens through verify.VerifySteps, all others are launched as
they come, and choosing.Choosing launches the choice of tokens. Everything is put on one stream in the order of the plans, from
one thread.

With a proposer a step may verify draft tokens, and then only the device knows a sequence's length and position until the step
is read: drafting.py keeps both sides' books, and no step waits for the one before it. The one exception is a rule that asks for
the position while it is not known (`Drafting.must_wait`).

The seam: `HostState` is shared with runner.py (slots, failures, the batch); a `DeviceProgram` gives logits as a tensor, and
the sampler that chooses from them. A sequence whose logits turn out not to be numbers is found when its result is read:
its slot then fails, and so does whatever was launched for it in between, told apart by how often the slot was opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
import torch

from quire.backends.batch import Batch
from quire.backends.ops import KV
from quire.backends.outputs import Hidden
from quire.backends.pages import PageBytes, PageCopy, PageIds
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch, beside
from quire.runner.batch_builder import Index
from quire.runner.device.answers import Answers
from quire.runner.device.choosing import Choosing
from quire.runner.device.decode import DecodeSteps
from quire.runner.device.drafting import Drafting
from quire.runner.device.launched import Launched
from quire.runner.device.prefill import PrefillSteps
from quire.runner.device.proposer import DeviceProposer, Followed
from quire.runner.device.sharing import LEAST, Sharing, find
from quire.runner.device.staging import Arrival, Staging
from quire.runner.device.state import DeviceState
from quire.runner.device.texts import TextRows
from quire.runner.device.verify import VerifySteps
from quire.runner.device.warmup import warm_up
from quire.runner.host_state import HostState, Pending, Works
from quire.runner.lora import Loras
from quire.runner.plan import Plan, Result, Work
from quire.runner.pooler import Pooler
from quire.runner.sampler import Masks
from quire.runner.speculate import Proposer

WORTH = 16384  # tokens of keys and values that need not be read again: what reading them once costs in launches


class DeviceTicket:
    """A step's answer, perhaps not there yet."""

    def __init__(self, runner: DeviceRunner, pending: Launched):
        self.pending = pending
        self.news: Arrival | None = None
        self.answer: Result | None = None
        self._runner = runner

    @property
    def ready(self) -> bool:
        """Whether result() would return at once."""
        return self.answer is not None or self.news is None or self.news.ready

    def result(self) -> Result:
        """The answer, row for row. Waits for it, and reads the answers before it first."""
        self._runner.read(self)
        assert self.answer is not None
        return self.answer


class DeviceRunner:
    """One program, its slots and its sampler. The caller alternates forward and sample; a Plan is not changed after."""

    def __init__(
        self,
        program: DeviceProgram,
        *,
        kv: KV,
        vocab_size: int,
        max_seqs: int,
        max_tokens: int,
        max_context: int,
        max_rows: int,
        padded: bool | None = None,
        proposer: Proposer | DeviceProposer | None = None,
        drafts: int = 0,
        pooler: Pooler | None = None,
    ):
        """`padded` sends steps through the captured sizes even without graphs; None: only where there are graphs.

        `proposer` gives up to `drafts` draft tokens of a sequence in a step. Its own groups are the last ones of `kv`.
        `pooler` makes the vectors of sequences that want one; the program was compiled to keep what it needs.
        """
        groups = list(getattr(proposer, "groups", ()))
        if groups:
            program = cast(
                DeviceProgram, Followed(program, cast(DeviceProposer, proposer), len(kv.groups) - len(groups))
            )
        self._program = program
        self._device = program.device
        self._page_size = kv.page_size
        self._host = HostState(
            kv,
            vocab_size=vocab_size,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_context=max_context,
            max_rows=max_rows,
        )
        self._slots = self._host.slots
        max_pages = self._slots.table.shape[1]
        self._state = DeviceState(max_seqs, max_pages, [k.pages for k in kv.groups], kv.page_size, self._device)
        self._shares = (
            program.shares and not kv.window
        )  # a window's rows lack their first pages, so prefixes cannot be shared
        self._staging = Staging(self._device, 4 * max_tokens + 64 * max_seqs)
        self._pooler = pooler
        self._drafting: Drafting | None = None
        if proposer is not None and drafts:
            self._drafting = Drafting(
                proposer, self._host, self._state, drafts=drafts, model_groups=len(kv.groups) - len(groups),
                max_context=max_context, page_size=kv.page_size
            )  # fmt: skip
        self._choosing = Choosing(
            program.sampler, self._host, self._state, self._drafting, vocab_size=vocab_size, device=self._device
        )
        self._decode: DecodeSteps | None = None
        self._prefill: PrefillSteps | None = None
        self._verify: VerifySteps | None = None
        if program.graphs if padded is None else padded:
            # No text is computed in steps of decode rows alone, nor in those of draft tokens alone.
            unread = {pooler.keep}.difference(getattr(proposer, "keep", ())) if pooler is not None else set[Hidden]()
            self._decode = DecodeSteps(program, self._state, max_seqs, max_context, vocab_size, unread)
            self._prefill = PrefillSteps(
                program, self._state, max_seqs=max_seqs, max_tokens=max_tokens, max_context=max_context, vocab=vocab_size
            )  # fmt: skip
            if self._drafting is not None:
                self._verify = VerifySteps(
                    program, self._state, drafts=drafts, max_seqs=max_seqs, max_tokens=max_tokens,
                    max_context=max_context, vocab=vocab_size, unread=unread
                )  # fmt: skip
            if program.graphs:
                self._warm_up(max_seqs, max_tokens, max_context)
        self._answers = Answers(self._host, max_seqs, self._drafting)
        self._sharing: Sharing | None = None  # of the step that is being launched
        # Slots that were looked at last, and what they share.
        self._known: tuple[Index | None, Sharing | None] = (None, None)
        self._unread: deque[DeviceTicket] = deque()
        self._unsampled: Launched | None = None
        self._closed = False

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Launched:
        """Apply the plan to the slots and launch its tokens. Does not wait for them."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        if self._unsampled is not None:
            raise RuntimeError("forward was called twice without sample between: the first logits would be lost")
        if self._drafting is not None and self._unread and self._drafting.must_wait(plan):
            self.read(self._unread[-1])
        pending = Launched(plan)
        try:
            self._host.apply(plan)
            self._follow(plan)
            if not self._launch_decode_only(pending):
                batch = self._host.build(pending, self._arrange)
                if batch is not None:
                    self._launch(pending, batch)
        except Exception as error:
            self._recover(pending, error)
        self._unsampled = pending
        return pending

    @torch.inference_mode()
    def sample(self, pending: Launched, masks: Masks | None = None) -> DeviceTicket:
        """Choose the tokens of that forward. `masks` are by place in plan.work."""
        if pending is not self._unsampled:
            raise RuntimeError("sample was called for a forward that is not the last one")
        self._unsampled = None
        ticket = DeviceTicket(self, pending)
        if pending.logits is not None:
            try:
                ticket.news = self._choosing.launch(pending, masks or {})
            except Exception as error:
                self._recover(pending, error)
                ticket.news = None
        pending.logits = pending.best = None
        self._unread.append(ticket)
        return ticket

    def step(self, plan: Plan) -> Result:
        """forward, sample and result in one."""
        return self.sample(self.forward(plan)).result()

    def adopt(self, loras: Loras) -> None:
        """The adapters that plans may name; changed within `between` alone."""
        self._host.loras = loras

    @torch.inference_mode()
    def between(self, task: Callable[[], None]) -> None:
        """Do something after every step that was given, and before the next: they are in one stream."""
        task()

    def page_buffer(self, group: int, count: int) -> PageBytes:
        """A buffer for pages: see Program.page_buffer."""
        return self._program.page_buffer(group, count)

    @torch.inference_mode()
    def read_pages(self, group: int, pages: PageIds, out: PageBytes | None = None) -> PageCopy:
        """Copy pages, after every step that was launched. Does not wait for it."""
        return self._program.read_pages(group, pages, out)

    @torch.inference_mode()
    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes) -> PageCopy:
        """Fill pages, after every step that was launched: one may still write what was in them before. Does not wait."""
        return self._program.write_pages(group, pages, buffer)

    def close(self) -> None:
        """Read what was launched. Harmless when called again."""
        if not self._closed:
            self._closed = True
            if self._unread:
                self.read(self._unread[-1])

    # ---- launching

    def _follow(self, plan: Plan) -> None:
        """Tell the device which slots a plan opens and closes."""
        for slot in plan.closed:
            self._choosing.sampling.close(slot)
        for new in plan.opened:
            if self._slots.failure(new.slot) is None:
                self._answers.openings[new.slot] += 1
                self._choosing.sampling.open(new.slot, self._slots.stream(new.slot))
        if self._drafting is not None:
            self._drafting.follow(plan)

    def _arrange(self, pending: Pending, works: Works) -> Works:
        """Draft tokens to verify; or decode rows that share a beginning, one after another."""
        self._sharing = None
        self._notice(works.values())
        if self._drafting is not None:
            assert isinstance(pending, Launched)
            fits = self._verify if (self._slots.adapter[[w.slot for w in works.values()]] < 0).all() else None
            self._drafting.propose(pending, works, None if fits is None else fits.rows_for)
            if pending.verification is not None:
                return works
        if self._decode is None or any(w.tokens is not None for w in works.values()):
            return works
        self._sharing = self._shared(np.array([w.slot for w in works.values()], np.intp))
        if self._sharing is None:
            return works
        indices = list(works)
        return {indices[at]: works[indices[at]] for at in self._sharing.order.tolist()}

    def _notice(self, works: Iterable[Work]) -> None:
        """Whatever a step is for: where old pages change, a slot may have changed hands, and what was shared may not be."""
        shares = self._known[1]
        held = LEAST if shares is None else max(shares.pages)
        if any(w.pages and w.page_from <= held for w in works):
            self._known = None, None

    def _shared(self, own: Index) -> Sharing | None:
        """The prefixes that the rows of these slots share, if sharing is worth it. Computed anew only where slots or old pages changed."""
        known = self._known[0]
        if not self._shares:
            return None
        if known is not own and (known is None or not np.array_equal(known, own)):
            found = find(self._slots.table[own], self._slots.length[own] // self._page_size)
            worth = found is not None and found.saved * self._page_size >= WORTH
            self._known = own, found if worth else None
        return self._known[1]

    def _launch_decode_only(self, pending: Launched) -> bool:
        """Launch a step in which every sequence goes on by a token, without a look at each. False: it must be looked at.

        It does what `_arrange` and `_launch` do for such a step, in arrays over all rows.
        """
        slot = None if self._decode is None else self._host.decode_only(pending.plan)
        if self._decode is None or slot is None or (found := self._host.next_positions(slot)) is None:
            return False
        if self._drafting is not None and self._drafting.loose[slot].any():
            return False  # where they go on, the device alone knows
        slots, (pos, writes) = self._slots, found
        changed = [w for w in pending.plan.work if w.pages]
        self._notice(changed)
        sharing = self._shared(slot)
        pending.openings = self._answers.openings[slot]
        if sharing is None:
            pending.sampled = list(range(slot.size))
        else:
            order = sharing.order
            pending.sampled = order.tolist()
            slot, pos, writes = slot[order], pos[order], [write[order] for write in writes]
        pending.decode_only, pending.slots = True, slot
        pending.shape = self._choosing.shape(pending)
        pending.positions = slots.position[slot]
        pending.sampling = self._choosing.gather(pending)
        more = self._choosing.more(pending) if pending.sampling or pending.shape.wanted else []
        own = slot.astype(np.int32)
        pending.logits, pending.best, pending.sent = self._decode.run(
            -1 - own, pos, writes, own, *_changes(changed, self._state), sharing=sharing, more=more
        )
        pending.keep(self._decode.hidden, slot.size, slot.size)
        slots.length[slot] = pos + 1
        slots.position[slot] += 1
        return True

    def _launch(self, pending: Launched, batch: Batch) -> None:
        works = pending.works
        own = np.array([w.slot for w in works.values()], np.int32)
        known = np.array([w.tokens is not None for w in works.values()], np.bool_)
        batch.ids[batch.q_start[:-1][~known]] = -1 - own[~known]
        pending.openings[list(works)] = self._answers.openings[own]
        pending.sampled = [i for i, w in works.items() if w.sample]
        slots = pending.slots = np.array([works[i].slot for i in pending.sampled], np.intp)
        where, pages = _changes(works.values(), self._state)
        if self._drafting is not None:
            self._drafting.settle(pending)
        if pending.verification is not None and self._drafting is not None:
            self._launch_verification(self._drafting, pending, batch, own, where, pages)
        else:
            pending.positions = self._slots.position[slots]
            pending.shape = self._choosing.shape(pending)
            pending.sampling = self._choosing.gather(pending)
            self._launch_plain(pending, batch, own, where, pages)
        if self._slots.vectors and self._pooler is not None and (parts := self._pooler.find(works, batch)):
            pending.texts = TextRows(self._pooler, parts, pending.hidden)
        self._slots.length[own] = batch.kv_len
        for i, w in works.items():
            if pending.rows[i].error is None:
                pending.rows[i].accepted = 1 if w.tokens is None else w.n  # and draft tokens that turn out to be right
        self._slots.last[slots] = 0  # some token; which one is the device's business
        self._slots.position[slots] += 1
        if self._drafting is not None:
            self._drafting.launched(pending)

    def _launch_plain(
        self, pending: Launched, batch: Batch, own: np.ndarray, where: np.ndarray, pages: list[np.ndarray]
    ) -> None:
        """A step whose lengths the host knows."""
        decoding = batch.logit_rows.size == batch.tokens == own.size == pending.slots.size
        if decoding and self._slots.vectors:  # of decode steps no text's rows are kept
            decoding = not any(w.vector for w in pending.works.values())
        text = batch.given is None and batch.coords is None  # captured steps are made for nothing else
        captured = text and (batch.adapters is None or self._program.adapts)
        if captured and decoding and self._decode is not None:
            writes = [batch.table(g).write for g in range(len(pages))]
            arrays = batch.ids, batch.pos, writes, own, where, pages
            more = self._choosing.more(pending) if pending.sampling or pending.shape.wanted else []
            sharing = self._sharing
            if sharing is not None and sharing.order.size != own.size:  # of rows that could not be computed
                sharing = None
            pending.logits, pending.best, pending.sent = self._decode.run(
                *arrays, sharing=sharing, adapters=batch.adapters, more=more
            )
            pending.keep(self._decode.hidden, batch.tokens, batch.tokens)
        elif captured and self._prefill is not None and (kind := self._prefill.kind_for(batch)) is not None:
            more = self._choosing.more(pending)
            pending.logits, pending.sent = self._prefill.run(kind, batch, own, where, pages, more)
            pending.keep(self._prefill.hidden, batch.tokens, batch.logit_rows.size)
        else:
            pending.logits = self._eager(pending, batch, own, where, pages)

    def _launch_verification(
        self,
        drafting: Drafting,
        pending: Launched,
        batch: Batch,
        own: np.ndarray,
        where: np.ndarray,
        pages: list[np.ndarray],
    ) -> None:
        """A step with draft tokens, or with lengths that the device alone knows."""
        drafting.prepare(pending, where, pages)
        made, slots = pending.verification, pending.slots
        assert made is not None
        counts = [pending.rows_of(i) for i in pending.sampled]
        pending.slots, pending.ahead = np.repeat(slots, counts), np.concatenate([np.arange(n) for n in counts])
        pending.positions = (self._slots.position - drafting.loose)[pending.slots] + pending.ahead
        pending.shape = self._choosing.shape(pending)
        pending.sampling = self._choosing.gather(pending)
        if made.rows and self._verify is not None:
            most = self._slots.length[own]
            least = (most - drafting.loose[own]).astype(np.int32)
            more = self._choosing.more(pending) if pending.sampling or pending.shape.wanted else []
            pending.logits, pending.best, pending.sent = self._verify.run(
                made.rows, own, (least, most), where, pages, more
            )
            pending.keep(self._verify.hidden, made.rows * own.size, made.rows * own.size)
        else:
            pending.logits = self._eager(pending, batch, own, where, pages)

    def _eager(
        self, pending: Launched, batch: Batch, own: np.ndarray, where: np.ndarray, pages: list[np.ndarray]
    ) -> torch.Tensor:
        """Launch a step of any shape."""
        kinds = len(pages)
        writes = [batch.table(g).write for g in range(kinds)]
        arrays = (batch.ids, batch.pos, batch.q_start, batch.kv_len, batch.logit_rows, own, where, *pages, *writes)
        adapted = [] if batch.adapters is None else [batch.adapters]
        sent = self._staging.send([*arrays, *self._choosing.more(pending), *adapted])
        adapters = sent.pop() if adapted else None
        ids, pos, q_start, kv_len, rows, slots, indices = sent[:7]
        pending.sent = sent[len(arrays) :]
        if where.size:
            self._state.set_pages(indices, *sent[7 : 7 + kinds])
        if pending.verification is not None and self._drafting is not None:
            self._drafting.correct(pending, batch, ids, pos, kv_len, sent[7 + kinds : len(arrays)])
        tables = self._state.page_tables(slots, sent[7 + kinds : len(arrays)], batch.pages.shape[1])
        launched = DeviceBatch(
            ids=self._state.tokens(ids),
            pos=pos,
            q_start=q_start,
            kv_len=kv_len,
            pages=tables[0].pages,
            write=tables[0].write,
            more=tuple(tables[1:]),
            logit_rows=rows,
            longest=int((batch.q_start[1:] - batch.q_start[:-1]).max()),
            reach=int(batch.kv_len.max()),
            host=batch,
            adapters=adapters,
            **beside(batch, self._device),
        )
        logits = self._program.launch(launched)
        pending.hidden = launched.hidden
        return logits

    def _warm_up(self, *sizes: int) -> None:
        """Compile and capture everything: none of that may meet a request."""
        ladders = [steps.ladder for steps in (self._decode, self._prefill, self._verify) if steps is not None]
        with self._program.compile_only():
            for ladder in ladders:
                ladder.warm_up()
            warm_up(self._program, self._state, self._staging, *sizes, sampling=False)
        for ladder in ladders:
            ladder.capture()
        warm_up(self._program, self._state, self._staging, *sizes)

    def _recover(self, pending: Launched, error: Exception) -> None:
        """A step that could not be launched fails its sequences; memory that it held is given back."""
        self._host.fail_step(pending, error)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()

    # ---- reading

    def read(self, ticket: DeviceTicket) -> None:
        """Answer the launched steps in order, up to this one."""
        while ticket.answer is None:
            first = self._unread.popleft()
            pending = first.pending
            try:
                rows = self._answers.read(pending, None if first.news is None else first.news.wait())
                if pending.texts is not None:
                    pending.texts.answer(rows)
            except Exception as error:
                rows = self._answers.fail(pending, error)
            first.answer = Result(rows)


def _changes(works: Iterable[Work], state: DeviceState) -> tuple[np.ndarray, list[np.ndarray]]:
    """The entries of the page tables that a step changes, as flat indices, and the pages that go there in each group.

    For a page that is not there the device is told of the spare one: it has an address, and nobody reads it.
    """
    changed = [w for w in works if w.pages]
    first = [w.slot * state.max_pages + w.page_from for w in changed]
    indices = [at + i for at, w in zip(first, changed, strict=True) for i in range(len(w.pages))]
    pages = [[page for w in changed for page in w.pages]]
    pages += [[page for w in changed for page in w.more[g]] for g in range(len(state.tables) - 1)]
    told = [np.array(own, np.int32) for own in pages]
    for own, spare in zip(told, state.spare_pages, strict=True):
        own[own < 0] = spare
    return np.array(indices, np.int32), told
