"""The parts that an engine is built from: the open model, and the backend it will run on; and what both kinds of engines need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.backends.ops import KV, Backend, Estimator, Forward, Holds, Measures
from quire.config import EngineConfig, Environment
from quire.engine.construction.memory import Budget
from quire.engine.construction.sizes import resolve_sizes
from quire.layouts import Layout
from quire.machine import NO_LIMIT, Memory, look_at_memory
from quire.models import Model

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened


@dataclass(frozen=True, slots=True)
class Parts:
    """An open model and its backend: see build_engine, which opens them."""

    model: Model
    name: str
    nbytes: int
    checkpoint: Opened | None
    backend: Backend
    packed: Callable[[Layout, int, int], None]

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights as the backend holds them, where it can say that."""
        return self.backend.weight_bytes if isinstance(self.backend, Holds) else self.nbytes

    def budget(
        self,
        config: EngineConfig,
        env: Environment,
        forward: Forward,
        page: KV,
        *,
        max_tokens: int,
        max_rows: int,
        room: int = 0,
    ) -> Budget:
        """The memory there is, and what all but the KV pool takes of it, as far as the backend can say.

        `room` is what somebody else will take on the device.
        """
        backend = self.backend
        if isinstance(backend, Measures) and backend.owns_memory:
            # What could never be is refused before any weight is read.
            resolve_sizes(config, env, self.model, Budget(Memory(NO_LIMIT, "")))
            free = backend.measure(forward, page, max_tokens=max_tokens, max_rows=max_rows, packed=self.packed)
            return Budget(
                Memory(max(0, free - room), "the device, with the model loaded"), own=True, share=config.memory_share
            )
        if isinstance(backend, Estimator):
            needs = backend.estimate(forward, kv=page, max_tokens=max_tokens, max_rows=max_rows)
            return Budget(look_at_memory(), needs, share=config.memory_share)
        return Budget(look_at_memory(), share=config.memory_share)
