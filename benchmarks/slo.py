"""What streams feel while long prompts arrive beside them, with steps bounded in time and with a fixed budget of tokens, in turns.

    python -m benchmarks.slo                                    the default model: 1 and 8 streams, prompts of 1K, 4K and 7K tokens
    python -m benchmarks.slo --model shape:llama-3.1-8b --streams 1 8 64        a GPU
    python -m benchmarks.slo --agent --model qwen2.5-coder:1.5b a request of 100 tokens that comes beside a prompt of 19,000

One engine in this process runs every mode, one after the other in each round, so that a neighbour on the machine meets all of them:

    tokens   a fixed budget of tokens (`--itl-slo 0`)        time    the bound that nobody set
    5 steps  a bound of five steps of decoding alone, as measured in that round

A gap is the time of a step in which a stream decodes. `slowed` is a prompt's time beside that of the same prompt in mode `tokens`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import files
from benchmarks.record import save
from quire.config import DEFAULT_MODEL, EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.engine import Engine
from quire.engine.types import Request
from quire.runner.params import SamplingParams

MODES = ("tokens", "time", "5 steps")
WARM = 40  # steps of decoding before a prompt comes
TAUGHT = 1500  # tokens of a prompt that is not measured


@dataclass
class Beside:
    """One prompt beside streams."""

    mode: str
    streams: int
    prompt: int
    bound_ms: float  # 0: none
    alone_ms: float  # a step of decoding alone, just before ...
    alone_p99_ms: float  # ... and the slowest of these: what the machine's other work does to any step
    p50_ms: float
    p99_ms: float
    steps: int
    prompt_seconds: float


class Bench:
    """An engine whose bound can be changed while it runs."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        drawn = model.startswith("shape:")  # random weights, of a GPU
        path = model if drawn else str(files.model(model))
        config = EngineConfig(path=path, prefix_cache=False, load_format="dummy" if drawn else "auto", **options)
        self.engine: Engine = build_engine(config, Environment.read())[0]
        self.scheduler: Any = self.engine._scheduler
        self.pace: Any = self.scheduler._budget._pace
        self.rng = random.Random(1)
        self.count = 0
        self.said: dict[str, list[float]] = {}  # when each token of a request came
        self.steps: list[tuple[float, int]] = []  # seconds, and how many tokens of streams

    def add(self, prompt: int, answer: int) -> str:
        self.count += 1
        name = f"r{self.count}"
        tokens = [self.rng.randrange(1000, 20_000) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        self.said[name] = []
        self.engine.add(Request(id=name, tokens=tokens, sampling=sampling))
        return name

    def step(self) -> None:
        events = self.engine.step()
        now = time.perf_counter()
        for event in events:
            if event.tokens:
                self.said[event.id].append(now)
        done = self.engine.steps(1)
        if done:
            self.steps.append((done[0].seconds, done[0].tokens))

    def alone(self, steps: int = WARM) -> tuple[float, float]:
        """The median of steps of decoding alone, and the slowest."""
        for _ in range(steps):
            self.step()
        found = [seconds for seconds, _ in self.steps[-steps:]]
        return statistics.median(found), max(found)

    def mode(self, name: str, alone: float) -> float:
        """Take a mode up. Gives its bound in seconds."""
        self.pace._asked = {"tokens": 0.0, "time": None, "5 steps": 5 * alone}[name]
        return {"tokens": 0.0, "time": max(0.05, 2 * alone), "5 steps": 5 * alone}[name]

    def drop(self, names: list[str]) -> None:
        for name in names:
            self.engine.abort(name)
        while self.engine.busy:
            self.engine.step()

    def beside(self, mode: str, streams: int, prompt: int) -> Beside:
        """A prompt beside so many streams."""
        names = [self.add(16, 1 << 13) for _ in range(streams)]
        while not all(self.said[name] for name in names):
            self.step()
        alone, slowest = self.alone()
        bound = self.mode(mode, alone)
        if mode != "tokens":  # a prompt that teaches, where the mode is new
            taught = self.add(TAUGHT, 1)
            began = time.perf_counter()
            while not self.said[taught] and time.perf_counter() - began < 3.0:
                self.step()
            self.engine.abort(taught)
            self.step()
        at, began, name = len(self.steps), time.perf_counter(), self.add(prompt, 1)
        while not self.said[name]:
            self.step()
        took = self.said[name][0] - began
        gaps = sorted(1e3 * seconds for seconds, _ in self.steps[at:])
        self.drop([*names, name])
        return Beside(
            mode,
            streams,
            prompt,
            1e3 * bound,
            1e3 * alone,
            1e3 * slowest,
            statistics.median(gaps),
            gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
            len(gaps),
            took,
        )

    def agent(self, mode: str, long: int, short: int, answer: int, after: float, most: float) -> dict[str, float]:
        """A short request beside a long prompt: when its first token comes, and how fast it goes on."""
        self.mode("tokens", 0.0)
        own = self.add(short, answer)
        while len(self.said[own]) < answer:
            self.step()
        alone = (self.said[own][-1] - self.said[own][0]) / (answer - 1)
        self.mode(mode, alone)
        main, began = self.add(long, 1), time.perf_counter()
        while time.perf_counter() - began < after:
            self.step()
        came, name = time.perf_counter(), self.add(short, answer)
        while len(self.said[name]) < answer and time.perf_counter() - came < most:
            self.step()
        said, computed = self.said[name], self.engine.steps(256)
        tokens = sum(
            n
            for s in computed
            for who, n in s.rows
            if who == main and s.ended >= computed[-1].ended - (time.perf_counter() - came)
        )
        self.drop([main, name])
        each = (said[-1] - said[0]) / (len(said) - 1) if len(said) > 1 else 0.0
        return {
            "first_token_seconds": said[0] - came if said else most,
            "tokens": len(said),
            "token_ms": 1e3 * each,
            "token_ms_alone": 1e3 * alone,
            "rate": alone / each if each else 0.0,
            "long_tokens_meanwhile": tokens,
            "seconds": time.perf_counter() - came,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 7168])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--agent", action="store_true", help="a short request beside a long prompt")
    parser.add_argument("--long", type=int, default=19_000)
    parser.add_argument("--short", type=int, default=100)
    parser.add_argument("--answer", type=int, default=24, help="tokens of the short one's answer")
    parser.add_argument("--after", type=float, default=8.0, help="seconds after which the short one comes")
    parser.add_argument("--most", type=float, default=60.0, help="seconds that are waited for it")
    parser.add_argument("--save", action="store_true", help="keep a record in benchmarks/results")
    asked = parser.parse_args()
    options = {"context": asked.long + 1024} if asked.agent else {}
    bench = Bench(asked.model, {"backend": asked.backend, **options})
    found: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        found.append(row)
        if asked.save:  # again after each row, so that stopping it loses nothing
            save("slo-agent" if asked.agent else "slo", {"settings": vars(asked), "rows": found})

    for _ in range(asked.rounds):
        if asked.agent:
            for mode in [mode for mode in asked.modes if mode != "5 steps"]:
                own = bench.agent(mode, asked.long, asked.short, asked.answer, asked.after, asked.most)
                keep({"mode": mode, **own})
                print(mode, {name: round(value, 2) for name, value in own.items()}, flush=True)
            continue
        for streams in asked.streams:
            for prompt in asked.prompts:
                whole = 0.0
                for mode in asked.modes:
                    one = bench.beside(mode, streams, prompt)
                    whole = one.prompt_seconds if mode == "tokens" else whole
                    slowed = one.prompt_seconds / whole if whole else 0.0
                    keep({**vars(one), "slowed": slowed})
                    print(
                        f"{streams:3} streams, prompt {prompt:5}, {mode:7}: alone {one.alone_ms:5.1f} (to {one.alone_p99_ms:5.1f}) ms, bound {one.bound_ms:6.1f} ms, "
                        f"gaps p50 {one.p50_ms:6.1f} p99 {one.p99_ms:6.1f} ms, prompt {one.prompt_seconds:6.2f} s, slowed {slowed:4.2f}",
                        flush=True,
                    )
    bench.engine.close()


if __name__ == "__main__":
    main()
