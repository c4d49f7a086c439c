"""An engine without a model, for measuring what stands around one: every step gives each running request its next token.

`build` emits as fast as it is asked; `build_steady` takes 2 ms for a step, as an engine that makes 32,000 tokens a second of 64 sequences does;
`build_slow` takes 20 ms. Runs in the engine's own process (`ProcessClient(builder="benchmarks.null_engine:build")`), so that what crosses
is what always crosses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from quire.engine.types import EngineInfo, Event, Receipt, Request, Stats, Vocabulary

CONTEXT = 65536
SEQUENCES = 256


@dataclass(slots=True)
class _Running:
    request: Request
    made: int = 0


class NullEngine:
    """What process_main asks of an Engine."""

    def __init__(self, step_seconds: float):
        self._running: dict[str, _Running] = {}
        self._gone: list[Event] = []
        self._step_seconds = step_seconds
        self._due = 0.0
        self._steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._gone)

    def add(self, request: Request) -> None:
        self._running[request.id] = _Running(request)

    def abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._gone.append(Event(id=request_id, finish="abort", receipt=Receipt()))

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        pass

    def step(self) -> list[Event]:
        if self._step_seconds:
            now = time.monotonic()
            if self._due > now:
                time.sleep(self._due - now)
            self._due = max(self._due, now) + self._step_seconds
        self._steps += 1
        events, self._gone = self._gone, []
        for one in list(self._running.values()):
            request = one.request
            limit = request.sampling.max_tokens or 1
            token = 1000 + (one.made * 7) % 20000  # an ordinary token of any vocabulary in use
            one.made += 1
            if one.made < limit:
                events.append(Event(id=request.id, tokens=[token]))
                continue
            receipt = Receipt(prompt_tokens=len(request.tokens), output_tokens=one.made, steps=one.made)
            events.append(Event(id=request.id, tokens=[token], finish="length", receipt=receipt))
            del self._running[request.id]
        return events

    def idle(self) -> bool:
        return False

    def stats(self) -> Stats:
        return Stats(running=len(self._running), steps=self._steps // 1000 * 1000)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


def _build(step_seconds: float, vocab_size: int) -> tuple[NullEngine, EngineInfo]:
    info = EngineInfo(
        model="null",
        architecture="null",
        vocab_size=vocab_size,
        context=CONTEXT,
        max_seqs=SEQUENCES,
        max_batch_tokens=8192,
        pages=1 << 16,
        page_size=16,
        backend="null",
        weight_bytes=0,
        kv_bytes=0,
    )
    return NullEngine(step_seconds), info


def _vocabulary(path: str) -> int:
    from quire.chat.loading import tokenizer_of
    from quire.weights.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return tokenizer_of(checkpoint).vocab_size


def build(config: Any, env: Any, progress: Any = None) -> tuple[NullEngine, EngineInfo]:
    """Tokens at once."""
    return _build(0.0, _vocabulary(config.path))


def build_steady(config: Any, env: Any, progress: Any = None) -> tuple[NullEngine, EngineInfo]:
    """A step every 2 ms."""
    return _build(0.002, _vocabulary(config.path))


def build_slow(config: Any, env: Any, progress: Any = None) -> tuple[NullEngine, EngineInfo]:
    """A step every 20 ms."""
    return _build(0.02, _vocabulary(config.path))
