"""The same request gives bitwise the same tokens and logprobs, whatever happens around it.

One set of requests, greedy and sampled, is run alone on a fresh engine; then again in batches, with other chunk sizes,
from the prefix tree, through preemptions, with another thread count, overlapped, and on every kernel set this CPU has.
Logprobs are compared as the float64 values they are, with no tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams

TEXT = (
    "Quire is a set of pages bound together. A reader opens it, follows the lines from left to right, and turns the "
    "page. What was written stays written; the same words are there for whoever comes next. "
)
TOKENS = 16  # of each answer: it always begins a page
Outcome = tuple[list[int], list[tuple[int, float, tuple[tuple[int, float], ...]]], str | None]


@pytest.fixture(scope="module")
def requests(model_path: Path) -> list[Request]:
    """Twelve requests of different lengths and parameters; several share long prefixes."""
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.weights.gguf.file import GGUF

    with GGUF.open(model_path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    made = []
    for i in range(12):
        text = TEXT * (1 + i % 4) + ("Then" if i % 2 else "And so", " it began", ". Number one:")[i % 3]
        sampling = SamplingParams(
            temperature=0.0 if i % 3 == 0 else 0.9,
            top_p=0.95 if i % 3 == 1 else 1.0,
            top_k=40 if i % 3 == 2 else 0,
            repetition_penalty=1.1 if i % 4 == 3 else 1.0,
            frequency_penalty=0.5 if i % 4 == 2 else 0.0,
            seed=1000 + i,
            max_tokens=TOKENS,
            ignore_eos=True,
            logprobs=3,
        )
        tokens = tokenizer.encode(text, add_special=False, parse_special=False)
        made.append(Request(id=f"r{i}", tokens=tokens, sampling=sampling))
    return made


class Bench:
    """One engine, driven step by step."""

    def __init__(self, path: Path, **changes):
        settings = {"threads": 2, "context": 1024, "kv_memory": 64 << 20, "max_seqs": 16, **changes}
        self.engine, self.info = build_engine(EngineConfig(path=str(path), **settings), Environment.read())

    def run(self, requests: list[Request]) -> dict[str, Outcome]:
        """All of them at once."""
        events: dict[str, list[Event]] = {r.id: [] for r in requests}
        for request in requests:
            for event in self.engine.add(request) or []:
                events[event.id].append(event)
        for _ in range(100_000):
            if not self.engine.busy:
                break
            for event in self.engine.step():
                events[event.id].append(event)
        self.receipts = {id: news[-1].receipt for id, news in events.items()}
        return {id: outcome(news) for id, news in events.items()}

    def close(self) -> None:
        self.engine.close()


def outcome(events: list[Event]) -> Outcome:
    assert events and events[-1].finish in ("stop", "length"), events[-1:]
    tokens = [t for e in events for t in e.tokens]
    logprobs = [(p.token, p.logprob, tuple(map(tuple, p.top))) for e in events for p in e.logprobs]
    return tokens, logprobs, events[-1].finish


@pytest.fixture(scope="module")
def alone(model_path: Path, requests: list[Request]) -> dict[str, Outcome]:
    """Each request on its own, cold: the answer that everything else must repeat."""
    bench = Bench(model_path, prefix_cache=False)
    results = {}
    for request in requests:
        results |= bench.run([request])
    bench.close()
    assert len({tuple(tokens) for tokens, _, _ in results.values()}) > 6, "the requests should differ"
    assert all(len(tokens) == len(logprobs) == TOKENS for tokens, logprobs, _ in results.values())
    return results


def crossed() -> Iterator[Any]:
    """Every pair of batch, chunk and threads; the other half of the combinations is for who has the time."""
    for (i, batch), (j, chunk), threads in product(enumerate((1, 2, 12)), enumerate((16, 64, 512)), (1, 2)):
        yield pytest.param(batch, chunk, threads, marks=[pytest.mark.large] if (i + j + threads) % 2 else [])


@pytest.mark.parametrize(("batch", "chunk", "threads"), crossed())
def test_batch_and_chunk_and_threads(model_path, requests, alone, batch, chunk, threads):
    bench = Bench(model_path, max_batch_tokens=chunk, max_seqs=16, threads=threads, prefix_cache=False)
    for i in range(0, len(requests), batch):
        for id, got in bench.run(requests[i : i + batch]).items():
            assert got == alone[id], f"{id} in a batch of {batch}, chunk {chunk}, {threads} threads"
    bench.close()


@pytest.mark.parametrize("chunk", [32, 512])
def test_prefix_hits(model_path, requests, alone, chunk):
    """The second time everything comes from the tree, and the tree is full of other requests' pages."""
    bench = Bench(model_path, max_batch_tokens=chunk)
    assert bench.run(requests) == alone
    cold = {id: receipt.cached_tokens for id, receipt in bench.receipts.items()}
    assert bench.run(list(reversed(requests))) == alone
    warm = {id: receipt.cached_tokens for id, receipt in bench.receipts.items()}
    assert sum(warm.values()) > sum(cold.values())
    assert all(warm[r.id] >= (len(r.tokens) - 1) // 16 * 16 for r in requests)
    bench.close()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption(model_path, requests, alone, prefix_cache):
    """A pool too small for the batch: sequences are put off and resumed, and nobody can tell."""
    pages = 22 if prefix_cache else 28
    sizes = {"kv_memory": pages * 16 * 23040, "context": 320, "max_batch_tokens": 64, "itl_slo": 0.0}
    bench = Bench(
        model_path, prefix_cache=prefix_cache, **sizes
    )  # without a bound on time, so that it goes the same way each time
    assert bench.run(requests) == alone
    assert bench.engine.stats().preemptions > 0
    bench.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_overlap_depth(model_path, requests, alone, depth):
    bench = Bench(model_path, depth=depth, max_batch_tokens=64)
    assert bench.run(requests) == alone
    assert bench.run(requests) == alone
    bench.close()


@pytest.fixture(scope="module")
def long_requests(model_path: Path) -> list[Request]:
    """Requests of 560 to 740 tokens: pasts of several chunks. Two begin with the same 540 tokens."""
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.weights.gguf.file import GGUF

    with GGUF.open(model_path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    tokens = tokenizer.encode(TEXT * 30, add_special=False, parse_special=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    starts = [0, 7, 0]
    return [
        Request(id=f"long{i}", tokens=tokens[s : s + 540] + tokens[40 + i : 60 + i + 90 * i], sampling=greedy)
        for i, s in enumerate(starts)
    ]


def test_long_pasts(model_path, long_requests):
    long_pasts_agree(model_path, long_requests, "f16")


def long_pasts_agree(model_path: Path, long_requests: list[Request], dtype: str) -> None:
    """Long prompts are cut into chunks by several threads, read once for sequences that share pages, or come from the tree: nobody
    can tell."""
    settings = {"context": 1024, "kv_memory": 128 << 20, "kv_dtype": dtype}
    bench = Bench(model_path, prefix_cache=False, threads=1, **settings)
    alone = {}
    for request in long_requests:
        alone |= bench.run([request])
    bench.close()
    for threads, chunk, cached in ((2, 512, True), (3, 200, False)):
        bench = Bench(model_path, threads=threads, max_batch_tokens=chunk, prefix_cache=cached, **settings)
        assert bench.run(long_requests) == alone, f"{threads} threads, steps of {chunk}"
        if cached:
            assert bench.run(list(reversed(long_requests))) == alone
            assert all(receipt.cached_tokens >= 512 for receipt in bench.receipts.values())
        bench.close()


def test_int8_kv_is_said_and_counted(model_path):
    f16, int8 = (Bench(model_path, kv_dtype=dtype, kv_memory=32 << 20) for dtype in ("f16", "int8"))
    assert int8.info.pages == (32 << 20) // (16 * 12240) and f16.info.pages == (32 << 20) // (16 * 23040)
    assert "KV cache: int8, 12240 bytes per token (f16: 23040, int16: 23760)" in int8.info.decisions
    f16.close()
    int8.close()


def test_every_kernel_set(model_path, requests, alone):
    """scalar, AVX2, AVX-512 or NEON: the same bits. (A few requests stand for all; scalar is slow, and has the beginning of one.)"""
    from quire.backends.native import available

    chosen = [requests[0], requests[4], requests[5]]
    for isa in available():
        bench = Bench(model_path, isa=isa)
        few = [short(min(chosen, key=lambda r: len(r.tokens)), 4)] if isa == "scalar" else chosen
        for id, (tokens, logprobs, _) in bench.run(few).items():
            want = alone[id]
            assert (tokens, logprobs) == (want[0][: len(tokens)], want[1][: len(tokens)]), f"{id} on {isa}"
            assert len(tokens) == (4 if isa == "scalar" else TOKENS)
        bench.close()


def short(request: Request, n: int) -> Request:
    """The first tokens of its answer."""
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=n))
