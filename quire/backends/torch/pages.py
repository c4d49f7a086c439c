"""Pages of the pools on a torch device, copied from and to buffers of the host: one gather or scatter for all layers.

    read    pool  --index_select-->  staging  --copy engine-->  pinned rows
    write   pinned rows  --copy engine-->  staging  --index_copy-->  pool

On a GPU both happen on streams of their own, one for each direction, a chunk of pages at a time through a staging buffer of
bounded size. A copy begins when what was launched before it is done, and nothing that is launched later waits for it unless
it is told to (`fence`). On a CPU the same code runs at once, and without staging. Knows pools and bytes, not what is in them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch

from quire.backends.kv import KV
from quire.backends.pages import (
    CopiedPages,
    PageBytes,
    PageCopy,
    PageIds,
    PageLayout,
    PageRequest,
    checked_count,
    checked_group,
)

STAGING = 64 << 20  # bytes on the device that one direction uses, or one page where that is more

# Whole numbers that stand for bytes, [layers, parts, pages, words]; parts are keys and values, or a state.
Words: TypeAlias = torch.Tensor


class DeviceCopy:
    """A copy on a stream. It holds on to what the device still reads or writes."""

    __slots__ = ("_buffer", "_event", "_held")

    def __init__(self, buffer: PageBytes, event: torch.cuda.Event, held: Sequence[torch.Tensor]) -> None:
        self._buffer = buffer
        self._event = event
        self._held = held

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> PageBytes:
        self._event.synchronize()
        return self._buffer

    def fence(self) -> None:
        torch.cuda.current_stream(self._held[0].device).wait_event(self._event)


@dataclass(slots=True)
class _Way:
    """The copies in one direction: their stream and their staging buffer, which they use in turn."""

    stream: torch.cuda.Stream | None
    lock: threading.Lock
    staging: torch.Tensor | None = None

    def room(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A view of that many bytes of the staging buffer."""
        if self.staging is None or self.staging.numel() < nbytes:
            self.staging = None
            self.staging = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self.staging[:nbytes]


class DevicePages:
    """Page copies of one program. `words` has the tensors of each group's pool, in the order of a layer's bytes.

    `staged` sends copies through the staging buffer, `chunk` bytes at a time, as on a GPU.
    """

    def __init__(
        self,
        kv: KV,
        dtypes: Sequence[str],
        words: Sequence[Sequence[Words]],
        device: torch.device,
        *,
        staged: bool | None = None,
        chunk: int = STAGING,
    ):
        self._groups = kv.groups
        self._words = words
        self._layouts = [
            PageLayout.of(own, order="torch-rows", dtype=dtype, layer_nbytes=sum(_layer_bytes(w) for w in parts))
            for own, dtype, parts in zip(kv.groups, dtypes, words, strict=True)
        ]
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._staged = self._on_gpu if staged is None else staged
        self._chunk = chunk
        self._ways: dict[bool, _Way] = {}  # by whether pages are written; made when they are first needed
        self._under_way: deque[DeviceCopy] = deque()  # their memory must outlive them, whoever lets go of it
        self._lock = threading.Lock()

    def layout(self, group: int) -> PageLayout:
        """A layer's bytes are the keys, [token, head, column], the values, the keys' scales, [head, token], and the values'."""
        return self._layouts[checked_group(self._groups, group)]

    def buffer(self, group: int, count: int) -> PageBytes:
        """Zeroed rows for so many pages, which the copy engine of a GPU reaches."""
        return self._rows((checked_count(count), self.layout(group).nbytes))

    def _rows(self, shape: tuple[int, int]) -> PageBytes:
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=self._on_gpu).numpy()

    def read(self, group: int, pages: PageIds, out: PageBytes | None, layers: range | None) -> PageCopy:
        asked, layout = PageRequest.checked(self._groups, group, pages, layers), self.layout(group)
        out = self._rows(asked.shape(layout)) if out is None else out
        asked.check_buffer(out, layout, written=True)
        return self._copy(group, asked, out, write=False)

    def write(self, group: int, pages: PageIds, buffer: PageBytes, layers: range | None) -> PageCopy:
        asked = PageRequest.checked(self._groups, group, pages, layers)
        asked.check_buffer(buffer, self.layout(group), written=False)
        return self._copy(group, asked, buffer, write=True)

    @torch.inference_mode()
    def _copy(self, group: int, asked: PageRequest, buffer: PageBytes, *, write: bool) -> PageCopy:
        if not buffer.size:
            return CopiedPages(buffer)
        own = buffer if buffer.flags.writeable else buffer.copy()  # torch takes no memory that it may not write
        host = torch.from_numpy(own)
        way = self._way(write)
        with way.lock, self._after_what_was_launched(way):
            ids = self._ids(asked)
            move = self._scatter if write else self._gather
            if self._staged or host.data_ptr() % 8:  # only rows that begin there can be looked at as words
                self._in_chunks(way, host, ids, lambda rows, part: move(group, asked, rows, part), write)
            else:
                move(group, asked, host, ids)
            if way.stream is None:
                return CopiedPages(buffer)
            event = torch.cuda.Event()
            event.record(way.stream)
            copy = DeviceCopy(buffer, event, (ids, host))
        with self._lock:
            self._under_way.append(copy)
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
        return copy

    def _way(self, write: bool) -> _Way:
        with self._lock:
            if write not in self._ways:
                stream = torch.cuda.Stream(self._device) if self._on_gpu else None
                self._ways[write] = _Way(stream, threading.Lock())
            return self._ways[write]

    def _after_what_was_launched(self, way: _Way) -> AbstractContextManager[object]:
        """Launches in here are on the stream of that direction, behind all that its caller launched so far."""
        if way.stream is None:
            return nullcontext()
        way.stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(way.stream)

    def _ids(self, asked: PageRequest) -> torch.Tensor:
        """The pages, on the device."""
        if not self._on_gpu:
            return torch.from_numpy(asked.pages)
        return torch.from_numpy(asked.pages).pin_memory().to(self._device, non_blocking=True)

    def _in_chunks(
        self,
        way: _Way,
        host: torch.Tensor,
        ids: torch.Tensor,
        move: Callable[[torch.Tensor, torch.Tensor], None],
        write: bool,
    ) -> None:
        """Rows between the host and the staging buffer, and `move` between that and the pool, some pages at a time."""
        count, row = host.shape
        step = min(count, max(1, self._chunk // row))
        staging = way.room(step * row, self._device)
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            rows = staging[: (part.stop - first) * row].view(-1, row)
            if write:
                rows.copy_(host[part], non_blocking=True)
            move(rows, ids[part])
            if not write:
                host[part].copy_(rows, non_blocking=True)

    def _gather(self, group: int, asked: PageRequest, rows: torch.Tensor, ids: torch.Tensor) -> None:
        for pool, columns in self._columns(group, asked, rows):
            torch.index_select(pool, 2, ids, out=columns)

    def _scatter(self, group: int, asked: PageRequest, rows: torch.Tensor, ids: torch.Tensor) -> None:
        for pool, columns in self._columns(group, asked, rows):
            pool.index_copy_(2, ids, columns)

    def _columns(self, group: int, asked: PageRequest, rows: torch.Tensor) -> Iterator[tuple[Words, torch.Tensor]]:
        """Each tensor of the pool, and what of the rows belongs to it, in its shape: [layers, parts, pages, words]."""
        at, layer = 0, self._layouts[group].layer_nbytes
        for pool in self._words[group]:
            size, (parts, words) = pool.element_size(), (pool.shape[1], pool.shape[3])
            by_layer = rows.view(pool.dtype).unflatten(1, (asked.layers, layer // size))
            columns = by_layer[:, :, at // size : at // size + parts * words].unflatten(2, (parts, words))
            yield pool[asked.span], columns.permute(1, 2, 0, 3)
            at += _layer_bytes(pool)


def _layer_bytes(pool: Words) -> int:
    """Bytes of one page of one layer."""
    return pool.shape[1] * pool.shape[3] * pool.element_size()
