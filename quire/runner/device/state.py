"""What the device holds of every slot: the token sampled last and its page tables, which change as steps say. With speculative
decoding also how many tokens are computed and the draft tokens, which the host learns of only when it reads a step.

The host never reads it back. One slot and one page of each pool are spare: rows that pad a captured step read and write them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.backends.torch.batch import DeviceTable


class DeviceState:
    """What the device knows of every slot: the token sampled last, and its page tables. One slot more is for padding."""

    def __init__(self, max_seqs: int, max_pages: int, pages: Sequence[int], page_size: int, device: torch.device):
        """`pages` of each group's pool."""
        self.spare = max_seqs  # its tables name one page of each pool, which no sequence has
        self.spare_pages = list(pages)
        self.spare_writes = [n * page_size for n in pages]
        self.max_pages = max_pages
        self.last = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self.tables = [torch.zeros(max_seqs + 1, max_pages, dtype=torch.int32, device=device) for _ in pages]
        for table, n in zip(self.tables, pages, strict=True):
            table[self.spare].fill_(n)
        # With a proposer, see hold_drafts. The spare slot has no tokens and no draft tokens.
        self.length = self.last.new_zeros(0)
        self.counts = self.last.new_zeros(0)
        self.drafts = self.last.new_zeros(0, 0)

    def hold_drafts(self, most: int) -> None:
        """Make room for true lengths, and for up to `most` draft tokens of each slot."""
        slots = self.last.shape[0]
        self.length, self.counts = self.last.new_zeros(slots), self.last.new_zeros(slots)
        self.drafts = self.last.new_zeros(slots, most)

    def set_drafts(self, slots: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor) -> None:
        """Write draft tokens (int32 [B, k], k at most what there is room for) and how many each row has."""
        self.counts.index_copy_(0, slots, counts.clamp(0, drafts.shape[1]).to(torch.int32))
        self.drafts[:, : drafts.shape[1]].index_copy_(0, slots, drafts.to(torch.int32))

    def verifying(
        self, slots: torch.Tensor, rows: int, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """The rows of sequences that verify: ids and pos [B, rows], kv_len [B], and the places to write in each group [B, rows].

        A sequence with fewer draft tokens repeats its last position in the rows that are too many; they write on the spare page.
        """
        own, column = slots.long(), torch.arange(rows, dtype=torch.int32, device=slots.device)
        length, count = self.length[own], self.counts[own].clamp(max=rows - 1)
        meant = column <= count[:, None]
        ids = torch.cat((self.last[own][:, None], self.drafts[own, : rows - 1]), dim=1)
        ids = torch.where(meant, ids, 0)
        pos = length[:, None] + torch.minimum(column[None], count[:, None])
        page, offset = (pos // page_size).long(), pos % page_size
        writes = [
            torch.where(meant, table.index_select(0, own).gather(1, page) * page_size + offset, spare)
            for table, spare in zip(self.tables, self.spare_writes, strict=True)
        ]
        return ids, pos, length + 1 + count, writes

    def set_pages(self, where: torch.Tensor, *pages: torch.Tensor) -> None:
        """Write pages of each group into its table, at flat indices."""
        at = where.long()
        for table, new in zip(self.tables, pages, strict=True):
            table.view(-1).index_copy_(0, at, new)

    def page_tables(
        self, slots: torch.Tensor, writes: Sequence[torch.Tensor], width: int | None = None
    ) -> list[DeviceTable]:
        """The rows of these slots in each group's table, with the places to write of their tokens."""
        own = slots.long()
        return [
            DeviceTable(table[:, :width].index_select(0, own), write)
            for table, write in zip(self.tables, writes, strict=True)
        ]

    def tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids: -1 - slot stands for what that slot sampled last."""
        return torch.where(ids < 0, self.last[(-1 - ids).clamp(min=0).long()], ids)

    def set_last(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the last sampled token of each slot. A code in place of a token is written as token 0, which is in no answer."""
        self.last.index_copy_(0, slots, tokens.clamp(min=0).to(torch.int32))
