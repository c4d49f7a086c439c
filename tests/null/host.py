"""Random workloads through the real loop, scheduler, host runner and constraints, over a program that is a hash.

Its "K and V" of a position are a hash of the prefix, and its logits a hash of all that it reads through the page table: so a
wrong row, token, position, page or length gives other logits. Its grammars allow tokens by a hash of those before. Each answer is
compared with one computed alone, a token at a time, from the prompt.

    python -m tests.null.host --runs 600 [--first 0] [--depth 0 1 2]
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

import quire.engine.constraints.enforce
import quire.runner.batch_builder
import quire.runner.host_state
import quire.runner.runner
import quire.runner.sampler
import quire.runner.slots
from quire.backends.batch import Batch
from quire.backends.ops import KV
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.engine import Engine
from quire.engine.limits import standard
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import mix_seed
from quire.engine.types import Constraint, Event, Request, Vocabulary
from quire.runner.params import SamplingParams
from quire.runner.sampler import Sampler, Stream
from quire.runner.speculate import open_proposer
from tests.null.device import Caught, expect, grow

PAGE, V, EOS = 4, 13, 12
WORDS = Vocabulary(tokens=[bytes([97 + i]) for i in range(EOS)] + [b"<end>"], special=[EOS], eos_ids=(EOS,))


@dataclass
class Parts:
    """The code under test; a planted fault replaces one of these."""

    runner: ModuleType | Any = quire.runner.runner
    host_state: ModuleType | Any = quire.runner.host_state
    slots: ModuleType | Any = quire.runner.slots
    batch_builder: ModuleType | Any = quire.runner.batch_builder
    sampler: ModuleType | Any = quire.runner.sampler
    enforce: ModuleType | Any = quire.engine.constraints.enforce


@dataclass
class Report:
    """What a batch of runs went through."""

    runs: int = 0
    steps: int = 0
    preemptions: int = 0
    hits: int = 0
    drafted: int = 0
    right: int = 0
    masked: int = 0  # tokens that were chosen under a mask
    finishes: dict[str, int] = field(default_factory=dict)


def row_of(seen: tuple[int, ...], last: int) -> list[float]:
    """The logits after reading these, of which `last` is the token. Mostly the same one follows it, so that drafts can be right."""
    h = hash(seen)
    row = [hash((h, t)) % 4001 / 500 - 4 for t in range(V)]
    if h % 4:
        row[(last * 3 + 1) % EOS] += 6.0
    return row


def allowed(text: str, tokens: tuple[int, ...]) -> list[bool]:
    """Which token a grammar lets follow these. The end is one of them now and then, and in the end."""
    h = hash((sum(text.encode()), tokens))
    row = [hash((h, t)) % 3 > 0 for t in range(EOS)] + [h % 4 == 0 or len(tokens) > 12]
    row[h % EOS] = True
    return row


class Grammar:
    """A Matcher of such a grammar."""

    def __init__(self, text: str, tokens: tuple[int, ...] = ()) -> None:
        self.text, self.tokens = text, tokens

    def deep_copy(self) -> Grammar:
        return Grammar(self.text, self.tokens)

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""

    def get_grammar_warnings(self) -> list[str]:
        return []

    def is_accepting(self) -> bool:
        return allowed(self.text, self.tokens)[EOS]

    def is_stopped(self) -> bool:
        return False

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        for token in sampled_tokens:
            if not allowed(self.text, self.tokens)[token]:
                raise Caught("a token that the grammar does not allow", token)
            self.tokens += (token,)
        return True

    def compute_bitmask(self) -> bytes:
        return np.packbits(allowed(self.text, self.tokens), bitorder="little").tobytes()


class Program:
    """Computes batches as a model does: writes where `write` says, and reads what the page table says."""

    def __init__(self, pages: int) -> None:
        self.kv: list[int | None] = [None] * (pages * PAGE)

    def run(self, batch: Batch) -> np.ndarray:
        rows: list[tuple[int, ...]] = [()] * batch.ids.size
        for b in range(batch.sequences):
            for t in range(int(batch.q_start[b]), int(batch.q_start[b + 1])):
                at, pages = int(batch.pos[t]), batch.pages[b]
                seen = tuple(self.kv[int(pages[i // PAGE]) * PAGE + i % PAGE] for i in range(at))
                own = grow(seen[-1] or 0 if seen else 1, int(batch.ids[t]))
                self.kv[int(batch.write[t])] = own
                rows[t] = (*(hash(x) for x in seen), own)
            expect(int(batch.kv_len[b]) == int(batch.pos[int(batch.q_start[b + 1]) - 1]) + 1, "a length that is none")
        return np.array([row_of(rows[int(t)], int(batch.ids[t])) for t in batch.logit_rows], np.float32).reshape(-1, V)


def naive(request: Request, context: int) -> tuple[list[int], list[Any], list[Any], str]:
    """Tokens, their logprobs, the prompt's, and why it ends: one token at a time, with nothing shared."""
    params, sampler = request.sampling, Sampler(V)
    stops = [*(() if params.ignore_eos else request.eos_ids), *params.stop_token_ids]
    stream = Stream(
        params, mix_seed(params.seed or 0, request.index), V, stop_ids=stops, prompt=request.tokens, output=[]
    )
    seen: tuple[int, ...] = ()
    prompt_logprobs: list[Any] = []
    for i, token in enumerate(request.tokens):
        if i and params.prompt_logprobs is not None:
            row = np.array(row_of(seen, request.tokens[i - 1]), np.float32)
            prompt_logprobs.append(sampler.logprob(row, token, params.prompt_logprobs))
        seen = (*seen, grow(seen[-1] if seen else 1, token))
    tokens: list[int] = []
    logprobs: list[Any] = []
    most = min(context - len(request.tokens), params.max_tokens or context)
    token = request.tokens[-1]
    while True:
        masks = None
        if request.constraint is not None:
            masks = {0: np.array(allowed(request.constraint.text, tuple(tokens)))}
        row = np.array([row_of(seen, token)], np.float32)
        (choice,) = sampler.sample(row, [stream], [len(tokens)], masks=masks)
        if choice.error is not None:
            return tokens, logprobs, prompt_logprobs, "error"
        token = choice.tokens[0]
        tokens.append(token)
        logprobs += choice.logprobs
        seen = (*seen, grow(seen[-1] if seen else 1, token))
        if token in stops and len(tokens) > params.min_tokens:
            return tokens, logprobs, prompt_logprobs, "stop"
        if len(tokens) == most:
            return tokens, logprobs, prompt_logprobs, "length"


def workload(rng: random.Random, context: int) -> list[Request]:
    """Plain, sampled, penalized and constrained requests; some share prompts."""
    base = [[rng.randrange(EOS) for _ in range(rng.randint(1, 14))] for _ in range(3)]
    requests = []
    for i in range(rng.randint(4, 18)):
        tokens = rng.choice(base) + [rng.randrange(EOS) for _ in range(rng.randint(0, 6))]
        constrained = rng.random() < 0.35
        plain = rng.random() < 0.5
        params = SamplingParams(
            temperature=0.0 if plain else 0.9,
            top_k=0 if rng.random() < 0.7 else 5,
            repetition_penalty=1.3 if rng.random() < 0.2 else 1.0,
            seed=rng.choice([1, 2, 3]),
            max_tokens=rng.choice([1, 3, 9, 16, 25]),
            min_tokens=rng.randint(0, 3) if not constrained and rng.random() < 0.3 else 0,
            ignore_eos=not constrained and rng.random() < 0.5,
            logprobs=rng.choice([None, None, 0, 2]),
            prompt_logprobs=1 if rng.random() < 0.15 else None,
        )
        made = Constraint.regex(f"g{rng.randrange(3)}") if constrained else None
        requests.append(
            Request(id=f"r{i}", tokens=tokens[: context - 2], sampling=params, eos_ids=(EOS,), constraint=made)
        )
    return requests


class Run:
    """One seed at one depth."""

    def __init__(self, seed: int, depth: int, parts: Parts, report: Report) -> None:
        self.rng = rng = random.Random(seed)
        self.report = report
        pages, slots, context = (
            rng.choice([rng.randint(6, 14), rng.randint(8, 50), 150]),
            rng.choice([1, 3, 6, 12]),
            rng.choice([24, 40]),
        )
        budget, drafts = rng.choice([rng.randint(max(4, slots + 1), 30), 160]), rng.choice([0, 0, 2])
        rows = slots + rng.choice([0, 4, 30])
        masks = parts.enforce.ConstraintMasks(V)
        for i in range(3):
            masks._kept[("regex", f"g{i}", None)] = Grammar(f"g{i}")
        self.scheduler = Scheduler(
            PrefixTree(Pool(pages), PAGE),
            slots=slots,
            budget=budget,
            context=context,
            draw=lambda: 0,
            limits=(*standard(rows, PAGE, (4, budget) if drafts else None), masks.limit),
            drafts=drafts,
        )
        self.context = self.scheduler.context
        runner = parts.runner.Runner(
            Program(pages),
            kv=KV(1, pages, PAGE, 1, 2),
            vocab_size=V,
            max_seqs=slots,
            max_tokens=budget,
            max_context=context,
            max_rows=rows,
            overlap=depth > 0 and seed % 3 == 0,
            proposer=open_proposer("ngram", max_seqs=slots, max_context=context) if drafts else None,
        )
        self.engine = Engine(self.scheduler, runner, depth, masks=masks)
        self.engine.set_vocabulary(WORDS)
        self.requests = {r.id: r for r in workload(rng, self.context)}

    def go(self) -> None:
        rng, engine, events = self.rng, self.engine, dict[str, list[Event]]()
        coming = list(self.requests.values())
        gone: set[str] = set()
        steps = 0
        try:
            while coming or engine.busy:
                for _ in range(rng.choice([0, 1, 2, 3, 4, 16])):
                    if coming:
                        engine.add(coming.pop(0))
                if rng.random() < 0.03 and (live := [i for i in self.requests if i not in gone and i in events]):
                    gone.add(name := rng.choice(live))
                    engine.abort(name)
                for event in engine.step():
                    events.setdefault(event.id, []).append(event)
                steps += 1
                expect(steps < 4000, "livelock")
        finally:
            engine.close()
        for name, request in self.requests.items():
            self.compare(request, events.get(name, []), name in gone)
        stats = engine.stats()
        self.report.runs += 1
        self.report.steps += steps
        self.report.preemptions += stats.preemptions
        self.report.hits += stats.prefix_hits
        self.report.drafted += stats.drafted_tokens
        self.report.right += stats.accepted_tokens

    def compare(self, request: Request, events: list[Event], gone: bool) -> None:
        expect(bool(events) and events[-1].finish is not None, "a request without an end", request.id)
        tokens = [t for e in events for t in e.tokens]
        logprobs = [p for e in events for p in e.logprobs]
        prompt = [p for e in events for p in e.prompt_logprobs]
        want, want_logprobs, want_prompt, finish = naive(request, self.context)
        end = events[-1]
        if gone and end.finish == "abort":
            expect(tokens == want[: len(tokens)], "other tokens, before it was let go", request.id)
            return
        expect(end.finish == finish, "another end", request.id, end.finish, end.error, finish)
        expect(tokens == want, "other tokens", request.id, tokens, want)
        expect(logprobs == want_logprobs, "other log probabilities", request.id)
        expect(prompt == want_prompt, "other log probabilities of the prompt", request.id)
        self.report.masked += len(tokens) if request.constraint is not None else 0
        self.report.finishes[str(end.finish)] = self.report.finishes.get(str(end.finish), 0) + 1


def fuzz(first: int, count: int, depths: tuple[int, ...] = (0, 1, 2), parts: Parts | None = None) -> Report:
    """Run seeds first .. first + count - 1 at each depth. The first fault found is raised, with its seed."""
    report = Report()
    for seed in range(first, first + count):
        for depth in depths:
            try:
                Run(seed, depth, parts or Parts(), report).go()
            except Exception as e:
                e.add_note(
                    f"seed {seed}, depth {depth}: python -m tests.null.host --first {seed} --runs 1 --depth {depth}"
                )
                raise
    return report


def main() -> None:
    """As many runs as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=600, help="over all depths")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print(f"no fault found: {fuzz(args.first, -(-args.runs // len(args.depth)), tuple(args.depth))}")


if __name__ == "__main__":
    main()
