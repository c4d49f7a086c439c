"""Our own figures, measured in a fresh process: `python -m benchmarks.ours '{"path": ...}'` prints one JSON object.

The whole engine runs (scheduler, prefix tree, runner, sampler), greedy, in the calling thread. Prompts are tokens that
nothing before them shared, so nothing comes from the prefix cache, except in "sweep", where each depth continues the one
before it. A test's result is checked: the tokens asked for came, and came computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT

WARM_PROMPT, WARM_OUTPUT = 512, 4  # what llama-bench's own warm-up does, about


def measure(path: Path, threads: int, tests: list[dict[str, Any]], *, max_seqs: int = 1) -> list[dict[str, float]]:
    """Run the tests in a new process; one result for each, in order."""
    task = {"path": str(path), "threads": threads, "tests": tests, "max_seqs": max_seqs}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ours", json.dumps(task)], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"measuring {path.name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def prefill(tokens: int) -> dict[str, Any]:
    return {"kind": "prefill", "tokens": tokens}


def decode(depth: int, tokens: int) -> dict[str, Any]:
    return {"kind": "decode", "depth": depth, "tokens": tokens}


def streams(n: int, prompt: int, tokens: int) -> dict[str, Any]:
    return {"kind": "streams", "n": n, "prompt": prompt, "tokens": tokens}


def sweep(depths: list[int], tokens: int) -> dict[str, Any]:
    return {"kind": "sweep", "depths": depths, "tokens": tokens}


def longest(test: dict[str, Any]) -> int:
    """The context that a test needs."""
    if test["kind"] == "sweep":
        return max(test["depths"]) + test["tokens"] + 2
    return test["tokens"] + test.get("depth", 0) + test.get("prompt", 0) + 2


class Bench:
    """One engine and the tests that run on it, one after the other."""

    def __init__(self, path: str, threads: int, context: int, max_seqs: int):
        from quire.config import EngineConfig, Environment
        from quire.engine.construction.build import build_engine

        # Without a bound on the time of steps, which the peer has none of either: whole prompts first, then tokens of all.
        config = EngineConfig(
            path=path, backend="native", threads=threads, context=context, max_seqs=max_seqs, itl_slo=0.0
        )
        self.engine, self.info = build_engine(config, Environment.read())
        self._serial = 0

    def prompt(self, n: int) -> list[int]:
        """Tokens that no earlier prompt began with."""
        self._serial += 1
        start, stride = self._serial * 7919, 104729 + 2 * self._serial
        return [(start + i * stride) % self.info.vocab_size for i in range(n)]

    def run(self, prompts: list[list[int]], output: int, cached: bool = False) -> tuple[float, float, int]:
        """Decode all prompts together: (seconds until all have a token, seconds after that, tokens after that)."""
        from quire.engine.types import Request
        from quire.runner.params import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        for i, tokens in enumerate(prompts):
            self.engine.add(Request(id=f"{self._serial}-{i}", tokens=tokens, sampling=sampling))
        begun, all_have, late, done = time.perf_counter(), 0.0, 0, 0
        first: set[str] = set()
        while self.engine.busy:
            events = self.engine.step()
            if all_have:
                late += sum(len(e.tokens) for e in events)
            else:
                first |= {e.id for e in events if e.tokens}
                if len(first) == len(prompts):
                    all_have = time.perf_counter()
            for event in events:
                if event.finish is not None:
                    done += 1
                    self._check(event, output, cached)
        ended = time.perf_counter()
        if done != len(prompts):
            raise RuntimeError(f"{done} of {len(prompts)} requests finished")
        return all_have - begun, ended - all_have, late

    def _check(self, event: Any, output: int, cached: bool) -> None:
        r = event.receipt
        if event.finish != "length" or r is None or r.output_tokens != output:
            raise RuntimeError(f"a request ended with {event.finish} ({event.error}), not with {output} tokens")
        if r.cached_tokens and not cached:
            raise RuntimeError(f"{r.cached_tokens} tokens came from the prefix cache: the figure would be wrong")

    def warm(self) -> None:
        self.run([self.prompt(WARM_PROMPT)], WARM_OUTPUT)
        while self.engine.idle():  # as a server does, and llama.cpp with all of its memory before it begins
            pass

    def test(self, test: dict[str, Any]) -> dict[str, float]:
        if test["kind"] == "prefill":
            seconds, _, _ = self.run([self.prompt(test["tokens"])], 1)
            return {"tokens/s": test["tokens"] / seconds}
        if test["kind"] == "decode":
            _, seconds, n = self.run([self.prompt(max(1, test["depth"]))], test["tokens"] + 1)
            return {"tokens/s": n / seconds}
        if test["kind"] == "streams":
            _, seconds, n = self.run([self.prompt(test["prompt"]) for _ in range(test["n"])], test["tokens"])
            return {"tokens/s": n / seconds}
        if test["kind"] == "sweep":
            whole = self.prompt(max(test["depths"]))
            found = {}
            for depth in test["depths"]:
                _, seconds, n = self.run([whole[: max(1, depth)]], test["tokens"] + 1, cached=True)
                found[str(depth)] = n / seconds
            return found
        raise ValueError(f"there is no test {test['kind']!r}")


def main() -> None:
    task = json.loads(sys.argv[1])
    context = max(WARM_PROMPT + WARM_OUTPUT + 2, *(longest(t) for t in task["tests"]))
    bench = Bench(task["path"], task["threads"], context, task["max_seqs"])
    bench.warm()
    print(json.dumps([bench.test(t) for t in task["tests"]]))
    bench.engine.close()


if __name__ == "__main__":
    main()
