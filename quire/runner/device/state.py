"""What the device holds of every slot: the token sampled last and its page tables, which change as steps say.

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

    def set_pages(self, where: torch.Tensor, *pages: torch.Tensor) -> None:
        """Write pages of each group at flat places of its table."""
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
        """Note what was sampled. A code in place of a token is noted as token 0, which nobody will be told of."""
        self.last.index_copy_(0, slots, tokens.clamp(min=0).to(torch.int32))
