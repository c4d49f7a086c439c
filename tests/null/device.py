"""A device without a model. It applies plans as a runner must, owns true lengths, and checks every KV read.

The "KV" of a position is a hash of the whole prefix up to it, so that a page read where it does not belong, or that was
overwritten, is caught at the read. Steps are executed when launched, in order, as one stream of a real device would;
results reach the scheduler later.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import quire.runner.spans
from quire.runner.plan import Logprob, Open, Plan, Result, Row, Work
from quire.runner.speculate import DraftRows, Proposer
from tests.null.spans import NO_TEXT, seen

VOCAB = 11
WRONG = 99  # a draft that is never right
STATE = -1  # in place of a window: a page is the state after its last computed token, here the hash of all before


class Caught(AssertionError):
    """The harness found a fault."""


def expect(condition: bool, *what: object) -> None:
    """Raise Caught unless the condition holds."""
    if not condition:
        raise Caught(*what)


def start_of(namespace: str) -> int:
    """The hash of an empty prefix. Namespaces differ, so reading across them is caught."""
    return sum((i + 1) * ord(c) for i, c in enumerate(namespace))


def grow(prefix: int, token: int) -> int:
    """The hash of a prefix with one more token."""
    return hash((prefix, token))


def choose(prefix: int, seed: int, banned: frozenset[int]) -> int:
    """The next token after a prefix: the whole of this model."""
    token = hash((prefix, seed)) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def logprob(prefix: int, token: int) -> Logprob:
    """A log probability that depends on everything before it."""
    return Logprob(token, -(hash((prefix, token, 5)) % 997) / 100, 1 + hash((prefix, token)) % 7, [])


@dataclass
class Slot:
    """What the device keeps for a sequence."""

    opened: Open
    prefix: list[int]  # prefix[i] is the hash of tokens[:i]
    tokens: list[int]
    length: int = 0  # KV written and verified
    rows: list[list[int]] = field(default_factory=list)  # a page row in each group
    contents: list[int] = field(default_factory=list)  # what is to be seen at each place, at opening
    spans: Any = None  # of the code under test
    failed: bool = False  # what is in flight behind an error has nothing to go on

    def push(self, token: int, seen: int | None = None) -> None:
        """A token more; `seen`: what is there, where that is no token."""
        self.tokens.append(token)
        self.prefix.append(grow(self.prefix[-1], token if seen is None else seen))

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.prefix[length + 1 :]

    def sample(self) -> int:
        """The token after all of self.tokens."""
        early = len(self.tokens) - self.opened.prompt_len < self.opened.sampling.min_tokens
        return choose(self.prefix[-1], self.opened.seed, frozenset(self.opened.stop_ids if early else ()))


class Device:
    """Executes plans. `fail` is the chance that a row reports an error, `hit` that a draft is right."""

    def __init__(
        self, pools: list[tuple[int, int]], page_size: int, slots: int, rng: random.Random, fail: float, hit: float
    ) -> None:
        """`pools` has the pages of each group and how many tokens its layers see; 0: all, STATE: they carry a state."""
        self.page_size = page_size
        self.kv: list[list[int | None]] = [[None] * (pages * page_size) for pages, _ in pools]
        self.windows = [window for _, window in pools]
        self.slots: list[Slot | None] = [None] * slots
        self.rng = rng
        self.fail = fail
        self.hit = hit
        self.reads = 0
        self.proposer: Proposer | None = None  # None: drafts are right by chance
        self.spans: ModuleType | Any = quire.runner.spans  # the code under test

    def launch(self, plan: Plan, namespaces: dict[int, str]) -> Result:
        """Execute a step. `namespaces` maps keys of sequences to theirs: only the check of reads uses it."""
        for number in plan.closed:
            expect(self.slots[number] is not None, "a slot was closed that is not open", number)
            self.slots[number] = None
        owner = {w.slot: namespaces[w.key] for w in plan.work}
        expect(len(owner) == len(plan.work), "two rows for one slot")
        for opened in plan.opened:
            expect(self.slots[opened.slot] is None, "a slot was opened that is in use", opened.slot)
            expect(opened.slot in owner, "a slot was opened without work", opened.slot)
            slot = self.slots[opened.slot] = Slot(
                opened, [start_of(owner[opened.slot])], [], rows=[[] for _ in self.kv]
            )
            contents = seen(opened.tokens, opened.spans)
            expect(max(contents) < NO_TEXT, "an id that stands for a span which is not there")
            for token, content in zip(opened.tokens, contents, strict=True):
                slot.push(token, content)
            slot.contents, slot.spans = contents, self.spans.SlotSpans(opened.spans)
            if self.proposer is not None:
                self.proposer.open(opened.slot, [-1 if token >= NO_TEXT else token for token in opened.tokens])
        return Result([self._row(work) for work in plan.work])

    def _row(self, work: Work) -> Row:
        slot = self.slots[work.slot]
        if slot is None:
            raise Caught("work for a slot that is not open", work.slot)
        if work.pages:
            expect(len(work.more) == len(self.kv) - 1, "rows for another number of groups", len(work.more))
            for row, pages in zip(slot.rows, [work.pages, *work.more], strict=True):
                expect(work.page_from <= len(row), "a gap in the page row", work.page_from, len(row))
                expect(len(pages) == len(work.pages), "rows that are not equally long")
                row[work.page_from : work.page_from + len(pages)] = pages
        if slot.failed or self.rng.random() < self.fail:
            slot.failed = True
            start = slot.length = max(slot.length, work.start)
            self._write(slot, start, min(work.n, len(slot.tokens) - start), failed=True)
            return Row(0, error="this row failed")
        return self._known(slot, work) if work.tokens is not None else self._verify(slot, work)

    def _known(self, slot: Slot, work: Work) -> Row:
        """The host gave the tokens and where they start."""
        start, end = work.start, work.start + work.n
        expect(slot.tokens[start:end] == work.tokens, "the host's tokens are not the device's", start)
        expect(self._gathered(slot, work) == slot.contents[start:end], "other rows than the span's", start)
        expect(slot.length in (0, start), "a chunk does not start where the last one ended", start, slot.length)
        expect(not work.sample or end == len(slot.tokens), "sampled before the end")
        self._write(slot, start, work.n)
        slot.length = end
        row = Row(work.n)
        if slot.opened.sampling.prompt_logprobs is not None:
            for at in range(start, start + work.prompt_logits):
                row.prompt_logprobs = [*row.prompt_logprobs, logprob(slot.prefix[at + 1], slot.tokens[at + 1])]
        if work.sample:
            token = slot.sample()
            self._say(slot, row, token)
            slot.push(token)
            self._learn(work, row, 0)
        return row

    def _gathered(self, slot: Slot, work: Work) -> list[int]:
        """What a batch builder would bring to the device for a chunk: tokens, and given rows in their places."""
        made = slot.spans.blanked(work.tokens, VOCAB, work.start)
        expect(max(made) <= VOCAB, "an id that is no token's", work.start)
        for at, rows in slot.spans.given(work.start, work.start + work.n):
            expect(made[at : at + len(rows)] == [VOCAB] * len(rows), "rows for a token", work.start + at)
            made[at : at + len(rows)] = [-int(x) for x in rows.ravel()]
        return made

    def _verify(self, slot: Slot, work: Work) -> Row:
        """The device knows the last token. Draft more, compute all, keep what sampling would have chosen."""
        expect(slot.length == len(slot.tokens) - 1, "the device does not know the last token")
        expect(work.n == 1 + work.drafts and work.sample, "n is not one and the drafts")
        start = slot.length
        if self.proposer is None:
            for _ in range(work.drafts):
                slot.push(slot.sample() if self.rng.random() < self.hit else WRONG)
        else:
            for token in self.proposer.propose(DraftRows([work.slot], [work.drafts], [0]))[0] if work.drafts else []:
                if token < 0:  # what is no text cannot be said again
                    break
                slot.push(token)
        drafts = slot.tokens[start + 1 :]
        expect(len(drafts) <= work.drafts, "more drafts than were planned")
        self._write(slot, start, 1 + len(drafts))
        slot.cut(start + 1)
        row = Row(0, drafted=len(drafts))
        for draft in [*drafts, None]:
            token = slot.sample()
            self._say(slot, row, token)
            slot.push(token)
            row.accepted += 1
            if token != draft:
                break
        slot.length = start + row.accepted
        self._learn(work, row, len(drafts))
        return row

    def _learn(self, work: Work, row: Row, drafted: int) -> None:
        if self.proposer is not None:
            self.proposer.learn(work.slot, row.tokens, drafted)

    def _say(self, slot: Slot, row: Row, token: int) -> None:
        row.tokens.append(token)
        if slot.opened.sampling.logprobs is not None:
            row.logprobs = [*row.logprobs, logprob(slot.prefix[-1], token)]

    def _carry(self, slot: Slot, row: list[int], kv: list[int | None], start: int, n: int, failed: bool) -> None:
        """Go on from the state before `start`, and leave those of pages that end on the way, and the last one."""
        size, end = self.page_size, start + n
        if n <= 0:
            return
        if start and not failed:  # after a failure nobody looks at what is computed
            page = row[(start - 1) // size]
            expect(page >= 0, "no state to go on from", start)
            expect(kv[page] == slot.prefix[start], "a state that is not the one before", start)
        expect(failed or row[(end - 1) // size] >= 0, "no place for the state after the step", end)
        for i in range(start // size, (end - 1) // size + 1):
            if row[i] >= 0:
                kv[row[i]] = slot.prefix[min(end, (i + 1) * size)]
        self.reads += 1

    def _write(self, slot: Slot, start: int, n: int, failed: bool = False) -> None:
        """Compute n positions from `start`: write their KV, then read all KV they attend to."""
        size, prefix = self.page_size, slot.prefix
        for row, kv, window in zip(slot.rows, self.kv, self.windows, strict=True):
            expect(start + n <= len(row) * size, "KV written past the page row", start + n, len(row))
            if window == STATE:
                self._carry(slot, row, kv, start, n, failed)
                continue
            low = max(0, start - window + 1) if window else 0
            expect(min(row[low // size : -(-(start + n) // size)], default=0) >= 0, "a page that is not there", low)
            for at in range(start, start + n):
                kv[row[at // size] * size + at % size] = prefix[at + 1]
            for at in range(low, start + n):
                if kv[row[at // size] * size + at % size] != prefix[at + 1]:
                    raise Caught("stale KV", at, start, n)
            self.reads += start + n - low
