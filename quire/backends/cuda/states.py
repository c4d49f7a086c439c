"""Layers that carry a state, on the GPU: which kernels a step's rows go through, and where their states lie.

Everything that a kernel needs to find a state is on the device (the group's page table, positions, lengths), so a captured step
serves any contents. A step of one row a sequence takes one kernel for each op. Of the others, sequences of few rows are
walked row by row, and longer ones in chunks, unless `chunked` is off: then every row is computed as a decode row is.
"""

from __future__ import annotations

import torch

from quire.backends.cuda.kernels import conv as conv_kernels
from quire.backends.cuda.kernels import delta, delta_chunk
from quire.backends.cuda.kernels.conv import Place
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.states import Heads, Inputs, States

FEW = 8  # rows of a sequence that are walked one by one: a chunk takes about as long


def place_of(states: States, batch: DeviceBatch, *, layer: int, group: int, at: int, page_size: int) -> Place:
    """The states of a layer, from number `at` on, for the sequences of a batch."""
    pool, table = states.pool(group, layer), batch.table(group).pages
    return Place(pool, at, table, batch.q_start, batch.pos, batch.kv_len, page_size)


def owners(batch: DeviceBatch) -> torch.Tensor | None:
    """The sequence of each row, int32; None where none has more than one row. Computed once a step."""
    if batch.longest <= 1:
        return None

    def make() -> torch.Tensor:
        rows = torch.arange(batch.tokens, dtype=torch.int32, device=batch.q_start.device)
        return torch.searchsorted(batch.q_start[1:].contiguous(), rows, right=True, out_int32=True)

    return batch.once("owners", make)


def conv(x: torch.Tensor, weight: torch.Tensor, batch: DeviceBatch, place: Place, *, pdl: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    conv_kernels.conv(x, weight, out, place, owner=owners(batch), pdl=pdl)
    return out


def delta_rule(
    inputs: Inputs, batch: DeviceBatch, place: Place, heads: Heads, *, chunked: bool, pdl: bool
) -> torch.Tensor:
    qkv = inputs.qkv
    out = torch.empty(qkv.shape[0], heads.heads * heads.dim, dtype=qkv.dtype, device=qkv.device)
    owner = owners(batch)
    if not chunked or owner is None or batch.longest <= FEW:
        delta.delta_rule(inputs, out, place, heads, pdl=pdl)
        return out
    if batch.shortest <= FEW:
        delta.delta_rule(inputs, out, place, heads, most=FEW, pdl=pdl)
    delta_chunk.delta_rule_of_many(inputs, out, place, heads, owner=owner, few=FEW, pdl=pdl)
    return out
