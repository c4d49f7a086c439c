"""A mixture of experts in plain torch: which experts a row goes to, and its way through them.

On a CPU each expert that was chosen takes its rows in turn. On other devices nobody asks how many rows an expert has:
pairs of (row, choice) are sorted by expert and laid into blocks of one expert each, of which there is a fixed number that
always suffices, and each block is multiplied with a copy of its expert's matrices. Results are added in the order of
the experts' numbers, in float32. A faster device has kernels of its own (backends/cuda/experts.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.backends.torch.quantized import Mixed, Weight
from quire.layouts import Routing

BLOCK = 16  # rows of one expert that are multiplied together
_NUMBERS = 1 << 26  # of experts' matrices that are copied at a time


@dataclass(frozen=True, slots=True)
class Mixture:
    """The weights of a mixture where they lie, and how its experts are chosen."""

    both: Weight  # [E * 2f, d]: of each expert the rows of gate, then those of up
    down: Weight  # [E * d, f]
    both_bias: torch.Tensor | None  # [E, 2f] float32
    down_bias: torch.Tensor | None  # [E, d] float32
    count: int
    limit: float | None
    routing: Routing
    routing_bias: torch.Tensor | None  # [E] float32

    @property
    def inner(self) -> int:
        """f: columns between the products."""
        return self.both.shape[0] // (2 * self.count)


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row in ascending order, int64 [T, top], and what each counts, float32 [T, top]."""
    x = logits.float()
    scores = x.sigmoid() if routing.sigmoid else x.softmax(-1)
    ranked = scores if bias is None else scores + bias
    if routing.groups > 1:
        runs = ranked.unflatten(-1, (routing.groups, -1))
        best = runs.topk(min(2 if routing.pair else 1, runs.shape[-1]), dim=-1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        ranked = runs.masked_fill(closed[..., None], float("-inf")).flatten(1)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top].sort(dim=-1).values
    share = scores.gather(1, chosen)
    if routing.renormalize:
        share = share / (share.sum(-1, keepdim=True) + 1e-20)
    return chosen, share * routing.scale


def mix(x: torch.Tensor, logits: torch.Tensor, m: Mixture, *, blocks: bool | None = None) -> torch.Tensor:
    """x [T, d] through its experts. `blocks`: the way that asks the device nothing, even on a CPU."""
    chosen, share = route(logits, m.routing, m.routing_bias)
    by_blocks = x.device.type != "cpu" if blocks is None else blocks
    return _in_blocks(x, chosen, share, m) if by_blocks else _one_by_one(x, chosen, share, m)


def _one_by_one(x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, m: Mixture) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in chosen.unique().tolist():
        rows, place = (chosen == e).nonzero(as_tuple=True)
        out[rows] += share[rows, place, None] * _expert(x[rows][None], torch.tensor([e]), m)[0].float()
    return out.to(x.dtype)


def _in_blocks(x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, m: Mixture) -> torch.Tensor:
    top, pairs = chosen.shape[1], chosen.numel()
    place, owner = align(chosen.flatten(), m.count)
    # One row more than there are pairs, for the places that hold none.
    y = torch.zeros(pairs + 1, x.shape[1], dtype=x.dtype, device=x.device)
    step = max(1, _NUMBERS // (3 * m.inner * x.shape[1]))
    for first in range(0, owner.shape[0], step):
        part = place[first : first + step]  # [c, BLOCK]
        rows = x[(part // top).clamp(max=x.shape[0] - 1)]
        y.index_copy_(0, part.flatten(), _expert(rows, owner[first : first + step], m).flatten(0, 1))
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i in range(top):
        out += share[:, i, None] * y[:-1].view(x.shape[0], top, -1)[:, i].float()
    return out.to(x.dtype)


def align(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs, given by their expert [P], in blocks of one expert each: int64 [N, BLOCK] with P where there is none, and
    the expert of each block [N]. N depends on P and `count` alone."""
    pairs, device = experts.shape[0], experts.device
    order = experts.sort(stable=True).indices
    sizes = (experts[:, None] == torch.arange(count, device=device)).sum(0)
    blocks = (sizes + BLOCK - 1) // BLOCK
    ends = blocks.cumsum(0)
    index = torch.arange(min(pairs, pairs // BLOCK + count), device=device)
    owner = torch.searchsorted(ends, index, right=True).clamp(max=count - 1)
    local = (index - (ends - blocks)[owner])[:, None] * BLOCK + torch.arange(BLOCK, device=device)
    live = (index < ends[-1])[:, None] & (local < sizes[owner, None])
    first = (sizes.cumsum(0) - sizes)[owner, None]
    return torch.where(live, order[(first + local).clamp(max=pairs - 1)], pairs), owner


def _expert(rows: torch.Tensor, owner: torch.Tensor, m: Mixture) -> torch.Tensor:
    """rows [c, n, d], each block through the expert that owns it [c] -> [c, n, d]."""
    f, d = m.inner, rows.shape[-1]
    both = rows @ _matrices(m.both, owner, 2 * f, rows.dtype).transpose(1, 2)
    if m.both_bias is not None:
        both = both.float() + m.both_bias[owner, None]
    y = activate(both, m.limit).to(rows.dtype) @ _matrices(m.down, owner, d, rows.dtype).transpose(1, 2)
    return y if m.down_bias is None else (y.float() + m.down_bias[owner, None]).to(rows.dtype)


def activate(both: torch.Tensor, limit: float | None) -> torch.Tensor:
    """The input of down, in float32, from gate and up side by side."""
    gate, up = both.float().chunk(2, dim=-1)
    if limit is None:
        return F.silu(gate) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1.0)


def _matrices(stack: Weight, owner: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix for each block: [c, n, k]."""
    if isinstance(stack, torch.Tensor):
        return stack.unflatten(0, (-1, n))[owner]
    assert not isinstance(stack, Mixed)  # a stack is of one kind
    rows = owner[:, None] * n + torch.arange(n, device=owner.device)
    return stack.take(rows.flatten()).to(dtype).unflatten(0, (-1, n))
