"""A program of the native backend: the plan that C++ replays, and what Python asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.backends.adapters import Pair, Target
from quire.backends.batch import Batch
from quire.backends.kv import KV
from quire.backends.ops import HostSampler, HostSteps, SlotArrays
from quire.backends.outputs import Hidden, kept
from quire.backends.pages import CopiedPages, PageBytes, PageIds, PageLayout, PageRequest, blank, checked_group
from quire.layouts import Dense, Floats

TOUCH = 8 << 20, 256 << 20  # bytes of keys and values at a time, and at most so far ahead of what was written
NUMBERS = {"f16": "float16", "int8": "int8", "int16": "int16"}  # what a cell holds, by the pool's dtype


@dataclass(slots=True)
class Targets:
    """The targets of a plan by their numbers there, and how matrices for them are packed."""

    number: dict[Target, int]
    pack: Callable[[list[Dense]], list[Any]]


class NativeProgram:
    """A compiled forward with its KV pool."""

    def __init__(
        self,
        plan: Any,
        kv: KV,
        inputs: dict[str, int],
        keep: dict[Hidden, int],
        targets: Targets,
        sampler: Callable[[int], HostSampler],
        steps: Callable[..., HostSteps],
    ):
        self._plan = plan
        self._groups = kv.groups
        self._keep = keep  # slots of the plan
        self._steps = steps
        self.host_sampler = sampler
        self._inputs = inputs
        self._targets = targets

    def run(self, batch: Batch, inputs: Mapping[str, Floats] = {}) -> Floats:
        """Run one step. The batch is checked first: a wrong one is a ValueError and touches nothing."""
        if inputs.keys() != self._inputs.keys():
            raise ValueError(f"the program takes the inputs {sorted(self._inputs)}, not {sorted(inputs)}")
        given = [np.ascontiguousarray(inputs[name], np.float32) for name in self._inputs]
        return self._plan.run(
            batch.ids, batch.pos, batch.q_start, batch.kv_len, batch.pages, batch.write, batch.logit_rows, given,
            [(t.pages, t.write) for t in batch.more], batch.adapters,
            None if batch.given is None else (batch.given.which(batch.tokens), batch.given.rows), batch.coords,
        )  # fmt: skip

    def hidden(self, which: Hidden) -> Floats:
        """A view of the arena: nothing was copied."""
        return self._plan.rows(kept(self._keep, which))

    def page_layout(self, group: int) -> PageLayout:
        """A layer's bytes are the cells of its KV heads (KvCell in native/src/kernels.h), or its part of a state."""
        kv = self._groups[checked_group(self._groups, group)]
        dtype = "float32" if kv.state else NUMBERS[kv.dtype]
        return PageLayout.of(kv, order="native-cells", dtype=dtype, layer_nbytes=self._plan.layer_bytes(group))

    def page_buffer(self, group: int, count: int) -> PageBytes:
        return blank(self.page_layout(group), count)

    def read_pages(
        self, group: int, pages: PageIds, out: PageBytes | None = None, *, layers: range | None = None
    ) -> CopiedPages:
        """Read pages (see Program). Takes no lock and lets go of the interpreter's: a thread may copy while another one runs a
        step."""
        asked, layout = PageRequest.checked(self._groups, group, pages, layers), self.page_layout(group)
        out = asked.fresh(layout) if out is None else out
        asked.check_buffer(out, layout, written=True)
        self._plan.read_pages(group, asked.pages, asked.first, asked.layers, out)
        return CopiedPages(out)

    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes, *, layers: range | None = None) -> CopiedPages:
        """Write pages: see Program, and read_pages."""
        asked = PageRequest.checked(self._groups, group, pages, layers)
        asked.check_buffer(buffer, self.page_layout(group), written=False)
        self._plan.write_pages(group, asked.pages, asked.first, asked.layers, buffer)
        return CopiedPages(buffer)

    def host_steps(
        self, sampler: HostSampler, slots: SlotArrays, page_size: int, max_context: int, most: int
    ) -> HostSteps:
        """Decode-only steps without Python in between."""
        arrays = (slots.last, slots.length, slots.position, slots.adapter, slots.live, slots.tables)
        return self._steps(self._plan, sampler, *arrays, page_size, max_context, most)

    def place(self, slot: int, pairs: Mapping[Target, Pair]) -> None:
        """Let slot `slot` hold these pairs and no others, from the next run on. They are packed first, so a failure changes
        nothing."""
        unknown = [target.name for target in pairs if target not in self._targets.number]
        if unknown:
            raise ValueError(f"the program has no target {unknown[0]!r}")
        flat = [half for pair in pairs.values() for half in (pair.a, pair.b)]
        handles = iter(self._targets.pack(flat))
        made = {target: (next(handles), next(handles), pair.scale) for target, pair in pairs.items()}
        for target, number in self._targets.number.items():
            self._plan.place(number, slot, *made.get(target, (None, None, 1.0)))

    def idle(self) -> bool:
        """Touch the next pages of keys and values: the system clears them then, and no step has to wait for that."""
        return self._plan.touch(*TOUCH)

    def profile(self, on: bool = True) -> None:
        """Begin anew to count the time spent in each kind of step, or stop counting."""
        self._plan.profile(on)

    def profiled(self) -> dict[str, float]:
        """Kind of step -> seconds since `profile`, all threads together."""
        return dict(self._plan.profiled())

    def describe(self) -> str:
        return self._plan.describe()
