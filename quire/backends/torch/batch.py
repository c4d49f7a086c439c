"""The ragged batch on a device: the arrays of `backends.batch.Batch` as int32 tensors, with what the host knows of them.

A kernel's grid must be chosen without asking the device, so the batch carries bounds: `longest` rows of one sequence and
a `reach` that no kv_len exceeds. `host` is the same batch as numpy arrays; it is missing while a graph is captured, where
the bounds must do. `derived` keeps what is computed once a step and used by every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.backends.batch import Batch
from quire.backends.outputs import Hidden


@dataclass(frozen=True, slots=True)
class Shared:
    """The rows that share prefixes. Rows of a group follow one another; every row of the batch is in exactly one group."""

    start: torch.Tensor  # int32 [G + 1] first row of each group
    length: torch.Tensor  # int32 [G] tokens of the shared prefix: whole pages before every row, 0 for none
    table: torch.Tensor  # int32 [G, P] pages of the prefix
    own_from: torch.Tensor  # int32 [B] the prefix length of each sequence's group


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """The page table of a group, on the device: see Table. Every entry is a page of the pool or the spare one behind it."""

    pages: torch.Tensor
    write: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceGiven:
    """Rows that take the place of the embedding's: see Given."""

    at: torch.Tensor  # int64 [R]
    rows: torch.Tensor  # float32 [R, d]


@dataclass(slots=True)
class DeviceBatch:
    """A Batch on the device: see Batch for the shapes."""

    ids: torch.Tensor
    pos: torch.Tensor
    q_start: torch.Tensor
    kv_len: torch.Tensor
    pages: torch.Tensor  # of the first group; rows may be longer than needed, entries past kv_len mean nothing
    write: torch.Tensor
    logit_rows: torch.Tensor
    longest: int  # rows of the longest sequence in this batch
    reach: int  # no kv_len is more than this
    uniform: bool = False  # every sequence has `longest` rows
    host: Batch | None = None
    shared: Shared | None = None  # for steps of one row a sequence; a device may make use of it
    into: torch.Tensor | None = None  # float32 [rows, V]: where the logits go; None: wherever there is room
    derived: dict[Any, Any] = field(default_factory=dict)
    more: tuple[DeviceTable, ...] = ()  # of further groups
    adapters: torch.Tensor | None = None  # [T] the slot of each row's adapter, -1: none; None: no row has one
    all_taken: bool = False  # logit_rows are all rows, one after another
    given: DeviceGiven | None = None  # None: every token is text; steps that are captured are
    coords: torch.Tensor | None = None  # int32 [axes, T]; None: pos along all axes
    hidden_into: Mapping[Hidden, torch.Tensor] | None = (
        None  # where rows that the program keeps go; None: wherever there is room
    )
    hidden: dict[Hidden, torch.Tensor] = field(
        default_factory=dict
    )  # those rows, once launched; valid until the next launch

    def table(self, group: int) -> DeviceTable:
        """The pages and the places to write of a group."""
        return self.more[group - 1] if group else DeviceTable(self.pages, self.write)

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> DeviceBatch:
        """A copy on the device, array by array."""
        arrays = batch.ids, batch.pos, batch.q_start, batch.kv_len, batch.pages, batch.write, batch.logit_rows
        tensors = [torch.tensor(array, dtype=torch.int32, device=device) for array in arrays]
        longest = int((batch.q_start[1:] - batch.q_start[:-1]).max(initial=0))
        more = tuple(
            DeviceTable(*(torch.tensor(array, dtype=torch.int32, device=device) for array in (t.pages, t.write)))
            for t in batch.more
        )
        own = None if batch.adapters is None else torch.tensor(batch.adapters, dtype=torch.int32, device=device)
        reach = int(batch.kv_len.max(initial=0))
        return cls(*tensors, longest=longest, reach=reach, host=batch, more=more, adapters=own, **beside(batch, device))

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def sequences(self) -> int:
        return self.kv_len.shape[0]

    @property
    def shortest(self) -> int:
        """Rows of the shortest sequence; 1 where the host does not know."""
        host = self.host
        if self.uniform:
            return self.longest
        if host is None or self.longest <= 1:
            return 1
        return self.once("shortest", lambda: int((host.q_start[1:] - host.q_start[:-1]).min()))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value that `make` gives, computed at the first call."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]


def beside(batch: Batch, device: torch.device) -> dict[str, Any]:
    """What a batch has beside its tokens, on the device: as arguments of DeviceBatch."""
    made: dict[str, Any] = {}
    if batch.given is not None:
        rows = torch.from_numpy(np.ascontiguousarray(batch.given.rows, np.float32)).to(device)
        made["given"] = DeviceGiven(torch.from_numpy(batch.given.at.astype(np.int64)).to(device), rows)
    if batch.coords is not None:
        made["coords"] = torch.from_numpy(np.ascontiguousarray(batch.coords)).to(device)
    return made
