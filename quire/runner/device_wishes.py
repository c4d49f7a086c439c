"""What the open slots want of sampling, ready for a device: numbers on the host, penalty histories on the device.

Parameters are a row of numbers a slot, sent with each step that samples it; what has no fixed size (logit_bias, stop ids
that min_tokens holds back) is sent as places and values. Only histories live on the device, since the device adds to them
itself; opening a slot with penalties costs a copy of its own, and its rows of memory are taken when the first one comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.runner.device_sampler import COLUMNS, Wishes
from quire.runner.random import uniforms
from quire.runner.sampler import Masks, Stream

_AT = {name: i for i, name in enumerate(COLUMNS)}


@dataclass(slots=True)
class Asked:
    """The rows of one step that need more than the best logit. Arrays on the host, to be sent."""

    rows: list[int]  # places among the sampled rows
    slots: np.ndarray  # [n]
    params: np.ndarray  # float64 [n, COLUMNS]
    bias: tuple[list[int], list[int], list[float]]
    stops: tuple[list[int], list[int]]

    def arrays(self) -> list[np.ndarray]:
        """Everything, as Staging takes it; `SlotWishes.wishes` reads it back."""
        rows, tokens, values = self.bias
        whole = [self.rows, rows, tokens, *self.stops]
        return [*(np.array(x, np.int32) for x in whole), self.params.ravel(), np.array(values, np.float64)]


class SlotWishes:
    """Parameters by slot, and the histories of those with penalties."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device):
        self._vocab = vocab_size
        self._device = device
        self._params = np.zeros((max_seqs, len(COLUMNS)))
        self._seeds = np.zeros(max_seqs, np.uint64)
        self.plain = np.ones(max_seqs, np.bool_)  # greedy without a rule
        self.logprobs = np.full(max_seqs, -1, np.int32)  # how many alternatives; -1: none at all
        self._streams: list[Stream | None] = [None] * max_seqs
        self._histories = Histories(vocab_size, device)

    def open(self, slot: int, stream: Stream) -> None:
        """A sequence takes the slot."""
        p = stream.params
        self._params[slot] = (
            p.temperature, p.top_k, p.typical_p, p.top_p, p.min_p,
            p.repetition_penalty, p.frequency_penalty, p.presence_penalty, 0.0,
        )  # fmt: skip
        self._seeds[slot] = stream.seed & (2**64 - 1)
        self.plain[slot] = p.temperature == 0.0 and not stream.rules
        self.logprobs[slot] = -1 if p.logprobs is None else p.logprobs
        self._streams[slot] = stream
        self._histories.close(slot)
        if stream.history is not None:
            self._histories.open(slot, stream.history.ids, stream.history.counts)

    def close(self, slot: int) -> None:
        """It is over."""
        self._streams[slot] = None
        self._histories.close(slot)

    def ask(self, slots: np.ndarray, positions: np.ndarray, masked: Masks | None = None) -> Asked | None:
        """What these sampled rows want; None when each wants its best logit."""
        special = ~self.plain[slots]
        for i in masked or ():
            special[i] = True
        if not special.any():
            return None
        rows = np.flatnonzero(special)
        own, at = slots[rows], positions[rows]
        params = self._params[own]
        params[:, _AT["draw"]] = uniforms(self._seeds[own], at.astype(np.uint64))
        bias: tuple[list[int], list[int], list[float]] = ([], [], [])
        stops: tuple[list[int], list[int]] = ([], [])
        for i, (slot, position) in enumerate(zip(own.tolist(), at.tolist(), strict=True)):
            stream = self._streams[slot]
            assert stream is not None  # only open slots are sampled
            for token, value in stream.params.logit_bias.items():
                bias[0].append(i)
                bias[1].append(token)
                bias[2].append(value)
            if position < stream.params.min_tokens:
                stops[0].extend([i] * stream.stop_ids.size)
                stops[1].extend(stream.stop_ids.tolist())
        return Asked(rows.tolist(), own, params, bias, stops)

    def wishes(self, asked: Asked, sent: list[torch.Tensor], masks: Masks | None = None) -> tuple[torch.Tensor, Wishes]:
        """The rows, and the wishes, on the device. `sent` is what became of `asked.arrays()`."""
        rows, bias_rows, bias_tokens, stop_rows, stop_tokens, params, values = sent
        p, column = asked.params, _AT
        k = p[:, column["top_k"]]
        drawing = p[:, column["temperature"]] > 0.0
        seen, counts = self._histories.of(asked.slots)
        return rows.long(), Wishes(
            params=params.view(-1, len(COLUMNS)),
            draws=bool(drawing.any()),
            most_k=int(k[(k < self._vocab) & drawing].max(initial=0)),
            typical=bool((p[drawing, column["typical_p"]] < 1.0).any()),
            top_p=bool((p[drawing, column["top_p"]] < 1.0).any()),
            min_p=bool((p[drawing, column["min_p"]] > 0.0).any()),
            bias=(bias_rows.long(), bias_tokens.long(), values) if asked.bias[0] else None,
            stops=(stop_rows.long(), stop_tokens.long()) if asked.stops[0] else None,
            seen=seen,
            counts=counts,
            allowed=self._allowed(asked, masks) if masks else None,
        )

    def _allowed(self, asked: Asked, masks: Masks) -> torch.Tensor:
        whole = np.ones((len(asked.rows), self._vocab), np.bool_)
        for i, row in enumerate(asked.rows):
            if row in masks:
                whole[i] = np.atleast_2d(masks[row])[0]
        return torch.from_numpy(whole).to(self._device)

    def add(self, slots: np.ndarray, tokens: torch.Tensor) -> None:
        """These tokens were chosen; codes are ignored."""
        self._histories.add(slots, tokens)


class Histories:
    """Rows over the vocabulary, for slots with penalties. Row 0 stays empty: it stands for slots without any."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._vocab = vocab_size
        self._device = device
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def open(self, slot: int, ids: Any, counts: Any) -> None:
        if not self._free:
            self._grow()
        row = self._rows[slot] = self._free.pop()
        at = torch.from_numpy(np.asarray(ids, np.int64)).to(self._device)
        self._seen[row].zero_()
        self._counts[row].zero_()
        self._seen[row, at] = True
        self._counts[row, at] = torch.from_numpy(np.asarray(counts, np.int32)).to(self._device)

    def close(self, slot: int) -> None:
        if slot in self._rows:
            self._free.append(self._rows.pop(slot))

    def of(self, slots: np.ndarray) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which tokens each slot holds, and how often it generated them; None when no slot has penalties."""
        rows = self._places(slots)
        return (None, None) if rows is None else (self._seen[rows], self._counts[rows])

    def add(self, slots: np.ndarray, tokens: torch.Tensor) -> None:
        rows = self._places(slots)
        if rows is None:
            return
        real = (rows > 0) & (tokens >= 0)  # what is not goes to row 0, and is taken away again
        rows, tokens = torch.where(real, rows, 0), tokens.clamp(min=0)
        self._seen[rows, tokens] = True
        self._counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        self._seen[0].zero_()
        self._counts[0].zero_()

    def _places(self, slots: np.ndarray) -> torch.Tensor | None:
        rows = [self._rows.get(slot, 0) for slot in slots.tolist()]
        return torch.tensor(rows, device=self._device) if any(rows) else None

    def _grow(self) -> None:
        old = self._seen.shape[0]
        more = max(4, old)
        self._seen = torch.cat((self._seen, self._seen.new_zeros(more, self._vocab)))
        self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._vocab)))
        self._free += range(max(1, old), old + more)
