"""Speculative decoding on a device: which sequences get draft tokens, and who knows how many of them were right.

A step that verifies draft tokens leaves a sequence's true length on the device. The host knows it when it reads the step; until
then it plans on the most that it can be (`Slots.length`), and `loose` says how far the truth may lie below.

    propose   (host)    how many draft tokens each row may have; a proposer on the host predicts tokens here
    prepare   (device)  lengths, draft tokens and their counts of this step's rows, side by side for the forward to read
    accept    (device)  the draft tokens that are what was sampled: the new length, the token to go on from
    read      (host)    the same for the host's books, when the numbers have come back

A prediction of the host's begins behind the tokens that it was told. Steps in flight have sampled some of them by now: the
device takes the draft tokens from behind those, and none where its last token is another than was predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire.backends.batch import Batch
from quire.backends.outputs import Hidden
from quire.runner.device.launched import Launched, Verification
from quire.runner.device.proposer import DeviceProposer, DeviceRows
from quire.runner.device.staging import Staging
from quire.runner.device.state import DeviceState
from quire.runner.host_state import HostState, Works, said
from quire.runner.plan import Plan, Work
from quire.runner.speculate import DraftRows, Proposer

LEVEL = 16  # rows that may be computed in vain, so that every sequence has as many


class Drafting:
    """One proposer, and for each slot how many tokens are known to the host. Lists and arrays are by slot."""

    def __init__(
        self,
        proposer: Proposer | DeviceProposer,
        host: HostState,
        state: DeviceState,
        *,
        drafts: int,
        model_groups: int,
        max_context: int,
        page_size: int,
    ):
        """`model_groups` of the tables are the model's, the others the proposer's."""
        count = host.slots.count
        state.hold_drafts(drafts)
        self._proposer = proposer
        self._on_device: DeviceProposer | None = proposer if proposer.on_device else None  # type: ignore[assignment]
        self._on_host: Proposer | None = None if proposer.on_device else proposer  # type: ignore[assignment]
        self._host, self._slots = host, host.slots
        self._state = state
        self._drafts = drafts
        self._groups = range(model_groups, len(state.tables))
        self._reach = max_context
        self._page_size = page_size
        self._staging = Staging(state.last.device)
        # By slot, what the proposer asked for of the row that the last token was sampled from.
        self._keep = [which for which in getattr(proposer, "keep", ()) if which.taken]
        self._hidden: dict[Hidden, torch.Tensor] = {}
        self.loose = np.zeros(count, np.int64)  # by how much a length is the most that it can be, not what it is
        self._told = np.zeros(count, np.int64)  # tokens of each sequence that the host has read

    # ---- sequences come and go

    def follow(self, plan: Plan) -> None:
        """Note the slots that a plan closes and opens."""
        for slot in plan.closed:
            if self._on_host is not None:
                self._on_host.close(slot)
        for new in plan.opened:
            if self._slots.failure(new.slot) is None:
                self.loose[new.slot], self._told[new.slot] = 0, len(new.tokens)
                if self._on_host is not None:
                    self._on_host.open(new.slot, self._host.text_of(new))

    def must_wait(self, plan: Plan) -> bool:
        """Whether a rule of some row asks for the position, and only a step in flight knows that: min_tokens does, near its end."""
        if self._slots.shifted and self.loose[[w.slot for w in plan.work]].any():
            return any(w.slot in self._slots.shifted for w in plan.work)
        least, streams = self._slots.position - self.loose, self._slots.streams
        unsure = [w.slot for w in plan.work if w.tokens is None and self.loose[w.slot]]
        return any((s := streams[slot]) is not None and least[slot] < s.params.min_tokens for slot in unsure)

    # ---- a step

    def propose(self, pending: Launched, works: Works, rows_for: Callable[[int, int], int | None] | None) -> None:
        """Note in `pending` what the step verifies, if anything. `rows_for` knows the captured sizes, if there are any."""
        decode = [(i, w) for i, w in works.items() if w.tokens is None and self._slots.last[w.slot] >= 0]
        if not decode or any(w.slot in self._slots.shifted for w in works.values()):
            return  # the host lays out positions of several axes, for all rows of a step: see must_wait
        may = [w.drafts if self._slots.stream(w.slot).history is None else 0 for _, w in decode]
        slots = np.array([w.slot for _, w in decode], np.intp)
        loose, told = self.loose[slots], self._told[slots]
        made = Verification([i for i, _ in decode], may, told=told.tolist(), sure=(loose == 0).tolist())
        if self._on_host is not None:
            ahead = (self._slots.length[slots] + 1 - told).tolist()
            self._predict(self._on_host, made, slots.tolist(), ahead)
        if not any(made.most) and not loose.any():
            return  # a step like any other
        made.span = int(loose.max())
        made.rows = self._level(made, works, rows_for)
        pending.verification = made
        pending.drafts = {i: [0] * n for i, n in zip(made.indices, made.most, strict=True)}

    def _predict(self, proposer: Proposer, made: Verification, slots: list[int], ahead: list[int]) -> None:
        """Ask the host's proposer, where there is room for draft tokens."""
        asked = [j for j, n in enumerate(made.most) if n]
        made.predicted = [[] for _ in slots]
        found: list[list[int]] = []
        if asked:
            found = proposer.propose(
                DraftRows([slots[j] for j in asked], [made.most[j] for j in asked], [ahead[j] for j in asked])
            )
        most, made.most = made.most, [0] * len(slots)
        for j, tokens in zip(asked, map(said, found), strict=True):
            made.most[j] = max(0, min(most[j], len(tokens) - ahead[j]))
            made.predicted[j] = tokens if made.most[j] else []

    def _level(self, made: Verification, works: Works, rows_for: Callable[[int, int], int | None] | None) -> int:
        """The same number of rows for every sequence, where that adds few rows. 0: each gets as many as it has draft tokens."""
        if rows_for is None or len(works) > len(made.indices):
            return 0
        rows = rows_for(max(2, 1 + max(made.most)), len(works))
        needed = len(works) + sum(made.most)
        return 0 if rows is None or rows * len(works) > 2 * needed + LEVEL else rows

    def settle(self, pending: Launched) -> None:
        """Leave out rows that could not be computed after all."""
        made = pending.verification
        if made is None or all(i in pending.works for i in made.indices):
            return
        kept = [j for j, i in enumerate(made.indices) if i in pending.works]

        def of(part: list[Any]) -> list[Any]:
            return [part[j] for j in kept] if part else []

        indices, most, predicted, told, sure = map(of, (made.indices, made.most, made.predicted, made.told, made.sure))
        left = Verification(indices, most, predicted, told, sure, made.rows, made.span)
        pending.verification = left if kept else None

    def prepare(self, pending: Launched, where: np.ndarray, pages: list[np.ndarray]) -> None:
        """Put the step's lengths, draft tokens and counts where the forward reads them, by slot."""
        made, state = pending.verification, self._state
        assert made is not None
        work = [pending.works[i] for i in made.indices]
        own = np.array([w.slot for w in work], np.int32)
        known = np.where(self.loose[own] > 0, -1, self._slots.length[own]).astype(np.int32)
        low = (self._slots.length[own] - self.loose[own]).astype(np.int32)
        width = max([1, *map(len, made.predicted)])
        predicted = np.zeros((len(work), width), np.int32)
        for row, tokens in zip(predicted, made.predicted, strict=False):
            row[: len(tokens)] = tokens
        many = np.array([len(tokens) for tokens in made.predicted] or [0] * len(work), np.int32)
        arrays = [
            own,
            known,
            low,
            np.array(made.most, np.int32),
            np.array(made.told, np.int32),
            many,
            predicted.ravel(),
        ]
        sent = self._staging.send([*arrays, where, *pages])
        slots, known_t, low_t, most, told, many_t, tokens = sent[:7]
        at = slots.long()
        length = torch.where(known_t < 0, state.length[at], known_t)
        state.length.index_copy_(0, at, length)
        made.shift = torch.cat((length - low_t, length.new_zeros(1))).long()
        if self._on_device is None:
            ahead = (length + 1 - told).long()
            drafts, count = _aligned(tokens.view(len(work), width), many_t, ahead, state.last[at], self._drafts)
        else:
            if where.size:
                state.set_pages(sent[7], *sent[8:])
            rows = DeviceRows(
                slots=at,
                tokens=state.last[at],
                length=length,
                most=most,
                pages=tuple(state.tables[g].index_select(0, at) for g in self._groups),
                spare=tuple(state.spare_pages[g] for g in self._groups),
                page_size=self._page_size,
                reach=self._reach,
            )
            hidden = {which: held.index_select(0, at) for which, held in self._hidden.items()}
            drafts, count = self._on_device.propose(rows, hidden)
        state.set_drafts(at, drafts, torch.minimum(count, most))

    def correct(
        self,
        pending: Launched,
        batch: Batch,
        ids: torch.Tensor,
        pos: torch.Tensor,
        kv_len: torch.Tensor,
        writes: list[torch.Tensor],
    ) -> None:
        """Put the truth about decode rows into the tensors of a batch that was made for the most that lengths can be.

        On the host, positions become the least that they can be: a window begins there, and kv_len stays where it may end.
        """
        made = pending.verification
        assert made is not None
        order = {i: b for b, i in enumerate(pending.works)}
        at = [order[i] for i in made.indices]
        own = np.array([pending.works[i].slot for i in made.indices], np.int32)
        most, widest = np.array(made.most), made.widest
        meant = np.arange(widest) <= most[:, None]
        to = (batch.q_start[at][:, None] + np.arange(widest))[meant].astype(np.int32)
        batch.pos[to] -= np.repeat(self.loose[own], 1 + most).astype(np.int32)
        arrays = [own, np.array(at, np.int32), to, np.flatnonzero(meant).astype(np.int32)]
        slots, seqs, rows, source = (x.long() for x in self._staging.send(arrays))
        new_ids, new_pos, new_len, new_writes = self._state.verifying(slots, widest, self._page_size)
        kv_len.index_copy_(0, seqs, new_len)
        for tensor, new in zip((ids, pos, *writes), (new_ids, new_pos, *new_writes), strict=True):
            tensor.index_copy_(0, rows, new.flatten()[source])

    def launched(self, pending: Launched) -> None:
        """Advance the host's lengths once a step is launched: as if all its draft tokens were right."""
        made = pending.verification
        if made is not None:
            own = [pending.works[i].slot for i in made.indices]
            self.loose[own] += made.most
            self._slots.position[own] += made.most

    @property
    def remembers(self) -> bool:
        """Whether the proposer reads rows of the model when it proposes."""
        return bool(self._keep)

    def remember(self, pending: Launched, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Note what the proposer reads of these logit rows, which the slots' last tokens were sampled from."""
        for which in self._keep:
            found = pending.hidden[which]
            if which not in self._hidden:
                self._hidden[which] = found.new_zeros(self._state.last.shape[0], found.shape[1])
            self._hidden[which].index_copy_(0, slots, found.index_select(0, rows))

    def accept(self, pending: Launched, chosen: torch.Tensor, sampled: list[Work]) -> list[torch.Tensor]:
        """Write the sampled tokens and lengths to the device's state. Gives how many draft tokens of each sampled sequence were
        right, and how many there were: int64 [S] each."""
        made, state = pending.verification, self._state
        assert made is not None
        firsts, verifies = pending.firsts(), set(made.indices)
        arrays = [
            np.array([w.slot for w in sampled], np.int32),
            np.array(list(firsts.values()), np.int32),
            np.array([i in verifies for i in firsts], np.int32),
        ]
        slots, first, own = (x.long() for x in self._staging.send(arrays))
        width = made.widest
        column = torch.arange(width, device=chosen.device)
        tokens = chosen[(first[:, None] + column).clamp(max=chosen.shape[0] - 1)]
        count = state.counts[slots].long() * own
        same = (tokens[:, :-1] == state.drafts[slots, : width - 1]) & (column[:-1] < count[:, None])
        right = same.long().cumprod(1).sum(1)
        state.set_last(slots, tokens.gather(1, right[:, None])[:, 0])
        self.remember(pending, slots, first + right)
        length = state.length[slots]
        state.length.index_copy_(0, slots, torch.where(own > 0, length + 1 + right.to(torch.int32), length))
        return [right, count]

    # ---- its answer

    def read(self, pending: Launched, index: int, tokens: list[int], drafted: int) -> None:
        """Correct the host's lengths by the tokens that a sequence got in a step, of `drafted` draft tokens. Its slot is still its own."""
        made, slot = pending.verification, pending.plan.work[index].slot
        at = made.indices.index(index) if made is not None and index in made.indices else -1
        missed = False
        if made is not None and at >= 0:
            rejected = made.most[at] + 1 - len(tokens)
            self._slots.length[slot] -= rejected
            self._slots.position[slot] -= rejected
            self.loose[slot] -= made.most[at]
            # What the step before would say was predicted wrongly: as good as a draft token that is.
            missed = made.sure[at] and made.most[at] > 0 and not drafted
        self._told[slot] += len(tokens)
        if self._on_host is not None:
            self._on_host.learn(slot, tokens, 1 if missed else drafted)


def _aligned(
    predicted: torch.Tensor, many: torch.Tensor, ahead: torch.Tensor, last: torch.Tensor, drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens [B, drafts] and their counts [B]: what was predicted, from behind the `ahead` tokens that came since."""
    width = predicted.shape[1]
    before = predicted.gather(1, (ahead - 1).clamp(0, width - 1)[:, None])[:, 0]
    fits = (ahead == 0) | (before == last)
    place = ahead[:, None] + torch.arange(drafts, device=predicted.device)
    count = torch.where(fits, many.long() - ahead, 0).clamp(0, drafts)
    return predicted.gather(1, place.clamp(0, width - 1)), count.to(torch.int32)
