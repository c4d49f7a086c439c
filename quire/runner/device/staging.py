"""Staging: the one host-to-device copy of a step, and the one that comes back.

Arrays of a step are laid side by side in a pinned buffer, copied once, and read on the device as views. The host is ahead
of the device, so buffers are used in turn and one is not written again before its copy has run. On a CPU the same code
copies memory to memory. int32 arrays lie anywhere; float64 ones on even places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

TURNS = 4  # steps that may be under way before a buffer is written again


class Staging:
    """`send` packs arrays and copies them. With `fixed`, the device buffer never moves: captured graphs read it."""

    def __init__(self, device: torch.device, capacity: int = 0, *, fixed: bool = False):
        self._device = device
        self._cuda = device.type == "cuda"
        self._fixed = fixed
        self._turn = 0
        self._hosts: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._allocate(max(256, capacity))

    def _allocate(self, capacity: int) -> None:
        if self._hosts and self._cuda:
            torch.cuda.current_stream(self._device).synchronize()  # nothing may still read what is replaced
        self.capacity = capacity + capacity % 2
        self.buffer = torch.zeros(self.capacity, dtype=torch.int32, device=self._device)
        self._hosts = [
            torch.zeros(self.capacity, dtype=torch.int32, pin_memory=self._cuda)
            for _ in range(TURNS if self._cuda else 1)
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._cuda else []

    def send(self, arrays: Sequence[np.ndarray], known: int = 0) -> list[torch.Tensor]:
        """The arrays (int32 or float64, one axis) on the device, valid until the next send in stream order.

        All but the first `known` of them: who knows where they lie needs no views, and making one costs as much as its copy.
        """
        offsets, end = [], 0
        for array in arrays:
            end += end % 2 if array.dtype == np.float64 else 0
            offsets.append(end)
            end += array.size * (array.itemsize // 4)
        if end > self.capacity:
            if self._fixed:
                raise ValueError(f"{end} numbers in a staging buffer of {self.capacity}")
            self._allocate(2 * end)
        host = self._hosts[self._turn]
        if self._cuda:
            self._copied[self._turn].synchronize()
        flat = host.numpy()
        for at, array in zip(offsets, arrays, strict=True):
            size = array.size * (array.itemsize // 4)
            flat[at : at + size] = array.view(np.int32)
        self.buffer[:end].copy_(host[:end], non_blocking=True)
        if self._cuda:
            self._copied[self._turn].record(torch.cuda.current_stream(self._device))
        self._turn = (self._turn + 1) % len(self._hosts)
        told = zip(offsets[known:], arrays[known:], strict=True)
        return [self.view(at, array.size, array.dtype == np.float64) for at, array in told]

    def view(self, at: int, count: int, wide: bool = False) -> torch.Tensor:
        """`count` numbers from place `at` on: int32, or float64."""
        if wide:
            return self.buffer[at : at + 2 * count].view(torch.float64)
        return self.buffer[at : at + count]


class Arrival:
    """A tensor on its way to the host."""

    __slots__ = ("_event", "_host")

    def __init__(self, source: torch.Tensor):
        if source.device.type == "cuda":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event: torch.cuda.Event | None = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(source.device))
        else:
            self._host, self._event = source.clone(), None

    @property
    def ready(self) -> bool:
        """Whether the copy has arrived."""
        return self._event is None or self._event.query()

    def wait(self) -> np.ndarray:
        """Wait for the copy, and give its numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
