"""One stream through an engine in this process, with a clock around each part of a step. Used by sampling.py.

    python -m benchmarks.step       what it costs to note a step (who rode in it, how long it took), for several batches

The last is measured by itself, with nothing to compute: `sampling.py --model` has it beside the other parts of a step.
"""

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
        (scheduler, "told", "noting who rides"),
        (engine, "_took", "noting how long it took"),
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


def noting(rows: int, steps: int = 2000, timed: bool = True) -> dict[str, float]:
    """Median microseconds of a step of so many decoding sequences that computes nothing: to note it, and to plan and commit it."""
    from quire.cache.pages import Pool
    from quire.cache.prefix_tree import PrefixTree
    from quire.engine.limits import StepTime, standard
    from quire.engine.pacing import Pace
    from quire.engine.scheduler import Scheduler
    from quire.observe.costs import Costs
    from quire.runner.plan import Plan, Result, Row

    class Nothing:
        def forward(self, plan: Plan) -> Plan:
            return plan

        def sample(self, pending: Plan, masks: Any = None) -> Any:
            self.rows = [Row(w.n, [7] if w.sample else []) for w in pending.work]
            return self

        def result(self) -> Result:
            return Result(self.rows)

        def close(self) -> None:
            pass

    scheduler = Scheduler(
        PrefixTree(Pool(rows * (steps // 16 + 4)), 16),
        slots=rows,
        budget=StepTime(4 * rows + 8, Pace(Costs())) if timed else 4 * rows + 8,
        context=1 << 20,
        draw=lambda: 1,
        limits=standard(rows + 64, 16),
    )
    engine: Any = Engine(scheduler, Nothing())
    for i in range(rows):
        engine.add(Request(id=f"chatcmpl-{i:032x}", tokens=[i + 1] * 4, sampling=SamplingParams(max_tokens=steps)))
    for _ in range(8):
        engine.step()
    clock = Clock()
    for owner, method in ((scheduler, "told"), (engine, "_took"), (scheduler, "plan"), (scheduler, "commit")):
        clock.around(owner, method, method)
    for _ in range(steps - 16):
        engine.step()
    told = clock.microseconds()
    engine.close()
    return {"note": told["told"] + told["_took"], "plan and commit": told["plan"] + told["commit"]}


def fitting(rounds: int = 2000) -> float:
    """Median microseconds to learn a step with a prompt in it and to say how much of the next one fits."""
    from quire.observe.costs import Costs, Shape, pairs

    costs, spent = Costs(), list[float]()
    for i in range(rounds):
        at, n = 64 * i % 8192, 16 << i % 5
        began = time.perf_counter()
        costs.learn(Shape(8, 4096, n, pairs(at, n)), 0.01 + 1e-3 * n + 2e-7 * pairs(at, n))
        costs.within(Shape(8, 4096), at, 512, 0.1)
        spent.append(time.perf_counter() - began)
    return 1e6 * statistics.median(spent)


def main() -> None:
    for rows in (1, 8, 64, 256):
        spent, plain = noting(rows), noting(rows, timed=False)
        print(
            f"{rows:4} sequences: {spent['note']:6.1f} us to note a step, {spent['plan and commit']:6.1f} us to plan and commit it; "
            f"without a bound in time {plain['note']:6.1f} and {plain['plan and commit']:6.1f}"
        )
    print(
        f"a step with a prompt beside streams: {fitting():.1f} us more, to learn it and to say how much of the next one fits"
    )


if __name__ == "__main__":
    main()
