"""The sampler on a device: rows of logits become tokens and log probabilities without leaving it.

The rules, their order and the meaning of each are those of rules.py, over many rows at once; the random number of a row
is the same Philox draw, made on the host, where its seed and position are known. All arithmetic is float64. So a token
is the one that the host's sampler gives, unless two candidates are nearer to a border (the edge of top_p, the drawn
number) than the rounding of a float64 sum; greedy choices are exactly the same: the best score, the smallest id.

A row that cannot be sampled gets a negative code in place of a token; the runner makes an error of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BROKEN, RULED_OUT = -1, -2  # in place of a token: the logits are not numbers; no token is left
COLUMNS = ("temperature", "top_k", "typical_p", "top_p", "min_p", "repetition", "frequency", "presence", "draw")
_CHUNK = 1 << 24  # scores that are worked on at a time, each 8 bytes and several times over


@dataclass(slots=True)
class Wishes:
    """What the rows of one call want. Tensors on the device; the flags say what no row wants, and cost nothing then."""

    params: torch.Tensor  # float64 [n, len(COLUMNS)]
    draws: bool  # some temperature is above 0
    most_k: int  # the largest top_k below the size of the vocabulary; 0: none
    typical: bool
    top_p: bool
    min_p: bool
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # rows, tokens, float64 values
    stops: tuple[torch.Tensor, torch.Tensor] | None = None  # rows, tokens
    seen: torch.Tensor | None = None  # bool [n, V]: tokens of prompt and output
    counts: torch.Tensor | None = None  # [n, V]: how often each was generated
    allowed: torch.Tensor | None = None  # bool [n, V]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The best token of each row, int64 [L], or BROKEN. Of equals the smallest id."""
    peak, token = logits.max(dim=-1)  # NaN is the largest of all here, so it is seen
    return torch.where(torch.isfinite(peak), token, BROKEN)


def choose(logits: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    """A token, or a code, for each row: int64 [n]. logits float32 [n, V]; they are not changed."""
    rows, vocab = logits.shape
    step = max(1, _CHUNK // vocab)
    if rows <= step:
        return _choose(logits, wishes)
    parts = [_choose(logits[at : at + step], _part(wishes, at, at + step)) for at in range(0, rows, step)]
    return torch.cat(parts)


def _part(w: Wishes, first: int, end: int) -> Wishes:
    """The wishes of some rows. Bias and stop entries of other rows are sent to a row that is cut off."""
    own = slice(first, end)

    def cut(rows: torch.Tensor) -> torch.Tensor:
        inside = (rows >= first) & (rows < end)
        return torch.where(inside, rows - first, len(w.params[own]))

    return Wishes(
        params=w.params[own],
        draws=w.draws,
        most_k=w.most_k,
        typical=w.typical,
        top_p=w.top_p,
        min_p=w.min_p,
        bias=None if w.bias is None else (cut(w.bias[0]), w.bias[1], w.bias[2]),
        stops=None if w.stops is None else (cut(w.stops[0]), w.stops[1]),
        seen=None if w.seen is None else w.seen[own],
        counts=None if w.counts is None else w.counts[own],
        allowed=None if w.allowed is None else w.allowed[own],
    )


def _choose(logits: torch.Tensor, w: Wishes) -> torch.Tensor:
    n = logits.shape[0]
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


def _adjust(scores: torch.Tensor, w: Wishes, column: dict[str, torch.Tensor]) -> torch.Tensor:
    """logit_bias, the penalties, min_tokens and the mask: what is said about single tokens."""
    n = scores.shape[0] - 1
    if w.bias is not None:
        rows, tokens, values = w.bias
        scores.index_put_((rows, tokens), values, accumulate=True)
    if w.seen is not None and w.counts is not None:
        own, penalty = scores[:n], column["repetition"]
        own = torch.where(w.seen, torch.where(own > 0.0, own / penalty, own * penalty), own)
        own = own - (column["frequency"] * w.counts + column["presence"] * (w.counts > 0))
        scores = torch.cat((own, scores[n:]))
    if w.stops is not None:
        scores.index_put_(w.stops, torch.full((), float("-inf"), dtype=torch.float64, device=scores.device))
    if w.allowed is not None:
        scores[:n].masked_fill_(~w.allowed, float("-inf"))
    return scores


def _filter(scores: torch.Tensor, w: Wishes, column: dict[str, torch.Tensor]) -> torch.Tensor:
    """top_k, typical_p, top_p and min_p, each on what the one before it left; what is dropped becomes -inf."""
    if w.most_k:
        k = column["top_k"].long()
        best = scores.topk(w.most_k, dim=-1).values
        kth = best.gather(1, (k - 1).clamp(0, w.most_k - 1))
        above, level = scores > kth, scores == kth
        room = k - above.sum(dim=-1, keepdim=True)  # of equals, those with the smaller id
        keep = above | (level & (level.cumsum(dim=-1) <= room)) | (k <= 0) | (k >= scores.shape[1])
        scores = scores.masked_fill(~keep, float("-inf"))
    if w.typical:
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


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """Of each row's token and of its `top` best: float64 [n, 2 + 2 * top] as logprob, rank, ids, their logprobs.

    Log-softmax of the logits as the model gave them; ties by id. A row that is not numbers gives NaN.
    """
    rows, vocab = logits.shape
    step = max(1, _CHUNK // vocab)
    return torch.cat([_logprobs(logits[i : i + step], tokens[i : i + step], top) for i in range(0, rows, step)])


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
