"""The scheduler of an engine that embeds or scores: first come, first computed, as many whole texts in a step as fit.

A text takes pages of its own for as long as it is computed, and none are kept after: there is no prefix cache here. Only a
decoder's text may be cut into steps, and then it goes on before any other begins, so that at most one is open between steps.
No tensor, no clock, no I/O.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from quire.cache.pool import Pool
from quire.engine.types import FINISH_ABORT, FINISH_ERROR, FINISH_STOP, Event, Receipt, Request, Stats
from quire.observe.errors import BadRequest
from quire.observe.steps import TOKENS
from quire.runner.plan import Plan, Result, Work


@dataclass(slots=True)
class Text:
    """One text on its way."""

    key: int
    request: Request
    computed: int = 0
    steps: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.request.tokens) - self.computed


class PooledScheduler:
    """Texts in order of priority, then arrival. `whole`: a text must be computed in one step."""

    def __init__(
        self,
        *,
        budget: int,
        max_seqs: int,
        context: int,
        vocab_size: int,
        whole: bool,
        pool: Pool | None,
        page_size: int,
    ):
        if whole and budget < context:
            raise ValueError(f"a step of {budget} tokens cannot hold a text of {context}")
        self.admitted: list[str] = []
        self._budget = budget
        self._max_seqs = max_seqs
        self._context = context
        self._vocab_size = vocab_size
        self._whole = whole
        self._pool = pool
        self._page_size = page_size
        self._waiting: list[Text] = []
        self._running: dict[int, Text] = {}  # in the newest plan, or cut
        self._keys = self._steps = self._prompt_tokens = self._computed = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> int:
        """Queue a text. Raises BadRequest for one that cannot be computed."""
        tokens = request.tokens
        if not tokens:
            raise BadRequest("the text has no tokens", param="input")
        if len(tokens) > self._context:
            raise too_long(len(tokens), self._context)
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise BadRequest(f"a token id is outside of the vocabulary of {self._vocab_size}", param="input")
        self._keys += 1
        self._prompt_tokens += len(tokens)
        insort(self._waiting, Text(self._keys, request), key=lambda t: (t.request.priority, t.key))
        return self._keys

    def abort(self, request_id: str) -> list[Event]:
        """Let a text go."""
        text = next((t for t in (*self._running.values(), *self._waiting) if t.request.id == request_id), None)
        if text is None:
            return []
        if text.key in self._running:
            self._close(text)
        else:
            self._waiting.remove(text)
        return [Event(id=request_id, finish=FINISH_ABORT, receipt=_receipt(text))]

    def plan(self) -> Plan | None:
        """The open text first, then as many as fit."""
        self.admitted = []
        work: list[Work] = []
        room = self._budget
        for text in list(self._running.values()):
            work.append(self._work(text, min(text.left, room)))
            room -= work[-1].n
        while self._waiting and room > 0 and len(work) < self._max_seqs:
            text = self._waiting[0]
            if (self._whole and text.left > room) or not self._take_pages(text):
                break
            del self._waiting[0]
            self._running[text.key] = text
            self.admitted.append(text.request.id)
            work.append(self._work(text, min(text.left, room)))
            room -= work[-1].n
        if not work:
            return None
        self._steps += 1
        return Plan(step=self._steps, work=work)

    def commit(self, plan: Plan, result: Result) -> list[Event]:
        """Take a step's rows in; texts that were let go meanwhile are not there any more."""
        events: list[Event] = []
        for work, row in zip(plan.work, result.rows, strict=True):
            text = self._running.get(work.key)
            if text is None:
                continue
            text.computed += work.n
            text.steps += 1
            self._computed += work.n
            if row.error is not None:
                self._close(text)
                events.append(Event(id=text.request.id, finish=FINISH_ERROR, error=row.error, receipt=_receipt(text)))
            elif work.sample:
                self._close(text)
                events.append(Event(id=text.request.id, finish=FINISH_STOP, vector=row.vector, receipt=_receipt(text)))
        return events

    def told(self, plan: Plan) -> tuple[list[tuple[str, int]], int, dict[str, int]]:
        """Who rides in the newest plan, how many texts wait, and what holds them back: this scheduler does not know which bound."""
        rows = [(self._running[work.key].request.id, work.n) for work in plan.work]
        return rows, len(self._waiting), {TOKENS: len(self._waiting)} if self._waiting else {}

    def learn(self, plan: Plan, seconds: float) -> None:
        """Nothing here depends on time."""

    def stats(self) -> Stats:
        total = self._pool.size if self._pool else 0
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=total,
            pages_used=total - self._pool.free_count if self._pool else 0,
            page_size=self._page_size,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            computed_prompt_tokens=self._computed,
        )

    def _work(self, text: Text, n: int) -> Work:
        tokens, start = text.request.tokens, text.computed
        return Work(
            key=text.key,
            epoch=0,
            slot=0,
            n=n,
            start=start,
            tokens=tokens[start : start + n],
            sample=start + n == len(tokens),
            pages=text.pages,
            second=text.request.second,
        )

    def _take_pages(self, text: Text) -> bool:
        if self._pool is None:
            return True
        pages = self._pool.alloc(-(-len(text.request.tokens) // self._page_size))
        if pages is None:
            return False
        text.pages = pages
        return True

    def _close(self, text: Text) -> None:
        del self._running[text.key]
        if self._pool is not None:
            self._pool.free(text.pages)
        text.pages = []


def too_long(tokens: int, context: int, param: str = "input") -> BadRequest:
    """A text that does not fit."""
    return BadRequest(
        f"{param} has {tokens} tokens: the most this model takes is {context}",
        cure="shorten it, or ask for it to be cut (truncate)",
        param=param,
        code="context_length_exceeded",
    )


def _receipt(text: Text) -> Receipt:
    return Receipt(prompt_tokens=len(text.request.tokens), chunks=text.steps, steps=text.steps)
