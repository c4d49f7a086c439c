"""Weights on their way from mapped files to a device: read ahead by a few threads, a chunk at a time, never a whole model.

    mapped file  --threads-->  staging buffers (pinned, a fixed ring)  --copy engine-->  a chunk on the device

`Feed` is told the order of the layouts beforehand and hands each out as chunks of rows. While the caller uses one chunk the next
ones are being read, from later tensors too. Chunks come in order and arrive whole; a chunk on the device is good until
the next one is asked for in another stream, so it is used in the stream that asks. Knows bytes and rows, not formats.

What a layout expands where it is read can travel as the file has it (`packed`): fewer bytes, and the host has nothing to compute. Rows
whose parts lie apart in the file arrive with them side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.layouts import Dense, Layout

THREADS = 4
BUFFERS = 8
CHUNK = 32 << 20  # bytes
ROWS = 128  # chunks of more rows are made of whole ones: what is quantized in tiles needs them together
ELEMENTS = 1 << 24  # of a chunk that is dequantized where it arrives: that takes several times its size
_TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(slots=True)
class _Part:
    """Rows of a layout, on their way."""

    source: _Source
    start: int
    stop: int
    buffer: torch.Tensor
    read: Future[None]


class _Source:
    """The rows of a layout: arrays with as many rows each, or what becomes one where it is read."""

    def __init__(self, layout: Layout, packed: bool):
        self.layout = layout
        self.arrays: tuple[Any, ...] = packed_rows(layout) if packed else (layout.data,)
        self.widths = [a.nbytes // max(1, a.shape[0]) for a in self.arrays]
        self.row_bytes = sum(self.widths)
        self.shape = (self.row_bytes,) if packed else layout.data.shape[1:]


def packed_rows(layout: Layout) -> tuple[npt.NDArray[np.uint8], ...]:
    """The rows of a layout as the file has them; none where it cannot tell."""
    return getattr(layout.data, "packed", ())


class Feed:
    """Chunks of layouts, in the order given. Use it as a context: leaving stops the threads."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        device: torch.device,
        *,
        packed: Set[int] = frozenset(),
        threads: int = THREADS,
        buffers: int = BUFFERS,
        chunk: int = CHUNK,
    ):
        """`packed`: ids of layouts that travel as the file has them."""
        self._device = device
        sources = [_Source(layout, id(layout) in packed) for layout in layouts]
        self._plan = iter([piece for source in sources for piece in _pieces(source, chunk)])
        # A row may be wider than a chunk: then it is a chunk of its own.
        largest = max((source.row_bytes for source in sources), default=1)
        size = min(max(chunk, largest), max((s.row_bytes * s.layout.shape[0] for s in sources), default=1))
        pin = device.type == "cuda"
        self._free = deque(torch.empty(max(1, size), dtype=torch.uint8, pin_memory=pin) for _ in range(buffers))
        self._reading: deque[_Part] = deque()
        self._copying: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # pinned memory must outlive the copies from it

    def rows(self, layout: Layout) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first row, last row + 1, those rows on the device) of the next layout. A vector is rows of one number.

        Dense rows have their own numbers' type; others are bytes, packed ones [rows, bytes of a row]. All of it has been read from the file when the iteration ends.
        """
        done, end = 0, layout.shape[0]
        while done < end:
            self._read_ahead()
            part = self._reading.popleft() if self._reading else None
            if part is None or part.source.layout is not layout:
                raise ValueError("layouts are asked for in another order than was said")
            part.read.result()
            yield part.start, part.stop, self._deliver(part)
            done = part.stop

    def _read_ahead(self) -> None:
        """Give every buffer that is free something to read; wait for one only where nothing is being read."""
        while True:
            while self._copying and (not (self._free or self._reading) or self._copying[0][0].query()):
                event, buffer = self._copying.popleft()
                event.synchronize()
                self._free.append(buffer)
            if not self._free:
                return
            piece = next(self._plan, None)
            if piece is None:
                return
            source, start, stop = piece
            buffer = self._free.popleft()
            self._reading.append(
                _Part(source, start, stop, buffer, self._pool.submit(_read, source, start, stop, buffer))
            )

    def _deliver(self, part: _Part) -> torch.Tensor:
        rows, source = part.stop - part.start, part.source
        staged = part.buffer[: rows * source.row_bytes]
        if self._device.type == "cuda":
            there = staged.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._copying.append((event, part.buffer))
        else:
            there = staged.clone()
            self._free.append(part.buffer)
        if isinstance(source.layout, Dense):
            there = there.view(_TORCH[source.layout.dtype])
        return there.view(rows, *source.shape)


def _pieces(source: _Source, chunk: int) -> Iterator[tuple[_Source, int, int]]:
    layout = source.layout
    step = max(1, chunk // max(1, source.row_bytes))
    if not isinstance(layout, Dense):
        step = max(1, min(step, ELEMENTS // layout.shape[-1]))
    step = step // ROWS * ROWS or step
    for start in range(0, layout.shape[0], step):
        yield source, start, min(start + step, layout.shape[0])


def _read(source: _Source, start: int, stop: int, buffer: torch.Tensor) -> None:
    """Rows into a staging buffer. numpy lets go of the interpreter lock while it copies, so threads read side by side."""
    into, at = buffer.numpy()[: (stop - start) * source.row_bytes].reshape(stop - start, -1), 0
    for array, width in zip(source.arrays, source.widths, strict=True):
        rows = array[start:stop]
        if len(source.arrays) == 1:
            rows = np.ascontiguousarray(rows)  # a view already, as files hold them
        np.copyto(into[:, at : at + width], rows.view(np.uint8).reshape(stop - start, -1))
        at += width
