"""The sampler on a device: rows of logits become tokens and log probabilities without leaving it.

The rules, their order and the meaning of each are those of runner/rules.py, over many rows at once; the random number of a
row is the same Philox draw, made on the host, where its seed and position are known. `DeviceSampler` is what a program
offers its runner. Here it is in plain torch, in float64: a token is the one that the host's sampler gives, unless two
candidates are nearer to a border (the edge of top_p, the drawn number) than the rounding of a float64 sum, or than the unit of
runner/masses.py; greedy choices are exactly the same: the best score, the smallest id.

A row that cannot be sampled gets a negative code in place of a token; the runner makes an error of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

BROKEN, RULED_OUT = -1, -2  # in place of a token: the logits are not numbers; no token is left
COLUMNS = ("temperature", "top_k", "typical_p", "top_p", "min_p", "repetition", "frequency", "presence", "draw")


@dataclass(slots=True)
class SamplingMetadata:
    """The sampling parameters of the n rows of one call. Tensors on the device; the flags tell what no row wants, which then costs nothing."""

    params: torch.Tensor  # float64 [n, len(COLUMNS)]
    rows: torch.Tensor | None  # int32 [n]: which rows of the logits these are; None: the first n
    narrow: torch.Tensor  # int32 [n]: 1 where top_k, top_p or min_p of a row that draws may leave out tokens
    draws: bool  # some temperature is above 0
    most_k: int  # the largest top_k below the size of the vocabulary; 0: none
    top_p: bool
    min_p: bool
    typical: torch.Tensor | None = None  # int32: places among the n of rows with a typical_p; None: there are none
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # int32 places and tokens, float64 values
    stops: tuple[torch.Tensor, torch.Tensor] | None = None  # int32 places and tokens
    seen: torch.Tensor | None = None  # bool [histories, V]: tokens of prompt and output
    counts: torch.Tensor | None = None  # int32 [histories, V]: how often each was generated
    history: torch.Tensor | None = None  # int32 [n]: whose of these a row has; history 0 is empty
    allowed: torch.Tensor | None = None  # int32 [masks, words]: a bit a token, the lowest first; 1: allowed
    mask: torch.Tensor | None = None  # int32 [n]: which of these a row has; -1: none

    def part(self, at: torch.Tensor) -> SamplingMetadata:
        """The metadata of the rows at these places (int64 [t]). Entries of other rows go to a row after the last."""
        place = torch.full((self.params.shape[0],), at.shape[0], dtype=torch.int64, device=at.device)
        place[at] = torch.arange(at.shape[0], device=at.device)
        return SamplingMetadata(
            params=self.params[at],
            rows=at if self.rows is None else self.rows[at],
            narrow=self.narrow[at],
            draws=self.draws,
            most_k=self.most_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical=self.typical,
            bias=None if self.bias is None else (place[self.bias[0]], *self.bias[1:]),
            stops=None if self.stops is None else (place[self.stops[0]], self.stops[1]),
            seen=self.seen,
            counts=self.counts,
            history=None if self.history is None else self.history[at],
            allowed=self.allowed,
            mask=None if self.mask is None else self.mask[at],
        )


class DeviceSampler(Protocol):
    """Logits are float32 [L, V] on the device, and are not changed. Nothing waits."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The best token of each row, int64 [L], or BROKEN. Of equals the smallest id."""
        ...

    def choose(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """A token, or a code, for each row that `metadata` is about: int64 [n]."""
        ...

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
        """Log probabilities of each row's token and of its `top` best: float64 [L, 2 + 2 * top] as logprob, rank, ids, their
        logprobs.

        Log-softmax of the logits as the model gave them; ties by id. A row that is not numbers gives NaN.
        """
        ...

    def warm_up(self, logits: torch.Tensor) -> None:
        """Do once what a first call would have to compile. What the logits say does not matter."""
        ...


class TorchSampler:
    """Whole rows are sorted, in float64: right on any device, not fast. `chunk` scores are worked on at a time."""

    def __init__(self, chunk: int = 1 << 24):
        self._chunk = chunk  # each takes 8 bytes, several times over

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        peak, token = logits.max(dim=-1)  # NaN is the largest of all here, so it is seen
        return torch.where(torch.isfinite(peak), token, BROKEN)

    def choose(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        rows, step = metadata.params.shape[0], max(1, self._chunk // logits.shape[1])
        if rows <= step:
            return _choose(logits, metadata)
        places = torch.arange(rows, device=logits.device)
        return torch.cat([_choose(logits, metadata.part(places[at : at + step])) for at in range(0, rows, step)])

    def warm_up(self, logits: torch.Tensor) -> None:
        pass

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
        rows, step = logits.shape[0], max(1, self._chunk // logits.shape[1])
        return torch.cat([_logprobs(logits[i : i + step], tokens[i : i + step], top) for i in range(0, rows, step)])


def _choose(logits: torch.Tensor, w: SamplingMetadata) -> torch.Tensor:
    n = w.params.shape[0]
    logits = logits[:n] if w.rows is None else logits[w.rows]
    column = {name: w.params[:, i : i + 1] for i, name in enumerate(COLUMNS)}  # [n, 1] each
    scores = torch.empty(n + 1, logits.shape[1], dtype=torch.float64, device=logits.device)
    scores[:n] = logits  # the row more takes the entries of rows that are not here
    scores = _adjust(scores, w, column)[:n]
    peak = scores.max(dim=-1, keepdim=True).values
    token = scores.argmax(dim=-1)
    if w.draws:
        temperature = column["temperature"]
        drawing = temperature > 0.0
        scores = torch.where(torch.isfinite(peak), scores - peak, 0.0)
        scores = _filter(scores / torch.where(drawing, temperature, 1.0), w, column)
        token = torch.where(drawing[:, 0], _draw(scores, column["draw"]), token)
    token = torch.where(peak[:, 0] == float("-inf"), RULED_OUT, token)
    return torch.where(torch.isfinite(logits.max(dim=-1).values), token, BROKEN)


def _adjust(scores: torch.Tensor, w: SamplingMetadata, column: dict[str, torch.Tensor]) -> torch.Tensor:
    """logit_bias, the penalties, min_tokens and the mask: what is said about single tokens."""
    n = scores.shape[0] - 1
    if w.bias is not None:
        rows, tokens, values = w.bias
        scores.index_put_((rows.long(), tokens.long()), values, accumulate=True)
    if w.seen is not None and w.counts is not None and w.history is not None:
        own, penalty = scores[:n], column["repetition"]
        seen, counts = w.seen[w.history], w.counts[w.history]
        own = torch.where(seen, torch.where(own > 0.0, own / penalty, own * penalty), own)
        own = own - (column["frequency"] * counts + column["presence"] * (counts > 0))
        scores = torch.cat((own, scores[n:]))
    if w.stops is not None:
        out = torch.full((), float("-inf"), dtype=torch.float64, device=scores.device)
        scores.index_put_((w.stops[0].long(), w.stops[1].long()), out)
    if w.allowed is not None and w.mask is not None:
        token = torch.arange(scores.shape[1], device=scores.device)
        bits = w.allowed[w.mask.clamp(min=0)][:, token // 32] >> (token % 32)  # [n, V]
        scores[:n].masked_fill_((bits & 1 == 0) & (w.mask >= 0)[:, None], float("-inf"))
    return scores


def _filter(scores: torch.Tensor, w: SamplingMetadata, column: dict[str, torch.Tensor]) -> torch.Tensor:
    """top_k, typical_p, top_p and min_p, each on what the one before it left; what is dropped becomes -inf."""
    if w.most_k:
        k = column["top_k"].long()
        best = scores.topk(w.most_k, dim=-1).values
        kth = best.gather(1, (k - 1).clamp(0, w.most_k - 1))
        above, level = scores > kth, scores == kth
        room = k - above.sum(dim=-1, keepdim=True)  # of equals, those with the smaller id
        keep = above | (level & (level.cumsum(dim=-1) <= room)) | (k <= 0) | (k >= scores.shape[1])
        scores = scores.masked_fill(~keep, float("-inf"))
    if w.typical is not None:
        share = _weights(scores)
        share = share / share.sum(dim=-1, keepdim=True)
        surprise = -share.log()
        entropy = torch.where(share > 0.0, share * surprise, 0.0).sum(dim=-1, keepdim=True)
        near = torch.where(share > 0.0, -(surprise - entropy).abs(), float("-inf"))
        keep = _leading(near, share, column["typical_p"]) | (column["typical_p"] >= 1.0)
        scores = scores.masked_fill(~keep, float("-inf"))
    if w.top_p:
        weights = _weights(scores)
        keep = _leading(scores, weights, column["top_p"] * weights.sum(dim=-1, keepdim=True))
        scores = scores.masked_fill(~(keep | (column["top_p"] >= 1.0)), float("-inf"))
    if w.min_p:
        scores = scores.masked_fill(_weights(scores) < column["min_p"], float("-inf"))
    return scores


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities up to a factor: 1 for the best."""
    return (scores - scores.max(dim=-1, keepdim=True).values).exp()


def _leading(values: torch.Tensor, weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """A mask of the shortest run of best values whose weights reach `mass`; of equals the smaller id is first."""
    order = values.sort(dim=-1, descending=True, stable=True).indices
    held = weights.gather(-1, order).cumsum(dim=-1)
    count = (held < mass).sum(dim=-1, keepdim=True) + 1
    place = torch.arange(values.shape[-1], device=values.device)
    inside = (place < count) & (values.gather(-1, order) > float("-inf"))
    return torch.zeros_like(inside).scatter_(-1, order, inside)


def _draw(scores: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """The token at `draw` of the cumulative distribution, tokens in the order of their ids."""
    cumulative = _weights(scores).cumsum(dim=-1)
    total = cumulative[:, -1:]
    place = torch.searchsorted(cumulative, draw * total, right=True)
    # The number drawn may round up to the total: then the last token that has a share of it.
    last = torch.searchsorted(cumulative, total.contiguous())
    return torch.where(place < scores.shape[1], place, last)[:, 0]


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    wide = logits.double()
    peak = wide.max(dim=-1, keepdim=True).values
    total = peak + (wide - peak).exp().sum(dim=-1, keepdim=True).log()
    total = torch.where(torch.isfinite(peak), total, float("nan"))
    at = tokens.clamp(min=0)[:, None]
    own = wide.gather(1, at)
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (wide > own) | ((wide == own) & (ids[None] < at))
    parts = [own - total, before.sum(dim=-1, keepdim=True) + 1.0]
    if top:
        # Bits of a float32 in the order of numbers, the id below them: no two keys are equal, so ties are decided.
        bits = (logits + 0.0).view(torch.int32).long()
        order = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
        key = (order << 32) | (logits.shape[1] - 1 - ids)
        best = logits.shape[1] - 1 - (key.topk(min(top, logits.shape[1]), dim=-1).values & 0xFFFFFFFF)
        parts += [best.double(), wide.gather(1, best) - total]
    return torch.cat(parts, dim=-1)
