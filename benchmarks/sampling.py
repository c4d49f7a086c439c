"""What choosing a token costs on the host, and what else a step costs around the model.

    python -m benchmarks.sampling [--vocabularies 49152 128256 262144] [--rows 1 16] [--threads 2] [--no-record]
    python -m benchmarks.sampling --model [FILE] [--tokens 256] [--rounds 3]

The first form times the sampler alone, row by row, on logits of two shapes: one peaked as a language model's mostly are, one
flat, where top_p keeps thousands. Beside each figure stand the rules in numpy, which are the definition, and the floor: one pass
over the logits at 20 GB/s. The second form runs the engine at one stream and tells where the time of a step goes: the model,
the sampler, and everything else in Python; then tokens per second for greedy and for sampled text, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import save
from quire.backends.native.backend import NativeBackend
from quire.runner.params import SamplingParams
from quire.runner.sampler import Masks, Sampler, Stream

FLOOR = 20e9  # bytes a second
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
    "top_k, top_p": SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05),
    "Ollama's": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1),
    "typical_p": SamplingParams(temperature=0.8, typical_p=0.9),
    "greedy, logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "top_p, logprobs": SamplingParams(temperature=0.8, top_p=0.9, logprobs=5),
    "top_k, mask": SamplingParams(temperature=0.8, top_k=40),
}
SEEN = 600  # distinct tokens of a history


def logits_of(shape: str, rows: int, vocab: int) -> np.ndarray:
    """peaked: a few tokens hold most of it. flat: shares fall off as one over the rank, as words do."""
    rng = np.random.default_rng(vocab)
    made = rng.standard_normal((rows, vocab)) * 2.5
    if shape == "peaked":
        for row in made:
            row[rng.integers(0, vocab, 30)] += 12.0
    else:
        made = -np.log1p(rng.permuted(np.tile(np.arange(vocab), (rows, 1)), axis=1)) * 1.05
    return made.astype(np.float32)


def microseconds(call: Callable[[], Any], least: float = 0.15) -> float:
    """The median of many single calls."""
    call()
    took: list[float] = []
    end = time.perf_counter() + least
    while time.perf_counter() < end or len(took) < 5:
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return 1e6 * statistics.median(took)


def measure(sampler: Sampler, params: SamplingParams, logits: np.ndarray, masked: bool) -> float:
    rows, vocab = logits.shape
    rng = np.random.default_rng(1)
    seen = rng.permutation(vocab)[:SEEN].tolist()
    streams = [Stream(params, i, vocab, prompt=seen[: SEEN // 2], output=seen[SEEN // 2 :]) for i in range(rows)]
    masks: Masks | None = dict.fromkeys(range(rows), rng.random(vocab) < 0.5) if masked else None
    at = iter(range(1 << 40))
    return microseconds(lambda: sampler.sample(logits, streams, [next(at)] * rows, masks=masks))


def alone(asked: argparse.Namespace) -> dict[str, Any]:
    """Microseconds a row, by vocabulary, shape, rows in a call and parameters."""
    backend = NativeBackend(asked.threads)
    print(f"microseconds a row; {asked.threads} threads, {backend.isa}")
    body: dict[str, Any] = {"isa": backend.isa, "threads": asked.threads, "microseconds": []}
    for vocab in asked.vocabularies:
        compiled, rules = Sampler(vocab, backend.host_sampler(vocab)), Sampler(vocab)
        floor = 1e6 * 4 * vocab / FLOOR
        for shape in ("peaked", "flat"):
            print(f"\n{vocab} tokens, {shape} (one pass over the logits: {floor:.0f})")
            heads = "".join(f"{f'{rows} rows':>10}" for rows in asked.rows)
            print(f"  {'':<18}{heads}{'numpy':>10}")
            for name, params in KINDS.items():
                found = {
                    rows: measure(compiled, params, logits_of(shape, rows, vocab), "mask" in name) / rows
                    for rows in asked.rows
                }
                slow = measure(rules, params, logits_of(shape, 1, vocab), "mask" in name)
                print(f"  {name:<18}" + "".join(f"{t:10.1f}" for t in found.values()) + f"{slow:10.1f}")
                body["microseconds"].append(
                    {"vocabulary": vocab, "shape": shape, "kind": name, "floor": floor, "rows": found, "numpy": slow}
                )
    return body


def step_costs(asked: argparse.Namespace) -> dict[str, Any]:
    """Of one stream: microseconds of a step by who takes them, and tokens per second, greedy and sampled."""
    from benchmarks.step import costs, rates

    told = costs(asked.model, asked.tokens)
    print("microseconds of a step at one stream")
    for name, value in told.items():
        print(f"  {name:<44}{value:10.1f}")
    found = rates(
        asked.model, {k: KINDS[k] for k in ("greedy", "temperature", "top_p", "Ollama's")}, asked.tokens, asked.rounds
    )
    print("tokens per second")
    for name, values in found.items():
        print(f"  {name:<18}{statistics.median(values):10.1f}   ({min(values):.1f} to {max(values):.1f})")
    return {"model": str(asked.model), "step_microseconds": told, "tokens_per_second": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 128256, 262144])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", nargs="?", const="", default=None)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true")
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    body = alone(asked) if asked.model is None else step_costs(asked)
    body["load"] = before  # what others kept busy: with more of it than there are cores, threads do not help
    if not asked.no_record:
        print(save("sampling" if asked.model is None else "sampling-step", body))


if __name__ == "__main__":
    main()
