"""Slots: what the device knows about each running sequence. The device owns this truth; the host plans on bounds.

One row per slot: the last token sampled, how many tokens have their K and V in the cache, how many tokens were
generated, a row in each group's page table, and how tokens are chosen. Only the runner's own thread touches it, in the order of the plans,
so a step may be planned before the one that it depends on has run.

A slot that failed stays failed until it is opened again: a later step, planned before the failure was known, gets the
same error instead of continuing from a state that is not true.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.backends.batch import I32
from quire.runner.plan import Open, Work
from quire.runner.sampler import Stream
from quire.runner.spans import SlotSpans


class Slots:
    """Arrays over slots. `last`, `length` and `position` are read and written by rows of slot numbers.

    `pages` of the first group's pool, and the `window` that its layers see (0: everything); `more` has both of further groups;
    `states` says which of all groups have states for pages.
    """

    def __init__(
        self,
        max_seqs: int,
        max_pages: int,
        *,
        pages: int,
        vocab_size: int,
        window: int = 0,
        more: Sequence[tuple[int, int]] = (),
        states: Sequence[bool] = (),
    ):
        self._pages = (pages, *(pages for pages, _ in more))
        self.windows = (window, *(window for _, window in more))
        self.states = tuple(states) or (False,) * len(self._pages)
        self._vocab_size = vocab_size
        self.last: I32 = np.full(max_seqs, -1, np.int32)  # the token sampled last; -1: none yet
        self.length: I32 = np.zeros(max_seqs, np.int32)  # tokens in the cache; the next one goes here
        self.position: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)  # tokens generated
        self.tables: list[I32] = [np.full((max_seqs, max_pages), -1, np.int32) for _ in self._pages]
        self.covered: I32 = np.zeros(max_seqs, np.int32)  # entries of each table that are told, all from the first on
        self.adapter: I32 = np.full(max_seqs, -1, np.int32)  # where its adapter is; -1: it has none
        self.live: npt.NDArray[np.bool_] = np.zeros(max_seqs, np.bool_)  # open, and not failed
        self.streams: list[Stream | None] = [None] * max_seqs
        self._known: list[list[int]] = [
            [] for _ in range(max_seqs)
        ]  # tokens at opening, where their logprobs are wanted
        self.spans: dict[int, SlotSpans] = {}  # of slots whose prompt has some
        self.shifted: set[int] = set()  # slots whose tokens are elsewhere than their indices say
        self._failure: dict[int, str] = {}

    @property
    def count(self) -> int:
        return self.last.size

    @property
    def special(self) -> bool:
        """Whether some group's pages are not just those of every token so far."""
        return any(self.windows) or any(self.states)

    @property
    def table(self) -> I32:
        """The first group's."""
        return self.tables[0]

    def close(self, slot: int) -> None:
        """The sequence is over. Closing a slot twice is harmless."""
        self._check(slot)
        self.live[slot] = False
        self.streams[slot] = None
        self._known[slot] = []
        if slot in self.spans:
            del self.spans[slot]
            self.shifted.discard(slot)
        self._failure.pop(slot, None)
        self._clear(slot)

    def open(self, new: Open) -> None:
        """A sequence takes a slot; with tokens beyond its prompt it resumes where it was."""
        slot, prompt_len = new.slot, new.prompt_len
        self._check(slot)
        if self.streams[slot] is not None:
            raise ValueError(f"slot {slot} is opened twice")
        if not 0 < prompt_len <= len(new.tokens):
            raise ValueError(f"slot {slot}: a prompt of {prompt_len} tokens in a sequence of {len(new.tokens)}")
        self._failure.pop(slot, None)
        self._clear(slot)
        self.position[slot] = len(new.tokens) - prompt_len
        self._known[slot] = new.tokens if new.sampling.prompt_logprobs is not None else []
        prompt = new.tokens[:prompt_len]
        if new.spans:
            prompt = self._note(slot, new, prompt)
        self.streams[slot] = Stream(
            new.sampling,
            new.seed,
            self._vocab_size,
            stop_ids=new.stop_ids,
            prompt=prompt,
            output=new.tokens[prompt_len:],
        )
        self.live[slot] = True

    def _note(self, slot: int, new: Open, prompt: list[int]) -> list[int]:
        """Keep the spans of a prompt. What of it is text: that alone is penalized for being there."""
        if new.spans[-1].end > len(prompt):
            raise ValueError(
                f"slot {slot}: a span ends at {new.spans[-1].end}, behind a prompt of {len(prompt)} tokens"
            )
        own = self.spans[slot] = SlotSpans(new.spans)
        if own.shifts:
            self.shifted.add(slot)
        return [token for token in own.blanked(prompt, -1) if token >= 0]

    def place(self, work: Work) -> None:
        """Apply the page-table change that a Work brings."""
        if not work.pages:
            return
        end, covered = work.page_from + len(work.pages), int(self.covered[work.slot])
        if not 0 <= work.page_from <= covered or end > self.table.shape[1]:
            raise ValueError(
                f"slot {work.slot}: pages {work.page_from} to {end} follow {covered} of {self.table.shape[1]}"
            )
        rows = [work.pages, *work.more]
        if len(rows) != len(self.tables) or any(len(row) != len(work.pages) for row in rows):
            raise ValueError(f"slot {work.slot}: {[len(row) for row in rows]} pages for {len(self.tables)} groups")
        for row, most, window, state in zip(rows, self._pages, self.windows, self.states, strict=True):
            if min(row) < (-1 if window or state else 0) or max(row) >= most:
                raise ValueError(f"slot {work.slot}: page numbers {row} in a pool of {most}")
        for row, table in zip(rows, self.tables, strict=True):
            table[work.slot, work.page_from : end] = row
        self.covered[work.slot] = max(covered, end)

    def place_ones(self, works: Sequence[Work]) -> bool:
        """`place` for many that bring a page each, of slots that are open, at once. False: nothing was done; see to each."""
        if len(self.tables) > 1 or any(len(work.pages) != 1 for work in works):
            return False
        slot, at, page = np.array([(work.slot, work.page_from, work.pages[0]) for work in works], np.int64).T
        if slot.min() < 0 or slot.max() >= self.count or not self.live[slot].all():
            return False
        covered = self.covered[slot]
        if at.min() < 0 or (at > covered).any() or at.max() >= self.table.shape[1]:
            return False
        if page.min() < 0 or page.max() >= self._pages[0]:
            return False
        self.table[slot, at] = page
        self.covered[slot] = np.maximum(covered, at + 1)
        return True

    def stream(self, slot: int) -> Stream:
        """How the sequence in `slot` chooses its tokens."""
        self._check(slot)
        stream = self.streams[slot]
        if stream is None:
            raise ValueError(f"slot {slot} is not open")
        return stream

    def streams_of(self, slots: Sequence[int]) -> list[Stream]:
        """`stream` of each."""
        found = [stream for slot in slots if (stream := self.streams[slot]) is not None]
        return found if len(found) == len(slots) else [self.stream(slot) for slot in slots]  # which says what is wrong

    def after(self, slot: int, first: int, n: int) -> list[int]:
        """The tokens that follow positions first .. first + n - 1, known since the slot was opened."""
        tokens = self._known[slot][first + 1 : first + 1 + n]
        if len(tokens) != n:
            raise ValueError(
                f"slot {slot}: prompt logprobs after position {first + n - 1} of {len(self._known[slot])} known tokens"
            )
        return tokens

    def fail(self, slots: Sequence[int], why: str) -> None:
        """Note that the sequences in these slots failed, and why."""
        for slot in slots:
            self._failure[slot] = why
            if 0 <= slot < self.count:
                self.live[slot] = False

    def failure(self, slot: int) -> str | None:
        """Why the sequence in `slot` cannot go on, if it cannot."""
        if slot in self._failure:
            return self._failure[slot]
        if not 0 <= slot < self.count or self.streams[slot] is None:
            return f"slot {slot} is not open"
        return None

    def _clear(self, slot: int) -> None:
        self.last[slot] = -1
        self.adapter[slot] = -1
        self.length[slot] = 0
        for table in self.tables:
            table[slot, : self.covered[slot]] = -1
        self.covered[slot] = 0

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.last.size:
            raise ValueError(f"slot {slot} of {self.last.size}")
