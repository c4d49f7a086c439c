"""The ladder of sizes that steps on a device are padded to: decode, prefill and verification steps each have one.

A step is padded up to one of a few kinds (a size, with or without adapters or shared prefixes). Its inputs are copied to fixed
places of one buffer, and its body is replayed as a CUDA graph where the device can, and run as it is elsewhere:

    host arrays ── pad ──► staging buffer, each at its offset ──► body of that kind, or its graph ──► logits at fixed places

The rows and sequences that pad a step read and write the spare page of each pool, so no sequence is touched by them. A ladder
knows how inputs are laid out and captured; the body, and which kind serves a step, belong to decode.py, prefill.py and verify.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from quire.backends.batch import I32, Batch, Table
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceTable
from quire.runner.device.staging import Staging
from quire.runner.device.state import DeviceState

# Page-table entries that a captured step can change, per sequence; in a prefill, also per page of new tokens.
CHANGES = 2
MORE = 64  # numbers per row of logits that may travel with a step without a copy of their own

Kind = TypeVar("Kind")
A = TypeVar("A", I32, torch.Tensor)


class Room(NamedTuple):
    """How much a step of one kind has room for."""

    tokens: int
    sequences: int
    changes: int  # page-table entries
    logits: int  # rows


class Field(NamedTuple):
    """An input beyond those that every step has: how many numbers, what pads them, and what a step of padding alone has."""

    size: int
    fill: int
    blank: tuple[int, ...] = ()


@dataclass(slots=True)
class Inputs(Generic[A]):
    """A step's inputs: arrays on the host as long as they come, or padded; or views of the staging buffer on the device."""

    ids: A  # [T]
    pos: A  # [T]
    slots: A  # [B]
    where: A  # flat places of page tables that the step changes
    writes: list[A]  # of each group of layers: where its tokens' keys and values go, [T]
    pages: list[A]  # ... and the pages that its table gets at `where`
    extra: list[A] = field(default_factory=list)  # what only this kind of step has

    def __iter__(self) -> Iterator[A]:
        """The arrays, in the order in which the buffer has them."""
        yield from (self.ids, self.pos, self.slots, self.where)
        for write, pages in zip(self.writes, self.pages, strict=True):
            yield write
            yield pages
        yield from self.extra

    def batch(self: Inputs[I32], q_start: I32, kv_len: I32, logit_rows: I32) -> Batch:
        """These inputs as a Batch of the host's kind, without page tables: those are on the device alone."""
        blank = np.zeros((kv_len.size, 1), np.int32)
        first, *others = [Table(blank, write) for write in self.writes]
        return Batch(self.ids, self.pos, q_start, kv_len, blank, first.write, logit_rows, tuple(others))

    @classmethod
    def of(cls, flat: Sequence[A], groups: int) -> Inputs[A]:
        """Inputs of arrays in the order in which the buffer has them."""
        end = 4 + 2 * groups
        ids, pos, slots, where = flat[:4]
        return cls(ids, pos, slots, where, list(flat[4:end:2]), list(flat[5:end:2]), list(flat[end:]))


Body: TypeAlias = Callable[[Kind, Inputs[torch.Tensor], list[DeviceTable], Inputs[I32] | None], None]
"""Launches a step of a kind over its inputs and page tables on the device, once the tables have the step's changes.

The last argument is the same inputs on the host; None where a graph is captured or its kernels are compiled.
"""


class Ladder(Generic[Kind]):
    """Kinds of steps. What a step leaves in `logits` and `tokens` is valid until the next one."""

    def __init__(
        self,
        program: DeviceProgram,
        state: DeviceState,
        rooms: Mapping[Kind, Room],
        body: Body[Kind],
        *,
        vocab: int,
        extra: Callable[[Kind], Sequence[Field]] = lambda kind: (),
        warm_up: Sequence[Kind] | None = None,
    ):
        """`warm_up`: kinds that between them launch every kernel; None: all."""
        self.rooms = rooms
        self._state, self._body, self._device = state, body, program.device
        self._fields = {kind: [*self._common(room), *extra(kind)] for kind, room in rooms.items()}
        self._numbers = {kind: sum(own.size for own in fields) for kind, fields in self._fields.items()}
        self._warm_up = list(rooms) if warm_up is None else list(warm_up)
        capacity = max((self._numbers[kind] + MORE * room.logits for kind, room in rooms.items()), default=0)
        self._staging = Staging(program.device, capacity, fixed=True)
        self._spill = Staging(program.device)  # for what does not fit, which is rare
        most = max((room.logits for room in rooms.values()), default=0)
        # Graphs of every kind leave their results here: buffers for each kind would add up to gigabytes.
        self.logits = torch.empty(most, vocab, dtype=torch.float32, device=program.device)
        self.tokens = torch.empty(most, dtype=torch.int64, device=program.device)
        self.graphs: dict[Kind, torch.cuda.CUDAGraph] = {}

    def _common(self, room: Room) -> list[Field]:
        """The inputs that every kind of step has, in the order of Inputs."""
        tokens, sequences, changes, _ = room
        state = self._state
        found = [Field(tokens, 0), Field(tokens, 0), Field(sequences, state.spare)]
        found.append(Field(changes, state.spare * state.max_pages))
        for write, page in zip(state.spare_writes, state.spare_pages, strict=True):
            found += [Field(tokens, write), Field(changes, page)]
        return found

    def run(self, kind: Kind, given: Inputs[I32], more: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Run one step. Gives `more` back as tensors on the device, for sampling."""
        if (
            given.where.size > self.rooms[kind].changes
        ):  # a long prefix was found, say: its pages are set ahead of the step
            self._state.set_pages(*self._spill.send([given.where, *given.pages]))
            given.where, given.pages = given.where[:0], [own[:0] for own in given.pages]
        arrays = [pad(own, size, fill) for own, (size, fill, _) in zip(given, self._fields[kind], strict=True)]
        needed = self._numbers[kind] + sum(2 + own.size * (own.itemsize // 4) for own in more)
        fits = needed <= self._staging.capacity
        sent = self._staging.send([*arrays, *(more if fits else ())], len(arrays))
        if not fits:
            sent = self._spill.send(more)
        graph = self.graphs.get(kind)
        if graph is not None:
            graph.replay()
        else:
            self._launch(kind, Inputs.of(arrays, len(given.writes)))
        return sent

    @torch.inference_mode()
    def _launch(self, kind: Kind, host: Inputs[I32] | None = None) -> None:
        """Run the body over the inputs in the buffer."""
        views, at = [], 0
        for own in self._fields[kind]:
            views.append(self._staging.view(at, own.size))
            at += own.size
        inputs = Inputs.of(views, len(self._state.tables))
        inputs.slots = inputs.slots.long()
        self._state.set_pages(inputs.where, *inputs.pages)
        self._body(kind, inputs, self._state.page_tables(inputs.slots, inputs.writes), host)

    def _blank(self, kind: Kind) -> None:
        """Fill the buffer with a step of padding alone. Where steps only compile, what they sample is whatever lay there: it must
        not become the token of the next one."""
        self._state.last[self._state.spare] = 0
        arrays = [pad(np.array(own.blank, np.int32), own.size, own.fill) for own in self._fields[kind]]
        self._staging.send(arrays, len(arrays))

    def warm_up(self) -> None:
        """Launch one step of every kind that a kernel might be chosen by: what they compile must not meet a request."""
        for kind in self._warm_up:
            self._blank(kind)
            self._launch(kind)

    def capture(self) -> None:
        """Capture every kind, the largest first, so that the others live in its memory."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        for kind in sorted(self.rooms, key=lambda kind: (*self.rooms[kind][:2], self._numbers[kind]), reverse=True):
            self._blank(kind)
            self.graphs[kind] = _graph_of(partial(self._launch, kind), self._device, pool, stream)
        torch.cuda.synchronize(self._device)


def up_to(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes that are less than `most`, and `most`."""
    return [*(size for size in sizes if size < most), most]


def at_least(count: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending sizes that is not under `count`."""
    return sizes[bisect_left(sizes, count)]


def pad(array: I32, count: int, fill: int) -> I32:
    """The array, filled up to `count` numbers."""
    if array.size == count:
        return np.ascontiguousarray(array, np.int32)
    out = np.full(count, fill, np.int32)
    out[: array.size] = array
    return out


def _graph_of(
    body: Callable[[], None], device: torch.device, pool: Any, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """The kernels that `body` launches, as a CUDA graph. It runs once before: whatever is set up at a first run must not be captured."""
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        body()
    return graph
