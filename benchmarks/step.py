"""One stream through an engine in this process, with a clock around each part of a step. Used by sampling.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import files
from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.engine import Engine
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams

PROMPT = "A quire is a set of pages bound together. The oldest one that is known was found"


class Clock:
    """Seconds of each call that was wrapped, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def microseconds(self) -> dict[str, float]:
        """Medians: a neighbour who takes the core for a while is not in them."""
        return {name: 1e6 * statistics.median(spent) for name, spent in self.spent.items()}

    def around(self, owner: Any, method: str, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent.setdefault(name, []).append(time.perf_counter() - began)

        setattr(owner, method, timed)


class Stream:
    """An engine, driven step by step with one request."""

    def __init__(self, model: str):
        from quire.chat.tokenizers.tokenizer import Tokenizer
        from quire.weights.gguf.file import GGUF

        path = str(files.model(model))
        with GGUF.open(path) as gguf:
            self.tokenizer = Tokenizer.from_gguf(gguf.metadata)
        self.prompt = self.tokenizer.encode(PROMPT, add_special=False, parse_special=False)
        self.engine: Engine = build_engine(EngineConfig(path=path), Environment.read())[0]
        self._count = 0

    def run(
        self, params: SamplingParams, tokens: int, first: Callable[[], object] = lambda: None
    ) -> tuple[list[Event], float]:
        """So many tokens: the events, and the seconds from the first token, when `first` is called, to the last."""
        import msgspec

        self._count += 1
        sampling = msgspec.structs.replace(params, max_tokens=tokens, ignore_eos=True, seed=self._count)
        self.engine.add(Request(id=str(self._count), tokens=self.prompt, sampling=sampling))
        events: list[Event] = []
        began = 0.0
        while self.engine.busy:
            events += self.engine.step()
            if events and not began:
                first()
                began = time.perf_counter()
        return events, time.perf_counter() - began


def costs(model: str, tokens: int) -> dict[str, float]:
    """Microseconds of a step by part, for a stream with Ollama's parameters."""
    from quire.chat.choice import ChoiceStream

    stream, clock = Stream(model), Clock()
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1)
    stream.run(params, 32)
    engine: Any = stream.engine
    runner, scheduler = engine._runner, engine._scheduler
    for owner, method, name in (
        (scheduler, "plan", "plan"),
        (scheduler, "commit", "commit"),
        (runner._host, "apply", "slots"),
        (runner, "_run_decode_only", "batch and model"),
        (runner, "_sample", "choosing"),
        (engine, "step", "a whole step"),
    ):
        clock.around(owner, method, name)
    events, _ = stream.run(params, tokens, clock.spent.clear)
    choice = ChoiceStream(0, stream.tokenizer, params)
    clock.around(choice, "chunks", "text of a token, beside the engine")
    for event in events:
        choice.chunks(event)
    told = clock.microseconds()
    step = told.pop("a whole step")
    text = told.pop("text of a token, beside the engine")
    rest = step - sum(told.values())
    engine.close()
    return {
        **told,
        "the rest of the engine's Python": rest,
        "a whole step": step,
        "text of a token, beside the engine": text,
    }


def rates(model: str, kinds: dict[str, SamplingParams], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each kind, in turns."""
    stream = Stream(model)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    stream.run(SamplingParams(), 32)
    for _ in range(rounds):
        for name, params in kinds.items():
            found[name].append((tokens - 1) / stream.run(params, tokens)[1])
    stream.engine.close()
    return found
