"""The runner on the host: a Plan becomes a program's run, and a Result comes back. Logits are sampled on the host.

Plans run in the order they are given, and everything that depends on the step before (the last token, the true length,
penalty counts) is read when the step runs, never when it is planned. So the host may be some steps ahead:

    overlap=False   forward and sample run where they are called; result() has nothing to wait for
    overlap=True    host     | plan k+1 | plan k+2 .. commit k | ..
                    worker   | forward k, sample k | forward k+1, sample k+1 | ..      result() waits for the worker

Both give the same bits. A failure stays with the sequences it hit: bad logits or a bad row fail one sequence, an
exception in the program fails the sequences of that step, and the runner goes on. What the two kinds of runner share
is in host_state.py; the one whose state lives on a device is device/runner.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from quire.backends.ops import KV, HostSteps, Program, Samples, Steps
from quire.backends.pages import PageBytes, PageCopy, PageIds
from quire.layouts import Floats
from quire.runner.host_state import HostState, Pending, reason
from quire.runner.lora import Loras
from quire.runner.plan import Plan, Result, Row, Work
from quire.runner.sampler import Chosen, Masks, Sampler
from quire.runner.speculate import Proposer

log = logging.getLogger(__name__)


class Ticket:
    """The answer of a step, which may not be there yet."""

    __slots__ = ("_done", "_failure", "_result")

    def __init__(self, waits: bool = True) -> None:
        """`waits`: whether another thread will settle it."""
        self._done = threading.Event() if waits else None
        self._result: Result | None = None
        self._failure: BaseException | None = None

    @property
    def ready(self) -> bool:
        """Whether result() would return at once."""
        return self._done is None or self._done.is_set()

    def result(self) -> Result:
        """The answer, row for row. Waits for it."""
        if self._done is not None:
            self._done.wait()
        if self._result is None:
            raise RuntimeError("the runner could not finish this step") from self._failure
        return self._result

    def _settle(self, result: Result | None, failure: BaseException | None = None) -> None:
        self._result, self._failure = result, failure
        if self._done is not None:
            self._done.set()


class QueuedCopy:
    """A copy of pages that the worker makes when its turn comes."""

    __slots__ = ("_copy", "_error", "_ran", "_task")

    def __init__(self, task: Callable[[], PageCopy]) -> None:
        self._task = task
        self._ran = threading.Event()
        self._copy: PageCopy | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Make the copy; called on the worker thread."""
        try:
            self._copy = self._task()
        except Exception as error:
            self._error = error
        self._ran.set()

    def done(self) -> bool:
        return self._ran.is_set() and self._made().done()

    def wait(self) -> PageBytes:
        self._ran.wait()
        return self._made().wait()

    def fence(self) -> None:
        """Do nothing: steps that are given later run later."""

    def _made(self) -> PageCopy:
        if self._copy is None:
            raise RuntimeError("pages could not be copied") from self._error
        return self._copy


class Runner:
    """One program, its slots and its sampler. The caller alternates forward and sample; a Plan is not changed after."""

    def __init__(
        self,
        program: Program,
        *,
        kv: KV,
        vocab_size: int,
        max_seqs: int,
        max_tokens: int,
        max_context: int,
        max_rows: int,
        overlap: bool = False,
        proposer: Proposer | None = None,
    ):
        self._program = program
        self._host = HostState(
            kv,
            vocab_size=vocab_size,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_context=max_context,
            max_rows=max_rows,
            proposer=proposer,
        )
        self._slots = self._host.slots
        native = program.host_sampler(vocab_size) if isinstance(program, Samples) else None
        self._sampler = Sampler(vocab_size, native)
        self._steps: HostSteps | None = None
        if native is not None and isinstance(program, Steps) and not self._slots.special:
            most = min(max_seqs, max_rows, max_tokens - 1)
            self._steps = program.host_steps(native, self._slots, kv.page_size, max_context, most)
        self._unsampled: Pending | None = None
        self._closed = False
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        if overlap:
            self._worker = threading.Thread(target=self._work, name="quire-runner", daemon=True)
            self._worker.start()

    def forward(self, plan: Plan) -> Pending:
        """Apply the plan to the slots and compute its tokens. Returns before that is done when overlapping."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        if self._unsampled is not None:
            raise RuntimeError("forward was called twice without sample between: the first logits would be lost")
        pending = Pending(plan)
        self._submit(lambda: self._forward(pending))
        self._unsampled = pending
        return pending

    def sample(self, pending: Pending, masks: Masks | None = None) -> Ticket:
        """Choose the tokens of that forward. `masks` are by index in plan.work."""
        if pending is not self._unsampled:
            raise RuntimeError("sample was called for a forward that is not the last one")
        self._unsampled = None
        ticket = Ticket(waits=self._worker is not None)

        def task() -> None:
            try:
                ticket._settle(self._sample(pending, masks))
            except BaseException as error:
                ticket._settle(None, error)
                raise

        self._submit(task)
        return ticket

    def step(self, plan: Plan) -> Result:
        """Run forward, sample and result in one."""
        return self.sample(self.forward(plan)).result()

    def adopt(self, loras: Loras) -> None:
        """The adapters that plans may name; changed within `between` alone."""
        self._host.loras = loras

    def between(self, task: Callable[[], None]) -> None:
        """Do something after every step that was given, and before the next. Waits for it, and raises what it raises."""
        if self._worker is None:
            task()
            return
        from concurrent.futures import Future

        done: Future[None] = Future()

        def run() -> None:
            try:
                done.set_result(task())
            except BaseException as error:
                done.set_exception(error)

        self._submit(run)
        done.result()

    def page_buffer(self, group: int, count: int) -> PageBytes:
        """A buffer for pages: see Program.page_buffer."""
        return self._program.page_buffer(group, count)

    def read_pages(self, group: int, pages: PageIds, out: PageBytes | None = None) -> PageCopy:
        """Copy, at once, pages that no step writes any more, such as those in the prefix tree; steps in flight go on."""
        return self._program.read_pages(group, pages, out)

    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes) -> PageCopy:
        """Fill pages after every step that was given, which may still write what was in them before. Does not wait for it."""
        if self._worker is None:
            return self._program.write_pages(group, pages, buffer)
        copy = QueuedCopy(lambda: self._program.write_pages(group, pages, buffer))
        self._submit(copy.run)
        return copy

    def close(self) -> None:
        """Finish what was given, then stop the worker. Harmless when called again."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._tasks.put(None)
            self._worker.join()

    def _submit(self, task: Callable[[], None]) -> None:
        if self._worker is None:
            task()
        else:
            self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException:  # the ticket carries it to result(); the worker must live for the next step
                log.exception("a step could not be finished")

    def _forward(self, pending: Pending) -> None:
        try:
            self._host.apply(pending.plan)
            if self._run_decode_only(pending):
                return
            logits = self._run(pending)
            pending.sampled = [i for i, w in pending.works.items() if w.sample]
            drafted = sum(map(len, pending.drafts.values())) if pending.drafts else 0
            pending.logits = logits[: len(pending.sampled) + drafted]
        except Exception as error:
            self._host.fail_step(pending, error)

    def _run_decode_only(self, pending: Pending) -> bool:
        """Run a decode-only step, where the program builds its batch from the slots itself."""
        if self._steps is None or (slot := self._host.decode_slots(pending.plan)) is None:
            return False
        pending.logits = self._steps.run(slot)
        pending.decode_only = pending.logits is not None
        return pending.decode_only

    def _run(self, pending: Pending) -> Floats:
        """Run the program over the work; prompt rows are answered here."""
        batch = self._host.build(pending)
        if batch is None:
            return np.empty((0, 0), np.float32)
        logits = self._program.run(batch)
        works = pending.works
        slot = np.array([w.slot for w in works.values()], np.intp)
        self._slots.length[slot] = batch.kv_len
        rows = pending.rows
        row = batch.logit_rows.size - sum(w.prompt_logits for w in works.values())  # those come behind the sampled ones
        for i, w in works.items():
            rows[i].accepted = w.n if w.tokens is not None else 1  # and drafts that turn out to be right
            if w.prompt_logits:
                self._prompt_logprobs(pending, i, w, logits[row : row + w.prompt_logits])
                row += w.prompt_logits
        return logits

    def _prompt_logprobs(self, pending: Pending, index: int, work: Work, logits: Floats) -> None:
        top = self._slots.stream(work.slot).params.prompt_logprobs or 0
        try:
            tokens = self._slots.after(work.slot, work.start, work.prompt_logits)
            new = self._sampler.logprobs(logits, tokens, top)
        except ValueError as error:
            self._host.fail(pending, [index], str(error))
        else:
            pending.rows[index].prompt_logprobs = new

    def _sample(self, pending: Pending, masks: Masks | None) -> Result:
        if pending.decode_only:
            if not masks and (tokens := self._next_tokens(pending)) is not None:
                return Result([Row(1, [token]) for token in tokens])
            pending.each()
        plan, rows, logits = pending.plan, pending.rows, pending.logits
        pending.logits = None
        good = [j for j, i in enumerate(pending.sampled) if rows[i].error is None]
        indices = [pending.sampled[j] for j in good]
        if indices and logits is not None:
            if len(good) < len(pending.sampled):
                owner = np.repeat(np.arange(len(pending.sampled)), list(map(pending.rows_of, pending.sampled)))
                logits = logits[np.isin(owner, good)]
            try:
                self._choose(pending, indices, logits, masks or {})
            except Exception as error:
                log.exception("step %d failed", plan.step)
                self._host.fail(pending, indices, reason(error))
        return Result(rows)

    def _next_tokens(self, pending: Pending) -> list[int] | None:
        """The token of each row of a decode-only step. None: rows have to be told apart."""
        assert self._steps is not None
        streams = self._slots.streams_of([w.slot for w in pending.plan.work])
        histories = [(i, s.history) for i, s in enumerate(streams) if s.history is not None]
        tokens = self._steps.choose(self._sampler.native_params(streams), [(i, h.ids, h.counts) for i, h in histories])
        if tokens is not None:
            for i, history in histories:
                history.add(tokens[i])
        return tokens

    def _choose(self, pending: Pending, indices: list[int], logits: Floats, masks: Masks) -> None:
        """Sample the rows of `indices`, and tell the slots what came out."""
        slots, work = self._slots, pending.plan.work
        slot = [work[i].slot for i in indices]
        own = {j: masks[i] for j, i in enumerate(indices) if i in masks} if masks else None
        streams, positions = slots.streams_of(slot), slots.position[slot].tolist()
        drafts = [pending.drafts.get(i, []) for i in indices] if pending.drafts else None
        chosen = self._sampler.sample(logits, streams, positions, drafts=drafts, masks=own)
        if self._host.proposer is None and all(choice.error is None for choice in chosen):
            self._take(pending, indices, slot, chosen)
            return
        for s, i, choice in zip(slot, indices, chosen, strict=True):
            if choice.error is not None:
                self._host.fail(pending, [i], choice.error)
                continue
            pending.rows[i].logprobs = choice.logprobs
            self._host.verified(pending, i, choice.tokens)
            slots.position[s] += len(choice.tokens)

    def _take(self, pending: Pending, indices: list[int], slot: list[int], chosen: list[Chosen]) -> None:
        """Note the one token that each of these got: what the end of `_choose` does row by row, where there were no draft tokens."""
        rows = pending.rows
        for i, choice in zip(indices, chosen, strict=True):
            rows[i].tokens = choice.tokens
            if choice.logprobs:
                rows[i].logprobs = choice.logprobs
        self._slots.last[slot] = [choice.tokens[-1] for choice in chosen]
        self._slots.position[slot] += 1
