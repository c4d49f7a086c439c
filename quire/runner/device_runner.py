"""The runner whose state lives on a device: the token sampled last never waits for the host.

    host     | plan k+1, send | plan k+2, send .. result k | ..
    device   |     forward k, sample k     |     forward k+1, sample k+1     | ..       result() waits for a copy back

A step is one copy to the device (tokens, positions, page-table changes, what sampling needs), kernels, and one copy back.
The host knows every length and position ahead, because a sequence grows by what was planned; it does not know tokens,
so `-1 - slot` stands for "what that slot sampled last". Steps of one row a sequence go through capture.Decoder, short ones
with prompts through prompts.Prompter, all others are launched as they come. Everything is put on one stream in the order of the plans, from one thread.

The seam: `Intake` is shared with runner.py (slots, failures, the batch); a `DeviceProgram` gives logits as a tensor, and
the sampler that chooses from them. A sequence whose logits turn out not to be numbers is found when its result is read: its slot then
fails, and so does whatever was launched for it in between, told apart by how often the slot was opened.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from quire.backends.batch import Batch, Table
from quire.backends.ops import KV
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.sampler import RULED_OUT
from quire.runner.capture import Decoder, DeviceState
from quire.runner.device_wishes import Asked, SlotWishes
from quire.runner.intake import Intake, Pending, Works, reason
from quire.runner.lora import Loras
from quire.runner.plan import Logprob, Plan, Result, Row, Work
from quire.runner.prompts import Prompter
from quire.runner.sampler import Masks
from quire.runner.sharing import LEAST, Sharing, find
from quire.runner.staging import Arrival, Staging

WORTH = 16384  # tokens of keys and values that need not be read again: what reading them once costs in launches
_CODES = {RULED_OUT: "every token is ruled out: by min_tokens and the stop ids, or by the constraint"}
_BROKEN = "the model produced NaN or infinite logits"
# Steps to launch before the first request, as decode rows, prompt rows and reach: few rows, many, split contexts, and not.
PRACTICE = ((0, 3, 64), (1, 3, 256), (1, 20, 1024), (1, 40, 4096), (1, 300, 256), (7, 200, 2048), (159, 300, 512))


@dataclass(slots=True)
class Shape:
    """How the numbers that come back are to be read: rows of logprobs behind the tokens, all of one width."""

    top: int  # alternatives in each row of logprobs
    wanted: list[tuple[int, int]]  # places among the sampled rows that have logprobs, and how many alternatives
    prompt: list[tuple[int, list[int], int]]  # places in plan.work, the tokens after their prompt rows, alternatives


class Launched(Pending):
    """A forward on its way, with what its sampling needs."""

    __slots__ = ("asked", "best", "sent", "shape", "slots", "turns")

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.turns: dict[int, int] = {}  # place in plan.work -> which opening of its slot it belongs to
        self.slots = np.zeros(0, np.intp)  # of the sampled rows
        self.shape = Shape(0, [], [])
        self.asked: Asked | None = None
        self.sent: list[torch.Tensor] = []  # slots, prompt tokens, rows with logprobs, then what is asked
        self.best: torch.Tensor | None = None  # the best tokens, when the forward noted them already


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
    ):
        """`padded` sends steps through the captured sizes even without graphs; None: only where there are graphs."""
        self._program = program
        self._sampler = program.sampler
        self._device = program.device
        self._vocab = vocab_size
        self._page_size = kv.page_size
        self._intake = Intake(
            kv,
            vocab_size=vocab_size,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_context=max_context,
            max_rows=max_rows,
        )
        self._slots = self._intake.slots
        max_pages = self._slots.table.shape[1]
        self._state = DeviceState(max_seqs, max_pages, [k.pages for k in kv.groups], kv.page_size, self._device)
        self._shares = (
            program.shares and not kv.window
        )  # rows with pages missing in front begin alike, and mean nothing
        self._wishes = SlotWishes(max_seqs, vocab_size, self._device)
        self._staging = Staging(self._device, 4 * max_tokens + 64 * max_seqs)
        self._late = Staging(self._device)
        self._decoder: Decoder | None = None
        self._prompter: Prompter | None = None
        if program.graphs if padded is None else padded:
            self._decoder = Decoder(program, self._state, max_seqs, max_context, vocab_size, graphs=program.graphs)
            self._prompter = Prompter(
                program, self._state, max_seqs=max_seqs, max_tokens=max_tokens, max_context=max_context,
                vocab=vocab_size, graphs=program.graphs,
            )  # fmt: skip
        if program.graphs:
            self._practise(max_seqs, max_tokens, max_context)
        self._turns = [0] * max_seqs
        self._lost: dict[int, tuple[int, str]] = {}  # slot -> the opening that failed, and why
        self._sharing: Sharing | None = None  # of the step that is being launched
        self._known: tuple[list[int], Sharing | None] = [], None  # slots that were looked at last, and what they share
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
        pending = Launched(plan)
        try:
            self._intake.apply(plan)
            self._follow(plan)
            batch = self._intake.build(pending, self._arrange)
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
                ticket.news = self._sample(pending, masks or {})
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
        self._intake.loras = loras

    @torch.inference_mode()
    def between(self, task: Callable[[], None]) -> None:
        """Do something after every step that was given, and before the next: they are in one stream."""
        task()

    def close(self) -> None:
        """Read what was launched. Harmless when called again."""
        if not self._closed:
            self._closed = True
            if self._unread:
                self.read(self._unread[-1])

    # ---- launching

    def _follow(self, plan: Plan) -> None:
        """What the device must know of slots that come and go."""
        for slot in plan.closed:
            self._wishes.close(slot)
        for new in plan.opened:
            if self._slots.failure(new.slot) is None:
                self._turns[new.slot] += 1
                self._wishes.open(new.slot, self._slots.stream(new.slot))

    def _arrange(self, works: Works) -> Works:
        """Decode rows that share a beginning, one after another. Looks again only where slots or old pages changed."""
        self._sharing = None
        if self._decoder is None or not self._shares or any(w.tokens is not None for w in works.values()):
            return works
        own, known = [w.slot for w in works.values()], self._known
        held = LEAST if known[1] is None else max(known[1].pages)
        if own != known[0] or any(w.pages and w.page_from <= held for w in works.values()):
            found = find(self._slots.table[own], self._slots.length[own] // self._page_size)
            worth = found is not None and found.saved * self._page_size >= WORTH
            known = self._known = own, found if worth else None
        self._sharing = known[1]
        if self._sharing is None:
            return works
        places = list(works)
        return {places[at]: works[places[at]] for at in self._sharing.order.tolist()}

    def _launch(self, pending: Launched, batch: Batch) -> None:
        works = pending.works
        own = np.array([w.slot for w in works.values()], np.int32)
        known = np.array([w.tokens is not None for w in works.values()], np.bool_)
        batch.ids[batch.q_start[:-1][~known]] = -1 - own[~known]
        pending.turns = {i: self._turns[w.slot] for i, w in works.items()}
        pending.sampled = [i for i, w in works.items() if w.sample]
        slots = pending.slots = np.array([works[i].slot for i in pending.sampled], np.intp)
        pending.shape = self._shape(pending)
        pending.asked = self._wishes.ask(slots, self._slots.position[slots])
        where, pages = _changes(works.values(), self._state)
        decoding = batch.logit_rows.size == batch.tokens == own.size == slots.size
        plain = batch.adapters is None  # what is captured has no adapters
        if plain and decoding and self._decoder is not None:
            writes = [batch.table(g).write for g in range(len(pages))]
            arrays = batch.ids, batch.pos, writes, own, where, pages
            more = self._more(pending) if pending.asked or pending.shape.wanted else []
            sharing = self._sharing
            pending.logits, pending.best, pending.sent = self._decoder.run(*arrays, sharing=sharing, more=more)
        elif plain and self._prompter is not None and (size := self._prompter.size_for(batch)) is not None:
            more = self._more(pending)
            pending.logits, pending.sent = self._prompter.run(size, batch, own, where, pages, more)
        else:
            pending.logits = self._eager(pending, batch, own, where, pages)
        self._slots.length[own] = batch.kv_len
        for i, w in works.items():
            if pending.rows[i].error is None:
                pending.rows[i].accepted = w.n
        self._slots.last[slots] = 0  # some token; which one is the device's business
        self._slots.position[slots] += 1

    def _shape(self, pending: Launched) -> Shape:
        """Which log probabilities this step owes. A sequence whose prompt tokens are not known is failed."""
        tops = self._wishes.logprobs[pending.slots].tolist()
        wanted = [(j, top) for j, top in enumerate(tops) if top >= 0]
        prompt: list[tuple[int, list[int], int]] = []
        for i, w in pending.works.items():
            if w.prompt_logits:
                try:
                    tokens = self._slots.after(w.slot, w.start, w.prompt_logits)
                except ValueError as error:
                    self._intake.fail(pending, [i], str(error))
                    tokens = [0] * w.prompt_logits
                prompt.append((i, tokens, self._slots.stream(w.slot).params.prompt_logprobs or 0))
        top = max((*(top for _, top in wanted), *(top for _, _, top in prompt)), default=0)
        return Shape(min(top, self._vocab), wanted, prompt)

    def _more(self, pending: Launched) -> list[np.ndarray]:
        """What sampling needs on the device besides logits."""
        shape, asked = pending.shape, pending.asked
        follow = [token for _, tokens, _ in shape.prompt for token in tokens]
        whole = [pending.slots, np.array(follow, np.int32), np.array([j for j, _ in shape.wanted], np.int32)]
        return [*(x.astype(np.int32) for x in whole), *(asked.arrays() if asked is not None else [])]

    def _eager(
        self, pending: Launched, batch: Batch, own: np.ndarray, where: np.ndarray, pages: list[np.ndarray]
    ) -> torch.Tensor:
        """Launch a step of any shape."""
        kinds = len(pages)
        writes = [batch.table(g).write for g in range(kinds)]
        arrays = (batch.ids, batch.pos, batch.q_start, batch.kv_len, batch.logit_rows, own, where, *pages, *writes)
        adapted = [] if batch.adapters is None else [batch.adapters]
        sent = self._staging.send([*arrays, *self._more(pending), *adapted])
        adapters = sent.pop() if adapted else None
        ids, pos, q_start, kv_len, rows, slots, places = sent[:7]
        pending.sent = sent[len(arrays) :]
        if where.size:
            self._state.place(places, *sent[7 : 7 + kinds])
        tables = self._state.rows(slots, sent[7 + kinds : len(arrays)], batch.pages.shape[1])
        return self._program.launch(
            DeviceBatch(
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
            )
        )

    @torch.inference_mode()
    def _practise(self, max_seqs: int, max_tokens: int, max_context: int) -> None:
        """Launch steps of every kind that is not captured, on the spare page: what they compile must not meet a request."""
        for ones, rows, reach in PRACTICE:
            if ones >= max_seqs or ones + rows > max_tokens or rows > max_context:
                continue
            n = np.array([1] * ones + [rows], np.int32)
            q_start = np.concatenate(([0], np.cumsum(n))).astype(np.int32)
            pos = np.concatenate([np.arange(k, dtype=np.int32) for k in n])
            offset = pos % self._program.kv.page_size
            writes = [(first + offset).astype(np.int32) for first in self._state.spare_writes]
            ids, last = np.zeros_like(pos), q_start[1:] - 1
            arrays = [ids, pos, q_start, n, last.astype(np.int32), np.full(n.size, self._state.spare, np.int32)]
            on_device = self._staging.send([*arrays, *writes])
            tables = self._state.rows(on_device[5], on_device[6:])
            blank = np.zeros((n.size, 1), np.int32)
            others = tuple(Table(blank, write) for write in writes[1:])
            batch = DeviceBatch(
                ids=on_device[0],
                pos=on_device[1],
                q_start=on_device[2],
                kv_len=on_device[3],
                pages=tables[0].pages,
                write=tables[0].write,
                more=tuple(tables[1:]),
                logit_rows=on_device[4],
                longest=rows,
                reach=min(reach, max_context),
                host=Batch(ids, pos, q_start, n, blank, writes[0], arrays[4], others),
            )
            self._sampler.practise(self._program.launch(batch))
        torch.cuda.synchronize(self._device)

    # ---- choosing

    def _sample(self, pending: Launched, masks: Masks) -> Arrival:
        """Launch the choice of tokens and the copy back."""
        count, logits, tokens, shape = len(pending.sampled), pending.logits, pending.best, pending.shape
        own = {j: masks[i] for j, i in enumerate(pending.sampled) if i in masks}
        if own:  # only now is it known what they want: this costs copies of its own
            pending.asked = self._wishes.ask(pending.slots, self._slots.position[pending.slots] - 1, own)
            pending.sent = self._late.send(self._more(pending))
        if not pending.sent:  # decoded, and nobody wants more than the best token
            assert tokens is not None
            return Arrival(tokens)
        slots, follow, wanted = (x.long() for x in pending.sent[:3])
        tokens = self._choose(pending, logits[:count])
        self._state.keep(slots, tokens)
        parts = [tokens.double()]
        if shape.wanted:
            every = len(shape.wanted) == count
            of, to = (logits[:count], tokens) if every else (logits[wanted], tokens[wanted])
            parts.append(self._sampler.logprobs(of, to, shape.top).ravel())
        if shape.prompt:
            parts.append(self._sampler.logprobs(logits[count:], follow, shape.top).ravel())
        return Arrival(torch.cat(parts) if len(parts) > 1 else tokens)

    def _choose(self, pending: Launched, logits: torch.Tensor) -> torch.Tensor:
        """A token, or a code, for each sampled row."""
        best = pending.best
        if best is None and (pending.asked is None or not pending.asked.every):
            best = self._sampler.greedy(logits)
        if pending.asked is None:
            assert best is not None
            return best
        wishes = self._wishes.wishes(pending.asked, pending.sent[3:])
        chosen = self._sampler.choose(logits, wishes)
        self._wishes.add(wishes, chosen)
        return chosen if best is None or wishes.rows is None else best.index_copy(0, wishes.rows.long(), chosen)

    def _recover(self, pending: Launched, error: Exception) -> None:
        """A step that could not be launched fails its sequences; memory that it held is given back."""
        self._intake.fail_step(pending, error)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()

    # ---- reading

    def read(self, ticket: DeviceTicket) -> None:
        """Answer the launched steps in order, up to this one."""
        while ticket.answer is None:
            first = self._unread.popleft()
            pending = first.pending
            try:
                self._answer(pending, first.news)
            except Exception as error:  # the device itself failed: nobody in this step can be answered
                for i in pending.turns:
                    self._fail(pending, i, reason(error))
            first.answer = Result(pending.rows)

    def _answer(self, pending: Launched, news: Arrival | None) -> None:
        for i, turn in pending.turns.items():
            gone = self._lost.get(pending.plan.work[i].slot)
            if gone is not None and gone[0] == turn:
                self._fail(pending, i, gone[1])
        if news is None:
            return
        numbers, count, shape = news.wait(), len(pending.sampled), pending.shape
        details = numbers[count:].reshape(-1, 2 + 2 * shape.top)
        for j, i in enumerate(pending.sampled):
            token = int(numbers[j])
            if token < 0:
                self._fail(pending, i, _CODES.get(token, _BROKEN))
            elif pending.rows[i].error is None:
                pending.rows[i].tokens = [token]
        for at, (j, top) in enumerate(shape.wanted):
            row = pending.rows[pending.sampled[j]]
            if row.error is None:
                row.logprobs = [_logprob(row.tokens[0], details[at], top, shape.top)]
        at = len(shape.wanted)
        for i, tokens, top in shape.prompt:
            rows, at = details[at : at + len(tokens)], at + len(tokens)
            if np.isnan(rows[:, 0]).any():
                self._fail(pending, i, _BROKEN)
            elif pending.rows[i].error is None:
                told = zip(tokens, rows, strict=True)
                pending.rows[i].prompt_logprobs = [_logprob(token, row, top, shape.top) for token, row in told]

    def _fail(self, pending: Launched, index: int, why: str) -> None:
        """This row's sequence cannot go on; the slot fails with it, unless another sequence has it by now."""
        slot, turn = pending.plan.work[index].slot, pending.turns[index]
        if pending.rows[index].error is None:
            pending.rows[index] = Row(accepted=0, error=why)
            self._lost[slot] = turn, why
            if self._turns[slot] == turn:
                self._slots.fail([slot], why)


def _changes(works: Iterable[Work], state: DeviceState) -> tuple[np.ndarray, list[np.ndarray]]:
    """Flat places of the page tables that a step changes, and the pages that go there in each group.

    For a page that is not there the device is told of the spare one: it has an address, and nobody reads it.
    """
    places: list[int] = []
    pages: list[list[int]] = [[] for _ in state.tables]
    for w in works:
        if w.pages:
            first = w.slot * state.max_pages + w.page_from
            places += range(first, first + len(w.pages))
            for own, new in zip(pages, (w.pages, *w.more), strict=True):
                own += new
    told = [np.array(own, np.int32) for own in pages]
    for own, spare in zip(told, state.spare_pages, strict=True):
        own[own < 0] = spare
    return np.array(places, np.int32), told


def _logprob(token: int, row: np.ndarray, top: int, width: int) -> Logprob:
    """One row of numbers as the host tells it; what the model itself ruled out is no alternative."""
    ids, probs = row[2 : 2 + width][:top].tolist(), row[2 + width :][:top].tolist()
    best = [(int(t), p) for t, p in zip(ids, probs, strict=True) if p > -math.inf]
    return Logprob(token, float(row[0]), int(row[1]), best)
