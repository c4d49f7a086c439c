"""Weights on their way from mapped files to a device: read ahead by a few threads, a chunk at a time, never a whole model.

    mapped file  --threads-->  staging buffers (pinned, a fixed ring)  --copy engine-->  a chunk on the device

`Feed` is told the order of the layouts beforehand and hands each out as chunks of rows. While the caller uses one chunk the next
ones are being read, from later tensors too. Chunks come in order and arrive whole; a chunk on the device is good until
the next one is asked for in another stream, so it is used in the stream that asks. Knows bytes and rows, not formats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

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

    layout: Layout
    start: int
    stop: int
    buffer: torch.Tensor
    read: Future[None]


class Feed:
    """Chunks of layouts, in the order given. Use it as a context: leaving stops the threads."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        device: torch.device,
        *,
        threads: int = THREADS,
        buffers: int = BUFFERS,
        chunk: int = CHUNK,
    ):
        self._device = device
        self._plan = iter([piece for layout in layouts for piece in _pieces(layout, chunk)])
        # A row may be wider than a chunk: then it is a chunk of its own.
        largest = max((_row_bytes(layout) for layout in layouts), default=1)
        size = min(max(chunk, largest), max((layout.nbytes for layout in layouts), default=1))
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

        Dense rows have their own numbers' type; others are bytes. All of it has been read from the file when the iteration ends.
        """
        done, end = 0, layout.shape[0]
        while done < end:
            self._read_ahead()
            part = self._reading.popleft() if self._reading else None
            if part is None or part.layout is not layout:
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
            layout, start, stop = piece
            buffer = self._free.popleft()
            self._reading.append(
                _Part(layout, start, stop, buffer, self._pool.submit(_read, layout, start, stop, buffer))
            )

    def _deliver(self, part: _Part) -> torch.Tensor:
        rows = part.stop - part.start
        staged = part.buffer[: rows * _row_bytes(part.layout)]
        if self._device.type == "cuda":
            there = staged.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._copying.append((event, part.buffer))
        else:
            there = staged.clone()
            self._free.append(part.buffer)
        if isinstance(part.layout, Dense):
            there = there.view(_TORCH[part.layout.dtype])
        return there.view(rows, *part.layout.data.shape[1:])


def _pieces(layout: Layout, chunk: int) -> Iterator[tuple[Layout, int, int]]:
    step = max(1, chunk // max(1, _row_bytes(layout)))
    if not isinstance(layout, Dense):
        step = max(1, min(step, ELEMENTS // layout.shape[-1]))
    step = step // ROWS * ROWS or step
    for start in range(0, layout.shape[0], step):
        yield layout, start, min(start + step, layout.shape[0])


def _row_bytes(layout: Layout) -> int:
    return layout.nbytes // max(1, layout.data.shape[0])


def _read(layout: Layout, start: int, stop: int, buffer: torch.Tensor) -> None:
    """Rows into a staging buffer. numpy lets go of the interpreter lock while it copies, so threads read side by side."""
    rows = np.ascontiguousarray(layout.data[start:stop])  # a view already, as files hold them
    source: npt.NDArray[np.uint8] = rows.view(np.uint8).reshape(-1)
    np.copyto(buffer.numpy()[: source.size], source)
