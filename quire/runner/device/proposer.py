"""Draft tokens on a device: what a proposer there is given and gives, with no wait for the host in between.

    forward k+1:   page tables ──► propose (k draft tokens for every row) ──► verify in one step ──► sample ──► accepted lengths

A proposer on a device may have layers. Their KV is in groups of its own, behind those of the model: the scheduler gives them
pages, the prefix tree keeps them, a preemption drops them, as it does for the model's. So `follow` sees every token that
the model computes, prompts too, and what a prefix hit finds in the cache is there for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from quire.backends.ops import KV
from quire.backends.outputs import Hidden
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch, DeviceTable


@dataclass(slots=True)
class DeviceRows:
    """The sequences of a step that go on by a token of which the device alone may know. Tensors, an element each."""

    slots: torch.Tensor  # int64
    tokens: torch.Tensor  # int32: sampled last, not yet computed
    length: torch.Tensor  # int32: tokens computed before it; its own position
    most: torch.Tensor  # int32: draft tokens that are of use; 0: none
    pages: tuple[torch.Tensor, ...]  # int32 [B, P] each: the page tables of the proposer's own groups
    spare: tuple[int, ...]  # of each of these groups, a page that nobody reads: what must not be kept goes there
    page_size: int
    reach: int  # no length is more than this

    def step(self, ids: torch.Tensor, ahead: int) -> DeviceBatch:
        """A batch for the proposer's own program: `ids` at the positions `length + ahead`, a row each.

        Rows that want no draft token there compute one all the same, on the spare page.
        """
        count = self.slots.shape[0]
        past = torch.minimum(torch.full_like(self.most, ahead), self.most)
        pos = self.length + past
        tables = []
        for pages, spare in zip(self.pages, self.spare, strict=True):
            page = pages.gather(1, (pos // self.page_size).long()[:, None])[:, 0]
            page = torch.where(self.most > ahead, page, spare)
            tables.append(DeviceTable(pages, page * self.page_size + pos % self.page_size))
        rows = torch.arange(count + 1, dtype=torch.int32, device=pos.device)
        return DeviceBatch(
            ids=ids,
            pos=pos,
            q_start=rows,
            kv_len=pos + 1,
            pages=tables[0].pages,
            write=tables[0].write,
            logit_rows=rows[:-1],
            longest=1,
            reach=self.reach,
            more=tuple(tables[1:]),
            all_taken=True,
        )


HiddenRows: TypeAlias = Mapping[Hidden, torch.Tensor]


class DeviceProposer(Protocol):
    """A proposer whose draft tokens are made on the device. Nothing that it does may wait for the device, or depend on the host's clock."""

    on_device: ClassVar[bool] = True
    groups: Sequence[KV]  # of its own layers, each a group; none where it has no layers
    keep: Sequence[Hidden]  # rows of the model that it reads; the model's program was compiled to keep them

    def follow(self, batch: DeviceBatch, hidden: HiddenRows) -> None:
        """The model has computed these tokens, and `hidden` has all that was asked for of them. Called beside every launch,
        captured ones too: compute the own layers' KV."""
        ...

    def propose(self, rows: DeviceRows, hidden: HiddenRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft tokens for all rows, int32 [B, k], and how many of each row's are meant, int32 [B].

        `hidden` has those that were asked for as `taken`: of each row, that of the logits which its token was sampled from.
        """
        ...


class Followed:
    """The model's program, with a proposer's layers computed beside it, whatever the step is for and however it is launched."""

    def __init__(self, program: DeviceProgram, proposer: DeviceProposer, groups: int):
        """`groups` of the model's own come before the proposer's."""
        self._program = program
        self._proposer = proposer
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def launch(self, batch: DeviceBatch) -> torch.Tensor:
        """The model's logits."""
        logits = self._program.launch(batch)
        first, *more = [batch.table(self._groups + g) for g in range(len(self._proposer.groups))]
        own = DeviceBatch(
            ids=batch.ids,
            pos=batch.pos,
            q_start=batch.q_start,
            kv_len=batch.kv_len,
            pages=first.pages,
            write=first.write,
            logit_rows=batch.logit_rows,
            longest=batch.longest,
            reach=batch.reach,
            uniform=batch.uniform,
            host=batch.host,
            more=tuple(more),
            all_taken=batch.all_taken,
        )
        self._proposer.follow(own, batch.hidden)
        return logits
