"""How each open slot samples, ready for a device: parameters as numbers on the host, penalty histories on the device.

Parameters are a row of numbers a slot, sent with each step that samples it; what has no fixed size (logit_bias, stop ids
that min_tokens holds back) is sent as places and values, a constraint's mask as bits. Only histories live on the device,
since the device adds to them itself, and a row names the one it has; opening a slot with penalties costs a copy of its
own, and memory for histories is taken when the first one comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.backends.torch.sampler import COLUMNS, SamplingMetadata
from quire.runner.random import Draws
from quire.runner.sampler import Masks, Stream

_AT = {name: i for i, name in enumerate(COLUMNS)}


@dataclass(slots=True)
class RowSampling:
    """The rows of one step that need more than the best logit. Arrays on the host, to be sent."""

    rows: npt.NDArray[np.intp]  # places among the sampled rows
    every: bool  # these are all of them
    params: np.ndarray  # float64 [n, COLUMNS]
    narrow: np.ndarray  # bool [n]: a filter may leave out tokens
    histories: npt.NDArray[np.int32]  # of each row; empty when none has any
    typical: npt.NDArray[np.intp]  # places among `rows` of those with a typical_p
    bias: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    stops: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    masks: list[int] = field(default_factory=list)  # which of `allowed` each row has, -1: none; empty: nobody has any
    allowed: list[np.ndarray] = field(default_factory=list)  # int32 [words] each
    # Where the device alone knows a row's position: the draws at the least that it can be and the `span` after it, and whose
    # length says which.
    draws: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 [n, 1 + span], or empty
    owner: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # [n]

    def arrays(self) -> list[np.ndarray]:
        """Everything, as Staging takes it; `SlotSampling.metadata` reads it back."""
        lists = (self.narrow, self.rows, self.histories, self.typical, *self.bias[:2], *self.stops, self.masks)
        bits = np.concatenate(self.allowed) if self.allowed else np.zeros(0, np.int32)
        ints = (*(np.asarray(x, np.int32) for x in lists), bits)
        return [*ints, self.owner, self.params.ravel(), np.array(self.bias[2], np.float64), self.draws.ravel()]


class SlotSampling:
    """Parameters by slot, and the histories of those with penalties."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device):
        self._vocab = vocab_size
        self._device = device
        self._params = np.zeros((max_seqs, len(COLUMNS)))
        self._draws = Draws(max_seqs)
        self.plain = np.ones(max_seqs, np.bool_)  # greedy without a rule
        self.logprobs = np.full(max_seqs, -1, np.int32)  # how many alternatives; -1: none at all
        self._lists = np.zeros(max_seqs, np.int64)  # up to which position tokens are to be named: biased, or held back
        self._streams: list[Stream | None] = [None] * max_seqs
        self._histories = Histories(vocab_size, device)

    def open(self, slot: int, stream: Stream) -> None:
        """A sequence takes the slot."""
        p = stream.params
        self._params[slot] = (
            p.temperature, p.top_k, p.typical_p, p.top_p, p.min_p,
            p.repetition_penalty, p.frequency_penalty, p.presence_penalty, 0.0,
        )  # fmt: skip
        self._draws.open(slot, stream.seed)
        self.plain[slot] = p.temperature == 0.0 and not stream.rules
        self.logprobs[slot] = -1 if p.logprobs is None else p.logprobs
        self._lists[slot] = np.iinfo(np.int64).max if p.logit_bias else p.min_tokens
        self._streams[slot] = stream
        self._histories.close(slot)
        if stream.history is not None:
            self._histories.open(slot, stream.history.ids, stream.history.counts)

    def close(self, slot: int) -> None:
        """Forget a slot: its sequence has ended."""
        self._streams[slot] = None
        self._histories.close(slot)

    def gather(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        masked: Masks | None = None,
        *,
        meant: np.ndarray | None = None,
        owner: np.ndarray | None = None,
        span: int = 0,
    ) -> RowSampling | None:
        """How these rows sample; None when each takes its best logit. `masked` are by index among the rows.

        Only rows that are `meant` are looked at. `positions` are the least that they can be, and the truth lies at most
        `span` above; the device knows how far that of each row's `owner` does.
        """
        special = ~self.plain[slots]
        if meant is not None:
            special &= meant
        for i in masked or ():
            special[i] = True
        if not special.any():
            return None
        rows = np.flatnonzero(special)
        own, at = slots[rows], positions[rows]
        params = self._params[own]
        params[:, _AT["draw"]] = self._draws.at(own, at)
        k, drawing = params[:, _AT["top_k"]], params[:, _AT["temperature"]] > 0.0
        narrow = ((k > 0) & (k < self._vocab)) | (params[:, _AT["top_p"]] < 1.0) | (params[:, _AT["min_p"]] > 0.0)
        typical = np.flatnonzero((params[:, _AT["typical_p"]] < 1.0) & drawing)
        every, histories = rows.size == slots.size, self._histories.rows(own)
        found = RowSampling(rows, every, params, narrow & drawing, histories, typical)
        if span and owner is not None and drawing.any():
            every_place = at[:, None] + np.arange(1 + span)
            found.draws = self._draws.at(np.repeat(own, 1 + span), every_place.ravel()).reshape(-1, 1 + span)
            found.owner = owner[rows].astype(np.int32)
        for i in np.flatnonzero(at < self._lists[own]).tolist():
            position, stream = at[i], self._streams[own[i]]
            assert stream is not None  # only open slots are sampled
            for token, value in stream.params.logit_bias.items():
                found.bias[0].append(i)
                found.bias[1].append(token)
                found.bias[2].append(value)
            if position < stream.params.min_tokens:
                found.stops[0].extend([i] * stream.stop_ids.size)
                found.stops[1].extend(stream.stop_ids.tolist())
        if masked:
            for row in rows.tolist():
                found.masks.append(len(found.allowed) if row in masked else -1)
                if row in masked:
                    found.allowed.append(_bits(np.atleast_2d(masked[row])[0]))
        return found

    def metadata(
        self, sampling: RowSampling, sent: list[torch.Tensor], shift: torch.Tensor | None = None
    ) -> SamplingMetadata:
        """The same rows on the device. `sent` is what became of `sampling.arrays()`; `shift` says of each owner how far its
        position lies above the least that it can be."""
        narrow, rows, history, typical, *pairs, mask, bits, owner, params, values, draws = sent
        if shift is not None and sampling.draws.size:
            place = shift[owner.long()].clamp(0, sampling.draws.shape[1] - 1)
            params.view(-1, len(COLUMNS))[:, _AT["draw"]] = draws.view(sampling.draws.shape).gather(1, place[:, None])[
                :, 0
            ]
        bias_rows, bias_tokens, stop_rows, stop_tokens = pairs
        p = sampling.params
        k, drawing = p[:, _AT["top_k"]], p[:, _AT["temperature"]] > 0.0
        seen, counts = self._histories.seen, self._histories.counts
        return SamplingMetadata(
            params=params.view(-1, len(COLUMNS)),
            rows=None if sampling.every else rows,
            narrow=narrow,
            draws=bool(drawing.any()),
            most_k=int(k[(k < self._vocab) & drawing].max(initial=0)),
            top_p=bool((p[drawing, _AT["top_p"]] < 1.0).any()),
            min_p=bool((p[drawing, _AT["min_p"]] > 0.0).any()),
            typical=typical if sampling.typical.size else None,
            bias=(bias_rows, bias_tokens, values) if sampling.bias[0] else None,
            stops=(stop_rows, stop_tokens) if sampling.stops[0] else None,
            seen=seen if sampling.histories.size else None,
            counts=counts if sampling.histories.size else None,
            history=history if sampling.histories.size else None,
            allowed=bits.view(len(sampling.allowed), -1) if sampling.masks else None,
            mask=mask if sampling.masks else None,
        )

    def add(self, metadata: SamplingMetadata, tokens: torch.Tensor) -> None:
        """Add the chosen tokens to the histories of their slots; codes in place of tokens are ignored."""
        if metadata.history is not None:
            self._histories.add(metadata.history, tokens)


def _bits(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """A bit a token, the lowest first, in whole words."""
    packed = np.packbits(mask, bitorder="little")
    return np.concatenate((packed, np.zeros(-packed.size % 4, np.uint8))).view("<i4")


class Histories:
    """Rows over the vocabulary, for slots with penalties. Row 0 stays empty: it stands for slots without any."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._vocab = vocab_size
        self._device = device
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def open(self, slot: int, ids: Any, counts: Any) -> None:
        if not self._free:
            self._grow()
        row = self._rows[slot] = self._free.pop()
        at = torch.from_numpy(np.asarray(ids, np.int64)).to(self._device)
        self.seen[row].zero_()
        self.counts[row].zero_()
        self.seen[row, at] = True
        self.counts[row, at] = torch.from_numpy(np.asarray(counts, np.int32)).to(self._device)

    def close(self, slot: int) -> None:
        if slot in self._rows:
            self._free.append(self._rows.pop(slot))

    def rows(self, slots: np.ndarray) -> npt.NDArray[np.int32]:
        """The row of each slot; nothing when no slot has any."""
        rows = [self._rows.get(slot, 0) for slot in slots.tolist()] if self._rows else []
        return np.array(rows if any(rows) else [], np.int32)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """One token more for each row (no row but 0 comes twice); a code, or row 0, adds nothing."""
        real = (rows > 0) & (tokens >= 0)
        at = torch.where(real, rows.long() * self._vocab + tokens, 0)
        # What is not real is written to the first place of row 0, as the nothing that is there already.
        self.seen.view(-1).index_put_((at,), real)
        self.counts.view(-1).index_add_(0, at, real.to(torch.int32))

    def _grow(self) -> None:
        old = self.seen.shape[0]
        more = max(4, old)
        self.seen = torch.cat((self.seen, self.seen.new_zeros(more, self._vocab)))
        self.counts = torch.cat((self.counts, self.counts.new_zeros(more, self._vocab)))
        self._free += range(max(1, old), old + more)
