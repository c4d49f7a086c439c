"""Work becomes a ragged Batch: the rows of a plan joined with what the slots know.

It knows arrays and slots, never scheduling or sampling. What the host left open (the token and position of a decode row)
is read from the slots here, so this must run after the step before it has finished. Everything a backend would have to
trust is checked: token ids, positions, pages. The arrays are views of buffers that the next build overwrites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.backends.batch import I32, Batch, Given, Table
from quire.layouts import Floats
from quire.runner.plan import Work
from quire.runner.slots import Slots
from quire.runner.spans import SlotSpans

Flags = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
Drafts: TypeAlias = Sequence[Sequence[int]]


FEW = 8  # rows that are placed sooner one by one than all at once
_most = np.maximum.reduce  # what `max` comes to, without its arguments


class BadWork(ValueError):
    """One Work cannot be computed. `index` is its place in what was given to `build`."""

    def __init__(self, index: int, message: str):
        super().__init__(message)
        self.index = index


class BatchBuilder:
    """Buffers for the largest step."""

    def __init__(
        self,
        *,
        page_size: int,
        vocab_size: int,
        max_seqs: int,
        max_tokens: int,
        max_context: int,
        max_rows: int,
        groups: int = 1,
    ):
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._count = np.arange(max_tokens, dtype=np.int32)
        self._ids: I32 = np.zeros(max_tokens, np.int32)
        self._pos: I32 = np.zeros(max_tokens, np.int32)
        self._write: list[I32] = [np.zeros(max_tokens, np.int32) for _ in range(groups)]
        self._q_start: I32 = np.zeros(max_seqs + 1, np.int32)
        self._kv_len: I32 = np.zeros(max_seqs, np.int32)
        self._rows: I32 = np.zeros(max_rows, np.int32)
        self._single = min(max_seqs, max_rows, max_tokens - 1)  # sequences of one row that a step has room for
        width = -(-max_context // page_size)
        self._pages: list[I32] = [np.zeros(max_seqs * width, np.int32) for _ in range(groups)]

    def build(self, work: Sequence[Work], slots: Slots, drafts: Drafts = ()) -> Batch:
        """One Batch of all the work, whose slots must be open. logit_rows has the sampled rows first, then the prompt_logits rows, work by work.

        `drafts`, if there are any, are tokens for each work that follow the one only the slot knows; all of those rows are
        sampled. Raises BadWork for the first Work that is at fault, ValueError when the whole is too large.
        """
        if not drafts and all(w.n == 1 for w in work):
            made = self._few(work, slots) if len(work) <= FEW else self._decode(work, slots)
            if made is not None:
                return made
        tokens = self._flatten(work, drafts, slots.spans)
        count, total = len(work), len(tokens)
        if total > self._ids.size:
            raise ValueError(f"{total} tokens in a step of at most {self._ids.size}")
        slot = np.array([w.slot for w in work], np.intp)
        n = np.array([w.n if w.tokens is not None else 1 for w in work], np.int32)
        if drafts:
            n += np.array([len(own) for own in drafts], np.int32)
        start = np.array([w.start for w in work], np.int32)
        ids, pos = self._ids[:total], self._pos[:total]
        q_start, kv_len = self._q_start[: count + 1], self._kv_len[:count]

        np.cumsum(n, out=q_start[1:])
        try:
            ids[:] = tokens
        except OverflowError:
            i = next(i for i, w in enumerate(work) if w.tokens and max(map(abs, w.tokens)) >= self._vocab_size)
            raise BadWork(i, f"slot {slot[i]}: a token id beyond the vocabulary of {self._vocab_size}") from None
        device = np.array([w.tokens is None for w in work], np.bool_)
        if device.any():
            start[device] = slots.length[slot[device]]
            ids[q_start[:-1][device]] = slots.last[slot[device]]
        np.add(start, n, out=kv_len)
        self._check(slots, slot, start, device, ids)

        owner = np.repeat(np.arange(count), n)
        np.add(self._count[:total], (start - q_start[:-1])[owner], out=pos)
        page, offset = np.divmod(pos, self._page_size)
        width = -(-int(kv_len.max()) // self._page_size)
        tables: list[Table] = []
        for table, window, state, all_pages, all_write in zip(
            slots.tables, slots.windows, slots.states, self._pages, self._write, strict=True
        ):
            pages, write = all_pages[: count * width].reshape(count, width), all_write[:total]
            pages[:] = table[slot, :width]
            if window:
                self._check_window(pages, window, slot, start, kv_len)
            if state:
                self._check_state(pages, slots.length[slot], slot, start, kv_len)
                write.fill(-1)  # a state is nobody's token
                tables.append(Table(pages, write))
                continue
            write[:] = table[slot[owner], page]
            write *= self._page_size
            write += offset
            tables.append(Table(pages, write))
        first, more = tables[0], tuple(tables[1:])
        used = slots.adapter[slot]
        adapters = used[owner] if (used >= 0).any() else None
        rows = self._logit_rows(work, q_start, drafts)
        given, coords = self._beside(work, slots, start, n, pos) if slots.spans else (None, None)
        return Batch(ids, pos, q_start, kv_len, first.pages, first.write, rows, more, adapters, given, coords)

    @staticmethod
    def _beside(work: Sequence[Work], slots: Slots, start: I32, n: I32, pos: I32) -> tuple[Given | None, I32 | None]:
        """The rows that spans give for tokens of this step, and the positions along each axis where some differ."""
        at: list[I32] = []
        rows: list[Floats] = []
        coords, first = None, 0
        if any(w.slot in slots.shifted for w in work):
            coords = np.tile(pos, (max(own.axes for own in slots.spans.values()), 1))
        for w, begin, count in zip(work, start.tolist(), n.tolist(), strict=True):
            own = slots.spans.get(w.slot)
            if own is not None:
                for offset, part in own.given(begin, begin + count):
                    at.append(np.arange(first + offset, first + offset + len(part), dtype=np.int32))
                    rows.append(part)
                if coords is not None:
                    coords[:, first : first + count] = own.coords(begin, begin + count)
            first += count
        return Given(np.concatenate(at), np.concatenate(rows)) if at else None, coords

    def next_positions(self, slot: Index, slots: Slots) -> tuple[I32, list[I32]] | None:
        """The position of each slot's next token, by its length, and where its K and V are written in each group's pool.

        None: one of them cannot be written, or a group is special. `build` says which, or knows how.
        """
        pos = slots.length[slot]
        if slots.special or slot.size > self._single:
            return None
        if _most(slots.last[slot].view(np.uint32)) >= self._vocab_size:  # as unsigned, "none yet" is very large
            return None
        if _most(pos) >= self._max_context or _most(pos - slots.covered[slot] * self._page_size) >= 0:
            return None
        return pos, self._written(slot, pos, slots)

    def _written(self, slot: Index, pos: I32, slots: Slots) -> list[I32]:
        page, offset = np.divmod(pos, self._page_size)
        return [table[slot, page] * self._page_size + offset for table in slots.tables]

    def decode_only(self, slot: Index, slots: Slots) -> Batch | None:
        """The batch of the next token of each of these slots, which are open and different. None: as for `next_positions`."""
        found = self.next_positions(slot, slots)
        if found is None:
            return None
        return self._rowwise(slots.last[slot], found[0], slot, slots, found[1])

    def _plain(self, work: Sequence[Work], slots: Slots) -> bool:
        """Whether each work is one row that is sampled, of a sequence of its own, and no group is special."""
        if slots.special or slots.shifted or len(work) > self._single:
            return False
        if any(w.drafts or w.prompt_logits or not w.sample for w in work):
            return False
        if any(w.start != -1 if w.tokens is None else w.start < 0 or len(w.tokens) != 1 for w in work):
            return False
        return len({w.slot for w in work}) == len(work)

    def _few(self, work: Sequence[Work], slots: Slots) -> Batch | None:
        """What `build` gives for a few single rows, without the cost of array operations. None: `build` has to do it, and tells errors."""
        if not self._plain(work, slots):
            return None
        count, size, reach = len(work), self._page_size, 0
        ids, pos, kv_len = self._ids[:count], self._pos[:count], self._kv_len[:count]
        for i, w in enumerate(work):
            at, token = slots.length.item(w.slot), slots.last.item(w.slot)
            if w.tokens is not None:
                if 0 < at < w.start:
                    return None
                at, token = w.start, w.tokens[0]
            if not 0 <= token < self._vocab_size or at >= min(self._max_context, slots.covered.item(w.slot) * size):
                return None
            if slots.adapter.item(w.slot) >= 0:
                return None
            ids[i], pos[i], kv_len[i] = token, at, at + 1
            reach = max(reach, at + 1)
        width = -(-reach // size)
        tables: list[Table] = []
        for table, all_pages, all_write in zip(slots.tables, self._pages, self._write, strict=True):
            pages, write = all_pages[: count * width].reshape(count, width), all_write[:count]
            for i, w in enumerate(work):
                pages[i] = table[w.slot, :width]
                at = kv_len.item(i) - 1
                write[i] = table.item(w.slot, at // size) * size + at % size
            tables.append(Table(pages, write))
        return self._joined(ids, pos, kv_len, tables)

    def _decode(self, work: Sequence[Work], slots: Slots) -> Batch | None:
        """What `build` gives for one row of each sequence, which is nearly every step, faster. None: `build` has to do it, and tells errors."""
        if not self._plain(work, slots):
            return None
        own = [w.slot for w in work]
        count, slot = len(own), np.array(own, np.intp)
        ids, pos = self._ids[:count], self._pos[:count]
        length, tokens = slots.length[slot], [w.tokens[0] for w in work if w.tokens is not None]
        if not tokens:
            ids[:] = slots.last[slot]
            pos[:] = length
        elif len(tokens) == count and min(tokens) >= 0 and max(tokens) < self._vocab_size:
            ids[:] = tokens
            pos[:] = [min(w.start, self._max_context) for w in work]
            if ((length > 0) & (pos > length)).any():
                return None
        else:
            return None
        if _most(pos) >= self._max_context or _most(ids.view(np.uint32)) >= self._vocab_size:
            return None
        if _most(pos - slots.covered[slot] * self._page_size) >= 0 or _most(slots.adapter[slot]) >= 0:
            return None
        return self._rowwise(ids, pos, slot, slots, self._written(slot, pos, slots))

    def _rowwise(self, ids: I32, pos: I32, slot: Index, slots: Slots, written: Sequence[I32]) -> Batch:
        """Each sequence has one row, and its logits are wanted."""
        count, kv_len = ids.size, np.add(pos, 1, out=self._kv_len[: ids.size])
        width = -(-int(_most(kv_len)) // self._page_size)
        tables: list[Table] = []
        for table, all_pages, write in zip(slots.tables, self._pages, written, strict=True):
            pages = all_pages[: count * width].reshape(count, width)
            pages[:] = table[slot, :width]
            tables.append(Table(pages, write))
        return self._joined(ids, pos, kv_len, tables)

    def _joined(self, ids: I32, pos: I32, kv_len: I32, tables: list[Table]) -> Batch:
        q_start, rows = self._q_start[: ids.size + 1], self._rows[: ids.size]
        q_start[1:] = self._count[1 : ids.size + 1]
        rows[:] = self._count[: ids.size]
        return Batch(ids, pos, q_start, kv_len, tables[0].pages, tables[0].write, rows, tuple(tables[1:]))

    def _flatten(self, work: Sequence[Work], drafts: Drafts, spans: Mapping[int, SlotSpans]) -> list[int]:
        """All token ids in order, 0 where the device knows better or they are no text. Checks what can be checked row by row."""
        tokens: list[int] = []
        seen: set[int] = set()
        for i, w in enumerate(work):
            if w.slot in seen:
                raise BadWork(i, f"slot {w.slot} has two rows in one step")
            seen.add(w.slot)
            own = drafts[i] if drafts else ()
            if len(own) > w.drafts or (w.drafts and (w.tokens is not None or not w.sample)):
                raise BadWork(i, f"slot {w.slot}: {len(own)} draft tokens in {w.n} rows with {w.drafts} drafts")
            if w.tokens is None:
                if w.n != 1 + w.drafts or w.start != -1 or w.prompt_logits:
                    raise BadWork(
                        i, f"slot {w.slot}: a row without tokens has n=1 + drafts and start=-1, not {w.n} and {w.start}"
                    )
                tokens += (0, *own)
                continue
            if not w.tokens or len(w.tokens) != w.n or w.start < 0:
                raise BadWork(i, f"slot {w.slot}: n={w.n} with {len(w.tokens)} tokens from position {w.start}")
            if not 0 <= w.prompt_logits <= w.n - w.sample:
                raise BadWork(i, f"slot {w.slot}: prompt logits for {w.prompt_logits} of {w.n} rows")
            tokens += spans[w.slot].blanked(w.tokens, 0, w.start) if w.slot in spans else w.tokens
        return tokens

    def _check(self, slots: Slots, slot: Index, start: I32, device: Flags, ids: I32) -> None:
        """Everything that an array operation can check for all rows at once."""
        kv_len, q_start = self._kv_len[: slot.size], self._q_start[: slot.size]
        length, last, covered = slots.length[slot], slots.last[slot], slots.covered[slot]
        bad = (device & (last < 0)) | ((length > 0) & (start > length))
        bad |= (kv_len > self._max_context) | (kv_len > covered * self._page_size)
        if bad.any():
            i = int(bad.argmax())
            if device[i] and last[i] < 0:
                why = "its last token is asked for, and none was sampled yet"
            elif 0 < length[i] < start[i]:
                why = f"position {start[i]} follows {length[i]} computed tokens"
            elif kv_len[i] > self._max_context:
                why = f"{kv_len[i]} tokens in a context of {self._max_context}"
            else:
                why = f"{covered[i]} pages do not hold {kv_len[i]} tokens"
            raise BadWork(i, f"slot {slot[i]}: {why}")
        if int(ids.view(np.uint32).max()) >= self._vocab_size:  # as unsigned, a negative id is a very large one
            at = int((ids.view(np.uint32) >= self._vocab_size).argmax())
            i = int(np.searchsorted(q_start, at, side="right")) - 1
            raise BadWork(i, f"slot {slot[i]}: token {ids[at]}: the vocabulary has {self._vocab_size}")

    def _check_window(self, pages: I32, window: int, slot: Index, start: I32, kv_len: I32) -> None:
        """Every page from the window's first on must be there."""
        low, high = np.maximum(start - window + 1, 0) // self._page_size, -(-kv_len // self._page_size)
        at = np.arange(pages.shape[1])
        lost = ((at >= low[:, None]) & (at < high[:, None]) & (pages < 0)).any(axis=1)
        if lost.any():
            i = int(lost.argmax())
            raise BadWork(
                i, f"slot {slot[i]}: a page is missing of the {window} tokens that position {start[i]} looks back"
            )

    def _check_state(self, pages: I32, length: I32, slot: Index, start: I32, kv_len: I32) -> None:
        """The state to go on from must be there, and be the one after the last token that was computed; and so must the next."""
        rows, size = np.arange(slot.size), self._page_size
        lost = (start > 0) & (pages[rows, np.maximum(start - 1, 0) // size] < 0)
        lost |= pages[rows, (kv_len - 1) // size] < 0
        if lost.any():
            i = int(lost.argmax())
            raise BadWork(i, f"slot {slot[i]}: no state before position {start[i]}, or none for the one after the step")
        back = (length > 0) & (start != length)
        if back.any():
            i = int(back.argmax())
            raise BadWork(i, f"slot {slot[i]}: position {start[i]} after {length[i]} tokens: a state cannot go back")

    def _logit_rows(self, work: Sequence[Work], q_start: I32, drafts: Drafts) -> I32:
        sampled = np.array([w.sample for w in work], np.bool_)
        last = q_start[1:][sampled] - 1
        if drafts:  # of a work with draft tokens, all rows
            more = np.array([len(own) for own in drafts], np.int32)[sampled]
            ends = np.cumsum(more + 1, dtype=np.int32)
            last = np.repeat(last + 1 - ends, more + 1) + self._count[: int(ends[-1])] if ends.size else last
        rows = [last]
        for i, w in enumerate(work):
            if w.prompt_logits:
                rows.append(q_start[i] + self._count[: w.prompt_logits])
        wanted = np.concatenate(rows) if len(rows) > 1 else last
        if wanted.size > self._rows.size:
            raise ValueError(f"{wanted.size} logit rows in a step of at most {self._rows.size}")
        self._rows[: wanted.size] = wanted
        return self._rows[: wanted.size]


class DecodeOnly:
    """Recognizes decode-only plans: every sequence computes one token, which its slot sampled last, and samples the next one.

    Nearly all steps are decode-only, and repeat the step before: the same sequences in the same order, most of them with the very
    Work object they had. So the slot numbers read from a plan are cached, and only a Work that is another object is looked at.
    `slot` has the slots of the newest such plan, row for row; the same array for as long as they are the same. The caller checks
    whether they can compute another token.
    """

    __slots__ = ("_count", "_work", "slot")

    def __init__(self, count: int):
        """`count` slots exist."""
        self._count = count
        self._work: list[Work] = []
        self.slot: Index = np.zeros(0, np.intp)

    def take(self, work: list[Work]) -> bool:
        """Whether this is a decode-only plan, of different slots that exist."""
        if work and len(work) == len(self._work):
            new = [(w, old) for w, old in zip(work, self._work, strict=True) if w is not old]
            if all(w.slot == old.slot and _decodes(w) for w, old in new):
                self._work = work
                return True
        if not work or not all(map(_decodes, work)):
            return False
        slots = [w.slot for w in work]
        if len(set(slots)) < len(slots) or min(slots) < 0 or max(slots) >= self._count:
            return False
        self._work, self.slot = work, np.array(slots, np.intp)
        return True


def _decodes(w: Work) -> bool:
    return w.tokens is None and w.n == 1 and w.start == -1 and w.sample and not w.drafts and not w.prompt_logits
