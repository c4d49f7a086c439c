"""The ragged batch: one layout for prefill, chunks, decode and verification, on every backend.

T tokens of B sequences lie one after another; sequence b owns rows q_start[b] to q_start[b + 1], and attends to its
first kv_len[b] cached tokens (its own new rows included, causally). Where layers fall into several groups, each with a pool
of its own, `pages` and `write` are the first group's, and `more` has those of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.layouts import Floats

I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Table:
    """The page table of a group of layers: where each sequence's K and V are, and where those of new tokens are written."""

    pages: I32  # [B, P] page table rows; -1: nothing there that may be read
    write: I32  # [T] where each token's K and V go: page * page_size + offset


@dataclass(slots=True)
class Given:
    """Rows that take the place of the embedding's, for tokens that are no text."""

    at: I32  # [R] whose place: rows of the batch, in order
    rows: Floats  # [R, d]

    def which(self, tokens: int) -> I32:
        """The row of each of a batch's tokens; -1: the embedding's, by its id."""
        made = np.full(tokens, -1, np.int32)
        made[self.at] = np.arange(self.at.size)
        return made


@dataclass(slots=True)
class Batch:
    """int32 arrays, contiguous. A page holds `page_size` tokens; token i of sequence b lies in pages[b, i // page_size]."""

    ids: I32  # [T] token ids
    pos: I32  # [T] absolute positions
    q_start: I32  # [B + 1] first row of each sequence
    kv_len: I32  # [B] tokens in the cache once this step has written its own
    pages: I32  # [B, P] page table rows, padded with -1
    write: I32  # [T] where each token's K and V go: page * page_size + offset
    logit_rows: I32  # [L] rows whose logits are wanted
    more: tuple[Table, ...] = ()  # of further groups, as KV.more
    adapters: I32 | None = None  # [T] the slot of each row's adapter, -1: none; None: no row has one
    given: Given | None = None  # None: every token is text
    coords: I32 | None = None  # [axes, T] positions along each axis that a rope turns by; None: pos along all of them

    @property
    def taken_adapters(self) -> I32 | None:
        """`adapters` of the rows in logit_rows."""
        return None if self.adapters is None else self.adapters[self.logit_rows]

    def table(self, group: int) -> Table:
        """The pages and the places to write of a group."""
        return self.more[group - 1] if group else Table(self.pages, self.write)

    @property
    def tokens(self) -> int:
        return self.ids.size

    @property
    def sequences(self) -> int:
        return self.kv_len.size
